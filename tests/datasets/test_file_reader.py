"""Files that compiled code reads and judges: nothing that Pillow would refuse, or see in another size, is taken."""

import os
import random
import struct
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from helpers.hostile import few_more_files, time_limit
from PIL import Image

from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.datasets.decode import ImageFault, read_header
from loaders.datasets.file_reader import CHANGED, DAMAGED, GOOD, judge, open_reader
from loaders.datasets.stored import StoredDataset, open_stored
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

VICTIM = 14  # of the photographs: coffee/2.jpg


def read(dataset: ImageDataset, index: list[int]) -> tuple[list[bytes], list[int]]:
    """The bytes and the verdicts of some images, with room between them that must stay as it is."""
    reader, chosen = open_reader(dataset), np.array(index, np.int64)
    lengths = reader.lengths[chosen]
    ends = np.cumsum(lengths + 5)
    block, verdicts = np.full(int(ends[-1]), 77, np.uint8), np.full(len(chosen), 99, np.uint8)
    starts = ends - 5 - lengths
    with time_limit(30):
        reader.read(chosen, starts, block, verdicts)
    assert all((block[end - 5 : end] == 77).all() for end in ends)
    parts = [block[a : a + n].tobytes() for a, n in zip(starts, lengths, strict=True)]
    return parts, verdicts.tolist()


def verdict(data: bytes, size: tuple[int, int]) -> int:
    """What is said of a file of an image of ``size`` (height, width)."""
    return judge(np.frombuffer(data, np.uint8), *size)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def images(photo_folder: Path) -> ImageDataset:
    return open_folder(photo_folder, quiet=True)


@pytest.fixture
def copy(photo_copy: Path) -> ImageDataset:
    return open_folder(photo_copy, quiet=True)


class TestFiles:
    def test_bytes_are_those_of_the_files(self, images: ImageDataset) -> None:
        index = [*range(len(images)), 3, 3, 0]
        parts, verdicts = read(images, index)
        assert verdicts == [GOOD] * len(index)
        assert parts == [Path(images.paths[i]).read_bytes() for i in index]
        parts, _ = read(images.subset([5, 2]), [1, 0])
        assert parts == [Path(images.paths[i]).read_bytes() for i in (2, 5)]

    def test_names_of_any_bytes_and_links_are_read(self, tmp_path: Path, images: ImageDataset) -> None:
        for name in (b"\xff\xfe.jpg", "ä \n.jpg".encode(), b"x" * 251 + b".jpg"):
            Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).symlink_to(images.paths[VICTIM])  # noqa: PTH118
        found = open_folder(tmp_path, quiet=True)
        assert read(found, [0])[1] == [GOOD]

    @pytest.mark.parametrize("kind", ["gone", "empty", "longer", "shorter", "folder", "pipe", "loop", "device"])
    def test_another_file_in_its_place_has_changed(self, copy: ImageDataset, kind: str) -> None:
        victim = Path(copy.paths[VICTIM])
        whole = victim.read_bytes()
        victim.unlink()
        if kind == "folder":
            victim.mkdir()
        elif kind == "pipe":
            os.mkfifo(victim)
        elif kind == "loop":
            victim.symlink_to(victim)
        elif kind == "device":
            victim.symlink_to("/dev/zero")
        elif kind != "gone":
            victim.write_bytes({"empty": b"", "longer": whole + b"\0", "shorter": whole[:-1]}[kind])
        parts, verdicts = read(copy, [3, VICTIM, 7])
        assert verdicts == [GOOD, CHANGED, GOOD]
        assert parts[2] == Path(copy.paths[7]).read_bytes()

    def test_no_handle_stays_open(self, copy: ImageDataset) -> None:
        Path(copy.paths[VICTIM]).write_bytes(b"rubbish")
        read(copy, [VICTIM])  # compiled
        with few_more_files(1):
            assert read(copy, [*range(24)] * 3)[1].count(GOOD) == 23 * 3
        with few_more_files(0):
            assert read(copy, [0, 1])[1] == [CHANGED, CHANGED]

    def test_rubbish_of_the_same_length_is_damaged(self, copy: ImageDataset) -> None:
        victim = Path(copy.paths[VICTIM])
        victim.write_bytes(b"rubbish".ljust(victim.stat().st_size, b"\0"))
        assert read(copy, [VICTIM, 0])[1] == [DAMAGED, GOOD]


class TestStored:
    @pytest.fixture
    def stored(self, photo_beton: Path, tmp_path: Path) -> StoredDataset:
        path = tmp_path / "copy.beton"
        path.write_bytes(photo_beton.read_bytes())
        return open_stored(path)

    def test_bytes_are_those_that_are_stored(self, stored: StoredDataset) -> None:
        part = stored.subset([7, 3, 20])
        parts, verdicts = read(part, [2, 0, 1])
        assert verdicts == [GOOD] * 3
        assert parts == [bytes(stored.file.read(row)) for row in (20, 7, 3)]

    def test_raw_pixels_come_as_pictures(self, photo_folder: Path, tmp_path: Path) -> None:
        convert(open_source(photo_folder), tmp_path / "raw.beton", "beton", Settings(raw=True), workers=1)
        raw = open_stored(tmp_path / "raw.beton")
        parts, verdicts = read(raw, [*range(24)])
        assert verdicts == [GOOD] * 24
        for row, part in enumerate(parts):
            with Image.open(BytesIO(part)) as image:
                assert image.tobytes() == raw.file.decode(row).tobytes()


