"""Opening image folders: what counts as a sample, in which order, with which size, and what the errors name."""

import os
import pickle
import time
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loaders.datasets import size_index
from loaders.datasets.dataset import ImageDataset, open_folder, read_label_split
from loaders.datasets.decode import decode
from loaders.datasets.layout import folder_above
from loaders.datasets.size_index import CACHE_NAME, index_file
from loaders.errors import UserError
from loaders.open import open_images


def write(path: Path, image: Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def fill(root: Path, image: Image.Image, *names: str) -> None:
    for name in names:
        write(root / name, image)


@pytest.fixture
def small(photos: dict[str, Image.Image]) -> Image.Image:
    return photos["chelsea"].resize((60, 40))


def open_quietly(root: Path, *arguments: object, **options: object) -> ImageDataset:
    return open_folder(root, *arguments, quiet=True, **options)


class TestColumns:
    @pytest.mark.parametrize("form", ["photo_folder", "photo_beton"])
    def test_parts_of_a_set_join_to_the_whole(self, request: pytest.FixtureRequest, form: str) -> None:
        whole = open_images(request.getfixturevalue(form))
        part = whole.subset([3, 1]).joined(whole.subset([20]))
        assert type(part) is type(whole)
        for column in fields(whole):
            expected, found = getattr(whole, column.name), getattr(part, column.name)
            if column.metadata.get("shared"):
                assert found is expected, column.name
            elif expected is not None:
                assert list(map(str, found)) == [str(expected[i]) for i in (3, 1, 20)], column.name

    def test_a_data_set_can_be_sent_to_a_process(self, photo_folder: Path) -> None:
        images = open_quietly(photo_folder)
        received = pickle.loads(pickle.dumps(images))
        assert received.digest == images.digest and received.bad_samples.unusable == frozenset()


class TestFolders:
    @pytest.mark.parametrize(
        ("names", "labels", "classes"),
        [
            (["1/a.jpg", "10/a.jpg", "2/a.jpg"], [0, 1, 2], ["1", "10", "2"]),  # as text
            (["cat/b.jpg", "cat/deep/er/a.jpg", "cat-2/c.jpg"], [0, 0, 1], ["cat", "cat-2"]),
            (["0.png", "1.png", "2.png"], [-1, -1, -1], []),
        ],
    )
    def test_class_folders_number_the_labels(
        self, tmp_path: Path, small: Image.Image, names: list[str], labels: list[int], classes: list[str]
    ) -> None:
        fill(tmp_path, small, *names[::-1])
        dataset = open_quietly(tmp_path)
        assert dataset.names == names and dataset.classes == classes
        assert dataset.labels.tolist() == labels and dataset.labels.dtype == np.int64

    def test_hidden_files_and_folders_do_not_exist(self, photo_copy: Path, small: Image.Image) -> None:
        before = open_quietly(photo_copy)
        write(photo_copy / ".hidden" / "a.jpg", small)
        write(photo_copy / "__MACOSX" / "a.jpg", small)
        write(photo_copy / "astronaut" / "._0.jpg", small, format="JPEG")
        (photo_copy / "astronaut" / ".DS_Store").write_bytes(b"x")
        (photo_copy / "Thumbs.db").write_bytes(b"x")
        after = open_quietly(photo_copy)
        assert after.names == before.names and after.classes == before.classes and after.digest == before.digest

    def test_an_empty_class_folder_is_named(self, photo_copy: Path) -> None:
        (photo_copy / "aardvark").mkdir()
        with pytest.raises(UserError, match="aardvark: a class folder without images"):
            open_quietly(photo_copy)
        dataset = open_quietly(photo_copy, allow_empty=True)
        assert dataset.classes[0] == "aardvark" and dataset.labels.min() == 1

    @pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"x")])
    def test_what_is_no_folder_is_one_line(self, tmp_path: Path, make: object) -> None:
        make(tmp_path / "data")  # type: ignore[operator]
        with pytest.raises(UserError, match=r"data: (no such folder|an empty folder|not a folder)") as error:
            open_quietly(tmp_path / "data")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("folders", "complaint"),
        [
            (["train/cat", "val/cat"], "holds the splits train, val"),
            (["train", "val"], "holds the splits train, val, not classes; give one of them, such as .*/train"),
            (["train/cat", "train/dog"], "holds the splits train, not classes"),
            (["Train/cat", "Test/cat"], "holds the splits Test, Train, not classes"),
            (["cifar/train/cat", "cifar/val/cat", "photos/a"], "cifar: holds the splits train, val and is no class"),
            (
                ["imagenet/cat", "imagenet/dog"],
                "its only class would be imagenet, which holds 2 folders .* give .*/imagenet",
            ),
            (["a/b/train/cat", "a/c/val/cat"], "its only class would be a,"),
        ],
    )
    def test_a_folder_too_high_is_refused(
        self, tmp_path: Path, small: Image.Image, folders: list[str], complaint: str
    ) -> None:
        fill(tmp_path, small, *(f"{folder}/x.jpg" for folder in folders))
        with pytest.raises(UserError, match=complaint) as error:
            open_quietly(tmp_path)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "folders",
        [["train", "plane"], ["a/images", "b/images"], ["a/images"], ["a", "a/x", "a/y"], ["a/val", "a", "b"]],
    )
    def test_folders_within_classes_are_no_reason(self, tmp_path: Path, small: Image.Image, folders: list[str]) -> None:
        fill(tmp_path, small, *(f"{folder}/x.jpg" for folder in folders))
        assert open_quietly(tmp_path).classes == sorted({folder.partition("/")[0] for folder in folders})

    @pytest.mark.parametrize("suffix", ["tar", "parquet"])
    def test_shards_are_to_be_converted(self, tmp_path: Path, suffix: str) -> None:
        (tmp_path / "set").mkdir()
        for number in range(2):
            (tmp_path / "set" / f"{number}.{suffix}").write_bytes(b"x")
        for path in (tmp_path / "set", tmp_path / "set" / f"0.{suffix}"):
            with pytest.raises(UserError, match=f"convert it first: cocor-prep convert {path} NAME.beton"):
                open_quietly(path)

    def test_a_class_folder_alone_is_usable(self, tmp_path: Path, small: Image.Image) -> None:
        fill(tmp_path, small, "data/cat/x.jpg", "data/dog/x.jpg", "flat/x.jpg")
        alone = open_quietly(tmp_path / "data" / "cat")
        assert len(alone) == 1 and folder_above(alone.root) == tmp_path / "data"
        assert folder_above(tmp_path / "flat") is None  # beside it are folders, but not of images


