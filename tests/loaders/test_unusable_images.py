"""Images that vanish or break under a loader: another sample with all that is its own takes the place."""

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.loading import OpenLoader, opening
from helpers.runs import flags
from PIL import Image, ImageOps

import loaders.dali.inputs
from cocor.train import main
from loaders.batch import Batch
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.datasets.stored import StoredDataset, open_stored
from loaders.errors import UserError
from loaders.views.plan import Filter, ViewPlan

PLAN = ViewPlan(size=32, seed=3)
NAMES = ("torch", "dali")
FORMS = [("torch", "folder"), ("dali", "folder"), ("torch", "beton"), ("dali", "beton")]
if find_spec("ffcv"):
    FORMS.append(("ffcv", "beton"))
VICTIM = 14  # of the photographs: coffee/2.jpg


@pytest.fixture
def images(photo_copy: Path) -> ImageDataset:
    """The photographs, opened before a test changes them."""
    return open_folder(photo_copy, quiet=True)


@pytest.fixture
def make(images: ImageDataset) -> Iterator[OpenLoader]:
    yield from opening(images, images, PLAN, "skip")


def samples(batches: list[Batch]) -> dict[int, list[torch.Tensor]]:
    """All that a batch holds about a sample, by its index; samples that come twice must be the same."""
    found: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for place, index in enumerate(batch.index.tolist()):
            parts = [batch.label[place], batch.original[place]]
            parts += [part[:, place] for part in (batch.views, batch.composites, batch.composition)]
            again = found.setdefault(index, parts)
            assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    return found


def indices(batches: list[Batch]) -> list[list[int]]:
    return [batch.index.tolist() for batch in batches]


