"""Unpack CIFAR's pickled batches once, losslessly, into a folder of PNGs that every loader reads.

The pickles come from the network, so only numpy arrays and plain containers may be made from them: a pickle that names
anything else is refused before it runs.
"""

import hashlib
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from loaders.errors import UserError
from loaders.progress import track

_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
_BATCHES = {
    "cifar10": {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    "cifar100": {"train": ["train"], "test": ["test"]},
}
_META = {"cifar10": ("batches.meta", "label_names"), "cifar100": ("meta", "fine_label_names")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR batch holds")
        return super().find_class(module, name)


def unpack(name: str, base: Path, cache: Path) -> tuple[Path, dict[str, list[int]], list[str]]:
    """Write the images of ``base`` (the folder of batches) below ``cache`` unless they are there.

    Returns:
        the folder, holding ``train/00000.png`` and so on in the batches' order; the labels of both splits; the classes.

    Raises:
        UserError: a batch is missing, damaged or unsafe.
    """
    files = [base / file for files in _BATCHES[name].values() for file in files]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: missing; unpack the archive of {name} again")
    identity = ";".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    folder = cache / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    labels: dict[str, list[int]] = {}
    images: dict[str, np.ndarray] = {}
    for split, names in _BATCHES[name].items():
        batches = [_read(base / file) for file in names]
        labels[split] = [int(label) for batch in batches for label in batch.get("labels", batch.get("fine_labels", []))]
        images[split] = np.concatenate([np.asarray(batch["data"]) for batch in batches]).reshape(-1, 3, 32, 32)
        if len(labels[split]) != len(images[split]):
            raise UserError(f"{base / names[0]}: {len(images[split])} images but {len(labels[split])} labels")
    meta, key = _META[name]
    classes = [str(label) for label in _read(base / meta)[key]]
    if not folder.is_dir():
        _write(images, folder)
    return folder, labels, classes


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = _Unpickler(stream, encoding="latin1").load()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{file}: no CIFAR batch: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: no CIFAR batch")
    return content


def _write(images: dict[str, np.ndarray], folder: Path) -> None:
    """Write all files or none: into a folder beside, which is renamed at the end."""
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".cifar-", dir=folder.parent))
        for split, pixels in images.items():
            (temporary / split).mkdir()
            numbered = track(enumerate(pixels), len(pixels), f"unpacking {split}", "images")
            for number, image in numbered:
                picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
                picture.save(temporary / split / f"{number:05d}.png", compress_level=1)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as error:
        raise UserError(f"cannot unpack into {folder.parent}: {error.strerror}; choose another --cache") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