class TestVerdicts:
    """What is taken for good is whole, and of the size that Pillow sees."""

    PICTURE = Image.effect_noise((97, 61), 60).convert("RGB")
    SIZE = (61, 97)

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("order", ["II", "MM"])
    def test_upright_size_is_what_counts(self, orientation: int, order: str) -> None:
        exif = Image.Exif()
        exif.endian = {"II": "<", "MM": ">"}[order]
        exif[0x0110], exif[0x0112] = "a camera", orientation
        for kind in ("JPEG", "MPO"):
            data = encoded(self.PICTURE, kind, exif=exif.tobytes())
            upright, other = (self.SIZE, self.SIZE[::-1])[:: -1 if orientation >= 5 else 1]
            assert verdict(data, upright) == GOOD and verdict(data, other) == DAMAGED
        data = encoded(self.PICTURE, "PNG", exif=exif.tobytes())
        assert verdict(data, self.SIZE) == (GOOD if orientation == 1 else DAMAGED)

    @pytest.mark.parametrize(
        "options", [{}, {"progressive": True}, {"quality": 30, "subsampling": 0}, {"optimize": True}]
    )
    @pytest.mark.parametrize("mode", ["RGB", "L"])
    def test_usual_files_are_good(self, options: dict[str, object], mode: str) -> None:
        image = self.PICTURE.convert(mode)
        assert verdict(encoded(image, "JPEG", **options), self.SIZE) == GOOD
        assert verdict(encoded(image, "PNG"), self.SIZE) == GOOD

    @pytest.mark.parametrize(
        "data",
        [
            encoded(PICTURE.convert("CMYK"), "JPEG"), encoded(PICTURE.convert("RGBA"), "PNG"),
            encoded(PICTURE.convert("P"), "PNG"), encoded(PICTURE, "PNG", transparency=(0, 0, 0)),
            encoded(Image.new("I;16", (97, 61)), "PNG"), encoded(PICTURE, "WEBP"), encoded(PICTURE, "TIFF"),
            b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\x89PNG\r\n\x1a\n",
        ],
    )  # fmt: skip
    def test_other_files_are_left_to_pillow(self, data: bytes) -> None:
        assert verdict(data, self.SIZE) == DAMAGED

    @pytest.mark.parametrize("kind", ["JPEG", "PNG"])
    def test_no_part_of_a_file_is_taken_for_whole(self, kind: str) -> None:
        data = encoded(self.PICTURE, kind)
        for length in range(len(data)):
            assert verdict(data[:length], self.SIZE) == DAMAGED
        for start in (0, len(data) // 3, len(data) // 2):  # as a crash of the system leaves a file
            if len(data) - start > 1100:
                assert verdict(data[:start] + bytes(len(data) - start), self.SIZE) == DAMAGED

    def test_only_pillow_steps_over_stray_bytes(self) -> None:
        data = encoded(self.PICTURE, "JPEG")
        assert verdict(data.replace(b"\xff\xdb", b"junk\xff\xdb", 1), self.SIZE) == DAMAGED
        assert verdict(data.replace(b"\xff\xdb", b"\xff\xff\xff\xdb", 1), self.SIZE) == GOOD  # padding
        assert verdict(data[:-2] + bytes(8) + data[-2:] + bytes(500), self.SIZE) == GOOD

    def test_every_size_but_the_right_one_is_refused(self) -> None:
        for kind in ("JPEG", "PNG"):
            data = encoded(self.PICTURE, kind)
            for size in ((61, 98), (62, 97), (97, 61), (0, 0), (1, 1), (65535, 65535), (61 + (1 << 16), 97)):
                assert verdict(data, size) == DAMAGED

    @pytest.mark.parametrize("kind", ["JPEG", "turned JPEG", "progressive JPEG", "PNG"])
    def test_damaged_headers_are_trusted_as_by_pillow(self, kind: str) -> None:
        """Of what is taken for good, Pillow reads the same size."""
        options: dict[str, object] = {"progressive": True} if kind == "progressive JPEG" else {}
        if kind == "turned JPEG":
            exif = Image.Exif()
            exif[0x0112] = 6
            options["exif"] = exif.tobytes()
        whole = encoded(self.PICTURE, kind.split()[-1], **options)
        size = self.SIZE[::-1] if kind == "turned JPEG" else self.SIZE
        assert verdict(whole, size) == GOOD
        rng, taken = random.Random(kind), 0
        header = whole.index(b"\xff\xda") + 20 if "JPEG" in kind else 80
        for _ in range(1500):
            data = bytearray(whole)
            for _ in range(rng.choice([1, 1, 2, 3])):
                at = rng.randrange(header)
                new = rng.choice(
                    [b"\xff", b"\0", b"\xff\xff", struct.pack(">H", rng.randrange(1 << 16)), rng.randbytes(1)]
                )
                data[at : at + len(new)] = new
            if rng.random() < 0.2:
                del data[rng.randrange(header) :][: rng.randrange(1, 9)]
            if verdict(bytes(data), size) != GOOD:
                continue
            taken += 1
            with suppress(ImageFault):  # for tables, colours or checksums, about which a decoder complains itself
                found = read_header(BytesIO(data))
                assert (found.height, found.width) == size, data[:header]
        assert taken > 50

    def test_compiled_code_stays_within_the_file(self) -> None:
        """Random bytes behind every kind of start, cut anywhere."""
        rng = random.Random(1)
        starts = [
            encoded(self.PICTURE, kind)[:length] for kind in ("JPEG", "PNG") for length in (2, 8, 20, 33, 60, 200)
        ]
        exif = b"\xff\xd8\xff\xe1"
        for _ in range(3000):
            tail = rng.randbytes(rng.randrange(80))
            body = b"Exif\0\0" + rng.choice([b"II*\0", b"MM\0*", b""]) + tail
            data = rng.choice([*starts, exif + struct.pack(">H", 2 + rng.choice([len(body), 90])) + body]) + tail
            assert verdict(data, self.SIZE) == DAMAGED
