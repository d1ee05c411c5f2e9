"""What a scaled format is: an element format, the block that shares a scale, and how the scale is made."""

import dataclasses
from dataclasses import dataclass
from functools import partial

from fmtsim.errors import FormatError
from fmtsim.formats.spec import (
    SCALE_RULES,
    CodebookFormat,
    ElementFormat,
    FloatFormat,
    IntFormat,
    LogFormat,
    Overflow,
    ScaleArithmetic,
    ScaleRule,
)

ARITHMETICS: tuple[ScaleArithmetic, ...] = ("divide", "reciprocal", "encode")

Block = tuple[int | None, int | None]

E8M0 = FloatFormat(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    signed=False,
    nan="top",
    infinities=False,
    has_zero=False,
    has_subnormals=False,
    aliases=("float8_e8m0fnu", "ue8m0"),
    source="OCP Microscaling Formats (MX) v1.0, section 5.4.1",
)
FP32 = FloatFormat(name="fp32", exponent_bits=8, mantissa_bits=23, aliases=("float32",), source="IEEE 754-2019, 3.6")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Describe a format in which a block of elements shares a scale: ``x ~= scale * element``.

    An operand is seen as a matrix: ``dim`` runs along its rows (the inner axis), all other dimensions, flattened in
    order, are its outer axis. ``block = (outer, inner)`` counts elements along both; None means the whole extent.
    So ``(1, 32)`` is an MX block, ``(128, 128)`` a tile, ``(1, None)`` a row (channel), ``(None, None)`` the tensor.

    Args:
        name: The name under which the format is listed.
        element: The element format.
        block: Elements that share a scale, ``(outer, inner)``.
        scale: The format of the scale.
        scale_rule: How the largest magnitude ``amax`` of a block becomes its scale: the power-of-two rules
            ``"floor"``, ``"ceil"``, ``"rceil"``, ``"even"``, or ``"amax"``, the real number ``amax / element.max``.
        arithmetic: The order of float32 operations of the ``"amax"`` rule (docs/semantics.md, section 5).
        tensor_scale: Whether a float32 scale of the whole tensor brings the block scales into range (NVFP4).
        zero_point: Whether an integer zero point shifts the grid to the block's range of values.
        aliases: Other names.
        source: The document that defines the format.
    """

    name: str
    element: ElementFormat
    block: Block
    scale: FloatFormat = FP32
    scale_rule: ScaleRule = "amax"
    arithmetic: ScaleArithmetic = "reciprocal"
    tensor_scale: bool = False
    zero_point: bool = False
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        _require_block(self.name, self.block)
        check = partial(_require, self.name)
        check(self.scale_rule in SCALE_RULES, f"scale_rule={self.scale_rule!r} is unknown", ", ".join(SCALE_RULES))
        check(self.arithmetic in ARITHMETICS, f"arithmetic={self.arithmetic!r} is unknown", ", ".join(ARITHMETICS))
        smooth = isinstance(self.element, CodebookFormat | LogFormat)
        check(not (self.scale_rule == "even" and smooth), "scale_rule='even' needs mantissa bits", "floor or amax")
        real, scale = self.scale_rule == "amax", self.scale
        wide = f"scale_rule={self.scale_rule!r} needs a scale with 8 exponent bits, not {scale.name}"
        check(real or scale.exponent_bits >= 8, wide, "scale_rule='amax'")
        narrow = f"scale_rule='amax' needs a scale with mantissa bits, not {scale.name}"
        check(bool(scale.mantissa_bits) or not real, narrow, "floor, ceil, rceil or even")
        stored = scale.bits <= 8 or scale.name in ("fp32", "bf16", "fp16")
        check(stored, f"scale format {scale.name} is not supported", "fp32, bf16, fp16 or one of 8 bits or fewer")
        check(scale.has_nan, f"scale format {scale.name} has no NaN, which marks spoiled blocks", "one that has")
        encoded = real and self.arithmetic == "encode"
        check(encoded or not self.tensor_scale, "tensor_scale=True stands alone", "'amax' and 'encode' with it")
        counted = isinstance(self.element, IntFormat) and not (self.element.signed or self.element.fraction_bits)
        shifted = counted and real and scale.name == "fp32" and not self.tensor_scale
        only = "an unsigned integer element without fraction bits, scale fp32 and scale_rule='amax'"
        check(shifted or not self.zero_point, "zero_point=True does not fit", only)

    @property
    def bits(self) -> int:
        """Width of an element's code; scales come on top (see ``bits_per_element``)."""
        return self.element.bits

    @property
    def bits_per_element(self) -> float:
        """Average storage of an element with its share of the block scale, in full blocks."""
        outer, inner = self.block
        if outer is None or inner is None:
            return float(self.bits)
        return self.bits + (self.scale.bits + 32 * self.zero_point) / (outer * inner)

    @property
    def default_overflow(self) -> Overflow:
        """The element's overflow rule."""
        return self.element.default_overflow

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        return self.scale_rule != "amax"

    def __repr__(self) -> str:
        shape = "x".join("all" if size is None else str(size) for size in self.block)
        extra = " + fp32 tensor scale" if self.tensor_scale else ""
        extra += " + zero point" if self.zero_point else ""
        return (
            f"BlockFormat({self.name!r}: {self.element.name} in blocks of {shape}, "
            f"scale {self.scale.name} by {self.scale_rule}{extra})"
        )

    def _repr_html_(self) -> str:
        from fmtsim.formats.display import format_html

        return format_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTileFormat:
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
        if not 3 <= self.bits <= 16:
            raise FormatError(f"format {self.name!r}: bits={self.bits} is not allowed; choose 3 to 16")
        _require_block(self.name, self.block)

    @property
    def max_code(self) -> int:
        """Code of the largest value of a tile."""
        return (1 << (self.bits - 1)) - 1

    @property
    def bits_per_element(self) -> float:
        """Average storage of an element with its share of the tile's two float32 range values, in full tiles."""
        outer, inner = self.block
        return float(self.bits) if outer is None or inner is None else self.bits + 64 / (outer * inner)

    @property
    def default_overflow(self) -> Overflow:
        """Infinities saturate to the tile's largest finite magnitude."""
        return "saturate"

    def __repr__(self) -> str:
        shape = "x".join("all" if size is None else str(size) for size in self.block)
        return f"LogTileFormat({self.name!r}: {self.bits} bits, {self.max_code} logarithmic steps a tile of {shape})"

    def _repr_html_(self) -> str:
        from fmtsim.formats.display import format_html

        return format_html(self)


