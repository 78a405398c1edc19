"""All loaders execute one plan: same order, labels, boxes and programs, nearly the same pixels; nothing stays."""

import errno
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from multiprocessing import synchronize
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hostile import time_limit
from helpers.loading import grey_levels, opening, same, threads
from helpers.prep_cases import stray_jpeg, twice_oriented_jpeg, write_all
from PIL import Image

import loaders.torch_loader
from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Loader
from loaders.dali import cuda_env
from loaders.dali.loader import DaliLoader
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.errors import UserError
from loaders.open import LoaderName, open_loader
from loaders.pipeline import prefetch
from loaders.pipeline.prefetch import Prefetch
from loaders.synthetic import SyntheticLoader, synthetic_dataset
from loaders.torch_loader import TorchLoader, resized_crop
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import ViewPlan

SIZE = 32
PLAN = ViewPlan(size=SIZE, seed=3)
LOADERS = {"torch": TorchLoader, "dali": DaliLoader}


@pytest.fixture(scope="module")
def dataset(photo_folder: Path) -> ImageDataset:
    return open_folder(photo_folder, quiet=True)


@pytest.fixture
def make(dataset: ImageDataset) -> Iterator[Callable[..., Loader]]:
    yield from opening(LOADERS, dataset, PLAN)


class TestOnePlan:
    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_loaders_agree_and_ranks_share_the_epoch(self, make: Callable[..., Loader], world: int) -> None:
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

    def test_world_size_does_not_change_a_sample(self, make: Callable[..., Loader]) -> None:
        whole = next(make("dali").epoch(0))
        half = next(make("dali", rank=1, world_size=2).epoch(0))
        assert torch.equal(whole.original[4:], half.original) and torch.equal(whole.views[:, 4:], half.views)

    @pytest.mark.parametrize("name", LOADERS)
    def test_batches_are_as_promised(self, make: Callable[..., Loader], dataset: ImageDataset, name: str) -> None:
        batch = next(iter(make(name).epoch(0)))
        assert batch.views.shape == (2, 8, 3, SIZE, SIZE) and batch.original.shape == (8, 3, SIZE, SIZE)
        assert batch.composites.shape == (3, 8, 3, SIZE, SIZE) and batch.composition.shape == (3, 8, 14)
        assert batch.composition.sum(-1).tolist() == [[1] * 8, [2] * 8, [3] * 8]
        for image in (batch.original, *batch.views, *batch.composites):
            assert image.is_contiguous(memory_format=torch.channels_last) and image.dtype == torch.float32
        assert batch.label.tolist() == dataset.labels[batch.index].tolist()

    @pytest.mark.parametrize("name", [*LOADERS, "synthetic"])
    def test_images_are_normalised_as_asked(self, dataset: ImageDataset, name: LoaderName) -> None:
        order, plain = BatchOrder(24, 8), {"mean": (0, 0, 0), "std": (1, 1, 1)}
        usual, other = (open_loader(name, dataset, PLAN, order, workers=1, **more) for more in ({}, plain))
        with closing(usual), closing(other):
            one, two = (next(loader.epoch(0)).original for loader in (usual, other))
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        assert 0 <= two.min() < two.max() <= 1 and torch.allclose(one * std + mean, two, atol=1e-6)

    @pytest.mark.parametrize("name", LOADERS)
    def test_views_change_with_epoch_and_view(self, make: Callable[..., Loader], name: str) -> None:
        loader = make(name, shuffle=False)
        first, second = next(loader.epoch(0)), next(loader.epoch(1))
        assert torch.equal(first.index, second.index)
        assert grey_levels(first.views, second.views) > 10
        assert grey_levels(first.views[0], first.views[1]) > 10
        orders = [next(make(name).epoch(e)).index.tolist() for e in (0, 1)]
        assert orders[0] != orders[1]

    @pytest.mark.parametrize("name", [*LOADERS, "synthetic"])
    def test_resuming_in_mid_epoch_gives_the_same_batches(
        self, make: Callable[..., Loader], dataset: ImageDataset, name: str
    ) -> None:
        if name == "synthetic":
            loader: Loader = SyntheticLoader(dataset, PLAN, order=BatchOrder(24, 8), workers=1)
        else:
            loader = make(name)
        whole, rest = list(loader.epoch(5)), list(loader.epoch(5, start_step=1))
        assert len(whole) == 3 and len(rest) == 2
        assert all(same(a, b) for a, b in zip(whole[1:], rest, strict=True))

    @pytest.mark.parametrize("kind", LOADERS.values())
    def test_small_sets_cycle_with_new_views_at_every_pass(
        self, dataset: ImageDataset, kind: Callable[..., Loader]
    ) -> None:
        images = dataset.subset(range(6))
        loader = kind(images, PLAN, order=CyclicOrder(6, 4, steps=3, seed=PLAN.seed), workers=0)
        batches = list(loader.epoch(0))
        assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == sorted([*range(6)] * 2)
        place = torch.cat([batch.index for batch in batches[:2]])[:6].tolist().index(int(batches[2].index[0]))
        before = torch.cat([batch.original for batch in batches[:2]])[place]
        assert grey_levels(before, batches[2].original[0]) > 5
        loader.close()

    def test_worker_processes_change_nothing(self, make: Callable[..., Loader], dataset: ImageDataset) -> None:
        loader = TorchLoader(dataset, PLAN, order=BatchOrder(24, 8, seed=PLAN.seed), workers=2)
        assert all(same(a, b) for a, b in zip(loader.epoch(0), make("torch").epoch(0), strict=True))
        loader.close()

    def test_workers_need_no_temporary_folder(
        self, make: Callable[..., Loader], dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
        with time_limit(), closing(TorchLoader(dataset, PLAN, order=BatchOrder(24, 8, seed=3), workers=2)) as loader:  # type: ignore[type-var]
            assert all(same(a, b) for a, b in zip(loader.epoch(0), make("torch").epoch(0), strict=True))

    @pytest.mark.parametrize("lack", [errno.ENOSPC, errno.EROFS, errno.ENOENT])  # full, read-only, missing
    def test_missing_semaphores_are_one_line(
        self, dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch, lack: int
    ) -> None:
        def refuse() -> str:  # where the system would
            raise OSError(lack, os.strerror(lack))

        monkeypatch.setattr(synchronize.SemLock, "_make_name", staticmethod(refuse))
        loader = TorchLoader(dataset, PLAN, order=BatchOrder(24, 8), workers=2)
        with time_limit(), pytest.raises(UserError, match=f"need semaphores in /dev/shm: {os.strerror(lack)}; "):
            next(loader.epoch(0))

    def test_workers_that_hang_are_killed(self, dataset: ImageDataset) -> None:
        with closing(TorchLoader(dataset, PLAN, order=BatchOrder(24, 4, seed=3), workers=2)) as loader:  # type: ignore[type-var]
            next(_batches := loader.epoch(0))  # kept, as its end is the workers'
            workers = multiprocessing.active_children()
            for worker in workers:
                worker.terminate()
                worker.join(60)
            assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2

    def test_worker_processes_are_forked_in_programs_that_spawn_theirs(
        self, dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loaders.torch_loader, "resized_crop", lambda *_: np.zeros((SIZE, SIZE, 3), np.uint8))
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("spawn", force=True)
        loader = TorchLoader(dataset, PLAN, order=BatchOrder(24, 8), workers=1)
        try:
            assert all((batch.original == batch.original[:, :, :1, :1]).all() for batch in loader.epoch(0))
        finally:
            multiprocessing.set_start_method(before, force=True)
            loader.close()

    def test_worker_processes_leave_their_parents_garbage_alone(
        self, dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        class Cycle:
            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                (tmp_path / f"{os.getpid()}").touch()

        def crop(*arguments: Any) -> np.ndarray:
            gc.collect()
            return resized_crop(*arguments)

        monkeypatch.setattr(loaders.torch_loader, "resized_crop", crop)
        loader = TorchLoader(dataset, PLAN, order=BatchOrder(24, 8), workers=1)
        gc.disable()
        try:
            Cycle()
            assert len(list(loader.epoch(0))) == 3
        finally:
            gc.enable()
        loader.close()
        gc.collect()
        assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}"]

    def test_the_released_recipe_has_several_originals(self, make: Callable[..., Loader]) -> None:
        plan = ViewPlan(size=SIZE, original="weak", originals=2)
        left, right = (next(make(name, plan=plan).epoch(0)) for name in LOADERS)
        assert left.original.shape == (16, 3, SIZE, SIZE)
        assert left.original.is_contiguous(memory_format=torch.channels_last)
        assert grey_levels(left.original, right.original) < 3


class TestPixels:
    def test_awkward_files_look_the_same_everywhere(
        self, make: Callable[..., Loader], photos: dict[str, Image.Image], tmp_path: Path
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

    def test_jpegs_that_crash_dali_or_that_it_turns_otherwise_look_the_same_everywhere(
        self, make: Callable[..., Loader], tmp_path: Path
    ) -> None:
        write_all(tmp_path, {f"{i}.jpg": twice_oriented_jpeg(*pair) for i, pair in enumerate([(6, 3), (5, 1), (1, 8)])})
        write_all(tmp_path, {"stray.jpg": stray_jpeg()})
        images = open_folder(tmp_path, quiet=True)
        assert not images.plain.any()
        left, right = (next(make(name, images, batch_size=4).epoch(0)) for name in LOADERS)
        assert grey_levels(left.original, right.original) < 2

    @pytest.mark.parametrize("name", LOADERS)
    def test_kept_batches_are_not_overwritten(self, make: Callable[..., Loader], name: str) -> None:
        kept, copies = [], []
        for batch in make(name).epoch(0):
            kept.append(batch)
            copies.append(batch.views.clone())
        assert all(torch.equal(batch.views, copy) for batch, copy in zip(kept, copies, strict=True))

    def test_synthetic_batches_carry_the_plan(self, make: Callable[..., Loader], dataset: ImageDataset) -> None:
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


class TestFaults:
    @pytest.mark.parametrize("name", LOADERS)
    @pytest.mark.parametrize("kind", ["half", "rubbish", "gone"])
    def test_a_broken_file_is_named(
        self, make: Callable[..., Loader], photo_copy: Path, name: str, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        images = open_folder(photo_copy, quiet=True)
        victim = photo_copy / "coffee" / "2.jpg"
        whole = victim.read_bytes()
        victim.write_bytes(whole[: len(whole) // 2] if kind == "half" else b"rubbish")
        if kind == "gone":
            victim.unlink()
        loader = make(name, images)
        with pytest.raises(UserError, match=r"coffee/2.jpg: (truncated|not an image|No such file)") as error:
            list(loader.epoch(0))
        assert "\n" not in str(error.value)
        victim.write_bytes(whole)
        assert len(list(loader.epoch(0))) == 3  # the loader is usable again
        loader.close()
        assert threads() == []

    def test_a_broken_awkward_file_is_named(
        self, make: Callable[..., Loader], photo_copy: Path, photos: dict[str, Image.Image]
    ) -> None:
        victim = photo_copy / "coffee" / "x.webp"
        photos["coffee"].save(victim)
        images = open_folder(photo_copy, quiet=True)
        victim.write_bytes(victim.read_bytes()[:500])
        for name in LOADERS:
            with pytest.raises(UserError, match=r"coffee/x.webp: "):
                list(make(name, images, batch_size=5).epoch(0))

    def test_a_broken_file_in_a_worker_process_is_named(self, photo_copy: Path) -> None:
        images = open_folder(photo_copy, quiet=True)
        (photo_copy / "coffee" / "2.jpg").write_bytes(b"rubbish")
        loader = TorchLoader(images, PLAN, order=BatchOrder(24, 8), workers=1)
        with pytest.raises(UserError, match=r"coffee/2.jpg: not an image"):
            list(loader.epoch(0))
        loader.close()

    @pytest.mark.parametrize(
        "fault",
        [
            OSError(errno.EMFILE, "Too many open files"),
            RuntimeError("Too many open files. Communication with the workers is no longer possible."),  # PyTorch's
        ],
    )
    def test_few_open_files_are_said_to_be_the_reason(self, fault: RuntimeError | OSError) -> None:
        told = loaders.torch_loader._explain(fault)
        assert isinstance(told, UserError) and "too many open files: raise the limit (ulimit -n 4096)" in str(told)

    def test_one_thread_too_many_is_no_more_than_its_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        said: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", said.append)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            Prefetch(iter([]))  # type: ignore[arg-type]
        gc.collect()
        assert not said

    def test_missing_dali_is_one_line_with_the_remedy(
        self, dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "nvidia.dali", None)
        with pytest.raises(UserError, match="pip install nvidia-dali"):
            DaliLoader(dataset, PLAN, order=BatchOrder(24, 8))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    @pytest.mark.parametrize("name", LOADERS)
    def test_a_missing_gpu_is_one_line(self, dataset: ImageDataset, name: str) -> None:
        with pytest.raises(UserError, match="a GPU was asked for"):
            LOADERS[name](dataset, PLAN, order=BatchOrder(24, 8), device="cuda")


@pytest.mark.parametrize(("setting", "advised"), [(None, True), ("8", True), ("32", False)])
def test_whoever_uses_dali_without_our_commands_is_told_of_the_queues(
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
    for there, here in (
        ("imagenet/train", str(photo_folder)),
        ("cuda", "cpu"),
        ("256)", "4)"),
        ("bfloat16", "float32"),
    ):
        code = code.replace(there, here)
    names: dict[str, Any] = {}
    exec(code, names)
    batch = names["batch"]
    assert batch.views.shape == (2, 4, 3, 224, 224) and batch.composites.shape == (3, 4, 3, 224, 224)
    assert batch.original.shape == (4, 3, 224, 224) and batch.composition.shape == (3, 4, 14)


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("name", LOADERS)
    def test_leaving_early_leaves_no_threads(self, make: Callable[..., Loader], name: str) -> None:
        loader = make(name, batch_size=2)
        expected = [batch.index.tolist() for batch in make(name, batch_size=2).epoch(1)]
        for _ in range(3):
            for _batch in loader.epoch(0):
                break
            assert threads() == []
        assert [batch.index.tolist() for batch in loader.epoch(1)] == expected

    @pytest.mark.parametrize("name", LOADERS)
    def test_close_ends_an_open_epoch_and_may_be_repeated(self, make: Callable[..., Loader], name: str) -> None:
        loader = make(name, batch_size=2)
        batches = loader.epoch(0)
        next(batches)
        loader.close()
        loader.close()
        assert threads() == []
        assert list(batches) == []

    @pytest.mark.parametrize("name", LOADERS)
    def test_a_new_epoch_ends_the_one_that_is_open(self, make: Callable[..., Loader], name: str) -> None:
        loader = make(name, batch_size=2)
        old = loader.epoch(0)
        next(old)
        expected = next(make(name, batch_size=2).epoch(1))
        assert same(next(loader.epoch(1)), expected)
        assert list(old) == []

    @pytest.mark.parametrize("name", LOADERS)
    def test_an_old_epoch_that_is_closed_late_leaves_the_new_one_whole(
        self, make: Callable[..., Loader], name: str
    ) -> None:
        loader = make(name, batch_size=2)
        old, new = loader.epoch(0), loader.epoch(1)
        next(old)
        next(new)
        old.close()
        assert len(list(new)) == loader.steps_per_epoch - 1
        assert threads() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    @pytest.mark.parametrize("kind", [TorchLoader, DaliLoader])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_gpu_sees_what_the_cpu_sees(
        self, make: Callable[..., Loader], dataset: ImageDataset, kind: Callable[..., Loader], dtype: torch.dtype
    ) -> None:
        order = BatchOrder(24, 8, seed=PLAN.seed)
        loader = kind(dataset, PLAN, order=order, device="cuda", dtype=dtype, workers=2)
        for epoch in range(2):
            for left, right in zip(make("torch").epoch(epoch), loader.epoch(epoch), strict=True):
                assert right.views.is_cuda and right.views.dtype == dtype
                assert right.original.is_contiguous(memory_format=torch.channels_last)
                for name in ("composition", "label", "index"):
                    assert torch.equal(getattr(left, name), getattr(right, name).cpu())
                if kind is TorchLoader and dtype == torch.float32:
                    assert torch.equal(left.composites, right.composites.cpu())
                assert grey_levels(left.original, right.original.float().cpu()) < 2
        loader.close()

    def test_dali_on_the_gpu_names_a_broken_file_and_goes_on(self, photo_copy: Path) -> None:
        images = open_folder(photo_copy, quiet=True)
        victim = photo_copy / "coffee" / "2.jpg"
        whole = victim.read_bytes()
        victim.write_bytes(b"rubbish")
        loader = DaliLoader(images, PLAN, order=BatchOrder(24, 8), device="cuda", workers=2)
        with pytest.raises(UserError, match=r"coffee/2.jpg: "):
            list(loader.epoch(0))
        victim.write_bytes(whole)
        assert len(list(loader.epoch(0))) == 3
        loader.close()
        assert threads() == []

    @pytest.mark.parametrize("kind", [TorchLoader, DaliLoader, SyntheticLoader])
    def test_leaving_early_and_resuming(self, dataset: ImageDataset, kind: Callable[..., Loader]) -> None:
        loader = kind(dataset, PLAN, order=BatchOrder(24, 4), device="cuda", workers=2)
        whole = list(loader.epoch(1))
        for _batch in loader.epoch(0):
            break
        assert threads() == []
        assert all(same(a, b) for a, b in zip(whole[2:], loader.epoch(1, start_step=2), strict=True))
        loader.close()


class TestPrefetch:
    def test_items_arrive_in_order_from_another_thread(self) -> None:
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

    def test_a_lost_iterator_stops_and_cleans_up_in_its_thread(self) -> None:
        cleaned = []

        def source() -> Generator[int, None, None]:
            try:
                while True:
                    yield 0
            finally:
                cleaned.append(threading.current_thread().name)

        items = Prefetch(source())
        next(items)
        del items
        gc.collect()
        assert threads() == [] and cleaned == ["cocor-prefetch"]

    def test_garbage_that_is_collected_in_its_own_thread_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(prefetch, "PATIENCE", 0.2)
        lost = threading.Event()

        def source() -> Generator[int, None, None]:
            yield 0
            lost.wait(60)
            gc.collect()
            yield 1

        def lose() -> threading.Thread:
            items = Prefetch(source(), 1)
            items.itself = items  # type: ignore[attr-defined]  # as a traceback may hold the frame that holds it
            next(items)
            return items._thread

        gc.disable()
        try:
            thread = lose()
            lost.set()
            thread.join(60)
        finally:
            gc.enable()
        assert not thread.is_alive() and not caplog.records
