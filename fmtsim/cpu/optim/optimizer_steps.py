# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on the CPU: which schemes and parameters the kernels take, and the kernels.

A step is one pass: on moments that are bytes of a codebook, or float32, and on weights that are codes. The definition
is fmtsim/optim: rules.py (the update), codec.py (scales and codes); the bits are the same. Vectors are those of
``simd.py``. How a code is found is said at ``fmtsim.rounding.codebooks.Table``: one lookup by a number's leading 16
bits gives the only threshold that its other 16 bits can lie on either side of. Weights are bytes with a scale a row,
float32 during a step and rounded stochastically after it, or logarithms under Madam, moved in one pass.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy import float32, int8, int32, int64, uint64

from fmtsim.cpu.cast.grid import fill64, key_words
from fmtsim.cpu.runtime import simd
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.formats.element import CodebookFormat, IntFormat, LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.optimizer import Book, Counter, Numbers, ParameterStep, Scheme, StateFormat, state_codebook

ALIGNMENT = simd.LANES
"""Blocks are multiples of this."""

KINDS = ("adam", "lion", "sgd", "nesterov")
"""Updates by their numbers in the kernels; all but the first have one moment."""

_ADAM, _LION, _SGD, _NESTEROV = range(len(KINDS))
_MAGNITUDE, _INFINITY, _ONE = int32(0x7FFFFFFF), int32(0x7F800000), int32(1)


def step_codes(
    rule: str,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[tuple[torch.Tensor, torch.Tensor, Book]],
    numbers: Numbers,
    block: int,
    zeroing: bool,
) -> int:
    """Do a step of one parameter in place; return how many elements of the gradient are not finite.

    Args:
        rule: One of KINDS.
        parameter, gradient: float32, contiguous.
        moments: Of each moment codes (uint8), scales (float32) and the book, of 256 values with 0 among them.
        numbers: The scalars of the step.
        block: Numbers that share a scale, a multiple of ALIGNMENT.
        zeroing: Elements whose gradient is not finite lose their moments and keep their parameter.
    """
    arrays = arrays_of([parameter, gradient, *(codes.view(torch.int8) for codes, _, _ in moments)])
    scales, books = arrays_of([scales for _, scales, _ in moments]), [book for _, _, book in moments]
    whole, tail = divmod(arrays[0].size, block)
    counts: list[int] = []

    def part(numbers_of: list[np.ndarray], scales_of: list[np.ndarray], start: int, stop: int) -> None:
        states: list[Any] = []  # of each moment codes, scales and the four arrays of its book; None for a missing one
        for place, book in enumerate(books):
            states += (numbers_of[2 + place], scales_of[place], *book)
        states += [None] * 6 * (2 - len(books))
        counts.append(
            _codes(
                *numbers_of[:2], *states, np.array(numbers, np.float32), KINDS.index(rule), block, zeroing, start, stop
            )
        )

    run(lambda start, stop: part(arrays, scales, start, stop), whole, 1, block)
    if tail:
        fillers = 0, 0, *(int(np.flatnonzero(book.values == 0)[0]) for book in books)  # of which all decode to zero
        last = [np.full(block, filler).astype(array.dtype) for filler, array in zip(fillers, arrays, strict=True)]
        for padded, array in zip(last, arrays, strict=True):
            padded[:tail] = array[whole * block :]
        part(last, [scale[whole:] for scale in scales], 0, 1)
        put_back(last, arrays, whole * block)
    return sum(counts)


def step_floats(
    rule: str,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    numbers: Numbers,
    zeroing: bool,
) -> int:
    """Do a step of one parameter whose moments are float32, in place; return what ``step_codes`` returns.

    Args:
        rule, numbers, zeroing: As of ``step_codes``.
        parameter, gradient, moments: float32, contiguous, of one size.
    """
    nothing, how = [None] * (2 - len(moments)), (np.array(numbers, np.float32), KINDS.index(rule), zeroing)
    return in_lanes([parameter, gradient, *moments], lambda arrays, *ends: _floats(*arrays, *nothing, *how, *ends))