ScaledFormat = BlockFormat | LogTileFormat
Format = ElementFormat | ScaledFormat


def scaled(element: ElementFormat, block: Block, scale_rule: ScaleRule = "amax") -> BlockFormat:
    """Wrap an element format into a block format with a float32 scale (E8M0 for the power-of-two rules)."""
    outer, inner = ("all" if size is None else str(size) for size in block)
    scale = FP32 if scale_rule == "amax" else E8M0
    name = f"{element.name}_{outer}x{inner}_{scale_rule}"
    return BlockFormat(name=name, element=element, block=block, scale=scale, scale_rule=scale_rule)


def with_block(fmt: Format, block_size: int | Block | None, scale_rule: ScaleRule | None) -> Format:
    """Return the format with another block or scale rule, turning an element format into a scaled one."""
    if block_size is None and scale_rule is None:
        return fmt
    block = (1, block_size) if isinstance(block_size, int) else block_size
    if isinstance(fmt, LogTileFormat):
        if scale_rule is not None:
            raise FormatError(f"{fmt.name} has no scale, so scale_rule={scale_rule!r} does not apply; leave it out")
        return dataclasses.replace(fmt, block=block or fmt.block)
    if isinstance(fmt, BlockFormat):
        rule = scale_rule or fmt.scale_rule
        scale = fmt.scale
        if (rule == "amax") != (fmt.scale_rule == "amax"):
            scale = FP32 if rule == "amax" else E8M0
        return dataclasses.replace(fmt, block=block or fmt.block, scale=scale, scale_rule=rule)
    if block is None:
        hint = "pass block_size= or a block format such as 'mxfp8_e4m3'"
        raise FormatError(f"scale_rule={scale_rule!r} needs a block; {hint}")
    return scaled(fmt, block, scale_rule or "amax")


def _require(name: str, condition: bool, given: str, allowed: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(f"format {name!r}: {given}; choose {allowed}")


def _require_block(name: str, block: Block) -> None:
    sizes = isinstance(block, tuple) and len(block) == 2
    if not sizes or not all(size is None or (type(size) is int and 1 <= size < 1 << 63) for size in block):
        allowed = "(outer, inner) sizes of 1 or more, or None"
        raise FormatError(f"format {name!r}: block={block} is not allowed; choose {allowed}")
