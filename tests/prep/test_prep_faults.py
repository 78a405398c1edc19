"""Conversions that are killed, run out of disk or lose a worker leave nothing behind that could be taken for data."""

import fcntl
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from soak import conversions
from soak.runs import living

from loaders.datasets.beton import MARKER, open_beton
from loaders.errors import UserError
from loaders.prep import output
from loaders.prep.cli import main
from loaders.prep.output import staged
from loaders.prep.pool import in_order
from loaders.prep.verify import verify

SECONDS = 20.0


@pytest.fixture(scope="module")
def many_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversions.make_images(tmp_path_factory.mktemp("many"))


def command(source: Path, output: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "loaders.prep.cli", "convert", str(source), str(output), "--workers", "2", *more]


def wait_until_gone(group: int) -> None:
    """Wait until no process of a group is left."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < end, "a process still runs"
        time.sleep(0.02)


def test_kill_9_leaves_nothing_accepted_or_running(many_photos: Path, tmp_path: Path) -> None:
    conversions.rounds(many_photos, tmp_path, 6)


@pytest.mark.parametrize("stream", ["stderr", "/dev/null"])
def test_a_conversion_that_outlives_its_parent_is_one_line_and_is_ended(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it holds the stream from which the benchmark reads."""
    told = tmp_path / "process"
    redirection = "" if stream == "stderr" else f"2> {stream}"
    script = f"sleep 600 {redirection} & echo $! > {told}; wait"
    monkeypatch.setattr(conversions, "conversion", lambda *_: ["sh", "-c", script])
    monkeypatch.setattr(conversions, "_PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=r"killed the parent after .* a process still runs"):
        conversions.kill_one(random.Random(0), tmp_path, tmp_path, "parent", 2.0)
    end = time.monotonic() + SECONDS
    while int(told.read_text()) in {process for process, *_ in living()}:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_and_sigterm_clean_up(many_photos: Path, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            command(many_photos, tmp_path / "out", "--shorter-side", "280"),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        while not list(tmp_path.glob(".out*/content/class*")) and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, number)
        _, error = process.communicate(timeout=SECONDS)
        wait_until_gone(process.pid)
        assert process.returncode in (130, 143) and b"Traceback" not in error
        assert not list(tmp_path.iterdir())


def test_a_file_size_limit_ends_with_one_line_and_no_file(many_photos: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))

    done = subprocess.run(
        command(many_photos, tmp_path / "out.beton"), preexec_fn=limit, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"ulimit -f" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("name", ["out.beton", "out"])
def test_a_full_disk_ends_with_one_line_and_an_empty_disk(name: str, many_photos: Path, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        done = subprocess.run(command(many_photos, tmp_path / name), capture_output=True, timeout=SECONDS)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"No space left" in done.stderr
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_an_error_while_writing_keeps_the_old_output(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(ValueError, match="boom"), staged(tmp_path / "out", folder=False, force=True) as work:
        work.write_text("half")
        raise ValueError("boom")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "old"


def test_stale_work_is_removed_but_not_that_of_a_living_process(tmp_path: Path) -> None:
    (tmp_path / ".out.partial-dead").mkdir()
    with staged(tmp_path / "out", folder=True) as first:
        assert not (tmp_path / ".out.partial-dead").exists()
        with staged(tmp_path / "out", folder=True, force=True) as second:
            assert first.is_dir() and second.is_dir()
        with pytest.raises(UserError, match="exists"), staged(tmp_path / "out", folder=True):
            pass
        (tmp_path / "out").rmdir()


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_process_that_starts_at_the_same_moment_does_not_take_new_work_for_stale(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lock, cleared = tempfile.mkdtemp, fcntl.flock, []

    def clear() -> None:
        if not cleared:
            cleared.append(moment)
            output.remove_stale(tmp_path / "out")  # the other process

    def mkdtemp(*arguments: Any, **options: Any) -> str:
        path = made(*arguments, **options)
        if moment == "before it is opened":
            clear()
        return path

    def flock(descriptor: int, operation: int) -> None:
        if moment == "before it is locked" and operation & fcntl.LOCK_NB:
            clear()
        lock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fcntl, "flock", flock)
    with staged(tmp_path / "out", folder=False) as work:
        work.write_text("whole")
    assert cleared and [path.name for path in tmp_path.iterdir()] == ["out"]


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_damage_in_a_beton_file_is_found(many_photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.beton"
    assert main(["convert", str(many_photos), str(path), "--workers", "1", "--shorter-side", "32"]) == 0
    file, pristine = open_beton(path), path.read_bytes()
    image = int(file.table["data_ptr"][7]) + 50
    for at in (0, 9, 17, 2100, 2300, image, len(pristine) - 30, len(pristine) - 5000):
        damage(path, at)
        capsys.readouterr()
        assert main(["verify", str(path), "--workers", "1"]) == 2, at
        if at == image:
            damaged = open_beton(path)
            damaged.check(6)
            with pytest.raises(UserError, match=file.names[7]):
                damaged.check(7)
            assert capsys.readouterr().out.startswith(f"{file.names[7]}: damaged: its checksum differs\n")
        path.write_bytes(pristine)
    for length in (0, 10, 2000, 50_000, len(pristine) - 1):
        path.write_bytes(pristine[:length])
        with pytest.raises(UserError, match=r"out\.beton"):
            open_beton(path)


def test_changed_missing_and_surplus_files_of_a_folder_are_named(many_photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "out"
    assert main(["convert", str(many_photos), str(root), "--workers", "1", "--shorter-side", "32"]) == 0
    assert verify(root, 1) == (200, [])
    damage(root / "class0/0.jpg", 600)
    (root / "class1/1.jpg").unlink()
    (root / "class2/extra.jpg").write_bytes((root / "class2/2.jpg").read_bytes())
    count, faults = verify(root, 1)
    assert count == 200 and [name for name, _ in faults] == ["class0/0.jpg", "class1/1.jpg", "class2/extra.jpg"]


def test_verify_looks_at_pixels_without_checksums(many_photos: Path, tmp_path: Path) -> None:
    """As in a file of FFCV's own writer."""
    path = tmp_path / "out.beton"
    assert main(["convert", str(many_photos), str(path), "--workers", "1"]) == 0
    file = open_beton(path)
    data = bytearray(path.read_bytes().replace(MARKER, bytes(len(MARKER))))
    path.write_bytes(data)
    assert open_beton(path).record is None and verify(path, 1) == (200, [])
    at = int(file.table["data_ptr"][7]) + 5000
    data[at : at + 200] = bytes(200)
    path.write_bytes(data)
    assert verify(path, 1) == (200, [("00000007", "damaged: its pixels do not fill the image")])
    assert main(["verify", str(path), "--workers", "1"]) == 2


def _dies_with_half_a_result(number: int) -> bytes:
    def send(pipe: Connection, data: memoryview) -> None:
        os.write(pipe.fileno(), bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if number == 8:
        Connection._send = send  # type: ignore[attr-defined]
    return bytes(100_000)


def test_a_worker_killed_in_its_answer_is_named() -> None:
    """The pool waits for the other half, which never comes."""
    results = in_order(_dies_with_half_a_result, int, 200, 2, name=lambda i: f"image {i}", doing="testing")
    with pytest.raises(UserError, match=r"a worker process died at or soon after image (0|8) \(killed"):
        list(results)
    assert not multiprocessing.active_children()
