# SPDX-License-Identifier: Apache-2.0
"""What a scaled format is: an element format, the block that shares a scale, and how the scale is made."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fmtsim.formats.display import Displayed, Fields, short_number
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.formats.floating import E8M0 as E8M0
from fmtsim.formats.floating import FP32 as FP32
from fmtsim.formats.packed import PackedFormat as PackedFormat
from fmtsim.formats.scaling import (
    Arithmetic,
    ScaleRule,
    Scaling,
    block_scaling,
    block_text,
    check_block,
    check_use,
    level_text,
    rule_fields,
)
from fmtsim.formats.scaling import Block as Block
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.records import READERS, as_int, check_types, lists_fields


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(Displayed):
    """Describe a format in which a block of elements shares a scale: ``x ~= scale * element``.

    An operand is seen as a matrix: ``dim`` runs along its rows (the inner axis), all other dimensions, flattened in
    order, are its outer axis. ``block = (outer, inner)`` counts elements along both; None means the whole extent.
    So ``(1, 32)`` is an MX block, ``(128, 128)`` a tile, ``(1, None)`` a row (channel), ``(None, None)`` the tensor.

    A power of two that a narrow scale format lacks becomes its largest or lowest: elements of blocks above saturate,
    those of blocks below round in its coarser steps. Where the scale has no NaN either, NaN becomes the largest value.

    Args:
        name: The name under which the format is listed.
        element: The element format, a name or a record.
        scaling: The block and how its scale is made (``block_scaling`` makes one by the name of a rule). Of its fields
            a format has all but ``statistic``, ``input_scale``, ``scale_rounding``, ``eden``, ``empty``, ``history``,
            which a ``Quantizer`` takes, and ``candidates`` in the order ``"fouroversix"`` alone.
        alternative: Elements of the blocks that they suit better, by ``scaling.metric``: the scale of such a block has
            its sign bit set, and ``alternative.max`` there stands for ``element.max``. None has no such blocks.
        aliases: Other names.
        source: The document that defines the format.
    """

    name: str = field(kw_only=False)
    element: ElementFormat = field(kw_only=False)
    scaling: Scaling = field(kw_only=False)
    alternative: ElementFormat | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check = partial(_require, self.name)
        check(
            isinstance(self.scaling, Scaling),
            f"scaling={shown(self.scaling)} is not a Scaling",
            "Scaling(block=..., ...)",
        )
        element: Any = self.element
        if isinstance(element, str):
            object.__setattr__(self, "element", READERS[FloatFormat](element, ""))
        check_types(self, FormatError)
        rule, real, scale = self.scale_rule, not self.power_of_two, self.scale
        check_use(f"format {shown(self.name)}:", self.scaling, "a block format")
        smooth = isinstance(self.element, CodebookFormat | LogFormat)
        check(not (rule == "even" and smooth), "scale_rule='even' needs mantissa bits", "floor or amax")
        narrow = f"scale_rule='amax' needs a scale with mantissa bits, not {scale.name}"
        powers = self.scaling.power_of_two is not None
        check(bool(scale.mantissa_bits) or powers or not real, narrow, "floor, ceil, rceil or even")
        stored = scale.bits <= 8 or scale.name in ("fp32", "bf16", "fp16")
        check(
            stored,
            f"scale format {scale.name} is not supported",
            "fp32, bf16, fp16 or one of 8 bits or fewer, such as ue5m3 or uint6",
        )
        tensor, several = self.scaling.tensor, len(self.scaling.candidates) > 1
        check(real or tensor is None, "a tensor scale stands alone", "'amax', 'encode' and TensorScale()")
        compared = tensor is not None and tensor.order == "fouroversix"
        check(compared or not several, "candidates alone", "TensorScale(order='fouroversix'), or pass a Quantizer")
        pairs = self.alternative is None or (compared and scale.signed and self.alternative.bits == self.element.bits)
        check(
            pairs, f"alternative={self.alternative}", "as many bits, a signed scale, TensorScale(order='fouroversix')"
        )
        counted = isinstance(self.element, IntFormat) and not (self.element.signed or self.element.fraction_bits)
        shifted = counted and real and scale.name == "fp32" and not self.tensor_scale
        only = "an unsigned integer element without fraction bits, scale fp32 and scale_rule='amax'"
        check(shifted or not self.zero_point, "zero_point=True does not fit", only)

    def __hash__(self) -> int:  # caches ask for it in every call: a few fields tell formats apart
        return hash((self.name, self.scaling.block, self.scaling.exponent_rule))

    @property
    def block(self) -> Block:
        """Elements that share a scale, ``(outer, inner)``."""
        return self.scaling.block

    @property
    def scale(self) -> FloatFormat:
        """The format of the scale."""
        return self.scaling.scale

    @property
    def scale_rule(self) -> ScaleRule:
        """How the largest magnitude of a block becomes its scale, by the name that verbs take."""
        return self.scaling.scale_rule

    @property
    def arithmetic(self) -> Arithmetic:
        """The order of float32 operations of real scales (docs/semantics.md, section 5)."""
        return self.scaling.arithmetic

    @property
    def tensor_scale(self) -> bool:
        """Whether a float32 scale of the whole tensor brings the block scales into range (NVFP4)."""
        return self.scaling.tensor is not None

    @property
    def zero_point(self) -> bool:
        """Whether an integer zero point shifts the grid to the block's range of values."""
        return self.scaling.zero_point

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        return self.scaling.exponent_rule is not None

    @property
    def exponents(self) -> tuple[int, int]:
        """Lowest and largest exponent of scales that are powers of two: what the scale format has of -127 to 127."""
        return max(math.frexp(self.scale.min_subnormal)[1] - 1, -127), min(self.scale.max_exponent, 127)

    @property
    def has_usual_scale(self) -> bool:
        """Whether the scale format marks blocks of NaN, and has all exponents where scales are powers of two."""
        return self.scale.has_nan and (not self.power_of_two or self.exponents == (-127, 127))

    @property
    def is_direct(self) -> bool:
        """Whether kernels compute it: ``scaling.is_direct``, a usual scale, and the same elements in all blocks."""
        return self.alternative is None and self.scaling.is_direct and self.has_usual_scale

    @property
    def bits(self) -> int:
        """Width of an element's code; scales come on top (see ``bits_per_element``)."""
        return self.element.bits

    @property
    def bits_per_element(self) -> float:
        """Average storage of an element with its share of the block scale, in full blocks."""
        second = 0.0 if self.scaling.tensor is None else _shared(32, self.scaling.tensor.block)
        return self.bits + _shared(self.scale.bits + 32 * self.zero_point, self.block) + second

    @property
    def max(self) -> float:
        """Largest value with scales: the element's largest (``element.max``) times the largest scale of a block.

        A real number, which may lie beyond float32; the scale of the tensor (NVFP4) counts as 1.
        """
        return self.element.max * self.scale.max

    @property
    def min(self) -> float:
        """Lowest value with scales, likewise; a zero point lets an unsigned element reach ``-max``."""
        return -self.max if self.zero_point else self.element.min * self.scale.max

    @property
    def default_overflow(self) -> Overflow:
        """The element's overflow rule."""
        return self.element.default_overflow

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        level = level_text(self.scaling.tensor) if self.scaling.tensor else ""
        times = f", times the {level.replace('tensor scale', 'scale of the tensor')}" if level else ""
        return [
            ("element", repr(self.element)),
            *([("or element", repr(self.alternative))] if self.alternative else []),
            ("element range", f"{short_number(self.element.min)} to {short_number(self.element.max)}"),
            ("range with scales", f"{short_number(self.min)} to {short_number(self.max)}{times}"),
            ("block", block_text(self.block, " x ")),
            ("scale", f"{self.scale.name} by {self.scaling.rule_text}"),
            ("bits per element", f"{self.bits_per_element:g}"),
            *([] if self.power_of_two else [("arithmetic", self.arithmetic)]),
            *([(level, "fp32")] if level else []),
            *([("candidates", str(self.scaling))] if len(self.scaling.candidates) > 1 else []),
            *([("zero point", "one integer a block")] if self.zero_point else []),
        ]

    def __repr__(self) -> str:
        blocks = block_text(self.block)
        blocks = blocks if self.block == (None, None) else f"blocks of {blocks}"
        extra = f" + fp32 {level_text(self.scaling.tensor)}" if self.scaling.tensor else ""
        extra += " + zero point" if self.zero_point else ""
        return (
            f"BlockFormat({self.name!r}: {self.element.name} in {blocks}, "
            f"scale {self.scale.name} by {self.scaling.rule_text}{extra})"
        )


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LogTileFormat(Displayed):
    """Describe LogFMT: a tile keeps its smallest and largest logarithm, codes count equal steps between them.

    A code is the sign bit followed by ``K``; ``K == 0`` is zero, ``K >= 1`` is ``exp(low + step * (K - 1))`` with
    ``step = (high - low) / (2**(bits - 1) - 2)``, ``high = ln(amax)`` and
    ``low = max(ln(amin), high - 32 ln 2)`` over the non-zero magnitudes of the tile.

    Args:
        name: The name under which the format is listed.
        bits: Width of a code with its sign, 3 to 16.
        block: Elements that share a range, ``(outer, inner)`` as in BlockFormat.
        aliases: Other names.
        source: The document that defines the format.
    """

    name: str
    bits: int
    block: Block = (1, 128)
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_block(f"format {shown(self.name)}: ", self.block)
        check_types(self, FormatError)
        if not 3 <= self.bits <= 16:
            raise FormatError(f"format {self.name!r}: bits={self.bits} is not allowed; choose 3 to 16")

    @property
    def max_code(self) -> int:
        """Code of the largest value of a tile."""
        return (1 << (self.bits - 1)) - 1

    @property
    def bits_per_element(self) -> float:
        """Average storage of an element with its share of the tile's two float32 range values, in full tiles."""
        return self.bits + _shared(64, self.block)

    @property
    def default_overflow(self) -> Overflow:
        """Infinities saturate to the tile's largest finite magnitude."""
        return "saturate"

    @property
    def code_fields(self) -> Fields:
        """The fields of a code."""
        return ("sign", 1), ("logarithm", self.bits - 1)

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        return [
            ("bits", str(self.bits)),
            ("tile", block_text(self.block, " x ")),
            ("steps", str(self.max_code - 1)),
            ("bits per element", f"{self.bits_per_element:g}"),
        ]

    def __repr__(self) -> str:
        steps = f"{self.max_code} logarithmic steps"
        return f"LogTileFormat({self.name!r}: {self.bits} bits, {steps} a tile of {block_text(self.block)})"


