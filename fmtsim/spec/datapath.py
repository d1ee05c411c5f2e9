# SPDX-License-Identifier: Apache-2.0
"""How a matrix unit adds products: block length, alignment, rounding and accumulator, as plain records."""

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fmtsim.formats.element import FloatFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import is_representable
from fmtsim.rounding.modes import Rounding, get_rounding
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.records import check_types, lists_fields

TermRounding = Literal["toward_zero", "nearest_even", "nearest_away", "down"]
TERM_ROUNDINGS: tuple[TermRounding, ...] = get_args(TermRounding)
FP32 = FloatFormat(name="fp32", exponent_bits=8, mantissa_bits=23)


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Datapath:
    """Describe a fused unit: products are aligned to the largest exponent, truncated, added exactly and rounded once.

    docs/matmul.md, section 2, has the steps. The default is a Hopper tensor core with 16-bit inputs.

    Args:
        block: Products that are aligned and added at once; None takes all of K.
        fraction_bits: Bits kept below the largest exponent of a block; None keeps all (an exact sum).
        term_rounding: How each term is rounded to those bits.
        rounding: How the sum of a block is rounded to the accumulator, a name or a Rounding; ``"stochastic"`` draws
            from ``generator=`` of the verb.
        accumulator: Format of the running sum, a name or a record; at most float64. A record with
            ``overflow="saturate"`` keeps finite sums at its largest value, where others make Inf of them.
        min_exponent: Lower bound of the alignment exponent; None has none.
        group: Products that are added exactly before the alignment; the group is aligned by the exponents of its
            scales alone (the 4-bit unit of Blackwell). 1 aligns every product by itself.
        promote_every: Products after which the running sum is added to an outer sum and restarts at zero; None never
            does. With ``promote_every=block`` this is a late addend.
        promotion: Format of the outer sum, added to with round-to-nearest-even; None is the accumulator.
        paired: Take a window of ``2 * block`` products as its even and then its odd pairs, as ptxas splits an FP8
            instruction for a unit of 16-bit inputs.
        operand: Format that operands are converted to first, which decides the exponents of subnormals.
        scale: Format of scales inside the unit, one for every ``scale_block`` products of a row; None has no scales.
        scale_block: Products that share a scale.
        signed_zero: Keep the sign of a zero result as IEEE 754 does, instead of +0.
    """

    block: int | None = 16
    fraction_bits: int | None = 25
    term_rounding: TermRounding = "toward_zero"
    rounding: Rounding = Rounding(mode="toward_zero")
    accumulator: FloatFormat = FP32
    min_exponent: int | None = None
    group: int = 1
    promote_every: int | None = None
    promotion: FloatFormat | None = None
    paired: bool = False
    operand: FloatFormat | None = None
    scale: FloatFormat | None = None
    scale_block: int = 0
    signed_zero: bool = False

    def __post_init__(self) -> None:
        integer = re.fullmatch(r"int(\d+)", str(getattr(self.accumulator, "name", self.accumulator)))
        if integer:
            unit = f"IntegerDatapath(accumulator_bits={integer[1]}, saturate=, block=)"
            raise FormatError(f"accumulator={integer[0]!r} is of integers, which have a unit of their own: {unit}")
        object.__setattr__(self, "rounding", get_rounding(self.rounding))
        for name in ("accumulator", "promotion", "operand", "scale"):
            value: object = getattr(self, name)
            fmt = get_format(value) if isinstance(value, str) else value
            if not isinstance(fmt, FloatFormat) and (fmt is not None or name == "accumulator"):
                raise FormatError(
                    f"{name}={shown(value)} is not a floating-point format; pass its name or a FloatFormat"
                )
            object.__setattr__(self, name, fmt)
        for name, lowest in (("block", 1), ("fraction_bits", 0), ("promote_every", 1)):
            _check_count(name, getattr(self, name), lowest, optional=True)
        _check_count("group", self.group, 1)
        check_types(self)
        if self.accumulator.mantissa_bits > 52 or self.accumulator.exponent_bits > 11:
            raise ArgumentError(
                f"accumulator {self.accumulator.name} is wider than float64; choose at most 52 mantissa bits "
                "and 11 exponent bits"
            )
        if self.block is None and (self.group > 1 or self.paired):
            raise ArgumentError("group and paired need a block; pass block=")
        if self.block is not None and self.block % self.group:
            raise ArgumentError(f"group={self.group} does not divide block={self.block}; choose a divisor")
        if (self.scale is None) != (self.scale_block == 0):
            raise ArgumentError(f"scale={self.scale!r} and scale_block={self.scale_block} belong together; pass both")
        if self.scale_block % self.group:
            raise ArgumentError(
                f"scale_block={self.scale_block} is not a multiple of group={self.group}: a group has one scale"
            )
        if self.promote_every is not None and self.paired and self.promote_every % (2 * (self.block or 1)):
            raise ArgumentError(
                f"promote_every={self.promote_every} does not hold whole windows of 2 * block = {2 * (self.block or 1)}"
            )


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TwoStageDatapath:
    """Describe the unit of CDNA3: products are aligned among themselves first, their sum then with the addend.

    docs/matmul.md, section 3. Sum of products: toward zero at ``fraction_bits``; then floored at ``sum_bits``, the
    addend floored at ``fraction_bits``; float32 with round-to-nearest-even.

    Args:
        block: Products added at once.
        fraction_bits: Bits kept of products and addend.
        sum_bits: Bits kept of the sum of products when the addend has the larger exponent.
        parity: Align even and odd products apart and add the two sums floored (the FP8 form); the addend is then
            dropped where it lies below ``2^(E - fraction_bits - 1)``.
    """

    block: int
    fraction_bits: int = 24
    sum_bits: int = 31
    parity: bool = False

    def __post_init__(self) -> None:
        for name in ("block", "fraction_bits", "sum_bits"):
            _check_count(name, getattr(self, name), 1)
        check_types(self)
        if self.parity and self.block % 2:
            raise ArgumentError(f"block={self.block} has no even and odd halves; choose an even block")


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseDatapath:
    """Describe the unit of CDNA2: products rounded to float32, added in pairs, each sum rounded and flushed.

    docs/matmul.md, section 3. Subnormal inputs, addends and results become zero.

    Args:
        block: Products added before the addend, a power of two.
    """

    block: int

    def __post_init__(self) -> None:
        _check_count("block", self.block, 1)
        check_types(self)
        if self.block & (self.block - 1):
            raise ArgumentError(f"block={self.block} cannot be added in pairs; choose a power of two")


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class FmaDatapath:
    """Describe Intel's dot products: chains of float32 fused multiply-adds, with subnormal numbers taken as zero.

    docs/matmul.md, section 3.

    Args:
        block: Products of one instruction, an even number.
        parity: Add even and odd products to two sums that begin at +0, and the sum of both to the running sum (AMX).
            Otherwise products are added to the running sum itself, the odd one of each pair first (VDPBF16PS).
    """

    block: int = 2
    parity: bool = False

    def __post_init__(self) -> None:
        _check_count("block", self.block, 2)
        check_types(self)
        if self.block % 2:
            raise ArgumentError(f"block={self.block} does not hold whole pairs of products; choose an even block")


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerDatapath:
    """Describe an integer unit: exact products of 8-bit integers, a sum of so many bits that wraps or saturates.

    Sums are int32 tensors, int64 for more than 32 bits.

    Args:
        accumulator_bits: Width of the running sum with its sign, 2 to 64.
        saturate: Clamp to the range of the accumulator after every ``block`` products, instead of wrapping.
        block: Products of one instruction, 1 for a clamp after each; it matters for saturation only.

    Raises:
        ArgumentError: A width or a block that is not possible.

    >>> import torch, fmtsim
    >>> a = torch.full((1, 600), 127, dtype=torch.int8)  # 600 * 127 * 127 is beyond 2^23
    >>> [fmtsim.int_mm(a, a.T, target=IntegerDatapath(accumulator_bits=24, saturate=s)).item() for s in (False, True)]
    [-7099816, 8388607]
    """

    accumulator_bits: int = 32
    saturate: bool = False
    block: int = 32

    def __post_init__(self) -> None:
        _check_count("block", self.block, 1)
        check_types(self)
        if not 2 <= self.accumulator_bits <= 64:
            raise ArgumentError(f"accumulator_bits={self.accumulator_bits} is not possible; choose 2 to 64")

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and largest sum."""
        return -(1 << (self.accumulator_bits - 1)), (1 << (self.accumulator_bits - 1)) - 1


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LogDatapath:
    """Describe a unit for logarithms: exponents are added, a shift and a table make integers of them, which are summed.

    docs/matmul.md, section 3. Both operands have a LogFormat of the same gamma. Source: Zhao et al., LNS-Madam,
    arXiv:2106.13914, whose structure this is; the widths are yours.

    The sum has a fixed point: products far below the largest that the format has are lost, so that operands are scaled
    to their format's range first, as layers do. There is no zero, NaN or infinity, and a sum of zero is +0.

    Args:
        entries: Constants ``2^(i / entries)`` in the table, a power of two up to gamma. Logarithms between two of them
            become Mitchell's ``1 + f``.
        fraction_bits: Bits of a constant behind its point.
        block: Products whose shifted terms are added before the constants multiply their sums.
        accumulator_bits: Width of the running sum with its sign; it saturates.
        guard_bits: Bits of the running sum above the largest product. What a shift moves below its last is lost.

    Raises:
        ArgumentError: A number of bits or entries that is not possible.

    >>> import torch, fmtsim
    >>> a = fmtsim.quantize(torch.tensor([[60000.0, -4096.0]]), "lns8_g8")
    >>> path = LogDatapath(entries=1)  # 2^31.75 is taken for 2^31 (1 + 3/4)
    >>> fmtsim.mm(a, a.T, target=path, formats="lns8_g8").item() / 2**24
    225.0
    """

    entries: int = 8
    fraction_bits: int = 8
    block: int = 32
    accumulator_bits: int = 24
    guard_bits: int = 5

    def __post_init__(self) -> None:
        lowest = (("entries", 1), ("fraction_bits", 0), ("block", 1), ("accumulator_bits", 2), ("guard_bits", 0))
        for name, least in lowest:
            _check_count(name, getattr(self, name), least)
        check_types(self)
        if self.entries & (self.entries - 1):
            raise ArgumentError(f"entries={self.entries} does not divide an octave's steps; choose a power of two")
        if not self.guard_bits + 2 <= self.accumulator_bits <= 54:
            raise ArgumentError(
                f"accumulator_bits={self.accumulator_bits} is not possible beside guard_bits={self.guard_bits}; "
                f"choose {self.guard_bits + 2} to 54: a sign, the guard bits, and a bit of the product or more"
            )
        width = self.accumulator_bits + self.fraction_bits + self.block.bit_length()
        if width > 62:
            raise ArgumentError(
                f"a block's sum of accumulator_bits + fraction_bits + log2(block) = {width} bits does not fit an "
                "int64; choose at most 62 together"
            )

    @property
    def constants(self) -> tuple[int, ...]:
        """The table: integers of units of ``2^-fraction_bits`` nearest to ``2^(i / entries)``."""
        return tuple(_power(i, self.entries, self.fraction_bits) for i in range(self.entries))

    def lowest_exponent(self, a: LogFormat, b: LogFormat) -> int:
        """Return u: the running sum counts units of ``2^u``, for elements before their scales."""
        return (a.max_code + b.max_code) // a.gamma + self.guard_bits + 2 - self.accumulator_bits


Arithmetic = Datapath | TwoStageDatapath | PairwiseDatapath | FmaDatapath | IntegerDatapath | LogDatapath


def sum_dtype(arithmetic: Arithmetic) -> torch.dtype:
    """Return the dtype of a unit's sums: float32, float64 where an accumulator needs it, int32 or int64."""
    if isinstance(arithmetic, IntegerDatapath):
        return torch.int32 if arithmetic.accumulator_bits <= 32 else torch.int64
    if isinstance(arithmetic, LogDatapath):
        return torch.float32 if arithmetic.accumulator_bits <= 25 else torch.float64
    if not isinstance(arithmetic, Datapath):
        return torch.float32
    formats = (arithmetic.accumulator, arithmetic.promotion or arithmetic.accumulator)
    return torch.float32 if all(is_representable(fmt, torch.float32) for fmt in formats) else torch.float64


def _power(i: int, entries: int, fraction_bits: int) -> int:
    """Return the integer nearest to ``2^(i / entries + fraction_bits)``: half of a root's floor, rounded up."""
    twice = 1 << (i + (fraction_bits + 1) * entries)
    for _ in range(entries.bit_length() - 1):  # floors of square roots of floors are floors of the whole root
        twice = math.isqrt(twice)
    return (twice + 1) >> 1


def _check_count(name: str, value: object, lowest: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if type(value) is not int or value < lowest:
        raise ArgumentError(f"{name}={shown(value)} is not possible; choose {lowest} or more{', or None' * optional}")
