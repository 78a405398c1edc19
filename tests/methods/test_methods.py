"""Test what holds of every method, and the losses and state of MoCo and SimSiam."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm.layers
import torch
from helpers.steps import LABELS, TINY, backbone, images, tiny
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from cocor.config.options import Config
from cocor.config.resolve import resolve
from cocor.methods import shuffle
from cocor.methods.base import Method, Ranks, batch_statistics_only, feature_std
from cocor.methods.moco import MoCo
from cocor.methods.simsiam import SimSiam
from loaders.errors import UserError


@pytest.fixture(params=TINY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str) -> Method:
    return tiny(name)


def moco(**options: Any) -> MoCo:
    return tiny("moco", **options)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_only_the_contrastive_forward_moves_state(method: Method) -> None:
    before = buffers(method)
    method.embed_original(images(6))
    method.embed_composite(images(6)).sum().backward()
    assert same(before, buffers(method))
    views = images(2, 6)
    loss = method.contrastive(views, LABELS)
    moved, metrics = buffers(method), dict(method.metrics)
    running = [name for name in before if "running" in name and name.startswith("backbone")]
    assert not any(torch.equal(before[name], moved[name]) for name in running)
    again = method.reevaluate(views, LABELS)
    assert same(moved, buffers(method)) and method.metrics == metrics
    assert not again.requires_grad and torch.allclose(loss, again, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert method.contrastive(views, LABELS).dtype == method.embed_composite(images(6)).dtype == torch.float32
    assert all(value.dtype == torch.float32 and not value.requires_grad for value in method.metrics.values())


def test_embeddings_use_own_batch_statistics(method: Method) -> None:
    first = method.embed_original(images(6))
    with torch.no_grad():
        for name, buffer in method.named_buffers():
            if "running" in name:
                buffer.fill_(5.0)
    assert torch.equal(first, method.embed_original(images(6)))
    other = images(12, seed=2)
    other[:6] = images(6)
    assert not torch.allclose(first, method.embed_original(other)[:6], atol=1e-3)


def test_gradients_reach_trainable_parameters(method: Method) -> None:
    method.contrastive(images(2, 6), LABELS).backward()
    groups = method.parameter_groups(1e-4)
    trainable = {id(p) for group in groups for p in group["params"]}
    assert len(trainable) == sum(len(group["params"]) for group in groups)
    assert trainable == {id(p) for p in method.parameters() if p.requires_grad}
    for name, parameter in method.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == (id(parameter) in trainable), name


def test_only_composites_carry_gradients(method: Method) -> None:
    assert not method.embed_original(images(6)).requires_grad
    composites = method.embed_composite(images(6))
    assert torch.allclose(composites.norm(dim=1), torch.ones(6), atol=1e-6)
    composites.square().sum().add(composites[:, 0].sum()).backward()
    reached = {name.split(".")[0] for name, p in method.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in method.named_children() if not name.startswith(("key", "target"))}


class _Step(nn.Module):
    """``forward`` is all that a method does in a step."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, views: Tensor, labels: Tensor) -> Tensor:
        loss = self.method.contrastive(views, labels)
        self.method.after_step()
        return loss


@torch.no_grad()
def test_a_recorded_step_plays_back(name: str) -> None:
    """Nothing that changes from step to step (momentum, order of keys, place in the queue) may be a number of Python's,
    which a CUDA graph would keep as it was. Here the operations on tensors are recorded, which shows it on the CPU."""
    written, recorded = _Step(tiny(name)), _Step(tiny(name))
    state = dict(recorded.state_dict(keep_vars=True))
    saved = {name: value.clone() for name, value in state.items()}
    play = make_fx(lambda state, *batch: functional_call(recorded, state, batch))(state, images(2, 6), LABELS)
    for name, value in saved.items():
        state[name].copy_(value)
    for step in range(3):
        for method in (written.method, recorded.method):
            for parameter in method.backbone.parameters():
                parameter.mul_(1.1)
        batch = images(2, 6, seed=step), LABELS.roll(step)
        assert torch.equal(play(state, *batch), written(*batch)), step
        assert same(dict(recorded.state_dict()), dict(written.state_dict())), step


