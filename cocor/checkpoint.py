"""Write and read checkpoints: all that a run needs to go on, whole and safe.

    runs/NAME/checkpoints/step_0001000.pt     {"step", "epoch", "training", "config", "versions", "dataset", ...}

A checkpoint holds tensors, numbers, text, lists and dicts only, so ``torch.load(weights_only=True)`` opens it without
running code and without this package. Files are written whole or not at all; an older one goes only after a newer one
is on disk. A damaged newest file is named and the one before it used. One rank writes, any rank reads, on the CPU.
"""

import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cocor.config.options import BEFORE, FREE_TO_CHANGE, Config
from cocor.run_dir import CHECKPOINTS as FOLDER
from cocor.run_dir import checkpoints, step_of, versions
from loaders.datasets.decode import describe as describe_fault
from loaders.errors import UserError, no_fault_of_a_file
from loaders.files import TEMPORARY, replacing

_PLAIN = (bool, int, float, str, bytes, type(None))
_log = logging.getLogger(__name__)


def save(folder: Path, state: Mapping[str, Any], *, keep: int, milestones: int = 0) -> Path:
    """Write ``state``, with ``"step"`` finished steps, to a file in ``folder``.

    Of the files up to that step, only the newest ``keep`` stay, and all whose step is a multiple of ``milestones`` (0:
    none).

    Raises:
        UserError: the disk is full or the folder not writable; what was there is still there.
        TypeError: something in ``state`` is no tensor, number, string, list or dict; names its path.
    """
    path = folder / f"step_{state['step']:07d}.pt"
    with replacing(path) as temporary:
        write(portable(state), temporary)
    for stale in folder.glob(f".*{TEMPORARY}"):  # of killed runs
        _remove(stale)
    # Files of later steps are damaged, or another run's: neither counted nor removed.
    for old in [other for other in _listed(folder) if step_of(other) <= step_of(path)][keep:]:
        if not milestones or step_of(old) % milestones:
            _remove(old)
    return path


