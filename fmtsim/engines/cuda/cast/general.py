# SPDX-License-Identifier: Apache-2.0
"""Casts by the general kernels (any_format.cu): every format, rounding, scale rule, dtype and layout.

Here is also how blocks lie in tensors, and what a cast of any format is as bytes.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda.cast.block_macros import RULES
from fmtsim.engines.cuda.cast.parameters import CODE_DTYPES, DTYPES, draw_of, element_of, tables_of
from fmtsim.engines.cuda.runtime import device_index, kernel
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

THREADS = 256
_WIDE = IntFormat(name="wide", bits=24)  # what elements round to before a zero point is added
_NUMBERS = DTYPES | CODE_DTYPES


class View(NamedTuple):
    """A tensor as [leading, inner, trailing], ``inner`` the blocks' inner axis, and the strides of the three."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def dense(self) -> bool:
        """Whether memory holds the three axes in order and without gaps."""
        expected = self.sizes[1] * self.sizes[2], self.sizes[2], 1
        return all(n == 1 or have == want for n, have, want in zip(self.sizes, self.strides, expected, strict=True))

    @property
    def rows_last(self) -> "View":
        """The leading axis as the trailing one where that has one element: rows keep their order."""
        (leading, inner, trailing), (first, middle, last) = self
        return View((1, inner, leading), (last, middle, first)) if trailing == 1 else self


_ONE = View((1, 1, 1), (1, 1, 1))


def view_of(t: Tensor, dim: int) -> View | None:
    """Return a tensor as [leading, inner, trailing], None where its strides do not allow it."""
    if t.dim() == 0:
        return _ONE
    axis = t.dim() + dim
    leading, trailing = _merged(t.shape[:axis], t.stride()[:axis]), _merged(t.shape[axis + 1 :], t.stride()[axis + 1 :])
    if leading is None or trailing is None:
        return None
    return View((leading[0], t.shape[axis], trailing[0]), (leading[1], t.stride(axis), trailing[1]))


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Return neighbouring dimensions as one size and one stride."""
    size, stride = 1, 1
    for extent, step in zip(reversed(sizes), reversed(strides), strict=True):
        if extent == 1:
            continue
        if size > 1 and step != size * stride:
            return None
        size, stride = (size * extent, stride) if size > 1 else (extent, step)
    return size, stride


def block_extent(fmt: BlockFormat, sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Return the rows and columns of a block in a matrix of these sizes."""
    return fmt.block[0] or max(sizes[0] * sizes[2], 1), fmt.block[1] or max(sizes[1], 1)


