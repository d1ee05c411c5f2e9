"""Tables of words, as text and as HTML."""

from collections.abc import Collection, Sequence
from html import escape

Cells = Sequence[tuple[str, ...]]


def text_table(cells: Cells, remarks: Sequence[str], numbers: Collection[int] = ()) -> str:
    """Return lines of columns, a rule under the first, and remarks below; columns of numbers end at the right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        lines.append("  ".join(padded).rstrip())
    return "\n".join((lines[0], "-" * max(map(len, lines)), *lines[1:], *remarks))


def html_table(cells: Cells, remarks: Sequence[str], numbers: Collection[int] = ()) -> str:
    """Return the same for a notebook."""
    rows = []
    for place, line in enumerate(cells):
        tag = "td" if place else "th"
        sides = ("right" if i in numbers else "left" for i in range(len(line)))
        marked = (f"<{tag} style='text-align:{s}'>{escape(c)}</{tag}>" for c, s in zip(line, sides, strict=True))
        rows.append(f"<tr>{''.join(marked)}</tr>")
    return f"<table>{''.join(rows)}</table>" + "<br>".join(map(escape, remarks))
