# SPDX-License-Identifier: Apache-2.0
"""Casts by the general kernels (any_format.cu), for every format, rounding, scale rule, dtype and layout; and decoding.

Codes become values by a table in shared memory where that serves (decode.cu), else by the general kernel.
"""

import struct
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.layout import ONE, View, block_extent, view_of
from fmtsim.cuda.cast.parameters import (
    BYTES_AT_ONCE,
    CODE_DTYPES,
    DTYPES,
    aligned,
    draw_of,
    element_of,
    macros,
    tables_of,
    values_of,
)
from fmtsim.cuda.cast.scale_rules import FLOAT32, RULES, fast_macros, output_of
from fmtsim.cuda.runtime import Defines, device_index, kernel
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

THREADS = 256
_WIDE = IntFormat(name="wide", bits=24)  # what elements round to before a zero point is added
_NUMBERS = DTYPES | CODE_DTYPES


def cast_general(x: Tensor, parts: EncodedParts, spec: CastSpec, random: Random = None) -> None:
    """Cast x, which is not empty, into values or codes of its shape, and scales where there is room for them.

    Tensors of element formats are contiguous, the strides of others fit three axes (``view_of``).
    """
    fmt, out, index, count = spec.format, parts.codes, device_index(x), np.uint64(x.numel())
    random = random.contiguous() if isinstance(random, Tensor) else random  # in row-major order
    grid, blocks, tensor = -(-x.numel() // THREADS), None, None
    layout = _layout(ONE, ONE, (1, 1), x.dtype, out.dtype)
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


def _layout(view: View, out: View, block: tuple[int, int], dtype: torch.dtype, out_dtype: torch.dtype) -> bytes:
    """Return a ``BlockLayout``: where elements lie in the input and the output, and which share a block."""
    sizes, strides = view
    trailing_first = strides[2] <= strides[1] if sizes[2] > 1 else False
    order = _NUMBERS[dtype], _NUMBERS[out_dtype], trailing_first, out_dtype in CODE_DTYPES
    return struct.pack("<12q4i", *sizes, *strides, *out.strides, *block, -(-sizes[1] // block[1]), *order)


def cast_bytes(spec: CastSpec, random: Random, device: torch.device) -> bytes:
    """Return the ``Cast`` of a format; given random words must stay alive until the kernel has run."""
    random_address = random.data_ptr() if isinstance(random, Tensor) else 0
    element = spec.format.element if isinstance(spec.format, BlockFormat) else spec.format
    tables = tables_of(element, device).pointers  # type: ignore[arg-type]
    return _constant_part(spec) + draw_of(spec.rounding, random) + tables + struct.pack("<2q", random_address, 0)


@lru_cache(maxsize=1024)
def _constant_part(spec: CastSpec) -> bytes:
    """Return ``Cast`` up to its ``Draw``; an element format has no rule of scales."""
    fmt = spec.format
    if not isinstance(fmt, BlockFormat):
        number = element_of(fmt, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        return number + bytes(len(number) + _RULE.size)
    element = fmt.element
    with np.errstate(over="ignore"):  # a largest value beyond float32 is Inf to rules of scales
        largest = np.float32(element.max)
    rule = _RULE.pack(
        RULES[fmt.scale_rule],
        element.max_exponent,
        element.mantissa_bits if isinstance(element, FloatFormat | IntFormat) else 0,
        fmt.arithmetic == "encode",
        fmt.arithmetic == "divide" and not fmt.power_of_two,
        fmt.scale.name == "fp32",
        fmt.tensor_scale,
        fmt.zero_point,
        element.max_code if isinstance(element, IntFormat) else 0,
        element.has_nan and not fmt.zero_point,
        float(largest),
        float(np.float32(1.0 / element.max)),
        float(np.float32(fmt.scale.max)),
    )
    number = element_of(_WIDE if fmt.zero_point else element, spec.rounding, spec.overflow)
    return number + element_of(fmt.scale, Rounding(), "saturate") + rule


_RULE = struct.Struct("<10i3f12x")


# Codes to values.

_BLOCKS = struct.Struct("<3QIi")
_VECTORS = 4  # of a thread of decode.cu


def decode(parts: EncodedParts, spec: CastSpec, out: Tensor) -> None:
    """Write the values of codes into out, of any strides, rounded once.

    Of element formats the dtype holds the values, or is float32 or float64.
    """
    if not out.numel():
        return
    parts = EncodedParts(*(None if part is None else part.contiguous() for part in parts))  # type: ignore[arg-type]
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if not _decode_by_table(parts, spec, target):
        # the general kernel: values of any codes, rounded once
        fmt, layout = spec.format, _layout(ONE, ONE, (1, 1), parts.codes.dtype, target.dtype)
        element: ElementFormat = fmt  # type: ignore[assignment]
        if isinstance(fmt, BlockFormat):
            view, element = view_of(target, spec.dim), fmt.element
            assert view is not None
            layout = _layout(view, view, block_extent(fmt, view.sizes), parts.codes.dtype, target.dtype)
        kernel("any_format.cu", "decode", device_index(target))(
            -(-target.numel() // THREADS), THREADS, parts.codes, parts.scales, parts.offsets, parts.tensor_scale,
            target, np.uint64(target.numel()), layout, element_of(element, Rounding(), spec.format.default_overflow),
            tables_of(element, target.device).pointers,
        )  # fmt: skip
    if target is not out:
        out.copy_(target)


def decode_macros(dtype: torch.dtype, scaled: bool, vectors: bool) -> Defines:
    """Return the macros of decode.cu."""
    return macros(OUTPUT=DTYPES[dtype], SCALED=scaled, VECTORS=vectors)


def _decode_by_table(parts: EncodedParts, spec: CastSpec, out: Tensor) -> bool:
    """Launch the kernel of byte codes, if it serves."""
    fmt, codes, total, blocks = spec.format, parts.codes, out.numel(), bytes(_BLOCKS.size)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if element.bits > 8 or codes.dtype != torch.uint8 or out.dtype == torch.float64:  # type: ignore[union-attr]
        return False
    if isinstance(fmt, BlockFormat):
        run = _run_of(parts, spec, fmt, out)
        if run is None:
            return False
        sixteens = run // 16
        shift = sixteens.bit_length() - 1 if sixteens & (sixteens - 1) == 0 else -1
        addresses = (
            0 if part is None else part.data_ptr() for part in (parts.scales, parts.offsets, parts.tensor_scale)
        )
        blocks = _BLOCKS.pack(*addresses, sixteens, shift)
    defines = decode_macros(out.dtype, isinstance(fmt, BlockFormat), aligned(codes, out))
    per_thread = _VECTORS * BYTES_AT_ONCE // out.element_size()
    kernel("decode.cu", "decode", device_index(out), defines)(
        -(-total // (THREADS * per_thread)), THREADS, codes, out, np.int64(total),
        values_of(element, codes.device), blocks,  # type: ignore[arg-type]
    )  # fmt: skip
    return True


def _run_of(parts: EncodedParts, spec: CastSpec, fmt: BlockFormat, out: Tensor) -> int | None:
    """Return the elements of a block that are a run of memory, None where the kernel of byte codes does not serve."""
    view, output = view_of(out, spec.dim), output_of(out.dtype)
    assert view is not None
    outer, run = block_extent(fmt, view.sizes)
    if output is None or (output != FLOAT32 and not fmt.power_of_two):  # more than one rounding
        return None
    if parts.tensor_scale is not None and fast_macros(spec, torch.float32, FLOAT32) is None:
        return None  # elements times block scales may have to be exact in more than float32
    runs = view.sizes[2] == 1 and outer == 1 and run % 16 == 0 and view.sizes[1] % run == 0
    return run if runs and out.numel() // 16 < 1 << 32 and aligned(parts.codes, out) else None
