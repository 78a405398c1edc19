"""Log a run: log.txt and the terminal for people, metrics.jsonl for programs.

    metrics.jsonl   one JSON object a line: {"kind": "train", "step": 100, "loss": ..., "images_per_s": ..., ...}

Metrics are of the global batch, ``gradient_*`` and ``data_wait_share`` means over ranks, and memory the main rank's.
Only that rank writes files; other ranks print warnings to stderr.
"""

import errno
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from cocor.distributed.collectives import World, mean_over_ranks
from cocor.distributed.report import drop_unwritten
from cocor.run_dir import METRICS
from loaders.files import replacing

Item = TypeVar("Item")

PICTURE = "picture"  # kind of a record that names a picture in the folder
_RECENT = 10  # log intervals over which the time left is estimated
_LINE_EVERY_S = 30.0  # where --log-every is not reached
_LONG_S = 24 * 3600.0
_log = logging.getLogger(__name__)


def set_up_logging(world: World, file: Path | None = None) -> None:
    """Send messages of cocor and loaders to the terminal and, on rank 0, to ``file``.

    A second call replaces what the first one set up.
    """
    console: logging.Handler = _Console()
    handlers = [console]
    if world.main:
        console.setFormatter(logging.Formatter("%(message)s"))
        if file is not None:
            handlers.append(_File(file, encoding="utf-8", errors="backslashreplace"))
            handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    else:
        console.setLevel(logging.WARNING)
        console.setFormatter(logging.Formatter(f"[rank {world.rank}] %(message)s"))
    for name in ("cocor", "loaders"):
        logger = logging.getLogger(name)
        for old in list(logger.handlers):
            logger.removeHandler(old)
            old.close()
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class _Console(logging.Handler):
    """Write above the progress bar; lines that it shows anyway have ``in_bar``."""

    def emit(self, record: logging.LogRecord) -> None:
        if not (getattr(record, "in_bar", False) and sys.stderr.isatty()):
            text = self.format(record).encode("utf-8", "backslashreplace").decode()  # odd file names
            try:
                tqdm.write(text, file=sys.stderr)
            except OSError:  # a file on a full disk, a closed terminal
                drop_unwritten(sys.stderr)


