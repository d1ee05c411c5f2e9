# SPDX-License-Identifier: Apache-2.0
"""Steps between blocks, in float64 lanes: rounding to the accumulator, promotion of chains, reduction of parts."""

from typing import NamedTuple

import numpy as np
from numba import types

from fmtsim.cpu.runtime.jit import device, kernel, overload
from fmtsim.cpu.runtime.simd import (
    COLUMNS,
    LANES,
    and_,
    as_f64,
    as_i64,
    fabs,
    fadd,
    fma,
    fmul,
    fsub,
    iadd,
    int_to_f64,
    load,
    or_,
    smax,
    smin,
    splat,
    store,
    to_f32,
    to_f64,
    where_equal,
    where_less,
)
from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import CODES
from fmtsim.spec.datapath import FP32
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

SIGN, FIELD = -(1 << 63), 0x7FF << 52

EVEN, DOWN, STOCHASTIC = CODES["nearest_even"], CODES["down"], CODES["stochastic"]

CHAIN_END, PART_END = 1, 2


class Grid(NamedTuple):
    """An accumulator as numbers: lowest exponent field, shift from a number to its rounding constant, largest value."""

    lowest: np.int64
    shift: np.int64
    largest: np.float64
    kind: np.int64  # 32, 64 or 0 for anything else


class Order(NamedTuple):
    """What follows each block of a slab: nothing, the end of its chain, or that of its part as well."""

    ends: np.ndarray  # int8 [blocks]: 0, CHAIN_END or PART_END
    parts: np.ndarray  # int32 [blocks]: the part
    chains: np.ndarray  # int32 [blocks]: the place of the chain's scales


class Promotion(NamedTuple):
    """How chains join the outer sum of their part, where there is one."""

    active: bool
    successive: bool  # a chain is multiplied by its row's scale and rounded, before it is added with its column's
    grid: Grid  # of the outer sum


class Sums(NamedTuple):
    """The sums of a task beyond the running chain, and how chains join them."""

    total: np.ndarray  # float64 [rows][64]: outer sum of the running part
    parts: np.ndarray  # float64 [parts][rows][64]
    promotion: Promotion
    row_scales: np.ndarray  # float32 [chains][rows] of scaled promotion, else empty
    column_scales: np.ndarray  # float32 [chains][64]


class Reduction(NamedTuple):
    """How the parts of a product are added (docs/matmul.md, section 4, step 5)."""

    wide: bool  # in float64, instead of a float32 after every addition
    pairwise: bool
    neighbours: bool
    partial: bool  # parts are first rounded to the grid
    round_trip: bool  # and so is every sum
    in_place: bool  # parts, not rounded, are added to what the output holds, and only the sums are rounded to the grid
    grid: Grid


def grid_of(fmt: FloatFormat) -> Grid:
    """Return the numbers of an accumulator format."""
    kind = {(8, 23): 32, (11, 52): 64}.get((fmt.exponent_bits, fmt.mantissa_bits), 0)
    lowest = (max(fmt.min_exponent, -1000) + 1023) << 52
    return Grid(np.int64(lowest), np.int64((52 - fmt.mantissa_bits) << 52), np.float64(fmt.max), np.int64(kind))


def promotion_of(spec: GemmSpec) -> Promotion:
    """Return the promotion of a product's chains to its outer sum."""
    return Promotion(spec.promotes, spec.plan.successive_scales, grid_of(spec.outer))


def reduction_of(plan: GemmPlan, wide: bool) -> Reduction:
    """Return the reduction of a plan's parts; ``wide``: sums are float64."""
    grid = grid_of(plan.partial or FP32)
    in_place, rounds_parts = plan.reduce == "in_place", plan.partial is not None
    trip = rounds_parts and (plan.round_trip or in_place)
    way = plan.reduce == "pairwise", plan.reduce == "neighbours"
    return Reduction(wide, *way, rounds_parts and not in_place, trip, in_place, grid)


def begin_output(total: np.ndarray, tile: np.ndarray, given: np.ndarray | None) -> None:
    """Write what parts are added to in place: ``tile`` of ``total`` holds what is given, the rest -0.

    Adding to -0 changes nothing.
    """
    total[:] = -0.0
    if given is not None:
        tile[:] = given


@device
def nearest(x, grid):  # type: ignore[no-untyped-def]
    """Round float64 lanes to a format, to nearest even, with Inf above its largest value; NaN and Inf stay."""
    if grid.kind == 32:
        return to_f64(to_f32(x))
    if grid.kind == 64:
        return x
    return _finish(x, _even(fabs(x), _constant(x, grid)), grid)