class TestLinks:
    def test_loops_and_doubles_add_nothing(self, photo_copy: Path) -> None:
        before = open_quietly(photo_copy)
        (photo_copy / "astronaut" / "loop").symlink_to(photo_copy)
        (photo_copy / "astronaut" / "up").symlink_to(photo_copy.parent)
        (photo_copy / "astronaut" / "again.jpg").symlink_to(photo_copy / "astronaut" / "0.jpg")
        assert open_quietly(photo_copy).names == before.names

    def test_links_to_the_outside_are_followed(self, photo_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "subset" / "b").mkdir(parents=True)
        (tmp_path / "subset" / "a").symlink_to(photo_folder / "chelsea")
        (tmp_path / "subset" / "b" / "x.jpg").symlink_to(photo_folder / "coffee" / "0.jpg")
        dataset = open_quietly(tmp_path / "subset")
        assert dataset.classes == ["a", "b"] and len(dataset) == 7

    def test_dangling_links_and_pipes_are_named(self, photo_copy: Path) -> None:
        (photo_copy / "coffee" / "gone.jpg").symlink_to(photo_copy / "nowhere.jpg")
        os.mkfifo(photo_copy / "coffee" / "pipe.jpg")
        with pytest.raises(UserError, match=r"coffee/gone.jpg: a link to nothing \(and 1 more"):
            open_quietly(photo_copy)
        dataset = open_quietly(photo_copy, on_error="skip")
        assert len(dataset) == 24
        assert dataset.skipped == (("coffee/gone.jpg", "a link to nothing"), ("coffee/pipe.jpg", "not a regular file"))


