# SPDX-License-Identifier: Apache-2.0
"""What a multiplier with its accumulator costs, counted part by part: gates of a chip, lookup tables of an FPGA.

A product of two numbers of a format is added to a sum that holds every product exactly, and 256 of them: integers of
2 b bits, significands of 2 p bits shifted by the sum of two exponents. The parts are a multiplier of p x p bits, an
adder of exponents, a shifter, and the adder of the sum. Registers, signs, and the rounding of the sum are not counted.
"""

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.reproduce.claim import Claim, Expected, Measured, Tell, settings

_AND, _ADDER, _CHOICE = 1, 5, 3  # two-input gates of an AND, of a full adder, of a choice between two bits
_GUARD = 8  # bits for 256 products


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplier:
    """Give the widths of a multiplier's parts.

    Args:
        significand: Bits of one factor.
        exponent: Bits of an exponent, 0 of integers.
        places: Different shifts of a product.
        accumulator: Bits of the sum.
    """

    significand: int
    exponent: int
    places: int
    accumulator: int


def multiplier(fmt: IntFormat | FloatFormat) -> Multiplier:
    """Return the parts that products of a format need, their sum exact."""
    if isinstance(fmt, IntFormat):
        return Multiplier(significand=fmt.bits, exponent=0, places=1, accumulator=2 * fmt.bits + _GUARD)
    p = fmt.mantissa_bits + 1
    exponents = fmt.max_exponent - fmt.min_exponent + 1
    places = 2 * exponents - 1
    return Multiplier(
        significand=p, exponent=fmt.exponent_bits, places=places, accumulator=2 * p + places - 1 + _GUARD
    )  # fmt: skip


def gates(fmt: Any) -> float:
    """Return the two-input gates of a multiply-accumulate."""
    m = multiplier(fmt)
    p, levels = m.significand, ceil(log2(m.places))
    product = p * p * _AND + p * (p - 1) * _ADDER
    return product + _ADDER * (m.exponent + m.accumulator) + _CHOICE * m.accumulator * levels


def luts(fmt: Any) -> float:
    """Return the lookup tables of six inputs: one a bit of an adder, and one for a choice of four."""
    m = multiplier(fmt)
    p, levels = m.significand, ceil(log2(m.places) / 2)
    return p * (p - 1) + m.exponent + m.accumulator * (1 + levels)


def hardware(tell: Tell, *, formats: tuple[str, ...]) -> Measured:
    """Count the gates and lookup tables of multiply-accumulates, and how many more than INT8's they are."""
    numbers: dict[str, float] = {}
    for name in ("int8", *formats):
        fmt = get_format(name)
        numbers |= {f"{name}, gates": gates(fmt), f"{name}, LUTs": luts(fmt)}
        numbers[f"{name}, gates over INT8's, %"] = 100 * (gates(fmt) / gates(get_format("int8")) - 1)
    return Measured(numbers=numbers)


CLAIMS = (
    Claim(
        name="fp8_hardware",
        says="a multiplier for FP8 takes 50 to 180 % more of a chip than one for INT8",
        source="van Baalen et al., FP8 versus INT8, arXiv:2303.17951, abstract",
        measure=hardware,
        settings=settings(formats=("e2m5_finite", "e3m4_finite", "e4m3", "e5m2", "int4", "e2m1")),
        expected=(
            Expected(name="e4m3, gates over INT8's, %", low=50.0, high=180.0),
            Expected(name="e3m4_finite, gates over INT8's, %", low=0.0),
            Expected(name="e5m2, gates over INT8's, %", low=50.0),
        ),
        recorded="shown in part",
        bounds="source",
        notes="gates counted part by part with an exact sum of 256 products, not synthesised: an AND is one gate, a "
        "full adder five, a choice three. The source compares several accumulators; with an exact one E5M2 lies beyond "
        "its range",
    ),
)
