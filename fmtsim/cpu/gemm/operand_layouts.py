# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products: what kernels read from tensors, and the layouts that they work on.

A *slot* is a place in the order of products that a plan gives; ``order[slot]`` is its index along K, or -1 where
zeros fill up. Block b begins at slot ``b * pitch_of(block)``. Rows of the first operand lie as ``[group][row][slot]``
with GROUPs of 64 slots, or of a block where that is longer; the second operand comes in panels of 64 columns,
``[slot][column]``.

Packing goes slab by slab: values, exponents and signs, as the kernels of aligned sums want them. Where terms are
truncated, zeros become ``TINY`` with their sign: a product with one is truncated to zero, and its sign is the product
of two signs, as everywhere else. NaN and Inf become zeros, and their rows and columns are marked.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from fmtsim.cpu.gemm.operand_reads import NO_TABLE, are_neighbours, fetch, gather_panel, gather_row
from fmtsim.cpu.runtime.jit import borrowing, kernel, overload, subroutine
from fmtsim.cpu.runtime.simd import (
    COLUMNS,
    LANES,
    PARTS,
    and_,
    any_bits,
    as_f32,
    as_f64,
    as_i32,
    as_i64,
    fmul,
    iadd,
    isub,
    largest,
    load,
    lshr,
    or_,
    pack_bytes,
    sext64,
    shl,
    sign_bits,
    smallest,
    smax,
    smin,
    splat,
    store,
    swap1,
    to_f64,
    to_i32,
    trunc16,
    weave,
    where_below,
    where_same,
    xor,
)
from fmtsim.formats.element import FloatFormat
from fmtsim.spec.datapath import Datapath

EMPTY = -16384  # exponent of a zero
TOP_BYTE = 127  # byte of the largest exponent of a row or panel; zeros have 0, other numbers at least 64


class Source(NamedTuple):
    """An operand as the packing kernels read it.

    ``array`` [rows, K] is float32, uint8 codes of ``table``, bfloat16 as int16 or binary16 as uint16; ``scales``
    [rows, ceil(K / every)] is float32, or empty. ``emin`` and ``top`` bound the exponents of a number, ``bits`` counts
    those of a significand, scale included.
    """

    array: np.ndarray
    table: np.ndarray
    emin: int
    top: int
    bits: int
    scales: np.ndarray
    every: int
    scale_emin: int

    def part(self, first: int, count: int) -> "Source":
        """Return ``count`` rows from ``first`` on, contiguous along K."""
        rows = slice(first, first + count)
        return self._replace(array=np.ascontiguousarray(self.array[rows]), scales=self.scales[rows])


def is_fixed(source: Source) -> bool:
    """Return True if bytes hold the exponents of all values of an operand's format."""
    return source.top - source.emin <= TOP_BYTE // 2 and source.scales.size == 0


def limits_of(unit: Datapath, head: int, k: int) -> tuple[int, int]:
    """Return the smallest and largest product exponent for which no sum leaves the accumulator's normal range.

    ``head`` counts the bits of a term above its exponent, ``k`` the products of a sum.
    """
    fmt = unit.accumulator
    lowest = fmt.min_exponent - fmt.mantissa_bits + (unit.fraction_bits or 0)
    lowest = max(lowest, fmt.min_exponent)  # a subnormal sum has no exponent of its own
    lowest = lowest if unit.min_exponent is None else max(lowest, unit.min_exponent)
    return lowest, fmt.max_exponent - 1 - head - k.bit_length()


def without_scales(source: Source) -> Source:
    """Return an operand without its scales."""
    return source._replace(scales=_NO_SCALES)


_NO_SCALES = np.zeros((0, 0), np.float32)


