"""The user's cache folder, for data that can be made again."""

import os
from pathlib import Path

from loaders.private import private_folder


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/cocor``, else ``~/.cache/cocor``; in the temporary folder for a user without a home, as
    containers have them. It need not exist, nor be writable."""
    named = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # noqa: PTH111 (a Path's own raises where there is no home)
    if named or home != "~":
        return Path(named or f"{home}/.cache", "cocor")
    try:
        return private_folder() / "cache"
    except OSError:
        return Path(os.devnull, "cocor")  # which cannot be made
