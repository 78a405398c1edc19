"""DALI's import, and its graph from file names to crops."""

import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from loaders.errors import UserError, explain
from loaders.views.plan import Filter

_INSTALL = "pip install nvidia-dali-cuda130, or choose another --loader"


def load_dali() -> Any:
    """Import ``nvidia.dali`` 2.0 or newer; UserError with the remedy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dali: Any = importlib.import_module("nvidia.dali")
            for part in ("fn", "types"):
                importlib.import_module(f"nvidia.dali.{part}")
    except ImportError as fault:
        if explain(fault):
            raise
        raise UserError(f"--loader dali needs NVIDIA DALI, which cannot be imported ({fault}): {_INSTALL}") from fault
    version = str(getattr(dali, "__version__", "unknown"))
    if not version[:1].isdigit() or int(version.split(".")[0]) < 2:
        raise UserError(f"--loader dali needs NVIDIA DALI 2.0 or newer and finds {version}: {_INSTALL}")
    return dali


def build_pipeline(
    source: Callable[[], list[Any]],
    *,
    batch_size: int,
    crops: int,
    size: int,
    filter: Filter | None,
    threads: int,
    device_id: int | None,
    ahead: int,
    gpu_decoder: dict[str, Any],
) -> Any:
    """Build the pipeline from files to crops uint8 (C, S, S, 3), its one output.

    With ``device_id`` the crops are on that GPU. ``source`` gives the memory that holds a batch's files, once for every
    sample, where in it each one starts and its length, int64 (B, 1), and then, for each crop, the begin and the end (y,
    x) of its region, float32 (B, 2) in pixels: see :func:`shared`. Without a ``filter`` the output is the whole images
    uint8 (H, W, 3), and ``source`` gives no regions. ``gpu_decoder`` holds options of the mixed decoder; ``ahead`` is
    how many batches DALI works on at once.
    """
    dali = load_dali()
    fn, types = dali.fn, dali.types

    @dali.pipeline_def(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=ahead,
        exec_dynamic=True,  # outputs stay valid for as long as someone holds them
    )
    def crops_of_files() -> Any:
        inputs = 3 if filter is None else 3 + 2 * crops
        block, starts, lengths, *corners = fn.external_source(
            source=source, num_outputs=inputs, batch=True, no_copy=True
        )  # fmt: skip
        encoded = fn.slice(block, starts, lengths, axes=[0])  # into memory from which the GPU can copy
        images = fn.decoders.image(
            encoded, device="cpu" if device_id is None else "mixed", output_type=types.RGB, **gpu_decoder
        )
        if filter is None:
            return images
        resized = [
            fn.resize(
                images,
                size=(size, size),
                roi_start=begin,
                roi_end=end,
                interp_type=types.INTERP_CUBIC if filter == "bicubic" else types.INTERP_LINEAR,
                antialias=True,
            )
            for begin, end in zip(corners[::2], corners[1::2], strict=True)
        ]
        return fn.stack(*resized)

    pipeline = crops_of_files()
    pipeline.build()
    return pipeline


def shared(files: tuple[Tensor, Tensor, Tensor], corners: Iterable[Tensor]) -> list[Any]:
    """Wrap a request's tensors for :func:`build_pipeline`, without a copy.

    Handed over as DLPack, they are let go of without the interpreter's lock, if somebody still holds them then.
    """
    tensors, (block, *places) = load_dali().tensors, files
    everything = tensors.TensorListCPU.broadcast(tensors.TensorCPU(to_dlpack(block)), len(places[0]))
    return [everything, *(tensors.TensorListCPU(to_dlpack(part)) for part in (*places, *corners))]


def undecodable(files: Iterable[np.ndarray], sizes: np.ndarray) -> list[int]:
    """Find the ``files`` (bytes uint8) that DALI's CPU decoder gets wrong.

    That is, it fails on them or gives other ``sizes`` (N, 2).
    """
    dali = load_dali()
    fn = dali.fn

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def one_image() -> Any:
        file = fn.external_source(name="file")
        return fn.decoders.image(file, device="cpu"), fn.peek_image_shape(file)  # training fails where either does

    found, pipeline = [], one_image()
    for place, (file, size) in enumerate(zip(files, sizes.tolist(), strict=True)):
        try:
            shape = pipeline.run(file=[file])[0].shape()[0]  # the output itself must not outlive the pipeline
            if shape[:2] != tuple(size):
                found.append(place)
        except RuntimeError:
            found.append(place)
            pipeline = one_image()  # it does not survive an error
    return found
