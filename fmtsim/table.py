"""Tables of text: what reports, explanations and the command line print."""

from collections.abc import Container, Sequence

Row = Sequence[str]


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


def filled(header: Row, rows: Sequence[Row]) -> list[Row]:
    """Return the header and the rows without the columns in which every row is empty."""
    shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [[row[i] for i in shown] for row in (header, *rows)]


def _cell(column: int, text: str, width: int, left: Container[int] | None) -> str:
    return text.ljust(width) if left is None or column in left else text.rjust(width)
