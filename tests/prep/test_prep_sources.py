"""Whatever form the images have, the prepared set is the same."""

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import corner_image, jpeg_bytes, png_bytes, write_all

from loaders.datasets.beton import open_beton
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError
from loaders.prep.cli import main
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

NAMES = {"n01": ("n01_1.JPEG", "n01_2.JPEG"), "n02": ("n02_7.JPEG",), "n10": ("n10_3.JPEG", "n10_4.JPEG")}


def image(number: int) -> bytes:
    return jpeg_bytes(corner_image((40 + number, 30 + 2 * number)))


def files() -> dict[str, bytes]:
    """class/name -> bytes."""
    names = [f"{folder}/{name}" for folder, members in NAMES.items() for name in members]
    return {name: image(number) for number, name in enumerate(names)}


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def tar_bytes(members: Iterable[tuple[str, bytes]], folder: Path) -> bytes:
    return write_tar(folder / "inner.tar", members).read_bytes()


def write_parquet(path: Path, rows: list[tuple[bytes, object]], names: list[str] | None = None, **columns: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image_column, label_column = columns.get("image", "image"), columns.get("label", "label")
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    images = arrow.array([{"bytes": data, "path": None} for data, _ in rows], kind)
    table = arrow.table({image_column: images, label_column: [label for _, label in rows]})
    if names:
        notes = {"info": {"features": {label_column: {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(notes)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for name, data in files().items():
        write_all(root / name.partition("/")[0], {name.partition("/")[2]: data})
    return root


def stored(source: Path, tmp_path: Path, *more: str) -> tuple[list[tuple[str, bytes]], list[str]]:
    """(class, bytes) of every image of the source's beton file, in order, and the classes."""
    output = tmp_path / "out.beton"
    assert main(["convert", str(source), str(output), "--workers", "1", "--force", *more]) == 0
    file = open_beton(output)
    return [(file.classes[label], bytes(file.read(i))) for i, label in enumerate(file.labels)], file.classes


def expected() -> list[tuple[str, bytes]]:
    return [(name.partition("/")[0], data) for name, data in files().items()]


def test_class_folders_links_and_tars_of_them_give_the_same_set(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    for name in NAMES:
        (tmp_path / "linked" / name).symlink_to(folder / name)
    write_tar(tmp_path / "plain.tar", reversed(files().items()))
    write_tar(tmp_path / "deep.tar", ((f"./imagenet/train/{name}", data) for name, data in files().items()))
    write_tar(tmp_path / "pax.tar", files().items(), tarfile.PAX_FORMAT)
    for source in (folder, tmp_path / "linked", tmp_path / "plain.tar", tmp_path / "deep.tar", tmp_path / "pax.tar"):
        assert stored(source, tmp_path) == (expected(), list(NAMES)), source


def test_ilsvrcs_training_tar_of_tars(tmp_path: Path) -> None:
    inner = [
        (f"{name}.tar", tar_bytes([(member, files()[f"{name}/{member}"]) for member in members], tmp_path))
        for name, members in NAMES.items()
    ]
    assert stored(write_tar(tmp_path / "ILSVRC2012_img_train.tar", inner), tmp_path) == (expected(), list(NAMES))


def test_ilsvrcs_class_tars_unpacked_into_a_folder_keep_their_classes(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name, members in NAMES.items():
        write_tar(tmp_path / "train" / f"{name}.tar", [(member, files()[f"{name}/{member}"]) for member in members])
    assert stored(tmp_path / "train", tmp_path) == (expected(), list(NAMES))


def test_tars_beside_the_folders_they_were_unpacked_to_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(folder / "n01.tar", [("n01_1.JPEG", image(0))])
    assert main(["convert", str(folder), str(tmp_path / "x.beton")]) == 2
    error = capsys.readouterr().err
    assert "folder: holds n01.tar beside the folder n" in error and "move away what you do not mean" in error


@pytest.mark.parametrize("cut", ["end blocks", "one end block", "between members", "inside a member", "header", "all"])
def test_a_class_tar_that_is_cut_inside_ilsvrcs_is_named(cut: str, tmp_path: Path) -> None:
    """The outer tar is whole. Reading on past the inner one's end would take the next class's images for its own."""
    inner = {
        name: tar_bytes([(member, files()[f"{name}/{member}"]) for member in members], tmp_path)
        for name, members in NAMES.items()
    }
    whole = inner["n01"]
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        second = tar.getmembers()[1]
    contents = second.offset_data + -(-second.size // 512) * 512
    damaged = {
        "end blocks": whole[:contents],
        "one end block": whole[: contents + 512],
        "between members": whole[: second.offset],
        "inside a member": whole[: second.offset_data + 100],
        "header": whole[: second.offset] + b"x" + whole[second.offset + 1 :],
        "all": bytes(10240),
    }[cut]
    outer = [(f"{name}.tar", data) for name, data in (inner | {"n01": damaged}).items()]
    path = write_tar(tmp_path / "train.tar", outer)
    with pytest.raises(UserError, match=r"train\.tar: n01\.tar in it: ") as error:
        open_source(path)
    assert "\n" not in str(error.value)


def test_a_damaged_header_in_the_middle_of_a_tar_hides_no_images(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", files().items())
    with tarfile.open(path) as tar:
        middle = tar.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    data[middle + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"x\.tar: damaged or cut after {middle:,} bytes"):
        open_source(path)


def test_two_tars_in_one_file_are_refused_rather_than_half_read(tmp_path: Path) -> None:
    one, two = (tar_bytes(part, tmp_path) for part in (list(files().items())[:2], list(files().items())[2:]))
    (tmp_path / "both.tar").write_bytes(one + two)
    with pytest.raises(UserError, match=r"both\.tar: goes on behind its end"):
        open_source(tmp_path / "both.tar")


def test_links_and_sparse_members_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", files().items())
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


def validation() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{i + 1:08d}.JPEG": data for i, data in enumerate(files().values())}


def label_files(folder: Path) -> dict[str, Path]:
    """The forms in which validation labels are found."""
    labels = [name.partition("/")[0] for name in files()]
    pairs = list(zip(validation(), labels, strict=True))
    (folder / "plain.txt").write_text("".join(f"{name} {label}\n" for name, label in pairs))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filename", "label"), *reversed(pairs)])
    boxes = "".join(
        f"{name.removesuffix('.JPEG')},{label} 1 2 3 4 {label} 5 6 7 8\n" for name, label in reversed(pairs)
    )
    (folder / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + boxes)
    return {path.name: path for path in folder.iterdir() if path.suffix in (".txt", ".csv")}


@pytest.mark.parametrize("form", ["plain.txt", "table.csv", "LOC_val_solution.csv"])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_flat_validation_images_with_a_label_file(form: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    labels = label_files(tmp_path / "lists")[form]
    write_all(tmp_path / "val", validation())
    source = write_tar(tmp_path / "val.tar", validation().items()) if kind == "tar" else tmp_path / "val"
    assert stored(source, tmp_path, "--labels", str(labels)) == (expected(), list(NAMES))


def test_the_development_kits_numbers_need_its_meta_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    write_all(tmp_path / "val", validation())
    kit = tmp_path / "devkit"
    kit.mkdir()
    numbers = {"n01": 3, "n02": 1, "n10": 2}  # the kit's numbers do not follow the sorted identifiers
    truth = kit / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("".join(f"{numbers[name.partition('/')[0]]}\n" for name in files()))
    arguments = ["convert", str(tmp_path / "val"), str(tmp_path / "x.beton"), "--labels", str(truth), "--workers", "1"]
    assert main(arguments) == 2 and "meta.mat" in capsys.readouterr().err
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = np.array([(number, name, "words", 0) for name, number in numbers.items()], kinds)
    savemat(kit / "meta.mat", {"synsets": rows})
    assert stored(tmp_path / "val", tmp_path, "--labels", str(truth)) == (expected(), list(NAMES))
    truth.write_text("1\n2\n3\n1\n" + "9" * 5000)
    assert (
        main([*arguments, "--force"]) == 2 and "txt:5: 99999999999999999999 is not a class" in capsys.readouterr().err
    )
    truth.write_text("1\n2\n")
    assert main([*arguments, "--force"]) == 2 and "2 numbers for 5 images" in capsys.readouterr().err


def test_missing_and_surplus_labels_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path / "val", validation())
    labels = tmp_path / "labels.txt"
    names = list(validation())
    labels.write_text("".join(f"{name} n01\n" for name in names[1:]))
    arguments = ["convert", str(tmp_path / "val"), str(tmp_path / "x.beton"), "--labels", str(labels), "--workers", "1"]
    assert main(arguments) == 2 and f"{names[0]}: no label" in capsys.readouterr().err
    labels.write_text("".join(f"{name} n01\n" for name in [*names, "gone.JPEG"]))
    assert main(arguments) == 2 and "gone.JPEG: labelled in" in capsys.readouterr().err


def test_flat_images_without_labels_stay_unlabelled(tmp_path: Path) -> None:
    write_tar(tmp_path / "val.tar", validation().items())
    convert(open_source(tmp_path / "val.tar"), tmp_path / "out", "folder", Settings(), workers=1)
    data = open_folder(tmp_path / "out")
    assert data.classes == [] and (data.labels == -1).all() and data.names == list(validation())


def test_a_prepared_file_without_labels_can_be_given_them_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lists").mkdir()
    labels = label_files(tmp_path / "lists")["plain.txt"]
    path = write_tar(tmp_path / "val.tar", reversed(validation().items()))
    assert main(["convert", str(path), str(tmp_path / "val.beton"), "--workers", "1"]) == 0
    assert stored(tmp_path / "val.beton", tmp_path, "--labels", str(labels)) == (expected(), list(NAMES))
    assert main(["convert", str(path), str(tmp_path / "x.beton"), "--labels", str(labels), "--workers", "1"]) == 0
    assert open_beton(tmp_path / "x.beton").names == open_beton(tmp_path / "out.beton").names
    labels.write_text("".join(labels.read_text().splitlines(keepends=True)[1:]))
    assert main(["info", str(tmp_path / "val.beton"), "--labels", str(labels)]) == 0
    assert "1, such as ILSVRC2012_val_00000001.JPEG: no label in" in capsys.readouterr().out


def shard_members(numbers: range, label: str) -> list[tuple[str, bytes]]:
    members = []
    for number in numbers:
        members.append((f"{number:06d}.jpg", image(number)))
        if label == "json":
            members.append((f"{number:06d}.json", json.dumps({"label": number * 5}).encode()))
        else:
            members.append((f"{number:06d}.cls", f"{number * 5}\n".encode()))
    return members


@pytest.mark.parametrize("label", ["cls", "json"])
def test_webdataset_shards(label: str, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    write_tar(shards / "train-000.tar", shard_members(range(0, 2), label))
    write_tar(shards / "train-001.tar", shard_members(range(2, 4), label))
    found, classes = stored(shards, tmp_path)
    assert classes == ["00", "05", "10", "15"]  # by value, and as text
    assert found == [(f"{5 * i:02d}", image(i)) for i in range(4)]
    convert(open_source(shards), tmp_path / "out", "folder", Settings(), workers=1)
    data = open_folder(tmp_path / "out")
    assert data.classes == classes and [Path(path).read_bytes() for path in data.paths] == [image(i) for i in range(4)]
    assert data.names == open_beton(tmp_path / "out.beton").names


def test_webdataset_faults_name_shard_and_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(members: list[tuple[str, bytes]]) -> str:
        write_tar(tmp_path / "shard.tar", members)
        assert main(["convert", str(tmp_path / "shard.tar"), str(tmp_path / "x.beton"), "--workers", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "shard.tar" in error
        return error

    good = shard_members(range(2), "cls")
    assert "000001: no class" in complaint(good[:-1])
    assert "000002: no image" in complaint([*good, ("000002.cls", b"1")])
    assert "an empty tar" in complaint([])
    assert "000003.json is not JSON" in complaint([*good, ("000003.jpg", b"x"), ("000003.json", b"{")])
    assert "cannot name a class folder" in complaint([*good, ("000003.jpg", b"x"), ("000003.cls", b"../up")])


def test_broken_and_packed_tars_are_named(tmp_path: Path) -> None:
    data = write_tar(tmp_path / "x.tar", files().items()).read_bytes()
    for cut in (len(data) // 2, 1024, 3000):
        (tmp_path / "cut.tar").write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"cut\.tar"):
            open_source(tmp_path / "cut.tar")
    shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path, "x.tar")
    with pytest.raises(UserError, match="unpack"):
        open_source(tmp_path / "packed.tar.gz")


def test_parquet_shards_with_class_names(tmp_path: Path) -> None:
    rows = [(data, list(NAMES).index(name.partition("/")[0])) for name, data in files().items()]
    shards = tmp_path / "hub"
    write_parquet(shards / "data" / "train-00000-of-00002.parquet", rows[:3], list(NAMES))
    write_parquet(shards / "data" / "train-00001-of-00002.parquet", rows[3:], list(NAMES))
    assert stored(shards, tmp_path) == (expected(), list(NAMES))


def test_parquet_faults_name_file_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(path: Path) -> str:
        assert main(["convert", str(path), str(tmp_path / "x.beton"), "--workers", "1"]) == 2
        return capsys.readouterr().err

    write_parquet(tmp_path / "a.parquet", [(image(0), 7)], ["only"])
    assert "label 7 is not one of the 1 classes" in complaint(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [(image(0), [1, 2])])
    assert "keep one class an image" in complaint(tmp_path / "b.parquet")
    write_parquet(tmp_path / "c.parquet", [(b"", 0), (image(1), 1)])
    assert "no image bytes in this row" in complaint(tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really")
    assert "d.parquet: not a readable parquet file" in complaint(tmp_path / "d.parquet")


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_images_without_a_class_are_reported(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-1 says that there is no label, as on hubs' test splits; nothing at all is a fault, whatever the form."""
    path = tmp_path / ("x.parquet" if form == "parquet" else "x.tar")
    if form == "parquet":
        write_parquet(path, [(image(0), 5), (image(1), None), (image(2), -1)])
    else:
        write_tar(
            path, [*shard_members(range(1, 2), "cls"), ("2.jpg", image(1)), ("3.jpg", image(2)), ("3.cls", b"-1")]
        )
    assert main(["convert", str(path), str(tmp_path / "x.beton"), "--workers", "1"]) == 2
    named = "x.parquet: x.parquet:row 1: no class" if form == "parquet" else "x.tar: x.tar:2: no class"
    assert named in capsys.readouterr().err
    assert main(["convert", str(path), str(tmp_path / "x.beton"), "--workers", "1", "--on-error", "skip"]) == 0
    file = open_beton(tmp_path / "x.beton")
    assert file.classes == ["5"] and sorted(file.labels.tolist()) == [-1, 0]


def test_missing_pyarrow_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert main(["scan", str(tmp_path / "x.parquet")]) == 2
    assert "pip install pyarrow" in capsys.readouterr().err


def test_names_that_would_collide_are_refused(tmp_path: Path) -> None:
    write_all(tmp_path / "source" / "c", {"a.png": png_bytes(corner_image()), "a.png.jpg": image(0)})
    with pytest.raises(UserError, match=r"both be stored as c/a\.png\.jpg"):
        convert(open_source(tmp_path / "source"), tmp_path / "x.beton", "beton", Settings())


def test_strange_sources_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "zero.beton").write_bytes(b"")
    for name in ("missing", "empty", "text.txt", "zero.beton"):
        for command in (["scan", str(tmp_path / name)], ["convert", str(tmp_path / name), str(tmp_path / "x")]):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and name in error


def test_a_label_file_beside_a_source_that_has_labels_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in files().items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(data)
    assert main(["convert", str(tmp_path / "set"), str(tmp_path / "set.beton")]) == 0
    assert main(["convert", str(tmp_path / "set.beton"), str(tmp_path / "b.beton"), "--labels", "no.txt"]) == 2
    assert "--labels no.txt" in capsys.readouterr().err and not (tmp_path / "b.beton").exists()