def assert_same_loss(loss: Tensor, expected: Tensor, method: Method, reference: Method) -> None:
    """And gradients."""
    assert torch.allclose(loss, expected, atol=1e-6)
    loss.backward()
    expected.backward()
    for (name, a), b in zip(method.named_parameters(), reference.parameters(), strict=True):
        if a.requires_grad:
            assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4 * float(b.grad.abs().max())), name


def test_moco_loss() -> None:
    method = moco(temperature=0.2)
    views = images(2, 6)
    reference = copy.deepcopy(method)
    loss = method.contrastive(views)
    q = F.normalize(reference.head(reference.backbone(views[0])), dim=1)
    k = F.normalize(reference.key_head(reference.key_backbone(views[1])), dim=1)
    rows = []
    for i in range(6):
        logits = torch.cat([(q[i] @ k[i])[None], reference.queue @ q[i]]) / 0.2
        rows.append(-torch.log(torch.exp(logits[0]) / torch.exp(logits).sum()))
        assert len(logits) == 1 + 24
    assert_same_loss(loss, torch.stack(rows).mean(), method, reference)
    method = moco(queue_size=2000)
    method.contrastive(torch.stack([images(6), images(6)]))  # key and query of the same image and equal weights
    assert method.metrics["top1"] == 1.0 and 0.0 < method.metrics["feature_std"] < 1.1


@pytest.mark.parametrize("splits", [1, 2])
def test_symmetric_moco_is_the_mean_of_both_ways(splits: int) -> None:
    method = moco(symmetric=True, key_bn_splits=splits)
    views = images(2, 6)
    one_way, other_way = (moco(key_bn_splits=splits) for _ in range(2))
    for part in (one_way, other_way):
        part.load_state_dict(method.state_dict())
    loss = method.contrastive(views)
    expected = (one_way.contrastive(views) + other_way.contrastive(views.flip(0))) / 2
    assert torch.allclose(loss, expected, atol=1e-6)
    assert torch.allclose(method.reevaluate(views), expected, atol=1e-6)
    loss.backward()
    expected.backward()
    pairs = zip(one_way.named_parameters(), other_way.parameters(), strict=True)
    for parameter, ((name, a), b) in zip(method.parameters(), pairs, strict=True):
        if parameter.requires_grad:
            whole = a.grad + b.grad
            assert torch.allclose(parameter.grad, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max())), name
    keys = torch.cat([*one_way._keys, *other_way._keys])
    method.after_step()
    assert method.pointer == 12 and torch.allclose(method.queue[:12], keys, atol=1e-6)


def test_symmetric_moco_needs_room_for_both_keys() -> None:
    with pytest.raises(UserError, match=r"queue_size: 10 is less than the keys of one step \(12\)"):
        resolve({"queue_size": 10, "batch_size": 6, "key_bn_splits": 1, "symmetric": True})


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_of_simsiams_projector(layers: int) -> None:
    method = tiny("simsiam", projector_layers=layers)
    linear = [part for part in method.projector if isinstance(part, nn.Linear)]
    assert len(linear) == layers and not any(part.bias is not None for part in linear)
    assert not method.projector[-1].affine and not isinstance(method.projector[-2], nn.ReLU)
    assert torch.isfinite(method.contrastive(images(2, 6)))


def test_moco_queue_wraps_around() -> None:
    method = moco(queue_size=10)
    torch.manual_seed(1)  # which the queue's start, the same on all ranks, does not depend on
    assert torch.allclose(method.queue.norm(dim=1), torch.ones(10), atol=1e-6)
    assert torch.equal(method.queue, MoCo(backbone(), embedding_dim=8, queue_size=10).queue)
    expected = method.queue.clone()
    at = 0
    for step in range(4):
        views = images(2, 4, seed=step)
        with torch.no_grad(), batch_statistics_only(method):
            keys = F.normalize(method.key_head(method.key_backbone(views[1])), dim=1)
        before, storage = method.queue.clone(), method.queue.data_ptr()
        with pytest.raises(RuntimeError):
            method.after_step()  # needs a contrastive call of its own
        method.contrastive(views).backward()
        assert torch.equal(method.queue, before)  # nothing happens before the backward pass is over
        method.after_step()
        assert method.queue.data_ptr() == storage and not method.queue.requires_grad
        for key in keys:
            expected[at % 10] = key
            at += 1
        assert torch.allclose(method.queue, expected, atol=1e-6) and method.pointer.item() == at % 10