class _File(logging.FileHandler):
    """Log to a file; a full disk costs lines of the log, not the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class Clock:
    """Time spent in a loop over batches, and the part of it spent waiting.

    On a GPU, whose host runs ahead, the wait is the time in which the device had nothing but the loader's work to do,
    measured by CUDA events around the fetch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = self._waited = 0.0
        self._since: float | None = None
        self._fetches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield ``batches``, measuring the wait for them and the work on them."""
        iterator = iter(batches)
        self._since = time.perf_counter()
        try:
            while True:
                try:
                    item = self._fetch(iterator)
                except StopIteration:
                    return
                yield item
        finally:
            self._seconds += time.perf_counter() - self._since
            self._since = None
            if hasattr(iterator, "close"):
                iterator.close()

    def _fetch(self, iterator: Iterator[Item]) -> Item:
        if self.device.type == "cuda":
            idle, busy = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            idle.record()
            item = next(iterator)
            busy.record()
            self._fetches.append((idle, busy))
        else:
            begin = time.perf_counter()
            item = next(iterator)
            self._waited += time.perf_counter() - begin
        return item

    def read(self) -> tuple[float, float]:
        """Read (seconds, seconds waited) since the last time; the device must be done."""
        now = time.perf_counter()
        seconds, waited = self._seconds, self._waited
        if self._since is not None:
            seconds, self._since = seconds + now - self._since, now
        waited += sum(idle.elapsed_time(busy) for idle, busy in self._fetches) / 1000
        self._seconds, self._waited, self._fetches = 0.0, 0.0, []
        return seconds, waited


class RunLog:
    """Log of a run's metrics: averages, speed, share of waiting, time left.

        for batch in log.timed(loader.epoch(epoch)):
            metrics = train(batch)
            log.step(step, epoch, lr, metrics)

    Args:
        folder: the run folder; its metrics.jsonl is cut back to ``start_step``, so a resumed run repeats no line.
        batch_size: images per step over all ranks.
        again: kinds of records also dropped at ``start_step``, as they will be logged again (at step 0: all).
        listener: called with every record.
    """

    def __init__(
        self, folder: Path, world: World, *, batch_size: int, total_steps: int, log_every: int, start_step: int = 0,
        again: Collection[str] = (), listener: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.batch_size, self.total_steps, self.log_every = world, batch_size, total_steps, log_every
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._last_step, self._listener = start_step, listener
        self._first: tuple[int, float] | None = None  # the first step of this start, and when it was finished
        self._line_at = -math.inf  # when the last line was shown
        self._advised = False
        self._clock, self._recent = Clock(world.device), deque[tuple[int, float]](maxlen=_RECENT)
        self._file, self._size, self._warned_of_full_disk = None, 0, False
        if world.main:
            path = folder / METRICS
            _truncate(path, start_step, again)
            self._file = path.open("ab", buffering=0)
            self._size = self._file.tell()
        hidden = not (world.main and sys.stderr.isatty())
        self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True, disable=hidden)

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield ``batches``, measuring the wait for them and the work on them."""
        return self._clock.timed(batches)

    def step(self, step: int, epoch: int, lr: float, metrics: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Add one step's scalars on every rank; ``step`` counts finished steps.

        Returns the record that was written, or None between the steps to log.
        """
        # Sums stay on the device and are read with one transfer every log_every steps.
        self._add(metrics)
        self._bar.update()
        if step % self.log_every and step < self.total_steps:
            self._show_slow_step(step, epoch, metrics)
            return None
        means = self._read()  # waits for the device, so that the times below include its work
        seconds, waited = self._clock.read()
        waiting = mean_over_ranks(torch.tensor(waited / max(seconds, 1e-9), device=self.world.device)).item()
        steps, self._last_step = step - self._last_step, step
        self._recent.append((steps, seconds))
        rate = sum(steps for steps, _ in self._recent) / max(sum(seconds for _, seconds in self._recent), 1e-9)
        speed, left = steps * self.batch_size / max(seconds, 1e-9), (self.total_steps - step) / max(rate, 1e-9)
        means |= {"lr": lr, "images_per_s": speed, "data_wait_share": waiting, "time_left_s": left}
        if self.world.device.type == "cuda":
            means["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record = self.event("train", step, epoch, means)
        self._show(step, epoch, means)
        return record

    def event(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line to metrics.jsonl, unbuffered, and return its record.

        Numbers that are not finite become null. On a full disk the line is dropped, with one warning per run.
        """
        record = {"kind": kind, "step": step, "epoch": epoch, "time_s": round(time.time(), 3)}
        record |= {key: _plain(value) for key, value in values.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        if self._listener is not None:
            self._listener(record)
        if self._file is None:
            return record
        try:
            if self._file.write(line) < len(line):
                self._file.truncate(self._size)  # half a line would spoil the file for its readers
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(line)
        except OSError as error:
            if not self._warned_of_full_disk:
                _log.warning(f"cannot write {METRICS}: {error.strerror}; training goes on, this part of it unrecorded")
            self._warned_of_full_disk = True
        return record

    def close(self) -> None:
        """End the bar and close the file."""
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def _add(self, metrics: Mapping[str, Tensor]) -> None:
        known = [name for name in metrics if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[name] for name in known], [metrics[name].detach() for name in known])
        for name, value in metrics.items():
            if name not in self._sums:  # a copy, since a step may reuse the memory of its metrics
                self._sums[name] = value.detach().to(self.world.device, torch.float32, copy=True)
            self._counts[name] = self._counts.get(name, 0) + 1

    def _read(self) -> dict[str, Any]:
        if not self._sums:
            return {}
        means = mean_over_ranks(torch.stack(list(self._sums.values()))).tolist()
        result = {name: mean / self._counts[name] for name, mean in zip(self._sums, means, strict=True)}
        self._sums, self._counts = {}, {}
        return _with_deviations(result)

    def _show_slow_step(self, step: int, epoch: int, metrics: Mapping[str, Tensor]) -> None:
        """Show the first step at once, and a later one if the last line is half a minute old."""
        now = time.monotonic()
        if not self.world.main or now - self._line_at < _LINE_EVERY_S:
            return
        loss = f"  loss {metrics['loss'].item():.4f}" if "loss" in metrics else ""  # waits for the device
        self._first = self._first or (step, time.monotonic())
        text, left = "", 0.0
        if step > self._first[0]:
            pace = (now - self._first[1]) / (step - self._first[0])
            left = pace * (self.total_steps - step)
            text = f"  {pace:.1f} s a step  {duration(left)} left"
        self._log_line(f"epoch {epoch}  step {step}/{self.total_steps}{loss}{text}")
        self._advise(left)

    def _advise(self, left: float) -> None:
        """Say once what shortens a run of more than a day."""
        if left > _LONG_S and not self._advised:
            self._advised = True
            shorter = "a smaller --backbone or --image-size, fewer --epochs"
            remedy = "more --gpus, --lengths-per-step 1" if self.world.device.type == "cuda" else f"a GPU, {shorter}"
            _log.info(f"that is {left / _LONG_S:.1f} days; what shortens it: {remedy}")

    def _log_line(self, line: str) -> None:
        self._line_at = time.monotonic()
        _log.info(line, extra={"in_bar": True})

    def _show(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        loss = f"loss {values['loss']:.4f}  " if "loss" in values else ""
        state = f"{loss}lr {values['lr']:.3g}  {values['images_per_s']:.0f} images/s"
        state += f"  waiting for data {values['data_wait_share']:.0%}"
        self._bar.set_postfix_str(state, refresh=False)
        if self.world.main:
            left = values["time_left_s"]
            self._log_line(f"epoch {epoch}  step {step}/{self.total_steps}  {state}  {duration(left)} left")
            if len(self._recent) > 1:  # the first interval includes the warming up
                self._advise(left)


def _with_deviations(means: dict[str, float]) -> dict[str, float]:
    """Replace the mean of ``x_squared`` by the deviation of ``x`` over the interval."""
    result = dict(means)
    for name in [name for name in means if "_squared" in name]:
        square = result.pop(name)
        variance = square - means[name.replace("_squared", "")] ** 2
        # Of equal values it is float32's rounding.
        result[name.replace("_squared", "_deviation")] = variance**0.5 if variance > 1e-6 * square else 0.0
    return result


def duration(seconds: float) -> str:
    """Format seconds as hours and minutes, or as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{rest:02d}s"


def _truncate(path: Path, step: int, again: Collection[str]) -> None:
    """Drop lines after ``step``, those of it that come ``again``, and broken ones."""
    if not path.exists():
        return
    with (
        path.open(encoding="utf-8", errors="replace", newline="\n") as old,
        replacing(path) as temporary,
        temporary.open("w", encoding="utf-8") as new,
    ):
        for line in old:
            try:
                record = json.loads(line)
                if record["step"] < step or (record["step"] == step > 0 and record["kind"] not in again):
                    new.write(line.rstrip("\n") + "\n")
            except (ValueError, KeyError, TypeError):
                _log.warning("%s: dropped a broken line", path)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):  # tensors and numpy
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
