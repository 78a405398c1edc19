"""Whatever form the images have, the prepared set is the same."""

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import Prep, corner_image, jpeg_bytes, png_bytes, write_all

from loaders.datasets.beton import open_beton
from loaders.datasets.dataset import open_folder
from loaders.datasets.labels import read_labels
from loaders.errors import UserError
from loaders.prep.sources import open_source

Members = Iterable[tuple[str, bytes]]
Stored = tuple[list[tuple[str, bytes]], list[str]]


def image(number: int) -> bytes:
    return jpeg_bytes(corner_image((40 + number, 30 + 2 * number)))


NAMES = ["n01/n01_1.JPEG", "n01/n01_2.JPEG", "n02/n02_7.JPEG", "n10/n10_3.JPEG", "n10/n10_4.JPEG"]
FILES = {name: image(number) for number, name in enumerate(NAMES)}
LABELS, CLASSES = [name.partition("/")[0] for name in NAMES], ["n01", "n02", "n10"]
EXPECTED: Stored = list(zip(LABELS, FILES.values(), strict=True)), CLASSES
VALIDATION = {f"ILSVRC2012_val_{i + 1:08d}.JPEG": data for i, data in enumerate(FILES.values())}


def write_tar(path: Path, members: Members, form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def class_tars(folder: Path) -> dict[str, bytes]:
    """ILSVRC's tars by their names, which are left in ``folder`` as well."""
    for name in CLASSES:
        write_tar(folder / f"{name}.tar", ((n.rpartition("/")[2], FILES[n]) for n in NAMES if n.startswith(name)))
    return {f"{name}.tar": (folder / f"{name}.tar").read_bytes() for name in CLASSES}


def write_parquet(path: Path, rows: list[tuple[bytes, object]], names: list[str] | None = None) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    images = arrow.array([{"bytes": data, "path": None} for data, _ in rows], kind)
    table = arrow.table({"image": images, "label": [label for _, label in rows]})
    if names:
        notes = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(notes)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_all(tmp_path / "folder", FILES)
    return tmp_path / "folder"


def stored(prep: Prep, source: Path, *more: object) -> Stored:
    """(class, bytes) of every image of the source's beton file, in order, and the classes."""
    output = source.parent / "out.beton"
    prep("convert", source, output, "--force", *more)
    file = open_beton(output)
    return [(file.classes[label], bytes(file.read(i))) for i, label in enumerate(file.labels)], file.classes


def test_folders_links_and_tars_give_one_set(prep: Prep, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    for name in CLASSES:
        (tmp_path / "linked" / name).symlink_to(folder / name)
    write_tar(tmp_path / "plain.tar", reversed(FILES.items()))
    write_tar(tmp_path / "deep.tar", ((f"./imagenet/train/{name}", data) for name, data in FILES.items()))
    write_tar(tmp_path / "pax.tar", FILES.items(), tarfile.PAX_FORMAT)
    for source in ("folder", "linked", "plain.tar", "deep.tar", "pax.tar"):
        assert stored(prep, tmp_path / source) == EXPECTED, source


def test_ilsvrcs_class_tars(prep: Prep, tmp_path: Path) -> None:
    inner = class_tars(tmp_path / "train")
    assert stored(prep, write_tar(tmp_path / "ILSVRC2012_img_train.tar", inner.items())) == EXPECTED
    assert stored(prep, tmp_path / "train") == EXPECTED


def test_tars_beside_folders_are_refused(prep: Prep, folder: Path, tmp_path: Path) -> None:
    write_tar(folder / "n01.tar", [("n01_1.JPEG", image(0))])
    error = prep.refused("convert", folder, tmp_path / "x.beton")
    assert "folder: holds n01.tar beside the folder n" in error and "move away what you do not mean" in error


@pytest.mark.parametrize("cut", ["end blocks", "one end block", "between members", "inside a member", "header", "all"])
def test_a_cut_class_tar_is_named(cut: str, tmp_path: Path) -> None:
    """The outer tar is whole. Reading on past the inner one's end would take the next class's images for its own."""
    inner = class_tars(tmp_path)
    whole = inner["n01.tar"]
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        second = tar.getmembers()[1]
    contents = second.offset_data + -(-second.size // 512) * 512
    damaged = {
        "end blocks": whole[:contents], "one end block": whole[: contents + 512], "all": bytes(10240),
        "between members": whole[: second.offset], "inside a member": whole[: second.offset_data + 100],
        "header": whole[: second.offset] + b"x" + whole[second.offset + 1 :],
    }[cut]  # fmt: skip
    path = write_tar(tmp_path / "train.tar", (inner | {"n01.tar": damaged}).items())
    with pytest.raises(UserError, match=r"train\.tar: n01\.tar in it: ") as error:
        open_source(path)
    assert "\n" not in str(error.value)


def test_damage_in_a_tar_hides_no_images(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", FILES.items())
    with tarfile.open(path) as tar:
        middle = tar.getmembers()[2].offset
    whole = path.read_bytes()
    path.write_bytes(whole[: middle + 5] + bytes([whole[middle + 5] ^ 1]) + whole[middle + 6 :])
    with pytest.raises(UserError, match=rf"x\.tar: damaged or cut after {middle:,} bytes"):
        open_source(path)
    for cut in (len(whole) // 2, 1024, 3000):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"x\.tar"):
            open_source(path)
    path.write_bytes(2 * whole)
    with pytest.raises(UserError, match=r"x\.tar: goes on behind its end"):
        open_source(path)
    shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path, "x.tar")
    with pytest.raises(UserError, match="unpack"):
        open_source(tmp_path / "packed.tar.gz")


def test_links_and_sparse_members_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", FILES.items())
    with tarfile.open(path, "a") as tar:
        for name, kind in (("holes", tarfile.GNUTYPE_SPARSE), ("link", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(f"n01/{name}.JPEG")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert open_source(path).faults == [
        ("x.tar:n01/holes.JPEG", "a sparse file, whose bytes do not lie together"),
        ("x.tar:n01/link.JPEG", "a link or device, not a file"),
    ]


def test_pax_names_that_are_long_or_foreign(tmp_path: Path) -> None:
    name = "n01/" + "länge" * 30 + ".JPEG"
    source = open_source(write_tar(tmp_path / "x.tar", [(name, image(0))], tarfile.PAX_FORMAT))
    assert source.names == [name] and source.locate(0).read() == image(0)


def label_file(folder: Path, form: str) -> Path:
    """Validation labels in one of the forms in which they are found."""
    pairs = list(zip(VALIDATION, LABELS, strict=True))
    path = folder / form
    if form == "plain.txt":
        lines = [f"{name} {label}" for name, label in pairs]
    elif form == "table.csv":
        lines = ["filename,label", *(",".join(pair) for pair in reversed(pairs))]
    elif form == "quoted.csv":
        lines = ["index;label;filename", *(f'{i};"{label}";"{name}"' for i, (name, label) in enumerate(pairs))]
    elif form == "columns.tsv":
        lines = [f"{name}\t{label}\t0\t32" for name, label in pairs]
    else:
        boxes = (f"{name.removesuffix('.JPEG')},{label} 1 2 3 4 {label} 5 6 7 8" for name, label in reversed(pairs))
        lines = ["ImageId,PredictionString", *boxes]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("form", ["plain.txt", "table.csv", "quoted.csv", "columns.tsv", "LOC_val_solution.csv"])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_validation_images_with_labels(form: str, kind: str, prep: Prep, tmp_path: Path) -> None:
    write_all(tmp_path / "val", VALIDATION)
    source = write_tar(tmp_path / "val.tar", VALIDATION.items()) if kind == "tar" else tmp_path / "val"
    assert stored(prep, source, "--labels", label_file(tmp_path, form)) == EXPECTED


def test_the_development_kit_needs_its_meta_file(prep: Prep, tmp_path: Path) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    write_all(tmp_path / "val", VALIDATION)
    (tmp_path / "devkit").mkdir()
    numbers = {"n01": 3, "n02": 1, "n10": 2}  # the kit's numbers do not follow the sorted identifiers
    truth = tmp_path / "devkit" / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("".join(f"{numbers[label]}\n" for label in LABELS))
    arguments = ["convert", tmp_path / "val", tmp_path / "x.beton", "--labels", truth]
    assert "meta.mat" in prep.refused(*arguments)
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = np.array([(number, name, "words", 0) for name, number in numbers.items()], kinds)
    savemat(tmp_path / "devkit" / "meta.mat", {"synsets": rows})
    assert stored(prep, tmp_path / "val", "--labels", truth) == EXPECTED
    truth.write_text("1\n2\n3\n1\n" + "9" * 5000)
    assert "txt:5: 99999999999999999999 is not a class" in prep.refused(*arguments, "--force")
    truth.write_text("1\n2\n")
    assert "2 numbers for 5 images" in prep.refused(*arguments, "--force")


def test_labels_and_names_with_commas(tmp_path: Path) -> None:
    names = ["a, b.jpg", "c.jpg", 'd "e".jpg']
    (tmp_path / "labels.csv").write_text('name,class\n"a, b.jpg","dog, golden"\nc.jpg,cat\n"d ""e"".jpg","a ""b"""\n')
    assert read_labels(tmp_path / "labels.csv", names) == ({0: "dog, golden", 1: "cat", 2: 'a "b"'}, [])
    (tmp_path / "labels.csv").write_text("name,width,height\nc.jpg,1,2\n")
    with pytest.raises(UserError, match="csv:1: none of its columns is named class or label"):
        read_labels(tmp_path / "labels.csv", names)


def test_missing_and_surplus_labels_are_named(prep: Prep, tmp_path: Path) -> None:
    write_all(tmp_path / "val", VALIDATION)
    labels, names = tmp_path / "labels.txt", list(VALIDATION)
    arguments = ["convert", tmp_path / "val", tmp_path / "x.beton", "--labels", labels]
    labels.write_text("".join(f"{name} n01\n" for name in names[1:]))
    assert f"{names[0]}: no label" in prep.refused(*arguments)
    labels.write_text("".join(f"{name} n01\n" for name in [*names, "gone.JPEG"]))
    assert "gone.JPEG: labelled in" in prep.refused(*arguments)


def test_images_without_labels(prep: Prep, folder: Path, tmp_path: Path) -> None:
    """They stay so, or get labels later, which images with labels do not."""
    path, labels = write_tar(tmp_path / "val.tar", reversed(VALIDATION.items())), label_file(tmp_path, "plain.txt")
    prep("convert", path, tmp_path / "out")
    data = open_folder(tmp_path / "out")
    assert data.classes == [] and (data.labels == -1).all() and data.names == list(VALIDATION)
    prep("convert", path, tmp_path / "val.beton")
    assert stored(prep, tmp_path / "val.beton", "--labels", labels) == EXPECTED
    prep("convert", path, tmp_path / "x.beton", "--labels", labels)
    assert open_beton(tmp_path / "x.beton").names == open_beton(tmp_path / "out.beton").names
    assert "--labels no.txt" in prep.refused(
        "convert", tmp_path / "x.beton", tmp_path / "b.beton", "--labels", "no.txt"
    )
    labels.write_text("".join(labels.read_text().splitlines(keepends=True)[1:]))
    said = prep("info", tmp_path / "val.beton", "--labels", labels)
    assert "1, such as ILSVRC2012_val_00000001.JPEG: no label in" in said


def shard_members(numbers: range, label: str = "cls") -> list[tuple[str, bytes]]:
    members = []
    for number in numbers:
        content = json.dumps({"label": number * 5}) if label == "json" else f"{number * 5}\n"
        members += [(f"{number:06d}.jpg", image(number)), (f"{number:06d}.{label}", content.encode())]
    return members


@pytest.mark.parametrize("label", ["cls", "json"])
def test_webdataset_shards(label: str, prep: Prep, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    write_tar(shards / "train-000.tar", shard_members(range(0, 2), label))
    write_tar(shards / "train-001.tar", shard_members(range(2, 4), label))
    found, classes = stored(prep, shards)
    assert classes == ["00", "05", "10", "15"]  # by value, and as text
    assert found == [(f"{5 * i:02d}", image(i)) for i in range(4)]
    prep("convert", shards, tmp_path / "out")
    data = open_folder(tmp_path / "out")
    assert data.classes == classes and [Path(path).read_bytes() for path in data.paths] == [image(i) for i in range(4)]
    assert data.names == open_beton(tmp_path / "out.beton").names


@pytest.mark.parametrize("caption", ["txt", "json"])
def test_shards_of_captions_are_unlabelled(caption: str, prep: Prep, tmp_path: Path) -> None:
    """As img2dataset writes them, with statistics and a table beside each shard."""
    for shard in range(2):
        members = [(f"{shard}000{i}.{kind}", data) for i in range(2) for kind, data in
                   (("jpg", image(2 * shard + i)), (caption, b'{"caption": "a cat"}'))]  # fmt: skip
        write_tar(tmp_path / "shards" / f"0000{shard}.tar", members)
        write_all(tmp_path / "shards", {f"0000{shard}_stats.json": b"{}", f"0000{shard}.parquet": b""})
    assert ", 4 without a class" in prep("convert", tmp_path / "shards", tmp_path / "x.beton")
    file = open_beton(tmp_path / "x.beton")
    assert file.classes == [] and [bytes(file.read(i)) for i in range(4)] == [image(i) for i in range(4)]


GOOD = shard_members(range(2))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (GOOD[:-1], "000001: no class"), ([*GOOD, ("000002.cls", b"1")], "000002: no image"), ([], "an empty tar"),
        ([*GOOD, ("000003.jpg", b"x"), ("000003.json", b"{")], "000003.json is not JSON"),
        ([*GOOD, GOOD[0]], "000000.jpg: named twice in this shard"),
        ([*GOOD, ("a.1.jpg", b"x"), ("a.1.cls", b"1")], "beside .1.cls, .1.jpg (a key ends at the first dot"),
        ([*GOOD, ("000003.jpg", b"x"), ("000003.cls", b"../up")], "cannot name a class folder"),
    ],
)  # fmt: skip
def test_webdataset_faults_are_named(members: Members, words: str, prep: Prep, tmp_path: Path) -> None:
    error = prep.refused("convert", write_tar(tmp_path / "shard.tar", members), tmp_path / "x.beton")
    assert "shard.tar" in error and words in error


def test_parquet_shards_with_class_names(prep: Prep, tmp_path: Path) -> None:
    rows: list[tuple[bytes, object]] = [
        (FILES[n], CLASSES.index(label)) for n, label in zip(NAMES, LABELS, strict=True)
    ]
    shards = tmp_path / "hub"
    write_parquet(shards / "data" / "train-00000-of-00002.parquet", rows[:3], CLASSES)
    write_parquet(shards / "data" / "train-00001-of-00002.parquet", rows[3:], CLASSES)
    assert stored(prep, shards) == EXPECTED


def test_parquet_faults_are_named(prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complaint(*content: object) -> str:
        return prep.refused("convert", write_parquet(tmp_path / "x.parquet", *content), tmp_path / "x.beton")  # type: ignore[arg-type]

    assert "label 7 is not one of the 1 classes" in complaint([(image(0), 7)], ["only"])
    assert "keep one class an image" in complaint([(image(0), [1, 2])])
    assert "no image bytes in this row" in complaint([(b"", 0), (image(1), 1)])
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really")
    assert "d.parquet: not a readable parquet file" in prep.refused("scan", tmp_path / "d.parquet")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install pyarrow" in prep.refused("scan", tmp_path / "x.parquet")


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_images_without_a_class_are_reported(form: str, prep: Prep, tmp_path: Path) -> None:
    """-1 says that there is no label, as on hubs' test splits; nothing at all is a fault, whatever the form."""
    if form == "parquet":
        path = write_parquet(tmp_path / "x.parquet", [(image(0), 5), (image(1), None), (image(2), -1)])
    else:
        unlabelled = [("2.jpg", image(1)), ("3.jpg", image(2)), ("3.cls", b"-1")]
        path = write_tar(tmp_path / "x.tar", [*shard_members(range(1, 2)), *unlabelled])
    named = "x.parquet: x.parquet:row 1: no class" if form == "parquet" else "x.tar: x.tar:2: no class"
    assert named in prep.refused("convert", path, tmp_path / "x.beton")
    prep("convert", path, tmp_path / "x.beton", "--on-error", "skip")
    file = open_beton(tmp_path / "x.beton")
    assert file.classes == ["5"] and sorted(file.labels.tolist()) == [-1, 0]


def test_names_that_would_collide_are_refused(prep: Prep, tmp_path: Path) -> None:
    write_all(tmp_path / "set" / "c", {"a.png": png_bytes(corner_image()), "a.png.jpg": image(0)})
    assert "both be stored as c/a.png.jpg" in prep.refused("convert", tmp_path / "set", tmp_path / "x.beton")


@pytest.mark.parametrize("name", ["missing", "empty", "text.txt", "zero.beton"])
def test_strange_sources_are_one_line(name: str, prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_all(tmp_path, {"text.txt": b"x", "zero.beton": b""})
    assert name in prep.refused("scan", tmp_path / name)
    assert name in prep.refused("convert", tmp_path / name, tmp_path / "x")
