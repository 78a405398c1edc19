"""Time the linear probe's solver, alone and against scikit-learn on the same features and the same objective.

    python benchmarks/probe.py --images 50000 --dimensions 2048 --classes 100

Features are drawn around overlapping class centres and pass a ReLU, as those of a ResNet do. Timed are all 45
penalties, each warm-started from the one before as in ``cocor-eval linear``, with the refit; one penalty from zero;
and, unless ``--no-sklearn``, that penalty by scikit-learn on the CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cocor.distributed.launch import command
from cocor.eval.features import Features
from cocor.eval.peer import against_sklearn
from cocor.eval.probes.linear import PENALTIES, linear_probe
from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders.arguments import Parser, above_zero, positive, writable
from loaders.cpus import available_cores
from loaders.errors import UserError
from loaders.files import write_text


def draw(images: int, dimensions: int, classes: int, seed: int) -> Features:
    """Non-negative, sparse, correlated features (N, D) that a linear probe tells apart fairly well."""
    shared = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, dimensions, generator=shared)
    mixing = torch.randn(64, dimensions, generator=shared) / 8
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    common = torch.randn(images, 64, generator=generator) @ mixing
    values = 0.12 * centres[labels] + common + 0.7 * torch.randn(images, dimensions, generator=generator)
    return Features(values.relu_(), labels)


def run(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=positive, default=50_000)
    parser.add_argument("--dimensions", type=positive, default=2048)
    parser.add_argument("--classes", type=positive, default=100)
    parser.add_argument("--penalty", type=above_zero, default=1.0, help="of the single fit")
    parser.add_argument("--no-sklearn", action="store_true")
    parser.add_argument("--json", type=writable, help="also write the numbers here")
    options = parser.parse_all(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = options.images, options.dimensions, options.classes
    print(f"{size[0]:,} x {size[1]:,} features, {size[2]} classes, {_machine(device)}")
    train = draw(*size, seed=1)
    val, test = (draw(max(2000, options.images // 10), *size[1:], seed=seed) for seed in (2, 3))
    SoftmaxRegression(val.values.to(device), val.labels, size[2]).fit(1.0, iterations=2)  # loads the kernels
    began = time.perf_counter()
    found = linear_probe(train, val, test, device=device)
    seconds = time.perf_counter() - began
    iterations = sum(trial.iterations for trial in found.trials)
    converged = sum(trial.converged for trial in found.trials)
    count = len(PENALTIES)
    print(f"{count} penalties and refit: {seconds:.1f} s, {iterations:,} iterations, {converged} of {count} converged")
    print(f"test top-1 {found.top1:.2%} at penalty {found.penalty:.3g}")
    numbers: dict[str, object] = {"size": size, "machine": _machine(device), "grid_seconds": seconds}
    numbers |= {"iterations": iterations, "converged": converged, "top1": found.top1, "penalty": found.penalty}
    _keep(numbers, options.json)  # now, as scikit-learn may take longer than anyone waits
    if options.no_sklearn:
        return
    try:
        peer = against_sklearn(train, options.penalty, device)
    except UserError as error:
        print(f"not compared: {error}")
        return
    print(
        f"one fit at penalty {options.penalty:g}: {peer['seconds']:.2f} s here, {peer['seconds_sklearn']:.1f} s "
        f"scikit-learn; objectives differ by {peer['relative_difference']:.1e} of their value"
    )
    _keep(numbers | {"one_fit": peer}, options.json)


def _keep(numbers: dict[str, object], path: Path | None) -> None:
    if path is not None:
        write_text(path, json.dumps(numbers, indent=1) + "\n")


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {available_cores()} CPU cores"
    return f"{torch.get_num_threads()} CPU threads"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 2 for a user's mistake."""
    return command("probe.py", lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