@pytest.mark.parametrize(("images", "fitting"), [(24, 8), (65_536, 8_192), (65_537, None)])
def test_moco_warns_of_a_queue_of_all_images(images: int, fitting: int | None) -> None:
    config = Config(queue_size=65_536, batch_size=8 if images == 24 else 256)
    remark = MoCo.remark(config, images)
    assert bool(remark) == bool(fitting) and remark.endswith(f"use --queue-size {fitting}" if fitting else "")
    assert not SimSiam.remark(config, images)


def test_moco_key_encoder_is_a_moving_average() -> None:
    method = moco(key_momentum=0.9)
    with torch.no_grad():
        for parameter in [*method.backbone.parameters(), *method.head.parameters()]:
            parameter.add_(1.0)
    before = [p.clone() for p in [*method.key_backbone.parameters(), *method.key_head.parameters()]]
    method.contrastive(images(2, 6))
    statistics = buffers(method.key_backbone)
    method.after_step()
    queries = [*method.backbone.parameters(), *method.head.parameters()]
    after = [*method.key_backbone.parameters(), *method.key_head.parameters()]
    for old, query, new in zip(before, queries, after, strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * query, atol=1e-6)
    assert same(statistics, buffers(method.key_backbone))


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])  # BatchNorm with and without activation inside
def test_moco_keys_share_statistics_in_groups(name: str) -> None:
    method = MoCo(timm.create_model(name, num_classes=0), embedding_dim=8, queue_size=24, key_bn_splits=2)
    assert method._groups_inside == (name == "test_resnet")
    views = images(2, 8)
    reference = copy.deepcopy(method.backbone)  # of equal weights
    order = shuffle.order(method.step, 8, groups=2)
    method.contrastive(views)
    (made,) = method._keys
    with torch.no_grad():
        for group in order.chunk(2):
            keys = F.normalize(method.head(reference(views[1][group])), dim=1)
            assert torch.allclose(made[group], keys, atol=1e-5)
    for a, b in zip(method.key_backbone.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_moco_permutation_depends_on_the_step() -> None:
    orders = torch.stack([shuffle.permutation(torch.tensor(step), 64) for step in range(50)])
    torch.manual_seed(3)
    for step, order in enumerate(orders):
        assert torch.equal(order.sort().values, torch.arange(64))
        assert torch.equal(order, shuffle.permutation(torch.tensor(step), 64))
    assert len(orders.unique(dim=0)) == 50
    assert (orders.float().mean(0) - 31.5).abs().max() < 12  # a mean of 50 has a standard deviation of 2.6


@pytest.mark.parametrize(("count", "groups"), [(64, 8), (32, 4), (24, 4), (12, 3), (8, 1)])
def test_shuffled_batches_deal_out_every_chunk(count: int, groups: int) -> None:
    orders = [shuffle.order(torch.tensor(step), count, groups) for step in range(40)]
    assert all(torch.equal(order.sort().values, torch.arange(count)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 40
    if count % groups**2 == 0:
        sources = torch.stack(orders).view(40, groups, -1) // (count // groups)
        assert (torch.nn.functional.one_hot(sources, groups).sum(2) == count // groups**2).all()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("count", [64, 24])  # pieces are equal for 64 = 4 groups x 4 pieces x 4 images, not for 24
def test_ranks_receive_their_part_of_the_batch(world: int, count: int) -> None:
    step, groups = torch.tensor(5), 4

    def work(ranks: Ranks) -> Tensor:
        mine = torch.arange(count).chunk(world)[ranks.rank][:, None] * 10
        return shuffle.shuffled(mine, step, groups, ranks)

    whole = torch.cat(Threads(world).run(work))
    assert torch.equal(whole[:, 0] // 10, shuffle.order(step, count, groups))


class Threads:
    """Ranks that are threads of one process."""

    def __init__(self, world: int) -> None:
        self.world, self.parts = world, [torch.empty(0)] * world
        self.barrier = threading.Barrier(world, timeout=300)

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """What ``work`` returns on each rank."""
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(lambda rank: work(self.of(rank)), range(self.world)))

    def of(self, rank: int) -> Ranks:
        def gather(tensor: Tensor) -> Tensor:
            self.parts[rank] = tensor
            self.barrier.wait()
            result = torch.cat(self.parts)
            self.barrier.wait()
            return result

        def exchange(tensor: Tensor) -> Tensor:
            return gather(tensor).unflatten(0, (self.world, self.world, -1))[:, rank].flatten(0, 1)

        return Ranks(rank, self.world, gather, exchange)


@pytest.mark.parametrize("symmetric", [False, True])
def test_moco_keys_and_queue_on_two_ranks(symmetric: bool) -> None:
    views = images(2, 16)
    single = moco(key_bn_splits=4, symmetric=symmetric, queue_size=40)
    single.contrastive(views)
    single.after_step()

    threads = Threads(2)
    options = {"key_bn_splits": 4, "symmetric": symmetric, "queue_size": 40}
    methods = [moco(ranks=threads.of(rank), **options) for rank in range(2)]

    def work(ranks: Ranks) -> None:
        methods[ranks.rank].contrastive(views[:, ranks.rank * 8 : ranks.rank * 8 + 8])
        methods[ranks.rank].after_step()

    threads.run(work)
    for method in methods:
        assert torch.allclose(method.queue, single.queue, atol=1e-5)
        assert method.pointer == single.pointer == (32 if symmetric else 16)


def test_simsiam_loss() -> None:
    method = tiny("simsiam")
    views = images(2, 6)
    reference = copy.deepcopy(method)
    loss = method.contrastive(views)
    z1, z2 = (reference.projector(reference.backbone(view)) for view in views)
    p1, p2 = reference.predictor(z1), reference.predictor(z2)
    expected = -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2
    assert_same_loss(loss, expected, method, reference)
    x = images(6)  # composites are embedded by the predictor as well
    with batch_statistics_only(method):
        z = method.projector(method.backbone(x))
        assert torch.allclose(method.embed_original(x), F.normalize(z, dim=1), atol=1e-6)
        assert torch.allclose(method.embed_composite(x), F.normalize(method.predictor(z), dim=1), atol=1e-6)


def test_simsiam_layers_and_groups() -> None:
    assert not tiny("simsiam").projector[-1].affine
    assert not any(group["fixed_lr"] for group in tiny("simsiam").parameter_groups(1e-4))
    method = tiny("simsiam", fix_predictor_lr=True)
    encoder, predictor = method.parameter_groups(1e-4)
    assert not encoder["fixed_lr"] and predictor["fixed_lr"]
    assert {id(p) for p in predictor["params"]} == {id(p) for p in method.predictor.parameters()}


def test_feature_std() -> None:
    features = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    assert feature_std(features).item() == pytest.approx(1.0, abs=0.02) and feature_std(torch.ones(16, 64)) == 0.0


def test_batch_statistics_only_restores() -> None:
    untracked = nn.BatchNorm2d(4, track_running_stats=False)
    module = nn.Sequential(nn.SyncBatchNorm(4), timm.layers.BatchNormAct2d(4), untracked)
    with pytest.raises(ZeroDivisionError), batch_statistics_only(module):
        assert not any(norm.track_running_stats for norm in module)
        raise ZeroDivisionError
    assert [norm.track_running_stats for norm in module] == [True, True, False]
    # cocor-eval embeds originals and composites in evaluation mode.
    module = nn.Sequential(nn.BatchNorm2d(4), timm.layers.BatchNormAct2d(4), nn.SyncBatchNorm(4))
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, 5) * 3 + 1
    module[:2](x)  # one training step moves the statistics; synchronised ones need a GPU
    module.eval()
    with batch_statistics_only(module):
        inside = module(x[:2])
    assert torch.equal(inside, module(x[:2])) and torch.equal(inside[:1], module(x[:1]))  # whatever else is in it


@pytest.mark.gpu
def test_moco_permutation_on_the_gpu() -> None:
    for step in range(5):
        there = shuffle.permutation(torch.tensor(step, device="cuda"), 512)
        assert torch.equal(there.cpu(), shuffle.permutation(torch.tensor(step), 512))
