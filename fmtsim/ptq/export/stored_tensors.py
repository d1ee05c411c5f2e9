# SPDX-License-Identifier: Apache-2.0
"""Tensors of a weight in files, and the Encoded that they are: parts that do not fit each other are named."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode
from fmtsim.formats.block import BLOCK_NAMES, BlockFormat, with_block
from fmtsim.formats.packing import tensor_of_bytes
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Block, block_text
from fmtsim.formats.tensor_file import DTYPES, TensorPlace
from fmtsim.support.errors import DataError, shown
from fmtsim.support.records import parse_json

SCALES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3",
    torch.float8_e8m0fnu: "e8m0", torch.uint8: "e8m0",
}  # fmt: skip
"""Formats of scales by the dtype that stores them."""
REAL = (torch.float32, torch.bfloat16, torch.float16)
_MX = {"e2m1": "mxfp4", "e2m3": "mxfp6_e2m3", "e3m2": "mxfp6_e3m2", "e4m3": "mxfp8_e4m3", "e5m2": "mxfp8_e5m2"}


def read_tensor(name: str, place: TensorPlace) -> Tensor:
    """Return a tensor of a file; two FP4 numbers (tag F4) share a byte, as in torch's dtype of that name."""
    dtype, shape = DTYPES.get(place.tag), place.shape
    if dtype is None:
        raise DataError(f"{place.path}: tensor {name!r} is {place.tag}; expected one of {', '.join(DTYPES)}")
    if place.tag == "F4":
        if not shape or shape[-1] % 2:
            raise DataError(f"{place.path}: tensor {name!r} is F4 {list(shape)}, whose rows do not end on bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    return tensor_of_bytes(place.read(), dtype).reshape(shape)


def json_object(text: str, place: str) -> dict[str, Any]:
    """Return the fields of an object of JSON in a header or a tensor."""
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise DataError(f"{place} is {shown(fields)}; expected an object")
    return fields


class StoredWeight(NamedTuple):
    """The tensors of a weight by what follows ``prefix`` in their names; ``codes`` and ``scale`` are two of them."""

    prefix: str
    places: Mapping[str, TensorPlace]
    codes: str
    scale: str

    def tensor(self, name: str, dtypes: Any, *dims: int) -> Tensor:
        """Return a tensor; raise DataError where it is missing, empty, or of another dtype or number of dimensions."""
        full, place, dims = f"tensor {self.prefix + name!r}", self.places.get(name), dims or (2,)
        if place is None:
            raise DataError(f"{full} is missing; its layer has {', '.join(sorted(self.places)) or 'none'}")
        dtypes = tuple(dtypes) if isinstance(dtypes, tuple | dict) else (dtypes,)
        dtype = torch.uint8 if place.tag == "F4" else DTYPES.get(place.tag)  # a byte holds two numbers
        if dtype not in dtypes or len(place.shape) not in dims or 0 in place.shape:
            ranks = " or ".join(f"{dim}-d" for dim in dims)
            names = " or ".join(map(str, dtypes))
            raise DataError(f"{full} is {dtype or place.tag} of shape {place.shape}; expected {names}, {ranks}")
        tensor = read_tensor(self.prefix + name, place)
        return tensor.view(torch.uint8) if place.tag == "F4" else tensor

    def number(self, name: str) -> Tensor:
        """Return a tensor of one float32 number, 0-d."""
        value = self.tensor(name, torch.float32, 0, 1, 2)
        if value.numel() != 1:
            raise DataError(f"tensor {self.prefix + name!r} of shape {tuple(value.shape)} is not one number")
        return value.reshape(())

    def text(self, name: str) -> str:
        """Return what a tensor of bytes says in UTF-8."""
        return bytes(self.tensor(name, torch.uint8, 1).tolist()).decode(errors="replace")

    def refuse_points(self) -> None:
        """Raise DataError where symmetric codes have zero points other than 0 (packed ones hold 0 as the middle)."""
        name = ".weight_zero_point"
        points = read_tensor(self.prefix + name, self.places[name]) if name in self.places else None
        if points is not None and points.dtype != torch.int32 and points.any():
            raise DataError(f"tensor {self.prefix + name!r} has numbers other than 0, and its codes are symmetric")

    def scales(self, dtypes: Any = SCALES) -> Tensor:
        """Return the scales of blocks, [rows of blocks, blocks in a row]."""
        scale = self.tensor(self.scale, dtypes, 0, 1, 2, 3)
        return scale.reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)

    def encoded(
        self, element: str, codes: Tensor, shape: tuple[int, ...], scale: Tensor, block: Block | None,
        tensor_scale: Tensor | None = None, zeros: Tensor | None = None, ragged: bool = False,
    ) -> Encoded:  # fmt: skip
        """Return the weight; DataError tells how many scales belong to it where there are more or fewer.

        Args:
            element: Format of the elements.
            codes: As Encoded has them.
            shape: The weight's; blocks run along its last dimension.
            scale: [rows of blocks, blocks in a row]; uint8 is E8M0.
            block: Rows and columns of a block, of which None is the whole extent; None is what the shapes say.
            tensor_scale: float32, 0-d, of NVFP4.
            zeros: Zero points, like ``scale``.
            ragged: The last group may end with the row.
        """
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if block is None and len(scale.shape) == 2:
            sizes = [n // m if n % m == 0 else 0 for n, m in zip((rows, columns), scale.shape, strict=True)]
            block = tuple(None if n == size else size for n, size in zip((rows, columns), sizes, strict=True))  # type: ignore[assignment]
        sizes = [n if size is None else size for n, size in zip((rows, columns), block or (), strict=False)]
        fits = len(block or ()) == 2 and min(sizes) > 0
        grid = tuple(-(-n // size) for n, size in zip((rows, columns), sizes, strict=True)) if fits else ()
        split = len(shape) > 2 and fits and 1 < sizes[0] < rows and shape[-2] % sizes[0]
        uneven = fits and sizes[0] == 1 and columns % sizes[1] and not ragged  # tiles may end with the matrix
        if grid != tuple(scale.shape) or split or uneven:
            expected = f"; there are {' x '.join(map(str, grid))} blocks" if fits and not (split or uneven) else ""
            stored = self.places[self.scale].shape if self.scale in self.places else tuple(scale.shape)
            raise DataError(
                f"tensor {self.prefix + self.scale!r} of shape {stored} is not a scale for each block of "
                f"{' x '.join(map(str, sizes))} of a weight of {' x '.join(map(str, shape))}{expected}"
            )
        fmt = _format_of(element, tuple(block), SCALES[scale.dtype], zeros is not None)  # type: ignore[arg-type]
        scales = scale.float() if zeros is not None else scale if scale.dtype in REAL else scale.view(torch.uint8)
        return Encoded(
            format=fmt, shape=torch.Size(shape), dim=-1, codes=codes.contiguous(), scales=scales.contiguous(),
            tensor_scale=torch.tensor(1.0) if fmt.tensor_scale and tensor_scale is None else tensor_scale,
            offsets=None if zeros is None else zeros.to(torch.int32).contiguous(),
        )  # fmt: skip


@cache
def _format_of(element: str, block: Block, scale: str, zero_point: bool) -> BlockFormat:
    """Return the format of elements in blocks under scales of a format; real scales are the amax rule's."""
    if scale in ("e4m3", "e8m0"):
        fmt = with_block(get_format("nvfp4" if scale == "e4m3" else _MX[element]), block)
        assert isinstance(fmt, BlockFormat)
        return fmt
    fmt = with_block(get_format(element), block)
    assert isinstance(fmt, BlockFormat)
    if zero_point or scale != "fp32":
        name = f"{element}_{BLOCK_NAMES.get(block) or block_text(block)}_{'zp' if zero_point else scale}"
        scaling = {"zero_point": True} if zero_point else {"scale": get_format(scale)}
        fmt = dataclasses.replace(fmt, name=name, scaling=dataclasses.replace(fmt.scaling, **scaling))
    return fmt


def two_products(weight: Encoded, scale: Tensor) -> Tensor:
    """Return elements times scales of blocks that have the tensor's in them, of a weight with a tensor scale."""
    codes, element = weight.parts().codes, weight.format.element  # type: ignore[union-attr]
    return spread_over(decode(codes, element).flatten(0, -2), scale).reshape(weight.shape)


def spread_over(elements: Tensor, scale: Tensor) -> Tensor:
    """Return elements times the scales of their blocks; one scale is that of the tensor."""
    grid = scale.reshape(1, 1) if scale.numel() == 1 else scale
    height, width = (-(-n // m) for n, m in zip(elements.shape, grid.shape, strict=True))
    spread = grid.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return elements * spread[: elements.shape[0], : elements.shape[1]]
