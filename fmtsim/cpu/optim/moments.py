# SPDX-License-Identifier: Apache-2.0
"""A step of Adam in one pass: on moments that are bytes of a codebook, decoded, updated and encoded, or on float32.

The definition is fmtsim/optim: rules.py (the update), codec.py (scales and codes); the bits are the same. Vectors are
those of ``simd.py``. How a code is found is said at ``fmtsim.rounding.codebooks.Table``: one lookup by a number's
leading 16 bits gives the only threshold that its other 16 bits can lie on either side of.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy import float32, int32

from fmtsim.cpu.runtime import simd
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.spec.optimizer import Book

ALIGNMENT = simd.LANES
"""Blocks are multiples of this."""

_MAGNITUDE, _INFINITY, _ONE = int32(0x7FFFFFFF), int32(0x7F800000), int32(1)


def adam(
    tensors: Sequence[torch.Tensor], books: tuple[Book, Book], numbers: tuple[float, ...], block: int, zeroing: bool
) -> int:
    """Do a step of one parameter in place; return how many elements of the gradient are not finite.

    Args:
        tensors: Parameter and gradient (float32, contiguous), codes (uint8) and scales (float32) of both moments.
        books: Of the two moments, of 256 values with 0 among them.
        numbers: The fields of ``fmtsim.spec.optimizer.Numbers`` in order.
        block: Numbers that share a scale, a multiple of ALIGNMENT.
        zeroing: Elements whose gradient is not finite lose their moments and keep their parameter.
    """
    arrays = [tensor.detach().view(-1).numpy() for tensor in tensors]
    arrays[2:4] = [codes.view(np.int8) for codes in arrays[2:4]]
    rest = (*books[0], *books[1], np.array(numbers, np.float32), block, zeroing)
    counts: list[int] = []

    def part(start: int, stop: int) -> None:
        counts.append(_adam(*arrays, *rest, start, stop))

    whole, tail = divmod(arrays[0].size, block)
    run(part, whole, 1, block)
    if tail:
        fillers = 0, 0, *(int(np.flatnonzero(book.values == 0)[0]) for book in books)  # of which all decode to zero
        last = [np.full(block, filler).astype(array.dtype) for filler, array in zip(fillers, arrays, strict=False)]
        last += [array[whole:] for array in arrays[4:]]
        for padded, array in zip(last[:4], arrays[:4], strict=True):
            padded[:tail] = array[whole * block :]
        counts.append(_adam(*last, *rest, 0, 1))
        for place in (0, 2, 3):
            arrays[place][whole * block :] = last[place][:tail]
    return sum(counts)


def adam_plain(tensors: Sequence[torch.Tensor], numbers: tuple[float, ...], zeroing: bool) -> int:
    """Do a step of one parameter whose moments are float32, in place; return what ``adam`` returns.

    Args:
        tensors: Parameter, gradient and both moments, float32, contiguous, of one size.
        numbers, zeroing: As of ``adam``.
    """
    arrays = [tensor.detach().view(-1).numpy() for tensor in tensors]
    scalars = np.array(numbers, np.float32)
    whole = arrays[0].size // simd.LANES * simd.LANES
    counts: list[int] = []

    def part(start: int, stop: int) -> None:
        counts.append(_adam_plain(*arrays, scalars, zeroing, start, stop))

    run(part, whole, simd.LANES)
    if whole < arrays[0].size:
        last = [np.zeros(simd.LANES, np.float32) for _ in arrays]
        for padded, array in zip(last, arrays, strict=True):
            padded[: array.size - whole] = array[whole:]
        counts.append(_adam_plain(*last, scalars, zeroing, 0, simd.LANES))
        for padded, array in zip(last, arrays, strict=True):
            array[whole:] = padded[: array.size - whole]
    return sum(counts)


@kernel
def _adam_plain(p, g, m, v, numbers, zeroing, start, stop):
    bad = 0
    for i in range(start, stop, simd.LANES):
        x, y = simd.load(p, i), simd.load(g, i)
        infinite = _is_infinite(y)
        bad += simd.largest(infinite) and _count(g, i, simd.LANES)
        z, m_new, v_new = _updated(x, y, simd.load(m, i), simd.load(v, i), numbers)
        if zeroing:
            none, zero = simd.splat(int32(0)), simd.splat(float32(0.0))
            z = simd.where_same(infinite, none, z, x)
            m_new = simd.where_same(infinite, none, m_new, zero)
            v_new = simd.where_same(infinite, none, v_new, zero)
        simd.store(p, i, z)
        simd.store(m, i, m_new)
        simd.store(v, i, v_new)
    return bad


@kernel
def _adam(
    p, g, m_codes, v_codes, m_scales, v_scales, m_values, m_words, m_lowest, m_zero, m_least,
    v_values, v_words, v_lowest, v_zero, v_least, numbers, block, zeroing, start, stop,
):  # fmt: skip
    m_new, v_new = np.empty(block, np.float32), np.empty(block, np.float32)
    bad = 0
    for b in range(start, stop):
        first = b * block
        m_top, v_top, odd = simd.splat(int32(0)), simd.splat(int32(0)), simd.splat(int32(0))
        for i in range(0, block, simd.LANES):
            m_old = _decoded(m_codes, first + i, m_values, m_scales[b])
            v_old = _decoded(v_codes, first + i, v_values, v_scales[b])
            x, y = simd.load(p, first + i), simd.load(g, first + i)
            infinite = _is_infinite(y)
            odd = simd.iadd(odd, infinite)
            z, m, v = _updated(x, y, m_old, v_old, numbers)
            if zeroing:
                none, zero = simd.splat(int32(0)), simd.splat(float32(0.0))
                z = simd.where_same(infinite, none, z, x)
                m, v = simd.where_same(infinite, none, m, zero), simd.where_same(infinite, none, v, zero)
            simd.store(p, first + i, z)
            simd.store(m_new, i, m)
            simd.store(v_new, i, v)
            m_top, v_top = simd.smax(m_top, _magnitude(m)), simd.smax(v_top, _magnitude(v))
        bad += simd.largest(odd) and _count(g, first, block)
        m_scales[b] = _encode(m_new, simd.largest(m_top), m_codes, first, m_words, m_lowest, m_zero, m_least)
        v_scales[b] = _encode(v_new, simd.largest(v_top), v_codes, first, v_words, v_lowest, v_zero, v_least)
    return bad


@device
def _magnitude(x):
    return simd.and_(simd.as_i32(x), simd.splat(_MAGNITUDE))


@device
def _is_infinite(x):
    """Return 1 for lanes that are NaN or infinite, else 0."""
    below = simd.splat(int32(_INFINITY - 1))
    return simd.where_below(below, _magnitude(x), simd.splat(_ONE), simd.splat(int32(0)))


@device
def _decoded(codes, index, values, scale):
    places = simd.and_(simd.zext32(simd.load(codes, index)), simd.splat(int32(255)))
    return simd.fmul(simd.gather(values, places), simd.splat(scale))


@device
def _updated(x, y, m, v, numbers):
    """Return new parameter and moments: the update of fmtsim/optim/rules.py, operation by operation."""
    if numbers[2] != float32(0.0):
        y = simd.fadd(y, simd.fmul(x, simd.splat(numbers[2])))
    m = simd.fadd(simd.fmul(m, simd.splat(numbers[3])), simd.fmul(y, simd.splat(numbers[4])))
    square = simd.fmul(simd.fmul(y, simd.splat(numbers[6])), y)
    v = simd.fadd(simd.fmul(v, simd.splat(numbers[5])), square)
    root = simd.sqrt(v)
    if numbers[7] != float32(1.0):
        root = simd.fdiv(root, simd.splat(numbers[7]))
    direction = simd.fdiv(m, simd.fadd(root, simd.splat(numbers[8])))
    z = simd.fsub(simd.fmul(x, simd.splat(numbers[0])), simd.fmul(direction, simd.splat(numbers[9])))
    return simd.fmul(z, simd.splat(numbers[1])), m, v


@device
def _encode(x, top, codes, first, words, lowest, zero, least):
    """Write the codes of a block's numbers; return its scale. top: the largest magnitude's bits, NaN above Inf."""
    scale = float32_of(max(top, bits32(float32(least))))
    divisor = simd.splat(scale if scale != float32(0.0) else float32(1.0))
    buckets = words.size // 2
    behind, base = simd.splat(int32(buckets)), simd.splat(int32(lowest))
    nothing, last = simd.splat(int32(0)), simd.splat(int32(buckets - 1))
    low, high = simd.splat(int32(0xFFFF)), simd.splat(int32(0x1FFFF))
    for i in range(0, x.size, simd.LANES):
        number = simd.load(x, i)
        y = simd.fdiv(number, divisor)
        bits = simd.as_i32(y)
        key = simd.isub(simd.lshr(_magnitude(y), simd.splat(int32(16))), base)
        key = simd.smin(simd.smax(key, nothing), last)
        sign = simd.ashr(bits, simd.splat(int32(31)))
        word = simd.gather(words, simd.iadd(key, simd.and_(sign, behind)))
        offset = simd.and_(simd.xor(bits, sign), low)
        code = simd.lshr(word, simd.splat(int32(17)))
        limit = simd.and_(word, high)
        code = simd.where_below(offset, limit, code, simd.iadd(code, simd.splat(_ONE)))
        code = simd.where_equal(y, y, code, nothing)
        if zero >= 0:
            down = simd.iadd(code, simd.ashr(simd.as_i32(number), simd.splat(int32(31))))
            code = simd.where_same(code, simd.splat(int32(zero)), down, code)
        simd.store(codes, first + i, simd.trunc8(code))
    return scale


@device
def _count(g, first, block):
    count = 0
    for i in range(block):
        count += (bits32(g[first + i]) & _MAGNITUDE) >= _INFINITY
    return count