def seen(batches: list[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.index.tolist()]


def rubbish(length: int) -> bytes:
    """As long as the file whose place it takes: another length would show before a decoder sees it."""
    return b"rubbish".ljust(length, b"\0")


def spoil(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.write_bytes({"half": whole[: len(whole) // 2], "rubbish": rubbish(len(whole)), "empty": b""}[kind])


def opened(form: str, folder: Path, beton: Path) -> ImageDataset:
    return open_stored(beton) if form == "beton" else open_folder(folder, quiet=True)


def damage(images: ImageDataset, index: int) -> None:
    if not isinstance(images, StoredDataset):
        return spoil(Path(images.paths[index]), "rubbish")
    with images.root.open("r+b") as file:
        file.seek(int(images.file.beton.table["data_ptr"][images.rows[index]]) + 700)
        file.write(bytes(100))
    return None


@pytest.fixture
def beton_copy(photo_beton: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy.beton"
    path.write_bytes(photo_beton.read_bytes())
    return path


class TestSkip:
    @pytest.mark.parametrize(("name", "form"), FORMS)
    def test_another_sample_takes_the_place(
        self, make: OpenLoader, photo_copy: Path, beton_copy: Path, name: str, form: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        images = opened(form, photo_copy, beton_copy)
        whole = list(make(name, images).epoch(0))
        expected = samples(whole)
        victims = [VICTIM, 3, 21]
        for victim in victims:
            damage(images, victim)
        images = open_stored(beton_copy) if form == "beton" else images
        loader = make(name, images)
        for turn in range(2):  # the second time they are known
            mended = list(loader.epoch(0))
            for old, new in zip(indices(whole), indices(mended), strict=True):
                assert [a == b for a, b in zip(old, new, strict=True)] == [index not in victims for index in old]
            for index, parts in samples(mended).items():
                assert all(torch.equal(a, b) for a, b in zip(parts, expected[index], strict=True)), (turn, index)
        rest = list(loader.epoch(0, start_step=2))
        assert indices(rest) == indices(mended)[2:] and samples(rest).keys() <= expected.keys()
        lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
        assert len(lines) == 3 and lines[-1].endswith("skipped: another image takes its place (3 so far)")
        assert all(sum(images.names[victim] in line for line in lines) == 1 for victim in victims)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("kind", ["gone", "half", "rubbish", "empty", "folder", "pipe"])
    def test_whatever_has_become_of_the_file(
        self, make: OpenLoader, images: ImageDataset, photo_copy: Path, name: str, kind: str
    ) -> None:
        spoil(photo_copy / "coffee" / "2.jpg", kind)
        batches = list(make(name, images).epoch(0))
        assert [len(batch.index) for batch in batches] == [8, 8, 8] and VICTIM not in seen(batches)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("longer", [True, False], ids=["longer file", "as long"])
    def test_a_new_size_is_not_cropped_as_the_old(
        self, make: OpenLoader, images: ImageDataset, photo_copy: Path, name: str, longer: bool
    ) -> None:
        victim = photo_copy / "coffee" / "2.jpg"
        length = victim.stat().st_size
        Image.new("RGB", (50, 40)).save(victim)
        with victim.open("r+b") as file:
            file.truncate(length + longer)  # what follows a JPEG's end is ignored
        assert VICTIM not in seen(list(make(name, images).epoch(0)))
        with pytest.raises(UserError, match=r"coffee/2.jpg: has 50 x 40 pixels, and had \d+ x \d+ when"):
            list(make(name, images, on_error="stop").epoch(0))

    def test_pillow_decides_where_decoders_disagree(
        self, make: OpenLoader, images: ImageDataset, photo_copy: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """DALI refuses bytes between a JPEG's segments, which Pillow and libjpeg-turbo step over."""
        victim = photo_copy / "coffee" / "2.jpg"
        images = open_folder(photo_copy, quiet=True)  # which would know of them
        victim.write_bytes(victim.read_bytes().replace(b"\xff\xdb", b"junk\xff\xdb", 1))
        assert images.file_sizes is not None
        images.file_sizes[VICTIM] += len("junk")  # or its new length would give it away
        for on_error in ("stop", "skip"):
            batches = list(make("dali", images, on_error).epoch(0))
            reference = samples(list(make("torch", images).epoch(0)))
            assert sorted(seen(batches)) == list(range(24))
            assert all(torch.equal(*pair) for pair in zip(samples(batches)[VICTIM], reference[VICTIM], strict=True))
        told = [r.getMessage() for r in caplog.records if "DALI cannot decode it" in r.getMessage()]
        assert len(told) == 1 and "coffee/2.jpg" in told[0]

    @pytest.mark.parametrize("filter", get_args(Filter))
    def test_dali_is_not_given_changed_files(
        self, make: OpenLoader, images: ImageDataset, filter: Filter, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It would crop a larger image as if it were the old one, where it resizes itself."""
        plan = replace(PLAN, filter=filter)
        for place, enlarged in ((VICTIM, 0), (3, 40)):
            path = Path(images.paths[place])
            with Image.open(path) as image:
                other = ImageOps.invert(image.convert("RGB"))
            path.unlink()
            other.resize((other.width + enlarged, other.height + enlarged)).save(path, "JPEG", quality=60)
        shown, expected = (list(make(name, images, plan=plan).epoch(0)) for name in ("dali", "torch"))
        assert indices(shown) == indices(expected) and 3 not in seen(shown)
        assert all(torch.equal(*pair) for pair in zip(samples(shown)[VICTIM], samples(expected)[VICTIM], strict=True))
        lines = [record.getMessage() for record in caplog.records if "changed since" in record.getMessage()]
        assert lines == ["changed since the data set was opened, so decoded by Pillow from now on: coffee/2.jpg"]

    @pytest.mark.parametrize("name", NAMES)
    def test_files_that_vanish_in_mid_epoch(
        self, make: OpenLoader, images: ImageDataset, photo_copy: Path, name: str
    ) -> None:
        expected = samples(list(make(name, images, batch_size=2).epoch(1)))
        batches = []
        for step, batch in enumerate(make(name, images, batch_size=2).epoch(1)):
            batches.append(batch)
            if step == 1:
                for number in range(6):
                    spoil(next(iter((photo_copy / "rocket").glob(f"{number}.*"))), "gone")
        assert len(batches) == 12 and all(len(batch.index) == 2 for batch in batches)
        for index, parts in samples(batches).items():
            assert all(torch.equal(a, b) for a, b in zip(parts, expected[index], strict=True))

    @pytest.mark.parametrize("world", [2, 4])
    def test_stand_ins_are_the_same_on_any_ranks(self, make: OpenLoader, images: ImageDataset, world: int) -> None:
        for number in (0, 1, 2):
            spoil(images.root / "coffee" / f"{number}.jpg", "gone")
        expected = indices(list(make("torch").epoch(0)))
        parts = [make("torch", images.subset(range(24)), rank=rank, world_size=world) for rank in range(world)]
        ranks = [indices(list(part.epoch(0))) for part in parts]
        assert [[i for part in parts for i in part] for parts in zip(*ranks, strict=True)] == expected

    @pytest.mark.parametrize("name", NAMES)
    def test_a_disk_that_is_gone_ends_it(
        self, make: OpenLoader, images: ImageDataset, photo_copy: Path, name: str
    ) -> None:
        photo_copy.rename(photo_copy.with_name("elsewhere"))
        with pytest.raises(UserError, match=r"photos: .* cannot be used.*; is the disk with the data still there\?"):
            list(make(name, images).epoch(0))

    def test_worker_processes_change_nothing(self, make: OpenLoader, images: ImageDataset, photo_copy: Path) -> None:
        spoil(photo_copy / "coffee" / "2.jpg", "half")
        expected = list(make("torch", images).epoch(0))
        for left, right in zip(expected, make("torch", images.subset(range(24)), workers=2).epoch(0), strict=True):
            assert torch.equal(left.index, right.index) and torch.equal(left.views, right.views)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_or_stops_as_it_is_told(
    photo_copy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image that looks right from both ends, so that opening the data set does not find it."""
    victim = photo_copy / "coffee" / "5.png"
    content = victim.read_bytes()
    middle = len(content) // 2
    victim.write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])
    options = {"data": photo_copy, "loader": name, "output": tmp_path / "run"}
    assert main(flags(**options, on_error="skip")) == 0
    (line,) = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "coffee/5.png" in line]
    assert "WARNING" in line and "another image takes its place (1 so far)" in line
    capsys.readouterr()
    options |= {"output": tmp_path / "other"}
    assert main(flags(**options)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("cocor-train: error: ") and "coffee/5.png: truncated or damaged image" in last


class TestTooLarge:
    @pytest.mark.parametrize("form", ["folder", "beton"])
    def test_huge_images_are_decoded_on_the_host(
        self, make: OpenLoader, photo_copy: Path, photo_beton: Path, form: str,
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        images = opened(form, photo_copy, photo_beton)
        pixels = images.sizes.prod(axis=1)
        limit = int(np.sort(pixels)[-4])
        monkeypatch.setattr(loaders.dali.inputs, "HOST_PIXELS", limit)
        caplog.set_level(logging.INFO)
        huge = np.flatnonzero(pixels > limit)
        reference = samples(list(make("torch", images).epoch(0)))
        for data in (images, images.subset(range(24))):
            shown = samples(list(make("dali", data, on_error="stop").epoch(0)))
            for index in huge:  # even the resize is Pillow's
                assert all(torch.equal(*pair) for pair in zip(shown[index], reference[index], strict=True))
        (line,) = [record.getMessage() for record in caplog.records if "decoded on the CPU" in record.getMessage()]
        assert all(images.names[index] in line for index in huge) and f"more than {limit:,} pixels" in line

    def test_memory_that_runs_out_is_explained(self, tmp_path: Path) -> None:
        """In a process of its own whose address space is limited once DALI is running."""
        Image.new("RGB", (60, 50), (90, 40, 7)).save(tmp_path / "small.jpg")
        Image.new("RGB", (2200, 1800), (90, 40, 7)).save(tmp_path / "0.jpg")
        for number in range(1, 60):
            shutil.copyfile(tmp_path / "0.jpg", tmp_path / f"{number}.jpg")
        code = f"""
import logging, resource, sys
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError
from loaders.open import open_loader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
images = open_folder({str(tmp_path)!r}, workers=1, quiet=True)
plan = ViewPlan(32, contrastive=(), lengths=())
list(open_loader("dali", images.subset([images.names.index("small.jpg")]), plan, BatchOrder(1, 1), workers=1).epoch(0))
loader = open_loader("dali", images, plan, BatchOrder(len(images), len(images)), workers=1)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 500_000_000,) * 2)
try:
    list(loader.epoch(0))
except UserError as mistake:
    print("mistake:", mistake)
"""
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # or every thread sets 64 MiB aside
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
        assert re.search(
            r"^mistake: DALI ran out of memory on this machine; .* \d+.jpg \(2200 x 1800 pixels\): .*--batch-size",
            done.stdout, re.MULTILINE,
        ), done  # fmt: skip


@pytest.mark.parametrize(("device", "count"), [("cpu", 60), pytest.param("cuda", 600, marks=pytest.mark.gpu)])
def test_files_that_break_do_not_crash_dali(tmp_path: Path, device: str, count: int) -> None:
    """In a process of its own, which a crash would end."""
    for number in range(count):
        Image.effect_noise((97, 61), 60).convert("RGB").save(tmp_path / f"{number:03}.jpg")
    code = f"""
from pathlib import Path
from loaders.datasets.dataset import open_folder
from loaders.open import open_loader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan
images = open_folder({str(tmp_path)!r}, workers=1, quiet=True)
whole = Path(images.paths[13]).read_bytes()
length = len(whole)
broken = (b"rubbish".ljust(length, b"\\0"), whole[:20].ljust(length, b"\\0"), bytes(length), whole[: length // 2])
for content in broken * 2:
    Path(images.paths[13]).write_bytes(content)
    images.bad_samples.restore("013.jpg")
    loader = open_loader(
        "dali", images, ViewPlan(32), BatchOrder({count}, {count}), device={device!r}, workers=2, on_error="skip"
    )
    (batch,) = loader.epoch(0)
    loader.close()
    print(len(batch.index), 13 in batch.index.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if "ERROR" not in line]
    assert (done.returncode, lines) == (0, [f"{count} False"] * 8), done.stderr


@pytest.mark.gpu
class TestOnGpu:
    def test_dali_goes_on_with_another_sample(self, make: OpenLoader, images: ImageDataset, photo_copy: Path) -> None:
        spoil(photo_copy / "coffee" / "2.jpg", "rubbish")
        spoil(photo_copy / "rocket" / "1.jpg", "gone")
        expected, loader = list(make("torch").epoch(0)), make("dali", device="cuda")
        for _ in range(2):
            shown = list(loader.epoch(0))
            assert indices(shown) == indices(expected)
            for left, right in zip(expected, shown, strict=True):
                assert torch.equal(left.label, right.label.cpu())
                assert float((left.original - right.original.cpu()).abs().mean()) < 0.05

    def test_huge_images_are_pillows_to_the_bit(self, make: OpenLoader, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loaders.dali.inputs, "HOST_PIXELS", 0)
        for left, right in zip(make("torch").epoch(0), make("dali", device="cuda").epoch(0), strict=True):
            assert torch.equal(left.original, right.original.cpu())
