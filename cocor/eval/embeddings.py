"""Write a data set's features to a file, and project them to a plane.

    .npz      numpy.load(path): features float32 (N, D), names, labels int64 (N,), classes, weights
    .parquet  a row an image: name, label, class, features; the digest of the weights in the schema's metadata
    .zarr     a group of the arrays of .npz

Rows are in the order of the data set. ``labels`` are places in ``classes``, -1 where there is none; ``weights`` is the
SHA-256 of the encoder that made the features.
"""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from cocor.eval.features import Features
from loaders.datasets.dataset import ImageDataset
from loaders.errors import UserError
from loaders.files import check_folder, replacing
from loaders.progress import patience
from loaders.text import printable

Projection = Literal["tsne", "umap"]

MOST_POINTS = 5000  # of a picture: more take minutes, and hide each other
_FEWEST_POINTS = 10
_AXES, _PERPLEXITY = 50, 30.0  # principal components that t-SNE sees, as its authors advise, and its neighbourhood
_PACKAGES = {".npz": "", ".parquet": "pyarrow", ".zarr": "zarr"}


@dataclass(frozen=True)
class Embeddings:
    """Features of N images with their names, labels and the digest of the weights."""

    features: npt.NDArray[np.float32]
    names: list[str]
    labels: npt.NDArray[np.int64]
    classes: list[str]
    weights: str

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what .npz and .zarr hold, by name."""
        found: dict[str, npt.NDArray[Any]] = {"features": self.features, "labels": self.labels}
        words = {"names": self.names, "classes": self.classes, "weights": [self.weights]}
        return found | {name: np.array(text, np.str_) for name, text in words.items()}


def of_images(features: Features, dataset: ImageDataset, weights: str) -> Embeddings:
    """Collect the features of those images of ``dataset`` that could be read."""
    places = features.usable()
    names = [printable(dataset.names[place]) for place in places.tolist()]
    labels = torch.from_numpy(dataset.labels)[places].numpy()
    return Embeddings(features.values[places].numpy(), names, labels, list(map(printable, dataset.classes)), weights)


def check_output(path: Path) -> None:
    """Raise UserError if no file such as ``path`` can be written."""
    if path.suffix not in _PACKAGES:
        raise UserError(f"--output {path}: features are written as {', '.join(_PACKAGES)}")
    _check_package(_PACKAGES[path.suffix], f"--output {path}")
    of_zarr = path.suffix == ".zarr" and any((path / name).exists() for name in ("zarr.json", ".zgroup"))
    if path.is_dir() and not of_zarr:
        raise UserError(f"--output {path}: is a folder of something else; choose another --output")
    check_folder("--output", path.parent, named=path)


def check_projection(method: Projection) -> None:
    """Raise UserError if what projects and draws is not installed."""
    _check_package("umap" if method == "umap" else "sklearn", f"--picture {method}")
    _check_package("matplotlib", "--picture")


def _check_package(name: str, subject: str) -> None:
    if name and importlib.util.find_spec(name) is None:
        package = {"umap": "umap-learn", "sklearn": "scikit-learn"}.get(name, name)
        raise UserError(f"{subject}: needs {package}: pip install {package}")


def save(path: Path, found: Embeddings) -> None:
    """Write ``found`` in the format of the suffix, whole or not at all."""
    if path.suffix == ".zarr":
        return _save_zarr(path, found)
    with replacing(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".npz":
            np.savez(file, **found.arrays())  # type: ignore[arg-type]
        else:
            _save_parquet(file, found)
    return None


def _save_parquet(file: Any, found: Embeddings) -> None:
    import pyarrow
    import pyarrow.parquet

    classes = [found.classes[label] if 0 <= label < len(found.classes) else None for label in found.labels.tolist()]
    flat = pyarrow.array(found.features.reshape(-1))
    columns = {
        "name": pyarrow.array(found.names, pyarrow.string()),
        "label": pyarrow.array(found.labels),
        "class": pyarrow.array(classes, pyarrow.string()),
        "features": pyarrow.FixedSizeListArray.from_arrays(flat, found.features.shape[1]),
    }
    table = pyarrow.table(columns).replace_schema_metadata({"weights": found.weights})
    pyarrow.parquet.write_table(table, file)


def _save_zarr(path: Path, found: Embeddings) -> None:
    import zarr

    temporary = path.with_name(f".{path.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed command
    path.parent.mkdir(parents=True, exist_ok=True)
    group = zarr.open_group(temporary, mode="w", zarr_format=2)  # the third has no settled format for text
    for name, values in found.arrays().items():
        group.create_array(name, data=values)
    if path.exists():
        shutil.rmtree(path)
    temporary.rename(path)


def project(features: npt.NDArray[np.float32], method: Projection) -> npt.NDArray[np.float32]:
    """Project features (N, D), by their directions, to (N, 2). The same every time.

    Raises:
        UserError: fewer than 10 images.
    """
    if len(features) < _FEWEST_POINTS:
        raise UserError(f"--picture: {len(features)} images; a picture needs {_FEWEST_POINTS} or more")
    values = F.normalize(torch.from_numpy(features), dim=1).numpy()
    with patience(f"--picture {method} of {len(values):,} images"):
        if method == "umap":
            import umap

            return np.asarray(umap.UMAP(random_state=0, n_jobs=1).fit_transform(values))
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE

        axes = PCA(min(_AXES, *values.shape), random_state=0).fit_transform(values)
        perplexity = min(_PERPLEXITY, (len(values) - 1) / 3)
        return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(axes))
