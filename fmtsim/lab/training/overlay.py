# SPDX-License-Identifier: Apache-2.0
"""Lay runs of ``fmtsim train`` over each other in one report: curves, gaps, what differs, and a verdict over seeds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.analysis.page.page import flat
from fmtsim.lab.training.artifacts import RECORD, REPORT
from fmtsim.lab.training.verdict import Words, verdict, verdict_of_seeds
from fmtsim.support.errors import ArgumentError, DataError, first_line
from fmtsim.support.records import parse_json

Record = Mapping[str, Any]
_OWN = ("ran.command", "ran.date", "ran.duration", "config.seed")  # of each run, whatever is compared


def read_record(folder: Path) -> Record:
    """Return the record of a run.

    Raises:
        DataError: The folder has none, or it is damaged.
    """
    path = folder / RECORD
    try:
        record = parse_json(path.read_text(encoding="utf-8"), nan=True)
        if not all(record[run]["losses"] for run in ("baseline", "simulated")) or not record["ran"]:
            raise ValueError("it has no losses")
    except OSError:
        raise DataError(f"{folder} has no {RECORD}; pass folders that fmtsim train --out wrote to the end") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the record of a run ({first_line(error)}); train it again") from None
    return record  # type: ignore[no-any-return]


def overlay(folders: Sequence[Path]) -> str:
    """Return a report of several runs, as HTML.

    Curves that are equal have one entry of the legend; each simulated run's gap is to the baseline of its own folder.
    Runs that differ in their seed alone have a verdict together.

    Raises:
        ArgumentError: One folder, or one twice.
        DataError: A folder has no record, or a damaged one.
    """
    if len(set(folders)) < max(2, len(folders)):
        raise ArgumentError(
            f"report lays two or more different runs over each other, not {', '.join(map(str, folders))}; "
            f"the report of a single one is {folders[0] / REPORT}"
        )
    names = [
        folder.resolve().name if len({f.resolve().name for f in folders}) == len(folders) else str(folder)
        for folder in folders
    ]
    records = dict(zip(names, map(read_record, folders), strict=True))
    try:
        return _page(names, records)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        places = ", ".join(str(folder / RECORD) for folder in folders)
        raise DataError(
            f"one of {places} is damaged ({type(error).__name__}: {first_line(error)}); train it again"
        ) from error


def _page(names: Sequence[str], records: Mapping[str, Record]) -> str:
    curves: dict[str, list[float]] = {}
    against: dict[str, str] = {}
    for run in ("baseline", "simulated"):
        for name, record in records.items():
            label = f"{name}: {record[run]['label']}" + (" (baseline)" if run == "baseline" else "")
            curves[label] = [math.nan if loss is None else loss for loss in record[run]["losses"]]
            against[label] = f"{name}: {record['baseline']['label']} (baseline)"
    rows = {name: dict(flat(_described(record))) for name, record in records.items()}
    differing, equal = dict[str, Any](), dict[str, Any]()
    for key in dict.fromkeys(key for row in rows.values() for key in row):
        values = {name: row.get(key, "-") for name, row in rows.items()}
        (equal if len(set(values.values())) == 1 else differing)[key] = values
    same = {key: next(iter(values.values())) for key, values in equal.items()}
    return write_page(
        None, title=" against ".join(names), curves=curves, against=against, loss_unit="nats per byte",
        verdict=[line for group in _alike(records, rows) for line in _words(group)],
        configuration={"differs": differing, "in all": same},
        notes=[f"Heatmaps, exponents and costs of a run are in {REPORT} of its folder"],
    )  # fmt: skip


def _described(record: Record) -> dict[str, Any]:
    return {key: record[key] for key in ("ran", "config", "corpus", "machine", "fmtsim", "torch")}


def _alike(records: Mapping[str, Record], rows: Mapping[str, Mapping[str, str]]) -> list[dict[str, Record]]:
    """Return the runs in groups of those that differ in their seed alone."""
    groups: dict[Any, dict[str, Record]] = {}
    for name, record in records.items():
        settings = tuple(item for item in rows[name].items() if not item[0].startswith(_OWN))
        groups.setdefault(settings, {})[name] = record
    return list(groups.values())


def _words(group: Mapping[str, Record]) -> Words:
    names = ", ".join(group)
    seeds = [record["config"]["seed"] for record in group.values()]
    if len(set(seeds)) < 2:
        return [(f"{name}: {question}", answer) for name in group for question, answer in verdict(group[name])]
    return [(f"{names}: {question}", answer) for question, answer in verdict_of_seeds(list(group.values()))]
