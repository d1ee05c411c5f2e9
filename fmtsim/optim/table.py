"""The catalogue as a table, from its records: what docs/optim.md holds and a test compares."""

import torch

from fmtsim.optim.catalogue import get_scheme, list_schemes
from fmtsim.optim.rules import ADAMW
from fmtsim.spec.optimizer import Scheme, StateFormat, in_parameter

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


def markdown() -> str:
    """Return the table."""
    lines = ["| scheme | first moment | second moment | weights | bytes | source |", "|---|---|---|---|--:|---|"]
    for name in list_schemes():
        scheme = get_scheme(name)
        weights = "" if scheme.weights is None else describe(scheme.weights)
        states = f"{describe(scheme.first)} | {describe(scheme.second)} | {weights}"
        lines.append(f"| `{name}` | {states} | {bytes_per_parameter(scheme):.3f} | {scheme.source} |")
    return "\n".join(lines)
