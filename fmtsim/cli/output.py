"""What subcommands share: reading numbers and roundings, printing tables and JSON."""

import argparse
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from fmtsim.errors import ArgumentError
from fmtsim.formats.spec import OVERFLOWS
from fmtsim.rounding.modes import MODES
from fmtsim.table import aligned

ABSENT = "not installed"


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: one JSON document on standard output instead of text."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_rounding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--rounding``, ``--overflow``, ``--random-bits`` and ``--seed``."""
    parser.add_argument("--rounding", default="nearest_even", metavar="MODE", help=f"one of {', '.join(MODES)}")
    parser.add_argument("--overflow", metavar="RULE",
                        help=f"{' or '.join(OVERFLOWS)}; by default the format's own rule")  # fmt: skip
    parser.add_argument("--random-bits", type=int, metavar="N", help="random bits of stochastic rounding, 1 to 32")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of stochastic rounding (default 0)")


def parse_number(text: str) -> float:
    """Read a decimal or hexadecimal float, inf or nan.

    Raises:
        ArgumentError: The text is not a number, or lies beyond float64.
    """
    word = text.strip().lower().replace("_", "")
    try:
        value = float.fromhex(word) if "0x" in word else float(word)
    except (ValueError, OverflowError):
        raise ArgumentError(
            f"{text.strip()!r} is not a number of float64; write 0.1, -3e-5, 0x1.8p-3, inf or nan"
        ) from None
    if math.isinf(value) and "inf" not in word:
        raise ArgumentError(f"{text.strip()} is beyond float64 (1.797e308); write inf if infinity is meant")
    return value


def parse_int(text: str) -> int:
    """Read a decimal, hexadecimal (0x) or binary (0b) integer."""
    try:
        return int(text.strip(), 0)
    except ValueError:
        raise ArgumentError(f"{text.strip()!r} is not an integer; write 17, 0x11 or 0b10001") from None


def parse_record(text: str, record: type, option: str) -> Any:
    """Build a record from ``field=value,...``: integers, none, true, false, and names.

    Raises:
        ArgumentError: a field is unknown, lacks a value, or has one that is not possible.
    """
    known = [field.name for field in dataclasses.fields(record)]
    words = {"none": None, "true": True, "false": False}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in known:
            raise ArgumentError(f"{option} {item.strip()!r} is not FIELD=VALUE; fields are {', '.join(known)}")
        number = value.removeprefix("-").isdecimal()
        values[name] = int(value) if number else words.get(value.lower(), value)
    return record(**values)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return an aligned text table; columns in ``left`` are flush left, the others flush right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    rule = ["-" * max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(aligned([cells[0], rule, *cells[1:]], left))


def print_json(record: Any) -> None:
    """Print a record as one JSON document; NaN and infinities, which JSON lacks, become strings."""
    print(json.dumps(jsonable(record), indent=2, allow_nan=False))


def jsonable(value: Any) -> Any:
    """Return a value of plain JSON types: fractions as ``"n/d"``, NaN and infinities as strings."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, ``ABSENT`` where there is none; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
