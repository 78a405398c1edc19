"""Do what ranks do, as a program: ``python -m helpers.rank_programs WORK FLAGS...``."""

import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cocor import cli
from cocor.config.options import Config
from cocor.config.resolve import load
from cocor.distributed import collectives as communication
from cocor.distributed import launch
from cocor.distributed.collectives import AsyncMax, World, main_first, on_main, together
from loaders.errors import UserError


def collectives(config: Config, world: World) -> None:
    """Every collective against what one process computes on the whole."""
    torch.set_default_device(world.device)
    rank, size = world.rank, world.size
    whole = torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3)
    share = whole.chunk(size)[rank]
    assert torch.equal(communication.gather(share), whole)
    assert torch.equal(communication.gather(share.long()), whole.long())
    images = torch.rand(1, 3, 2, 2).mul_(0).add_(rank).to(memory_format=torch.channels_last).requires_grad_()
    everyone = communication.gather(images)
    assert everyone.shape == (size, 3, 2, 2) and not everyone.requires_grad
    assert everyone[:, 0, 0, 0].tolist() == list(range(size))

    sent = torch.arange(2.0 * size)[:, None, None, None].expand(-1, 2, 2, 3).to(torch.bfloat16) + 100 * rank
    arrived = communication.exchange(sent)
    assert arrived[:, 0, 0, 0].tolist() == [
        float(torch.tensor(100 * r + 2 * rank + k).bfloat16()) for r in range(size) for k in (0, 1)
    ]

    own = torch.tensor([float(rank), 1.0])
    assert torch.equal(communication.mean_over_ranks(own), torch.tensor([(size - 1) / 2, 1.0]))
    assert own[0] == rank

    tensors = [torch.full((3, 2), float(rank)), torch.full((5,), float(rank), dtype=torch.float64)]
    tensors.append(torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last))
    tensors[2][1, 2, 3, 0] = 10.0 * rank
    communication._BUCKET_BYTES = 40  # several messages
    communication.reduce_gradients(tensors)
    mean = (size - 1) / 2
    assert all((tensor.flatten()[:5] == mean).all() for tensor in tensors)
    assert tensors[2][1, 2, 3, 0] == 10 * mean and tensors[2].is_contiguous(memory_format=torch.channels_last)

    module = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    for value in module.state_dict().values():
        value.fill_(rank + 1)
    communication.broadcast_parameters(module)
    assert all((value == 1).all() for value in module.state_dict().values())

    votes = AsyncMax(world.device)
    answers = [votes(rank, 0, size - rank) for _ in range(6)]
    assert answers[-1] == (size - 1, 0, size) and votes.now(rank * 7, 1) == (7 * size - 7, 1)
    same_gradient(world)
    communication.barrier()


def same_gradient(world: World) -> None:
    """A loss that is no mean over samples: a function of a global mean, as the consistency loss is."""

    def loss(model: nn.Module, images: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        out = model(images)
        return nn.functional.softplus(mean(out.mean())) + out.square().mean()

    torch.manual_seed(0)
    model, images = nn.Linear(3, 1), torch.randn(8, 3)
    expected = torch.autograd.grad(loss(model, images, lambda mean: mean), list(model.parameters()))
    share = images.chunk(world.size)[world.rank]
    gradients = list(torch.autograd.grad(loss(model, share, communication.mean_over_ranks), list(model.parameters())))
    communication.reduce_gradients(gradients)
    for one, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-6)


def mistakes_of_one(config: Config, world: World) -> None:
    """However a rank came to its mistake, all ranks raise it."""

    def fails_on(rank: int) -> int:
        if world.rank == rank:
            raise UserError(f"no images on {rank}")
        return world.rank

    assert main_first(lambda: fails_on(-1)) == together(lambda: fails_on(-1)) == world.rank
    on_main(lambda: fails_on(1))  # which is not asked
    for do, rank in ((on_main, 0), (main_first, 0), (main_first, 1), (together, 1)):
        with pytest.raises(UserError, match=f"no images on {rank}"):
            do(lambda rank=rank: fails_on(rank))


def fail() -> None:
    raise UserError("no images in nowhere")


def ends_by(act: Callable[[], object]) -> Callable[[Config, World], None]:
    """Let rank 1 do this while the others wait."""

    def work(config: Config, world: World) -> None:
        if world.rank == 1:
            act()
        communication.barrier()

    return work


WORK = {
    "collectives": collectives,
    "mistakes_of_one": mistakes_of_one,
    "mistake": ends_by(fail),
    "bug": ends_by(lambda: 1 / 0),
    "killed": ends_by(lambda: os.kill(os.getpid(), signal.SIGKILL)),
}
if __name__ == "__main__":
    flags, module = load(sys.argv[2:]), "helpers.rank_programs"
    sys.exit(cli.command("test", lambda: launch.run(flags, sys.argv[1:], WORK[sys.argv[1]], module)))
