# SPDX-License-Identifier: Apache-2.0
"""A step of Madam in one pass on weights that are kept as logarithms, whose codes move by integers.

The definition is fmtsim/optim/rules.py; the bits are the same.
"""

import numpy as np
import torch
from numpy import float32, int32

from fmtsim.engines.cpu.optim.moments import arrays_of, count_infinite, dropped, is_infinite, put_back
from fmtsim.engines.cpu.runtime import simd
from fmtsim.engines.cpu.runtime.jit import device, kernel
from fmtsim.engines.cpu.runtime.pool import run
from fmtsim.formats.spec import LogFormat
from fmtsim.spec.optimizer import Numbers

BITS = 16


def step_logarithms(
    rounded: bool,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    second: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    fmt: LogFormat,
    numbers: Numbers,
    zeroing: bool,
) -> int:
    """Do a step of Madam on weights that are kept as logarithms, in place; return what ``step_codes`` returns.

    Args:
        rounded: Directions are rounded to integers.
        parameter, gradient, second: float32, contiguous: where the weights' values go, the gradient, the moment.
        codes, scale: Of the weights, int16 and float32 [1].
        fmt: Theirs, of 16 bits.
        numbers, zeroing: As of ``step_codes``.
    """
    arrays = arrays_of([parameter, gradient, second, codes])
    octave = np.zeros(fmt.gamma, np.float32)
    octave[: fmt.max_code + 1] = fmt.magnitudes[: fmt.gamma]
    rest = octave.view(np.int32), np.array(numbers, np.float32), fmt.gamma, fmt.gamma.bit_length() - 1, float(scale)
    whole = arrays[0].size // simd.LANES * simd.LANES
    counts: list[int] = []

    def part(of: list[np.ndarray], start: int, stop: int) -> None:
        counts.append(_logarithms(*of, *rest, rounded, zeroing, start, stop))

    run(lambda start, stop: part(arrays, start, stop), whole, simd.LANES)
    if whole < arrays[0].size:
        last = [np.zeros(simd.LANES, array.dtype) for array in arrays]
        for padded, array in zip(last, arrays, strict=True):
            padded[: array.size - whole] = array[whole:]
        part(last, 0, simd.LANES)
        put_back(last, arrays, whole)
    return sum(counts)


@kernel
def _logarithms(p, g, v, codes, octave, numbers, gamma, shift, scale, rounded, zeroing, start, stop):
    bad = 0
    bound, top = numbers[10], simd.splat(int32(0x7FFF))
    rate, most = simd.splat(float32(numbers[9] * float32(gamma))), simd.splat(float32(65536.0))
    for i in range(start, stop, simd.LANES):
        y = simd.load(g, i)
        infinite = is_infinite(y)
        bad += simd.largest(infinite) and count_infinite(g, i, simd.LANES)
        square = simd.fmul(simd.fmul(y, simd.splat(numbers[6])), y)
        v_new = simd.fadd(simd.fmul(simd.load(v, i), simd.splat(numbers[5])), square)
        n = simd.fdiv(y, simd.sqrt(simd.fdiv(v_new, simd.splat(numbers[7]))))
        n = _within(simd.where_equal(n, n, n, simd.splat(float32(0.0))), simd.splat(bound))
        n = simd.rint(n) if rounded else n
        code = simd.sext32(simd.load(codes, i))
        size, negative = simd.and_(code, top), simd.ashr(code, simd.splat(int32(31)))
        falls = simd.fmul(n, rate)
        falls = simd.as_f32(simd.xor(simd.as_i32(falls), simd.shl(negative, simd.splat(int32(31)))))
        size = simd.isub(size, simd.to_i32(_within(simd.rint(falls), most)))
        size = simd.smin(simd.smax(size, simd.splat(int32(0))), top)
        simd.store(codes, i, simd.trunc16(simd.or_(size, simd.shl(negative, simd.splat(int32(15))))))
        bits = simd.gather(octave, simd.and_(size, simd.splat(int32(gamma - 1))))
        bits = simd.iadd(bits, simd.shl(simd.lshr(size, simd.splat(int32(shift))), simd.splat(int32(23))))
        bits = simd.or_(bits, simd.shl(negative, simd.splat(int32(31))))
        simd.store(p, i, simd.fmul(simd.as_f32(bits), simd.splat(float32(scale))))
        simd.store(v, i, dropped(infinite, v_new, zeroing))
    return bad


@device
def _within(x, bound):
    """Return numbers moved into what lies between two bounds of one magnitude; no NaN."""
    low = simd.fsub(simd.splat(float32(0.0)), bound)
    return simd.where_less(x, low, low, simd.where_less(bound, x, bound, x))
