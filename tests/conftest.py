"""Small folders of real photographs (scikit-image's), written once a session, and loader building blocks on them."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import loading
from helpers.prep_cases import corner_image, jpeg_bytes, write_all
from helpers.runs import flags
from PIL import Image
from skimage import data
from tqdm import tqdm

from cocor.train import main
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

# Torch's threads spin while they wait: where tests share the processors, small operations take seconds otherwise, here
# and in the programs that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Size indices of thousands of small folders do not belong into the user's cache.
_cache = tempfile.TemporaryDirectory(prefix="cocor-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
# What a background job of a shell, or nohup, ignores is ignored by its children, and tests send these signals.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
# A bar in one test would leave tqdm's monitor thread to those that look for threads left behind.
tqdm.monitor_interval = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out soak tests unless they are asked for; skip what needs a GPU where there is none."""
    if "soak" not in config.option.markexpr:
        soak = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in soak]
        config.hook.pytest_deselected(items=soak)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Odd file names in what a test has logged: workers of pytest-xdist can send proper text only."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    loading.EARLIER.clear()
    loading.EARLIER.update(threading.enumerate())


@pytest.fixture(autouse=True)
def no_handler_of_an_earlier_dataloader() -> Iterator[None]:
    """One that starts in the main thread leaves a handler of SIGCHLD, which raises there, at any moment, when a worker
    of another one dies: in tests that kill workers, or even after them."""
    yield
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")


def photo(name: str) -> Image.Image:
    """A photograph of at most 400 pixels a side."""
    image = Image.fromarray(getattr(data, name)()).convert("RGB")
    image.thumbnail((400, 400))
    return image


@pytest.fixture(scope="session")
def photos() -> dict[str, Image.Image]:
    return {name: photo(name) for name in PHOTOS}


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, Image.Image]) -> Path:
    """24 images in 4 class folders: parts of photographs, JPEG and PNG, of several sizes. Read only, do not change."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, image in photos.items():
        (root / name).mkdir()
        for i in range(6):
            width, height = (int(rng.integers(120, side)) for side in image.size)
            left, top = int(rng.integers(0, image.width - width)), int(rng.integers(0, image.height - height))
            part = image.crop((left, top, left + width, top + height))
            if i == 5:
                part.save(root / name / f"{i}.png")
            else:
                part.save(root / name / f"{i}.jpg", quality=92)
    return root


@pytest.fixture(scope="session")
def photo_beton(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of ``photo_folder`` in one prepared file."""
    path = tmp_path_factory.mktemp("prepared") / "photos.beton"
    convert(open_source(photo_folder), path, "beton", Settings(), workers=1)
    return path


@pytest.fixture
def photo_copy(photo_folder: Path, tmp_path: Path) -> Path:
    """A copy of ``photo_folder`` that the test may change."""
    return Path(shutil.copytree(photo_folder, tmp_path / "photos", ignore=shutil.ignore_patterns(".*")))


@pytest.fixture(scope="session")
def corner_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small, plain JPEGs in two class folders. Read only, do not change."""
    root = tmp_path_factory.mktemp("small") / "images"
    write_all(root / "a", {f"{i}.jpg": jpeg_bytes(corner_image((40 + i, 30))) for i in range(3)})
    write_all(root / "b", {f"{i}.jpg": jpeg_bytes(corner_image((40 + i, 30))) for i in range(3)})
    return root


@pytest.fixture(scope="session")
def unbroken(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MoCo + CoCor, two epochs through DALI, with a checkpoint after every step. Read only, do not change."""
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    more = {"checkpoint_every_minutes": 1e-9, "plot": True}
    assert main(flags(data=photo_folder, val_data=photo_folder, output=folder, loader="dali", **more)) == 0
    return folder
