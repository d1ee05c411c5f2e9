# SPDX-License-Identifier: Apache-2.0
"""Fused products one output at a time, in integers: what the vector kernels do not cover.

These are NaN and Inf, scales and groups, signed zeros, exact sums (no ``fraction_bits``) and what float64 lanes cannot
hold. Terms are integers of at most 62 bits; exact sums are held in limbs of 32 bits over all exponents.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fmtsim.cpu.cast.grid import integer_at, key_words
from fmtsim.cpu.gemm.accumulate import DOWN, STOCHASTIC, end_block
from fmtsim.cpu.gemm.ieee_chains import Scales, Step, Tile, run_chains
from fmtsim.cpu.gemm.operand_layouts import pitch_of
from fmtsim.cpu.gemm.panels import Slabs
from fmtsim.cpu.runtime.jit import bits64, device, float64_of, kernel, subroutine
from fmtsim.cpu.runtime.simd import COLUMNS
from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import CODES
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

NO_FRACTION = -1  # fraction_bits of an exact sum
_NOTHING = -(1 << 20)  # exponent of no term
_LIMBS = 144  # of 32 bits: 2^-2200 ... 2^2408
_LOWEST = -2200
_WEIGHT = 64  # the cost of a product, in elements of a cast
_NO_SCALES = np.zeros((0, 0), np.float32)


class Terms(NamedTuple):
    """A datapath and its operands as numbers."""

    fraction_bits: int  # or NO_FRACTION
    mode: int  # code of how terms are rounded
    lowest: int  # of the alignment exponent
    group: int
    emin_a: int
    emin_b: int
    lsb: int  # of products where group > 1: 2^lsb divides them all
    scale_block: int  # 0 without scales
    scale_emin: int
    signed_zero: bool
    rounding: int  # code of how the sum is rounded
    random_bits: int
    bits: int  # mantissa bits of the accumulator
    emin: int
    largest: float  # its largest value
    beyond: float  # what larger sums become: Inf, or the largest value


@device
def _take_apart(x, emin):  # type: ignore[no-untyped-def]
    """Return significand (up to 53 bits, odd or 0), exponent of its last bit, and exponent of a finite x."""
    bits = bits64(x) & 0x7FFFFFFFFFFFFFFF
    field = bits >> 52
    significand = bits & ((1 << 52) - 1)
    if field:
        significand |= 1 << 52
    else:
        field = 1
    if significand == 0:
        return np.int64(0), np.int64(0), np.int64(_NOTHING)
    last = field - 1075
    while significand & 0xFF == 0:
        significand, last = significand >> 8, last + 8
    while significand & 1 == 0:
        significand, last = significand >> 1, last + 1
    return significand, last, max(last + _length(significand) - 1, emin)


@device
def _length(n):  # type: ignore[no-untyped-def]
    """Return the bits of a positive integer below 2^62."""
    e = (bits64(np.float64(n)) >> 52) - 1022
    return e - 1 if e > 62 or n < (1 << (e - 1)) else e  # the conversion may have rounded up


@device
def _round_shift(n, shift, mode, negative, w, random_bits):  # type: ignore[no-untyped-def]
    """Return the magnitude n / 2^shift rounded to an integer."""
    if shift <= 0:
        return n << -shift
    if shift > 62:  # below a quarter: only the directed modes see it
        whole, rest, half = np.int64(0), np.int64(1 if n else 0), np.int64(4)
        shift = 3
    else:
        whole, rest, half = n >> shift, n & ((1 << shift) - 1), np.int64(1) << (shift - 1)
    if rest == 0:
        return whole
    if mode == STOCHASTIC:
        taken = rest << (random_bits - shift) if random_bits > shift else rest >> (shift - random_bits)
        return whole + 1 if taken + w >= np.int64(1) << random_bits else whole
    # the mode's truth table: round bit, sticky bit, parity, sign (rounding/modes.py)
    case = 8 * int(rest >= half) + 4 * int(rest != half) + 2 * (whole & 1) + int(negative)
    return whole + (np.int64(mode) >> case & 1)


@device
def _to_accumulator(negative, n, last, t, w):  # type: ignore[no-untyped-def]
    """Round n * 2^last, n positive with at most 62 bits, to the accumulator, and what lies above its largest value."""
    # 1. the accumulator's last place for this number; 2. rounded to it; 3. overflow and sign
    place = max(last + _length(n) - 1, t.emin) - t.bits
    if place > last:
        n, last = _round_shift(n, place - last, t.rounding, negative, w, t.random_bits), place
    y = _scaled(n, last)
    if y > t.largest:
        y = t.beyond
    return -y if negative else y


@device
def _scaled(n, e):  # type: ignore[no-untyped-def]
    """Return n * 2^e for n below 2^54."""
    y = np.float64(n)
    while e < -1000:
        y, e = y * 2.0**-500, e + 500
    while e > 1000:
        y, e = y * 2.0**500, e - 500
    return y * float64_of(np.int64(e + 1023) << 52)


@device
def _add_limbs(limbs, n, place, negative):  # type: ignore[no-untyped-def]
    """Add n * 2^place, n below 2^56, to the limbs."""
    at = place - _LOWEST
    index, shift = at >> 5, at & 31
    low, high = n & 0xFFFFFFFF, n >> 32
    low, high = low << shift, high << shift
    first, second, third = low & 0xFFFFFFFF, (low >> 32) + (high & 0xFFFFFFFF), high >> 32
    if negative:
        first, second, third = -first, -second, -third
    limbs[index] += first
    limbs[index + 1] += second
    limbs[index + 2] += third


@device
def _add_product(limbs, sa, sb, place, negative):  # type: ignore[no-untyped-def]
    """Add the product of two significands of at most 53 bits, in halves of 27 bits."""
    low = (1 << 27) - 1
    _add_limbs(limbs, (sa & low) * (sb & low), place, negative)
    middle = (sa >> 27) * (sb & low) + (sa & low) * (sb >> 27)
    _add_limbs(limbs, middle, place + 27, negative)
    _add_limbs(limbs, (sa >> 27) * (sb >> 27), place + 54, negative)


@device
def _read_limbs(limbs):  # type: ignore[no-untyped-def]
    """Return sign, the upper 60 bits and more of the magnitude with a sticky last bit, and its exponent; clear all."""
    # 1. carries, so that every limb holds 32 bits, and the sign
    carry = np.int64(0)
    for i in range(_LIMBS):
        carry += limbs[i]
        limbs[i] = carry & 0xFFFFFFFF
        carry >>= 32
    negative = carry < 0
    if negative:  # two's complement
        carry = np.int64(1)
        for i in range(_LIMBS):
            carry += limbs[i] ^ 0xFFFFFFFF
            limbs[i] = carry & 0xFFFFFFFF
            carry >>= 32
    # 2. the first limb that is not zero, and those behind it up to 60 bits
    index = _LIMBS - 1
    while index > 0 and limbs[index] == 0:
        index -= 1
    n, e = limbs[index], np.int64(32 * index + _LOWEST)
    while index > 0 and n < (1 << 28):
        index -= 1
        n, e = (n << 32) | limbs[index], e - 32
    if index > 0:  # fill up to 60 bits, and let the last stand for all that follows
        room = 60 - _length(n)
        if room > 0:
            index -= 1
            n, e = (n << room) | (limbs[index] >> (32 - room)), e - room
            n |= np.int64(1) if limbs[index] & ((1 << (32 - room)) - 1) else np.int64(0)
        # 3. the last bit stands for all that follows
        for i in range(index):
            n |= np.int64(1) if limbs[i] else np.int64(0)
    limbs[:] = 0
    return negative, n, e


@device
def _special(a, b, scale_a, scale_b, c, m, n, slots, t):  # type: ignore[no-untyped-def]
    """Return NaN or an Inf where a block or its addend has one, else 0."""
    up, down, bad = c == np.inf, c == -np.inf, np.isnan(c)
    for k in slots:
        if k < 0:
            continue
        x, y = a[m, k], b[k, n]
        p = x * y if np.isinf(x) or np.isinf(y) or np.isnan(x) or np.isnan(y) else 0.0
        if t.scale_block:
            s = np.float64(abs(scale_a[m, k // t.scale_block])) * abs(scale_b[n, k // t.scale_block])
            if not np.isfinite(s):
                sign = 1.0 if (x < 0) == (y < 0) else -1.0
                p = s * (sign if x != 0 and y != 0 else 0.0) if not np.isnan(p) else p
        bad |= np.isnan(p)
        up |= p == np.inf
        down |= p == -np.inf
    if bad or (up and down):
        return np.nan
    return np.inf if up else -np.inf if down else 0.0


@device
def _gather(a, b, scale_a, scale_b, m, n, slots, t, work):  # type: ignore[no-untyped-def]
    """Write the terms of a block to ``work`` and return how many there are.

    Columns of ``work`` (int64): significand, exponent of its last bit, exponent, sign; a second significand or 1.
    """
    count = 0
    for place in range(0, slots.size, t.group):
        total, e, term = np.int64(0), np.int64(_NOTHING), 0
        for k in slots[place : place + t.group]:
            if k < 0:
                continue
            x, y = a[m, k], b[k, n]
            sa, la, ea = _take_apart(x, t.emin_a)
            sb, lb, eb = _take_apart(y, t.emin_b)
            negative = (bits64(x) < 0) != (bits64(y) < 0)
            scale, last, e = np.int64(1), la + lb, ea + eb
            if t.scale_block:
                s1, l1, e1 = _take_apart(scale_a[m, k // t.scale_block], t.scale_emin)
                s2, l2, e2 = _take_apart(scale_b[n, k // t.scale_block], t.scale_emin)
                scale, last, e = s1 * s2, last + l1 + l2, e + e1 + e2
            elif t.group > 1:
                e1, e2, l1, l2 = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
            if t.group > 1:
                product = (sa * sb) << (la + lb - t.lsb) if sa and sb else np.int64(0)
                total += -product if negative else product
                e = max(e1, t.scale_emin) + max(e2, t.scale_emin) if t.scale_block else np.int64(0)
                work[count, 0], work[count, 1], work[count, 2] = abs(total) * scale, t.lsb + l1 + l2, e
                work[count, 3], work[count, 4], term = total < 0, 1, 1
                continue
            empty = sa == 0 or sb == 0 or scale == 0
            narrow = t.fraction_bits != NO_FRACTION or t.scale_block > 0
            work[count, 0] = np.int64(0) if empty else sa * sb * scale if narrow else sa
            work[count, 1], work[count, 2] = last, np.int64(_NOTHING) if empty else e
            work[count, 3], work[count, 4] = negative, np.int64(1) if narrow else sb
            count += 1
        count += term
    return count


@subroutine
def _block(a, b, scale_a, scale_b, c, m, n, slots, t, w, work, limbs):  # type: ignore[no-untyped-def]
    """Return the sum of a block and its addend as the unit rounds it (docs/matmul.md, section 2)."""
    # 1. NaN and Inf decide alone
    special = _special(a, b, scale_a, scale_b, c, m, n, slots, t)
    if special != 0:  # NaN as well
        return special
    # 2. terms of the block, and the addend as one more
    count = _gather(a, b, scale_a, scale_b, m, n, slots, t, work)
    sc, lc, ec = _take_apart(c, t.emin)
    work[count, 0], work[count, 1], work[count, 2] = sc, lc, ec
    work[count, 3], work[count, 4] = bits64(c) < 0, 1
    count += 1
    # 3. the alignment exponent: the largest of all terms, within the unit's bound
    any_negative, all_negative = False, True
    largest = np.int64(_NOTHING)
    for i in range(count):
        any_negative |= work[i, 3] != 0
        all_negative &= work[i, 3] != 0
        largest = max(largest, work[i, 2])
    largest = max(largest, t.lowest)
    # 4. the sum: exact, or of terms rounded to multiples of 2^(E - F)
    if t.fraction_bits == NO_FRACTION:
        for i in range(count):
            if work[i, 0]:
                _add_product(limbs, work[i, 0], work[i, 4], work[i, 1], work[i, 3] != 0)
        negative, total, last = _read_limbs(limbs)
    else:
        last, total = largest - t.fraction_bits, np.int64(0)
        for i in range(count):
            if work[i, 0]:
                minus = work[i, 3] != 0
                term = _round_shift(work[i, 0], last - work[i, 1], t.mode, minus, 0, 1)
                total += -term if minus else term
        negative, total = total < 0, abs(total)
    # 5. rounded to the accumulator; a zero is +0 but for units with signed zeros
    y = _to_accumulator(negative, total, last, t, w) if total else 0.0
    if y == 0:
        if not t.signed_zero:
            return 0.0
        if total == 0:
            negative = all_negative or (any_negative and t.rounding == DOWN)
        return -0.0 if negative else 0.0
    return y


@kernel
def add_exactly(rows, panel, scales, place, slots, block, order, sums, acc, t, draw):  # type: ignore[no-untyped-def]
    """Run all blocks of a tile, one output after the other: acc float64 [height][64], the running chains.

    scales: float32, inside the unit [R, .] and [C, .], or empty. place: the row and the column of the whole product for
    each row and column here, for random words. draw: the product's columns and rows, and the words of the key.
    """
    height, k, pitch = acc.size // COLUMNS, panel.size // COLUMNS, pitch_of(block)
    a, b = rows.reshape(height, k), panel.reshape(k, COLUMNS)
    work, limbs = np.zeros((block + 1, 5), np.int64), np.zeros(_LIMBS, np.int64)
    for index in range(order.ends.size):
        here = slots[index * pitch : index * pitch + block]
        for m in range(place[0].size):
            for n in range(place[1].size):
                w = np.int64(0)
                if t.rounding == STOCHASTIC:
                    element = (index * draw[1] + place[0][m]) * draw[0] + place[1][n]
                    w = integer_at(element, t.random_bits, False, draw[2], draw[3], draw[4], draw[5])
                c = acc[m * COLUMNS + n]
                acc[m * COLUMNS + n] = _block(a, b, scales[0], scales[1], c, m, n, here, t, w, work, limbs)
        if order.ends[index]:
            end_block(acc, order, index, height, sums)


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, key: RandomKey, out: Tensor,
    rows: np.ndarray | None = None, columns: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Write a product to out, or of it the outputs where some rows and columns meet; see the engine's ``gemm``."""
    rows = np.arange(len(a)) if rows is None else rows
    columns = np.arange(len(b)) if columns is None else columns
    if not rows.size or not columns.size:
        return
    terms, draw = terms_of(spec), (out.shape[1], out.shape[0], *key_words(key))
    taken = None if scales[0] is None else scales[0][rows], None if scales[1] is None else scales[1][columns]
    inside = [_NO_SCALES if s is None or not terms.scale_block else s.detach().numpy() for s in taken]
    part = out.new_empty(rows.size, columns.size)

    def step(slabs: Slabs) -> Step:
        def add(tile: Tile, acc, order, sums) -> None:  # type: ignore[no-untyped-def]
            place = rows[tile.row], columns[tile.column]
            tile_scales = [np.ascontiguousarray(s[at]) for s, at in zip(inside, (tile.row, tile.column), strict=True)]
            slots = slabs.whole.slots
            add_exactly(
                tile.rows, tile.panel, tuple(tile_scales), place, slots, slabs.block, order, sums, acc, terms, draw
            )

        return add

    addend = None if c is None else c[rows][:, columns]
    run_chains(a[rows], b[columns], addend, taken, spec, part, np.float64, step, _WEIGHT)
    out.numpy()[np.ix_(rows, columns)] = part.numpy()


