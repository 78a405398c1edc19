"""The versions of what a result may depend on, for checkpoints and run folders."""

import platform
from importlib import metadata

import cocor

_PACKAGES = ("torch", "torchvision", "timm", "numpy")


def versions() -> dict[str, str]:
    """Version by name: cocor, Python and the packages that compute. Imports none of them."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"cocor": cocor.__version__, "python": platform.python_version(), **found}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed by pip or the like
        return "unknown"
