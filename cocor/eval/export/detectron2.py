"""Write ResNets for Detectron2: numpy arrays by its names, matched by shapes as well."""

import pickle
import re
from pathlib import Path

import numpy as np

from cocor.eval.export.rebuild import weights_of
from cocor.weights.load import Encoder
from loaders.errors import UserError
from loaders.files import replacing

# Detectron2 builds wide ResNets and ResNeXts with WIDTH_PER_GROUP and NUM_GROUPS; none with other stems, norms or
# attention.
_BUILDS = re.compile(r"(resnet\d+|wide_resnet\d+_2|resnext\d+_\d+x\d+d)(\..+)?")


def check(encoder: Encoder) -> None:
    """Raise UserError if Detectron2 has no such model."""
    if encoder.channels != 3:
        raise UserError("--to detectron2: its models take colour images; use --to timm or --to hub")
    bottleneck = "layer1.0.conv3.weight" in weights_of(encoder)
    if not bottleneck or encoder.stem != "imagenet" or not _BUILDS.fullmatch(encoder.architecture):
        raise UserError("--to detectron2: its ResNets are bottleneck ones with the usual stem, such as resnet50; "
                        f"this is {encoder.architecture} with the {encoder.stem} stem")  # fmt: skip


def detectron2_name(name: str) -> str:
    """Derive Detectron2's name of a ResNet weight: layer1 -> res2, bn2 -> conv2.norm."""
    if not name.startswith("layer"):
        name = f"stem.{name}"
    for number in (1, 2, 3, 4):
        name = name.replace(f"layer{number}.", f"res{number + 1}.")
    for number in (1, 2, 3):
        name = name.replace(f"bn{number}.", f"conv{number}.norm.")
    return name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")


def write(encoder: Encoder, output: Path) -> None:
    """Write Detectron2's pickle, and compare its weights and, if Detectron2 is installed, their names."""
    weights = {name: v.numpy() for name, v in weights_of(encoder).items() if not name.endswith("num_batches_tracked")}
    arrays = {detectron2_name(name): value for name, value in weights.items()}
    content = {"model": arrays, "__author__": "cocor", "matching_heuristics": True}
    with replacing(output) as temporary:
        temporary.write_bytes(pickle.dumps(content, protocol=4))
    found = pickle.loads(output.read_bytes())["model"]  # just written here
    equal = all(np.array_equal(found[detectron2_name(name)], value) for name, value in weights.items())
    if len(found) != len(weights) or not equal:
        raise RuntimeError(f"{output} does not hold the encoder's weights")
    names = detectron2_resnet_names(encoder.architecture)
    if names is not None and set(found) != names:
        raise RuntimeError(f"{output} differs from Detectron2's model in {sorted(set(found) ^ names)[:3]}")


def detectron2_resnet_names(architecture: str) -> set[str] | None:
    """List the weights of Detectron2's ResNet; None if it is not installed."""
    try:
        from detectron2.config import get_cfg
        from detectron2.modeling.backbone import build_resnet_backbone
    except ImportError:
        return None
    config = get_cfg()
    config.MODEL.RESNETS.DEPTH = int(re.findall(r"resne[tx]t?(\d+)", architecture)[0])
    config.MODEL.RESNETS.NORM = "BN"
    config.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    state = build_resnet_backbone(config, None).state_dict()
    return {name for name in state if not name.endswith("num_batches_tracked")}


def lines(encoder: Encoder, output: Path) -> str:
    """Return the shell line that fine-tunes from the file in Detectron2."""
    return f"tools/train_net.py --config-file configs/detectron2/voc_R50_C4_24k.yaml MODEL.WEIGHTS {output}\n"
