"""Write the reports of ``cocor-eval``: to the terminal, as JSON, as a picture."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cocor.eval import options
from cocor.eval.datasets.splits import Splits
from cocor.eval.features import Features, summary
from cocor.eval.figures import drawn
from cocor.eval.weights.load import Encoder
from loaders.files import write_text


def title(encoder: Encoder, splits: Splits) -> str:
    """Return the title of a picture."""
    return f"{encoder.name} on {splits.protocol.title}"


def about(encoder: Encoder, splits: Splits, **features: Features) -> dict[str, Any]:
    """Begin a report: weights, data, and a summary of their features by split."""
    found = {split: summary(values) for split, values in features.items()}
    report = {"encoder": encoder.describe(), "weights_digest": encoder.digest, "protocol": asdict(splits.protocol)}
    return report | {"notes": splits.notes, "features": found}


def folder(args: argparse.Namespace, encoder: Encoder) -> Path:
    """Return ``--output``, or ``eval/ENCODER/DATA``."""
    if args.output is not None:
        return Path(args.output)
    return Path("eval") / encoder.name.replace("/", "-").replace(":", "-") / options.data_name(args)


def finish(
    args: argparse.Namespace, encoder: Encoder, name: str, lines: Sequence[str], report: dict[str, Any],
    draw: Callable[..., None] | None = None, *arguments: Any,
) -> None:  # fmt: skip
    """Save NAME.json, print ``lines``, and make ``draw(NAME.png, *arguments)``."""
    path = folder(args, encoder) / f"{name}.json"
    write_text(path, json.dumps(report, indent=1, default=str) + "\n")
    for note in report.get("notes", ()):
        print(f"note: {note}")
    tested = report.get("features", {}).get("test")
    if tested:
        norm, spread = tested["mean_norm"], tested["spread"]
        print(f"features: {tested['dimensions']} dimensions, mean norm {norm:.3g}, spread {spread:.3g}")
    picture = [] if draw is None else [drawn(path.with_suffix(".png"), draw, *arguments)]
    print("\n".join([*lines, *picture, f"numbers: {path}"]), flush=True)


def finish_several(
    args: argparse.Namespace, encoder: Encoder, name: str, found: Sequence[Any], draw: Callable[..., None]
) -> None:
    """Finish as :func:`finish` does, with one result of each encoder."""
    report = {"result": [asdict(one) for one in found]}
    finish(args, encoder, name, [line for one in found for line in one.lines()], report, draw, found)