def source_of(fmt: FloatFormat, unit: Datapath, scaled: bool) -> Source:
    """Return the Source of a format before its data are known: small arrays stand in for them."""
    lowest = fmt if unit.operand is None else unit.operand
    emin, bits, nothing = max(lowest.min_exponent, -126), fmt.mantissa_bits + 1, np.zeros((1, 1), np.float32)
    if unit.scale is None or not scaled:
        return Source(nothing, NO_TABLE, emin, fmt.max_exponent, bits, _NO_SCALES, 1, 0)
    top, bits = fmt.max_exponent + unit.scale.max_exponent, bits + unit.scale.mantissa_bits + 1
    return Source(nothing, NO_TABLE, emin, top, bits, nothing, unit.scale_block, max(unit.scale.min_exponent, -127))


@register_jitable
def pitch_of(block: int) -> int:
    """Return the slots from one block to the next: its length where that divides 64, else whole 64s."""
    return block if 64 % block == 0 else (block + 63) // 64 * 64


class Rows(NamedTuple):
    """The first operand of a slab."""

    values: np.ndarray  # float64 or float32 [group][row][slot], times 1 + eps
    exponents: np.ndarray  # int32 [group][row][slot]: a byte four times, or a half twice
    signs: np.ndarray  # int32 [block][word][row]
    top: np.ndarray  # int32 [row]: the largest exponent


class Panel(NamedTuple):
    """The second operand of a slab, 64 columns.

    Where values are float64 and exponents bytes, exponents and signs lie in the order of ``simd.weave``.
    """

    values: np.ndarray  # [slot][64]
    exponents: np.ndarray  # int8, as pack_bytes orders them, or int16 [slot][64]
    signs: np.ndarray  # int32 [block][word][64]
    top: np.int32  # the largest exponent


class Grouped(NamedTuple):
    """An operand of a unit with groups: values, and for each group a scale and its exponent.

    ``values`` as in Rows or Panel, or int32; ``scales`` float64 and ``exponents`` [group][row], or [group][64].
    """

    values: np.ndarray
    scales: np.ndarray
    exponents: np.ndarray
    rows: int


TINY64, TINY32 = 2.0**-900, 2.0**-100
HAS_NAN, HAS_INF = 1, 2
GROUP = 64  # slots of a row that lie side by side, unless a block is longer
_AHEAD = 8  # rows


@borrowing
def _exponents(numbers, emin):  # type: ignore[no-untyped-def]
    # 1. the exponent field, subnormals at the lowest; 2. zeros, NaN and Inf count as empty
    bits = as_i32(numbers)
    field = and_(lshr(bits, splat(np.int32(23))), splat(np.int32(255)))
    e = smax(isub(field, splat(np.int32(127))), splat(np.int32(emin)))
    nothing = splat(np.int32(EMPTY))
    e = where_same(and_(bits, splat(np.int32(0x7FFFFFFF))), splat(np.int32(0)), nothing, e)
    return where_same(field, splat(np.int32(255)), nothing, e)


@borrowing
def _scaled_exponents(numbers, raw_scales, at, emin, scale_emin):  # type: ignore[no-untyped-def]
    """Return the exponents of numbers, plus those of the scales from ``at`` on, where there are scales."""
    e = _exponents(numbers, emin)
    if raw_scales.size == 0:
        return e
    nothing = splat(np.int32(EMPTY))
    scale_e = _exponents(load(raw_scales, at), scale_emin)
    both = where_same(scale_e, nothing, nothing, iadd(e, scale_e))
    return where_same(e, nothing, nothing, both)


@borrowing
def _scale_at(scales, at):  # type: ignore[no-untyped-def]
    return load(scales, at) if scales.size else splat(np.float32(1))


