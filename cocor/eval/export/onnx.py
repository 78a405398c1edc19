"""Write ONNX: normalised images (B, C, H, W) float32 -> features (B, D), for any batch B."""

import importlib.util
import json
from pathlib import Path

import torch

from cocor.eval.export.rebuild import check_close, preprocessing, sample_images
from cocor.weights.load import Encoder
from loaders.errors import UserError
from loaders.files import replacing

_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


def check(encoder: Encoder) -> None:
    """Raise UserError if a package is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx: needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def write(encoder: Encoder, output: Path) -> None:
    """Write the file, and compare its features in ONNX Runtime with PyTorch's.

    Images have the size that the encoder was trained on. Its metadata holds this, the normalisation and the weights'
    digest.
    """
    import onnxruntime

    side = encoder.image_size
    sample, batch = (sample_images(encoder, 2, side),), ({0: torch.export.Dim("batch")},)
    try:
        program = torch.onnx.export(encoder.backbone.cpu(), sample, dynamo=True, dynamic_shapes=batch, verbose=False,
                                    input_names=["images"], output_names=["features"])  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        raise UserError(
            f"--to onnx: PyTorch cannot export {encoder.architecture}: {str(error).splitlines()[0]}"
        ) from None
    assert program is not None
    about = {"architecture": encoder.architecture, "image_size": side, "digest": encoder.digest}
    about |= preprocessing(encoder)
    program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
    with replacing(output) as temporary:
        program.save(temporary)
        session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
        check_close(encoder, lambda images: session.run(None, {"images": images.numpy()})[0], output)


def lines(encoder: Encoder, output: Path) -> str:
    """Return Python lines that make ``features`` of the array ``images``."""
    return ("import json, onnxruntime\n"
            f"session = onnxruntime.InferenceSession({str(output)!r})\n"
            "about = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}  # mean, std\n"
            f'features, = session.run(None, {{"images": images}})  # float32 (B, {encoder.channels}, '
            f"{encoder.image_size}, {encoder.image_size}), normalised\n")  # fmt: skip