@device
def _constant(x, grid):  # type: ignore[no-untyped-def]
    """Return 2^52 last places of x, which rounds whatever is added to it and taken away again.

    Above the largest value of every format that kernels take, where that overflows, it is the largest power of two.
    """
    field = smax(and_(as_i64(x), splat(np.int64(FIELD))), splat(grid.lowest))
    return as_f64(smin(iadd(field, splat(grid.shift)), splat(np.int64(0x7FE << 52))))


@device
def _even(magnitude, constant):  # type: ignore[no-untyped-def]
    return fsub(fadd(magnitude, constant), constant)


@device
def _finish(x, rounded, grid):  # type: ignore[no-untyped-def]
    """Give a rounded magnitude x's sign, and Inf where it is too large; NaN and Inf of x stay."""
    infinity = splat(np.float64(np.inf))
    rounded = where_less(splat(grid.largest), rounded, infinity, rounded)
    signed = as_f64(or_(as_i64(rounded), and_(as_i64(x), splat(np.int64(SIGN)))))
    return where_less(fabs(x), infinity, signed, x)


@device
def _threshold(mode, case):  # type: ignore[no-untyped-def]
    """Return Rule.threshold of a mode's code, for case 2 * odd + negative."""
    return (mode >> (4 + case) & 1) + (mode >> (8 + case) & 1) + (mode >> (12 + case) & 1)


@device
def _moves(rest, half, threshold):  # type: ignore[no-untyped-def]
    """Return 1 where the discarded rest reaches a threshold of Rule.threshold, else 0."""
    zero, one = splat(np.float64(0)), splat(np.float64(1))
    up = zero
    if threshold == 1:
        up = where_less(half, rest, one, zero)
    elif threshold == 2:
        up = where_less(rest, half, zero, one)
    elif threshold == 3:
        up = where_less(zero, rest, one, zero)
    return up


@device
def round_lanes(x, mode, grid, words, random_bits):  # type: ignore[no-untyped-def]
    """Round float64 lanes to a unit's accumulator in the mode of a code (rounding/modes.py), zeros to +0.

    ``words`` are the random integers of STOCHASTIC, variant a.
    """
    zero = splat(np.float64(0))
    if mode == EVEN or grid.kind == 64:
        rounded = nearest(x, grid)
        return where_equal(rounded, zero, zero, rounded)
    # 1. the multiple of a last place at or below the magnitude, and the rest above it
    magnitude, constant = fabs(x), _constant(x, grid)
    one = splat(np.float64(1))
    place = fmul(constant, splat(np.float64(2.0**-52)))
    low = _even(magnitude, constant)
    low = where_less(magnitude, low, fsub(low, place), low)
    rest = fsub(magnitude, low)
    half = fmul(place, splat(np.float64(0.5)))
    # 2. up where the rest reaches what the random integer lacks of 2^random_bits units, or the mode's threshold
    if mode == STOCHASTIC:
        missing = fsub(splat(np.float64(2.0**random_bits)), int_to_f64(words))
        unit = fmul(place, splat(np.float64(2.0**-random_bits)))  # rest holds floor(rest / unit) of them
        up = where_less(rest, fmul(missing, unit), zero, one)
    else:
        up = _moves(rest, half, _threshold(mode, 0))
        if (mode >> 1 ^ mode) & 0x5555:  # looks at the sign
            up = where_less(x, zero, _moves(rest, half, _threshold(mode, 1)), up)
        if (mode >> 2 ^ mode) & 0x3333:  # looks at the candidate's parity
            up_odd = _moves(rest, half, _threshold(mode, 2))
            if (mode >> 1 ^ mode) & 0x5555:
                up_odd = where_less(x, zero, _moves(rest, half, _threshold(mode, 3)), up_odd)
            up = where_equal(_even(low, fadd(constant, constant)), low, up, up_odd)
    # 3. one place more, sign, overflow to Inf
    rounded = _finish(x, fma(up, place, low), grid)
    return where_equal(rounded, zero, zero, rounded)


@device
def _add(total, chain, scaled, row_scale, column_scales, promotion):  # type: ignore[no-untyped-def]
    """Return total + chain, or chain * scales + total with one rounding; float64 sums of float32 are innocuous.

    (Two numbers of at most 25 bits, added in float64 and rounded again to 25 bits or fewer, give the right result.)
    """
    if scaled:
        p, scale = to_f32(chain), splat(row_scale)
        if promotion.successive:
            return to_f64(fma(fmul(p, scale), column_scales, to_f32(total)))
        return to_f64(fma(p, fmul(scale, column_scales), to_f32(total)))
    return nearest(fadd(total, chain), promotion.grid)