@borrowing
def _range(raw, raw_scales, start, stop, step, emin, scale_emin, seen):  # type: ignore[no-untyped-def]
    """Return largest and smallest exponent of the vectors of raw at range(start, stop, step), and marks of lanes.

    Marks are added to those of ``seen``.
    """
    tops, lows = splat(np.int32(EMPTY)), splat(np.int32(-EMPTY))
    infinity, nothing = splat(np.int32(0x7F800000)), splat(np.int32(0))
    for at in range(start, stop, step):
        numbers = load(raw, at)
        e = _scaled_exponents(numbers, raw_scales, at, emin, scale_emin)
        tops = smax(tops, e)
        lows = smin(lows, where_same(e, splat(np.int32(EMPTY)), splat(np.int32(-EMPTY)), e))
        magnitude = and_(as_i32(numbers), splat(np.int32(0x7FFFFFFF)))
        seen = or_(seen, where_same(magnitude, infinity, splat(np.int32(HAS_INF)), nothing))
        seen = or_(seen, where_below(infinity, magnitude, splat(np.int32(HAS_NAN)), nothing))
        if raw_scales.size:
            scale = as_i32(load(raw_scales, at))
            seen = or_(seen, where_same(scale, infinity, splat(np.int32(HAS_INF)), nothing))
            seen = or_(seen, where_below(infinity, scale, splat(np.int32(HAS_NAN)), nothing))
    return largest(tops), smallest(lows), seen


@overload
def _put_values(values, at, numbers, scale, e, factor, tiny):  # type: ignore[no-untyped-def]
    """Store numbers times a factor as float32 or integers, or times scales as float64; zeros are TINY, or zero."""
    sign = -(1 << 31)
    tiny32, tiny64 = int(np.float32(TINY32).view(np.int32)), int(np.float64(TINY64).view(np.int64))
    if values.dtype == types.float32:

        def put(values, at, numbers, scale, e, factor, tiny):  # type: ignore[no-untyped-def]
            bits = as_i32(fmul(numbers, splat(np.float32(factor))))
            zero = or_(splat(np.int32(tiny32 if tiny else 0)), and_(bits, splat(np.int32(sign))))
            store(values, at, as_f32(where_same(e, splat(np.int32(EMPTY)), zero, bits)))

        return put
    if values.dtype == types.int32:

        def put_integers(values, at, numbers, scale, e, factor, tiny):  # type: ignore[no-untyped-def]
            nothing = splat(np.int32(0))
            finite = as_f32(where_same(e, splat(np.int32(EMPTY)), nothing, as_i32(numbers)))
            store(values, at, to_i32(fmul(finite, splat(np.float32(factor)))))

        return put_integers

    def put_wide(values, at, numbers, scale, e, factor, tiny):  # type: ignore[no-untyped-def]
        bits = as_i32(numbers)
        empty = where_same(e, splat(np.int32(EMPTY)), splat(np.int32(-1)), splat(np.int32(0)))
        clean = as_f32(or_(and_(bits, splat(np.int32(sign))), and_(bits, xor(empty, splat(np.int32(-1))))))
        zero = and_(sext64(empty), splat(np.int64(tiny64 if tiny else 0)))
        clean64 = fmul(fmul(to_f64(clean), to_f64(scale)), splat(np.float64(factor)))
        store(values, at, as_f64(or_(as_i64(clean64), zero)))

    return put_wide


@overload
def _join_lanes(values, at):  # type: ignore[no-untyped-def]
    """Put integers of neighbouring lanes together as halves, in the even lanes."""
    if values.dtype != types.int32:
        return lambda values, at: None

    def join(values, at):  # type: ignore[no-untyped-def]
        numbers = load(values, at)
        store(values, at, _halves(numbers, swap1(numbers)))

    return join


@overload
def _join_slots(values, at):  # type: ignore[no-untyped-def]
    """Put integers of a vector of a slot and of the next slot together as halves, in the first."""
    if values.dtype != types.int32:
        return lambda values, at: None
    return lambda values, at: store(values, at, _halves(load(values, at), load(values, at + COLUMNS)))


@borrowing
def _halves(low, high):  # type: ignore[no-untyped-def]
    return or_(and_(low, splat(np.int32(0xFFFF))), shl(high, splat(np.int32(16))))


