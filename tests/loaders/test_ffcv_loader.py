"""The FFCV loader shows what the others show, names damage, leaves nothing behind and its process as it was."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ffcv_writer import write_by_ffcv
from helpers.loading import OpenLoader, grey_levels, opening, threads
from PIL import Image

from loaders.datasets.bad_samples import BadSamples
from loaders.datasets.beton import JPEG, RAW
from loaders.datasets.dataset import open_folder
from loaders.datasets.stored import StoredDataset, open_stored
from loaders.errors import UserError
from loaders.ffcv.loader import FfcvLoader
from loaders.ffcv.patches import load_ffcv
from loaders.open import open_loader
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source
from loaders.prep.verify import verify
from loaders.torch_loader import resized_crop
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import ViewPlan

pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
pytestmark = pytest.mark.ffcv

SIZE = 32
PLAN = ViewPlan(size=SIZE, seed=3)
LOADERS = ("torch", "dali", "ffcv")


@pytest.fixture(scope="module")
def images(photo_beton: Path) -> StoredDataset:
    return open_stored(photo_beton)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, Image.Image]) -> Path:
    """A file by FFCV's own writer, so without names and checksums: JPEGs and raw pixels in turn."""
    crops = [
        (photo.crop((0, 0, 120 + 40 * i, 150)), label) for label, photo in enumerate(photos.values()) for i in range(4)
    ]
    path = tmp_path_factory.mktemp("own") / "own.beton"
    write_by_ffcv(path, crops, "proportion", compress_probability=0.7)
    return path


@pytest.fixture
def make(images: StoredDataset) -> Iterator[OpenLoader]:
    yield from opening(images, images, PLAN)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "3", **environment},
        cwd=Path(__file__).parents[2],
    )


class TestOnePlan:
    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_all_loaders_agree_on_one_file(self, make: OpenLoader, world: int) -> None:
        seen = []
        for rank in range(world):
            options = {"rank": rank, "world_size": world, "drop_last": False}
            epochs = [make(name, **options).epoch(2) for name in LOADERS]
            for reference, dali, ffcv in zip(*epochs, strict=True):
                for other in (dali, ffcv):
                    for name in ("composition", "label", "index"):
                        assert torch.equal(getattr(reference, name), getattr(other, name))
                    assert grey_levels(reference.original, other.original) < 2
                    assert grey_levels(reference.views, other.views) < 3  # the same boxes, flips and programs
                assert grey_levels(reference.original, ffcv.original) < 0.3
                seen.append(ffcv.index)
        assert sorted(torch.cat(seen).tolist()) == list(range(24))

    @pytest.mark.parametrize("size", [32, 224])
    def test_crops_are_pillows(self, images: StoredDataset, size: int) -> None:
        loader = FfcvLoader(images, ViewPlan(size), order=BatchOrder(24, 6), workers=2)
        for job, crops in loader.crops(range(1), 0):
            for i, index in enumerate(job.planned.index):
                image = images.image(index).decode()
                for crop, box in zip(crops[i].numpy().astype(int), job.planned.boxes[i], strict=True):
                    difference = np.abs(crop - resized_crop(image, box, size))
                    assert difference.max() <= 3 and difference.mean() < 0.3
        loader.close()

    def test_the_released_recipe_has_more_crops(self, make: OpenLoader) -> None:
        plan = ViewPlan(size=SIZE, original="weak", originals=2)
        left, right = (next(make(name, plan=plan).epoch(0)) for name in ("torch", "ffcv"))
        assert right.original.shape == (16, 3, SIZE, SIZE) and grey_levels(left.original, right.original) < 1

    def test_a_sample_may_come_twice_in_a_batch(self, make: OpenLoader, images: StoredDataset) -> None:
        order = CyclicOrder(3, 8, steps=4, seed=1)
        loaders = [make(name, images.subset([3, 8, 20]), order=order) for name in ("torch", "ffcv")]
        for left, right in zip(*(loader.epoch(1) for loader in loaders), strict=True):
            assert torch.equal(left.index, right.index) and torch.equal(left.label, right.label)
            assert grey_levels(left.original, right.original) < 0.3
        first, again = (right.index == right.index[0]).nonzero().flatten().tolist()[:2]
        assert grey_levels(right.original[first], right.original[again]) > 3


