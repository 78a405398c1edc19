"""Common parts of all benchmarks: machine, tables, JSON files, entry point."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch

from cocor.cli import command
from loaders.cpus import available_cores
from loaders.files import write_text

PACKAGES = ("torch", "torchvision", "numpy", "numba", "pillow", "nvidia-dali-cuda130", "ffcv", "kornia", "lightly")
RESULTS = Path(__file__).parent / "results"


def script(name: str, body: Callable[[], None]) -> NoReturn:
    """Run a command's body and exit; a user's mistake is one line and exit code 2."""
    sys.exit(command(name, body))


def describe_machine() -> dict[str, Any]:
    """Describe processor, memory, GPU and versions; allocates no GPU memory."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(), "cores": available_cores(), "gpus": 0, "python": platform.python_version(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        **{name: version for name in PACKAGES if (version := _version(name))},
    }  # fmt: skip
    if torch.cuda.is_available():
        found |= {
            "gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
            "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        }  # fmt: skip
    return found


def machine_line(machine: dict[str, Any]) -> str:
    """Format the machine in one line."""
    gpus = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else "no GPU"
    versions = ", ".join(f"{name} {machine[name]}" for name in PACKAGES if name in machine)
    return f"{gpus}; {machine['cores']} cores of {machine['cpu']}; {versions}"


def results_file(benchmark: str, machine: dict[str, Any]) -> Path:
    """Name the file of results, by the GPU, else by the number of cores."""
    device = machine["gpu"] if machine["gpus"] else f"cpu {machine['cores']} cores"
    count = f"-x{machine['gpus']}" if machine["gpus"] > 1 else ""
    return RESULTS / f"{benchmark}-{'-'.join(device.lower().split())}{count}.json"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` atomically, with its folder."""
    write_text(path, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Column:
    """Column of a table: title, width (negative: flush left) and format of its values."""

    title: str
    width: int
    form: str = ""

    def cell(self, value: Any) -> str:
        """Format ``value``; None is a dash."""
        text = "-" if value is None else format(value, self.form)
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


def header(columns: Iterable[Column]) -> str:
    """Format the line of titles."""
    return " ".join(Column("", column.width).cell(column.title) for column in columns)


def row(columns: Iterable[Column], values: Iterable[Any]) -> str:
    """Format one line of a table."""
    return " ".join(column.cell(value) for column, value in zip(columns, values, strict=True))


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, the first column flush left and the others flush right."""
    rule = ["---"] + ["--:"] * (len(titles) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, rule, *rows])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