def write(state: object, path: Path) -> None:
    """Call ``torch.save``, but raise the system's own OSError, as on a full disk."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # which hides the system's
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning(f"cannot remove {path}: {error.strerror}")


def describe(config: Config, digest: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Describe a run: configuration, versions, its images' ``digest`` and ``files``.

    ``digest`` is of names, labels, classes and sizes in pixels; ``files`` of lengths, modification times and, after
    ``--verify-data``, contents.
    """
    return {"config": config.to_dict(), "versions": versions(), "dataset": digest, "files": dict(files)}


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Raises:
        UserError: the file is missing, damaged, no checkpoint, or would have to run code to load.
        OSError, MemoryError, RuntimeError: it cannot be read for want of handles or memory, and may be sound.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file, such as a run's backbone.safetensors")
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch itself does not look at the checksums
        if broken is not None:
            raise UserError(f"{path} is damaged: {broken} differs from its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a broken file can fail anywhere in zip, pickle or torch
        if no_fault_of_a_file(error):  # an older checkpoint would take its place
            raise
        raise UserError(f"{path} is damaged or no checkpoint: {describe_fault(error)[:200]}") from None
    if not isinstance(state, dict) or type(state.get("step")) is not int or state["step"] < 0:
        raise UserError(f"{path} is no checkpoint of cocor: it has no step")
    return state


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest sound checkpoint in ``folder``; None if there are none.

    UserError if there are some, but none that loads; other errors as in :func:`load`.
    """
    paths = _listed(folder)
    for path in paths:
        try:
            return path, load(path)
        except UserError as error:
            _log.warning("%s; trying the one before", error)
    if paths:
        raise UserError(f"{folder}: none of its {len(paths)} checkpoints loads; choose another --output to start anew")
    return None


def find(resume: str, output: Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the checkpoint that ``--resume`` names; None if ``auto`` finds none yet.

    It names a checkpoint, or the folder of a run for its newest; ``auto`` is the run's own folder.

    UserError if nothing loads there, or the run's own folder holds later checkpoints, which would be mixed up with
    those to come.
    """
    own = output / FOLDER
    if resume == "auto":
        return newest(own)
    path = Path(os.path.expanduser(resume))  # noqa: PTH111 (a Path's own raises for unknown users)
    if path.is_dir():
        found = newest(path / FOLDER if (path / FOLDER).is_dir() else path)
        if found is None:
            raise UserError(f"--resume {path}: no checkpoints there")
        return found
    later = [other.name for other in _listed(own) if step_of(other) > step_of(path)]
    if path.parent.resolve() == own.resolve() and later:
        raise UserError(f"--resume {path}: {later[0]} is later; remove the later ones or use another --output")
    return path, load(path)


def exists(resume: str | None, output: Path) -> bool:
    """Tell by names of files whether ``--resume`` finds a checkpoint."""
    return resume is not None and (resume != "auto" or bool(_listed(output / FOLDER)))


def compare(state: Mapping[str, Any], config: Config, digest: str, files: Mapping[str, str]) -> list[str]:
    """List how the run of ``state`` differs from ``config`` and the images.

    Only what enters the arithmetic of steps counts; with ``--force-data`` other images are no difference.
    """
    saved, now = state["config"], config.to_dict()
    default = Config().to_dict() | BEFORE
    differences = [
        f"{key}: {saved.get(key, default.get(key))} in the checkpoint, {now.get(key)} now"
        for key in now
        if key not in FREE_TO_CHANGE and saved.get(key, default.get(key)) != now[key]
    ]
    if not config.force_data and (changed := changed_images(state, digest, files)):
        differences.append(f"data: {changed}; --force-data goes on with them")
    return differences


def changed_images(state: Mapping[str, Any], digest: str, files: Mapping[str, str]) -> str:
    """Say how the images differ from those of ``state``; nothing if they do not.

    Files are compared if both are folders or both ``.beton`` files; checkpoints of older versions know none. Equal
    contents count, whatever the modification times.
    """
    if state["dataset"] != digest:
        seen = f"digest {state['dataset'][:12]} in the checkpoint, {digest[:12]} now"
        return f"other images: other names, labels, classes or sizes in pixels ({seen})"
    before = state.get("files", {})
    if before.get("kind") != files.get("kind"):
        return ""
    for part in ("lengths", "contents"):
        if part in before and part in files and before[part] != files[part]:
            return f"other images: other {part} of files under the same names"
    if before.get("times") == files.get("times") or ("contents" in before and "contents" in files):
        return ""
    remedy = "--verify-data compares their contents" if "contents" in before else "their contents are not known"
    return f"files with other modification times, all of the same lengths; {remedy}"


def export_backbone(backbone: nn.Module, path: Path, metadata: Mapping[str, object]) -> None:
    """Write the weights of ``backbone`` by timm's names, with ``metadata`` as text.

    ``timm.create_model("resnet50", num_classes=0, checkpoint_path=FILE)`` reads it, with a new head by
    ``pretrained=True, num_classes=10, pretrained_cfg_overlay=dict(file=FILE, num_classes=0)``; a transformer trained at
    another image size needs ``img_size=96`` as well. A small stem is no timm model's, see ``--stem`` in the README.
    """
    # safetensors takes neither channels-last tensors nor two names for one memory.
    weights = {name: value.contiguous().clone() for name, value in portable(backbone.state_dict()).items()}
    content = safetensors.torch.save(weights, {"format": "pt", **{key: str(value) for key, value in metadata.items()}})
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def portable(state: Any, place: str = "checkpoint") -> Any:
    """Convert ``state`` to CPU tensors and plain containers, which load anywhere.

    TypeError, naming the path (``place``), for anything that cannot be converted.
    """
    if isinstance(state, Tensor):
        tensor = state.detach().cpu()
        # A view would drag its whole storage into the file.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if isinstance(state, Mapping):
        return {key: portable(value, f"{place}.{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [portable(value, f"{place}[{position}]") for position, value in enumerate(state)]
    if type(state) in _PLAIN:  # subclasses such as numpy.float64 need code of their own to load
        return state
    raise TypeError(f"{place} is a {type(state).__name__}, which a checkpoint must not hold")


def _listed(folder: Path) -> list[Path]:
    """List the checkpoints that runs have written to ``folder``, newest first."""
    return sorted(checkpoints(folder), key=step_of, reverse=True)
