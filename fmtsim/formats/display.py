# SPDX-License-Identifier: Apache-2.0
"""Formats for the eye: facts, tables of codes, and their HTML for notebooks; the records of formats stand above."""

import itertools
import math
from abc import abstractmethod
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fmtsim.support.errors import ArgumentError, FormatError
from fmtsim.support.plotting import BLUE, ORANGE, label_axes, new_panels, saved, set_title
from fmtsim.support.table import aligned, page_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLE_BITS = 16  # 65536 rows
_HTML_BITS = 8
_BAR = "  |  "  # between codes side by side

Fields = tuple[tuple[str, int], ...]
"""The fields of a code from its most significant bit: names and widths."""


class Displayed:
    """What a record of a format says of itself; notebooks show it as HTML."""

    __slots__ = ()

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say beside name, aliases and source, as pairs of a heading and a text."""

    @property
    def code_fields(self) -> Fields:
        """The fields of a code."""
        return (("index", self.bits),)  # type: ignore[attr-defined]  # every record has bits

    def plot(self, path: str | Path | None = None, *, ax: Any = None) -> "Figure":
        """Draw every value on a line, and how far rounding may move a number of each magnitude; return the figure.

        A block format draws its element.

        Args:
            path: Where to save a PNG.
            ax: Two axes to draw into.

        Raises:
            FormatError: The format has more than 16 bits, or its values depend on the tile (LogFMT).
            FmtsimError: matplotlib is missing.
        """
        fmt: Any = self
        values = finite_values(fmt)
        figure, (ticks, errors) = new_panels(8.0, 4.2, ax, 2, height_ratios=(1, 3))
        ticks.vlines(values, 0, 1, color=BLUE, linewidth=0.8)
        ticks.set_yticks([])
        label_axes(ticks, f"the {len(values)} finite values of {getattr(fmt, 'element', fmt).name}", "")
        positive = [value for value in values if value > 0]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(positive)]
        # a saw: nothing is lost at a value, half a step just beside the middle of two
        x = [
            point for value, middle in zip(positive, [*middles, positive[-1]], strict=True) for point in (value, middle)
        ]
        step = [0.0 if i % 2 == 0 else 100 * (x[i] - x[i - 1]) / x[i] for i in range(len(x))]
        errors.plot(x, step, color=ORANGE, linewidth=1.0)
        errors.set_xscale("log", base=2)
        label_axes(errors, "magnitude", "error of rounding (%)")
        set_title(ticks, fmt.name)
        return saved(figure, path)

    def _repr_html_(self) -> str:
        return format_html(self)


class CodeRow(NamedTuple):
    """One code: its number, its bits with a space between the fields, and its value."""

    code: int
    bits: str
    value: float


def split_code(code: int, fmt: Any) -> tuple[tuple[str, str], ...]:
    """Return the fields of a code as pairs of name and binary digits, those of no width left out."""
    digits, parts = f"{code:0{fmt.bits}b}", []
    for name, width in fmt.code_fields:
        parts += [(name, digits[:width])] if width else []
        digits = digits[width:]
    return tuple(parts)


def code_table(fmt: Any) -> list[CodeRow]:
    """Return every code of a format with its bits and value, in the order of codes.

    A block format gives the table of its element.

    Raises:
        FormatError: The format has more than 16 bits, or its values depend on the tile (LogFMT).
    """
    fmt = getattr(fmt, "element", fmt)
    if not hasattr(fmt, "value"):
        raise FormatError(f"{fmt.name} has no table of codes: its values depend on the range of each tile")
    if fmt.bits > _TABLE_BITS:
        raise FormatError(f"{fmt.name} has 2**{fmt.bits} codes; tables stop at {_TABLE_BITS} bits")
    return [CodeRow(code, bit_fields(code, fmt), fmt.value(code)) for code in range(count_of(fmt))]


def finite_values(fmt: Any) -> tuple[float, ...]:
    """Return the finite values that rounding returns, ascending, each once; errors as in ``code_table``."""
    rows, lowest = code_table(fmt), getattr(fmt, "element", fmt).min
    return tuple(sorted({row.value + 0.0 for row in rows if lowest <= row.value < math.inf}))  # -0 + 0 = 0


def format_facts(fmt: Any) -> list[tuple[str, str]]:
    """Return what there is to say about a format as pairs of a heading and a text."""
    aliases = [("aliases", ", ".join(fmt.aliases))] if fmt.aliases else []
    return [("name", fmt.name), *aliases, *fmt.facts(), *([("source", fmt.source)] if fmt.source else [])]


def text_table(fmt: Any, columns: int | None = None) -> str:
    """Return the facts of a format and all its codes as plain text, codes running down the columns.

    Args:
        fmt: The format; formats without a table of codes (see ``code_table``) give the facts alone.
        columns: How many codes stand side by side; None is 4, or fewer on a narrow page (``fmtsim.support.table``).

    Raises:
        ArgumentError: ``columns`` is not positive.
    """
    if columns is not None and columns < 1:
        raise ArgumentError(f"columns={columns} is not allowed; choose 1 or more")
    lines = aligned(format_facts(fmt))
    if _has_table(fmt, _TABLE_BITS):
        cells = [f"{row.code:>5}  {row.bits}  {short_number(row.value):>12}" for row in code_table(fmt)]
        room, width = page_width(), max(map(len, cells)) + len(_BAR)
        fitting = 4 if room is None else max(1, min(4, (room + len(_BAR)) // width))
        height = -(-len(cells) // (columns or fitting))
        lines += ["", *(_BAR.join(cells[line::height]).rstrip() for line in range(height))]
    return "\n".join(lines)


def format_html(fmt: Any) -> str:
    """Return a format as an HTML table of facts, with its codes folded below where it has 8 bits or fewer."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(heading)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for heading, text in format_facts(fmt)
    )
    table = f"<table>{rows}</table>"
    if not _has_table(fmt, _HTML_BITS):
        return table
    cells = [(code_text(row.code, fmt), f"<code>{row.bits}</code>", short_number(row.value)) for row in code_table(fmt)]
    codes = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    heading = "<tr><th>code</th><th>bits</th><th>value</th></tr>"
    return f"{table}<details><summary>codes</summary><table>{heading}{codes}</table></details>"


def _has_table(fmt: Any, bits: int) -> bool:
    return hasattr(getattr(fmt, "element", fmt), "value") and fmt.bits <= bits


def short_number(value: float) -> str:
    """Write a value in as few digits as give it back, or in seven significant digits."""
    exact = repr(value)
    return exact.removesuffix(".0") if len(exact) <= 12 else f"{value:.7g}"


def bit_fields(code: int, fmt: Any) -> str:
    """Write a code in binary with a space between sign, exponent and mantissa."""
    return " ".join(digits for _, digits in split_code(code, fmt))


def code_text(code: int, fmt: Any) -> str:
    """Write a code in hexadecimal with the digits of its width."""
    return f"0x{code:0{-(-fmt.bits // 4)}X}"


def count_of(fmt: Any) -> int:
    """Return how many codes a format has."""
    return len(fmt.values) if "values" in fmt.__dataclass_fields__ else 1 << fmt.bits
