"""Process groups: who this rank is, and the collectives that training needs.

One process per GPU. The ranks come from the environment of torchrun (which ``--gpus N`` uses) or of Slurm's ``srun``;
without either there is one rank, no process group exists, and every function here returns at once.

Anything averaged over the batch is averaged over the *global* batch: :func:`mean_over_ranks` gives each rank the global
mean and passes the gradient to its own share, and :func:`reduce_gradients` completes the mean over ranks.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from cocor.distributed.env import RankEnv
from loaders.errors import UserError
from loaders.progress import patience

T = TypeVar("T")

_BUCKET_BYTES = 64 * 2**20
_TIMEOUT = timedelta(minutes=10)  # long enough for one rank to write a checkpoint to slow storage while others wait
_PATIENCE_S = 10.0  # to wait in silence for ranks to meet
_STEPS_AHEAD = 4  # that the host may run ahead of the GPU

# Renamed in PyTorch 2.14, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class World:
    """Name this rank among all ``size``, and the device that is its own."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Tell whether this is the one rank that writes files and prints."""
        return self.rank == 0


def init(use_gpu: bool) -> World:
    """Join the other ranks, if any: NCCL between GPUs, gloo between CPUs.

    Raises:
        UserError: a rank without a GPU of its own, or a port that another program has taken.
    """
    env = RankEnv.read()
    device = torch.device("cpu")
    if use_gpu:
        device = torch.device("cuda", _gpu(env.local_rank))
        torch.cuda.set_device(device)  # before anything else, or every rank would also open a context on GPU 0
    if env.size > 1:
        env.set_address()
        leftover = "; if there are none, unset RANK and WORLD_SIZE" if env.launcher == "torchrun" else ""
        try:
            with patience(f"rank {env.rank} waits for others of {env.size}{leftover}", _PATIENCE_S):
                store, _, _ = next(rendezvous("env://", env.rank, env.size, timeout=_TIMEOUT))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            port = os.environ["MASTER_PORT"]
            raise UserError(f"MASTER_PORT {port}: another program has taken it; set it to one that is free") from None
        # torchrun keeps its store when it restarts ranks, with the addresses of the dead ones in it.
        store = dist.PrefixStore(f"start {env.restarts}", store)
        dist.init_process_group(
            "nccl" if use_gpu else "gloo", store=store, rank=env.rank, world_size=env.size, timeout=_TIMEOUT,
            device_id=device if use_gpu else None,
        )  # fmt: skip
    return World(env.rank, env.local_rank, env.size, device)


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
    """Count the ranks."""
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
    """Average ``tensor`` (equal shapes, floating point) over ranks.

    The backward pass hands the gradient to this rank's ``tensor`` unchanged, without communication: a loss of means
    over equal shares of a global batch has the global gradient once :func:`reduce_gradients` has averaged over ranks.
    """
    return tensor if ranks() == 1 else _Mean.apply(tensor)


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """Concatenate ``tensor`` (B, ...) of all ranks, in the global batch's order.

    Returns (ranks * B, ...), without gradient.
    """
    if ranks() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    result = tensor.new_empty((ranks() * tensor.shape[0], *tensor.shape[1:]))
    _all_gather(result, tensor)
    return result


def gather_objects(value: T) -> list[T]:
    """Collect a ``value`` that can be pickled from every rank, in their order."""
    if ranks() == 1:
        return [value]
    values: list[Any] = [None] * ranks()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def exchange(tensor: Tensor) -> Tensor:
    """Send the r-th of equal parts of ``tensor`` (ranks * N, ...) to rank r.

    Returns the parts received, in the order of their senders: (ranks * N, ...), without gradient.
    """
    if ranks() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    result = torch.empty_like(tensor)
    dist.all_to_all_single(result, tensor)
    return result


@torch.no_grad()
def reduce_gradients(gradients: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over ranks, in place, by few large messages."""
    if ranks() == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat.div_(ranks())
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(old) for part, old in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive tensors of one dtype up to ``_BUCKET_BYTES``."""
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


def on_main(work: Callable[[], object]) -> None:
    """Do ``work`` on the main rank; a UserError there is raised on all."""
    _raise_on_all(_user_error(work) if _is_main() else None)


def main_first(work: Callable[[], T]) -> T:
    """Do ``work`` on the main rank, then on the others; return this rank's result.

    A UserError on one rank is raised on all, which would otherwise wait for a rank that has exited.
    """
    result: list[T] = []
    for main_turn in (True, False):
        _raise_on_all(_user_error(lambda: result.append(work())) if _is_main() is main_turn else None)
    return result[0]


def together(work: Callable[[], T]) -> T:
    """Do ``work`` on all ranks at once; a UserError on any is raised on all."""
    result: list[T] = []
    _raise_on_all(_user_error(lambda: result.append(work())))
    return result[0]


def _is_main() -> bool:
    return ranks() == 1 or dist.get_rank() == 0


def _user_error(work: Callable[[], object]) -> UserError | None:
    """Do ``work``; return the UserError that it raised, if it did."""
    try:
        work()
        return None
    except UserError as error:
        return error


def _raise_on_all(error: UserError | None) -> None:
    """Raise this rank's ``error``, or the lowest other rank's. Collective."""
    messages = gather_objects(None if error is None else str(error))
    other = next((message for message in messages if message is not None), None)
    error = error or (None if other is None else UserError(other))
    if error is not None:
        raise error


class AsyncMax:
    """Maximise small integers over ranks in every step, without the host waiting.

    Every rank calls this in the same steps. On the CPU a call returns the maxima of its own numbers. On several GPUs
    the host would have to wait for them, so a call returns those of ``_STEPS_AHEAD`` calls earlier, and zeros before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._late = _STEPS_AHEAD if device.type == "cuda" and ranks() > 1 else 0
        self._under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def __call__(self, *numbers: int) -> tuple[int, ...]:
        """Contribute ``numbers``, as many in each call; return maxima over ranks."""
        if not self._late:
            return self.now(*numbers)
        own = torch.tensor(numbers, dtype=torch.float32, device="cpu").pin_memory()
        maxima = own.to(self._device, non_blocking=True)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        result, done = torch.empty(len(numbers), device="cpu", pin_memory=True), torch.cuda.Event()
        result.copy_(maxima, non_blocking=True)
        done.record()
        self._under_way.append((result, done))
        if len(self._under_way) <= self._late:
            return (0,) * len(numbers)
        result, done = self._under_way.popleft()
        done.synchronize()
        return tuple(int(number) for number in result.tolist())

    def now(self, *numbers: int) -> tuple[int, ...]:
        """Return the maxima of ``numbers`` themselves, waiting; they may be negative."""
        self.forget()
        if ranks() == 1:
            return numbers
        maxima = torch.tensor(numbers, dtype=torch.float32, device=self._device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return tuple(int(number) for number in maxima.tolist())

    def forget(self) -> None:
        """Drop what is under way, on all ranks at the same step."""
        self._under_way.clear()
