"""Pictures of runs show what was measured, in the formats that were asked for, and mistakes are one line."""

import json
from pathlib import Path

import pytest
from PIL import Image

from cocor.metrics_file import epochs_of, read_run
from cocor.monitor.plot import _draw_curve as draw_curve
from cocor.monitor.plot import _draw_similarities as draw_similarities
from cocor.monitor.plot import main
from cocor.panels import WIDTH, end_at_100, panels

Capsys = pytest.CaptureFixture[str]


def write_run(folder: Path, consistent: bool = True, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    lines = []
    for step in range(10, 101, 10):
        record = {"kind": "train", "step": step, "epoch": (step - 1) // 50, "loss": 5 - step / 50, "lr": 0.03}
        record |= {"images_per_s": 100.0 + step, "data_wait_share": 0.1, "contrastive_loss": 4.0}
        if consistent:
            record |= {"consistency_loss": 0.5, "similarity_1": 0.9, "target_1": 0.8}
            record |= {"similarity_2": None, "target_2": 0.7}
        lines.append(record)
        if step % 50 == 0:
            lines.append({"kind": "knn", "step": step, "epoch": step // 50, "accuracy": step / 200})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def test_a_picture_is_no_wider_than_its_panels(tmp_path: Path) -> None:
    for count, across in ((1, 1), (2, 2), (3, 3), (4, 3)):
        with panels(tmp_path / "p.png", count, columns=3) as axes:
            assert len(axes) == count
        assert Image.open(tmp_path / "p.png").width == pytest.approx(across * WIDTH * 110, abs=1)


@pytest.mark.parametrize("line", ['{"kind": "knn"}', "[1]", '{"kind": "train", "step": 3}', "7", '{"kind": "tr'])
def test_a_line_that_is_no_measurement_is_named(tmp_path: Path, line: str, capsys: Capsys) -> None:
    run = write_run(tmp_path / "run")
    measured = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f"{line}\n{measured}")
    assert main([str(run), "--output", str(tmp_path / "p.png")]) == 2
    assert capsys.readouterr().err == f"cocor-plot: error: {run / 'metrics.jsonl'}:1: not a measurement in JSON\n"


@pytest.mark.parametrize(("flags", "told"), [
    (["--output", "/dev/null/p.png"], "--output /dev/null/p.png: /dev/null is no folder; choose another --output"),
    (["--output", "p.bmp"], "p.bmp: pictures are .png, .svg or .pdf"),
    (["--output", "{0}/p.png", "--json", "{0}"], "--json {0} is a folder; name a file"),
])  # fmt: skip
def test_unwritable_pictures_are_refused_first(tmp_path: Path, flags: list[str], told: str, capsys: Capsys) -> None:
    assert main([str(tmp_path / "no run"), *(flag.format(tmp_path) for flag in flags)]) == 2
    assert capsys.readouterr().err == f"cocor-plot: error: {told.format(tmp_path)}\n"
    assert not any(tmp_path.iterdir())


def test_runs_are_drawn_side_by_side(tmp_path: Path) -> None:
    plain, ours = write_run(tmp_path / "moco", consistent=False), write_run(tmp_path / "cocor", tail='{"kind": "tr')
    flags = [str(plain), str(ours), "--json", str(tmp_path / "n.json"), "--output"]
    assert main([*flags, str(tmp_path / "p.png")]) == 0 and Image.open(tmp_path / "p.png").width > 1400
    found = json.loads((tmp_path / "n.json").read_text())["moco"]
    assert found["knn_by_epoch"] == {"1": 0.25, "2": 0.5} and found["images_per_s"] == 155.0
    assert epochs_of(read_run(ours / "metrics.jsonl"))[-1] == 2.0
    # A run has one colour and one entry in a legend, in all panels.
    for drawn, blue in ((["lr", "consistency"], True), (["consistency"], False)):
        assert main([*flags, str(tmp_path / "p.svg"), "--panels", *drawn]) == 0
        picture = (tmp_path / "p.svg").read_text()
        assert picture.count("<!-- cocor -->") == 1 and "#ff7f0e" in picture and ("#1f77b4" in picture) == blue


def test_a_panel_of_what_the_mmnn_learns_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    values = {f"product_{what}1": value for what, value in (("", -0.1), ("deviation_", 0.5), ("positive_", 0.4))}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | values if line["kind"] == "train" else line for line in lines]
    lines[0]["product_deviation_1"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(run), "--panels", "products", "--output", str(tmp_path / "p.svg")]) == 0
    assert "mean / deviation" in (tmp_path / "p.svg").read_text()
    assert main([str(write_run(tmp_path / "other")), "--panels", "products", "--output", str(tmp_path / "q.svg")]) == 2


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    run, numbers = write_run(tmp_path / "run"), tmp_path / "n.json"
    (run / "metrics.jsonl").write_text(
        "\ufeff\n" + (run / "metrics.jsonl").read_text().replace(": 110.0", ": NaN").replace(": 120.0", ": null")
        + '{"kind": "knn", "step": 0, "epoch": 3, "accuracy": 0.5}\n{"kind": "note"}\n', encoding="utf-8"
    )  # fmt: skip
    records = read_run(run)
    assert epochs_of([{"kind": "train", "step": 0, "epoch": 0}]) == [0.0]
    assert [r["images_per_s"] for r in records if r["kind"] == "train"][:3] == [None, None, 130.0]
    assert epochs_of(records)[-1] == 2.0
    assert main([str(run), "--output", str(tmp_path / "p.png"), "--json", str(numbers)]) == 0
    assert json.loads(numbers.read_text())["run"]["images_per_s"] == 165.0


def test_lengths_that_take_turns_are_all_drawn(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "step": n + 1, "epoch": 0, "images_per_s": 9.0, f"similarity_{n % 3 + 1}": 0.1 * n,
         f"target_{n % 3 + 1}": 0.5}
        for n in range(6)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path), "--output", str(tmp_path / "p.svg"), "--json", str(tmp_path / "n.json")]) == 0
    (found,) = json.loads((tmp_path / "n.json").read_text()).values()
    assert found["similarity"] == {"1": 0.3, "2": 0.4, "3": 0.5} and found["target"] == {"1": 0.5, "2": 0.5, "3": 0.5}


def test_a_single_measurement_is_a_dot(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    first, *_ = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(first)
    with panels(tmp_path / "p.png", 2) as (loss, similarity):
        draw_curve(loss, {"run": read_run(run)}, "loss", "loss", "loss", 1)
        draw_similarities(similarity, "run", read_run(run))
        assert {line.get_marker() for axes in (loss, similarity) for line in axes.lines} == {"."}


def test_no_accuracy_axis_goes_past_100(tmp_path: Path) -> None:
    with panels(tmp_path / "p.png", 1) as (axes,):
        axes.plot([0, 1], [40, 100])
        end_at_100(axes)
        assert axes.get_ylim()[1] == 100


@pytest.mark.parametrize(("arguments", "message"), [
    (["none"], "name the folder of a run"),
    (["a", "--panels", "speeed"], "did you mean speed?"),
    (["a", "--panels", "similarity"], "none of the runs"),
    (["a", "--names", "x", "y"], "2 names for 1 runs"),
    (["a", "a"], "same name"),
    (["empty"], "no measurements"),
    (["bytes"], "not a text file"),
])  # fmt: skip
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", consistent=False)
    for name, content in (("empty", b""), ("bytes", b"\xff\xfe\x00")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(content)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
