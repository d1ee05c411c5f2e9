# SPDX-License-Identifier: Apache-2.0
"""Two records of ``python -m benchmarks.suite``: what became slower between them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.suite.gpu_cases import FALLING
from fmtsim.support.table import Record

MARGIN = 1.05  # what two runs on one machine may differ by


class Figure(NamedTuple):
    """Hold one measurement: what it is called, the settings under which it compares, and whether smaller is better."""

    name: str
    settings: str
    value: float
    falls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hold a measurement before and now, and how many times as long it takes."""

    name: str
    before: float
    now: float
    slower: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Record):
    """Say what changed from one record to another.

    Args:
        slower: What takes longer by more than 5 %, the worst first.
        compared: How many measurements both records have, under the same settings.
        faster: How many of them take less time by more than 5 %.
        missing: What the earlier record lacks, or has under other settings.
    """

    slower: tuple[Change, ...]
    compared: int
    faster: int
    missing: tuple[str, ...]


def compared(before: dict[str, Any], now: dict[str, Any]) -> Comparison:
    """Compare two records of the same kind.

    Raises:
        KeyError, TypeError, AttributeError, OverflowError: One is not a record of measurements.
    """
    earlier = {(figure.name, figure.settings): figure.value for figure in figures(before)}
    changes, missing = [], []
    for name, settings, value, falls in figures(now):
        old = earlier.get((name, settings))
        if old is None:
            missing.append(name)
        else:
            changes.append(Change(name=name, before=old, now=value, slower=value / old if falls else old / value))
    slower = sorted((change for change in changes if change.slower > MARGIN), key=lambda change: -change.slower)
    faster = sum(change.slower < 1 / MARGIN for change in changes)
    return Comparison(slower=tuple(slower), compared=len(changes), faster=faster, missing=tuple(missing))


def figures(record: dict[str, Any]) -> Iterator[Figure]:
    """Yield the measurements of a record that say how long something takes, in one run's terms where it has some.

    Casts and products are shares of the speed of a copy and of a float32 product, steps the time over a plain step's,
    a GPU's rows what the row counts, first calls seconds. Memory is left out, and what could not be measured.
    """
    for figure in _figures(record):
        if isinstance(figure.value, int | float) and 0 < figure.value < math.inf:
            yield figure


def _figures(record: dict[str, Any]) -> Iterator[Figure]:
    for key, base, size in (("kernels", "copy", "elements"), ("products", "sgemm", "shape")):
        for result in record.get(key, ()):
            for threads, times in result["threads"].items():
                name = f"{result['case']}, {threads} thread{'s'[: threads != '1']}"
                yield Figure(name, str(result[size]), times[f"ratio_to_{base}"], False)
    for overhead in record.get("overheads", ()):
        if overhead["unit"] == "s":
            yield Figure(overhead["name"], "", overhead["value"], True)
    for result in record.get("results", ()):
        if "model" in result:
            settings = f"{record['sizes'][result['model']]} {record['target']} {record['emulated']}"
            yield Figure(result["case"], settings, result["ratio"], True)
        elif "kind" in result:
            yield Figure(result["case"], "", result["value"], result["kind"] in FALLING)
        else:
            yield Figure(result["case"], "", result["ratio"], True)
