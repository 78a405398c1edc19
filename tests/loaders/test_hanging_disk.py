"""Background work of loaders: a disk that does not answer does not hold up their end."""

import threading
import time
from collections.abc import Generator

import pytest
from helpers.loading import threads

from loaders.pipeline import prefetch
from loaders.pipeline.prefetch import InConsumer, Prefetch
from loaders.pipeline.threads import DaemonPool


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
