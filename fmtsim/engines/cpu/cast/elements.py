# SPDX-License-Identifier: Apache-2.0
"""Casts of element formats on the CPU: which kernel runs, on which slices, with which random words."""

from collections.abc import Callable

import numpy as np
import torch

from fmtsim.engines.cpu.cast import scalar
from fmtsim.engines.cpu.cast.codes import code_flat, coding_of
from fmtsim.engines.cpu.cast.decoding import store, values_of
from fmtsim.engines.cpu.cast.grid import Grid, grid_of
from fmtsim.engines.cpu.cast.lookup import look_up, look_up_values, table_of
from fmtsim.engines.cpu.cast.words import words_of
from fmtsim.engines.cpu.runtime import pool
from fmtsim.engines.cpu.runtime.scratch import array_of, scratch
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.spec import ElementFormat, IntFormat
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, in_one_order

_CHUNK = 1 << 16  # elements that pass through a float32 scratch at once
Cast = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Writes the values or codes of elements, the first of which has a place in the tensor."""


def quantize_elements(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    source, target = in_one_order(x, out, ordered=random is not None)
    cast = caster(spec, random, x.shape)

    def part(start: int, stop: int) -> None:
        if source.dtype == target.dtype == torch.float32:
            cast(source[start:stop], target[start:stop], start)
            return
        for first in range(start, stop, _CHUNK):
            piece = source[first : min(first + _CHUNK, stop)].float()
            result = torch.empty_like(piece)
            cast(piece, result, first)
            store(result, target[first : first + piece.numel()])

    pool.run(part, source.numel(), align=64)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def encode_elements(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x."""
    source = x.contiguous().view(-1)
    codes = torch.empty(source.shape, dtype=code_dtype(spec.format.bits))
    cast = _coder(spec, random, x.shape)

    def part(start: int, stop: int) -> None:
        for first in range(start, stop, _CHUNK):
            piece = source[first : min(first + _CHUNK, stop)].float()
            cast(piece, codes[first : first + piece.numel()], first)

    pool.run(part, source.numel(), align=64)
    return EncodedParts(codes.view(x.shape))


def covers(verb: str, spec: CastSpec) -> bool:
    """Say whether a kernel quantises or encodes float32 elements."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    if grid_for(fmt, spec) is not None and (verb == "quantize" or coding_of(fmt) is not None):
        return True
    return table_of(fmt, spec.rounding, spec.overflow) is not None


def grid_for(fmt: ElementFormat, spec: CastSpec) -> Grid | None:
    """Return the grid of an element format for the kernels that compute, None where they do not round as a cast asks.

    Of stochastic rounding they do variant a.
    """
    if (isinstance(fmt, IntFormat) and fmt.bits > 20) or (
        spec.rounding.mode == "stochastic" and spec.rounding.variant != "a"
    ):
        return None
    return grid_of(fmt, spec.overflow, spec.rounding.mode)


def caster(spec: CastSpec, random: Random, shape: torch.Size) -> Cast:
    """Return the call of the kernel that rounds float32, or looks values up."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    grid, mode = grid_for(fmt, spec), spec.rounding.mode
    if grid is None:
        table = table_of(fmt, spec.rounding, spec.overflow)
        with np.errstate(over="ignore"):
            values = values_of(fmt).astype(np.float32)
        return lambda piece, result, _: look_up_values(array_of(piece), result.numpy(), table, values)
    if mode == "stochastic":
        words = words_of(spec.rounding, random, shape)
        return lambda piece, result, start: scalar.stochastic_flat(array_of(piece), result.numpy(), grid, words, start)
    if mode == "nearest_even":
        kernel = scalar.nearest_kernel(grid)
        return lambda piece, result, _: kernel(array_of(piece), result.numpy(), grid)
    direction = scalar.direction_of(mode)
    return lambda piece, result, _: scalar.directed_flat(array_of(piece), result.numpy(), grid, direction)


def _coder(spec: CastSpec, random: Random, shape: torch.Size) -> Cast:
    """Return the call that writes codes: of a kernel's values (kept in a cache), or by table."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    coding = coding_of(fmt)
    if coding is None or grid_for(fmt, spec) is None:
        words = table_of(fmt, spec.rounding, spec.overflow)
        return lambda piece, codes, _: look_up(array_of(piece), codes.numpy(), words)
    cast = caster(spec, random, shape)

    def code(piece: torch.Tensor, codes: torch.Tensor, start: int) -> None:
        values = torch.from_numpy(scratch("values", piece.numel(), np.float32))
        cast(piece, values, start)
        code_flat(values.numpy(), codes.numpy(), coding)

    return code
