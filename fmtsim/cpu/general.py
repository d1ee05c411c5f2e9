"""General kernels: every element format, rounding, scale rule and block shape, one element after the other."""

from typing import NamedTuple

import numpy as np
from numpy import float32, float64, int64

from fmtsim.cpu.element import cast_value, code_of, power_of_two, scale_by
from fmtsim.cpu.jit import device, kernel
from fmtsim.cpu.philox import integer_at
from fmtsim.cpu.scales import AMAX, DIVIDE, FLT_MAX, TWO_LEVEL, real_scale, scale_exponent


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
        first: The matrix's first row in the whole operand.
        zero_point, levels: Whether blocks have zero points, and the largest code then.
        preset, preset_nan: amax of every block and whether there is NaN, where known beforehand; else below zero.
    """

    outer: int
    inner: int
    columns: int
    trailing: int
    first: int
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
def cast_flat(x, y, codes, encode, e, tables, draw, words, start):
    """Cast x, elements ``start ...`` of a tensor, into values y or codes."""
    for i in range(x.size):
        value, rank = cast_value(float64(x[i]), _word(start + i, e, draw, words), e, tables)
        if encode:
            codes[i] = code_of(value, rank, e, tables)
        else:
            y[i] = value


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
    return max(-low, high), low, high, has_nan


@kernel
def cast_blocks(x, y, codes, scales, offsets, encode, e, tables, p, se, st, view, draw, words, start, stop):
    """Cast the blocks ``start ... stop - 1`` (row-major over the grid of blocks) of a matrix."""
    rows, columns = x.shape
    across = (columns + view.inner - 1) // view.inner
    for block in range(start, stop):
        r0, k0 = (block // across) * view.outer, (block % across) * view.inner
        r1, k1 = min(r0 + view.outer, rows), min(k0 + view.inner, columns)
        amax, low, high, has_nan = _statistics(x, r0, r1, k0, k1)
        if view.preset >= 0.0:
            amax, has_nan = view.preset, view.preset_nan
        spoiled = has_nan and not p.element_has_nan
        if view.zero_point:
            scale, offset = _affine(x, y, codes, r0, r1, k0, k1, low, high, spoiled, encode, e, tables, view, draw, words)
            offsets[r0 // view.outer, k0 // view.inner] = offset
        elif p.rule == AMAX:
            scale = _real_block(x, y, codes, r0, r1, k0, k1, amax, spoiled, encode, e, tables, p, se, st, view, draw, words)
        else:
            scale = _binary_block(x, y, codes, r0, r1, k0, k1, amax, spoiled, encode, e, tables, p, view, draw, words)
        if encode:
            scales[r0 // view.outer, k0 // view.inner] = scale


@device
def _real_block(x, y, codes, r0, r1, k0, k1, amax, spoiled, encode, e, tables, p, se, st, view, draw, words):
    scale, factor = real_scale(amax, p, se, st)
    factor = x.dtype.type(factor)  # the product below is taken in the precision of x
    decode_scale = float64(scale)
    for r in range(r0, r1):
        for k in range(k0, k1):
            scaled = x[r, k] / factor if p.arithmetic == DIVIDE else x[r, k] * factor
            word = _word(_index(view.first + r, k, view), e, draw, words)
            value, rank = cast_value(float64(scaled), word, e, tables)
            if encode:
                codes[r, k] = code_of(value, rank, e, tables)
            elif spoiled:
                y[r, k] = np.nan
            else:
                result = value * decode_scale
                if p.arithmetic == TWO_LEVEL:
                    result *= float64(p.decode_scale)
                y[r, k] = result if result == result else np.nan  # Inf times a scale of 0 has no sign to keep
    return float32(np.nan) if spoiled else scale


@device
def _binary_block(x, y, codes, r0, r1, k0, k1, amax, spoiled, encode, e, tables, p, view, draw, words):
    exponent = scale_exponent(amax, p)
    for r in range(r0, r1):
        for k in range(k0, k1):
            word = _word(_index(view.first + r, k, view), e, draw, words)
            value, rank = cast_value(scale_by(float64(x[r, k]), -exponent), word, e, tables)
            if encode:
                codes[r, k] = code_of(value, rank, e, tables)
            elif spoiled:
                y[r, k] = np.nan
            else:
                y[r, k] = value * power_of_two(exponent)
    return float32(np.nan) if spoiled else float32(power_of_two(exponent))


@device
def _affine(x, y, codes, r0, r1, k0, k1, low, high, spoiled, encode, e, tables, view, draw, words):
    """Cast a block with a zero point: ``e`` rounds to signed integers, ``view.levels`` is the largest code."""
    lowest, highest = max(float32(low), -FLT_MAX), min(float32(high), FLT_MAX)
    extent = min(float32(highest - lowest), FLT_MAX)
    scale = float32(1)
    if extent > float32(0):
        scale = max(float32(extent / float32(view.levels)), float32(1.1754943508222875e-38))
    zero = min(max(np.rint(float64(float32(-lowest / scale))), 0.0), float64(view.levels))
    factor = x.dtype.type(min(float32(float32(1) / scale), FLT_MAX))
    for r in range(r0, r1):
        for k in range(k0, k1):
            word = _word(_index(view.first + r, k, view), e, draw, words)
            value, _ = cast_value(float64(x[r, k] * factor), word, e, tables)
            code = float64(view.levels) if x[r, k] != x[r, k] else min(max(value + zero, 0.0), float64(view.levels))
            if encode:
                codes[r, k] = int64(code)
            elif spoiled:
                y[r, k] = np.nan
            else:
                y[r, k] = (code - zero) * float64(scale)
    return float32(np.nan) if spoiled else scale, int64(zero)
