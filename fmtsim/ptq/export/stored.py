# SPDX-License-Identifier: Apache-2.0
"""Tensors of a quantised layer in a file, which have to fit what the file's records say of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.quantize import decode
from fmtsim.formats.packing import unpack
from fmtsim.support.errors import DataError


class Layout(NamedTuple):
    """Name, dtype, bits that it may have and format of codes; dtype and format of scales; "" is plain numbers."""

    name: str
    dtype: torch.dtype
    bits: tuple[int, ...]
    element: str
    scale_dtype: torch.dtype = torch.float32
    scale_format: str = ""


PLAIN = Layout("", torch.float32, (), "")


class StoredLayer(NamedTuple):
    """The tensors of a layer by what follows ``prefix`` in their names."""

    prefix: str
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str, dtype: torch.dtype, *dims: int) -> Tensor:
        """Return a tensor; raise DataError where it is missing, empty, or of another dtype or number of dimensions."""
        full, tensor, dims = f"tensor {self.prefix + name!r}", self.tensors.get(name), dims or (2,)
        if tensor is None:
            raise DataError(f"{full} is missing; its layer has {', '.join(sorted(self.tensors)) or 'none'}")
        if tensor.dtype != dtype or tensor.dim() not in dims or 0 in tensor.shape:
            ranks = " or ".join(f"{dim}-d" for dim in dims)
            raise DataError(f"{full} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected {dtype}, {ranks}")
        return tensor

    def elements(self, layout: Layout) -> Tensor:
        """Return the elements of a weight, float32 [outputs, inputs]; uint8 holds packed codes."""
        codes = self.tensor(layout.name, layout.dtype)
        if layout.dtype == torch.uint8:
            codes = unpack(codes, layout.bits[0], codes.shape[1] * 8 // layout.bits[0])
        return decode(codes, layout.element).float() if layout.element else codes.float()

    def scales(self, name: str, layout: Layout, shape: torch.Size, block: Any) -> Tensor:
        """Return the scales of the blocks of a weight, [row blocks, column blocks]; a size of None is the weight's."""
        scale = self.tensor(name, layout.scale_dtype, 0, 1, 2)
        grid = scale.reshape(1, 1) if scale.numel() == 1 else scale
        sizes = [n if size is None else size for n, size in zip(shape, block, strict=False)]
        fits = len(block) == 2 == grid.dim() and min(sizes) > 0
        if not fits or (grid.shape[0] * sizes[0], grid.shape[1] * sizes[1]) != shape:
            raise DataError(
                f"tensor {self.prefix + name!r} of shape {tuple(scale.shape)} is not a scale for each block of "
                f"{' x '.join(map(str, sizes))} of a weight of {shape[0]} x {shape[1]}"
            )
        if not layout.scale_format:
            return grid
        return decode(grid.contiguous().view(torch.uint8), layout.scale_format).float()
