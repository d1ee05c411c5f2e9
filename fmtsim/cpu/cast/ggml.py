# SPDX-License-Identifier: Apache-2.0
"""ggml's encoders: searches for the scales of many parts at once, each in a lane, with every operation in C's order.

No operation is contracted: products and sums are rounded one by one, as ``-ffp-contract=off`` does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy import float32, int32, uint8
from torch import Tensor

from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.runtime.pool import array_of
from fmtsim.cpu.runtime.simd import (  # fmt: skip
    LANES,
    and_,
    any_bits,
    as_f32,
    as_i32,
    fabs,
    fadd,
    fdiv,
    fmul,
    fsub,
    load,
    or_,
    smax,
    smin,
    splat,
    sqrt,
    store,
    where_equal,
    where_less,
)
from fmtsim.formats.packed import PackedFormat
from fmtsim.torch_engine.ggml_search import LEAST, Fit, Tried

_LEAST, _INF = float32(LEAST), float32(np.inf)
_SIGN, _MAGNITUDE = int32(-0x80000000), int32(0x7FFFFFFF)
_MAGIC, _MANTISSA, _ZERO, _EXPONENT = float32(12582912), int32(0x7FFFFF), int32(0x400000), int32(0x4B000000)
_WRAPS = float32(4194304)  # from this magnitude on nearest_int gives the low bits of something else
_WORK = 64  # of an element, in those of plain casts


def fit_range(x: Tensor, fmt: PackedFormat) -> Fit:
    """Fit ``scale * code - minimum`` to parts (make_qkx2_quants)."""
    top, steps, first = fmt.search
    return _searched(x, fmt, _search_range, float32(top), int(steps), float32(first), top == 3)


def fit_signed(x: Tensor, fmt: PackedFormat) -> Fit:
    """Fit ``scale * (code - zero)`` to parts (make_qx_quants)."""
    return _searched(x, fmt, _search_signed, fmt.zero)


def _searched(x: Tensor, fmt: PackedFormat, search: Callable, *arguments: Any) -> Fit:
    """Return scales and minima of parts, and with x the inverses and offsets that give the codes of the search."""
    parts = array_of(x.contiguous()).reshape(-1, fmt.part)
    fits = np.empty((4, -(-len(parts) // LANES), LANES), np.float32)
    pool.run(lambda *ends: search(parts, fits, *arguments, *ends), fits.shape[1], 1, _WORK * LANES * fmt.part)
    scale, minimum, *tried = torch.from_numpy(fits).flatten(1)[:, : len(parts)]
    return scale, minimum, (x, *tried)


def recode(tried: Tried, d: Tensor, offset: Tensor, low: int, high: int, fmt: PackedFormat) -> Tensor:
    """Return the codes [blocks, elements] of parts under stored scales, those of the search where the scale is 0."""
    x, *numbers = tried
    codes = torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    arrays = [array_of(t.contiguous()) for t in (d, offset, *numbers)]
    parts, out = (array_of(t.contiguous()).reshape(-1, fmt.part) for t in (x, codes))
    pool.run(lambda *ends: _codes(parts, *arrays, out, low, high, *ends), len(parts), 1, fmt.part)
    return codes


def fit_largest(x: Tensor, fmt: PackedFormat) -> tuple[Tensor, Tensor]:
    """Return the scales [blocks, 1] that make the numbers of largest magnitude the lowest codes, and codes."""
    d, codes = x.new_empty((len(x), 1)), torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    arrays = [array_of(t) for t in (x.contiguous(), d, codes)]
    pool.run(lambda *ends: _code_largest(*arrays, fmt.zero, *ends), len(x), 1, 4 * fmt.elements)
    return d, codes


@device
def _nearest(y, low, high):
    """Return nearest_int of a vector, clamped, as float32."""
    bits = and_(as_i32(fadd(y, splat(_MAGIC))), splat(_MANTISSA))
    bits = smin(smax(bits, splat(int32(_ZERO + low))), splat(int32(_ZERO + high)))
    return fsub(as_f32(or_(bits, splat(_EXPONENT))), splat(_MAGIC))


@device
def _nearest_small(y, low, high):
    """Return ``_nearest`` of magnitudes below 2^22 in fewer instructions: clamped first, then rounded to integers."""
    y = where_less(y, low, low, y)
    return fsub(fadd(where_less(high, y, high, y), splat(_MAGIC)), splat(_MAGIC))


@device
def _columns(parts, group, x):
    """Write a group of parts side by side, an element in every row of lanes; parts beyond the last are zeros."""
    size = parts.shape[1]
    count = min(LANES, parts.shape[0] - group * LANES)
    if count < LANES:
        x[:] = float32(0)
    for lane in range(count):
        row = parts[group * LANES + lane]
        for i in range(size):
            x[i * LANES + lane] = row[i]


@kernel
def _search_range(parts, fits, top, steps, first, absolute, start, stop):
    size = parts.shape[1]
    x, weights, tried = np.empty((3, size * LANES), np.float32)
    zero = splat(float32(0))
    for group in range(start, stop):
        _columns(parts, group, x)
        # 1. weights: magnitudes, and where errors are squared the root of their mean square beside them
        mean = zero
        if not absolute:
            for i in range(size):
                v = load(x, i * LANES)
                mean = fadd(mean, fmul(v, v))
            mean = sqrt(fdiv(mean, splat(float32(size))))
        low = high = load(x, 0)
        sum_w = fadd(mean, fabs(low))
        sum_x = fmul(sum_w, low)
        store(weights, 0, sum_w)
        for i in range(1, size):
            v = load(x, i * LANES)
            w = fadd(mean, fabs(v))
            store(weights, i * LANES, w)
            low, high = where_less(v, low, v, low), where_less(high, v, v, high)
            sum_w, sum_x = fadd(sum_w, w), fadd(sum_x, fmul(w, v))
        low = where_less(zero, low, zero, low)
        flat_low = low
        # 2. the scale that spans the range
        inverse = fdiv(splat(top), fsub(high, low))
        scale = fdiv(splat(float32(1)), inverse)
        _try_codes(x, tried, inverse, low, flat_low, high, top)
        best, best_inverse, best_low = _error(x, weights, tried, scale, low, absolute), inverse, low
        for step in range(steps + 1):
            # 3. a scale from the best minimum so far, and the least-squares scale and minimum for its codes
            inverse = fdiv(splat(first + float32(0.1) * float32(step) + top), fsub(high, low))
            _try_codes(x, tried, inverse, low, flat_low, high, top)
            sum_l = sum_l2 = sum_xl = zero
            for i in range(size):
                code = load(tried, i * LANES)
                weighted = fmul(load(weights, i * LANES), code)
                sum_l, sum_l2 = fadd(sum_l, weighted), fadd(sum_l2, fmul(weighted, code))
                sum_xl = fadd(sum_xl, fmul(weighted, load(x, i * LANES)))
            determinant = fsub(fmul(sum_w, sum_l2), fmul(sum_l, sum_l))
            new_low = fdiv(fsub(fmul(sum_l2, sum_x), fmul(sum_l, sum_xl)), determinant)
            numerator = where_less(zero, new_low, sum_xl, fsub(fmul(sum_w, sum_xl), fmul(sum_x, sum_l)))
            new_scale = fdiv(numerator, where_less(zero, new_low, sum_l2, determinant))
            new_low = where_less(zero, new_low, zero, new_low)
            # 4. taken where they err less
            error = _error(x, weights, tried, new_scale, new_low, absolute)
            error = where_less(zero, determinant, error, splat(_INF))
            scale = where_less(error, best, new_scale, scale)
            best_inverse, best_low = (
                where_less(error, best, inverse, best_inverse),
                where_less(error, best, low, best_low),
            )
            low, best = where_less(error, best, new_low, low), where_less(error, best, error, best)
        # 5. parts of one number that is not positive are their minimum alone
        line = group * LANES
        store(fits[0].ravel(), line, where_equal(high, flat_low, zero, scale))
        store(fits[1].ravel(), line, fsub(splat(float32(-0.0)), where_equal(high, flat_low, flat_low, low)))
        store(fits[2].ravel(), line, where_equal(high, flat_low, zero, best_inverse))
        store(fits[3].ravel(), line, best_low)


@device
def _try_codes(x, tried, inverse, low, least, most, top):
    """Write the codes of columns from ``least`` to ``most`` under an inverse scale and a minimum."""
    # no column is farther from 0 than one of the ends: subtraction and product are monotonic
    ends = fabs(fmul(inverse, fsub(most, low))), fabs(fmul(inverse, fsub(least, low)))
    limit, zero, one = splat(_WRAPS), splat(float32(0)), splat(float32(1))
    if any_bits(as_i32(where_less(ends[0], limit, where_less(ends[1], limit, zero, one), one))):
        for i in range(x.size // LANES):
            y = fmul(inverse, fsub(load(x, i * LANES), low))
            store(tried, i * LANES, _nearest(y, int32(0), int32(top)))
    else:
        for i in range(x.size // LANES):
            y = fmul(inverse, fsub(load(x, i * LANES), low))
            store(tried, i * LANES, _nearest_small(y, zero, splat(top)))


@device
def _error(x, weights, tried, scale, low, absolute):
    """Return the weighted sum of errors, or of their squares."""
    error = splat(float32(0))
    for i in range(x.size // LANES):
        loss = fsub(fadd(fmul(scale, load(tried, i * LANES)), low), load(x, i * LANES))
        loss = fabs(loss) if absolute else fmul(loss, loss)
        error = fadd(error, fmul(load(weights, i * LANES), loss))
    return error


@kernel
def _search_signed(parts, fits, top, start, stop):
    size, least, most = parts.shape[1], splat(float32(-top)), splat(float32(top - 1))
    x, weights, weighted = np.empty((3, size * LANES), np.float32)
    zero, one = splat(float32(0)), splat(float32(1))
    for group in range(start, stop):
        _columns(parts, group, x)
        # 1. the first number of largest magnitude; squares and cubes
        largest = amax = zero
        for i in range(size):
            v = load(x, i * LANES)
            store(weights, i * LANES, fmul(v, v))
            store(weighted, i * LANES, fmul(fmul(v, v), v))
            largest, amax = where_less(amax, fabs(v), v, largest), where_less(amax, fabs(v), fabs(v), amax)
        scale = best = best_inverse = zero
        for step in range(-10, 10):
            # 2. -(top + step / 10) / largest, the one of step 0 first, and its sums
            tenths = float32(0) if step == -10 else float32(0.1) * float32(step)
            inverse = fdiv(splat(-(float32(top) + tenths)), largest)
            products = squares = zero
            for i in range(size):
                # magnitudes up to 33 but where the largest one counts as zero
                code = _nearest_small(fmul(inverse, load(x, i * LANES)), least, most)
                products = fadd(products, fmul(load(weighted, i * LANES), code))
                squares = fadd(squares, fmul(fmul(load(weights, i * LANES), code), code))
            # 3. taken where the least-squares scale fits better
            ratio = fdiv(products, squares)
            if step == -10:
                scale, best_inverse = where_equal(squares, zero, zero, ratio), inverse
                best = fmul(scale, products)
            elif step != 0:
                gain = where_less(zero, squares, fmul(products, products), splat(-_INF))
                bound = fmul(best, squares)
                scale, best_inverse = (
                    where_less(bound, gain, ratio, scale),
                    where_less(bound, gain, inverse, best_inverse),
                )
                best = where_less(bound, gain, fmul(ratio, products), best)
        # 4. parts that count as zero have scale 0 and the lowest code
        line = group * LANES
        store(fits[0].ravel(), line, where_less(amax, splat(_LEAST), zero, scale))
        store(fits[1].ravel(), line, zero)
        store(fits[2].ravel(), line, where_less(amax, splat(_LEAST), one, best_inverse))
        store(fits[3].ravel(), line, where_less(amax, splat(_LEAST), splat(_INF), zero))


@kernel
def _codes(parts, steps, offsets, inverses, lows, codes, low, high, start, stop):
    least, most = _ZERO + int32(low), _ZERO + int32(high)
    for part in range(start, stop):
        row, out, step, offset = parts[part], codes[part], steps[part], offsets[part]
        if step == float32(0):
            for i in range(row.size):
                bits = bits32(inverses[part] * (row[i] - lows[part]) + _MAGIC) & _MANTISSA
                out[i] = min(max(bits, least), most) - least
            continue
        for i in range(row.size):
            bits = bits32((row[i] + offset) / step + _MAGIC) & _MANTISSA
            out[i] = min(max(bits, least), most) - least


@kernel
def _code_largest(blocks, d, codes, zero, start, stop):
    shift, most = float32(zero) + float32(0.5), int32(2 * zero - 1)
    for block in range(start, stop):
        row, out = blocks[block], codes[block]
        # 1. the largest numbers of both signs as integers, and of equal ones the first
        high = low = int32(0)
        for i in range(row.size):
            high, low = max(high, bits32(row[i])), max(low, bits32(row[i]) ^ _SIGN)
        largest, i = float32_of(high) if high >= low else -float32_of(low), 0
        if high == low and high:
            while bits32(row[i]) & _MAGNITUDE != high:
                i += 1
            largest = row[i]
        # 2. codes; 0 where 1 / d overflows and C's conversion of the products is undefined
        d[block, 0] = step = largest / float32(-zero)
        inverse = float32(0) if step == float32(0) else float32(1) / step
        usable = abs(inverse) < _INF
        factor, offset = inverse if usable else float32(0), shift if usable else float32(0)
        for i in range(row.size):
            out[i] = uint8(min(int32(row[i] * factor + offset), most))
