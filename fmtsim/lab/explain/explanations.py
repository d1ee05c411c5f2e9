# SPDX-License-Identifier: Apache-2.0
"""What ``explain`` returns: frozen records that print as text (a paragraph or a table) and turn into JSON types."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from html import escape
from typing import Any

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.display import bit_fields, code_text, split_code
from fmtsim.formats.element import ElementFormat, Overflow
from fmtsim.rounding.modes import Rounding
from fmtsim.support.table import aligned, number_text

_WIDTH, _SHOWN = 8, 16  # of the headings of a text; numbers that a prompt shows


Number = float | Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Say how a number was rounded to an element format.

    ``below`` and ``above`` are the values of the format next to ``x``, which is neither; None where the format ends.
    """

    x: Number
    code: int
    value: float
    below: float | None
    above: float | None
    rule: str
    reason: str

    @property
    def below_distance(self) -> Fraction | None:
        """Exact distance from the neighbour below."""
        return self._distance(self.below)

    @property
    def above_distance(self) -> Fraction | None:
        """Exact distance to the neighbour above."""
        return self._distance(self.above)

    def _distance(self, value: float | None) -> Fraction | None:
        if value is None or not (math.isfinite(self.x) and math.isfinite(value)):
            return None
        return abs(Fraction(self.x) - Fraction(value))


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
        return asdict(self) | {"steps": list(self.steps)}


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
    def relative_error(self) -> float | None:
        """The error as a share of the input; infinite beyond float64, None where there is no error or no share."""
        if not self.error or not self.input:
            return None if self.error is None or not self.input else 0.0
        return _float(self.error / abs(Fraction(self.input)))

    @property
    def bits(self) -> str:
        """The code in binary, a space between its fields."""
        return bit_fields(self.code, self.format)

    @property
    def hex(self) -> str:
        """The code in hexadecimal, with the digits of its width."""
        return code_text(self.code, self.format)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; exact numbers are Fractions."""
        decision = self.decision
        names = ("below", "below_distance", "above", "above_distance", "rule", "reason")
        fields = ("input", "block", "code", "hex", "bits", "value", "error", "relative_error")
        return {
            **{name: getattr(self, name) for name in fields},
            **{name: getattr(decision, name) for name in names},
            "fields": dict(split_code(self.code, self.format)),
            "rounded_number": decision.x,
            "element_value": decision.value,
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
        fmt = self.format
        title = f"{fmt.name}, rounding {self.rounding.mode}, overflow {self.overflow}"
        lines = [title, repr(fmt), ""]
        single = len(self.elements) == 1
        for number, scale in enumerate(self.scales):
            label = "" if len(self.scales) == 1 else f" {number}"
            tile = isinstance(fmt, LogTileFormat)
            if tile:
                first = f"low {scale.offset:g}, step {scale.value:g}"
            else:
                first = number_text(scale.value) + (f" (code {scale.code})" if scale.code else "")
                first += "" if scale.offset is None else f", zero point {scale.offset:g}"
            steps = [f"{'':<{_WIDTH}}{step}" for step in scale.steps]
            lines += [_line(f"{'tile' if tile else 'scale'}{label}", first), *steps]
        if single:
            lines += _paragraph(self.elements[0], self)
        else:
            header = ("number", "scaled", "below", "above", "code", "bits", "value", "error", "rule")
            rows: list[tuple[str, ...]] = [header]
            for element in self.elements:
                decision = element.decision
                rows.append((
                    number_text(element.input), number_text(decision.x), number_text(decision.below),
                    number_text(decision.above), element.hex, element.bits,
                    number_text(element.value), _error_text(element), decision.rule,
                ))  # fmt: skip
            if not isinstance(self.format, BlockFormat):
                rows = [row[:1] + row[2:] for row in rows]
            lines += ["", *aligned(rows, left=()), ""]
        verdict = "the engine gives the same bits" if self.engine_agrees else "THE ENGINE GIVES OTHER BITS: a defect"
        return "\n".join([*lines, _line("check", verdict)])

    def __repr__(self) -> str:
        few = len(self.elements) <= _SHOWN
        return str(self) if few else f"Explanation({len(self.elements)} numbers in {self.format.name}; print shows all)"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

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


def _line(heading: str, text: str) -> str:
    return f"{heading:<{_WIDTH}}{text}"


def _paragraph(element: Element, explanation: Explanation) -> list[str]:
    decision, fmt = element.decision, explanation.format
    number = number_text(element.input)
    if isinstance(fmt, BlockFormat) and math.isfinite(element.input) and decision.x != element.input:
        number += f" / scale = {number_text(decision.x)}"
    lines = [_line("number", number)]
    for side in ("below", "above"):
        value, distance = getattr(decision, side), getattr(decision, f"{side}_distance")
        text = "" if distance is None else f", distance {number_text(distance)}"
        lines.append(_line(side, "none" if value is None else f"{number_text(value)}{text}"))
    lines.append(_line("rule", f"{decision.rule}: {decision.reason}"))
    fields = ", ".join(f"{name} {digits}" for name, digits in split_code(element.code, element.format))
    lines.append(_line("code", f"{element.hex} = {element.bits} ({fields})"))
    result = number_text(element.value)
    if isinstance(fmt, BlockFormat) and decision.value != element.value:
        result = f"{number_text(decision.value)} * scale = {result}"
    return [*lines, _line("value", f"{result}, error {_error_text(element)}")]


def _error_text(element: Element) -> str:
    error = element.error
    if error is None:
        return "-"
    if not error:
        return "0"
    share = element.relative_error
    return f"{_float(error):+.6g}" + ("" if share is None else f" ({share:+.3%})")


def _float(number: Fraction) -> float:
    """Return the nearest float64, infinite beyond the largest."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
