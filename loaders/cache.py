"""The user's cache folder, for data that can be made again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/cocor``, else ``~/.cache/cocor``. It need not exist, nor be writable."""
    home = os.path.expanduser("~/.cache")  # noqa: PTH111 (a Path's own raises where there is no home)
    return Path(os.environ.get("XDG_CACHE_HOME") or home) / "cocor"
