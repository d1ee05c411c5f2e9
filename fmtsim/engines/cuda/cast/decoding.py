# SPDX-License-Identifier: Apache-2.0
"""Codes to values: by a table in shared memory where that serves, else by the general kernel."""

import struct

import numpy as np
import torch

from fmtsim.engines.cuda.cast.block_macros import FLOAT32, fast_macros, output_of
from fmtsim.engines.cuda.cast.general import THREADS, block_extent, decode_general, view_of
from fmtsim.engines.cuda.cast.parameters import BYTES_AT_ONCE, DTYPES, aligned, macros, values_of
from fmtsim.engines.cuda.runtime import Defines, device_index, kernel
from fmtsim.formats.block import BlockFormat
from fmtsim.spec.cast import CastSpec, EncodedParts

_BLOCKS = struct.Struct("<3QIi")
_VECTORS = 4  # of a thread of decode.cu


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out, of any strides, rounded once.

    Of element formats the dtype holds the values, or is float32 or float64.
    """
    if not out.numel():
        return
    parts = EncodedParts(*(None if part is None else part.contiguous() for part in parts))  # type: ignore[arg-type]
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if not _decode_by_table(parts, spec, target):
        decode_general(parts, target, spec)
    if target is not out:
        out.copy_(target)


def decode_macros(dtype: torch.dtype, scaled: bool, vectors: bool) -> Defines:
    """Return the macros of decode.cu."""
    return macros(OUTPUT=DTYPES[dtype], SCALED=scaled, VECTORS=vectors)


def _decode_by_table(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> bool:
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
        given = (0 if part is None else part.data_ptr() for part in (parts.scales, parts.offsets, parts.tensor_scale))
        blocks = _BLOCKS.pack(*given, sixteens, shift)
    defines = decode_macros(out.dtype, isinstance(fmt, BlockFormat), aligned(codes, out))
    per_thread = _VECTORS * BYTES_AT_ONCE // out.element_size()
    kernel("decode.cu", "decode", device_index(out), defines)(
        -(-total // (THREADS * per_thread)), THREADS, codes, out, np.int64(total),
        values_of(element, codes.device), blocks,  # type: ignore[arg-type]
    )  # fmt: skip
    return True


def _run_of(parts: EncodedParts, spec: CastSpec, fmt: BlockFormat, out: torch.Tensor) -> int | None:
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