def cast_general(x: Tensor, parts: EncodedParts, spec: CastSpec, random: Random = None) -> None:
    """Cast x, which is not empty, into values or codes of its shape, and scales where there is room for them.

    Tensors of element formats are contiguous, the strides of others fit three axes (``view_of``).
    """
    fmt, out, index, count = spec.format, parts.codes, device_index(x), np.uint64(x.numel())
    random = random.contiguous() if isinstance(random, Tensor) else random  # in row-major order
    grid, blocks, tensor = -(-x.numel() // THREADS), None, None
    layout = _layout(_ONE, _ONE, (1, 1), x.dtype, out.dtype)
    if isinstance(fmt, BlockFormat):
        view, out_view = view_of(x, spec.dim), view_of(out, spec.dim)
        assert view is not None and out_view is not None
        whole, block = (view.sizes[0] * view.sizes[2], view.sizes[1]), block_extent(fmt, view.sizes)
        layout, of_tensor = (_layout(view, out_view, size, x.dtype, out.dtype) for size in (block, whole))
        find = kernel("any_format.cu", "block_extremes", index)
        number = -(-whole[0] // block[0]) * -(-whole[1] // block[1])
        blocks = torch.zeros(3 * number, dtype=torch.int64, device=x.device)
        find(grid, THREADS, x, blocks, count, layout)
        if fmt.tensor_scale:
            tensor = torch.zeros(3, dtype=torch.int64, device=x.device)
            find(grid, THREADS, x, tensor, count, of_tensor)
    kernel("any_format.cu", "cast", index)(
        grid, THREADS, x, out, parts.scales, parts.offsets, parts.tensor_scale, blocks, tensor, count, layout,
        cast_bytes(spec, random, x.device),
    )  # fmt: skip


def encode_rows(x: Tensor, codes: Tensor, spec: CastSpec, random: Random, rows: tuple[int, int], width: int) -> None:
    """Write the codes of contiguous x, packed in each of its rows, by an element format of at most 32 bits."""
    random = random.contiguous() if isinstance(random, Tensor) else random
    kernel("any_format.cu", "encode_rows", device_index(x))(
        -(-rows[0] * -(-rows[1] // 8) // THREADS), THREADS, x, codes, *map(np.int64, rows), np.int32(width),
        np.int32(DTYPES[x.dtype]), cast_bytes(spec, random, x.device),
    )  # fmt: skip


def decode_general(parts: EncodedParts, out: Tensor, spec: CastSpec) -> None:
    """Write the values of codes into out, of their shape, rounded once; all tensors are contiguous."""
    fmt, layout = spec.format, _layout(_ONE, _ONE, (1, 1), parts.codes.dtype, out.dtype)
    element: ElementFormat = fmt  # type: ignore[assignment]
    if isinstance(fmt, BlockFormat):
        view, element = view_of(out, spec.dim), fmt.element
        assert view is not None
        layout = _layout(view, view, block_extent(fmt, view.sizes), parts.codes.dtype, out.dtype)
    kernel("any_format.cu", "decode", device_index(out))(
        -(-out.numel() // THREADS), THREADS, parts.codes, parts.scales, parts.offsets, parts.tensor_scale, out,
        np.uint64(out.numel()), layout, element_of(element, Rounding(), spec.format.default_overflow),
        tables_of(element, out.device).pointers,
    )  # fmt: skip


def _layout(view: View, out: View, block: tuple[int, int], dtype: torch.dtype, out_dtype: torch.dtype) -> bytes:
    """Return a ``BlockLayout``: where elements lie in the input and the output, and which share a block."""
    sizes, strides = view
    trailing_first = strides[2] <= strides[1] if sizes[2] > 1 else False
    order = _NUMBERS[dtype], _NUMBERS[out_dtype], trailing_first, out_dtype in CODE_DTYPES
    return struct.pack("<12q4i", *sizes, *strides, *out.strides, *block, -(-sizes[1] // block[1]), *order)


def cast_bytes(spec: CastSpec, random: Random, device: torch.device) -> bytes:
    """Return the ``Cast`` of a format; given random words must stay alive until the kernel has run."""
    given = random.data_ptr() if isinstance(random, torch.Tensor) else 0
    element = spec.format.element if isinstance(spec.format, BlockFormat) else spec.format
    tables = tables_of(element, device).pointers  # type: ignore[arg-type]
    return _constant_part(spec) + draw_of(spec.rounding, random) + tables + struct.pack("<2q", given, 0)


@lru_cache(maxsize=1024)
def _constant_part(spec: CastSpec) -> bytes:
    """Return ``Cast`` up to its ``Draw``; an element format has no rule of scales."""
    fmt = spec.format
    if not isinstance(fmt, BlockFormat):
        number = element_of(fmt, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        return number + bytes(len(number) + _RULE.size)
    element = fmt.element
    largest = np.float32(element.max)
    rule = _RULE.pack(
        RULES[fmt.scale_rule],
        element.max_exponent,
        element.mantissa_bits if isinstance(element, FloatFormat | IntFormat) else 0,
        fmt.arithmetic == "encode",
        fmt.arithmetic == "divide",
        fmt.scale.name == "fp32",
        fmt.tensor_scale,
        fmt.zero_point,
        element.max_code if isinstance(element, IntFormat) else 0,
        element.has_nan and not fmt.zero_point,
        float(largest),
        float(np.float32(1) / largest),
        float(np.float32(fmt.scale.max)),
    )
    number = element_of(_WIDE if fmt.zero_point else element, spec.rounding, spec.overflow)
    return number + element_of(fmt.scale, Rounding(), "saturate") + rule


_RULE = struct.Struct("<10i3f12x")
