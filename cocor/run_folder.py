"""The folder of a run: made by one rank, never mixed up with another run's, never emptied by accident.

runs/NAME/  config.yaml  log.txt  metrics.jsonl  checkpoints/  backbone.safetensors  views.png
"""

import shutil
import sys
from pathlib import Path

from cocor import checkpoint
from cocor.config import Config
from loaders.errors import UserError

CONFIG = "config.yaml"


def prepare(config: Config) -> None:
    """Make the output folder of a new run, or accept that of a run to resume.

    UserError if something else is there: a run is only replaced with ``--overwrite``, and nothing that is no run is.
    """
    folder = config.output
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and config.resume is None:
        if not config.overwrite:
            raise UserError(f"--output {folder} is in use; pass --resume, --overwrite, or another --output")
        if not (folder / CONFIG).is_file():
            raise UserError(f"--output {folder} holds no run, so --overwrite leaves it alone; choose another --output")
        shutil.rmtree(folder)
    try:
        (folder / checkpoint.FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made: {error.strerror}") from None


def save_config(config: Config) -> None:
    """Write the resolved configuration, with the command and the versions that produced the run."""
    versions = ", ".join(f"{name} {version}" for name, version in checkpoint.versions().items())
    config.save(config.output / CONFIG, f"{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}\n{versions}")
