"""Writing class folders of images, with the record of all of them in the hidden file ``.cocor-prep``."""

from pathlib import Path

import numpy as np

from loaders.datasets.manifest import FOLDER_RECORD, Record
from loaders.errors import UserError
from loaders.text import printable


class TreeWriter:
    """Writes images below the existing, empty folder ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: set[str] = set()

    def add(self, name: str, data: bytes) -> None:
        """Write one image."""
        folder = name.rpartition("/")[0]
        if folder not in self._folders:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
            self._folders.add(folder)
        try:
            with (self._root / name).open("xb") as file:
                file.write(data)
        except FileExistsError:  # on a file system that ignores case
            raise UserError(f"{printable(name)}: another image has this name here; rename one") from None

    def finish(self, order: np.ndarray, modes: np.ndarray, record: Record) -> None:
        """Write the record; ``order`` and ``modes`` do not matter here."""
        for name in record.classes:
            (self._root / name).mkdir(exist_ok=True)  # a class may be empty
        (self._root / FOLDER_RECORD).write_bytes(record.to_bytes())

    def close(self) -> None:
        """Nothing is held open."""
