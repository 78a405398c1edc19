"""All loaders execute one plan: same order, labels, boxes and programs, nearly the same pixels; nothing stays."""

import gc
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.loading import FIELDS, NAMES, OpenLoader, grey_levels, opening, same, threads
from PIL import Image

from loaders.channels import IMAGENET_MEAN, IMAGENET_STD, luma
from loaders.dali import cuda_env
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.datasets.stored import open_stored
from loaders.errors import UserError
from loaders.open import LoaderName, open_images, open_loader
from loaders.pipeline.prefetch import Prefetch
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source
from loaders.synthetic import SyntheticLoader, synthetic_dataset
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.parameters import view_parameters
from loaders.views.plan import ViewPlan

SIZE = 32
PLAN = ViewPlan(size=SIZE, seed=3)
LOADERS = ("torch", "dali")
ONE_CHANNEL = {"mean": (0.0,), "std": (1.0,)}


@pytest.fixture(scope="module")
def dataset(photo_folder: Path) -> ImageDataset:
    return open_folder(photo_folder, quiet=True)


@pytest.fixture
def make(dataset: ImageDataset, photo_beton: Path) -> Iterator[OpenLoader]:
    yield from opening(dataset, open_stored(photo_beton), PLAN)


class TestOnePlan:
    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_loaders_agree_and_ranks_share_the_epoch(self, make: OpenLoader, world: int) -> None:
        seen = []
        for rank in range(world):
            options = {"rank": rank, "world_size": world, "drop_last": False}
            reference, dali = make("torch", **options), make("dali", **options)
            assert reference.steps_per_epoch == dali.steps_per_epoch == 3
            for left, right in zip(reference.epoch(2), dali.epoch(2), strict=True):
                for name in ("composition", "label", "index"):
                    assert torch.equal(getattr(left, name), getattr(right, name))
                assert grey_levels(left.original, right.original) < 2
                assert grey_levels(left.views, right.views) < 3  # the same boxes, flips and programs
                seen.append(left.index)
        assert sorted(torch.cat(seen).tolist()) == list(range(24))

    def test_world_size_does_not_change_a_sample(self, make: OpenLoader) -> None:
        whole = next(make("dali").epoch(0))
        half = next(make("dali", rank=1, world_size=2).epoch(0))
        assert torch.equal(whole.original[4:], half.original) and torch.equal(whole.views[:, 4:], half.views)

    @pytest.mark.parametrize("name", NAMES)
    def test_batches_are_as_promised(self, make: OpenLoader, dataset: ImageDataset, name: str) -> None:
        batch = next(iter(make(name).epoch(0)))
        assert batch.views.shape == (2, 8, 3, SIZE, SIZE) and batch.original.shape == (8, 3, SIZE, SIZE)
        assert batch.composites.shape == (3, 8, 3, SIZE, SIZE) and batch.composition.shape == (3, 8, 14)
        assert batch.composition.sum(-1).tolist() == [[1] * 8, [2] * 8, [3] * 8]
        for image in (batch.original, *batch.views, *batch.composites):
            assert image.is_contiguous(memory_format=torch.channels_last) and image.dtype == torch.float32
        assert batch.label.tolist() == dataset.labels[batch.index].tolist() and batch.parameters is None

    @pytest.mark.parametrize("name", NAMES)
    def test_contrastive_views_are_described(self, make: OpenLoader, dataset: ImageDataset, name: str) -> None:
        plan = replace(PLAN, parameters=True)
        batch = next(make(name, plan=plan, rank=1, world_size=2).epoch(3))
        index = batch.index.numpy()
        described = view_parameters(plan.draw(3, index, dataset.sizes[index]), dataset.sizes[index], 2)
        assert batch.parameters is not None and np.array_equal(batch.parameters.numpy(), described)

    @pytest.mark.parametrize("name", [*LOADERS, "synthetic"])
    def test_images_are_normalised_as_asked(self, dataset: ImageDataset, name: LoaderName) -> None:
        order, plain = BatchOrder(24, 8), {"mean": (0, 0, 0), "std": (1, 1, 1)}
        usual, other = (open_loader(name, dataset, PLAN, order, workers=1, **more) for more in ({}, plain))
        with closing(usual), closing(other):
            one, two = (next(loader.epoch(0)).original for loader in (usual, other))
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        assert 0 <= two.min() < two.max() <= 1 and torch.allclose(one * std + mean, two, atol=1e-6)

    @pytest.mark.parametrize("name", NAMES)
    def test_views_change_with_epoch_and_view(self, make: OpenLoader, name: str) -> None:
        loader = make(name, shuffle=False)
        first, second = next(loader.epoch(0)), next(loader.epoch(1))
        assert torch.equal(first.index, second.index)
        assert grey_levels(first.views, second.views) > 10
        assert grey_levels(first.views[0], first.views[1]) > 10
        orders = [next(make(name).epoch(e)).index.tolist() for e in (0, 1)]
        assert orders[0] != orders[1]

    @pytest.mark.parametrize("name", [*NAMES, "synthetic"])
    def test_epochs_in_one_go_are_the_same(self, make: OpenLoader, name: str) -> None:
        loader = make(name)
        apart = [batch for e in (1, 2, 3) for batch in loader.epoch(e, 2 if e == 1 else 0)]
        joined = list(loader.epochs(range(1, 4), 2))
        assert len(joined) == 7 and all(same(a, b) for a, b in zip(apart, joined, strict=True))
        assert threads() == []

    @pytest.mark.parametrize("name", [*NAMES, "synthetic"])
    def test_resuming_gives_the_same_batches(self, make: OpenLoader, name: str) -> None:
        loader = make(name)
        whole, rest = list(loader.epoch(5)), list(loader.epoch(5, start_step=1))
        assert len(whole) == 3 and len(rest) == 2
        assert all(same(a, b) for a, b in zip(whole[1:], rest, strict=True))
        assert list(loader.epoch(5, start_step=3)) == [] and not same(whole[0], next(loader.epoch(6)))

    @pytest.mark.parametrize("name", NAMES)
    def test_passes_over_a_small_set_have_new_views(self, make: OpenLoader, photo_beton: Path, name: str) -> None:
        images = open_stored(photo_beton).subset(range(6))
        batches = list(make(name, images, order=CyclicOrder(6, 4, steps=3, seed=PLAN.seed)).epoch(0))
        assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == sorted([*range(6)] * 2)
        place = torch.cat([batch.index for batch in batches[:2]])[:6].tolist().index(int(batches[2].index[0]))
        before = torch.cat([batch.original for batch in batches[:2]])[place]
        assert grey_levels(before, batches[2].original[0]) > 5

    def test_worker_processes_change_nothing(self, make: OpenLoader) -> None:
        pairs = zip(make("torch", workers=2).epoch(0), make("torch").epoch(0), strict=True)
        assert all(same(a, b) for a, b in pairs)

    def test_released_recipe_has_several_originals(self, make: OpenLoader) -> None:
        plan = ViewPlan(size=SIZE, original="weak", originals=2)
        left, right = (next(make(name, plan=plan).epoch(0)) for name in LOADERS)
        assert left.original.shape == (16, 3, SIZE, SIZE)
        assert left.original.is_contiguous(memory_format=torch.channels_last)
        assert grey_levels(left.original, right.original) < 3