def arrays_of(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return flat arrays of contiguous tensors."""
    return [tensor.detach().view(-1).numpy() for tensor in tensors]


def in_lanes(tensors: Sequence[torch.Tensor], step: Callable[..., int]) -> int:
    """Return the sum of ``step(arrays, start, stop)`` over whole vectors of tensors; zeros fill up the last one."""
    arrays = arrays_of(tensors)
    whole = arrays[0].size // simd.LANES * simd.LANES
    counts: list[int] = []
    run(lambda start, stop: counts.append(step(arrays, start, stop)), whole, simd.LANES)
    if whole < arrays[0].size:
        last = [np.zeros(simd.LANES, array.dtype) for array in arrays]
        for padded, array in zip(last, arrays, strict=True):
            padded[: array.size - whole] = array[whole:]
        counts.append(step(last, 0, simd.LANES))
        put_back(last, arrays, whole)
    return sum(counts)


def put_back(last: list[np.ndarray], arrays: list[np.ndarray], start: int) -> None:
    """Write what a padded last part has become, but for the gradient."""
    for place, array in enumerate(arrays):
        if place != 1:
            array[start:] = last[place][: array.size - start]


@kernel
def _floats(p, g, m, v, numbers, rule, zeroing, start, stop):
    bad = 0
    for i in range(start, stop, simd.LANES):
        x, y, m_old = simd.load(p, i), simd.load(g, i), simd.load(m, i)
        infinite = is_infinite(y)
        bad += simd.largest(infinite) and count_infinite(g, i, simd.LANES)
        if v is None:
            z, m_new = _of_one_moment(x, y, m_old, numbers, rule)
        else:
            z, m_new, v_new = _adam(x, y, m_old, simd.load(v, i), numbers)
            simd.store(v, i, dropped(infinite, v_new, zeroing))
        simd.store(p, i, _stayed(infinite, z, x, zeroing))
        simd.store(m, i, dropped(infinite, m_new, zeroing))
    return bad


@kernel
def _codes(
    p, g, m_codes, m_scales, m_values, m_words, m_lowest, m_least,
    v_codes, v_scales, v_values, v_words, v_lowest, v_least, numbers, rule, block, zeroing, start, stop,
):  # fmt: skip
    m_all, v_all = np.empty(block, np.float32), np.empty(block, np.float32)
    bad = 0
    for b in range(start, stop):
        first = b * block
        m_top, v_top, odd = simd.splat(int32(0)), simd.splat(int32(0)), simd.splat(int32(0))
        for i in range(0, block, simd.LANES):
            m_old = _decoded(m_codes, first + i, m_values, m_scales[b])
            x, y = simd.load(p, first + i), simd.load(g, first + i)
            infinite = is_infinite(y)
            odd = simd.iadd(odd, infinite)
            if v_codes is None:
                z, m_new = _of_one_moment(x, y, m_old, numbers, rule)
            else:
                v_old = _decoded(v_codes, first + i, v_values, v_scales[b])
                z, m_new, v_new = _adam(x, y, m_old, v_old, numbers)
                v_kept = dropped(infinite, v_new, zeroing)
                simd.store(v_all, i, v_kept)
                v_top = simd.smax(v_top, _magnitude(v_kept))
            simd.store(p, first + i, _stayed(infinite, z, x, zeroing))
            m_kept = dropped(infinite, m_new, zeroing)
            simd.store(m_all, i, m_kept)
            m_top = simd.smax(m_top, _magnitude(m_kept))
        bad += simd.largest(odd) and count_infinite(g, first, block)
        m_scales[b] = _encode(m_all, simd.largest(m_top), m_codes, first, m_words, m_lowest, m_least)
        if v_codes is not None:
            v_scales[b] = _encode(v_all, simd.largest(v_top), v_codes, first, v_words, v_lowest, v_least)
    return bad


@device
def dropped(infinite, moment, zeroing):
    """Return moments without those of gradients that are not finite, if these are dropped."""
    return _stayed(infinite, moment, simd.splat(float32(0.0)), zeroing)


@device
def _stayed(infinite, new, old, zeroing):
    return simd.where_same(infinite, simd.splat(int32(0)), new, old) if zeroing else new


@device
def _magnitude(x):
    return simd.and_(simd.as_i32(x), simd.splat(_MAGNITUDE))


@device
def is_infinite(x):
    """Return 1 for lanes that are NaN or infinite, else 0."""
    below = simd.splat(int32(_INFINITY - 1))
    return simd.where_below(below, _magnitude(x), simd.splat(_ONE), simd.splat(int32(0)))


@device
def _decoded(codes, index, values, scale):
    places = simd.and_(simd.zext32(simd.load(codes, index)), simd.splat(int32(255)))
    return simd.fmul(simd.gather(values, places), simd.splat(scale))


@device
def _adam(x, y, m, v, numbers):
    """Return new parameter and moments: the update of fmtsim/optim/rules.py, operation by operation."""
    y = _penalised(x, y, numbers)
    m = simd.fadd(simd.fmul(m, simd.splat(numbers[3])), simd.fmul(y, simd.splat(numbers[4])))
    square = simd.fmul(simd.fmul(y, simd.splat(numbers[6])), y)
    v = simd.fadd(simd.fmul(v, simd.splat(numbers[5])), square)
    root = simd.sqrt(v)
    if numbers[7] != float32(1.0):
        root = simd.fdiv(root, simd.splat(numbers[7]))
    return _moved(x, simd.fdiv(m, simd.fadd(root, simd.splat(numbers[8]))), numbers), m, v


@device
def _of_one_moment(x, y, m, numbers, rule):
    """Return new parameter and moment: the other updates of fmtsim/optim/rules.py, operation by operation."""
    if rule == _LION:
        mixed = simd.fadd(simd.fmul(m, simd.splat(numbers[3])), simd.fmul(y, simd.splat(numbers[4])))
        zero, one, less = simd.splat(float32(0.0)), simd.splat(float32(1.0)), simd.splat(float32(-1.0))
        direction = simd.where_less(zero, mixed, one, simd.where_less(mixed, zero, less, zero))
        m = simd.fadd(simd.fmul(m, simd.splat(numbers[5])), simd.fmul(y, simd.splat(numbers[6])))
    else:
        y = _penalised(x, y, numbers)
        m = simd.fadd(simd.fmul(m, simd.splat(numbers[3])), y)
        direction = simd.fadd(y, simd.fmul(m, simd.splat(numbers[3]))) if rule == _NESTEROV else m
    return _moved(x, direction, numbers), m


@device
def _penalised(x, y, numbers):
    return simd.fadd(y, simd.fmul(x, simd.splat(numbers[2]))) if numbers[2] != float32(0.0) else y


@device
def _moved(x, direction, numbers):
    z = simd.fsub(simd.fmul(x, simd.splat(numbers[0])), simd.fmul(direction, simd.splat(numbers[9])))
    return simd.fmul(z, simd.splat(numbers[1]))


@device
def _encode(x, top, codes, first, words, lowest, least):
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
        simd.store(codes, first + i, simd.trunc8(code))
    return scale


@device
def count_infinite(g, first, block):
    """Return how many numbers are NaN or infinite."""
    count = 0
    for i in range(block):
        count += (bits32(g[first + i]) & _MAGNITUDE) >= _INFINITY
    return count


_LEAST = float32(1e-12)
_ONE_ON, _MOST = float32(2.0**32), float32(512.0)


def takes_bytes(fmt: StateFormat) -> bool:
    """Return True if kernels serve weights of a format: bytes, 32 random bits, scales of rows that are inverted."""
    element = fmt.format
    whole = isinstance(element, IntFormat) and element.bits == 8 and element.signed and not element.half_offset
    if not whole or not isinstance(element, IntFormat) or element.fraction_bits:
        return False
    return fmt.block == (1, None) and fmt.rule == "inverse" and fmt.rounding == Rounding(mode="stochastic")


@kernel
def _decode(codes, scales, out, row, start, stop):
    for r in range(start, stop):
        for i in range(r * row, (r + 1) * row):
            out[i] = float32(codes[i]) * scales[r]


@kernel
def _encode_weights(x, codes, scales, out, row, lowest, highest, least, o0, o1, k0, k1, start, stop):
    words = np.empty(64, np.uint32)
    for r in range(start, stop):
        first, end = r * row, (r + 1) * row
        top = bits32(least)
        for i in range(first, end):
            top = max(top, bits32(x[i]) & _MAGNITUDE)
        scale = float32_of(top) / float32(highest)
        inverse = float32(1.0) / (_LEAST if scale < _LEAST else scale)
        scales[r] = scale
        for block in range(first >> 6, (end + 63) >> 6):
            fill64(words, 0, block, o0, o1, k0, k1)
            for i in range(max(first, block * 64), min(end, block * 64 + 64)):
                code = _code(x[i] * inverse, words[i - block * 64], lowest, highest)
                codes[i] = code
                out[i] = float32(code) * scale


@device
def _code(y, word, lowest, highest):
    """Return the code of a number: down, or up where the random word and what lies behind the point reach 1."""
    size = min(abs(y), _MOST) if y == y else _MOST
    whole = int32(size)
    part = int64((size - float32(whole)) * _ONE_ON)
    number = int64(whole) + ((part + int64(uint64(word))) >> int64(32))
    number = -number if y < float32(0.0) else number
    return int8(min(max(number, int64(lowest)), int64(highest)))


BITS = 16  # of a logarithm


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
    octave = np.zeros(fmt.gamma, np.float32)
    octave[: fmt.max_code + 1] = fmt.magnitudes[: fmt.gamma]
    how = octave.view(np.int32), np.array(numbers, np.float32), fmt.gamma, fmt.gamma.bit_length() - 1, float(scale)
    tensors = parameter, gradient, second, codes
    return in_lanes(tensors, lambda arrays, *ends: _logarithms(*arrays, *how, rounded, zeroing, *ends))


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


RULES = {
    "adamw": ("adam", ("first", "second")),
    "adam": ("adam", ("first", "second")),
    "lion": ("lion", ("first",)),
    "sgd": ("sgd", ("first",)),
    "nesterov": ("nesterov", ("first",)),
    "madam(base=2, round_update=True)": ("rounded", ("second",)),
    "madam(base=2, round_update=False)": ("free", ("second",)),
}
"""The kernels' name of a rule, and the states that it has."""


def supports_optimizer(rule: str, scheme: Scheme) -> bool:
    """Return True if kernels know a rule and the states of a scheme: float32, or codes of codebooks of 8 bits.

    With float32 they know weights that are integers with scales of rows, and under Madam logarithms.
    """
    if rule not in RULES or scheme.nonfinite == "skip":
        return False
    kind, names = RULES[rule]
    moments = [getattr(scheme, name) for name in names]
    if scheme.weights is not None:
        logs = isinstance(scheme.weights.format, LogFormat)
        covered = logs if kind in ("rounded", "free") else takes_bytes(scheme.weights)
        return covered and all(fmt.format is None for fmt in moments)
    if kind in ("rounded", "free"):
        return False
    if all(fmt.format is None for fmt in moments):
        return True
    (block, bits), *others = {(fmt.block, fmt.bits) for fmt in moments}
    return not others and block[1] is not None and None not in map(book, moments)


def optimizer_steps(
    rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
) -> Sequence[ParameterStep]:
    """Do the steps that kernels cover, of parameters on the CPU; return the others."""
    if not supports_optimizer(rule, scheme):
        return steps
    refused = []
    for step in steps:
        if not _takes(rule, step):
            refused.append(step)
            continue
        bad = _step(rule, step, scheme.nonfinite == "zero")
        counter(step.parameter.device).add_(bad)
        torch.autograd.graph.increment_version([step.parameter])  # autograd may have saved it for a backward
        step.done()
    return refused


def _step(rule: str, step: ParameterStep, zeroing: bool) -> int:
    """Do the step of a parameter that the kernels take; return how many elements of its gradient are not finite."""
    kind, names = RULES[rule]
    p, g, formats, state, numbers = step.parameter, step.gradient, step.formats, step.state, step.numbers
    moments, weights = [state[name] for name in names], formats.get("weights")
    if weights is not None and isinstance(weights.format, LogFormat):
        tensors = state["second"], state["weights"], state["weights_scale"]
        return step_logarithms(kind == "rounded", p, g, *tensors, weights.format, numbers, zeroing)
    if weights is not None:
        codes, scales, row = state["weights"], state["weights_scale"], weights.block_of(tuple(p.shape))
        # float32 values of codes (uint8) with a scale for each row, flat
        values = torch.empty(codes.numel(), dtype=torch.float32)
        arguments = (*arrays_of([codes.view(torch.int8), scales, values]), row)
        run(lambda start, stop: _decode(*arguments, start, stop), scales.numel(), 1, row)
        bad = step_floats(kind, values, g, moments, numbers, zeroing)
        # codes and scales of the result, and what these decode to
        assert isinstance(weights.format, IntFormat)  # takes_bytes() asked
        ends = weights.format.min_code, weights.format.max_code, np.float32(weights.least)
        tensors_of_row = arrays_of([values, codes.view(torch.int8), scales, p])
        encoding = (*tensors_of_row, row, *ends, *key_words(step.key("weights")))
        run(lambda start, stop: _encode_weights(*encoding, start, stop), scales.numel(), 1, row)
        return bad
    if formats[names[0]].format is None:
        return step_floats(kind, p, g, moments, numbers, zeroing)
    books, block = [book(formats[name]) for name in names], formats[names[0]].block[1]
    assert block is not None  # supports_optimizer asked
    scaled = [(state[name], state[f"{name}_scale"], codes) for name, codes in zip(names, books, strict=True) if codes]
    return step_codes(kind, p, g, scaled, numbers, block, zeroing)


def _takes(rule: str, step: ParameterStep) -> bool:
    """Return True if kernels take a parameter; small ones of a scheme with codes have float32 moments."""
    p, g = step.parameter, step.gradient
    formats = list(step.formats.values())
    if not (p.dtype is g.dtype is torch.float32 and p.is_contiguous() and g.is_contiguous()):
        return False
    weights = step.formats.get("weights")
    if rule.startswith("madam"):
        logs = weights is not None and isinstance(weights.format, LogFormat) and weights.format.bits == BITS
        return logs and weights is not None and weights.rule == "fixed" and weights.block == (None, None)
    if weights is not None:
        return takes_bytes(weights) and all(fmt.format is None for fmt in formats if fmt is not weights)
    if all(fmt.format is None for fmt in formats):
        return True
    books = all(isinstance(fmt.format, CodebookFormat) and 0.0 in fmt.format.values for fmt in formats)
    bits, block = formats[0].bits, formats[0].block[1]
    return books and bits == 8 and block is not None and block % ALIGNMENT == 0


@lru_cache(maxsize=64)
def book(fmt: StateFormat) -> Book | None:
    """Return the codebook of a state, None where kernels do not know it."""
    return state_codebook(fmt)
