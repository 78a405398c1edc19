"""Ranks: who this process is, and the few collectives that training needs.

One process per GPU. The ranks come from the environment of torchrun (which ``--gpus N`` uses) or of Slurm's ``srun``;
without either there is one rank, no process group exists, and every function here returns at once.

Anything averaged over the batch is averaged over the *global* batch: :func:`mean_over_ranks` gives each rank the global
mean and passes the gradient to its own share, and :func:`reduce_gradients` completes the mean over ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cocor import leaving, meeting
from cocor.distributed.env import Place, place
from loaders.errors import UserError

_BUCKET_BYTES = 64 * 2**20

# Renamed in PyTorch 2.14, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class World:
    """This process's rank among all ``size`` processes, and the device that no other of them uses."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the one rank that writes files and prints."""
        return self.rank == 0


def init(use_gpu: bool) -> World:
    """Join the other ranks, if any: NCCL between GPUs, gloo between CPUs. This rank's GPU becomes the current one.

    Raises:
        UserError: a rank without a GPU of its own.
        SystemExit: another rank has failed, and printed why.
    """
    here = place() or Place(0, 1, 0, 1)
    device = torch.device("cpu")
    if use_gpu:
        device = torch.device("cuda", _gpu(here.local_rank))
        torch.cuda.set_device(device)  # before anything else, or every rank would also open a context on GPU 0
    if here.size > 1:
        identity: dict[str, Any] = {"device_id": device} if use_gpu else {}
        with meeting.met(here) as store:
            dist.init_process_group(
                "nccl" if use_gpu else "gloo",
                store=store,
                rank=here.rank,
                world_size=here.size,
                timeout=meeting.TIMEOUT,
                **identity,
            )
    return World(here.rank, here.local_rank, here.size, device)


@contextmanager
def company() -> Iterator[None]:
    """The work of ranks that have joined. A rank that fails on its own ends the others as well (:mod:`cocor.leaving`).

    That holds from :func:`init` until the block ends without an exception; after an exception, until the process ends.
    """
    yield
    leaving.part()


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _gpu(local_rank: int) -> int:
    count = torch.cuda.device_count()
    if count == 1:
        return 0  # Slurm may show each task its own GPU only
    if local_rank >= count:
        raise UserError(f"rank {local_rank} of this machine has no GPU: asked for {local_rank + 1}, have {count}")
    return local_rank


def ranks() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result)
        return result.div_(dist.get_world_size())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean over ranks of ``tensor`` (same shape everywhere, floating point). On one rank the tensor itself.

    The backward pass hands the gradient to this rank's ``tensor`` unchanged, without communication: a loss of means
    over equal shares of a global batch has the global gradient once :func:`reduce_gradients` has averaged over ranks.
    """
    return tensor if ranks() == 1 else _Mean.apply(tensor)


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """The ``tensor`` (B, ...) of all ranks, concatenated in rank order, which is the order of the global batch:
    (ranks * B, ...), without gradient."""
    if ranks() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    result = tensor.new_empty((ranks() * tensor.shape[0], *tensor.shape[1:]))
    _all_gather(result, tensor)
    return result


@torch.no_grad()
def exchange(tensor: Tensor) -> Tensor:
    """All-to-all: send the r-th of equal parts of ``tensor`` (ranks * N, ...) to rank r; returns the parts received, in
    the order of their senders: (ranks * N, ...), without gradient. On one rank the tensor itself."""
    if ranks() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    result = torch.empty_like(tensor)
    dist.all_to_all_single(result, tensor)
    return result


@torch.no_grad()
def reduce_gradients(gradients: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over ranks, in place. Every rank passes tensors of the same shapes in the same
    order; they travel in few large messages."""
    if ranks() == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat.div_(ranks())
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(old) for part, old in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, together at most ``_BUCKET_BYTES``; a larger tensor has a bucket of its own."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def broadcast_parameters(module: nn.Module) -> None:
    """Give every rank the main rank's parameters and buffers."""
    if ranks() == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        whole = tensor.contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def barrier() -> None:
    """Wait until all ranks are here."""
    if ranks() > 1:
        dist.barrier()