class TestPixels:
    def test_awkward_files_look_the_same_everywhere(
        self, make: OpenLoader, photos: dict[str, Image.Image], tmp_path: Path
    ) -> None:
        image = photos["chelsea"]
        faded = image.convert("RGBA")
        faded.putalpha(Image.linear_gradient("L").resize(image.size))
        faded.save(tmp_path / "alpha.png")
        image.convert("CMYK").save(tmp_path / "cmyk.jpg")
        image.convert("L").save(tmp_path / "grey.jpg")
        image.save(tmp_path / "lossy.webp")
        image.quantize(64).save(tmp_path / "palette.gif")
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(tmp_path / "deep.png")
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(tmp_path / "turned.jpg", exif=exif)
        image.convert("1").save(tmp_path / "bits.png")
        images = open_folder(tmp_path, quiet=True)
        assert dict(zip(images.names, images.plain.tolist(), strict=True))["turned.jpg"]
        left, right = (next(make(name, images).epoch(0)) for name in LOADERS)
        for sample in range(8):
            assert grey_levels(left.original[sample], right.original[sample]) < 2, images.names[left.index[sample]]

    @pytest.mark.parametrize("name", NAMES)
    def test_kept_batches_are_not_overwritten(self, make: OpenLoader, name: str) -> None:
        kept = [(batch, batch.views.clone()) for batch in make(name).epoch(0)]
        assert all(torch.equal(batch.views, copy) for batch, copy in kept)

    def test_synthetic_batches_carry_the_plan(self, make: OpenLoader, dataset: ImageDataset) -> None:
        order = BatchOrder(24, 8, seed=PLAN.seed)
        for execute in (True, False):
            loader = SyntheticLoader(dataset, PLAN, order=order, workers=1, execute=execute)
            batches = list(loader.epoch(0))
            for batch, other in zip(batches, make("torch").epoch(0), strict=True):
                assert torch.equal(batch.index, other.index) and torch.equal(batch.label, other.label)
                assert batch.views.shape == other.views.shape
                assert not execute or torch.equal(batch.composition, other.composition)
            loader.close()
        assert len(synthetic_dataset(5).subset([1, 2]).paths) == 2


