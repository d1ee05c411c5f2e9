# SPDX-License-Identifier: Apache-2.0
"""The catalogue as a table, from its records: what docs/optim.md holds and a test compares."""

import torch

from fmtsim.optim.catalogue import get_scheme, list_schemes
from fmtsim.optim.rules import ADAMW
from fmtsim.spec.optimizer import Scheme, StateFormat, in_parameter
from fmtsim.support.table import Row, markdown

SHAPE = (1024, 1024)
"""The matrix whose bytes a parameter are given; a bfloat16 one where a scheme keeps weights in bfloat16."""

_SCALES = {
    "amax": "amax",
    "inverse": "amax, by reciprocal",
    "reciprocal": "top / amax",
    "power_of_two": "power of two",
    "fixed": "fixed at first",
}


def describe(fmt: StateFormat) -> str:
    """Return a state format in a few words."""
    if fmt.format is None:
        return "float32"
    words = [fmt.format.name]
    if fmt.scale != "none":
        where = {"tensor": "a tensor", "row": "a row"}.get(str(fmt.block), f"{fmt.block}")
        words.append(f"{where}: {_SCALES[fmt.scale]}")
    words += ["expanded"] * fmt.expand + ["SR"] * fmt.stochastic + ["ties up"] * (fmt.ties == "up")
    return ", ".join(words)


def bytes_per_parameter(scheme: Scheme) -> float:
    """Return the bytes that AdamW's states take for each element of a large matrix."""
    count = SHAPE[0] * SHAPE[1]
    formats = scheme.formats(SHAPE, ADAMW.slots)
    own = [fmt for slot, fmt in formats.items() if slot != "weights" or not in_parameter(fmt, torch.bfloat16)]
    return sum(fmt.bytes_of(SHAPE) for fmt in own) / count


def scheme_table() -> str:
    """Return the table."""
    rows: list[Row] = [("scheme", "first moment", "second moment", "weights", "bytes", "source")]
    for scheme in map(get_scheme, list_schemes()):
        states = [describe(fmt) if fmt else "" for fmt in (scheme.first, scheme.second, scheme.weights)]
        rows.append((f"`{scheme.name}`", *states, f"{bytes_per_parameter(scheme):.3f}", scheme.source))
    return markdown(rows, left=(0, 1, 2, 3, 5))