@overload
def _put_exponents(exponents, at, e, top, woven):  # type: ignore[no-untyped-def]
    """Store exponents as bytes below TOP_BYTE where the array holds int8, else as they are in int16."""
    if exponents.dtype == types.int8:

        def put(exponents, at, e, top, woven):  # type: ignore[no-untyped-def]
            codes = pack_bytes(_codes(e, top))
            store(exponents, at, weave(codes) if woven else codes)

        return put

    def put_halves(exponents, at, e, top, woven):  # type: ignore[no-untyped-def]
        store(exponents, at, trunc16(e))

    return put_halves


@borrowing
def _spread_row(raw, scales, start, place, source, factor, narrow, top, values, exponents):  # type: ignore[no-untyped-def]
    """Write 64 numbers of a row, raw[start:], to ``place`` of the first operand; return their signs, a bit each."""
    signs = np.uint64(0)
    for n in range(0, GROUP, LANES):
        numbers = load(raw, start + n)
        e = _scaled_exponents(numbers, scales, start + n, source.emin, source.scale_emin)
        _put_values(values, place + n, numbers, _scale_at(scales, start + n), e, factor, factor > 1)
        _join_lanes(values, place + n)
        store(exponents, place + n, _byte_copies(e, top) if narrow else _half_copies(e))
        signs |= sign_bits(as_i32(numbers)) << np.uint64(n)
    return signs


@borrowing
def _put_signs(words, at, step, signs, block, pitch, blocks):  # type: ignore[no-untyped-def]
    """Write signs of 64 slots, a bit each, as words of 32 slots of a block, to words[at], words[at + step] ...

    ``blocks`` begin in them at every ``pitch``, or one goes on, of which ``block`` slots are left.
    """
    for first in range(0, blocks * pitch, pitch):
        for slot in range(0, min(block, GROUP), 32):
            taken = np.uint64((1 << min(32, block - slot)) - 1)
            words[at] = np.int32((signs >> np.uint64(first + slot)) & taken)
            at += step


@borrowing
def _codes(e, top):  # type: ignore[no-untyped-def]
    """Return exponents as bytes below TOP_BYTE, 0 for zeros."""
    code = iadd(e, splat(np.int32(TOP_BYTE - top)))
    return where_same(e, splat(np.int32(EMPTY)), splat(np.int32(0)), code)


@borrowing
def _byte_copies(e, top):  # type: ignore[no-untyped-def]
    code = _codes(e, top)
    code = or_(code, shl(code, splat(np.int32(8))))
    return or_(code, shl(code, splat(np.int32(16))))


@borrowing
def _half_copies(e):  # type: ignore[no-untyped-def]
    return or_(and_(e, splat(np.int32(0xFFFF))), shl(e, splat(np.int32(16))))


