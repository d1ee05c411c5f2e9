# SPDX-License-Identifier: Apache-2.0
"""``fmtsim bench --against FILE``: what became slower since a record was written."""

from pathlib import Path
from typing import Any

from fmtsim.lab.bench.against import Comparison, compared
from fmtsim.lab.cli.output import format_table
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import read_json, shown_path

KEYS = {
    "casts": {"kernels"},
    "gemm": {"products"},
    "gpu": {"results", "compiling_seconds"},
    "layers": {"results", "sizes"},
}


def read(path: Path, what: str) -> dict[str, Any]:
    """Return an earlier record.

    Raises:
        ArgumentError: The file is not there, or holds something else.
    """
    record = read_json(path, ArgumentError, f"record of fmtsim bench {what}")
    try:
        compared(record, record)
        fits = KEYS[what] <= record.keys() and isinstance(record["machine"], dict)
    except (KeyError, TypeError, AttributeError, OverflowError):
        fits = False
    if not fits:
        raise ArgumentError(
            f"--against {shown_path(path)} is not a record of fmtsim bench {what}; pass what fmtsim bench {what} "
            "--record FILE wrote"
        )
    return record  # type: ignore[no-any-return]


def text_of(found: Comparison, before: dict[str, Any], now: dict[str, Any], path: Path) -> str:
    """Return the comparison in words and a table."""
    lines = [f"compared with {shown_path(path)}, {_about(before)}"]
    if _machine(before) != _machine(now):
        lines.append(f"which is another machine: this is {_machine(now)}")
    counts = f"{len(found.slower)} slower by more than 5 %, {found.faster} faster"
    lines.append(f"measurements compared: {found.compared}, of which {counts}")
    if found.missing:
        named = ", ".join(found.missing[:3]) + (" ..." if len(found.missing) > 3 else "")
        lines.append(f"absent there, or under other settings: {len(found.missing)} ({named})")
    if found.slower:
        rows = [(c.name, f"{c.before:.4g}", f"{c.now:.4g}", f"{c.slower:.2f}") for c in found.slower]
        lines += ["", format_table(("slower", "before", "now", "times as long"), rows)]
    return "\n".join(lines)


def _about(record: dict[str, Any]) -> str:
    about = record["machine"]
    return ", ".join(str(part) for part in (_machine(record), about.get("date")) if part)


def _machine(record: dict[str, Any]) -> str:
    about = record["machine"]
    name = about.get("device", about.get("processor", "an unknown machine"))
    return f"{name}, torch {about.get('torch', 'unknown')}"
