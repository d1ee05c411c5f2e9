# SPDX-License-Identifier: Apache-2.0
"""write_page: one self-contained HTML file of a run, for a browser without a network."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.lab.analysis.page.data import attribution_data, coverage_data, curve_data, observation_data
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.files import StrPath, write_file
from fmtsim.support.records import checked

_PARTS = Path(__file__).parent
_SCRIPTS = ("base.js", "numbers.js", "loss.js", "heatmap.js", "details.js", "exponents.js", "tables.js", "main.js")


def write_page(
    path: StrPath | None,
    *,
    title: str,
    curves: Mapping[str, Sequence[float]] | None = None,
    loss_unit: str = "",
    observation: Any = None,
    coverage: Any = None,
    attribution: Any = None,
    configuration: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> str:
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

    Raises:
        ArgumentError: An argument is not of these types.
        DataError: The file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_page(f"{folder}/run.html", title="A run", curves={"bf16": [3.1, 2.4], "e4m3": [3.1, 2.5]})
    ...     page == Path(f"{folder}/run.html").read_text()
    True
    """
    title = checked("title", title, str)
    if configuration is not None and not isinstance(configuration, Mapping):
        raise ArgumentError(f"configuration={shown(configuration)} is not allowed; pass a dict, nested as JSON is")
    data = {
        "title": title,
        "unit": checked("loss_unit", loss_unit, str),
        "versions": {"fmtsim": fmtsim.__version__, "torch": torch.__version__},
        "notes": checked("notes", notes, tuple[str, ...]),
        "curves": curve_data(curves),
        "observation": observation_data(observation),
        "coverage": coverage_data(coverage),
        "attribution": attribution_data(attribution),
        "configuration": [] if not configuration else list(_flat(configuration)),
    }
    page = _filled(title, json.dumps(data, separators=(",", ":"), allow_nan=False))
    if path is not None:
        write_file(path, page)
    return page


def _filled(title: str, data: str) -> str:
    """Return the page: in JSON no ``<`` is left that could end its element, and only the script's own hash may run."""
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(title),
        "script": script,
        "script_hash": f"sha256-{digest}",
        "style": (_PARTS / "page.css").read_text(encoding="utf-8"),
        "data": data.replace("<", "\\u003c"),
    }
    template = (_PARTS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _flat(value: Any, name: str = "") -> Any:
    """Yield what is nested as pairs of a dotted name and a text; short lists are one text."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _flat(item, f"{name}.{place}")
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, "none" if value is None or value == {} else str(value)
