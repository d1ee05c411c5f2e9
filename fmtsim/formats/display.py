"""Formats for the eye: facts, tables of codes, and their HTML for notebooks."""

from html import escape
from typing import NamedTuple

from fmtsim.errors import ArgumentError, FormatError
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat

_TABLE_BITS = 16  # 65536 rows: beyond that a table is of no use to anyone
_HTML_BITS = 8


class CodeRow(NamedTuple):
    """One code: its number, its bits with a space between the fields, and its value."""

    code: int
    bits: str
    value: float


def code_table(fmt: Format) -> list[CodeRow]:
    """Return every code of a format with its bits and value, in the order of codes.

    A block format gives the table of its element.

    Raises:
        FormatError: The format has more than 16 bits, or its values depend on the tile (LogFMT).
    """
    if isinstance(fmt, BlockFormat):
        fmt = fmt.element
    if isinstance(fmt, LogTileFormat):
        raise FormatError(f"{fmt.name} has no table of codes: its values depend on the range of each tile")
    if fmt.bits > _TABLE_BITS:
        raise FormatError(f"{fmt.name} has 2**{fmt.bits} codes; tables stop at {_TABLE_BITS} bits")
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    return [CodeRow(code, _fields(fmt, code), fmt.value(code)) for code in range(count)]


def format_facts(fmt: Format) -> list[tuple[str, str]]:
    """Return what there is to say about a format as pairs of a heading and a text."""
    facts = [("name", fmt.name)]
    if fmt.aliases:
        facts.append(("aliases", ", ".join(fmt.aliases)))
    if isinstance(fmt, FloatFormat):
        facts += _float_facts(fmt)
    elif isinstance(fmt, BlockFormat):
        facts += _block_facts(fmt)
    elif isinstance(fmt, LogTileFormat):
        facts += [("bits", str(fmt.bits)), ("tile", _size(fmt.block)), ("steps", str(fmt.max_code - 1)),
                  ("bits per element", f"{fmt.bits_per_element:g}")]  # fmt: skip
    else:
        facts += _grid_facts(fmt)
    if fmt.source:
        facts.append(("source", fmt.source))
    return facts


def text_table(fmt: Format, columns: int = 4) -> str:
    """Return the facts of a format and all its codes as plain text, codes running down the columns.

    Args:
        fmt: The format; formats without a table of codes (see ``code_table``) give the facts alone.
        columns: How many codes stand side by side.

    Raises:
        ArgumentError: ``columns`` is not positive.
    """
    if columns < 1:
        raise ArgumentError(f"columns={columns} is not allowed; choose 1 or more")
    facts = format_facts(fmt)
    width = max(len(heading) for heading, _ in facts)
    lines = [f"{heading:<{width}}  {text}" for heading, text in facts]
    if _has_table(fmt, _TABLE_BITS):
        lines += ["", *_columns(code_table(fmt), columns)]
    return "\n".join(lines)


def format_html(fmt: Format) -> str:
    """Return a format as an HTML table of facts, with its codes folded below where it has 8 bits or fewer."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(heading)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for heading, text in format_facts(fmt)
    )
    table = f"<table>{rows}</table>"
    if not _has_table(fmt, _HTML_BITS):
        return table
    codes = "".join(
        f"<tr><td>{_hex(row, fmt)}</td><td><code>{row.bits}</code></td><td>{_number(row.value)}</td></tr>"
        for row in code_table(fmt)
    )
    heading = "<tr><th>code</th><th>bits</th><th>value</th></tr>"
    return f"{table}<details><summary>codes</summary><table>{heading}{codes}</table></details>"


def _float_facts(fmt: FloatFormat) -> list[tuple[str, str]]:
    specials = {
        "ieee": "NaN where the exponent is all ones and the mantissa is not zero",
        "top": "NaN where all bits but the sign are ones",
        "negative_zero": "NaN in place of -0",
        "none": "no NaN",
    }[fmt.nan]
    layout = f"{'1 sign, ' if fmt.signed else ''}{fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa"
    return [
        ("bits", f"{fmt.bits} ({layout})"),
        ("bias", str(fmt.exponent_bias)),
        ("max", _number(fmt.max)),
        ("min normal", _number(fmt.min_normal)),
        ("min subnormal", _number(fmt.min_subnormal) if fmt.has_subnormals else "none"),
        ("specials", f"{'Inf, ' if fmt.infinities else 'no Inf, '}{specials}"),
        ("overflow", fmt.default_overflow),
    ]


def _grid_facts(fmt: IntFormat | CodebookFormat | LogFormat) -> list[tuple[str, str]]:
    facts = [("bits", str(fmt.bits))]
    if isinstance(fmt, IntFormat):
        return [*facts, ("range", f"{fmt.min:g} to {fmt.max:g}"), ("step", _number(fmt.eps))]
    if isinstance(fmt, CodebookFormat):
        return [*facts, ("values", str(len(set(fmt.values)))), ("range", f"{fmt.min:g} to {max(fmt.values):g}")]
    return [*facts, ("steps an octave", str(fmt.gamma)), ("magnitudes", f"1 to {_number(fmt.max)}")]


def _block_facts(fmt: BlockFormat) -> list[tuple[str, str]]:
    facts = [
        ("element", repr(fmt.element)),
        ("block", _size(fmt.block)),
        ("scale", f"{fmt.scale.name} by {fmt.scale_rule}"),
        ("bits per element", f"{fmt.bits_per_element:g}"),
    ]
    if fmt.scale_rule == "amax":
        facts.append(("arithmetic", fmt.arithmetic))
    if fmt.tensor_scale:
        facts.append(("tensor scale", "fp32"))
    if fmt.zero_point:
        facts.append(("zero point", "one integer a block"))
    return facts


def _fields(fmt: Format, code: int) -> str:
    """Write a code in binary, a space between sign, exponent and mantissa."""
    digits = f"{code:0{fmt.bits}b}"
    if isinstance(fmt, FloatFormat):
        sign, exponent = int(fmt.signed), fmt.signed + fmt.exponent_bits
        return " ".join(part for part in (digits[:sign], digits[sign:exponent], digits[exponent:]) if part)
    return f"{digits[0]} {digits[1:]}" if isinstance(fmt, LogFormat) else digits


def _columns(rows: list[CodeRow], columns: int) -> list[str]:
    cells = [f"{row.code:>5}  {row.bits}  {_number(row.value):>12}" for row in rows]
    height = -(-len(cells) // columns)
    return ["  |  ".join(cells[line::height]).rstrip() for line in range(height)]


def _has_table(fmt: Format, bits: int) -> bool:
    return not isinstance(fmt, LogTileFormat) and fmt.bits <= bits


def _hex(row: CodeRow, fmt: Format) -> str:
    return f"0x{row.code:0{-(-fmt.bits // 4)}X}"


def _number(value: float) -> str:
    """Write a value in as few digits as give it back, or in seven significant digits."""
    exact = repr(value)
    return exact.removesuffix(".0") if len(exact) <= 12 else f"{value:.7g}"


def _size(block: tuple[int | None, int | None]) -> str:
    return " x ".join("all" if size is None else str(size) for size in block)
