# SPDX-License-Identifier: Apache-2.0
"""What a multiplier with its accumulator costs, counted part by part: gates of a chip, lookup tables of an FPGA.

A product of two numbers of a format is added to a sum that holds every product exactly, and 256 of them: integers of
2 b bits, significands of 2 p bits shifted by the sum of two exponents. The parts are a multiplier of p x p bits, an
adder of exponents, a shifter, and the adder of the sum. Registers, signs, and the rounding of the sum are not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.spec.datapath import LogDatapath
from studies.claims.claim import Claim, Expected, Measured, Tell, near, settings

_AND, _ADDER, _CHOICE = 1, 5, 3  # two-input gates of an AND, of a full adder, of a choice between two bits
_GUARD = 8  # bits for 256 products


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplier:
    """Give the widths of a multiplier's parts."""

    significand: int  # bits of one factor
    exponent: int  # bits of an exponent, 0 of integers
    places: int  # different shifts of a product
    accumulator: int  # bits of the sum


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


def gates(fmt: Any, least: bool = False) -> float:
    """Return the two-input gates of a multiply-accumulate.

    All levels of its shifter are as wide as the sum, or (``least``) as a product has grown to.
    """
    m = multiplier(fmt)
    p = m.significand
    product = p * p * _AND + p * (p - 1) * _ADDER
    return product + _ADDER * (m.exponent + m.accumulator) + _shifter(2 * p, m.places, m.accumulator, least)


def _shifter(width: int, places: int, accumulator: int, least: bool) -> float:
    """Return the gates that shift so many bits to these places of a sum; a bit with one source is ANDed, not chosen."""
    if not least:
        return _CHOICE * accumulator * ceil(log2(places))
    return sum(_CHOICE * max(n - more, 0) + _AND * 2 * min(n, more) for n, more in _growth(width, places, 2))


def _growth(width: int, places: int, choices: int) -> Iterator[tuple[int, int]]:
    """Yield of each level of a shifter how many bits come in, and how many more leave it."""
    bits_left, step = places - 1, choices - 1
    while bits_left > 0:
        more = min(step, bits_left)
        yield width, more
        width, bits_left, step = width + more, bits_left - more, choices * step


def luts(fmt: Any, least: bool = False) -> float:
    """Return the lookup tables of six inputs: one a bit of an adder, one a choice of four; ``least`` as in gates."""
    m = multiplier(fmt)
    p, levels = m.significand, ceil(log2(m.places) / 2)
    shifter = sum(map(sum, _growth(2 * p, m.places, 4))) if least else m.accumulator * levels
    return p * (p - 1) + m.exponent + m.accumulator + shifter


def hardware(tell: Tell, *, formats: tuple[str, ...]) -> Measured:
    """Count the gates and lookup tables of multiply-accumulates, and how many more than INT8's they are."""
    numbers: dict[str, float] = {}
    for name in ("int8", *formats):
        fmt = get_format(name)
        numbers |= {f"{name}, gates": gates(fmt), f"{name}, LUTs": luts(fmt)}
        for what, least in (("gates", False), ("least gates", True)):
            numbers[f"{name}, {what} over INT8's, %"] = 100 * (gates(fmt, least) / gates(get_format("int8"), least) - 1)
    return Measured(numbers=numbers)


# Energies in pJ at 45 nm and 0.9 V (Horowitz, ISSCC 2014), beside the gates that are counted for the part.
_INTEGERS = {
    "add, 8 bits": (0.03, 8 * _ADDER), "add, 16 bits": (0.05, 16 * _ADDER), "add, 32 bits": (0.1, 32 * _ADDER),
    "multiply, 8 bits": (0.2, 8 * 8 * _AND + 8 * 7 * _ADDER),
    "multiply, 32 bits": (3.1, 32 * 32 * _AND + 32 * 31 * _ADDER),
}  # fmt: skip
_FP32_MULTIPLY, _FP32_ADD, _FP16_ADD = 3.7, 0.9, 0.4


def logarithm_gates(fmt: LogFormat, path: LogDatapath, least: bool = False) -> float:
    """Return the two-input gates of a product of logarithms: a block shares the constants and the sum of their terms.

    A constant is fixed: it is an adder for each bit that is one, but the first. What is shifted is one bit.
    """
    width, octaves = path.accumulator_bits, 2 * fmt.max_code // fmt.gamma + 1
    routed = path.entries * width * _AND if path.entries > 1 else 0
    shifter = _shifter(1, min(octaves, width) if least else octaves, width, least)
    product = _ADDER * (fmt.bits - 1 + width) + shifter + routed
    shared = sum(constant.bit_count() for constant in path.constants)  # their adders, and those of their sums
    return product + _ADDER * width * shared / path.block


