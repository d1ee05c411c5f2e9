"""General kernels: every element format, rounding, scale rule and block shape, one element after the other."""

from typing import NamedTuple

import numpy as np
from numpy import float32, float64, int64

from fmtsim.cpu.cast.element import cast_value, code_of, power_of_two, scale_by
from fmtsim.cpu.cast.philox import integer_at
from fmtsim.cpu.cast.scales import AMAX, DIVIDE, FLT_MAX, real_scale, scale_exponent
from fmtsim.cpu.runtime.jit import device, kernel


class Draw(NamedTuple):
    """Where random integers come from: given words, or a key (``o0, o1`` its offset, ``k0, k1`` its seed)."""

    given: bool
    needed: bool
    shared: bool
    o0: np.uint32
    o1: np.uint32
    k0: np.uint32
    k1: np.uint32


class View(NamedTuple):
    """How blocks lie in a matrix, and the matrix in its tensor.

    Attributes:
        outer, inner: Rows and columns of a block.
        columns: Columns of the matrix, the extent of the inner axis.
        trailing: Extent of the tensor's dimensions behind the inner axis.
        zero_point, levels: Whether blocks have zero points, and the largest code then.
        preset, preset_nan: amax of every block and whether there is NaN, where known beforehand; else below zero.
    """

    outer: int
    inner: int
    columns: int
    trailing: int
    zero_point: bool
    levels: int
    preset: float
    preset_nan: bool


@device
def _word(index, e, draw, words):
    """Return the random integer of an element: given, drawn from the key, or 0 where none is needed."""
    if draw.given:
        return words[index]
    if draw.needed:
        return integer_at(index, e.random_bits, draw.shared, draw.o0, draw.o1, draw.k0, draw.k1)
    return int64(0)


@kernel
def quantize_flat(x, y, e, tables, draw, words, start):
    """Round x, elements ``start ...`` of a tensor, into y."""
    for i in range(x.size):
        y[i] = cast_value(float64(x[i]), _word(start + i, e, draw, words), e, tables)[0]


@kernel
def encode_flat(x, codes, e, tables, draw, words, start):
    """Round x, elements ``start ...`` of a tensor, into codes."""
    for i in range(x.size):
        value, rank = cast_value(float64(x[i]), _word(start + i, e, draw, words), e, tables)
        codes[i] = code_of(value, rank, e, tables)


@device
def _index(row, column, view):
    """Return an element's row-major place in the tensor from its place in the operand matrix."""
    block = row // view.trailing
    return (block * view.columns + column) * view.trailing + (row - block * view.trailing)


@device
def _statistics(x, r0, r1, k0, k1):
    """Return the finite amax, minimum and maximum (of the values and 0) of a block, and whether it holds NaN."""
    low = high = float64(0)
    has_nan = False
    for r in range(r0, r1):
        for k in range(k0, k1):
            value = float64(x[r, k])
            if value - value == 0.0:
                low = min(low, value)
                high = max(high, value)
            elif value != value:
                has_nan = True
    return max(abs(low), abs(high)), low, high, has_nan


@kernel
def cast_blocks(x, y, codes, scales, offsets, encode, e, tables, p, se, st, view, draw, words, start, stop):
    """Cast the blocks ``start ... stop - 1`` (row-major over the grid of blocks) of a matrix into values or codes."""
    rows, columns = x.shape
    across = (columns + view.inner - 1) // view.inner
    for block in range(start, stop):
        r0, k0 = (block // across) * view.outer, (block % across) * view.inner
        r1, k1 = min(r0 + view.outer, rows), min(k0 + view.inner, columns)
        amax, low, high, has_nan = _statistics(x, r0, r1, k0, k1)
        if view.preset >= 0.0:
            amax, has_nan = view.preset, view.preset_nan
        spoiled = has_nan and not p.element_has_nan
        exponent, zero, factor = int64(0), float64(0), float32(1)
        if view.zero_point:
            scale, zero, factor = _affine(low, high, view)
        elif p.rule == AMAX:
            scale, factor = real_scale(amax, p, se, st)
        else:
            exponent = scale_exponent(amax, p)
            scale = float32(power_of_two(exponent))
        if encode:
            scales[r0 // view.outer, k0 // view.inner] = np.nan if spoiled else scale
            offsets[r0 // view.outer, k0 // view.inner] = int64(zero)
        for r in range(r0, r1):
            for k in range(k0, k1):
                word = _word(_index(r, k, view), e, draw, words)
                value, rank = cast_value(_scaled(x, r, k, exponent, factor, p), word, e, tables)
                if view.zero_point:
                    value = (
                        view.levels - zero if x[r, k] != x[r, k] else min(max(value, -zero), view.levels - zero) + 0.0
                    )  # no -0
                if encode:
                    codes[r, k] = int64(value + zero) if view.zero_point else code_of(value, rank, e, tables)
                else:
                    result = value * float64(scale) * float64(p.decode_scale)
                    y[r, k] = np.nan if spoiled or result != result else result


@device
def _scaled(x, r, k, exponent, factor, p):
    """Return an element over its scale: exactly for powers of two, else as float arithmetic in x's precision has it."""
    if p.rule != AMAX:
        return scale_by(float64(x[r, k]), -exponent)
    factor = x.dtype.type(factor)
    return float64(x[r, k] / factor if p.arithmetic == DIVIDE else x[r, k] * factor)


@device
def _affine(low, high, view):
    """Return scale, zero point and factor of a block with a zero point; ``view.levels`` is the largest code."""
    lowest, highest = max(float32(low), -FLT_MAX), min(float32(high), FLT_MAX)
    extent = min(float32(highest - lowest), FLT_MAX)
    scale = float32(1)
    if extent > float32(0):
        scale = max(float32(extent / float32(view.levels)), float32(1.1754943508222875e-38))
    zero = min(max(np.rint(float64(float32(-lowest / scale))), 0.0), float64(view.levels))
    return scale, zero, min(float32(float32(1) / scale), FLT_MAX)
