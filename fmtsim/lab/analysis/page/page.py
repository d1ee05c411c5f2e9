# SPDX-License-Identifier: Apache-2.0
"""write_page: one self-contained HTML file of a run, drawn from short columns of numbers, without a network."""

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fmtsim
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.lab.analysis.measure import LOWEST_EXPONENT
from fmtsim.lab.analysis.stats import in_order, operand_in_words
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.files import StrPath, write_file
from fmtsim.support.records import checked

METRICS = ("underflow_percent", "saturation_percent", "sqnr_db", "amax", "nonfinite", "elements")
MOST_BITS = 16  # of formats that the page offers


def curve_data(curves: Any, against: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return curves by label as columns, equal ones as one; ArgumentError refuses what is not numbers by label.

    ``against`` is as in ``write_page``; each curve has the place of the one that it is compared with.
    """
    if curves is None:
        return []
    try:
        numbers = {str(label): [float(loss) for loss in losses] for label, losses in curves.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"curves={shown(curves)} is not allowed; pass a dict of the losses of each step by label"
        ) from None
    # Curves whose losses have the same bits are drawn once; two empty ones differ.
    labels: dict[str, list[str]] = {}
    for label, losses in numbers.items():
        labels.setdefault(repr(losses) if losses else label, []).append(label)
    groups = list(labels.values())
    places = {label: place for place, group in enumerate(groups) for label in group}
    return [
        {
            "label": " = ".join(group), "losses": [number(loss, 6) for loss in numbers[group[0]]],
            "against": places.get((against or {}).get(group[0], ""), 0),
        }
        for group in groups
    ]  # fmt: skip


def observation_data(observation: Any) -> dict[str, Any] | None:
    """Return what an Observation holds: figures by step as one column each, totals and histograms by operand."""
    if observation is None:
        return None
    totals = getattr(observation, "layers", None)
    if not isinstance(totals, dict):
        raise ArgumentError(f"observation={shown(observation)} is not one; pass what fmtsim.observe returned")
    # A row for each layer and operand that has one, a column for each observed step.
    history = getattr(observation, "history", {})
    layers = list(dict.fromkeys([*totals, *(name for step in history.values() for name in step)]))
    operands = in_order(name for row in totals.values() for name in row)
    places = [(layer, operand) for layer in layers for operand in operands]
    rows = [[history[step].get(layer, {}).get(operand) for step in history] for layer, operand in places]
    every = [totals.get(layer, {}).get(operand) for layer, operand in places]
    figure = lambda s, name: None if s is None else number(getattr(s, name))  # noqa: E731
    columns = {name: [figure(s, name) for row in rows for s in row] for name in METRICS}
    return {
        "layers": [name or "(model)" for name in layers], "operands": operands,
        "words": [f"{name} ({operand_in_words(name)})" for name in operands], "steps": list(history),
        "forwards": getattr(observation, "steps", len(history)),
        # A column of one value is written once.
        "history": {name: column if len(set(column)) > 1 else column[:1] for name, column in columns.items()},
        "totals": {name: [figure(s, name) for s in every] for name in METRICS},
        "formats": [s.format if s else None for s in every],
        "histograms": [
            {
                "nonzero": s.nonzero, "finite": s.elements - s.nonfinite, "largest": s.amax,
                "plain": _trim(s.exponents), "scaled": _trim(s.scaled_exponents),
                "window": None if s.window is None else [float(edge) for edge in s.window],
            } if s else None
            for s in every
        ],
        "choices": format_choices(),
    }  # fmt: skip


def format_choices() -> list[tuple[str, float, float, float]]:
    """Return the formats that the page offers: name, smallest magnitude, largest, and where rounding leaves the range.

    These are the registered signed floating-point and integer formats with a zero, of at most 16 bits.
    """
    choices = []
    for name in [*list_formats("float"), *list_formats("int")]:
        fmt = get_format(name)
        if isinstance(fmt, FloatFormat) and fmt.bits <= MOST_BITS and fmt.signed and fmt.has_zero:
            ulp = math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - fmt.mantissa_bits)
            choices.append((name, fmt.min_subnormal, fmt.max, fmt.max + ulp / 2))
        elif isinstance(fmt, IntFormat) and fmt.bits <= MOST_BITS and fmt.min < 0 and not fmt.half_offset:
            choices.append((name, fmt.eps, fmt.max, fmt.max + fmt.eps / 2))
    return choices


def plain(value: Any) -> Any:
    """Return a value of JSON types, its numbers as ``number`` writes them, of six digits."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return number(value, 6) if isinstance(value, float) else value


def number(value: float | None, digits: int = 4) -> float | str | None:
    """Return a float of so many significant digits, a whole one as an int; what is not finite as a word.

    >>> number(0.123456), number(1e6), number(1703936), number(float("nan")), number(None)
    (0.1235, 1000000, 1703936, 'nan', None)
    """
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return str(value)
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _trim(counts: Tensor) -> list[int]:
    """Return the first exponent that occurs, and the counts from it to the last one."""
    used = counts.nonzero().flatten().tolist()
    return [used[0] + LOWEST_EXPONENT, *counts[used[0] : used[-1] + 1].tolist()] if used else []


_PARTS = Path(__file__).parent
_SCRIPTS = ("base.js", "numbers.js", "loss.js", "heatmap.js", "details.js", "exponents.js", "tables.js", "main.js")


def write_page(
    path: StrPath | None, *, title: str, curves: Mapping[str, Sequence[float]] | None = None, loss_unit: str = "",
    observation: Any = None, coverage: Any = None, attribution: Any = None,
    configuration: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
    verdict: Sequence[tuple[str, ...]] = (), against: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Write one self-contained HTML file that shows a run in any browser, from a disk or a server; return its text.

    What is not given is left out, and the page says so. Equal arguments give equal files. The file loads nothing:
    its content security policy forbids it, and runs no script but its own. 600 steps of which 60 were observed, with
    40 layers of 8 operands, are below 3 MB: numbers have four significant digits, losses six.

    Args:
        path: The file; it appears whole or not at all. None only returns the text.
        title: Heading, as plain text.
        curves: Loss of each step, counted from 1, by label; the first curve is the one the others are compared with. A
            loss that is NaN or infinite is marked where it happens.
        loss_unit: Of the losses, such as ``"nats per byte"``.
        observation: What ``fmtsim.observe`` collected. Without a history its totals are one column of the heatmap.
        coverage: ``Report.coverage`` of ``fmtsim.report(model, batch)``.
        attribution: What ``fmtsim.attribute`` returned.
        configuration: Anything that describes the run, nested as JSON is.
        notes: What a reader has to know first: that a run was interrupted, what was not simulated.
        verdict: What the run shows, as pairs of a question and its answer; longer rows are a table, the first its head.
        against: Label of a curve to that of the curve it is compared with; others are compared with the first.

    Raises:
        ArgumentError: An argument is not of these types.
        DataError: The file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_page(f"{folder}/run.html", title="A run", curves={"bf16": [3.1, 2.4], "e4m3": [3.1, 2.5]})
    ...     page == Path(f"{folder}/run.html").read_text()
    True
    """
    # 1. The data, each part checked.
    title = checked("title", title, str)
    if coverage is not None and not (
        dataclasses.is_dataclass(coverage) and hasattr(coverage, "raw") and hasattr(coverage, "total")
    ):
        raise ArgumentError(f"coverage={shown(coverage)} is not one; pass fmtsim.report(model, batch).coverage")
    if attribution is not None and not (isinstance(attribution, dict) and "rows" in attribution):  # a dict is of a file
        if not (hasattr(attribution, "rows") and hasattr(attribution, "to_dict")):
            raise ArgumentError(f"attribution={shown(attribution)} is not one; pass what fmtsim.attribute returned")
        attribution = attribution.to_dict()
    if configuration is not None and not isinstance(configuration, Mapping):
        raise ArgumentError(f"configuration={shown(configuration)} is not allowed; pass a dict, nested as JSON is")
    data = {
        "title": title, "unit": checked("loss_unit", loss_unit, str),
        "versions": {"fmtsim": fmtsim.__version__, "torch": torch.__version__},
        "notes": checked("notes", notes, tuple[str, ...]), "curves": curve_data(curves, against or {}),
        "verdict": [list(map(str, pair)) for pair in verdict],
        "observation": observation_data(observation),
        "coverage": None if coverage is None else {**dataclasses.asdict(coverage), "text": str(coverage)},  # type: ignore[arg-type]
        "attribution": plain(attribution),
        "configuration": [] if not configuration else list(flat(configuration)),
    }  # fmt: skip
    # 2. The page: in JSON no ``<`` is left that could end its element, and only the script's own hash may run.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False)
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(title), "script": script, "script_hash": f"sha256-{digest}",
        "style": (_PARTS / "page.css").read_text(encoding="utf-8"), "data": content.replace("<", "\\u003c"),
    }  # fmt: skip
    template = (_PARTS / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    if path is not None:
        write_file(path, page)
    return page


def flat(value: Any, name: str = "") -> Any:
    """Yield what is nested as pairs of a dotted name and a text; short lists are one text."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from flat(item, f"{name}.{place}")
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, "none" if value is None or value == {} else str(value)
