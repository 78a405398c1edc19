"""Time the linear probe's solver, alone and against scikit-learn's.

    python benchmarks/probe.py --images 50000 --dimensions 2048 --classes 100

Features are drawn around overlapping class centres and pass a ReLU. Timed are all 45 penalties with the refit, as in
``cocor-eval linear``; one penalty from zero; and, unless ``--no-sklearn``, that penalty by scikit-learn on the CPU.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import describe_machine, machine_line, script, write_json
from cocor.eval.features import Features
from cocor.eval.probes.linear import PENALTIES, linear_probe
from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders.arguments import Parser, above_zero, positive, whole, writable
from loaders.progress import patience

_ITERATIONS = 5000  # at most, of either solver


def draw(images: int, dimensions: int, classes: int, seed: int) -> Features:
    """Draw sparse, correlated features (N, D) that a linear probe tells apart."""
    shared = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, dimensions, generator=shared)
    mixing = torch.randn(64, dimensions, generator=shared) / 8
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    common = torch.randn(images, 64, generator=generator) @ mixing
    values = 0.12 * centres[labels] + common + 0.7 * torch.randn(images, dimensions, generator=generator)
    return Features(values.relu_(), labels)


def against_sklearn(data: Features, penalty: float, device: torch.device) -> dict[str, float]:
    """Solve one objective on ``data`` here and by scikit-learn, from zero, in float64."""
    from sklearn.linear_model import LogisticRegression

    values = data.values.double()
    values = (values / values.square().mean().sqrt()).to(device)
    classes, labels = data.labels.unique(return_inverse=True)
    fit, seconds = _timed(lambda: SoftmaxRegression(values, labels, len(classes)).fit(penalty, iterations=_ITERATIONS))
    there = LogisticRegression(C=1 / (2 * penalty), fit_intercept=False, max_iter=_ITERATIONS, tol=1e-8)
    inputs = torch.cat([values, torch.ones_like(values[:, :1])], dim=1).cpu().numpy()
    with patience("scikit-learn fits on the CPU"):
        _, their_seconds = _timed(lambda: there.fit(inputs, labels.numpy()))
    weights = torch.from_numpy(there.coef_.T.copy()).to(device)
    theirs = SoftmaxRegression(values, labels, len(classes)).objective(weights, penalty)
    return {
        "penalty": penalty, "objective": fit.loss, "objective_sklearn": theirs, "seconds": seconds,
        "difference_per_image": (fit.loss - theirs) / len(data), "relative_difference": (fit.loss - theirs) / theirs,
        "seconds_sklearn": their_seconds, "iterations": fit.iterations, "iterations_sklearn": int(max(there.n_iter_)),
    }  # fmt: skip


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line (default: this process's)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=positive, default=50_000)
    parser.add_argument("--dimensions", type=positive, default=2048)
    # of two classes scikit-learn penalises only the difference of their weights
    parser.add_argument("--classes", type=whole(3), default=100)
    parser.add_argument("--penalty", type=above_zero, default=1.0, help="of the single fit")
    parser.add_argument("--no-sklearn", action="store_true")
    parser.add_argument("--json", type=writable, help="also write the numbers here")
    return parser.parse_all(argv)


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = machine_line(describe_machine())
    size = options.images, options.dimensions, options.classes
    print(f"{size[0]:,} x {size[1]:,} features, {size[2]} classes, {machine}")
    train = draw(*size, seed=1)
    val, test = (draw(max(2000, options.images // 10), *size[1:], seed=seed) for seed in (2, 3))
    SoftmaxRegression(val.values.to(device), val.labels, size[2]).fit(1.0, iterations=2)  # loads the kernels
    found, seconds = _timed(lambda: linear_probe(train, val, test, device=device))
    iterations = sum(trial.iterations for trial in found.trials)
    converged = sum(trial.converged for trial in found.trials)
    count = len(PENALTIES)
    print(f"{count} penalties and refit: {seconds:.1f} s, {iterations:,} iterations, {converged} of {count} converged")
    print(f"test top-1 {found.top1:.2%} at penalty {found.penalty:.3g}")
    numbers = {
        "size": size, "machine": machine, "grid_seconds": seconds, "iterations": iterations, "converged": converged,
        "top1": found.top1, "penalty": found.penalty,
    }  # fmt: skip
    if options.json:
        write_json(options.json, numbers)  # now, as scikit-learn may take longer than anyone waits
    if options.no_sklearn:
        return
    try:
        peer = against_sklearn(train, options.penalty, device)
    except ImportError:
        print("not compared: scikit-learn is not installed (pip install scikit-learn)")
        return
    print(
        f"one fit at penalty {options.penalty:g}: {peer['seconds']:.2f} s here, {peer['seconds_sklearn']:.1f} s "
        f"scikit-learn; objectives differ by {peer['relative_difference']:.1e} of their value"
    )
    if options.json:
        write_json(options.json, numbers | {"one_fit": peer})


if __name__ == "__main__":
    script("probe.py", main)
