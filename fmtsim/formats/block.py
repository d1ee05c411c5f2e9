"""What a scaled format is: an element format, the block that shares a scale, and how the scale is made."""

import dataclasses
import math
from dataclasses import dataclass

from fmtsim.errors import FormatError
from fmtsim.formats.spec import SCALE_RULES, CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.formats.spec import Overflow, ScaleArithmetic, ScaleRule

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
        if any(size is not None and size < 1 for size in self.block) or len(self.block) != 2:
            raise FormatError(f"format {self.name!r}: block={self.block} is not allowed; choose (outer, inner) sizes of 1 or more, or None")  # fmt: skip
        if self.scale_rule not in SCALE_RULES:
            raise FormatError(f"format {self.name!r}: scale_rule={self.scale_rule!r} is unknown; choose one of {', '.join(SCALE_RULES)}")  # fmt: skip
        if self.arithmetic not in ("divide", "reciprocal", "encode"):
            raise FormatError(f"format {self.name!r}: arithmetic={self.arithmetic!r} is unknown; choose divide, reciprocal or encode")  # fmt: skip
        if self.scale_rule == "even" and isinstance(self.element, CodebookFormat | LogFormat):
            raise FormatError(f"format {self.name!r}: scale_rule='even' needs an element with mantissa bits; choose floor or amax")  # fmt: skip
        if self.scale_rule != "amax" and self.scale.exponent_bits < 8:
            raise FormatError(f"format {self.name!r}: scale_rule={self.scale_rule!r} needs a scale with 8 exponent bits, not {self.scale.name}; choose scale_rule='amax'")  # fmt: skip
        if self.scale_rule == "amax" and not self.scale.mantissa_bits:
            raise FormatError(f"format {self.name!r}: scale_rule='amax' needs a scale with mantissa bits, not {self.scale.name}; choose floor, ceil, rceil or even")  # fmt: skip
        if self.scale.bits > 8 and self.scale.name not in ("fp32", "bf16", "fp16"):
            raise FormatError(f"format {self.name!r}: scale format {self.scale.name} is not supported; choose fp32, bf16, fp16 or one of 8 bits or fewer")  # fmt: skip
        if self.tensor_scale and (self.scale_rule != "amax" or self.arithmetic != "encode"):
            raise FormatError(f"format {self.name!r}: tensor_scale=True needs scale_rule='amax' and arithmetic='encode'")
        if not self.scale.has_nan:
            raise FormatError(f"format {self.name!r}: scale format {self.scale.name} has no NaN, which marks spoiled blocks; choose one that has")  # fmt: skip
        if self.zero_point and (not isinstance(self.element, IntFormat) or self.element.signed or self.tensor_scale
                                or self.scale_rule != "amax" or self.element.fraction_bits or self.scale.name != "fp32"):  # fmt: skip
            raise FormatError(f"format {self.name!r}: zero_point=True needs an unsigned integer element without fraction bits, scale fp32 and scale_rule='amax'")  # fmt: skip

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
        if any(size is not None and size < 1 for size in self.block) or len(self.block) != 2:
            raise FormatError(f"format {self.name!r}: block={self.block} is not allowed; choose (outer, inner) sizes of 1 or more, or None")  # fmt: skip

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
        raise FormatError(f"scale_rule={scale_rule!r} needs a block; pass block_size= or a block format such as 'mxfp8_e4m3'")  # fmt: skip
    return scaled(fmt, block, scale_rule or "amax")


def log2_floor(value: float) -> int:
    """Return ``floor(log2(value))`` of a positive finite float, exactly."""
    return math.frexp(value)[1] - 1
