"""Share the cores of a CPU among the parts of a training step.

Threads that share an operation wait for each other thousands of times a step. A small network gains little by them, and
beside other programs all wait for the one that has lost its core. So the contrastive part and the lengths of composites
run in threads of their own first, which wait for each other once a step. Only cores that this leaves share operations,
and only large ones. The step computes the same numbers as with as many threads an operation and none of its own.
"""

import copy
import os
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cocor.methods.base import Method
from cocor.step.step import TrainingStep
from loaders.cpus import available_cores

_MOST_PIXELS = 1 << 20  # of a batch whose passes fit into memory side by side: 2 KB of activations each in a ResNet-50
_PIXELS_A_THREAD = 1 << 16  # of a batch, below which threads wait for each other longer than they work


def use_cores(step: TrainingStep, in_threads: bool = True) -> None:
    """Let ``step`` use all cores of this process, or as many as ``OMP_NUM_THREADS``, until its streams are closed.

    Without ``in_threads``, no part gets a thread of its own.
    """
    given = torch.get_num_threads()
    step.streams.on_close.callback(torch.set_num_threads, given)
    cores = min(given, available_cores())
    pixels = step.config.batch_size // step.method.ranks.size // step.config.accumulate * step.config.image_size**2
    threads = min(cores, _parts(step)) if in_threads and pixels <= _MOST_PIXELS else 1
    # Threads that spin while they wait would hold up the loader: they leave it a core.
    reserved = 0 if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" else 1
    torch.set_num_threads(max(1, min(cores // threads - reserved, pixels // _PIXELS_A_THREAD)))
    if step.composites is not None and threads > 1:
        step.composites.run_in_threads(threads - 1, without_statistics(step.method))


def _parts(step: TrainingStep) -> int:
    """Count the parts of ``step`` that may run at the same time."""
    # Ranks must meet in the same order, and random numbers must be drawn in the same order. Autocast's cache of weights
    # is one for all threads, and what one without gradients has cast has no graph.
    draws = any(map(_draws, step.method.modules()))
    if step.composites is None or step.method.ranks.size > 1 or draws or step.precision != torch.float32:
        return 1
    return 1 + (step.config.lengths_per_step or len(step.config.lengths))


def _draws(module: nn.Module) -> bool:
    """Tell whether ``module`` is a dropout that drops anything."""
    return bool(getattr(module, "drop_prob", 0) or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p))


def without_statistics(method: Method) -> Method:
    """Copy ``method`` with the same tensors, but never move running statistics.

    :func:`cocor.methods.base.batch_statistics_only` switches modules, which threads must not share.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(method.parameters(), method.buffers())}
    twin = copy.deepcopy(method, memo)
    for module in twin.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
    return twin
