"""Tables of text: what reports, explanations and the command line print, and the same for notebooks."""

from collections.abc import Container, Iterable, Sequence
from fractions import Fraction
from html import escape
from typing import NamedTuple

Row = Sequence[str]


class Rows(NamedTuple):
    """A table: rows of equally many cells, the header first, and the columns that are flush left, None for all."""

    cells: Sequence[Row]
    left: Container[int] | None = None


class Facts(NamedTuple):
    """A table without a header: pairs of a heading and a text."""

    pairs: Iterable[tuple[str, str]]


class Tabular:
    """Show a record as tables and lines of text: ``print`` in columns, notebooks in HTML, both of one content.

    >>> class Found(Tabular):
    ...     def _content(self):
    ...         return Rows([("layer", "dB"), ("up", "31.5")], left=(0,)), "1 layer"
    >>> print(Found())
    layer    dB
    -----------
    up     31.5
    1 layer
    """

    __slots__ = ()

    def _content(self) -> Iterable[Rows | Facts | str]:
        """Return what is shown, in order: tables, of which those without rows are left out, and lines of text."""
        raise NotImplementedError

    def __str__(self) -> str:
        lines: list[str] = []
        for part in self._content():
            if isinstance(part, str):
                lines.append(part)
            elif isinstance(part, Facts):
                lines += aligned(list(part.pairs))
            elif len(part.cells) > 1:
                lines += ruled(*part)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        text, before = "", False  # whether a line of text came before
        for part in self._content():
            if isinstance(part, str):
                text += ("<br>" if before and part else "") + escape(part)
                before = before or bool(part)
                continue
            if isinstance(part, Facts):
                text += facts_html(part.pairs)
            elif len(part.cells) > 1:
                text += html(*part)
            before = False
        return text


def aligned(rows: Sequence[Row], left: Container[int] | None = None) -> list[str]:
    """Return a line for each row, its cells as wide as their columns and two spaces apart.

    Args:
        rows: Rows of equally many cells.
        left: The columns that are flush left, None for all; the others are flush right.

    >>> aligned([("layer", "dB"), ("up", "31.5")], left=(0,))
    ['layer    dB', 'up     31.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(i, cell, widths[i], left) for i, cell in enumerate(row)).rstrip() for row in rows]


def ruled(rows: Sequence[Row], left: Container[int] | None = None) -> list[str]:
    """Return ``aligned`` rows with a line below the first one, the header."""
    head, *rest = aligned(rows, left)
    return [head, "-" * max(map(len, (head, *rest))), *rest]


def html(rows: Sequence[Row], left: Container[int] | None = None) -> str:
    """Return ``ruled`` rows as a table in HTML."""
    lines = []
    for place, row in enumerate(rows):
        tag = "td" if place else "th"
        sides = ("left" if left is None or i in left else "right" for i in range(len(row)))
        cells = (f"<{tag} style='text-align:{s}'>{escape(cell)}</{tag}>" for s, cell in zip(sides, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def markdown(rows: Sequence[Row], left: Container[int] | None = None) -> str:
    """Return rows, the header first, as a table in Markdown.

    >>> print(markdown([("layer", "dB"), ("a|b", "31.5")], left=(0,)))
    | layer | dB |
    |---|--:|
    | a\\|b | 31.5 |
    """
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    sides = ("---" if left is None or i in left else "--:" for i in range(len(rows[0])))
    return "\n".join([lines[0], f"|{'|'.join(sides)}|", *lines[1:]])


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """Return pairs of a heading and a text as a table in HTML without a header."""
    left = "style='text-align:left'"
    rows = (f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(text)}</td></tr>" for name, text in facts)
    return f"<table>{''.join(rows)}</table>"


def filled(header: Row, rows: Sequence[Row]) -> list[Row]:
    """Return the header and the rows without the columns in which every row is empty."""
    shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [[row[i] for i in shown] for row in (header, *rows)]


def number_text(value: float | Fraction | None) -> str:
    """Write a number in as few digits as give it back; ``~`` marks a fraction that float64 does not hold.

    >>> number_text(0.5), number_text(Fraction(1, 3)), number_text(448.0), number_text(None)
    ('0.5', '~0.3333333333333333', '448', '-')
    """
    if value is None:
        return "-"
    try:
        near = float(value)
    except OverflowError:
        return str(value)
    exact = not isinstance(value, Fraction) or Fraction(near) == value
    return ("" if exact else "~") + repr(near).removesuffix(".0")


def _cell(column: int, text: str, width: int, left: Container[int] | None) -> str:
    return text.ljust(width) if left is None or column in left else text.rjust(width)
