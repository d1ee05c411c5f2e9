# SPDX-License-Identifier: Apache-2.0
"""Whole GEMM definitions and their JSON, which operators carry and of which plan files hold parts."""

import dataclasses
import json
from functools import lru_cache
from typing import Any, Literal

import torch

from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import format_from_dict, format_to_dict
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import OperandFormat
from fmtsim.spec.datapath import (
    FP32,
    Arithmetic,
    Datapath,
    FmaDatapath,
    IntegerDatapath,
    LogDatapath,
    PairwiseDatapath,
    TwoStageDatapath,
    sum_dtype,
)
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import READERS, at, parse_record, record_of

Basis = Literal["recorded", "reported", "rule", "guess"]
BASES: dict[Basis, str] = {
    "recorded": "recorded bits of this call",
    "reported": "the library's own choice for this call",
    "rule": "a rule",
    "guess": "a guess",
}
"""The evidence for a plan; a rule was tested, or is true by definition."""

_KINDS: dict[str, type] = {
    "fused": Datapath,
    "two_stage": TwoStageDatapath,
    "pairwise": PairwiseDatapath,
    "fma": FmaDatapath,
    "integer": IntegerDatapath,
    "logarithmic": LogDatapath,
    "plan": GemmPlan,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """Say everything about a product except the data: what a GemmCall comes to, and what engines get.

    Two specs are equal where they give the same bits: the fields from ``unit`` on only tell where a spec comes from.

    Args:
        datapath: The arithmetic of the unit.
        plan: The accumulation order.
        a, b: Formats of the two operands' values.
        unit: Name of the unit, None for a datapath alone.
        accumulate: Name of the format of the unit's sums (``"fp32"``, ``"fp16"``, ``"fp64"``, ``"int32"``).
        basis: The evidence for the plan.
    """

    datapath: Arithmetic = dataclasses.field(compare=False)  # ``text`` compares: one string, where the records would
    plan: GemmPlan = dataclasses.field(compare=False)  # be compared and hashed field by field
    a: OperandFormat = dataclasses.field(compare=False)
    b: OperandFormat = dataclasses.field(compare=False)
    unit: str | None = dataclasses.field(default=None, compare=False)
    accumulate: str = dataclasses.field(default="fp32", compare=False)
    basis: Basis = dataclasses.field(default="rule", compare=False)
    # Derived, and stored because torch.compile reads fields of a record, not its properties.
    text: str = dataclasses.field(init=False, repr=False)
    stochastic: bool = dataclasses.field(init=False, compare=False, repr=False)
    sum_dtype: torch.dtype = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        rounding = self.datapath.rounding.mode if isinstance(self.datapath, Datapath) else ""
        object.__setattr__(self, "stochastic", rounding == "stochastic")
        object.__setattr__(self, "sum_dtype", sum_dtype(self.datapath))
        object.__setattr__(self, "text", _text_of(self.datapath, self.plan, self.a, self.b))

    @property
    def promotes(self) -> bool:
        """Whether the plan or the unit adds chains to an outer sum."""
        return self.plan.promote_every is not None or getattr(self.datapath, "promote_every", None) is not None

    @property
    def outer(self) -> FloatFormat:
        """The format of the outer sum: float32 for a plan's, and what a unit says of its own."""
        unit = self.datapath
        if self.plan.promote_every is not None or not isinstance(unit, Datapath):
            return FP32
        return unit.promotion or unit.accumulator

    def to_json(self) -> str:
        """Return the definition as one line of JSON, without where it comes from."""
        return self.text


@lru_cache(maxsize=1024)
def _text_of(datapath: Arithmetic, plan: GemmPlan, a: OperandFormat, b: OperandFormat) -> str:
    return json.dumps(
        {
            "datapath": record_to_dict(datapath),
            "plan": record_to_dict(plan),
            "a": format_to_dict(a),
            "b": format_to_dict(b),
        }
    )


@lru_cache(maxsize=1024)
def gemm_spec_from_json(text: str) -> GemmSpec:
    """Read back what ``GemmSpec.to_json`` wrote."""
    record = json.loads(text)
    a, b = format_from_dict(record["a"]), format_from_dict(record["b"])
    assert isinstance(a, FloatFormat | IntFormat | LogFormat) and isinstance(b, FloatFormat | IntFormat | LogFormat)
    return GemmSpec(datapath=record_from_dict(record["datapath"]), plan=record_from_dict(record["plan"]), a=a, b=b)


def record_to_dict(record: Arithmetic | GemmPlan) -> dict[str, Any]:
    """Return a unit or plan as plain JSON types, defaults left out; ``record_from_dict`` reads it back."""
    fields: dict[str, Any] = {"kind": _NAMES[type(record)]}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value == field.default:
            continue
        if isinstance(value, FloatFormat):
            value = format_to_dict(value)
        elif isinstance(value, Rounding):
            value = dataclasses.asdict(value)
        fields[field.name] = value
    return fields


def record_from_dict(record: dict[str, Any], path: str = "") -> Any:
    """Build a unit or plan from ``record_to_dict``'s record; raise ArgumentError or FormatError where it is not one.

    Args:
        record: The record.
        path: What errors call it, where it is a part of something.
    """
    fields = dict(record)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        kinds = ", ".join(_KINDS)
        raise at(path, ArgumentError, f"kind={shown(kind)} is not a kind of unit or plan; choose one of {kinds}")
    return record_of(_KINDS[kind], fields, path)


def datapath_from_dict(record: dict[str, Any], path: str = "") -> Arithmetic:
    """Build a datapath from ``record_to_dict``'s record; arguments and errors are those of ``record_from_dict``."""
    datapath = record_from_dict(record, path)
    if not isinstance(datapath, Arithmetic):
        raise at(path, ArgumentError, f"kind={shown(record['kind'])} is not the kind of a datapath")
    return datapath


DATAPATHS: dict[str, type[Arithmetic]] = {"integers": IntegerDatapath, "logarithms": LogDatapath}
"""Records by the first word of a datapath's text."""


def datapath_from_text(text: str, option: str = "target") -> Arithmetic | None:
    """Build a datapath from fields: ``block=32,fraction_bits=10``, ``integers,accumulator_bits=24`` or ``logarithms``.

    Returns:
        The datapath; None for text of another kind.

    Raises:
        ArgumentError, FormatError: A field is unknown or has a value that is not possible; ``option`` is named.
    """
    first, _, rest = text.partition(",")
    record = DATAPATHS.get(first.strip())
    if record is None and ("=" not in text or text.endswith(".json") or text.lstrip().startswith("{")):
        return None
    return parse_record(text if record is None else rest, record or Datapath, option)  # type: ignore[no-any-return]


def _read(value: Any, path: str) -> Any:
    """Return the unit, target or plan that a file says: a record, or a name."""
    return record_from_dict(value, path) if isinstance(value, dict) else value


READERS.update(dict.fromkeys((Any, *_KINDS.values()), _read))
