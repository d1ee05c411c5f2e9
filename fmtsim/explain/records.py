"""What ``explain`` returns: frozen records that print as text and turn into JSON types."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fmtsim.explain.element import Decision, bit_fields, code_text, fields_of
from fmtsim.formats.block import Format, LogTileFormat
from fmtsim.formats.spec import ElementFormat, Overflow
from fmtsim.rounding.modes import Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Say how a block got its scale.

    Args:
        amax: The largest finite magnitude of the block.
        value: The block's scale (the step of a LogFMT tile).
        code: The scale's code in its format, None where the scale is kept as a value.
        tensor_scale: The decoding scale of the whole tensor in two-level formats, else None.
        offset: The zero point, or the lowest logarithm of a LogFMT tile, else None.
        steps: One sentence for each step of the rule.
    """

    amax: float
    value: float
    code: str | None
    tensor_scale: float | None
    offset: float | None
    steps: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "amax": self.amax,
            "value": self.value,
            "code": self.code,
            "tensor_scale": self.tensor_scale,
            "offset": self.offset,
            "steps": list(self.steps),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """Say how one number became one code.

    Args:
        input: The number given.
        block: Which scale of the explanation it shares.
        decision: How the scaled number was rounded to the element format, exactly.
        code: The code stored, zero point included.
        value: What the code decodes to, scale included.
        format: The element format.
    """

    input: float
    block: int
    decision: Decision
    code: int
    value: float
    format: ElementFormat | LogTileFormat

    @property
    def error(self) -> Fraction | None:
        """Exact difference of value and input, None where one of them is not finite."""
        if not (math.isfinite(self.input) and math.isfinite(self.value)):
            return None
        return Fraction(self.value) - Fraction(self.input)

    @property
    def bits(self) -> str:
        """The code in binary, a space between its fields."""
        return bit_fields(self.code, self.format)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; exact numbers are Fractions."""
        decision = self.decision
        return {
            "input": self.input,
            "block": self.block,
            "rounded_number": decision.x,
            "code": self.code,
            "hex": code_text(self.code, self.format),
            "bits": self.bits,
            "fields": dict(fields_of(self.code, self.format)),
            "element_value": decision.value,
            "value": self.value,
            "error": self.error,
            "below": decision.below,
            "below_distance": decision.below_distance,
            "above": decision.above,
            "above_distance": decision.above_distance,
            "rule": decision.rule,
            "reason": decision.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Say how numbers got their bits under a format and a rounding.

    ``engine_agrees`` is whether the engine that ``quantize`` uses gives the bits explained here; False is a defect.
    """

    format: Format
    rounding: Rounding
    overflow: Overflow
    scales: tuple[Scale, ...]
    elements: tuple[Element, ...]
    engine_agrees: bool

    def __str__(self) -> str:
        from fmtsim.explain.text import explanation_text

        return explanation_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; exact numbers are Fractions."""
        return {
            "format": self.format.name,
            "rounding": self.rounding.mode,
            "overflow": self.overflow,
            "scales": [scale.to_dict() for scale in self.scales],
            "elements": [element.to_dict() for element in self.elements],
            "engine_agrees": self.engine_agrees,
        }
