# SPDX-License-Identifier: Apache-2.0
"""Tables of text: what reports, explanations and the command line print, and the same for notebooks."""

import contextlib
import csv
import dataclasses
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from fractions import Fraction
from html import escape
from typing import Any, ClassVar, NamedTuple

Row = Sequence[str]

GAP = "  "  # between columns
LONGEST_WORD = 20  # of a text that stays whole in a column that has to be narrow; numbers always do
TALLEST = 4  # lines of a row of a table with more than two columns
_page: ContextVar[int | None] = ContextVar("page", default=None)


class Rows(NamedTuple):
    """A table: rows of equally many cells, the header first, and the columns that are flush left, None for all."""

    cells: Sequence[Row]
    left: Container[int] | None = None


class Facts(NamedTuple):
    """A table without a header: pairs of a heading and a text."""

    pairs: Iterable[tuple[str, str]]


class Column(NamedTuple):
    """Declare a column of a table of items."""

    heading: str  # its heading
    get: str | Callable[[Any], Any]  # name of an attribute of an item, or a function of the item
    style: str = ""  # how a value is written, as ``format`` takes it; ``>`` in front makes the column flush right
    absent: str = ""  # what is written for None

    def cell(self, item: Any) -> str:
        """Return what the table shows of an item."""
        value = getattr(item, self.get) if isinstance(self.get, str) else self.get(item)
        return self.absent if value is None else format(value, self.style)


def table_of(columns: Sequence[Column], items: Iterable[Any], *, filled: bool = False) -> Rows:
    """Return a table with a row for each item; ``filled`` leaves out columns that are empty in all rows.

    >>> print(*aligned(*table_of([Column("layer", lambda pair: pair[0]), Column("dB", lambda pair: pair[1], ">.1f")],
    ...                          [("up", 31.52), ("head", 9)])), sep="\\n")
    layer    dB
    up     31.5
    head    9.0
    """
    rows = [[column.cell(item) for column in columns] for item in items]
    shown = [i for i in range(len(columns)) if not filled or any(row[i] for row in rows)]
    columns = [columns[i] for i in shown]
    cells = [[column.heading for column in columns], *([row[i] for i in shown] for row in rows)]
    return Rows(cells, [i for i, column in enumerate(columns) if not column.style.startswith(">")])


def jsonable(value: Any) -> Any:
    """Return a value of plain JSON types: records as dicts, fractions as ``"n/d"``, NaN and infinities as strings."""
    if dataclasses.is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Fraction) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


