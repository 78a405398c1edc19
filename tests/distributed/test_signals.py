"""Test that a signal saves and stops a run, a second one ends it at once, and deaths of processes are told."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import Done, assert_same_bits, command, environment, flags, metrics, run, start
from soak.runs import living

from cocor import checkpoint
from cocor.distributed import signals
from cocor.train import main
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError
from loaders.torch_loader import TorchLoader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

EPOCHS = 6
OPTIONS = {"loader": "torch", "consistency": "none", "epochs": EPOCHS, "checkpoint_every_epochs": 100, "log_samples": 1}


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do ``act`` in a thread as soon as ``condition`` holds."""

    def wait() -> None:
        deadline = time.monotonic() + 300
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.002)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"samples"') if path.exists() else 0


def final(folder: Path) -> dict:
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None and found[1]["step"] == 3 * EPOCHS
    return found[1]["training"]


def test_a_stopped_run_resumes_bit_for_bit(photo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = flags(data=photo_folder, val_data=photo_folder, output=folder, **OPTIONS)
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        done = lines(folder)
        when(lambda done=done: lines(folder) > done + 1, lambda number=number: os.kill(os.getpid(), number))  # type: ignore[misc]
        assert main([*arguments, "--resume"]) == code
        found = checkpoint.newest(folder / "checkpoints")
        assert found is not None and found[1]["step"] == lines(folder) < 3 * EPOCHS
        assert number.name in (folder / "log.txt").read_text()
    assert main([*arguments, "--resume"]) == 0
    assert main(flags(data=photo_folder, val_data=photo_folder, output=tmp_path / "whole", **OPTIONS)) == 0
    assert_same_bits(final(folder), final(tmp_path / "whole"))
    for kind in ("samples", "knn"):
        rows, expected = metrics(folder, kind), metrics(tmp_path / "whole", kind)
        for row in (*rows, *expected):
            del row["time_s"]
        assert rows == expected


class TestTheFirstSeconds:
    """While Python and PyTorch load, and what comes before training."""

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        begin = "import sys; print('begun', flush=True); from cocor.cli import train; sys.exit(train())"
        call, pipe = [sys.executable, "-c", begin, *arguments], subprocess.PIPE
        process = subprocess.Popen(call, env=environment(), stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        return process

    @pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
    def test_a_signal_shows_no_traceback(
        self, photo_folder: Path, tmp_path: Path, number: signal.Signals, ranks: int
    ) -> None:
        code = 130 if number == signal.SIGINT else 75
        for delay in (0.05, 1.2):
            options = OPTIONS | {"epochs": 2000, "cpu_ranks": ranks, "output": tmp_path / f"{delay}"}
            with self.start(*flags(data=photo_folder, **options)) as process:
                time.sleep(delay)
                os.kill(process.pid, number)
                error = process.communicate(timeout=300)[1]
            said = error.splitlines()  # a fast machine trains already
            assert "Traceback" not in error and (len(said) <= 1 or "stopped by" in said[-1]), (delay, error)
            assert process.returncode in (code, -number, 128 + number), (delay, process.returncode, error)

    def test_the_whole_group_as_ctrl_c_reaches_it(self, photo_folder: Path, tmp_path: Path) -> None:
        arguments = flags(data=photo_folder, output=tmp_path / "x", cpu_ranks=2)
        with start(*arguments, start_new_session=True) as process:
            wait_for(lambda: ranks_of(process.pid, tmp_path / "x"), process)
            time.sleep(0.5)  # its ranks load PyTorch
            os.killpg(process.pid, signal.SIGINT)
            error = process.communicate(timeout=300)[1]
        assert "Traceback" not in error and process.returncode in (130, -signal.SIGINT), error


def test_the_first_is_noted_and_its_echo_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals.handled(lambda message, code: None):
        signals.defer()
        for number in (signal.SIGUSR1, signal.SIGTERM):  # a scheduler's to the launcher and to its ranks
            os.kill(os.getpid(), number)
        assert signals.requested() == signal.SIGUSR1
    assert signals.requested() == 0 and signal.getsignal(signal.SIGTERM) is before


def test_ignored_ones_stay_ignored() -> None:
    """As under nohup, whose processes outlive their terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.handled(lambda message, code: None):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.requested() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


_KILL = "os.kill(os.getpid(), signal.SIGTERM); time.sleep"


def handled(body: str) -> Done:
    """Run ``body`` in a process that handles signals."""
    program = "import os, signal, sys, time\nfrom cocor.distributed import signals\n"
    program += f"with signals.handled(lambda text, code: print(text)):\n{body}"
    return run(program=["-uc", program])


def test_a_second_one_ends_the_process_at_once() -> None:
    begin = time.monotonic()
    done = handled(f"    signals.defer()\n    {_KILL}(0.7)\n    {_KILL}(60)\n")
    assert done.returncode == 128 + signal.SIGTERM and done.stderr == "second signal: exiting at once\n"
    assert time.monotonic() - begin < 20


def test_a_signal_before_a_step_ends_at_once() -> None:
    done = handled(f"    try: {_KILL}(60)\n    except BaseException: sys.exit('it was caught')\n")
    assert done.returncode == signals.STOPPED and done.stderr == ""
    assert done.stdout.startswith("stopped by SIGTERM before a step was made; the same command with --resume")


def ranks_of(launcher: int, folder: Path) -> list[int]:
    """The ranks that the process ``launcher`` has started."""
    named = f"--output={folder}\0".encode()
    return sorted(process for process, parent, *_, line in living() if parent == launcher and named in line)


def wait_for(condition: Callable[[], object], process: Any = None, seconds: int = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_restart_and_stop_together(photo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = OPTIONS | {"epochs": 2000, "checkpoint_every_minutes": 1e-9, "cpu_ranks": 2, "max_restarts": 1}
    with start(*flags(data=photo_folder, output=folder, **options)) as process:
        wait_for(lambda: lines(folder) > 2, process)
        first, second = ranks_of(process.pid, folder)
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: len(new := ranks_of(process.pid, folder)) == 2 and not {first, second} & {*new}, process)
        wait_for(lambda: "going on from" in (folder / "log.txt").read_text(), process)
        before = lines(folder)
        wait_for(lambda: lines(folder) > before, process)
        os.kill(ranks_of(process.pid, folder)[1], signal.SIGUSR1)  # one rank only
        error = process.stderr.read() if process.stderr else ""
    assert process.returncode == 75
    assert "rank 1 was ended by SIGKILL" in error and "starting all ranks again (1 of 1)" in error
    assert "stopped by SIGUSR1 after step" in error.splitlines()[-1]
    steps = [line["step"] for line in metrics(folder, "samples")]
    assert steps == list(range(1, len(steps) + 1))
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None and found[1]["step"] == steps[-1]


def test_no_rank_outlives_its_launcher(photo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = OPTIONS | {"epochs": 2000, "cpu_ranks": 2}
    with start(*flags(data=photo_folder, output=folder, **options)) as process:
        wait_for(lambda: len(ranks_of(process.pid, folder)) == 2, process)
        ranks = ranks_of(process.pid, folder)
        process.kill()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=10)


def test_torchrun_restarts_a_killed_rank(photo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = OPTIONS | {"epochs": 4, "checkpoint_every_minutes": 1e-9}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*launcher, "-m", "cocor.train", *flags(data=photo_folder, output=folder, **options)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: lines(folder) > 1, process)
        os.kill(ranks_of(process.pid, folder)[1], signal.SIGKILL)
        error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert "going on from" in (folder / "log.txt").read_text()
    rows = metrics(folder, "samples")
    assert [row["step"] for row in rows] == list(range(1, 13))
    for epoch in range(4):
        assert sorted(i for row in rows if row["epoch"] == epoch for i in row["index"]) == list(range(24))


@pytest.fixture
def loader(photo_folder: Path) -> Iterator[TorchLoader]:
    """One with a data worker, of batches of 2 images."""
    dataset = open_folder(photo_folder)
    plan, order = ViewPlan(16, 0, (), "shared", lengths=()), BatchOrder(len(dataset), 2)
    with closing(TorchLoader(dataset, plan, order=order, workers=1)) as opened:
        yield opened


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_group_signal_leaves_data_workers_alive(loader: TorchLoader, number: signal.Signals) -> None:
    """As scancel and Ctrl-C send it: data workers get it as well, and what the parent still does may need them."""
    with closing(loader.epoch(0)) as batches:  # type: ignore[type-var]
        next(batches)
        workers = [str(worker.pid) for worker in multiprocessing.active_children()]
        subprocess.run(["kill", f"-{number}", *workers], check=True)  # not from the parent, which may end them
        assert len(list(batches)) == 11


def test_a_data_worker_that_dies_is_named(loader: TorchLoader) -> None:
    with closing(loader.epoch(0)) as batches:  # type: ignore[type-var]
        next(batches)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"a data worker was killed.*lower --workers or --batch-size"):
            list(batches)


def test_a_small_shared_memory_is_done_without(photo_folder: Path, tmp_path: Path) -> None:
    """As in a container: batches take the slower way through a pipe."""
    options = OPTIONS | {"workers": 2, "epochs": 1, "batch_size": 24, "queue_size": 24}
    small = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"']
    if subprocess.run([*small, "bash", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    arguments = flags(data=photo_folder, output=tmp_path / "run", **options)
    done = run("-c", 'exec "$@"', "bash", *small, "bash", *command(*arguments), program=["bash"])
    assert done.returncode == 0, done.stderr