class TestOneDecode:
    """Decoding is what costs: an image is decoded once for all the views of a sample."""

    @pytest.mark.parametrize("recipe", ["paper", "released"])
    def test_ffcv_decodes_an_image_once_a_sample(
        self, images: StoredDataset, recipe: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_ffcv()
        from loaders.ffcv import decoder

        plan = ViewPlan(SIZE) if recipe == "paper" else ViewPlan(SIZE, original="weak", originals=5)
        decoded: list[int] = []
        decode_crops = decoder.decode_crops

        def counting(places: np.ndarray, stored: np.ndarray, *rest: object) -> None:
            decoded.extend(stored[places, decoder.ROW].tolist())
            decode_crops(places, stored, *rest)

        monkeypatch.setattr(decoder, "decode_crops", counting)
        monkeypatch.setattr(type(images.file), "decode", lambda *_: pytest.fail("decoded again, by Pillow"))
        loader = FfcvLoader(images, plan, order=BatchOrder(24, 8), workers=2)
        for epoch in range(2):
            decoded.clear()
            batches = list(loader.epoch(epoch))
            assert sorted(decoded) == list(range(24)) == sorted(torch.cat([b.index for b in batches]).tolist())
            assert batches[0].views.shape[:2] == (2, 8) and len(batches[0].composites) == 3
        assert plan.layout.crops == (3 if recipe == "paper" else 2 + 5 + 3)
        loader.close()


class TestPixels:
    def test_files_of_ffcvs_own_writer(self, make: OpenLoader, own: Path) -> None:
        stored = open_stored(own)
        assert stored.file.beton.record is None
        assert set(stored.file.beton.table["mode"].tolist()) == {JPEG, RAW}
        assert stored.labels.tolist() == sorted([0, 1, 2, 3] * 4) and stored.classes == ["0", "1", "2", "3"]
        for reference, dali, ffcv in zip(*(make(name, stored).epoch(0) for name in LOADERS), strict=True):
            assert torch.equal(reference.label, ffcv.label)
            assert grey_levels(reference.original, ffcv.original) < 0.3
            assert grey_levels(reference.original, dali.original) < 2

    def test_harmless_warnings_are_no_damage(self, make: OpenLoader, photo_folder: Path, tmp_path: Path) -> None:
        """Pillow and others accept extraneous bytes before a marker; ImageNet has such files."""
        (tmp_path / "source" / "a").mkdir(parents=True)
        data = (photo_folder / "coffee" / "2.jpg").read_bytes()
        (tmp_path / "source" / "a" / "x.jpg").write_bytes(data[:-2] + bytes(8) + data[-2:])
        convert(open_source(tmp_path / "source"), tmp_path / "x.beton", "beton", Settings(), workers=1)
        stored = open_stored(tmp_path / "x.beton")
        assert stored.file.read(0)[-10:] == bytes(8) + data[-2:]
        left, right = (next(make(name, stored, batch_size=1).epoch(0)) for name in ("torch", "ffcv"))
        assert grey_levels(left.original, right.original) < 0.3


class TestFaults:
    KINDS = ("half", "end", "zeros", "rubbish", "neighbour", "scan", "marker", "200 zeros")

    @staticmethod
    def damaged(path: Path, to: Path, kind: str) -> tuple[StoredDataset, int]:
        """The file at ``path`` with a damaged JPEG, and its place."""
        table = open_stored(path).file.beton
        row = next(i for i in range(3, 16) if table.table["mode"][i] == 0 and i % 6 != 5)
        whole = bytes(table.read(row))
        other = bytes(table.read(row - 1 if table.table["mode"][row - 1] == 0 else row + 1))
        middle = len(whole) // 2
        broken = {
            "half": whole[:middle] + bytes(len(whole) - middle),
            "end": whole[:-40] + bytes(40),
            "zeros": bytes(len(whole)),
            "rubbish": np.random.default_rng(0).bytes(len(whole)),
            "neighbour": other[: len(whole)].ljust(len(whole), b"\0"),
            "scan": whole[:middle] + b"\xff\xda" + whole[middle + 2 :],
            "marker": whole[:middle] + b"\xff\xd0" + whole[middle + 2 :],
            "200 zeros": whole[: len(whole) * 3 // 10] + bytes(200) + whole[len(whole) * 3 // 10 + 200 :],
        }[kind]
        shutil.copyfile(path, to)
        with to.open("r+b") as file:
            file.seek(int(table.table["data_ptr"][row]))
            file.write(broken)
        return open_stored(to), row

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_damaged_image_is_named(self, make: OpenLoader, photo_beton: Path, tmp_path: Path, kind: str) -> None:
        damaged, row = self.damaged(photo_beton, tmp_path / "x.beton", kind)
        loader = make("ffcv", damaged)
        for _ in range(2):
            with pytest.raises(UserError, match=rf"x.beton: .*\(image {row}\)") as error:
                list(loader.epoch(0))
            assert "\n" not in str(error.value) and threads() == []
        rest = damaged.subset([i for i in range(len(damaged)) if i != row])
        assert len(list(make("ffcv", rest, batch_size=5).epoch(0))) == len(rest) // 5

    @pytest.mark.parametrize("kind", KINDS)
    def test_loaders_agree_without_checksums(self, make: OpenLoader, own: Path, tmp_path: Path, kind: str) -> None:
        """Pillow decides for all what is usable, and verify names what it lets pass."""
        damaged, row = self.damaged(own, tmp_path / "x.beton", kind)
        epochs = {}
        for name in LOADERS:
            images = damaged.subset(range(16))
            images = replace(images, bad_samples=BadSamples())
            epochs[name] = list(make(name, images, "skip", batch_size=16, shuffle=False).epoch(0))
        reference, dali, ffcv = (epoch[0] for epoch in epochs.values())
        assert torch.equal(reference.index, ffcv.index)
        if kind != "scan":  # DALI does not notice a second scan in the middle of the first
            assert torch.equal(reference.index, dali.index)
        assert grey_levels(reference.original, ffcv.original) < 0.3
        assert (row in reference.index) == (kind in ("marker", "200 zeros"))
        assert [name for name, _ in verify(tmp_path / "x.beton", 1)[1]] == [damaged.names[row]]

    def test_a_folder_is_refused_with_the_remedy(self, photo_folder: Path) -> None:
        folder = open_folder(photo_folder, quiet=True)
        with pytest.raises(UserError, match=r"reads .beton files; make one with: cocor-prep convert .* NAME.beton"):
            open_loader("ffcv", folder, PLAN, BatchOrder(24, 8))

    def test_missing_ffcv_is_one_line_with_the_remedy(
        self, images: StoredDataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import loaders.ffcv.patches

        loaders.ffcv.patches._load.cache_clear()
        monkeypatch.setitem(sys.modules, "ffcv", None)
        remedy = r"missing: the Python package ffcv.*apt-get install .* pip install ffcv=="
        with pytest.raises(UserError, match=remedy) as error:
            FfcvLoader(images, PLAN, order=BatchOrder(24, 8))
        assert "\n" not in str(error.value)


class TestTheProcessStaysAsItWas:
    def test_threads_start_method_and_random_state(self, photo_beton: Path) -> None:
        code = f"""
import multiprocessing, numba, numpy, torch
torch.set_num_threads(3)
bytes_type = numba.types.uint8[::1]
state = numpy.random.get_state()[1].tolist()
from loaders.datasets.stored import open_stored
from loaders.ffcv.loader import FfcvLoader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan
loader = FfcvLoader(open_stored({str(photo_beton)!r}), ViewPlan(32), order=BatchOrder(24, 8), workers=2)
for epoch in range(2):
    seen = [torch.get_num_threads() for batch in loader.epoch(epoch)]
loader.close()
del loader
assert seen == [3] * 3 and torch.get_num_threads() == 3, seen
assert bytes_type.mutable
assert numpy.random.get_state()[1].tolist() == state
assert multiprocessing.get_start_method(allow_none=True) is None
multiprocessing.set_start_method("spawn")
"""
        result = run_python(code)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
