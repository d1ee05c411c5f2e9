"""What the kinds of ``fmtsim bench`` share: choosing cases, saying what runs, and printing results."""

import argparse
import fnmatch
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fmtsim.cli.info import processor_name
from fmtsim.cli.output import format_table, print_json, version_of
from fmtsim.errors import ArgumentError

if TYPE_CHECKING:
    from fmtsim.bench.overheads import Overhead


def chosen(cases: Sequence[Any], pattern: str) -> list[Any]:
    """Return the cases whose names match a pattern.

    Raises:
        ArgumentError: None does; the message lists them.
    """
    found = [case for case in cases if fnmatch.fnmatchcase(case.name, pattern)]
    if not found:
        names = ", ".join(repr(case.name) for case in cases)
        raise ArgumentError(f"--only {pattern!r} matches no case; the cases are {names}")
    return found


def show(
    arguments: argparse.Namespace, key: str, results: Sequence[Any], others: "list[Overhead]",
    table: Callable[[Any], str],
) -> None:  # fmt: skip
    """Print results and overheads: tables below a line that names the machine, or one JSON document."""
    machine = {"processor": processor_name(), "torch": version_of("torch"), "numba": version_of("numba")}
    if arguments.json:
        records = {key: [r.to_dict() for r in results], "overheads": [o.to_dict() for o in others]}
        print_json({"machine": machine, **records})
        return
    print(f"{machine['processor']}, torch {machine['torch']}, numba {machine['numba']}\n")
    print(table(results))
    if others:
        print("\n" + _overhead_table(others))


def progress(text: str) -> None:
    """Show what is being measured on one line of a terminal, once: a bar that is drawn anew would be measured, too."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _overhead_table(overheads: "list[Overhead]") -> str:
    rows = []
    for item in overheads:
        value = "not measurable here" if item.value is None else f"{item.value:.3f} {item.unit}"
        rows.append((item.name, value, f"{item.limit:g} {item.unit}", {True: "yes", False: "NO", None: "-"}[item.met]))
    return format_table(("what", "measured", "limit", "met"), rows)
