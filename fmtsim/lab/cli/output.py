# SPDX-License-Identifier: Apache-2.0
"""What subcommands share of their output: tables, JSON documents and files, and where a record comes from."""

import argparse
import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fmtsim.support.files import write_folder
from fmtsim.support.table import Column, jsonable, page, ruled, table_of, wrapped

ABSENT = "not installed"
MISMATCH = 1
"""Exit code of a check that found a difference."""
NARROWEST = 40  # columns; in a narrower terminal lines are broken by the terminal
WIDEST_HEADING = 24  # below whose text a long line goes on


def answer(arguments: argparse.Namespace, record: Any, text: Callable[[], str]) -> None:
    """Print a record as JSON where ``--json`` asks for it, else its text."""
    if arguments.json:
        print(json_text(record))
    else:
        print_text(text)


def print_text(text: Callable[[], str]) -> None:
    """Print a text with its tables, which fit into the width of a terminal; into a pipe or a file they go whole."""
    if not sys.stdout.isatty():
        print(text())
        return
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    with page(width):
        lines = text().splitlines()
    for line in lines:
        print(line if len(line) <= width else "\n".join(wrapped(line, width, " " * _indent(line))))


def _indent(line: str) -> int:
    """Return where a line that is too long goes on: below its text where a heading and a gap are in front of it."""
    match = re.match(r" *(\S+ )*\S* {2,}(?=\S)|\s*", line)
    assert match is not None  # any text starts with no spaces or some
    return match.end() if match.end() <= WIDEST_HEADING else len(line) - len(line.lstrip())


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return an aligned text table; columns in ``left`` are flush left, the others flush right."""
    return "\n".join(ruled([list(header), *([str(cell) for cell in row] for row in rows)], left, columns=True))


def format_items(columns: Sequence[Column], items: Iterable[Any]) -> str:
    """Return an aligned text table with a row for each item."""
    return "\n".join(ruled(*table_of(columns, items), columns=True))


def write_json(path: Path, record: Any) -> None:
    """Write a record as one JSON document, in folders that are made if need be."""
    write_folder(path.parent, {path.name: json_text(record) + "\n"})


def json_text(record: Any, indent: int = 2) -> str:
    """Return a record as one JSON document."""
    return json.dumps(jsonable(record), indent=indent, allow_nan=False)


def origin() -> dict[str, str]:
    """Return the command that makes a record, and the time."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": " ".join(["fmtsim", *sys.argv[1:]]), "date": date}


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Return the installed versions by name."""
    return {name: version_of(name) for name in distributions}


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, ``ABSENT`` where there is none; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
