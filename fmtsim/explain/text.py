"""An explanation as text: a paragraph for one number, a table for several."""

import math
from fractions import Fraction

from fmtsim.explain.element import code_text, fields_of
from fmtsim.explain.records import Element, Explanation, Scale
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.table import aligned

_WIDTH = 8  # of the headings


def explanation_text(explanation: Explanation) -> str:
    """Return everything that an explanation says, in lines of text."""
    fmt = explanation.format
    title = f"{fmt.name}, rounding {explanation.rounding.mode}, overflow {explanation.overflow}"
    lines = [title, repr(fmt), ""]
    single = len(explanation.elements) == 1
    for number, scale in enumerate(explanation.scales):
        lines += _scale_lines(
            scale, "" if len(explanation.scales) == 1 else f" {number}", isinstance(fmt, LogTileFormat)
        )
    if single:
        lines += _paragraph(explanation.elements[0], explanation)
    else:
        lines += _table(explanation)
    verdict = "the engine gives the same bits" if explanation.engine_agrees else "THE ENGINE GIVES OTHER BITS: a defect"
    return "\n".join([*lines, _line("check", verdict)])


def _line(heading: str, text: str) -> str:
    return f"{heading:<{_WIDTH}}{text}"


def _scale_lines(scale: Scale, number: str, tile: bool) -> list[str]:
    if tile:
        first = f"low {scale.offset:g}, step {scale.value:g}"
    else:
        first = number_text(scale.value) + (f" (code {scale.code})" if scale.code else "")
        first += "" if scale.offset is None else f", zero point {scale.offset:g}"
    steps = [f"{'':<{_WIDTH}}{step}" for step in scale.steps]
    return [_line(f"{'tile' if tile else 'scale'}{number}", first), *steps]


def _paragraph(element: Element, explanation: Explanation) -> list[str]:
    decision, fmt = element.decision, explanation.format
    lines = [_line("number", _scaled_text(element, explanation))]
    lines.append(_line("below", _neighbour(decision.below, decision.below_distance)))
    lines.append(_line("above", _neighbour(decision.above, decision.above_distance)))
    lines.append(_line("rule", f"{decision.rule}: {decision.reason}"))
    fields = ", ".join(f"{name} {digits}" for name, digits in fields_of(element.code, element.format))
    lines.append(_line("code", f"{code_text(element.code, element.format)} = {element.bits} ({fields})"))
    value = number_text(element.value)
    if isinstance(fmt, BlockFormat) and decision.value != element.value:
        value = f"{number_text(decision.value)} * scale = {value}"
    return [*lines, _line("value", f"{value}, error {_error_text(element)}")]


def _scaled_text(element: Element, explanation: Explanation) -> str:
    given, rounded = element.input, element.decision.x
    if not isinstance(explanation.format, BlockFormat) or not math.isfinite(given) or rounded == given:
        return number_text(given)
    return f"{number_text(given)} / scale = {number_text(rounded)}"


def _table(explanation: Explanation) -> list[str]:
    header = ("number", "scaled", "below", "above", "code", "bits", "value", "error", "rule")
    rows: list[tuple[str, ...]] = [header]
    for element in explanation.elements:
        decision = element.decision
        rows.append((
            number_text(element.input), number_text(decision.x), number_text(decision.below),
            number_text(decision.above), code_text(element.code, element.format), element.bits,
            number_text(element.value), _error_text(element), decision.rule,
        ))  # fmt: skip
    if not isinstance(explanation.format, BlockFormat):
        rows = [row[:1] + row[2:] for row in rows]
    return ["", *aligned(rows, left=()), ""]


def _neighbour(value: float | None, distance: Fraction | None) -> str:
    if value is None:
        return "none"
    return number_text(value) + ("" if distance is None else f", distance {number_text(distance)}")


def _error_text(element: Element) -> str:
    error = element.error
    if error is None:
        return "-"
    if not error:
        return "0"
    share = f" ({float(error / abs(Fraction(element.input))):+.3%})" if element.input else ""
    return f"{float(error):+.6g}{share}"


def number_text(value: float | Fraction | None) -> str:
    """Write a number in as few digits as give it back; ``~`` marks a fraction that float64 does not hold."""
    if value is None:
        return "-"
    near = float(value)
    inexact = isinstance(value, Fraction) and math.isfinite(near) and Fraction(near) != value
    return ("~" if inexact else "") + repr(near).removesuffix(".0")
