"""Tensors as arrays that leave the tensors as they are."""

import ctypes

import numpy as np
import torch

_DTYPES: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64), torch.uint8: np.dtype(np.uint8),
    torch.int16: np.dtype(np.int16), torch.uint16: np.dtype(np.uint16),
}  # fmt: skip


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array, as ``Tensor.numpy`` does.

    Memory that ``numpy`` has shown cannot be resized any more, and FSDP2 does that to free the weights of a layer.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.numel():
        return tensor.numpy()
    strides = [dtype.itemsize * stride for stride in tensor.stride()]
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * reach).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # which lives as long as the array
    return np.ndarray(tensor.shape, dtype, memory, 0, strides)  # type: ignore[arg-type]
