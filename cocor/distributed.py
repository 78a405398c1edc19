"""Ranks: who this process is, and the few collectives that training needs.

One process a GPU. The environment of torchrun (which ``--gpus N`` uses) or of Slurm's ``srun`` says who is who; without
either there is one rank, no process group exists, and every function here returns at once.

Anything averaged over the batch is averaged over the *global* batch: :func:`mean_over_ranks` gives each rank the global
mean and passes the gradient to its own share, and :func:`reduce_gradients` completes the mean over ranks.
"""

import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cocor import leaving, slurm
from loaders.errors import UserError

# Long enough for one rank to write a checkpoint to slow storage while the others wait.
_TIMEOUT = timedelta(minutes=10)
_BUCKET_BYTES = 64 * 2**20

# Renamed in PyTorch 2.14, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class World:
    """This process's place among all ``size`` processes and the device that is its alone."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the one rank that writes files and speaks."""
        return self.rank == 0


@dataclass(frozen=True)
class Place:
    """What a launcher says: this process is ``rank`` of ``size``, on its machine ``local_rank`` of ``local_size``."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place() -> Place | None:
    """Who this process is, by torchrun's or srun's environment; None if neither launched it."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        local = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), *local)
    # Of Slurm's variables only srun sets this one; a batch script or an interactive shell is no rank.
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "SLURM_PROCID" in env:
        here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 4(x2)
        return Place(int(env["SLURM_PROCID"]), tasks, int(env["SLURM_LOCALID"]), int(here.group()) if here else 1)
    return None


def init(use_gpu: bool) -> World:
    """Join the other ranks, if any: NCCL between GPUs, gloo between CPUs. This rank's GPU becomes the current one.

    Raises:
        UserError: a rank without a GPU of its own.
    """
    here = place() or Place(0, 1, 0, 1)
    device = torch.device("cpu")
    if use_gpu:
        device = torch.device("cuda", _gpu(here.local_rank))
        torch.cuda.set_device(device)  # before anything else, or every rank would also open a context on GPU 0
    if here.size > 1:
        identity: dict[str, Any] = {"device_id": device} if use_gpu else {}
        with _meeting(here) as store:
            dist.init_process_group(
                "nccl" if use_gpu else "gloo",
                store=dist.PrefixStore(_attempt(store, here), store),
                rank=here.rank,
                world_size=here.size,
                timeout=_TIMEOUT,
                **identity,
            )
    return World(here.rank, here.local_rank, here.size, device)


@contextmanager
def _meeting(here: Place) -> Iterator[dist.Store]:
    """The store at the address in the environment; srun's tasks, which have none, agree on one."""
    if "MASTER_ADDR" not in os.environ:
        with slurm.meeting(here.rank == 0, _TIMEOUT) as store:
            yield store
        return
    try:
        store, _, _ = next(dist.rendezvous("env://", here.rank, here.size, timeout=_TIMEOUT))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(f"MASTER_PORT {port}: another program has taken it; set it to a port that is free") from None
    yield store


def _attempt(store: dist.Store, here: Place) -> str:
    """A name that the ranks of this start, and of no earlier one, have in common.

    When torchrun restarts ranks it may keep its store, with the addresses of the dead ranks in it (PyTorch issue
    135712), and how often it has restarted is not the same on all machines. So the main rank makes a name up and the
    others report to it; a name that a rank of the same number has answered to before is an old one.
    """
    leader = "cocor/leader"
    if here.rank == 0:
        name = uuid.uuid4().hex
        store.set(leader, name)
        store.wait([f"cocor/{name}/{rank}" for rank in range(1, here.size)], _TIMEOUT)
        store.set(f"cocor/{name}/complete", "")
        return name
    refused, patience = "", time.monotonic() + _TIMEOUT.total_seconds()
    while time.monotonic() < patience:
        name = store.get(leader).decode()
        if name != refused and store.add(f"cocor/{name}/{here.rank}", 1) == 1:
            while store.get(leader).decode() == name and time.monotonic() < patience:
                if store.check([f"cocor/{name}/complete"]):
                    return name
                time.sleep(0.02)
        refused = name
        time.sleep(0.02)
    raise TimeoutError(f"rank {here.rank} waited {_TIMEOUT} for the other ranks to start")


def told_by_another(message: str) -> bool:
    """Whether another rank has already said ``message``: all ranks make a user's mistake, and one line is enough.

    Asks the store where the ranks meet; where torchrun hosts it, also before they have met.
    """
    here = place()
    if here is None or here.size == 1:
        return False
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"cocor/told/{restart}/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        return leaving.asked(lambda: _store().add(key, 1)) > 1
    except TimeoutError:
        return False
    except (RuntimeError, ValueError, KeyError):  # nowhere to ask, or its host, the main rank, has gone
        return here.rank > 0 and dist.is_initialized()


def _store() -> dist.Store:
    if dist.is_initialized():
        found: dist.Store = dist.distributed_c10d._get_default_store()
        return found
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("no store before the ranks have met")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=5))


@contextmanager
def company() -> Iterator[None]:
    """Within, a rank that fails alone takes the others along, see :mod:`cocor.leaving`."""
    if ranks() == 1:
        yield
        return
    with leaving.heard(_store().clone(), ranks(), dist.get_rank() == 0):
        yield


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
    """The mean of every rank's ``tensor`` (same shape everywhere, floating point). On one rank the tensor itself.

    The gradient reaches the own share unchanged: a loss of means over equal shares of a global batch then has the
    global gradient once :func:`reduce_gradients` has averaged over ranks.
    """
    return tensor if ranks() == 1 else _Mean.apply(tensor)


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """All ranks' ``tensor`` (B, ...) in rank order as (ranks * B, ...), the order of the global batch; no gradient."""
    if ranks() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    result = tensor.new_empty((ranks() * tensor.shape[0], *tensor.shape[1:]))
    _all_gather(result, tensor)
    return result


@torch.no_grad()
def exchange(tensor: Tensor) -> Tensor:
    """Send the r-th of equal parts of ``tensor`` (ranks * N, ...) to rank r; returns what arrives, in the order of the
    senders. On one rank the tensor itself."""
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
    """Runs of tensors of one dtype, of about ``_BUCKET_BYTES``."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or held + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
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
