# SPDX-License-Identifier: Apache-2.0
"""One block of every kind of matrix unit in exact integers: sections 1 to 3 of docs/matmul.md, steps numbered as there.

Numbers are ``digits * 2**place`` with Python integers; ``float`` appears only as a container of values that it holds
exactly, and no floating-point operation decides anything. Nothing is shared with an engine.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import is_negative, power_of_two, round_value, rounds_away
from fmtsim.spec.datapath import FP32, Datapath, FmaDatapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.support.errors import ArgumentError

NEAREST = Rounding(mode="nearest_even")
DOWN = Rounding(mode="down")
TRUNCATE = Rounding(mode="toward_zero")
UNBOUNDED = FloatFormat(name="e10m23", exponent_bits=10, mantissa_bits=23)  # float32, exponents for all products


class Product(NamedTuple):
    """Two operands and the scales inside the unit that belong to them."""

    a: float
    b: float
    scale_a: float = 1.0
    scale_b: float = 1.0


class Exact(NamedTuple):
    """The finite number ``(-1)**negative * digits * 2**place``; ``digits >= 0``, and zero keeps its sign."""

    negative: bool
    digits: int
    place: int

    def times_power(self, exponent: int) -> "Exact":
        """Return the number times ``2**exponent``."""
        return self._replace(place=self.place + exponent)

    def exponent(self, min_exponent: int) -> int:
        """Return e(v) of section 1; that of zero is taken as the lowest."""
        if not self.digits:
            return min_exponent
        return max(self.digits.bit_length() - 1 + self.place, min_exponent)

    def to_integer(self, how: Rounding) -> int:
        """Round to an integer."""
        if self.place >= 0:
            magnitude = self.digits << self.place
        else:
            magnitude, rest = divmod(self.digits, 1 << -self.place)
            magnitude += rounds_away(rest, 1 << -self.place, magnitude % 2 == 1, self.negative, how, None)
        return -magnitude if self.negative else magnitude


def exact(x: float) -> Exact:
    """Return a finite float as integers."""
    numerator, denominator = abs(x).as_integer_ratio()
    return Exact(is_negative(x), numerator, 1 - denominator.bit_length())


def _multiply(*factors: Exact) -> Exact:
    negative = sum(f.negative for f in factors) % 2 == 1
    return Exact(negative, math.prod(f.digits for f in factors), sum(f.place for f in factors))


def _sum(terms: Sequence[Exact]) -> Exact:
    """Return the exact sum; a zero sum is -0 if every term is -0."""
    place = min(t.place for t in terms)
    total = sum((-t.digits if t.negative else t.digits) << (t.place - place) for t in terms)
    return Exact(total < 0 or (total == 0 and all(t.negative for t in terms)), abs(total), place)


def round_exact(x: Exact, fmt: FloatFormat, how: Rounding = NEAREST, word: int | None = None) -> float:
    """Round to a format with exponents unbounded above; beyond the largest value is Inf, whatever the mode (step 6).

    The sign of a zero result is that of x. A format without Inf, or with ``overflow="saturate"`` in its record, follows
    its own overflow rule.
    """
    # 1. u: the exponent of the last place that the format keeps
    e = x.digits.bit_length() - 1 + x.place
    flushed = e < fmt.min_exponent and not fmt.has_subnormals
    u = fmt.min_exponent if flushed else max(e, fmt.min_exponent) - fmt.mantissa_bits
    # 2. n: whole last places; rest / whole: the fraction of one that is dropped
    whole = 1 << max(u - x.place, 0)
    n, rest = divmod(x.digits << max(x.place - u, 0), whole)
    odd = n % 2 == 1 and not flushed
    if fmt.mantissa_bits == 0 and not flushed:  # codes count exponents, so that n = 1 is odd every second time
        odd = n == 1 and (e - fmt.min_exponent + fmt.has_zero) % 2 == 1
    # 3. round, then check the range
    n += rounds_away(rest, whole, odd, x.negative, how, word)
    if n.bit_length() + u <= 1024 and math.ldexp(n, u) <= fmt.max:
        return math.copysign(math.ldexp(n, u), -1 if x.negative else 1)
    if not fmt.infinities or fmt.overflow == "saturate":
        magnitude = x.digits * power_of_two(x.place)
        return round_value(-magnitude if x.negative else magnitude, fmt, how, None, word)
    return -math.inf if x.negative else math.inf


def fma(fmt: FloatFormat, x: float, y: float, z: float) -> float:
    """Return ``x y + z`` rounded once to nearest even, with the zeros, infinities and NaN of IEEE 754."""
    special = _special([_limit(Product(x, y)), z])
    return round_exact(_sum([_multiply(exact(x), exact(y)), exact(z)]), fmt) if special is None else special


def add(fmt: FloatFormat, x: float, y: float) -> float:
    """Return the IEEE 754 sum in a format."""
    return fma(fmt, x, 1.0, y)


def multiply(fmt: FloatFormat, x: float, y: float) -> float:
    """Return the IEEE 754 product in a format; adding -0 changes no product, not even -0."""
    return fma(fmt, x, y, -0.0)


def _limit(p: Product) -> float:
    """Return NaN or Inf where a product is one, and 0 where it is finite."""
    if any(map(math.isnan, p)):
        return math.nan
    operand_is_zero, scale_is_zero = 0 in (p.a, p.b), 0 in (p.scale_a, p.scale_b)
    inf = -math.inf if is_negative(p.a) != is_negative(p.b) else math.inf
    if math.isinf(p.a) or math.isinf(p.b):
        return math.nan if operand_is_zero else inf
    if math.isinf(p.scale_a) or math.isinf(p.scale_b):
        return math.nan if operand_is_zero or scale_is_zero else inf
    return 0.0


def _special(terms: Iterable[float]) -> float | None:
    """Return the NaN or Inf that a sum with such terms is, None for a sum of finite terms (step 1)."""
    specials = {t for t in terms if not math.isfinite(t)}
    if not specials:
        return None
    return math.nan if len(specials) > 1 else specials.pop()  # a NaN, or both infinities, or one


# Section 2: the fused unit.


def fused_block(
    products: Sequence[Product], c: float, datapath: Datapath, a: FloatFormat, b: FloatFormat, word: int | None = None
) -> float:
    """Return what a fused unit makes of the products of one block and the running sum.

    Args:
        products: At most ``datapath.block`` of them.
        c: The running sum, a value of the accumulator.
        datapath: The unit.
        a, b: Formats of the operands.
        word: The random integer where the unit rounds stochastically.

    Raises:
        ArgumentError: A group has two different scales.
    """
    special = _special([*map(_limit, products), c])  # step 1
    if special is not None:
        return special
    terms = list(_terms(products, datapath, a, b))  # step 2
    addend = exact(c)
    terms.append((addend, addend.exponent(datapath.accumulator.min_exponent) if addend.digits else None))
    values = [value for value, _ in terms]
    exponents = [e for _, e in terms if e is not None]
    if exponents and datapath.fraction_bits is not None:
        e = max(exponents)  # step 3
        if datapath.min_exponent is not None:
            e = max(e, datapath.min_exponent)
        values = [_aligned(t, e - datapath.fraction_bits, datapath) for t in values]  # step 4
    total = _sum(values)  # step 5
    if total.digits:
        result = round_exact(total, datapath.accumulator, datapath.rounding, word)  # step 6
    else:
        cancels = datapath.rounding.mode == "down" and any(t.negative for t in values)
        result = -0.0 if total.negative or cancels else 0.0
    return result if datapath.signed_zero else result or 0.0  # step 7: a zero of either sign is +0


def _terms(
    products: Sequence[Product], datapath: Datapath, a: FloatFormat, b: FloatFormat
) -> Iterator[tuple[Exact, int | None]]:
    """Yield the terms of a block with their exponents, None where a term has no say in the alignment."""
    of_a, of_b = (datapath.operand or a).min_exponent, (datapath.operand or b).min_exponent
    for i in range(0, len(products), datapath.group):
        members = products[i : i + datapath.group]
        if any(p[2:] != members[0][2:] for p in members):
            raise ArgumentError(
                f"a group of {datapath.group} products has two scales; choose tiles and instructions that hold whole "
                f"groups of scale_block={datapath.scale_block}"
            )
        scales = [exact(abs(s)) for s in members[0][2:]]
        exponent = 0 if datapath.scale is None else sum(s.exponent(datapath.scale.min_exponent) for s in scales)
        term = _sum([_multiply(exact(p.a), exact(p.b), *scales) for p in members])
        if datapath.group > 1:
            yield term, exponent
        else:
            x, y = exact(members[0].a), exact(members[0].b)
            yield term, exponent + x.exponent(of_a) + y.exponent(of_b) if term.digits else None


def _aligned(term: Exact, unit: int, datapath: Datapath) -> Exact:
    """Round a term to a multiple of ``2**unit``; it keeps its sign where it becomes zero."""
    n = term.times_power(-unit).to_integer(Rounding(mode=datapath.term_rounding))
    return Exact(term.negative, abs(n), unit)


# Section 3: other units.


def two_stage_block(
    products: Sequence[Product], c: float, datapath: TwoStageDatapath, a: FloatFormat, b: FloatFormat
) -> float:
    """Return what the unit of CDNA3 makes of one block and the running sum; arguments as of ``fused_block``."""
    fraction, lowest = datapath.fraction_bits, FP32.min_exponent
    values = [_limit(p) for p in products]
    numbers = []
    for i, p in enumerate(products):
        if values[i] != 0:  # NaN or Inf
            continue
        x, y = exact(p.a), exact(p.b)
        p_exact = _multiply(x, y)
        numbers.append((p_exact, x.exponent(a.min_exponent) + y.exponent(b.min_exponent) if p_exact.digits else lowest))
        if not datapath.parity and p_exact.digits.bit_length() + p_exact.place > 128:
            values[i] = -math.inf if p_exact.negative else math.inf
    special = _special([*values, c])
    if special is not None:
        return special
    halves = [half for half in ([numbers[::2], numbers[1::2]] if datapath.parity else [numbers]) if half]
    sums = []  # step 1
    for half in halves:
        e = max(e for _, e in half)
        sums.append((sum(t.times_power(fraction - e).to_integer(TRUNCATE) for t, _ in half), e))
    e1 = max(e for _, e in sums)
    total = sum(n >> (e1 - e) for n, e in sums)  # floors; nothing to floor without parity
    addend = exact(c)  # step 2
    of_c = addend.exponent(lowest)
    e = max(e1, of_c)
    product_sum = _integer(total).times_power(e1 - e + datapath.sum_bits - fraction).to_integer(DOWN)
    addend_kept = addend.times_power(fraction - e).to_integer(DOWN)
    if datapath.parity and of_c < e - fraction - 1:
        addend_kept = 0
    both = [_integer(product_sum, e - datapath.sum_bits), _integer(addend_kept, e - fraction)]
    return round_exact(_sum(both), FP32) or 0.0  # step 3: a zero of either sign is +0


def _integer(n: int, place: int = 0) -> Exact:
    return Exact(n < 0, abs(n), place)


def pairwise_block(
    products: Sequence[Product], c: float, datapath: PairwiseDatapath, a: FloatFormat, b: FloatFormat
) -> float:
    """Return what the unit of CDNA2 makes of one block and the running sum; arguments as of ``fused_block``."""

    def read(x: float, fmt: FloatFormat) -> float:
        return 0.0 if 0 < abs(x) < fmt.min_normal else x

    def flushed(x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < FP32.min_normal else x

    level = [flushed(multiply(FP32, read(p.a, a), read(p.b, b))) for p in products]
    level += [0.0] * (datapath.block - len(level))
    while len(level) > 1:
        level = [flushed(add(FP32, x, y)) for x, y in zip(level[::2], level[1::2], strict=True)]
    return flushed(add(FP32, read(c, FP32), level[0]))


def fma_block(products: Sequence[Product], c: float, datapath: FmaDatapath, a: FloatFormat, b: FloatFormat) -> float:
    """Return what Intel's dot products make of one block and the running sum; arguments as of ``fused_block``."""

    def flushed(x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < FP32.min_normal else x

    def multiply_add(x: float, y: float, z: float) -> float:
        # tiny is what 24 bits with unbounded exponents leave below 2^-126; only then does float32 end
        return add(FP32, flushed(fma(UNBOUNDED, x, y, z)), -0.0)

    numbers = [(flushed(p.a), flushed(p.b)) for p in products]
    numbers += [(0.0, 0.0)] * (datapath.block - len(numbers))
    running, sums = flushed(c), [0.0, 0.0]
    for i in range(0, datapath.block, 2):
        for half in (1, 0):  # the odd product first
            if datapath.parity:
                sums[half] = multiply_add(*numbers[i + half], sums[half])
            else:
                running = multiply_add(*numbers[i + half], running)
    return multiply_add(multiply_add(sums[0], 1.0, sums[1]), 1.0, running) if datapath.parity else running


def integer_block(products: Sequence[tuple[Any, ...]], c: int, datapath: IntegerDatapath) -> int:
    """Return the sum that an integer unit makes of one block of integers, two first of each, and the running sum."""
    return to_accumulator(c + sum(x * y for x, y, *_ in products), datapath)


def to_accumulator(n: int, datapath: IntegerDatapath) -> int:
    """Bring an integer into the range of the accumulator: clamp it or take it modulo ``2**accumulator_bits``."""
    half = 1 << (datapath.accumulator_bits - 1)
    return min(max(n, -half), half - 1) if datapath.saturate else (n + half) % (2 * half) - half
