"""Write a model card: what an encoder is, learned from and scores, by the run's own files; limits; how to load it."""

import re
from pathlib import Path
from typing import Any

import cocor
from cocor.config.options import Config
from cocor.config.parse import read_yaml, shown
from cocor.eval.export.rebuild import timm_knows, timm_lines
from cocor.metrics_file import Record, read_run
from cocor.run_dir import CHECKPOINTS, CONFIG, LOG, METRICS, step_of
from cocor.weights.load import Encoder

_IMAGES = re.compile(r"\d[\d,]* images? (?:in \d|without labels).*")  # how a run counts its images in log.txt


def model_card(encoder: Encoder) -> str:
    """Write the card of ``encoder`` in Markdown, with its training if it is of a run; the license is the user's."""
    features = int(getattr(encoder.backbone, "num_features", 0))
    parameters = sum(p.numel() for p in encoder.backbone.parameters())
    run = _run_of(encoder)
    records = [] if run is None else _records(encoder, run)
    return f"""---
library_name: timm
tags: [image-feature-extraction, self-supervised, cocor]
# license: to be filled in by whoever publishes the weights
---
# {encoder.name}

A {encoder.architecture} image encoder ({parameters / 1e6:.1f} M parameters, {features} features, {encoder.stem} stem),
exported by cocor {cocor.__version__} from weights in the layout of {encoder.origin}.

## How to load it

{_loading(encoder)}
Input: {"RGB" if encoder.channels == 3 else "grey"} images of {encoder.image_size} x {encoder.image_size} pixels in \
[0, 1], normalised with mean {shown(encoder.mean)} and standard
deviation {shown(encoder.std)}. Weights: SHA-256 over names and values `{encoder.digest}`.

## Training

{_UNKNOWN if run is None else _training(run, records)}
## Evaluation

{_evaluation(records)}
## Limits

- The features are those of a backbone without a head; a task needs a probe or fine-tuning.
- They reflect what the training images show, and their biases. Other kinds of images and other sizes are not tested.
- The accuracies above come from one run with one seed, and its held-out images may have chosen its checkpoint.

## License

To be filled in by whoever publishes the weights. The training images' own terms may limit it.
"""


_UNKNOWN = "Not known here: the weights do not tell data, labels, method, seed and epochs. Fill them in.\n"


def _loading(encoder: Encoder) -> str:
    if timm_knows(encoder):
        return f"""In this folder; from the Hub `timm.create_model("hf-hub:OWNER/NAME", pretrained=True)`:

```python
{timm_lines(encoder, "model.safetensors")}```
"""
    return f"""timm cannot build the small stem of this ResNet by name, so neither `hf-hub:` nor `local-dir:` loads it.
In this folder:

```python
{timm_lines(encoder, "model.safetensors")}```

The same by cocor: `cocor.load_encoder("model.safetensors").backbone`.
"""


def _run_of(encoder: Encoder) -> Path | None:
    """Return the folder of the run that the encoder's file lies in, or None."""
    places = () if encoder.file is None else encoder.file.resolve().parents[:2]
    files = (CONFIG, LOG, METRICS)
    return next((folder for folder in places if all((folder / name).is_file() for name in files)), None)


def _training(run: Path, records: list[Record]) -> str:
    config = read_yaml(Config, run / CONFIG)
    counts = _IMAGES.findall((run / LOG).read_text(encoding="utf-8", errors="replace"))
    trained = max((r["epoch"] + (r["kind"] == "train") for r in records if "epoch" in r), default="?")
    data, start = (Path(str(config.get(key) or "")).name for key in ("data", "init"))  # a card tells no machine's paths
    rows = {
        "data": f"{data or 'synthetic'}: {counts[-1] if counts else 'number of images not known'}",
        "labels": _labels(config),
        "method": _method(config),
        "image size, batch size": f"{config.get('image_size')} pixels, {config.get('batch_size')} images",
        "epochs": f"{trained} of {config.get('epochs')}",
        "seed": config.get("seed"),
        "started from": start or "random weights",
    }
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def _labels(config: dict[str, Any]) -> str:
    if config.get("method") == "supcon":
        return "of all images, by the method"
    if config.get("consistency") == "none" or config.get("mmnn") != "learned":
        return "none"
    split = config.get("label_split")
    return f"{Path(split).name if split else format(config.get('label_fraction', 0), '.2%')}, by the MMNN alone"


def _method(config: dict[str, Any]) -> str:
    parts = [config.get("method"), *({config.get("auxiliary")} - {None, "none"})]
    if config.get("consistency") != "none":
        keys = ("consistency", "consistency_weight", "consistency_beta")
        loss = ", ".join(f"{key.removeprefix('consistency_')} {config.get(key)}" for key in keys)
        parts.append(f"CoCor ({loss}, {config.get('mmnn')} targets)")
    return " + ".join(map(str, parts))


def _records(encoder: Encoder, run: Path) -> list[Record]:
    """Return what the run measured until the step of the encoder's file; nothing if that is not known."""
    file = encoder.file
    of_checkpoint = file is not None and file.parent.name == CHECKPOINTS
    last = step_of(file) if file is not None and of_checkpoint else None
    return [record for record in read_run(run) if last is None or record["step"] <= last]


def _evaluation(records: list[Record]) -> str:
    latest = {record["kind"]: record for record in records if record["kind"] in ("knn", "probe")}
    if not latest:
        return "Not known; `cocor-eval` measures accuracies.\n"
    names = {"knn": "k-NN", "probe": "linear probe, penalty not chosen"}
    rows = "".join(
        f"| {names[kind]}{_details(record)} | {record['epoch']} | {record['accuracy']:.1%} |\n"
        for kind, record in latest.items()
    )
    return (
        f"Accuracies on held-out images of the training data:\n\n| measure | epochs | accuracy |\n|---|--:|--:|\n{rows}"
    )


def _details(record: Record) -> str:
    known = [f"{name} {record[key]}" for key, name in (("k", "k ="), ("queries", "images:")) if key in record]
    return f" ({', '.join(known)})" if known else ""
