"""The tour runs as a script."""

import re
from pathlib import Path

import pytest
from helpers.runs import ROOT, Capture

SMALL = "epochs=1, batch_size=8, labelled_batch_size=4, queue_size=16, key_bn_splits=2, label_fraction=0.3, gpus=0"


def test_it_leaves_its_pictures(
    photo_folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "benchmarks/tour.py").read_text()
    for usual, small in (('DATA = "demo"', 'DATA = "photos"'), ("epochs=5", SMALL)):
        assert text.count(usual) == 1
        text = text.replace(usual, small)
    for split in ("train", "val"):
        (tmp_path / "photos" / split).mkdir(parents=True)
        for folder in filter(Path.is_dir, photo_folder.iterdir()):
            (tmp_path / "photos" / split / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "tour.py", "exec"), {})
    shown = re.findall(r"^picture: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert {Path(path).stem for path in shown} == {"tour-views", "plot", "retrieval", "consistency"}
    assert all(Path(path).is_file() for path in shown)
