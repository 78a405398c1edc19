"""A disk that does not answer holds up neither the end of a loader nor that of its process, signal or no signal."""

import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.loading import same, threads
from helpers.runs import environment

from loaders.datasets import decode
from loaders.datasets.dataset import open_folder
from loaders.open import open_loader
from loaders.pipeline import prefetch
from loaders.pipeline.prefetch import InConsumer, Prefetch
from loaders.pipeline.threads import DaemonPool
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

PLAN = ViewPlan(size=32, seed=3)
ORDER = BatchOrder(24, 2, seed=3)

_FAILS = """
import ctypes, sys, threading, time
from contextlib import closing, nullcontext
from loaders.datasets import decode
from loaders.datasets.file_reader import FileReader
from loaders.pipeline import prefetch
from loaders.open import open_images, open_loader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan
from loaders.datasets.stored import StoredFile

name, data, workers, closes = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "closes"
prefetch.PATIENCE = 0.5
images, order = open_images(data, workers=1), BatchOrder(24, 2, seed=3)
hung = int(order.indices(0, 5 if name == "dali" else 1)[0])  # 5: a batch that DALI has not been given yet
opener, damage, read, stuck = decode.without_waiting, StoredFile.damage, FileReader.read, threading.Event()

def hangs(path, flags):
    while path == images.paths[hung]:
        time.sleep(0.1)
    return opener(path, flags)

def hangs_in_compiled_code(reader, index, *rest):
    while hung in index:
        stuck.set()
        ctypes.CDLL(None).pause()  # without the interpreter's lock
    read(reader, index, *rest)

def hangs_in(file, rows):
    while images.rows[hung] in rows:
        stuck.set()
        time.sleep(0.1)
    return damage(file, rows)

if name == "dali":
    with closing(open_loader(name, images, ViewPlan(size=32, seed=3), order, workers=workers)) as first:
        list(first.epoch(0))  # compiles: Python aborts if it exits while another thread does
    FileReader.read = hangs_in_compiled_code
elif name == "torch":
    decode.without_waiting = hangs
else:
    StoredFile.damage = hangs_in
loader = open_loader(name, images, ViewPlan(size=32, seed=3), order, workers=workers)
with closing(loader) if closes else nullcontext():
    batches = loader.epoch(0)
    next(batches)
    if name != "torch":
        stuck.wait(300)
    time.sleep(2 if name == "torch" else 0.5)
    print("failing", images.names[hung], time.monotonic(), flush=True)
    raise ArithmeticError("the training step failed")
"""


@pytest.mark.parametrize(
    ("name", "workers", "end"),
    [
        ("torch", 0, "closes"),
        ("torch", 2, "closes"),
        ("dali", 2, "closes"),
        ("dali", 2, "leaves it open"),
        pytest.param("ffcv", 2, "closes", marks=pytest.mark.ffcv),
    ],
)
def test_an_error_ends_it_on_a_hanging_disk(request: pytest.FixtureRequest, name: str, workers: int, end: str) -> None:
    if name == "ffcv":
        pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
    data = request.getfixturevalue("photo_beton" if name == "ffcv" else "photo_copy")
    done = subprocess.run(
        [sys.executable, "-c", _FAILS, name, str(data), str(workers), end],
        env=environment(), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    seconds = time.monotonic() - float(done.stdout.split()[2])
    assert done.returncode == 1, done.stderr
    assert "ArithmeticError: the training step failed\n" in done.stderr
    assert seconds < 20
    if end == "closes":
        assert "the disk with the data does not answer: gave up after" in done.stderr


def test_the_next_epoch_starts_anew_and_is_whole(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, opener, gate = open_folder(photo_folder, quiet=True), decode.without_waiting, threading.Event()
    victim = images.paths[int(ORDER.indices(0, 1)[0])]

    def hangs(path: str, flags: int) -> int:
        if path == victim:
            gate.wait(60)
        return opener(path, flags)

    with closing(open_loader("torch", images, PLAN, ORDER, workers=0)) as loader:
        expected = list(loader.epoch(1))
        monkeypatch.setattr(decode, "without_waiting", hangs)
        monkeypatch.setattr(prefetch, "PATIENCE", 0.1)
        batches = loader.epoch(0)
        next(batches)
        batches.close()
        monkeypatch.setattr(decode, "without_waiting", opener)
        assert all(same(*pair) for pair in zip(loader.epoch(1), expected, strict=True))
        gate.set()
        assert all(same(*pair) for pair in zip(loader.epoch(1), expected, strict=True))


class TestBackgroundWork:
    """What loaders are made of."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefetch, "PATIENCE", 0.2)

    @staticmethod
    def source(gate: threading.Event, ended: list[str]) -> Generator[int, None, None]:
        """Its second item and its end both wait for the gate."""
        try:
            yield 1
            gate.wait(60)
            yield 2
        finally:
            gate.wait(60)
            ended.append(threading.current_thread().name)

    def test_a_blocked_thread_is_abandoned(self, caplog: pytest.LogCaptureFixture) -> None:
        gate, ended = threading.Event(), []  # type: ignore[var-annotated]
        for depth in (1, 2):
            items = Prefetch(self.source(gate, ended), depth)
            assert next(items) == 1
            items.close()
            items.close()
            assert list(items) == []
        assert len(caplog.records) == 2 and ended == [] and len(threads()) == 2
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "cocor-prefetch":
                thread.join(10)
        assert len(ended) == 2 and threads() == []

    def test_in_consumer_ends_elsewhere(self, caplog: pytest.LogCaptureFixture) -> None:
        gate, ended = threading.Event(), []  # type: ignore[var-annotated]
        items = InConsumer(self.source(gate, ended), prepare=lambda: None)
        assert next(items) == 1
        items.close()
        items.close()
        assert len(caplog.records) == 1 and list(items) == [] and threads() == ["cocor-end_0"]
        gate.set()
        next(thread for thread in threading.enumerate() if thread.name == "cocor-end_0").join(10)
        assert ended == ["cocor-end_0"]

        items, ended[:] = InConsumer(self.source(gate, ended), prepare=lambda: pytest.fail("a thread was prepared")), []
        assert list(items) == [1, 2] and ended == ["MainThread"]
        items.close()

    def test_a_pool_returns_results_and_errors(self) -> None:
        with DaemonPool(3, "pool") as pool:
            assert list(pool.map(pow, range(50), [2] * 50)) == [i * i for i in range(50)]
            failed = pool.submit(divmod, 1, 0)
            with pytest.raises(ZeroDivisionError):
                failed.result()
        assert threads() == []
        with pytest.raises(RuntimeError, match="shut down"):
            pool.submit(int)

    def test_a_pool_drops_what_it_has_not_begun(self) -> None:
        gate = threading.Event()
        pool = DaemonPool(1, "pool")
        begun, waiting = pool.submit(gate.wait, 60), pool.submit(pytest.fail, "begun")
        while not begun.running():
            time.sleep(0.001)
        pool.shutdown(wait=False, cancel_futures=True)
        assert waiting.cancelled()
        gate.set()
        pool.shutdown()
        assert begun.result() and threads() == []
