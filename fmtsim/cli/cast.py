"""``fmtsim cast``: numbers rounded to an element format, with codes, errors and neighbours."""

import argparse
import math
from fractions import Fraction
from typing import Any

from fmtsim.cli.output import (
    add_json_argument,
    add_rounding_arguments,
    format_table,
    parse_number,
    print_json,
)
from fmtsim.errors import FormatError
from fmtsim.explain.element import bit_fields, code_text, neighbours
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import ElementFormat
from fmtsim.rounding.modes import MODES
from fmtsim.table import number_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("numbers", nargs="+", metavar="NUMBER", help="0.1, -3e-5, 0x1.8p-3, inf or nan")
    parser.add_argument("--to", required=True, action="append", metavar="FORMAT", dest="formats",
                        help="the element format; may be repeated")  # fmt: skip
    add_rounding_arguments(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each number, format and rounding; ``--rounding all`` shows every mode."""
    numbers = [parse_number(text) for text in arguments.numbers]
    formats = [_element(name) for name in arguments.formats]
    modes = MODES if arguments.rounding == "all" else (arguments.rounding,)
    results = [
        result
        for fmt in formats
        for mode in modes
        for result in cast(numbers, fmt, mode, arguments.overflow, arguments.random_bits, arguments.seed)
    ]
    if arguments.json:
        print_json(results)
        return 0
    # By number first: the formats and roundings of one number are what one compares.
    count = len(numbers)
    ordered = [results[start] for index in range(count) for start in range(index, len(results), count)]
    print(format_table(("input", *_HEADER), [_row(result) for result in ordered], left=(1, 2, 4, 5)))
    return 0


_HEADER = ("format", "rounding", "value", "code", "bits", "error", "relative", "below", "above")


def cast(
    numbers: list[float], fmt: ElementFormat, rounding: str, overflow: str | None, random_bits: int | None, seed: int
) -> list[dict[str, Any]]:
    """Round numbers by the engine and return a record for each."""
    import torch

    from fmtsim.quantize import encode

    stochastic = rounding == "stochastic"
    encoded = encode(
        torch.tensor(numbers, dtype=torch.float64), fmt, rounding=rounding, overflow=overflow,
        random_bits=random_bits if stochastic else None, generator=seed if stochastic else None,
    )  # fmt: skip
    codes = [code & ((1 << fmt.bits) - 1) for code in encoded.unpacked().tolist()]
    values = encoded.decode(out_dtype=torch.float64).tolist()
    rows = zip(numbers, codes, values, strict=True)
    return [_record(number, code, value, fmt, rounding) for number, code, value in rows]


def _record(number: float, code: int, value: float, fmt: ElementFormat, rounding: str) -> dict[str, Any]:
    below, above = neighbours(number, fmt)
    exact = math.isfinite(number) and math.isfinite(value)
    error = Fraction(value) - Fraction(number) if exact else None
    return {
        "input": number,
        "format": fmt.name,
        "rounding": rounding,
        "value": value,
        "code": code,
        "hex": code_text(code, fmt),
        "bits": bit_fields(code, fmt),
        "error": error,
        "relative_error": float(error / abs(Fraction(number))) if error is not None and number else None,
        "below": below,
        "above": above,
    }


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
