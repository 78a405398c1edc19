"""The versions of what a result may depend on, for checkpoints and run folders, and of what must go together."""

import platform
from importlib import metadata

import cocor
from loaders.errors import UserError

_PACKAGES = ("torch", "torchvision", "timm", "numpy")


def versions() -> dict[str, str]:
    """Version by name: cocor, Python and the packages that compute. Imports none of them."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"cocor": cocor.__version__, "python": platform.python_version(), **found}


def check_pair() -> None:
    """UserError where torchvision cannot be imported, most often since it was built for another PyTorch. timm needs it,
    and would end with a traceback about an operator that does not exist."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        torch = _version("torch")
        fitting = _fitting(torch)
        raise UserError(
            f"torchvision {_version('torchvision')} does not work with torch {torch} "
            f"({' '.join(str(error).split())[:200]}); install the pair: pip install torch=={torch} torchvision{fitting}"
        ) from None


def _fitting(torch: str) -> str:
    """What pip needs to find the torchvision of a PyTorch: 0.(15 + n) goes with 2.n."""
    major, minor, *_ = [*torch.split("."), ""]
    return f"==0.{15 + int(minor)}.*" if major == "2" and minor.isdecimal() else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed by pip or the like
        return "unknown"
