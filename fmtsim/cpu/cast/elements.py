"""Casts of element formats on the CPU: which kernel runs, on which slices, with which random words."""

from collections.abc import Callable

import numpy as np
import torch

from fmtsim.cpu.cast import directed, general, scalar
from fmtsim.cpu.cast.codes import code_flat, coding_of
from fmtsim.cpu.cast.decoding import values_of
from fmtsim.cpu.cast.element import element_of, tables_of
from fmtsim.cpu.cast.grid import grid_of
from fmtsim.cpu.cast.lookup import look_up, look_up_values, table_of
from fmtsim.cpu.cast.output import store, wider
from fmtsim.cpu.cast.words import draw_of, flat_words, key_words, plain_key
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.scratch import scratch
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.spec import ElementFormat, IntFormat
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey

_CHUNK = 1 << 16  # elements that pass through a float32 scratch at once
Cast = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Writes the values or codes of elements, the first of which has a place in the tensor."""


def quantize_elements(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    source, target = _flat(x, out, ordered=random is not None)
    double = torch.float64 in (source.dtype, target.dtype)
    cast = None if double else _fast(spec, random) or _by_table(spec)
    cast = cast or _general(spec, random, general.quantize_flat)
    wide = source.dtype in (torch.float32, torch.float64) and target.dtype in (torch.float32, torch.float64)

    def part(start: int, stop: int) -> None:
        if wide:
            cast(source[start:stop], target[start:stop], start)
            return
        for first in range(start, stop, _CHUNK):
            piece = source[first : min(first + _CHUNK, stop)]
            piece = piece if piece.dtype == torch.float64 else piece.float()
            result = torch.empty(piece.shape, dtype=wider(target.dtype))
            cast(piece, result, first)
            store(result, target[first : first + piece.numel()])

    pool.run(part, source.numel(), align=64)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def encode_elements(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x."""
    source = x.contiguous().view(-1)
    codes = torch.empty(source.shape, dtype=code_dtype(spec.format.bits))
    cast = _coder(spec, random, source.dtype == torch.float64)

    def part(start: int, stop: int) -> None:
        for first in range(start, stop, _CHUNK):
            piece = source[first : min(first + _CHUNK, stop)]
            piece = piece if piece.dtype == torch.float64 else piece.float()
            cast(piece, codes[first : first + piece.numel()], first)

    pool.run(part, source.numel(), align=64)
    return EncodedParts(codes.view(x.shape))


def _flat(x: torch.Tensor, out: torch.Tensor, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one-dimensional views (or copies where there is none) of input and output in the same order.

    Element by element any common order will do, so a transposed tensor needs no copy unless random words fix the order.
    """
    if not ordered and x.stride() == out.stride() and not x.is_contiguous() and _dense(x):
        return (tensor.as_strided((x.numel(),), (1,)) for tensor in (x, out))  # type: ignore[return-value]
    source = x.contiguous().view(-1)
    target = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
    return source, target


def _dense(x: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _coder(spec: CastSpec, random: Random, double: bool) -> Cast:
    """Return the call that writes codes: of a fast kernel's values (kept in a cache), by table, or in general."""
    fmt, cast = spec.format, None if double else _fast(spec, random)
    coding = coding_of(fmt)  # type: ignore[arg-type]
    if cast is None or coding is None:
        words = None if double else table_of(fmt, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        if words is None:
            return _general(spec, random, general.encode_flat)
        return lambda piece, codes, _: look_up(piece.numpy(), codes.numpy(), words)

    def code(piece: torch.Tensor, codes: torch.Tensor, start: int) -> None:
        values = torch.from_numpy(scratch("values", piece.numel(), np.float32))
        cast(piece, values, start)
        code_flat(values.numpy(), codes.numpy(), coding)

    return code


def _fast(spec: CastSpec, random: Random) -> Cast | None:
    """Return the call of the fast kernel on float32, or None where it does not serve."""
    mode = spec.rounding.mode
    if mode == "stochastic" and not plain_key(spec.rounding, random):
        return None
    if isinstance(spec.format, IntFormat) and spec.format.bits > 20:
        return None
    grid = grid_of(spec.format, spec.overflow, mode)  # type: ignore[arg-type]
    if grid is None:
        return None
    if isinstance(random, RandomKey):
        words = key_words(random)
        return lambda piece, result, start: scalar.stochastic_flat(piece.numpy(), result.numpy(), grid, start, *words)
    if mode == "nearest_even":
        kernel = scalar.nearest_kernel(grid)
        return lambda piece, result, start: kernel(piece.numpy(), result.numpy(), grid)
    direction = directed.direction_of(mode)
    return lambda piece, result, start: directed.directed_flat(piece.numpy(), result.numpy(), grid, direction)


def _by_table(spec: CastSpec) -> Cast | None:
    """Return the call that looks values up, or None where there is no table."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    words = table_of(fmt, spec.rounding, spec.overflow)
    if words is None:
        return None
    with np.errstate(over="ignore"):
        values = values_of(fmt).astype(np.float32)
    return lambda piece, result, _: look_up_values(piece.numpy(), result.numpy(), words, values)


def _general(spec: CastSpec, random: Random, kernel: Callable) -> Cast:
    element, tables = element_of(spec.format, spec.rounding, spec.overflow), tables_of(spec.format)  # type: ignore[arg-type]
    draw, words = draw_of(spec.rounding, random), flat_words(random)

    def cast(piece: torch.Tensor, result: torch.Tensor, start: int) -> None:
        kernel(piece.numpy(), result.numpy(), element, tables, draw, words, start)

    return cast
