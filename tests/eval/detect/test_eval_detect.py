"""Detection from end to end on small sets laid out as VOC and COCO; average precision as pycocotools computes it."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.boxes import COCO_IDS, TRAIN, scene, voc_xml, write_coco, write_voc
from helpers.runs import ROOT, environment
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from cocor import checkpoint
from cocor.eval.cli import main
from cocor.eval.detect.average_precision import Rows, annotations, average_precision
from cocor.eval.detect.batches import Batches, decoded
from cocor.eval.detect.datasets import open_sets
from cocor.eval.detect.model import build_detector
from cocor.eval.detect.recipe import RECIPES
from cocor.weights.load import load_encoder
from loaders.channels import luma

Capsys = pytest.CaptureFixture[str]
SMALL = ("--min-size", "64", "96", "--batch-size", "2", "--regions", "16", "--gpu", "no", "--workers", "0")


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_voc(tmp_path_factory.mktemp("voc")).parent


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("coco") / "root")


def call(root: Path, output: Path, *flags: str, dataset: str = "voc0712", weights: str = "random:test_resnet") -> int:
    place = ("--dataset", dataset, "--root", str(root), "--output", str(output))
    return main(["detect", weights, *place, *SMALL, *flags])


def perfect(images: Any) -> Rows:
    return [row | {"score": 0.9} for row in annotations(images) if not row["iscrowd"]]


def by_the_book(truth: Path, found: Path) -> list[float]:
    """AP, AP50, AP75 and by area, from files, as pycocotools' own example computes them."""
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(loaded := COCO(truth), loaded.loadRes(str(found)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * float(value) for value in evaluation.stats[:6]]


def test_fpn_on_coco_equals_pycocotools(coco: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert call(coco, tmp_path, "--detector", "fpn", "--iterations", "12", "--lr", "0.01", dataset="coco") == 0
    report = json.loads((tmp_path / "detect_fpn.json").read_text())["result"]
    losses, precision = report["losses"], report["precision"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    found = tmp_path / "detect_fpn" / "detections.json"
    expected = by_the_book(coco / "annotations" / "instances_val2017.json", found)
    ours = [precision[name] for name in ("AP", "AP50", "AP75", "APs", "APm", "APl")]
    assert ours == pytest.approx([None if value < 0 else value for value in expected], abs=1e-3)
    assert Image.open(tmp_path / "detect_fpn.png").width > 400
    out = capsys.readouterr().out
    assert "| AP | AP50 | AP75 |" in out and f"1 training images left out, such as {TRAIN:012d}.jpg: no object" in out


def test_c4_on_voc_resumes_to_the_same(
    voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    flags = ("--iterations", "4", "--checkpoint-every", "2")
    assert call(voc, tmp_path / "whole", *flags) == 0
    saved, save = [], checkpoint.save

    def stop(*args: Any, **options: Any) -> Path:
        saved.append(save(*args, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", stop)
        assert call(voc, tmp_path / "part", *flags) == 130
    assert [path.stem for path in saved] == ["step_0000002"]
    assert call(voc, tmp_path / "part", *flags) == 0
    whole, part = ((tmp_path / name / "detect_c4.json").read_text() for name in ("whole", "part"))
    assert whole == part
    assert call(voc, tmp_path / "part", *flags, "--lr", "0.5") == 2
    assert "was made with lr 0.0025, not 0.5; choose another --output" in capsys.readouterr().err


def test_ranks_share_batches_and_test_images(voc: Path, tmp_path: Path) -> None:
    """The loss of the first step is one rank's, but for the boxes that are sampled and padding."""
    flags = ["--dataset", "voc0712", "--root", str(voc), *SMALL, "--iterations", "2", "--lr", "0.001"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["cocor.eval.cli", "detect", "random:test_resnet", *flags, "--output", str(tmp_path / "two")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert call(voc, tmp_path / "one", "--iterations", "2", "--lr", "0.001") == 0
    one, two = (json.loads((tmp_path / name / "detect_c4.json").read_text())["result"] for name in ("one", "two"))
    assert two["losses"] == pytest.approx(one["losses"], rel=0.1) and two["test_images"] == one["test_images"]
    state = checkpoint.load(tmp_path / "two" / "detect_c4" / "step_0000002.pt")["model"]
    assert state["roi_heads.box_head.inner.0.0.bn1.num_batches_tracked"] == 2
    found = json.loads((tmp_path / "two" / "detect_c4" / "detections.json").read_text())
    assert len({row["image_id"] for row in found}) == one["test_images"]


def test_bfloat16_gives_float32_features() -> None:
    encoder, images = load_encoder("random:test_resnet"), torch.rand(2, 3, 64, 64)
    half, exact = (
        build_detector("c4", encoder, 20, RECIPES["voc0712"], kind).backbone(images)
        for kind in (torch.bfloat16, torch.float32)
    )
    assert half.dtype == torch.float32 and not torch.equal(half, exact)
    assert torch.allclose(half, exact, atol=0.1)


@pytest.mark.parametrize("kind", ["c4", "fpn"])
def test_grey_encoders_see_the_luma(kind: Any) -> None:
    encoder = load_encoder("random:test_resnet", in_chans=1, mean=[0.4], std=[0.3])
    model = build_detector(kind, encoder, 20, RECIPES["voc0712"], torch.float32).eval()
    assert (model.transform.image_mean, model.transform.image_std) == ((0.4,), (0.3,))
    images = torch.rand(2, 3, 64, 64)
    first, second = (model.backbone(seen) for seen in (images, luma(images, 1).expand(-1, 3, -1, -1)))
    if kind == "fpn":
        first, second = first["0"], second["0"]
    assert torch.equal(first, second)


def test_pycocotools_is_asked_for(voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert call(voc, tmp_path) == 2
    assert "needs pycocotools: pip install pycocotools" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["voc0712", "coco"])
def test_perfect_boxes_reach_all(name: str, voc: Path, coco: Path) -> None:
    _, test = open_sets(name, voc if name == "voc0712" else coco, "stop")
    found = average_precision(test, perfect(test))
    assert found["AP"] == found["AP50"] == found["AP75"] == found["person"] == 100
    assert average_precision(test, [])["AP"] == 0


def test_difficult_objects_count_as_nothing(voc: Path) -> None:
    _, test = open_sets("voc0712", voc, "stop")
    first = test.images[0]
    harder = replace(first, difficult=np.ones(len(first.boxes), bool))
    changed = replace(test, images=(harder, *test.images[1:]))
    assert average_precision(changed, perfect(test))["AP"] == 100
    missed = [row for row in perfect(test) if row["image_id"] != first.id]
    assert average_precision(changed, missed)["AP"] == 100
    assert (average_precision(test, missed)["AP"] or 0) < 100


def test_voc_interpolates_at_11_recalls(voc: Path) -> None:
    """A class with one of two objects found, before a false box: precision 1 at recalls 0 to 0.5."""
    _, test = open_sets("voc0712", voc, "stop")
    two = next(image for image in test.images if len(image.boxes) == 2)
    alone = replace(test, images=(replace(two, labels=np.array([14, 14])),))
    row = perfect(alone)[0]
    assert average_precision(alone, [row])["AP50"] == pytest.approx(100 * 6 / 11, abs=1e-3)


def test_voc_is_read_as_it_lies(voc: Path) -> None:
    train, test = open_sets("voc0712", voc, "stop")
    assert len(train.images) == TRAIN and train.images[-1].path.parts[-3] == "VOC2012"
    image, (name, *box) = train.images[1], scene(1).objects[0]
    assert train.classes[image.labels[0]] == name and image.boxes[0].tolist() == box
    assert {one.path.parts[-3] for one in test.images} == {"VOC2007"}


def test_coco_keeps_its_numbers(coco: Path) -> None:
    train, _ = open_sets("coco", coco, "stop")
    assert train.category_ids == tuple(sorted(COCO_IDS.values())) and train.classes == ("person", "car", "cat")
    assert len(train.images) == TRAIN  # without the one that has no object
    assert train.images[2].boxes.tolist() == [list(map(float, box)) for _, *box in scene(2).objects]


def test_batches_hold_one_orientation(voc: Path) -> None:
    train, _ = open_sets("voc0712", voc, "stop")
    batches = Batches(train.images, 2, seed=0)
    keys = list(batches.keys(range(12)))
    assert list(batches.keys(range(7, 12))) == keys[7:]
    assert all(len({train.images[place].size for place, _ in batch}) == 1 for batch in keys)
    assert {place for batch in keys[:6] for place, _ in batch} == set(range(TRAIN))
    assert {mirrored for batch in keys for _, mirrored in batch} == {True, False}


def test_mirrored_boxes_stay_on_their_objects(voc: Path) -> None:
    train, _ = open_sets("voc0712", voc, "stop")
    ((plain, mirrored),) = decoded(train.images, [[(1, False), (1, True)]], 0, "stop")
    for one, other in zip(plain.target["boxes"].int(), mirrored.target["boxes"].int(), strict=True):
        cut, back = (s.pixels[:, y:b, x:r] for s, (x, y, r, b) in ((plain, one), (mirrored, other)))
        assert torch.equal(cut, back.flip(2))


def test_c4_is_built_as_in_the_paper() -> None:
    encoder = load_encoder("random:resnet50")
    model = build_detector("c4", encoder, 20, RECIPES["voc0712"], torch.float32)
    state = model.state_dict()
    names = [name for name in state if name.startswith("roi_heads.box_head.inner")]
    assert state["rpn.head.conv.0.0.weight"].shape[0] == 1024 and "roi_heads.box_head.inner.1.running_mean" in names
    assert torch.equal(state["roi_heads.box_head.inner.0.0.conv1.weight"], encoder.backbone.layer4[0].conv1.weight)
    assert state["roi_heads.box_predictor.bbox_pred.weight"].shape == (21 * 4, 2048)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in encoder.backbone.parameters())
    assert model.transform.min_size == tuple(range(480, 801, 32)) and model.transform.max_size == 1333


def test_c4_pools_where_the_box_is() -> None:
    """Features of stride 16 that hold their own coordinate in the image."""
    model = build_detector("c4", load_encoder("random:test_resnet"), 20, RECIPES["voc0712"], torch.float32)
    ramp = (16 * (torch.arange(30.0) + 0.5)).expand(1, 1, 30, 30)
    pooled = model.roi_heads.box_roi_pool({"0": ramp}, [torch.tensor([[100.0, 80.0, 240.0, 400.0]])], [(480, 480)])
    centres = 100 + 10 * (torch.arange(14) + 0.5)
    torch.testing.assert_close(pooled, centres.expand(1, 1, 14, 14))


def test_rates_follow_the_recipe() -> None:
    recipe = RECIPES["voc0712"]
    rates = [recipe.rate(step) for step in (0, 100, 17_999, 18_000, 23_999)]
    assert rates == pytest.approx([2e-5, 0.02, 0.02, 0.002, 0.0002])
    short = recipe.shortened(240)
    assert (short.warmup, short.drops) == (1, (180, 220))


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "detectron2").iterdir()), ids=lambda file: file.stem)
def test_detectron2_is_configured_alike(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    recipe = RECIPES["voc0712" if file.stem.startswith("voc") else "coco"]
    low, high = recipe.min_size
    assert content["SOLVER"] == {
        "IMS_PER_BATCH": recipe.batch_size, "BASE_LR": recipe.lr, "STEPS": list(recipe.drops),
        "MAX_ITER": recipe.iterations, "WARMUP_ITERS": recipe.warmup,
    }  # fmt: skip
    assert content["INPUT"]["MIN_SIZE_TRAIN"] == list(range(low, high + 1, 32))
    assert "Not run" in file.read_text()


@pytest.mark.parametrize(("change", "flags", "message"), [
    ("", "--dataset coco", "instances_train2017.json: No such file or directory; unpack"),
    ("", "--batch-size 9", "--batch-size 9: only 8 images are of one orientation"),
    ("", "--min-size 96 64", "--min-size 96 64: name the smaller side first"),
    ("", "WEIGHTS=random:test_vit", "built on ResNets with the usual stem, such as resnet50; this is test_vit"),
    ("", "--stem small WEIGHTS=random:resnet18", "this is resnet18 with the small stem"),
    ("strange", "", "000003.xml: dragon is none of VOC's 20 classes"),
    ("empty", "", "000003.xml: no object in it; --on-error skip leaves such images out"),
    ("flat", "", "000003.xml: a box without area in it"),
    ("no_xml", "", "000003.xml: not an annotation of VOC"),
    ("no_boxes", "--on-error skip", "the test images of voc0712 have no boxes"),
    ("lost", "--on-error skip", "000003.jpg: missing"),
    ("broken", "", "000003.jpg: "),
])  # fmt: skip
def test_a_mistake_is_one_line(change: str, flags: str, message: str, tmp_path: Path, capsys: Capsys) -> None:
    root = write_voc(tmp_path).parent
    damage(root / "VOCdevkit" / "VOC2007", change)
    words = flags.split()
    weights = words.pop().removeprefix("WEIGHTS=") if "WEIGHTS" in flags else "random:test_resnet"
    assert call(root, tmp_path / "out", "--iterations", "6", *words, weights=weights) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("cocor-eval: ")


def damage(folder: Path, change: str) -> None:
    file, image = folder / "Annotations" / "000003.xml", folder / "JPEGImages" / "000003.jpg"
    texts = {"strange": voc_xml((96, 72), [("dragon", 1, 1, 9, 9)]), "empty": voc_xml((96, 72), []),
             "flat": voc_xml((96, 72), [("cat", 5, 5, 4, 9)]), "no_xml": "<annotation>"}  # fmt: skip
    if change in texts:
        file.write_text(texts[change])
    if change == "no_boxes":
        for other in (folder / "Annotations").glob("0000*.xml"):
            other.write_text(texts["empty"])
    if change == "lost":
        image.unlink()
    if change == "broken":
        image.write_bytes(image.read_bytes()[:400])


def test_unusable_images_are_skipped(tmp_path: Path, capsys: Capsys) -> None:
    root = write_voc(tmp_path).parent
    damage(root / "VOCdevkit" / "VOC2007", "empty")
    broken = root / "VOCdevkit" / "VOC2007" / "JPEGImages" / f"{TRAIN:06d}.jpg"
    broken.write_bytes(b"no image")
    assert call(root, tmp_path / "out", "--iterations", "1", "--on-error", "skip") == 0
    report = json.loads((tmp_path / "out" / "detect_c4.json").read_text())
    assert report["result"]["test_images"] == 5 and "000003.xml: no object" in report["notes"][0]
    assert "000012.jpg" in capsys.readouterr().err


def test_categories_of_both_splits_must_agree(coco: Path, tmp_path: Path, capsys: Capsys) -> None:
    root = write_coco(tmp_path / "other")
    file = root / "annotations" / "instances_val2017.json"
    file.write_text(file.read_text().replace('"car"', '"tram"'))
    assert call(root, tmp_path / "out", dataset="coco") == 2
    assert "the categories of train2017 and val2017 differ in car" in capsys.readouterr().err
    file.write_text('{"images": [], "annotations": [{"caption": "a cat", "image_id": 1}], "categories": []}')
    assert call(root, tmp_path / "out", dataset="coco") == 2
    assert "instances_val2017.json: not COCO's instances with boxes" in capsys.readouterr().err
