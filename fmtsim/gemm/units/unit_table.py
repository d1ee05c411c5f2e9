"""Units for the eye: their modes as a table, as text and as HTML."""

from html import escape

from fmtsim.gemm.units.unit import STRENGTHS, Unit, describe, get_unit
from fmtsim.table import aligned, filled

HEADINGS = ("inputs", "sum", "arithmetic", "scales", "evidence")


def unit_rows(unit: Unit) -> list[tuple[str, ...]]:
    """Return one row a mode, its cells in the order of ``HEADINGS``."""
    rows: list[tuple[str, ...]] = []
    for mode in unit.modes:
        inputs = "any float format" if mode.inputs is None else " ".join(mode.inputs)
        every = getattr(mode.datapath, "scale_block", 0)
        scales = f"{mode.scale} every {every}" if mode.scale else ""
        evidence = f"{STRENGTHS[mode.strength]}: {mode.evidence}"
        rows.append((inputs, mode.accumulate, describe(mode.datapath), scales, evidence))
    return rows


def unit_text(unit: str | Unit) -> str:
    """Return a unit's name, description and modes as plain text."""
    unit = get_unit(unit)
    return "\n".join(
        [unit.name, *([unit.description] if unit.description else []), *aligned(filled(HEADINGS, unit_rows(unit)))]
    )


def unit_html(unit: str | Unit) -> str:
    """Return a unit as an HTML table of its modes."""
    unit = get_unit(unit)
    head = "".join(f"<th style='text-align:left'>{escape(heading)}</th>" for heading in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in unit_rows(unit)
    )
    caption = f"<b>{escape(unit.name)}</b> {escape(unit.description)}"
    return f"{caption}<table><tr>{head}</tr>{body}</table>"
