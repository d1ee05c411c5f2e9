"""Chains of float64 multiply-adds with one rounding, in float64 arithmetic that cannot overflow.

Factors are taken as significands in [1, 2) with exponents apart, and the running sum is brought to the exponent of the
product, or near it where they lie so far from each other that only the direction of the smaller one counts::

    1. high + low = a * b                      exact, by splitting each factor in two halves
    2. s + t + u  = high + low + c             exact, |t| and |u| far below the last place of s
    3. 62 bits of s and of what t and u add to it, the lowest bit set if anything is left below
    4. one rounding of those bits
"""

from collections.abc import Sequence

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import Datapath
from fmtsim.torch_engine.carry import DEEPEST, jam, round_off
from fmtsim.torch_engine.gemm_blocks import settle
from fmtsim.torch_engine.gemm_limbs import parts_of
from fmtsim.torch_engine.gemm_operands import Rows, Signs, cleaned, exact
from fmtsim.torch_engine.gemm_round import assembled, exponent_of
from fmtsim.torch_engine.reals import power_of_two
from fmtsim.torch_engine.storage import bits_of

_FAR = 200  # exponents further apart than this are brought to it: 53 + 106 bits and a few more
_SPLIT = 134217729.0  # 2**27 + 1, after Dekker: a product with it leaves the upper 26 bits
_ONE = 1023 << 52


class DoubleAddUnit:
    """A unit that adds one product of any two float64 numbers to the running sum and rounds."""

    span = 1
    weight = 8

    def __init__(self, datapath: Datapath) -> None:
        self.datapath = datapath

    @staticmethod
    def fits(datapath: Datapath, longest: int) -> bool:
        """Say whether 62 bits of a sum are enough to round it, and a block is one product."""
        fmt = datapath.accumulator
        usual = fmt.signed and fmt.has_zero and fmt.has_subnormals and fmt.mantissa_bits >= 1
        fused = longest == 1 and datapath.fraction_bits is None and datapath.scale is None
        return usual and fused and datapath.rounding.mode != "stochastic"

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one product, float64."""
        rows, path = pieces[0], self.datapath
        a, b = (_normalised(cleaned(exact(x[0]), rows.finite)) for x in (rows.a, rows.b))
        c, exponent = _normalised(cleaned(state, False))
        gap = (exponent - a[1] - b[1]).clamp(-_FAR, _FAR)
        base = torch.where(gap == _FAR, exponent - _FAR, a[1] + b[1])
        high, low = _product(a[0], b[0])
        first, rest = _two_sum(high, c * power_of_two(gap))
        rest, last = _two_sum(rest, low)
        first, rest = _two_sum(first, rest)
        rounded = _rounded(first, *_two_sum(rest, last), base, path)
        signs = Signs(state)
        signs.see((torch.signbit(exact(rows.a[0])) ^ torch.signbit(exact(rows.b[0])))[None])
        return settle(path, rounded, first == 0, signs, pieces, state, natural=False)


def _normalised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return finite float64 elements as ``significand * 2**exponent`` with a signed significand in [1, 2), or zero."""
    parts = parts_of(x)
    significand = ((parts.significand & ((1 << 52) - 1)) | _ONE).view(torch.float64)
    significand = torch.where(parts.significand == 0, 0.0, significand)
    return torch.where(parts.negative, -significand, significand), parts.exponent


def _product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded product and its error."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = x * _SPLIT
    high = scaled - (scaled - x)
    return high, x - high


def _two_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded sum and its error."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _rounded(
    first: torch.Tensor, rest: torch.Tensor, last: torch.Tensor, base: torch.Tensor, path: Datapath
) -> torch.Tensor:
    """Round ``(first + rest + last) * 2**base`` to the accumulator; the rest is at most half a last place of first."""
    fmt: FloatFormat = path.accumulator
    negative = first < 0
    rest, last = torch.where(negative, -rest, rest), torch.where(negative, -last, last)
    exponent = exponent_of(first)
    significand = ((bits_of(first) & ((1 << 52) - 1)) | (1 << 52)) << 9
    below = rest * power_of_two((61 - exponent).clamp(max=1000))  # in units of the 62nd bit
    whole = torch.floor(below)
    down = (below == whole) & (last < 0)
    left = (below != whole) | (last != 0)
    significand = significand + whole.to(torch.int64) - down.to(torch.int64)
    short = significand < 1 << 61  # just below a power of two
    significand = torch.where(short, significand << 1, significand) | left.to(torch.int64)
    significand = torch.where(first == 0, 0, significand)
    exponent = torch.where(first == 0, fmt.min_exponent, exponent + base - short.to(torch.int64))
    bounded = exponent.clamp(min=fmt.min_exponent)
    drop = 61 - fmt.mantissa_bits + (bounded - exponent)
    kept = jam(significand, drop - DEEPEST)
    quotient = round_off(kept, drop.clamp(max=DEEPEST), negative, path.rounding, None)
    return assembled(quotient, bounded, negative, fmt, path.rounding)
