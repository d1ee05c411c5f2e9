# SPDX-License-Identifier: Apache-2.0
"""``fmtsim cast``: numbers rounded to an element format, with codes, errors and neighbours."""

import argparse
from typing import TYPE_CHECKING, Any

import fmtsim
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import ElementFormat, Overflow
from fmtsim.lab.cli.options import parse_numbers
from fmtsim.lab.cli.output import answer, format_table
from fmtsim.rounding.modes import MODES, Mode, get_rounding
from fmtsim.support.errors import FmtsimError, FormatError
from fmtsim.support.table import number_text

if TYPE_CHECKING:
    from fmtsim.lab.explain.records import Element


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each number, format and rounding; ``--rounding all`` shows every mode."""
    numbers = parse_numbers(arguments.numbers)
    formats = [_element(name) for name in arguments.formats]
    modes = MODES if arguments.rounding == "all" else (get_rounding(arguments.rounding).mode,)
    results = [
        result
        for fmt in formats
        for mode in modes
        for result in cast(numbers, fmt, mode, arguments.overflow, arguments.random_bits, arguments.seed)
    ]
    # By number first: the formats and roundings of one number are what one compares.
    count = len(numbers)
    ordered = [results[start] for index in range(count) for start in range(index, len(results), count)]
    answer(arguments, results, lambda: format_table(_HEADER, map(_row, ordered), left=(1, 2, 4, 5)))
    return 0


_HEADER = ("input", "format", "rounding", "value", "code", "bits", "error", "relative", "below", "above")


def cast(
    numbers: list[float], fmt: ElementFormat, rounding: Mode, overflow: Overflow | None, random_bits: int | None,
    seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Round numbers and return a record for each; the oracle says why, and the engine is compared with it."""
    bits = random_bits if rounding == "stochastic" else None
    found = fmtsim.explain(numbers, fmt, rounding=rounding, overflow=overflow, generator=seed, random_bits=bits)
    if not found.engine_agrees:
        raise FmtsimError(f"the engine gives other codes of {fmt.name} than the oracle: a defect; try fmtsim verify")
    return [_record(element, fmt, rounding) for element in found.elements]


def _record(element: "Element", fmt: ElementFormat, rounding: Mode) -> dict[str, Any]:
    return {
        **{name: getattr(element, name) for name in ("input", "value", "code", "hex", "bits", "error")},
        **{name: getattr(element.decision, name) for name in ("below", "above")},
        "format": fmt.name, "rounding": rounding, "relative_error": element.relative_error,
    }  # fmt: skip


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    error, relative = record["error"], record["relative_error"]
    return (
        number_text(record["input"]),
        record["format"],
        record["rounding"],
        number_text(record["value"]),
        record["hex"],
        record["bits"],
        "-" if error is None else f"{float(error):+.4g}" if error else "0",
        "-" if relative is None else f"{relative:+.3%}" if relative else "0",
        number_text(record["below"]),
        number_text(record["above"]),
    )


def _element(name: str) -> ElementFormat:
    fmt = get_format(name)
    if isinstance(fmt, BlockFormat | LogTileFormat):
        raise FormatError(
            f"{fmt.name} scales whole blocks, so a number alone has no cast; "
            f"try fmtsim explain NUMBER --format {fmt.name}"
            + (f", or the element: --to {fmt.element.name}" if isinstance(fmt, BlockFormat) else "")
        )
    return fmt
