"""Conversions that are killed, run out of disk or lose a worker leave nothing behind that could be taken for data."""

import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.prep_cases import Prep
from soak import conversions

from loaders.datasets.beton import MARKER, open_beton
from loaders.errors import UserError
from loaders.prep.output import staged
from loaders.prep.verify import verify

SECONDS = 20.0


@pytest.fixture(scope="module")
def many_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversions.make_images(tmp_path_factory.mktemp("many"))


def failed(source: Path, folder: Path, name: str, words: str, **options: Any) -> None:
    """Run a conversion that must fail with one line and leave nothing behind."""
    command = conversions.conversion(source, folder / name)
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, **options)
    (error,) = (line for line in done.stderr.splitlines() if not line.startswith(b"converting: "))  # if it takes long
    assert done.returncode == 2 and words.encode() in error
    assert not list(folder.iterdir())


def test_kill_9_leaves_nothing_accepted(many_photos: Path, tmp_path: Path) -> None:
    conversions.rounds(many_photos, tmp_path, 3)  # parent, worker, group


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_clean_up(number: int, code: int, many_photos: Path, tmp_path: Path) -> None:
    command = conversions.conversion(many_photos, tmp_path / "out")
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        while not list(tmp_path.glob(".out*/content/class*")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, error = process.communicate(timeout=SECONDS)  # once no worker holds its stderr
    assert process.returncode == code and b"Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_file_size_limit_is_named(many_photos: Path, tmp_path: Path) -> None:
    limits = resource.RLIMIT_FSIZE, (5_000_000, 5_000_000)
    failed(many_photos, tmp_path, "out.beton", "ulimit -f", preexec_fn=lambda: resource.setrlimit(*limits))


def test_an_error_keeps_the_old_output(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(ValueError, match="boom"), staged(tmp_path / "out", folder=False, force=True) as work:
        work.write_text("half")
        raise ValueError("boom")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "old"


def test_stale_work_goes_but_not_that_at_work(tmp_path: Path) -> None:
    (tmp_path / ".out.partial-dead").mkdir()
    with staged(tmp_path / "out", folder=True) as first:
        assert not (tmp_path / ".out.partial-dead").exists()
        with staged(tmp_path / "out", folder=True, force=True) as second:
            assert first.is_dir() and second.is_dir()
        with pytest.raises(UserError, match="exists"), staged(tmp_path / "out", folder=True):
            pass
        (tmp_path / "out").rmdir()


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_damage_in_a_beton_file_is_found(prep: Prep, many_photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.beton"
    prep("convert", many_photos, path, "--shorter-side", 32)
    file, pristine = open_beton(path), path.read_bytes()
    image = int(file.table["data_ptr"][7]) + 50
    for at in (0, 9, 17, 2100, 2300, image, len(pristine) - 30, len(pristine) - 5000):
        damage(path, at)
        code, said, _ = prep.run("verify", path)
        assert code == 2, at
        if at == image:
            damaged = open_beton(path)
            damaged.check(6)
            with pytest.raises(UserError, match=file.names[7]):
                damaged.check(7)
            assert said.startswith(f"{file.names[7]}: damaged: its checksum differs\n")
        path.write_bytes(pristine)
    for length in (0, 10, 2000, 50_000, len(pristine) - 1):
        path.write_bytes(pristine[:length])
        with pytest.raises(UserError, match=r"out\.beton"):
            open_beton(path)


def test_faults_of_a_folder_are_named(prep: Prep, many_photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "out"
    prep("convert", many_photos, root, "--shorter-side", 32)
    assert verify(root, 1) == (200, [])
    damage(root / "class0/0.jpg", 600)
    (root / "class1/1.jpg").unlink()
    (root / "class2/extra.jpg").write_bytes((root / "class2/2.jpg").read_bytes())
    count, faults = verify(root, 1)
    assert count == 200 and [name for name, _ in faults] == ["class0/0.jpg", "class1/1.jpg", "class2/extra.jpg"]


def test_verify_looks_at_pixels_without_checksums(prep: Prep, many_photos: Path, tmp_path: Path) -> None:
    """As in a file of FFCV's own writer."""
    path = tmp_path / "out.beton"
    prep("convert", many_photos, path)
    file = open_beton(path)
    data = bytearray(path.read_bytes().replace(MARKER, bytes(len(MARKER))))
    path.write_bytes(data)
    assert open_beton(path).record is None and verify(path, 1) == (200, [])
    at = int(file.table["data_ptr"][7]) + 5000
    data[at : at + 200] = bytes(200)
    path.write_bytes(data)
    code, said, _ = prep.run("verify", path)
    assert (
        code == 2 and said.startswith("00000007: damaged: its pixels do not fill the image\n") and "1 fault\n" in said
    )
