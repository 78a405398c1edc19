"""The versions of packages that a result may depend on, for checkpoints and run folders; a check of torchvision's."""

import platform
from importlib import metadata

import cocor
from loaders.errors import UserError, explain

_PACKAGES = ("torch", "torchvision", "timm", "numpy")


def versions() -> dict[str, str]:
    """The versions of cocor, Python and ``_PACKAGES``, by name. Imports none of the packages."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"cocor": cocor.__version__, "python": platform.python_version(), **found}


def check_pair() -> None:
    """UserError if torchvision cannot be imported, most often because it was built for another PyTorch. timm imports
    it, and would end in a traceback about an operator that does not exist."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        if explain(error):  # a full disk, say, not a library that does not fit
            raise
        torch = _version("torch")
        fitting = _fitting(torch)
        raise UserError(
            f"torchvision {_version('torchvision')} does not work with torch {torch} "
            f"({' '.join(str(error).split())[:200]}); install the pair: pip install torch=={torch} torchvision{fitting}"
        ) from None


def _fitting(torch: str) -> str:
    """pip's version specifier for the torchvision that goes with a PyTorch: 0.(15 + n) with 2.n; "" if unknown."""
    major, minor, *_ = [*torch.split("."), ""]
    return f"==0.{15 + int(minor)}.*" if major == "2" and minor.isdecimal() else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed by pip or the like
        return "unknown"
