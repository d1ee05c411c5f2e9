# SPDX-License-Identifier: Apache-2.0
"""``fmtsim formats``: the list of number formats."""

import argparse
import fnmatch
from typing import Any

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.scaling import block_text
from fmtsim.formats.serialization import format_to_dict
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.lab.cli.output import answer, format_table
from fmtsim.support.errors import ArgumentError
from fmtsim.support.table import number_text


def run(arguments: argparse.Namespace) -> int:
    """Print one line a format, or their records as JSON."""
    formats = [get_format(name) for name in list_formats(arguments.kind)]
    formats = [fmt for fmt in formats if _matches(fmt, arguments.pattern)]
    if not formats:
        formats = [_unlisted(arguments.pattern, arguments.kind)]
    header = ("name", "kind", "bits", "max", "min normal", "smallest > 0", "special values and layout", "aliases")
    answer(arguments, list(map(_record, formats)), lambda: format_table(header, map(_row, formats), left=(0, 1, 6, 7)))
    return 0


def _matches(fmt: Format, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for name in (fmt.name, *fmt.aliases))


def _unlisted(pattern: str, kind: str | None) -> Format:
    """Return the format that a name such as e3m3 spells out; a pattern or another kind is an error."""
    if not set(pattern) & set("*?["):
        found = get_format(pattern)
        if kind in (None, kind_of(found)):
            return found
    of_kind = f" of kind {kind}" if kind else ""
    raise ArgumentError(f"no format{of_kind} matches {pattern!r}; fmtsim formats without a pattern lists all")


def kind_of(fmt: Format) -> str:
    """Return the kind of a format as ``--kind`` names it."""
    return str(format_to_dict(fmt)["kind"])


def _record(fmt: Format) -> dict[str, Any]:
    record = format_to_dict(fmt)
    record["bits"] = fmt.bits
    record["default_overflow"] = fmt.default_overflow
    if isinstance(fmt, BlockFormat | LogTileFormat):
        record["bits_per_element"] = fmt.bits_per_element
    else:
        record["max"], record["min"] = fmt.max, fmt.min
    if isinstance(fmt, FloatFormat):
        record |= {"min_normal": fmt.min_normal, "min_subnormal": fmt.min_subnormal, "exponent_bias": fmt.exponent_bias}
    return record


def _row(fmt: Format) -> tuple[str, ...]:
    shown = fmt.element if isinstance(fmt, BlockFormat) else fmt
    largest = "-" if isinstance(shown, LogTileFormat) else _short(shown.max)
    normal, smallest = "-", "-"
    if isinstance(shown, FloatFormat):
        normal, smallest = _short(shown.min_normal), _short(shown.min_subnormal)
    elif isinstance(shown, IntFormat):
        smallest = _short(shown.eps / 2 if shown.half_offset else shown.eps)
    bits = fmt.bits_per_element if isinstance(fmt, BlockFormat | LogTileFormat) else fmt.bits
    return (fmt.name, kind_of(fmt), f"{bits:g}", largest, normal, smallest, layout(fmt), ", ".join(fmt.aliases))


def _short(value: float) -> str:
    exact = number_text(value)
    return exact if len(exact) <= 10 else f"{value:.4g}"


def layout(fmt: Format) -> str:
    """Return a few words on what a format's name does not say: special values, or the block and its scale."""
    if isinstance(fmt, FloatFormat):
        nan = {"ieee": "NaN", "top": "one NaN", "negative_zero": "NaN at -0", "none": ""}[fmt.nan]
        words = ["" if fmt.signed else "unsigned", "Inf" if fmt.infinities else "", nan]
        words += ["" if fmt.has_zero else "no zero", "" if fmt.has_subnormals or not fmt.has_zero else "no subnormals"]
        return ", ".join(filter(None, words)) or "finite"
    if isinstance(fmt, BlockFormat):
        extra = (" x fp32 tensor scale" if fmt.tensor_scale else "") + (", zero point" if fmt.zero_point else "")
        return f"{fmt.element.name} in {block_text(fmt.block)}, scale {fmt.scale.name} by {fmt.scale_rule}{extra}"
    if isinstance(fmt, LogTileFormat):
        return f"tile {block_text(fmt.block)}"
    if isinstance(fmt, IntFormat):
        return f"from {fmt.min:g}, step {fmt.eps:g}"
    return f"from {fmt.min:g}"
