# SPDX-License-Identifier: Apache-2.0
"""How another library's cast gets its bits: the steps of its profile with the numbers that they give."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.profile import get_profile
from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import Format
from fmtsim.formats.interop import dtype_name
from fmtsim.support.errors import ArgumentError
from fmtsim.support.table import Column, Facts, Result, Rows, number_text, table_of

SHOWN = 8  # numbers of a step that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a library's cast: its text, the dtype of its result, and the result, an element or a block each."""

    text: str
    dtype: str
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LikeExplanation(Result):
    """Say what ``explain`` with ``like=`` found; ``print`` shows it as text.

    Args:
        like: The library, with the variant.
        format: The format's name.
        function, source, versions, notes: What the profile says of itself.
        x: The numbers.
        steps: Each step in order.
        values: What the library's cast makes of them.
        ours: What ``fmtsim.quantize`` without ``like=`` makes of them.
    """

    like: str
    format: str
    function: str
    source: str
    versions: str
    notes: str
    x: tuple[float, ...]
    steps: tuple[Step, ...]
    values: tuple[float, ...]
    ours: tuple[float, ...]

    def _content(self) -> Iterable[Rows | Facts | str]:
        yield Facts([
            ("cast", f"{self.format} like {self.like}: {self.function}"),
            ("source", f"{self.source}; compared with {self.versions}"), ("note", self.notes),
        ])  # fmt: skip
        yield ""
        yield table_of(_COLUMNS, self.steps)
        yield ""
        rows = list(zip(self.x, self.values, self.ours, strict=True))
        yield table_of(_VALUES, rows[:SHOWN])
        if len(rows) > SHOWN:
            yield f"... and {len(rows) - SHOWN} more numbers"


_COLUMNS = (
    Column("step", "text"), Column("dtype", "dtype"),
    Column("result", lambda step: ", ".join(map(number_text, step.numbers[:SHOWN]))
           + (", ..." if len(step.numbers) > SHOWN else "")),
)  # fmt: skip
_VALUES = (
    Column("x", lambda row: number_text(row[0]), ">"), Column("value", lambda row: number_text(row[1]), ">"),
    Column("fmtsim's own", lambda row: number_text(row[2]), ">"),
)  # fmt: skip


def explain_like(x: Tensor, format: Format, like: str, block_size: Any = None) -> LikeExplanation:
    """Run the steps of a library's cast on numbers of one dimension, and keep what each of them gives."""
    profile, fmt = get_profile(like, format, x.dtype)
    steps: list[Step] = []

    def keep(text: str, name: str, result: Any) -> None:
        numbers = result.reshape(-1).tolist() if isinstance(result, Tensor) else [result]
        dtype = dtype_name(result.dtype) if isinstance(result, Tensor) else ""
        steps.append(Step(text=text, dtype=dtype, numbers=tuple(map(float, numbers))))

    if x.dtype == torch.float64 and "fp64" not in profile.inputs:  # what Python's numbers are
        x = x.float()
        keep("x = fp32(x), which the library takes", "x", x)
    if not x.numel():
        raise ArgumentError("x is empty: there is no number to explain")
    values = profile.results(x, fmt, block_size=block_size, trace=keep)["value"]
    ours = quantize(x, fmt, block_size=block_size, pad=profile.block is not None, out_dtype=torch.float64)
    facts = {name: getattr(profile, name) for name in ("like", "function", "source", "versions", "notes")}
    return LikeExplanation(format=fmt.name, x=tuple(x.double().tolist()), steps=tuple(steps),
                           values=tuple(values.double().tolist()), ours=tuple(ours.tolist()), **facts)  # fmt: skip