class TestUnusableFiles:
    def spoil(self, root: Path) -> list[str]:
        (root / "coffee" / "notes.pdf").write_text("no image")
        (root / "coffee" / "empty.jpg").write_bytes(b"")
        whole = (root / "coffee" / "0.jpg").read_bytes()
        (root / "coffee" / "half.jpg").write_bytes(whole[: len(whole) // 2])
        (root / "stray.pdf").write_text("no image")
        return ["coffee/empty.jpg", "coffee/half.jpg", "coffee/notes.pdf", "stray.pdf"]

    def test_stop_names_the_first_of_them(self, photo_copy: Path) -> None:
        self.spoil(photo_copy)
        with pytest.raises(UserError, match=r"coffee/empty.jpg: an empty file .and 3 more"):
            open_quietly(photo_copy)

    def test_skip_lists_all_of_them(self, photo_copy: Path) -> None:
        bad = self.spoil(photo_copy)
        dataset = open_quietly(photo_copy, on_error="skip")
        assert len(dataset) == 24 and dict(dataset.skipped).keys() >= set(bad)
        assert not set(bad) & set(dataset.names)
        assert "truncated" in dict(dataset.skipped)["coffee/half.jpg"]

    def test_a_pixel_bomb_is_refused_by_its_header(self, tmp_path: Path, small: Image.Image) -> None:
        path = write(tmp_path / "a" / "bomb.png", small)
        data = bytearray(path.read_bytes())
        data[16:24] = (60_000).to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
        path.write_bytes(data)
        limit = Image.MAX_IMAGE_PIXELS
        for use in (open_quietly, decode):
            with pytest.raises(UserError, match=r"bomb.png.*pixels"):
                use(tmp_path if use is open_quietly else path)
        assert limit == Image.MAX_IMAGE_PIXELS


class TestLabelFiles:
    @pytest.fixture
    def flat(self, tmp_path: Path, small: Image.Image) -> Path:
        fill(tmp_path / "flat", small, "a b,c.jpg", "b.jpg", "c.jpg")
        return tmp_path / "flat"

    @pytest.mark.parametrize(
        "text", ["a b,c.jpg,dog\nb.jpg,cat\nc.jpg,dog\n", "filename,label\r\nc.jpg\tdog\r\nb.jpg cat\r\na b,c.jpg dog"]
    )
    def test_csv_tab_and_blank_separated(self, flat: Path, text: str) -> None:
        (flat / "labels.csv").write_text(text, newline="")
        dataset = open_quietly(flat, flat / "labels.csv")
        assert dataset.names == ["a b,c.jpg", "b.jpg", "c.jpg"]
        assert dataset.classes == ["cat", "dog"] and dataset.labels.tolist() == [1, 0, 1]

    def test_missing_and_unknown_names(self, flat: Path) -> None:
        (flat.parent / "labels.txt").write_text("b.jpg 1\nc.jpg 1\nz.jpg 0\n")
        with pytest.raises(UserError, match=r"a b,c.jpg: no label in .*labels.txt \(and 1 more"):
            open_quietly(flat, flat.parent / "labels.txt")
        dataset = open_quietly(flat, flat.parent / "labels.txt", on_error="skip")
        assert dataset.names == ["b.jpg", "c.jpg"] and dict(dataset.skipped)["z.jpg"].endswith(
            "labels.txt:3, but not there"
        )

    @pytest.mark.parametrize(
        "text", ["", "# later\n", "photos/b.jpg,1\n", "/data/c.jpg 0\n", "b.jpg,1,0.5\n", "cat,b.jpg\n",
                 "b.jpg 1\rc.jpg 0\r", "ImageId,PredictionString\nB,n01440764 1 1 2 2\n"]
    )  # fmt: skip
    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    def test_a_list_without_any_image_is_refused(self, flat: Path, text: str, on_error: str) -> None:
        (flat / "labels.txt").write_text(text, newline="")
        with pytest.raises(UserError, match=r"labels.txt: labels no image .* names such as a b,c.jpg"):
            open_quietly(flat, flat / "labels.txt", on_error=on_error)

    @pytest.mark.parametrize(
        ("text", "encoding", "complaint"),
        [
            ("b.jpg,1\n", "utf-16", "labels.txt: is UTF-16 text; save it as UTF-8"),
            ("# made by hand\nb.jpg 1\nb.jpg 2\n", "utf-8", "labels.txt:3: b.jpg has a label already"),
        ],
    )
    def test_faults_of_a_list_are_named(self, flat: Path, text: str, encoding: str, complaint: str) -> None:
        (flat / "labels.txt").write_text(text, encoding=encoding)
        with pytest.raises(UserError, match=complaint):
            open_quietly(flat, flat / "labels.txt")

    def test_numbers_are_places_among_given_classes(self, flat: Path) -> None:
        (flat / "labels.txt").write_text("a b,c.jpg 10\nb.jpg 2\nc.jpg 0\n")
        classes = [f"n{i}" for i in range(12)]
        dataset = open_quietly(flat, flat / "labels.txt", classes=classes)
        assert dataset.labels.tolist() == [10, 2, 0] and dataset.classes == classes
        with pytest.raises(UserError, match="class 10 is not among the 3 known"):
            open_quietly(flat, flat / "labels.txt", classes=classes[:3])
        (flat / "labels.txt").write_text(f"a b,c.jpg {'9' * 5000}\nb.jpg 2\nc.jpg 0\n")
        with pytest.raises(UserError, match="is not among the 3 known"):
            open_quietly(flat, flat / "labels.txt", classes=classes[:3])

    def test_listed_numbers_match_numbers_by_name(self, flat: Path) -> None:
        (flat / "labels.txt").write_text("a b,c.jpg 0\nb.jpg 2\nc.jpg 1\n")
        with pytest.raises(UserError, match="class 0 is not among the 3 known classes"):
            open_quietly(flat, flat / "labels.txt", classes=["1", "2", "3"])


class TestTwoSetsOfClasses:
    """Classes match by name; a number is a place only where a list without other names says so."""

    def folder(self, root: Path, *classes: str) -> Path:
        for number, name in enumerate(classes):
            (root / name).mkdir(parents=True)
            Image.new("RGB", (40, 30), (50 * number, 0, 0)).save(root / name / "0.png")
        return root

    def test_folders_match_by_name(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, "1", "2")
        assert open_quietly(folder, classes=["1", "2", "3"]).labels.tolist() == [0, 1]
        assert open_quietly(folder, classes=["01", "02", "10"]).labels.tolist() == [0, 1]  # as cocor-prep pads them
        with pytest.raises(UserError, match="class 1 is not among the 2 known classes"):
            open_quietly(folder, classes=["cat", "dog"])

    def test_an_unknown_number_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="class 0 is not among the 3 known classes"):
            open_quietly(self.folder(tmp_path, "0", "1", "2"), classes=["1", "2", "3"])
        with pytest.raises(UserError, match="class 01 is not among the 2 known classes"):
            open_quietly(self.folder(tmp_path / "both", "1", "01"), classes=["1", "2"])


class TestLabelSplit:
    def test_names_in_order_with_comments(self, photo_folder: Path, tmp_path: Path) -> None:
        dataset = open_quietly(photo_folder)
        (tmp_path / "split.txt").write_text("# 1 %\nrocket/3.jpg\n\n./chelsea/5.png\n")
        places = read_label_split(tmp_path / "split.txt", dataset)
        assert [dataset.names[i] for i in places] == ["rocket/3.jpg", "chelsea/5.png"]
        subset = dataset.subset(places)
        assert subset.labels.tolist() == [3, 1] and subset.classes == dataset.classes
        assert subset.digest != dataset.digest and subset.sizes.tolist() == dataset.sizes[places].tolist()

    @pytest.mark.parametrize(
        ("text", "line"), [("rocket/0.jpg\nrocket/99.jpg\n", 2), ("rocket/0.jpg\nrocket/0.jpg\n", 2), ("0.jpg\n", 1)]
    )
    def test_faults_are_named_by_line(self, photo_folder: Path, tmp_path: Path, text: str, line: int) -> None:
        (tmp_path / "split.txt").write_text(text)
        with pytest.raises(UserError, match=f"split.txt:{line}: "):
            read_label_split(tmp_path / "split.txt", open_quietly(photo_folder))


def test_text_files_are_passed_over(photo_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name in ("coffee/notes.txt", "labels.csv", "coffee/0.json"):
        (photo_copy / name).write_text("x")
    assert len(open_folder(photo_copy)) == 24
    (said,) = caplog.messages
    assert said.endswith("passed over 3 text files, such as labels.csv")


def test_tiny_imagenet_as_distributed(tmp_path: Path, small: Image.Image) -> None:
    train, val = tmp_path / "train", tmp_path / "val"
    for wnid in ("n01", "n02"):
        write(train / wnid / "images" / f"{wnid}_0.JPEG", small)
        (train / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t62\t62\n")
    for number in range(3):
        write(val / "images" / f"val_{number}.JPEG", small)
    rows = [f"val_{number}.JPEG\t{wnid}\t0\t32\t44\t62\n" for number, wnid in enumerate(("n02", "n01", "n02"))]
    (val / "val_annotations.txt").write_text("".join(rows))
    classes = open_quietly(train).classes
    held_out = open_quietly(val, classes=classes)
    assert classes == ["n01", "n02"] and held_out.labels.tolist() == [1, 0, 1]


class TestSizeIndex:
    def test_sizes_are_those_of_the_decoded_images(self, photo_folder: Path) -> None:
        dataset = open_quietly(photo_folder)
        assert dataset.sizes.dtype == np.int32
        assert [list(np.asarray(decode(path)).shape[:2]) for path in dataset.paths] == dataset.sizes.tolist()
        assert dataset.plain.all()

    def test_a_second_opening_reads_no_headers(self, photo_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = open_quietly(photo_copy)
        assert not list(photo_copy.glob(".*"))  # where it would look like a class to some program
        monkeypatch.setattr(size_index, "inspect", lambda path: pytest.fail("read again"))
        assert open_quietly(photo_copy).digest == first.digest

    def test_a_changed_file_is_read_again(self, photo_copy: Path, small: Image.Image) -> None:
        open_quietly(photo_copy)
        path = write(photo_copy / "rocket" / "0.jpg", small)
        os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
        dataset = open_quietly(photo_copy)
        assert dataset.sizes[dataset.names.index("rocket/0.jpg")].tolist() == [40, 60]

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"rubbish"])
    def test_a_corrupt_cache_is_ignored(self, photo_copy: Path, content: bytes) -> None:
        first = open_quietly(photo_copy)
        index_file(photo_copy).write_bytes(content)
        assert open_quietly(photo_copy).digest == first.digest

    def test_faults_are_remembered(self, photo_copy: Path) -> None:
        (photo_copy / "rocket" / "bad.jpg").write_bytes(b"rubbish")
        first = open_quietly(photo_copy, on_error="skip")
        assert open_quietly(photo_copy, on_error="skip").skipped == first.skipped != ()

    def test_the_index_of_earlier_versions_moves(self, photo_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = open_quietly(photo_copy)
        index_file(photo_copy).rename(photo_copy / CACHE_NAME)
        monkeypatch.setattr(size_index, "inspect", lambda path: pytest.fail("read again"))
        assert open_quietly(photo_copy).digest == first.digest
        assert index_file(photo_copy).is_file() and not (photo_copy / CACHE_NAME).exists()


class TestDecode:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
    def test_upright_by_exif(self, tmp_path: Path, small: Image.Image, orientation: int, suffix: str) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = write(tmp_path / "a" / f"x.{suffix}", small, exif=exif)
        stored = np.asarray(Image.open(write(tmp_path / f"plain.{suffix}", small)).convert("RGB"))
        turned = {
            1: stored, 2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1], 5: stored.transpose(1, 0, 2),
            6: stored[::-1].transpose(1, 0, 2), 7: stored[::-1, ::-1].transpose(1, 0, 2),
            8: stored[:, ::-1].transpose(1, 0, 2),
        }[orientation]  # fmt: skip
        np.testing.assert_array_equal(np.asarray(decode(path)), turned)
        assert open_quietly(tmp_path / "a").sizes.tolist() == [list(turned.shape[:2])]

    def test_16_bit_grey_is_scaled(self, tmp_path: Path) -> None:
        ramp = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(4, 256)
        Image.fromarray(ramp).save(tmp_path / "ramp.png")
        pixels = np.asarray(decode(tmp_path / "ramp.png"))[..., 0].ravel()
        assert len(np.unique(pixels)) == 256 and (np.diff(pixels.astype(int)) >= 0).all()

    def test_alpha_is_composited_on_white(self, tmp_path: Path, small: Image.Image) -> None:
        alpha = Image.linear_gradient("L").resize(small.size)
        for name, image in {"rgba": small.convert("RGBA"), "la": small.convert("LA")}.items():
            image.putalpha(alpha)
            image.save(tmp_path / f"{name}.png")
            white = Image.new("RGB", small.size, "white")
            white.paste(image.convert("RGB"), mask=alpha)
            difference = np.asarray(decode(tmp_path / f"{name}.png")).astype(int) - np.asarray(white)
            assert np.abs(difference).max() <= 1
        palette = small.quantize(16)
        palette.save(tmp_path / "p.png", transparency=palette.getpixel((5, 5)))
        assert decode(tmp_path / "p.png").getpixel((5, 5)) == (255, 255, 255)

    @pytest.mark.parametrize("progressive", [False, True])
    def test_truncated_and_missing_files_are_errors(
        self, tmp_path: Path, photos: dict[str, Image.Image], progressive: bool
    ) -> None:
        photos["coffee"].save(tmp_path / "x.jpg", progressive=progressive)
        whole = (tmp_path / "x.jpg").read_bytes()
        (tmp_path / "x.jpg").write_bytes(whole[: len(whole) // 2])
        for name, complaint in (("x.jpg", "truncated or damaged"), ("gone.jpg", "No such file")):
            with pytest.raises(UserError, match=f"{name}: {complaint}") as error:
                decode(tmp_path / name)
            assert "\n" not in str(error.value)
