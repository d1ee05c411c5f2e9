# SPDX-License-Identifier: Apache-2.0
"""Tensors as arrays that leave the tensors as they are."""

import numpy as np
import torch
from torch import distributed


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array.

    Memory that ``Tensor.numpy`` has shown cannot be resized any more, as FSDP2 does to free the weights of a layer:
    where there are ranks, DLPack shows it, which takes three times as long.
    """
    ranks = distributed.is_available() and distributed.is_initialized()
    return np.from_dlpack(tensor) if ranks and tensor.numel() else tensor.numpy()
