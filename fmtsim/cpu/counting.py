# SPDX-License-Identifier: Apache-2.0
"""What a cast did to a tensor, counted in one read of its elements and of their quantised values."""

import numpy as np
import torch
from numpy import float32, int32, int64

from fmtsim.cpu.runtime import simd
from fmtsim.cpu.runtime.jit import kernel, subroutine
from fmtsim.cpu.runtime.pool import array_of, run, threads_for


def weighted_sums(
    words: torch.Tensor, multipliers: torch.Tensor, masks: tuple[int, int] = (0, 0)
) -> tuple[torch.Tensor, int]:
    """Return the sums of each row's runs, int64 [rows, runs], ``sum(word * multiplier)`` modulo 2**64, and a largest.

    Args:
        words: [rows, width] of int8, int16 or int32, contiguous.
        multipliers: int64: as many as a run has words; the last run of a row may be shorter.
        masks: The largest is that of all ``word & masks[0]`` and ``(word >> 16) & masks[1]``: the bits of the largest
            magnitude where words hold floats. It costs no second read.
    """
    rows, width = words.shape
    out = np.empty((rows, -(-width // multipliers.shape[0])), np.int64)
    arrays = words.numpy(), multipliers.numpy(), out
    if threads_for(words.numel()) == 1:
        return torch.from_numpy(out), _sums(*arrays, *masks, 0, rows)
    found: list[int] = []
    run(lambda start, stop: found.append(_sums(*arrays, *masks, start, stop)), rows, 1, width)
    return torch.from_numpy(out), max(found)


@kernel
def _sums(words, multipliers, out, low, high, start, stop):  # type: ignore[no-untyped-def]
    size = multipliers.size
    low, high, largest = int32(low), int32(high), int32(0)
    for row in range(start, stop):
        for part in range(out.shape[1]):
            first = part * size
            count = min(size, words.shape[1] - first)
            numbers = words[row, first : first + count]
            total = int64(0)
            for i in range(np.int64(count)):
                word = int32(numbers[i])
                total += int64(word) * multipliers[i]
                largest = max(largest, max(word & low, (word >> int32(16)) & high))
            out[row, part] = total
    return largest


EXPONENTS = 277  # of float32: -149 to 127
_SPAN = 4096  # columns that are summed together, whatever thread has them
_TABLES = 4  # of exponents: neighbours often have the same, and a count would wait for the last
_INFINITY, _MAGNITUDE, _NORMAL = int32(0x7F800000), int32(0x7FFFFFFF), int32(1 << 23)
_KEPT, _BEYOND, _STRANGE = int32(1), int32(1 << 10), int32(1 << 20)  # three counters in a word; a lane has _SPAN / 64


def count_cast(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], limits: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count elements of x, which were cast to q; those that are NaN or infinite enter their own count alone.

    Each row's spans of 4096 columns are summed in 64 interleaved chains, and then the spans' sums in order: no number
    of threads changes a sum.

    Args:
        x, q: Contiguous float32 matrices.
        scales: Of the blocks of x, float32 [blocks, blocks].
        block: Rows and columns of a block.
        limits: Lowest and highest x / scale that are not saturated.

    Returns:
        float64 [6]: elements whose q is not zero, saturated ones, those that are not finite, the largest magnitude,
        sums of squares of x and of x - q, which is rounded to float32. int64 [2, 277]: exponents of x and of x / scale.
    """
    spans = -(-x.shape[1] // _SPAN)
    sums, found = np.empty((x.shape[0] * spans, 2)), []
    arrays = [array_of(tensor) for tensor in (x, q, scales)]
    with np.errstate(over="ignore"):  # of float32 itself nothing finite lies beyond the limit
        bounds = np.array(limits, np.float64).astype(np.float32)

    def part(start: int, stop: int) -> None:
        counts, tables = np.zeros(4, np.int64), np.zeros((2, _TABLES, 256), np.int64)
        small = np.zeros((2, EXPONENTS), np.int64)
        _count(*arrays, *block, bounds, spans, sums, counts, tables, small, start, stop)
        small[:, 23:] += tables.sum(1)[:, 1:255]
        found.append((counts, small))

    run(part, len(sums), 1, min(x.shape[1], _SPAN))
    counts = np.sum([each for each, _ in found], axis=0)
    amax = np.int32(max(each[3] for each, _ in found)).view(np.float32)
    exponents = np.sum([each for _, each in found], axis=0)
    return torch.tensor([*counts[:3], amax, *sums.sum(0)], dtype=torch.float64), torch.from_numpy(exponents)


# In one piece: vectors that go through inlined helpers cost the loop half as much time again.
@kernel
def _count(x, q, scales, rows, columns, limits, spans, sums, counts, tables, small, start, stop):  # type: ignore[no-untyped-def]
    lanes = simd.LANES
    scale = np.ones(_SPAN + lanes, np.float32)
    last_x, last_q = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    fields, words, squares = np.empty((2, lanes), np.int32), np.empty(lanes, np.int32), np.empty((2, lanes), np.float64)
    none, zero, infinity = simd.splat(int32(0)), simd.splat(float32(0)), simd.splat(_INFINITY)
    magnitude, shift, normal = simd.splat(_MAGNITUDE), simd.splat(int32(23)), simd.splat(_NORMAL)
    low, high = simd.splat(limits[0]), simd.splat(limits[1])
    top, shown = none, int64(-1)
    for item in range(start, stop):
        row, first = item // spans, item % spans * _SPAN
        width = min(x.shape[1] - first, _SPAN)
        if row // rows * spans + item % spans != shown:  # scales of this span's columns
            shown = row // rows * spans + item % spans
            _repeat(scales[row // rows], first, width, columns, scale)
        signal = noise = simd.splat(0.0)
        word = none
        for i in range(0, width, lanes):
            part_x, part_q, place = x[row], q[row], first + i
            if i + lanes > width:  # as many in all rows: what lies behind them stays zero
                last_x[: width - i], last_q[: width - i] = part_x[place:][: width - i], part_q[place:][: width - i]
                part_x, part_q, place = last_x, last_q, int64(0)
            v = simd.load(part_x, place)
            size = simd.and_(simd.as_i32(v), magnitude)
            v = simd.where_below(size, infinity, v, zero)
            to = simd.where_below(size, infinity, simd.load(part_q, place), zero)
            word = simd.iadd(word, simd.where_below(size, infinity, none, simd.splat(_STRANGE)))
            word = simd.iadd(word, simd.where_equal(to, zero, none, simd.splat(_KEPT)))  # NaN is kept
            size = simd.where_below(size, infinity, size, none)
            top = simd.smax(top, size)
            wide, error = simd.to_f64(v), simd.to_f64(simd.fsub(v, to))
            signal, noise = simd.fma(wide, wide, signal), simd.fma(error, error, noise)
            seen = simd.fdiv(v, simd.load(scale, i))
            word = simd.iadd(word, simd.where_less(high, seen, simd.splat(_BEYOND), none))
            word = simd.iadd(word, simd.where_less(seen, low, simd.splat(_BEYOND), none))
            scaled = simd.and_(simd.as_i32(seen), magnitude)
            simd.store(fields[0], 0, simd.lshr(size, shift))
            simd.store(fields[1], 0, simd.lshr(scaled, shift))
            _tally(fields, tables)
            if simd.any_bits(simd.where_below(size, normal, size, none)):
                simd.store(words, 0, size)
                _subnormals(words, small[0])
            if simd.any_bits(simd.where_below(scaled, normal, scaled, none)):
                simd.store(words, 0, scaled)
                _subnormals(words, small[1])
        simd.store(words, 0, word)
        simd.store(squares[0], 0, signal)
        simd.store(squares[1], 0, noise)
        _finish(words, squares, counts, sums[item])
    counts[3] = simd.largest(top)


@subroutine
def _repeat(scales, first, width, columns, out):  # type: ignore[no-untyped-def]
    """Write the scale of each of a span's columns."""
    if columns == 1:
        out[:width] = scales[first : first + width]
        return
    i = 0
    while i < width:
        stop = min(width, (first + i) // columns * columns + columns - first)
        out[i:stop] = scales[(first + i) // columns]
        i = stop


@subroutine
def _tally(fields, tables):  # type: ignore[no-untyped-def]
    for i in range(0, simd.LANES, _TABLES):
        for j in range(_TABLES):
            for k in range(2):
                tables[k, j, np.uint8(fields[k, i + j])] += 1


@subroutine
def _subnormals(words, counts):  # type: ignore[no-untyped-def]
    """Count the exponents of subnormal float32 numbers by their bits: 2**-149 is 1."""
    for word in words:
        if 0 < word < _NORMAL:
            exponent = 0
            while word >> (exponent + 1):
                exponent += 1
            counts[exponent] += 1


@subroutine
def _finish(words, squares, counts, sums):  # type: ignore[no-untyped-def]
    """Add a span's counters to the counts, and write its sums of squares."""
    for word in words:
        counts[0] += word & 1023
        counts[1] += word >> 10 & 1023
        counts[2] += word >> 20
    for k in range(2):
        total = 0.0
        for square in squares[k]:
            total += square
        sums[k] = total