def terms_of(spec: GemmSpec) -> Terms:
    """Return a fused unit and its operands as numbers."""
    unit = spec.datapath
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    lowest = unit.operand or spec.a, unit.operand or spec.b
    acc = unit.accumulator
    return Terms(
        fraction_bits=NO_FRACTION if unit.fraction_bits is None else unit.fraction_bits,
        mode=CODES[unit.term_rounding],
        lowest=-(1 << 20) if unit.min_exponent is None else unit.min_exponent,
        group=unit.group,
        emin_a=lowest[0].min_exponent,
        emin_b=lowest[1].min_exponent,
        lsb=sum(fmt.min_exponent - fmt.mantissa_bits for fmt in (spec.a, spec.b)),
        scale_block=unit.scale_block,
        scale_emin=0 if unit.scale is None else unit.scale.min_exponent,
        signed_zero=unit.signed_zero,
        rounding=CODES[unit.rounding.mode],
        random_bits=unit.rounding.bits,
        bits=acc.mantissa_bits,
        emin=acc.min_exponent,
        largest=acc.max,
        beyond=acc.max if acc.overflow == "saturate" else np.inf,
    )


def covers(spec: GemmSpec, block: int) -> bool:
    """Return True if 62-bit integers hold the terms and sums of a fused unit."""
    unit = spec.datapath
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    acc, rounding = unit.accumulator, unit.rounding
    if unit.fraction_bits is None and rounding.mode == "stochastic" and acc.mantissa_bits + rounding.bits > 56:
        return False  # an exact sum keeps 60 bits
    scale = 0 if unit.scale is None else 2 * (unit.scale.mantissa_bits + 1)
    bits = spec.a.mantissa_bits + spec.b.mantissa_bits + 2 + scale
    if unit.group > 1:
        span = sum(fmt.max_exponent - fmt.min_exponent for fmt in (spec.a, spec.b))
        bits += span + unit.group.bit_length()
    if unit.fraction_bits is None:
        return bits <= 62 or (unit.scale is None and unit.group == 1)
    return (
        bits <= 62
        and unit.fraction_bits
        + 4
        + (2 if scale else 0)
        + block.bit_length()
        + (scale + unit.group.bit_length() if unit.group > 1 else 0)
        <= 62
    )