def energy(tell: Tell, *, format: str, rival: str, tables: tuple[int, ...]) -> Measured:
    """Estimate the energy of a multiply-accumulate: of float32 by a table, of others by gates that the table weighs."""
    fmt, other = get_format(format), get_format(rival)
    assert isinstance(fmt, LogFormat) and isinstance(other, FloatFormat)
    per_gate = [1000 * energy / gates for energy, gates in _INTEGERS.values()]
    gate = sum(per_gate) / len(per_gate) / 1000
    single, p = _FP32_MULTIPLY + _FP32_ADD, other.mantissa_bits + 1
    product = gate * (p * p * _AND + p * (p - 1) * _ADDER + _ADDER * other.exponent_bits)
    numbers = {"fJ a gate, least": min(per_gate), "fJ a gate, most": max(per_gate), "fp32, pJ": single}
    for way, least in (("", False), (", least gates", True)):
        sums = {
            "integer sums": gate * gates(other, least),
            "float16 sums": product + _FP16_ADD,
            "float32 sums": product + _FP32_ADD,
        }
        numbers |= {f"{rival}{way}, {name}, pJ": value for name, value in sums.items()}
        for entries in tables:
            mine = gate * logarithm_gates(fmt, LogDatapath(entries=entries), least)
            table = f"{entries} constants{way}"
            numbers |= {f"{table}, pJ": mine, f"{table}: below fp32, %": 100 * (1 - mine / single)}
            numbers |= {f"{table}: below {rival}, {name}, %": 100 * (1 - mine / value) for name, value in sums.items()}
    return Measured(numbers=numbers)


CLAIMS = (
    Claim(
        name="fp8_hardware", recorded="not shown", bounds="source",
        says="a multiplier for FP8 takes 50 to 180 % more of a chip than one for INT8",
        source="van Baalen et al., FP8 versus INT8, arXiv:2303.17951, abstract",
        measure=hardware, settings=settings(formats=("e2m5_finite", "e3m4_finite", "e4m3", "e5m2", "int4", "e2m1")),
        expected=(
            Expected(name="e4m3, gates over INT8's, %", low=50.0, high=180.0),
            Expected(name="e3m4_finite, gates over INT8's, %", low=0.0),
            Expected(name="e5m2, gates over INT8's, %", low=50.0),
            Expected(name="e4m3, least gates over INT8's, %", low=50.0, high=180.0),
            Expected(name="e5m2, least gates over INT8's, %", low=50.0),
        ),
        notes="gates counted part by part with an exact sum of 256 products, not synthesised: an AND is one gate, a "
        "full adder five, a choice three. The source compares several accumulators; with an exact one E5M2 lies beyond "
        "its range. All levels of a shifter are as wide as the sum, or (least gates) as a product has grown to: this "
        "alone decides",
    ),
    Claim(
        name="lns_energy", recorded="not shown", bounds="after",
        says="a multiply-accumulate of logarithms takes 90 % less energy than float32's and 55 % less than FP8's",
        source="Zhao et al., LNS-Madam, arXiv:2106.13914, abstract; energies of parts at 45 nm: Horowitz, Computing's "
        "energy problem, ISSCC 2014 (as others quote it)",
        measure=energy, settings=settings(format="lns8_g8", rival="e4m3", tables=(8, 4, 2, 1)),
        expected=(
            *(
                expected
                for gates in ("", ", least gates")
                for expected in (
                    near(f"8 constants{gates}: below fp32, %", 90.0, 0.05, "paper"),
                    Expected(
                        name=f"8 constants{gates}: below e4m3, integer sums, %",
                        low=50.0,
                        high=60.0,
                        published=55.0,
                        origin="paper",
                        part=(0.0, 100.0),
                    ),
                )
            ),
            Expected(name="8 constants: below e4m3, float16 sums, %"),
            Expected(name="8 constants: below e4m3, float32 sums, %"),
            Expected(name="1 constants: below fp32, %"),
            Expected(name="1 constants: below e4m3, integer sums, %"),
            Expected(name="fJ a gate, least"),
            Expected(name="fJ a gate, most"),
            Expected(name="fp32, pJ"),
            Expected(name="8 constants, pJ"),
        ),
        notes="float32 by the table; others by gates, counted as in fp8_hardware, of the mean energy of the table's "
        "integer parts. The source simulates a circuit; memory and registers are not in it here. What an FP8 unit "
        "sums in, and how shifters are counted (least gates, as there), decide the second figure",
    ),
)  # fmt: skip
