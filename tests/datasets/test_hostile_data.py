"""Data sets from strangers: .beton files, tars, parquet shards and images that lie, lead astray or fill the memory."""

import io
import json
import random
import shutil
import struct
import tarfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.hostile import Refused, damaged, one_line_or_none, refusal, run_train
from helpers.prep_cases import corner_image, jpeg_bytes, without_record, write_all

from loaders.datasets.beton import FIELD, HEADER, SAMPLE
from loaders.datasets.decode import ImageFault
from loaders.datasets.stored import StoredDataset, open_stored
from loaders.errors import UserError
from loaders.open import open_loader
from loaders.prep import byte_ranges
from loaders.prep.cli import main as prep
from loaders.prep.info import describe_source
from loaders.prep.sources import open_source
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

TABLE = HEADER.itemsize + 2 * FIELD.itemsize  # where a .beton's table of images begins


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return partial(refusal, capsys)


@pytest.fixture(scope="module")
def prepared(corner_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with ``x.beton`` and the prepared folder ``tree``."""
    folder = tmp_path_factory.mktemp("prepared")
    assert [convert(corner_folder, folder / name)() for name in ("x.beton", "tree")] == [0, 0]
    return folder


def convert(source: Path, target: Path, *flags: str) -> Callable[[], int]:
    return lambda: prep(["convert", str(source), str(target), "--workers", "1", *flags])


def with_record(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A .beton whose record a stranger has changed, with a digest that fits."""
    at = data.index(b"cocor-prep 1\n", TABLE)
    end = int(np.frombuffer(data, HEADER, 1)["alloc_table_ptr"][0])
    body = data[at:end].rstrip(b"\0")
    length = int.from_bytes(data[TABLE - FIELD.itemsize * 2 + 17 + 24 :][:8], "little")
    body = change(data[at : at + length - 32])
    assert len(body) == length - 32
    return data[:at] + body + sha256(body).digest() + data[at + length :]


class TestBeton:
    @pytest.mark.parametrize("trusted", [True, False])
    @pytest.mark.parametrize(
        ("table", "field", "value"),
        [
            ("header", "num_samples", 1 << 63), ("header", "num_samples", (1 << 64) - 1), ("header", "num_samples", 7),
            ("header", "num_fields", 65535), ("header", "alloc_table_ptr", (1 << 64) - 8),
            ("allocation", "ptr", (1 << 64) - 8), ("allocation", "size", (1 << 64) - 1),
            ("allocation", "size", 1 << 63), ("allocation", "sample_id", 3),
            ("both", "ptr", (1 << 64) - 8),  # with a size that wraps around
            ("sample", "data_ptr", (1 << 64) - 8), ("sample", "label", 1 << 40), ("sample", "label", -7),
            ("sample", "mode", 9), ("sample", "mode", 1), ("sample", "width", 0), ("sample", "sides", 65535),
        ],
    )  # fmt: skip
    def test_tables_that_lie_are_refused(
        self, prepared: Path, tmp_path: Path, refused: Refused, table: str, field: str, value: int, trusted: bool
    ) -> None:
        content = (prepared / "x.beton").read_bytes()
        data = bytearray(content) if trusted else without_record(content)
        header = np.frombuffer(data, HEADER, 1)
        sample = np.frombuffer(data, SAMPLE, 1, TABLE + 2 * SAMPLE.itemsize)
        kind = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
        allocations = np.frombuffer(data, kind, 6, int(header["alloc_table_ptr"][0]))
        place = int(np.flatnonzero(allocations["sample_id"] == 2)[0])
        if table == "both":
            sample["data_ptr"] = allocations["ptr"][place] = value
            allocations["size"][place] = 64
        elif field == "sides":
            sample["width"] = sample["height"] = value
        elif table == "allocation":
            allocations[field][place] = value
        else:
            {"header": header, "sample": sample}[table][field] = value
        path = tmp_path / "x.beton"
        path.write_bytes(data)
        assert "x.beton: " in refused(run_train(data=path, loader="torch", output=tmp_path / "run"))
        with pytest.raises(UserError, match=r"x\.beton: "):
            open_stored(path)

    @pytest.mark.parametrize("name", [b"a/../../e.jpg", b"/tmp/evil.jpg", b"a/\x00vil.jpg"])
    def test_names_that_would_leave_the_output(
        self, prepared: Path, tmp_path: Path, refused: Refused, name: bytes
    ) -> None:
        data = (prepared / "x.beton").read_bytes()
        old = b"a/0.jpg\0a/1.jpg"
        new = (name + b"\0").ljust(len(old), b"x")[: len(old)]
        path = tmp_path / "x.beton"
        path.write_bytes(with_record(data, lambda body: body.replace(old, new)))
        out = tmp_path / "deep" / "out"
        out.parent.mkdir()
        assert "x.beton: the index of prepared data is damaged" in refused(convert(path, out))
        assert not list(tmp_path.rglob("*vil*")) and not out.exists()

    def test_any_damage_is_refused_or_harmless(self, prepared: Path, tmp_path: Path) -> None:
        """Header, fields, tables, index, images: nothing but a UserError, or images that can be read or are named."""
        content, rng, path = (prepared / "x.beton").read_bytes(), random.Random(0), tmp_path / "x.beton"
        parts = [(0, 24), (24, TABLE), (TABLE, TABLE + 6 * SAMPLE.itemsize), (len(content) - 6 * 24, len(content))]
        right = [bytes(open_stored(prepared / "x.beton").file.read(row)) for row in range(6)]
        for turn in range(500):
            data, known = (content, right) if turn % 2 == 0 else (bytes(without_record(content)), None)
            path.write_bytes(damaged(data, rng, rng.choice([*parts, (0, len(content))])))
            one_line_or_none(lambda: describe_source(open_source(path)))
            one_line_or_none(lambda known=known: self.read_all(open_stored(path), known))  # type: ignore[misc]

    def read_all(self, images: StoredDataset, right: list[bytes] | None) -> None:
        """Read every image; those that are read must be ``right``, if a checksum can tell."""
        for i in range(len(images)):
            one_line_or_none(lambda i=i: images.image(i).decode())  # type: ignore[misc]
            with suppress(UserError):
                data = bytes(images.file.read(i))
                assert right is None or data == right[i]

    def test_labels_without_names_are_places(self, prepared: Path, tmp_path: Path) -> None:
        (tmp_path / "x.beton").write_bytes(without_record((prepared / "x.beton").read_bytes()))
        plain = open_stored(tmp_path / "x.beton")
        for classes in (["5", "6", "7"], ["cat", "dog", "eel"]):
            known = open_stored(tmp_path / "x.beton", classes=classes)
            assert known.classes == classes and known.labels.tolist() == plain.labels.tolist()
        with pytest.raises(UserError, match=f"class {plain.labels.max()} is not among the 1 known classes"):
            open_stored(tmp_path / "x.beton", classes=["5"])

    def test_labels_that_may_be_names_or_places(
        self, prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "x.beton").write_bytes(without_record((prepared / "x.beton").read_bytes()))
        caplog.set_level("INFO")
        with pytest.raises(UserError, match="its labels may be names or places of the known classes"):
            open_stored(tmp_path / "x.beton", classes=["00", "02", "01", "03"])
        assert open_stored(tmp_path / "x.beton", classes=["00", "01", "02", "03"]).labels.max() < 4
        assert not caplog.text
        open_stored(tmp_path / "x.beton", classes=["cat", "dog", "eel", "fox"])
        assert "has no class names; its labels are places of the known ones: 0 is cat, 1 is dog" in caplog.text

    @pytest.mark.parametrize("loader", ["torch", "dali", "ffcv"])
    def test_a_jpeg_larger_than_stated(
        self, prepared: Path, tmp_path: Path, loader: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """DALI would make room for what the JPEG says."""
        if loader == "ffcv":
            pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
        data = without_record((prepared / "x.beton").read_bytes())
        start = int(np.frombuffer(data, SAMPLE, 6, TABLE)["data_ptr"][2])
        frame = data.index(b"\xff\xc0", start)
        data[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
        path = tmp_path / "x.beton"
        path.write_bytes(data)
        images = open_stored(path)
        delivery = open_loader(loader, images, ViewPlan(16), BatchOrder(6, 6), workers=1, on_error="skip")
        (batch,) = list(delivery.epoch(0))
        delivery.close()
        assert 2 not in batch.index and "00000002 (image 2): " in caplog.text


def tar_header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    header = bytearray(512)
    fields = {0: name, 100: b"0000644", 124: size, 136: b"0" * 11, 156: kind, 257: b"ustar\0" + b"00"}
    for at, value in fields.items():
        header[at : at + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def write_tar(path: Path, *members: tuple[Any, ...], format: int = tarfile.DEFAULT_FORMAT) -> None:
    """Members are (name, content) or (name, content, further attributes)."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, content, *more in members:
            info = tarfile.TarInfo(name)
            for key, value in {"size": len(content), **(more[0] if more else {})}.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))


class TestTars:
    @pytest.mark.parametrize("kind", [b"0", b"5", b"L", b"K", b"x", b"g", b"S"])
    @pytest.mark.parametrize("size", [-512, -1024, -(1 << 40), 1 << 40, (1 << 63) - 1, 1 << 80])
    def test_sizes_that_lead_nowhere(self, tmp_path: Path, kind: bytes, size: int) -> None:
        """A negative size leads Python's tarfile back to where it has been, for ever."""
        number = b"\xff" if size < 0 else b"\x80"
        number += (size & ((1 << 88) - 1)).to_bytes(11, "big")
        path = tmp_path / "x.tar"
        path.write_bytes(tar_header(b"a/0.jpg", b"%011o" % 0) + tar_header(b"a/x.jpg", number, kind) + bytes(4096))
        one_line_or_none(lambda: open_source(path))

    @pytest.mark.parametrize(
        "name", ["../evil.jpg", "/tmp/evil.jpg", "a/../../evil.jpg", f"a/{'../' * 40}tmp/evil.jpg"]
    )
    def test_a_long_way_out(self, tmp_path: Path, name: str, refused: Refused) -> None:
        (tmp_path / "deep").mkdir()
        path, data = tmp_path / "deep" / "x.tar", jpeg_bytes(corner_image())
        members = [("short", data, {"pax_headers": {"path": place}}) for place in ("a/0.jpg", name)]
        write_tar(path, *members, format=tarfile.PAX_FORMAT)
        out = tmp_path / "deep" / "out"
        assert f"{name}: would leave the target folder" in refused(convert(path, out))
        assert convert(path, out, "--on-error", "skip")() == 0
        assert not list(tmp_path.rglob("evil*")) and not Path("/tmp/evil.jpg").exists()


class TestParquet:
    def write(self, path: Path, names: object, inner: str = "x.jpg", notes: bytes | None = None) -> Path:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [{"bytes": jpeg_bytes(corner_image((40 + i, 30))), "path": inner} for i in range(4)]
        table = arrow.table({"image": rows, "label": [0, 1, 0, 1]})
        features = {"info": {"features": {"label": {"names": names}}}}
        table = table.replace_schema_metadata({"huggingface": notes or json.dumps(features).encode()})
        parquet.write_table(table, path)
        return path

    def test_the_path_in_a_row_is_not_the_output(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "x.parquet", ["a", "b"], inner="../../../evil.jpg")
        assert convert(path, tmp_path / "out")() == 0
        found = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.jpg"))
        assert found == ["a/x_00000000.jpg", "a/x_00000002.jpg", "b/x_00000001.jpg", "b/x_00000003.jpg"]

    @pytest.mark.parametrize(
        "names", [["..", "b"], ["../../evil", "b"], ["\ud800", "b"], {"a": 1}, [1, 2], "ab", ["", "b"], [["a"]]]
    )
    def test_class_names_that_lead_astray(self, names: object, tmp_path: Path, refused: Refused) -> None:
        path = self.write(tmp_path / "x.parquet", names)
        assert "x.parquet: " in refused(convert(path, tmp_path / "out"))
        assert not (tmp_path / "out").exists()

    def test_shards_with_other_names_are_refused(self, tmp_path: Path) -> None:
        """Their numbers mean other classes: the first shard's names would turn labels round."""
        for shard, names in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
            self.write(tmp_path / f"{shard}.parquet", names)
        with pytest.raises(UserError, match=r"b.parquet: other classes than in .*a.parquet"):
            open_source(tmp_path)

    def test_without_notes_classes_are_numbers(self, tmp_path: Path) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [jpeg_bytes(corner_image((40 + i, 30))) for i in range(3)]
        parquet.write_table(arrow.table({"image": rows, "label": [0, 10, 2]}), tmp_path / "x.parquet")
        assert open_source(tmp_path / "x.parquet").classes == ["00", "02", "10"]

    def test_a_missing_image_column_is_named(self, tmp_path: Path, refused: Refused) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        tables = {"label": [1, 2]}, {"image": ["a.jpg", "b.jpg"], "label": [0, 1]}, {"a": [b"x"], "b": [b"x"]}, {}
        for columns in tables:
            parquet.write_table(arrow.table(columns), tmp_path / "x.parquet")
            line = refused(lambda: prep(["scan", str(tmp_path / "x.parquet")]))
            assert (
                f"x.parquet: no column of image bytes named image, img, jpg, jpeg, png; it has {', '.join(columns)}"
                in line
            )

    def test_damage_anywhere_is_named(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "x.parquet", ["a", "b"])
        data, rng = path.read_bytes(), random.Random(1)
        for turn in range(150):
            path.write_bytes(damaged(data, rng, (len(data) * 2 // 3, len(data)) if turn % 2 else (0, len(data))))
            one_line_or_none(lambda: [read(open_source(path).locate(i)) for i in range(4)])
            path.write_bytes(data[: rng.randrange(len(data))])
            with pytest.raises(UserError, match=r"x\.parquet: "):
                open_source(path)


def read(place: Any) -> None:
    byte_ranges._row_group.cache_clear()
    try:
        place.read()
    except (ImageFault, OSError) as fault:
        assert str(fault)


class TestImages:
    def test_too_large_images_are_refused_everywhere(
        self, tmp_path: Path, corner_folder: Path, refused: Refused
    ) -> None:
        root = Path(shutil.copytree(corner_folder, tmp_path / "images"))
        data = bytearray((root / "a" / "0.jpg").read_bytes())
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
        (root / "a" / "0.jpg").write_bytes(data)
        for command in (
            run_train(data=root, loader="torch", output=tmp_path / "run"),
            convert(root, tmp_path / "x.beton"),
            lambda: prep(["scan", str(root), "--on-error", "stop", "--workers", "1"]),
        ):
            assert "a/0.jpg: Image size (4290250000 pixels) exceeds limit" in refused(command)

    def test_a_program_is_no_image(self, tmp_path: Path, refused: Refused) -> None:
        """Pillow would give EPS to Ghostscript, if that is installed."""
        marker = tmp_path / "harm"
        program = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%mkdir {marker}) (w) file\n"
        write_all(tmp_path / "images" / "a", {"x.jpg": program.encode(), "y.jpg": jpeg_bytes(corner_image())})
        line = refused(convert(tmp_path / "images", tmp_path / "out"))
        assert "a/x.jpg: not an image of any known kind" in line and not marker.exists()
