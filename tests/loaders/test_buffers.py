"""Memory is handed out again only when nothing refers to it any more."""

import gc

import numpy as np
import torch

from loaders.pipeline.buffers import BufferPool


def test_forgotten_memory_is_used_again() -> None:
    memory = BufferPool()
    tensor = memory.empty((1000, 8), np.float32)
    assert tensor.shape == (1000, 8) and tensor.dtype == torch.float32
    place = tensor.data_ptr()
    del tensor
    assert memory.empty((500, 16), np.float32).data_ptr() == place
    assert memory.empty((10,), np.uint8).data_ptr() != place  # far too small to take so much


def test_memory_in_use_is_left_alone() -> None:
    memory = BufferPool()
    tensor = memory.empty((4, 1000), np.uint8)
    place = tensor.data_ptr()
    users = [tensor[1:].T, tensor.numpy()[2:], tensor.view(-1).untyped_storage()]
    del tensor
    while users:
        assert memory.empty((4, 1000), np.uint8).data_ptr() != place
        users.pop()
    gc.collect()
    taken = [memory.empty((4, 1000), np.uint8) for _ in range(30)]
    assert place in [tensor.data_ptr() for tensor in taken[:8]]
    del taken
    assert len(memory._free) == 8
    memory.clear()
    assert memory._free == []