@kernel
def pack_rows(source, start, stop, order, block, given, factor, narrow, raw, scales, rows, low, marks):  # type: ignore[no-untyped-def]
    """Pack rows start ... stop - 1 of a Source in slot order; rows behind its last are zeros.

    ``raw`` and ``scales`` are float32 buffers [rows][slots, in whole vectors], the latter empty without scales. ``low``
    and ``marks`` (int32 [rows]) take the smallest exponents and further marks. ``factor`` is 1 + eps. With ``narrow``
    exponents become bytes below the largest of each row, or below ``given`` where that is not EMPTY; False is
    returned, and nothing packed, where those of a row lie too far apart for that.
    """
    slots = order.size
    padded = (slots + GROUP - 1) // GROUP * GROUP
    array, table, raw_scales, top = source.array, source.table, source.scales, rows.top
    run, scaled = are_neighbours(array, order), raw_scales.size > 0
    for row in range(start, stop):
        first = row * padded
        if run:
            fetch(array, row + _AHEAD, order[0], slots)
        gather_row(array, table, row, order, run, 1, raw, first)
        if scaled:
            gather_row(raw_scales, table, row, order, False, source.every, scales, first)
        for slot in range(first + slots, first + padded):
            raw[slot] = np.float32(0)
            if scaled:
                scales[slot] = np.float32(0)
        # exponents of a row, and whether bytes can hold them
        none, end = splat(np.int32(0)), first + padded
        most, low[row], mark = _range(raw, scales, first, end, LANES, source.emin, source.scale_emin, none)
        top[row] = max(most, source.emin) if given == EMPTY else given
        marks[row] |= any_bits(mark)
        if narrow and top[row] - low[row] > TOP_BYTE // 2:
            return False
    # 64 slots of all rows, then the next: memory is written in order
    count, pitch, words = top.size, pitch_of(block), (block + 31) // 32
    group, values, exponents, signs = max(pitch, GROUP), rows.values, rows.exponents, rows.signs
    for at in range(0, padded, GROUP):
        place = at // group * count * group + at % group
        first_word = (at // pitch * words + at % pitch // 32) * count
        blocks = min(max(GROUP // pitch, 1), signs.size // (words * count) - at // pitch)
        left = block - at % pitch
        for row in range(start, stop):
            bits = _spread_row(
                raw, scales, row * padded + at, place + row * group, source, factor, narrow, top[row], values, exponents
            )
            _put_signs(signs, first_word + row, count, bits, left, pitch, blocks)
    return True


@borrowing
def _spread_panel(raw, scales, slots, block, source, top, factor, tiny, values, exponents, signs):  # type: ignore[no-untyped-def]
    words, pitch = (block + 31) // 32, pitch_of(block)
    woven = values.itemsize == 8 and exponents.itemsize == 1  # as ``truncate64`` takes them
    for part in range(slots // pitch * words * PARTS):
        # a word of signs in each lane: 32 slots of a block, a vector of columns
        n, w = part % PARTS * LANES, part // PARTS
        first, word = w // words * pitch, splat(np.int32(0))
        for j in range(w % words * 32, min(block, w % words * 32 + 32)):
            at = (first + j) * COLUMNS + n
            numbers = load(raw, at)
            e = _scaled_exponents(numbers, scales, at, source.emin, source.scale_emin)
            _put_values(values, at, numbers, _scale_at(scales, at), e, factor, tiny)
            if j % 2:
                _join_slots(values, at - COLUMNS)
            _put_exponents(exponents, at, e, top, woven)
            word = or_(word, shl(lshr(as_i32(numbers), splat(np.int32(31))), splat(np.int32(j & 31))))
        store(signs, w * COLUMNS + n, weave(word) if woven else word)


@subroutine
def pack_panel(source, first, order, block, given, factor, tiny, raw, scales, values, exponents, signs, marks):  # type: ignore[no-untyped-def]
    """Pack columns first ... first + 63 of the product, rows of a Source, in slot order.

    Return their largest exponent (or ``given``, unless it is EMPTY) and the smallest. Rows behind the last are zeros.
    ``raw`` and ``scales`` are float32 buffers [slots][64], the latter empty without scales. ``values`` is float32,
    float64, or int32, which holds numbers times ``factor``, two slots in each at the even one. ``exponents`` is int16,
    or int8, which is left unfilled where the two lie too far apart for bytes. ``marks`` (int32 [64]) are added to.
    ``tiny`` says that zeros become TINY.
    """
    gather_panel(source.array, source.table, first, order, 1, raw)
    if scales.size:
        gather_panel(source.scales, source.table, first, order, source.every, scales)
    top, low = np.int32(source.emin), np.int32(-EMPTY)
    for n in range(0, COLUMNS, LANES):
        end, seen = order.size * COLUMNS, load(marks, n)
        most, least, seen = _range(raw, scales, n, end, COLUMNS, source.emin, source.scale_emin, seen)
        store(marks, n, seen)
        top, low = max(top, most), min(low, least)
    if given != EMPTY:
        top = np.int32(given)
    if exponents.itemsize == 2 or top - low <= TOP_BYTE // 2:
        _spread_panel(raw, scales, order.size, block, source, top, factor, tiny, values, exponents, signs)
    return top, low