@overload
def _wide(vector):  # type: ignore[no-untyped-def]
    """Return lanes as float64."""
    if vector.dtype == types.float32:
        return lambda vector: to_f64(vector)
    return lambda vector: vector


@overload
def _clear(sums, at):  # type: ignore[no-untyped-def]
    """Write zeros of the array's dtype."""
    if sums.dtype == types.float32:
        return lambda sums, at: store(sums, at, splat(np.float32(0)))
    return lambda sums, at: store(sums, at, splat(np.float64(0)))


@device
def end_block(acc, order, index, rows, sums):  # type: ignore[no-untyped-def]
    """Follow a plan after block ``index`` of a slab, for the running chains acc [rows][64] of all rows.

    A chain that ends is added to the part's outer sum and restarts at +0, where something promotes; a part that ends
    is kept, and both sums restart.
    """
    part, chain = order.parts[index], order.chains[index]
    scaled = sums.row_scales.size > 0
    columns = splat(np.float32(0))
    for at in range(0, rows * COLUMNS, LANES):
        row = at // COLUMNS
        if scaled:
            columns = load(sums.column_scales, chain * COLUMNS + at % COLUMNS)
        # 1. a chain ends: it joins the outer sum where something promotes
        total = _wide(load(acc, at))
        if sums.promotion.active:
            scale = sums.row_scales[chain * rows + row] if scaled else np.float32(0)
            total = _add(load(sums.total, at), total, scaled, scale, columns, sums.promotion)
            store(sums.total, at, total)
        _clear(acc, at)
        # 2. a part ends: its sum is stored, and the outer sum restarts
        if order.ends[index] == PART_END:
            store(sums.parts, part * rows * COLUMNS + at, total)
            _clear(sums.total, at)


@kernel
def add_on_stack(sums, top, additions, like):  # type: ignore[no-untyped-def]
    """Add the sum in slot ``top`` to the one below, that one to the next, and so on: each has like's size and type."""
    grid = Grid(np.int64(0), np.int64(0), np.float64(0), np.int64(8 * like.itemsize))
    for slot in range(top - 1, top - 1 - additions, -1):
        for at in range(slot * like.size, (slot + 1) * like.size, LANES):
            store(sums, at, nearest(fadd(load(sums, at), load(sums, at + like.size)), grid))


@kernel
def reduce_parts(parts, count, rows, how, out):  # type: ignore[no-untyped-def]
    """Add the parts [count][rows][64] as a Reduction says; in place, to what ``out`` holds. Parts are overwritten."""
    size = rows * COLUMNS
    single = Grid(np.int64(0), np.int64(0), np.float64(0), np.int64(64 if how.wide else 32))
    half = (count + 1) // 2
    terms = half if how.pairwise and count > 1 else 0 if how.pairwise else count
    if how.neighbours:
        _add_neighbours(parts, count, size, how, single)
        out[:size] = parts[:size]
        return
    for at in range(0, size, LANES):
        result = load(out, at) if how.in_place else _part(parts, count - 1 if how.pairwise else 0, size, at, how)
        for i in range(0 if how.pairwise or how.in_place else 1, terms):
            term = _part(parts, i, size, at, how)
            # pairwise: part i and the one half the parts further are added first
            if how.pairwise and i + half < count - 1:
                term = nearest(fadd(term, _part(parts, i + half, size, at, how)), single)
                if how.round_trip:
                    term = nearest(term, how.grid)
            result = nearest(fadd(result, term), single)
            if how.round_trip:
                result = nearest(result, how.grid)
        store(out, at, result)


@kernel
def _add_neighbours(parts, count, size, how, single):  # type: ignore[no-untyped-def]
    """Add the parts in place: each and the next one, down to one, where of an odd number the first waits."""
    if how.partial:
        for at in range(0, count * size, LANES):
            store(parts, at, nearest(load(parts, at), how.grid))
    while count > 1:
        odd, count = count % 2, count // 2
        for i in range(count):
            for at in range(0, size, LANES):
                left = (odd + 2 * i) * size + at
                result = nearest(fadd(load(parts, left), load(parts, left + size)), single)
                if how.round_trip:
                    result = nearest(result, how.grid)
                store(parts, (odd + i) * size + at, result)
        count += odd


@device
def _part(parts, index, size, at, how):  # type: ignore[no-untyped-def]
    number = load(parts, index * size + at)
    return nearest(number, how.grid) if how.partial else number