class TestChannels:
    @pytest.mark.parametrize("name", NAMES)
    def test_16_bit_grey_keeps_its_range(self, name: LoaderName, tmp_path: Path) -> None:
        if name == "ffcv":
            pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
        ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
        (tmp_path / "images").mkdir()
        for file in ("x.png", "x.tif"):
            Image.fromarray(ramp).save(tmp_path / "images" / file)
        path = tmp_path / "images"
        if name == "ffcv":
            convert(open_source(path), tmp_path / "x.beton", "beton", Settings(raw=True), workers=1)
            path = tmp_path / "x.beton"
        plan = ViewPlan(56, contrastive=(), original="center", lengths=())  # 7/8 of the image, at its own scale
        order, workers = BatchOrder(2, 2), 0 if name == "torch" else 1
        with closing(open_loader(name, open_images(path), plan, order, workers=workers, **ONE_CHANNEL)) as loader:
            batch = next(loader.epoch(0))
        assert batch.original.shape == (2, 1, 56, 56)
        assert batch.original.is_contiguous(memory_format=torch.channels_last)
        expected = torch.from_numpy(np.round(ramp[4:60, 4:60] / 257)).float() / 255
        assert torch.equal(batch.original, expected.expand(2, 1, -1, -1))

    def test_one_channel_is_the_luma_of_every_view(self, dataset: ImageDataset) -> None:
        """Such as Pillow's, which is rounded to whole levels."""
        order = BatchOrder(24, 8)
        batches = []
        for values in (ONE_CHANNEL, {"mean": (0.0,) * 3, "std": (1.0,) * 3}):
            with closing(open_loader("torch", dataset, ViewPlan(32), order, workers=0, **values)) as loader:
                batches.append(next(loader.epoch(0)))
        grey, colour = batches
        for one, three in ((grey.views, colour.views), (grey.composites, colour.composites)):
            assert one.shape == (len(one), 8, 1, 32, 32)
            for found, view in zip(one.flatten(0, 1), three.flatten(0, 1), strict=True):
                picture = Image.fromarray((view * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy())
                assert np.abs(found[0].numpy() * 255 - np.asarray(picture.convert("L"))).max() < 0.51

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_grey_pixels_stay_as_they_are(self, dtype: torch.dtype) -> None:
        grey = torch.randn(5, 5, 1).to(dtype)
        assert torch.equal(luma(grey.expand(5, 5, 3)), grey)


class TestFaults:
    @pytest.mark.parametrize(("name", "workers"), [("torch", 0), ("torch", 1), ("dali", 2)])
    @pytest.mark.parametrize("kind", ["half", "rubbish", "gone"])
    def test_a_broken_file_is_named(
        self, make: OpenLoader, photo_copy: Path, name: str, workers: int, kind: str
    ) -> None:
        images = open_folder(photo_copy, quiet=True)
        victim = photo_copy / "coffee" / "2.jpg"
        whole = victim.read_bytes()
        victim.write_bytes(whole[: len(whole) // 2] if kind == "half" else b"rubbish")
        if kind == "gone":
            victim.unlink()
        loader = make(name, images, workers=workers)
        with pytest.raises(UserError, match=r"coffee/2.jpg: (truncated|not an image|No such file)") as error:
            list(loader.epoch(0))
        assert "\n" not in str(error.value)
        victim.write_bytes(whole)
        assert len(list(loader.epoch(0))) == 3  # the loader is usable again
        loader.close()
        assert workers == 1 or threads() == []  # with workers, the raised error keeps a queue

    def test_a_broken_awkward_file_is_named(
        self, make: OpenLoader, photo_copy: Path, photos: dict[str, Image.Image]
    ) -> None:
        victim = photo_copy / "coffee" / "x.webp"
        photos["coffee"].save(victim)
        images = open_folder(photo_copy, quiet=True)
        victim.write_bytes(victim.read_bytes()[:500])
        for name in LOADERS:
            with pytest.raises(UserError, match=r"coffee/x.webp: "):
                list(make(name, images, batch_size=5).epoch(0))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    @pytest.mark.parametrize("name", NAMES)
    def test_a_missing_gpu_is_one_line(self, make: OpenLoader, name: str) -> None:
        with pytest.raises(UserError, match="a GPU was asked for"):
            make(name, device="cuda")


@pytest.mark.parametrize(("setting", "advised"), [(None, True), ("8", True), ("32", False)])
def test_library_users_are_told_of_cudas_queues(
    setting: str | None, advised: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", setting or "")
    if setting is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    cuda_env.advise.__wrapped__()
    assert ("set CUDA_DEVICE_MAX_CONNECTIONS=32" in caplog.text) == advised


def test_the_example_in_the_readme_runs(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    text = (Path(__file__).parents[2] / "loaders" / "README.md").read_text()
    code = next(block for block in text.split("```python\n")[1:] if "open_loader" in block).split("```")[0]
    changes = {"imagenet/train": str(photo_folder), "cuda": "cpu", "256)": "4)", "bfloat16": "float32"}
    for there, here in changes.items():
        code = code.replace(there, here)
    names: dict[str, Any] = {}
    exec(code, names)
    batch = names["batch"]
    assert batch.views.shape == (2, 4, 3, 224, 224) and batch.composites.shape == (3, 4, 3, 224, 224)
    assert batch.original.shape == (4, 3, 224, 224) and batch.composition.shape == (3, 4, 14)


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("name", NAMES)
    def test_leaving_early_leaves_no_threads(self, make: OpenLoader, name: str) -> None:
        loader = make(name, batch_size=2)
        expected = [batch.index.tolist() for batch in make(name, batch_size=2).epoch(1)]
        for _ in range(3):
            for _batch in loader.epoch(0):
                break
            assert threads() == []
        assert [batch.index.tolist() for batch in loader.epoch(1)] == expected

    @pytest.mark.parametrize("name", NAMES)
    def test_close_ends_an_open_epoch(self, make: OpenLoader, name: str) -> None:
        loader = make(name, batch_size=2)
        batches = loader.epoch(0)
        next(batches)
        loader.close()
        loader.close()
        assert threads() == [] and list(batches) == []
        batches = loader.epoch(0)
        next(batches)
        del batches  # a forgotten iterator ends its threads as well
        gc.collect()
        assert threads() == [] and len(list(loader.epoch(0))) == 12

    @pytest.mark.parametrize("name", NAMES)
    def test_a_new_epoch_ends_the_one_that_is_open(self, make: OpenLoader, name: str) -> None:
        loader = make(name, batch_size=2)
        old = loader.epoch(0)
        next(old)
        expected = next(make(name, batch_size=2).epoch(1))
        assert same(next(loader.epoch(1)), expected)
        assert list(old) == []


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_gpu_sees_what_the_cpu_sees(self, make: OpenLoader, name: str, dtype: torch.dtype) -> None:
        loader = make(name, device="cuda", dtype=dtype, workers=2)
        same_decoder = name != "dali" and dtype == torch.float32
        for epoch in range(2):
            for left, right in zip(make(name).epoch(epoch), loader.epoch(epoch), strict=True):
                assert right.views.is_cuda and right.views.dtype == dtype
                assert right.original.is_contiguous(memory_format=torch.channels_last)
                for field in FIELDS if same_decoder else ("composition", "label", "index"):
                    assert torch.equal(getattr(left, field), getattr(right, field).cpu())
                assert grey_levels(left.original, right.original.float().cpu()) < 2

    def test_dali_names_a_broken_file_and_goes_on(self, make: OpenLoader, photo_copy: Path) -> None:
        images = open_folder(photo_copy, quiet=True)
        victim = photo_copy / "coffee" / "2.jpg"
        whole = victim.read_bytes()
        victim.write_bytes(b"rubbish")
        loader = make("dali", images, device="cuda")
        with pytest.raises(UserError, match=r"coffee/2.jpg: "):
            list(loader.epoch(0))
        victim.write_bytes(whole)
        assert len(list(loader.epoch(0))) == 3
        loader.close()
        assert threads() == []

    @pytest.mark.parametrize("name", [*NAMES, "synthetic"])
    def test_leaving_early_and_resuming(self, make: OpenLoader, name: str) -> None:
        loader = make(name, batch_size=4, device="cuda", workers=2)
        whole = list(loader.epoch(1))
        for _ in range(5):
            for _batch in loader.epoch(0):
                break
            assert threads() == []
        assert all(same(a, b) for a, b in zip(whole[2:], loader.epoch(1, start_step=2), strict=True))


class TestPrefetch:
    def test_items_arrive_in_order_from_a_thread(self) -> None:
        def source() -> Generator[str, None, None]:
            for _ in range(5):
                yield threading.current_thread().name

        with Prefetch(source()) as names:
            assert list(names) == ["cocor-prefetch"] * 5
        assert threads() == []

    def test_exceptions_are_carried_over(self) -> None:
        def source() -> Generator[int, None, None]:
            yield 1
            raise UserError("broken")

        items = Prefetch(source())
        assert next(items) == 1
        with pytest.raises(UserError, match="broken"):
            next(items)
        assert list(items) == [] and threads() == []

    def test_work_ahead_is_bounded(self) -> None:
        made = []

        def source() -> Generator[int, None, None]:
            for i in range(100):
                made.append(i)
                yield i

        with Prefetch(source(), depth=2) as items:
            next(items)
            time.sleep(0.1)
            assert len(made) <= 4