class Record:
    """Give a dataclass ``to_dict``: its fields and the properties that ``_derived`` names."""

    __slots__ = ()
    _derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types; what is not finite becomes text."""
        return jsonable(self) | {name: jsonable(getattr(self, name)) for name in self._derived}


class Result(Record):
    """Show a record as tables and lines of text: ``print`` in columns, notebooks in HTML, ``to_csv``, of one content.

    >>> class Found(Result):
    ...     def _content(self):
    ...         columns = [Column("layer", str), Column("length", len, ">")]
    ...         return table_of(columns, ["up", "down"]), "2 layers"
    >>> print(Found())
    layer  length
    -------------
    up          2
    down        4
    2 layers
    """

    __slots__ = ()

    def _content(self) -> Iterable[Rows | Facts | str]:
        """Return what is shown, in order: tables, of which those without rows are left out, and lines of text."""
        raise NotImplementedError

    def to_csv(self) -> str:
        """Return the tables as comma-separated values, an empty line between two; lines of text are left out."""
        texts = []
        for part in self._content():
            if not isinstance(part, str):
                csv.writer(text := io.StringIO(), lineterminator="\n").writerows(part[0])
                texts.append(text.getvalue())
        return "\n".join(texts)

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


@contextlib.contextmanager
def page(width: int | None) -> Iterator[None]:
    """Fit the tables that are written inside to so many characters a line; None leaves them as wide as they are.

    Texts are wrapped within their columns and numbers stay whole; where that is not enough the last columns of a
    table with a header move below their rows, each cell with its heading.

    >>> with page(18):
    ...     print("\\n".join(ruled([("layer", "why not"), ("up", "its bias is shared")])))
    layer  why not
    ------------------
    up     its bias is
           shared
    """
    token = _page.set(width)
    try:
        yield
    finally:
        _page.reset(token)


def page_width() -> int | None:
    """Return the width that ``page`` gives, None where it gives none."""
    return _page.get()


def aligned(rows: Sequence[Row], left: Container[int] | None = None) -> list[str]:
    """Return a line for each row, its cells as wide as their columns and two spaces apart.

    Args:
        rows: Rows of equally many cells.
        left: The columns that are flush left, None for all; the others are flush right.

    >>> aligned([("layer", "dB"), ("up", "31.5")], left=(0,))
    ['layer    dB', 'up     31.5']
    """
    return [line for lines in _laid_out(rows, left)[0] for line in lines]


def ruled(rows: Sequence[Row], left: Container[int] | None = None, *, columns: bool = False) -> list[str]:
    """Return ``aligned`` rows with a line below the first one, the header; ``columns`` draws one below each heading."""
    (head, *rest), widths = _laid_out(rows, left)
    body = [line for lines in rest for line in lines]
    rule = GAP.join("-" * width for width in widths) if columns else "-" * max(map(len, (*head, *body)))
    return [*head, rule, *body]


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
    style = "style='text-align:left'"
    rows = (f"<tr><th {style}>{escape(name)}</th><td {style}>{escape(text)}</td></tr>" for name, text in facts)
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


def decibels(ratio: float) -> str:
    """Write a ratio of powers in dB: inf is a result without an error, NaN has no ratio."""
    return "lossless" if ratio == math.inf else "-" if math.isnan(ratio) else f"{ratio:.1f}"


def some(names: Sequence[str]) -> str:
    """Write six names at most and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text that is broken between words, and within those that are longer than a line."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)


def _laid_out(rows: Sequence[Row], left: Container[int] | None) -> tuple[list[list[str]], list[int]]:
    """Return the lines of each row, and the widths of the columns that stand side by side.

    These are all but the last ones that the page has no room for, or that would make rows tall.
    """
    for count in range(max(len(rows[0]), 1), 0, -1):
        shown = [row[:count] for row in rows]
        # The width of each column: of its longest cell, or less where the page is narrow and has texts to break.
        columns = list(zip(*shown, strict=True))
        widths = [max(map(len, column)) for column in columns]
        least = []
        for i, column in enumerate(columns):
            # what has no letters, such as ``0 1111 110``, is one word
            words = [cell.split() if any(map(str.isalpha, cell)) else [cell] for cell in column]
            longest = max((len(word) for cell in words for word in cell), default=0)
            least.append(min(longest, LONGEST_WORD) if left is None or i in left else longest)
        while not _fits(widths) and widths != least:
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])  # noqa: B023
            widths[widest] -= 1
        lines = [_lines(row, widths, left) for row in shown]
        if _fits(widths) and (count <= 2 or max(map(len, lines)) <= TALLEST):
            break
    below = [[], *(_below(rows[0][count:], row[count:]) for row in rows[1:])]
    return [a + b for a, b in zip(lines, below, strict=True)], widths


def _fits(widths: Sequence[int]) -> bool:
    room = page_width()
    return room is None or sum(widths) + len(GAP) * (len(widths) - 1) <= room


def _lines(row: Row, widths: Sequence[int], left: Container[int] | None) -> list[str]:
    """Return a row, on as many lines as its longest cell takes."""
    cells = [wrapped(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        texts = (
            text.ljust(width) if left is None or i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(parts, widths, strict=True))
        )
        lines.append(GAP.join(texts).rstrip())
    return lines or [""]


def _below(header: Row, row: Row) -> list[str]:
    """Return the lines of cells that have no room beside the others, each with its heading."""
    cells = (f"{name}: {cell}" if name else cell for name, cell in zip(header, row, strict=True) if cell)
    return wrapped(f"    {'; '.join(cells)}", page_width() or 0, indent="    ") if row else []