ScaledFormat = BlockFormat | LogTileFormat | PackedFormat
Format = ElementFormat | ScaledFormat


BLOCK_NAMES: dict[Block, str] = {(None, None): "tensor", (1, None): "channel"}
"""Blocks that names of formats have words for; ``get_format`` reads these names."""


def _named(base: Format, block: Block, scale_rule: ScaleRule | None) -> str:
    """Return the name of a format made from another, such as ``e4m3_1x32_amax``."""
    return "_".join(filter(None, (base.name, BLOCK_NAMES.get(block) or block_text(block), scale_rule)))


def scaled(element: ElementFormat, block: Block, scale_rule: ScaleRule = "amax") -> BlockFormat:
    """Wrap an element format into a block format with a float32 scale (E8M0 for the power-of-two rules)."""
    name = _named(element, block, scale_rule)
    return BlockFormat(name=name, element=element, scaling=block_scaling(block, scale_rule))


def with_block(fmt: Format, block_size: int | Block | None, scale_rule: ScaleRule | None = None) -> Format:
    """Return the format with another block or scale rule, turning an element format into a scaled one.

    What changes changes the name, so that no two formats share one.
    """
    if block_size is None and scale_rule is None:
        return fmt
    block = None
    if block_size is not None:
        block = as_int(tuple(block_size) if isinstance(block_size, tuple | list) else (1, block_size))
        sizes = [size for size in block if size is not None]
        if len(block) != 2 or not all(type(size) is int and 0 < size < 1 << 63 for size in sizes):
            raise ArgumentError(
                f"block_size={shown(block_size)} is not a block; choose an int of 1 or more, or (outer, inner), "
                "in which None means the whole extent"
            )
    if scale_rule is not None:
        rule_fields(scale_rule)
    if isinstance(fmt, PackedFormat):
        raise FormatError(f"{fmt.name} has blocks and scales of its source; leave block_size= and scale_rule= out")
    if isinstance(fmt, LogTileFormat):
        if scale_rule is not None:
            raise FormatError(
                f"{fmt.name} has no scale, so scale_rule={shown(scale_rule)} does not apply; leave it out"
            )
        if block is None or block == fmt.block:
            return fmt
        return dataclasses.replace(fmt, name=_named(fmt, block, None), block=block)
    if isinstance(fmt, BlockFormat):
        fields = rule_fields(scale_rule or fmt.scale_rule)
        if (fields["exponent_rule"] is None) != fmt.power_of_two:  # real scales stay in their format, and so do powers
            fields["scale"] = fmt.scale
        scaling = dataclasses.replace(fmt.scaling, block=block or fmt.block, **fields)
        if scaling == fmt.scaling:
            return fmt
        return dataclasses.replace(fmt, name=_named(fmt, scaling.block, scaling.scale_rule), scaling=scaling)
    if block is None:
        hint = "pass block_size= or a block format such as 'mxfp8_e4m3'"
        raise FormatError(f"scale_rule={shown(scale_rule)} needs a block; {hint}")
    return scaled(fmt, block, scale_rule or "amax")


def _shared(bits: int, block: Block) -> float:
    """Return an element's share of bits that a block has once."""
    outer, inner = block
    return 0.0 if outer is None or inner is None else bits / (outer * inner)


def _require(name: str, condition: bool, given: str, allowed: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(f"format {shown(name)}: {given}; choose {allowed}")
