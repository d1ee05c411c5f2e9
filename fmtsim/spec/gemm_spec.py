"""Units, plans and whole GEMM definitions as JSON: what operators carry and plan files hold."""

import dataclasses
import json
from functools import lru_cache
from typing import Any

from fmtsim.errors import ArgumentError
from fmtsim.formats.serialization import format_from_dict, format_to_dict
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.plan import GemmPlan

_KINDS: dict[str, type] = {
    "fused": Datapath,
    "two_stage": TwoStageDatapath,
    "pairwise": PairwiseDatapath,
    "integer": IntegerDatapath,
    "plan": GemmPlan,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """Say everything about a product except the data.

    Args:
        datapath: The unit.
        plan: The order of sums.
        a, b: Formats of the two operands' values.
    """

    datapath: Arithmetic
    plan: GemmPlan
    a: FloatFormat | IntFormat
    b: FloatFormat | IntFormat

    def to_json(self) -> str:
        """Return the definition as one line of JSON."""
        return _spec_to_json(self)


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


def record_from_dict(record: dict[str, Any]) -> Any:
    """Build a unit or plan from ``record_to_dict``'s record; raise ArgumentError where it is not one."""
    fields = dict(record)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ArgumentError(f"kind={kind!r} is not a kind of unit or plan; choose one of {', '.join(_KINDS)}")
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = Rounding(**value) if name == "rounding" else format_from_dict(value)
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ArgumentError(f"not a {kind} record: {error}") from None


@lru_cache(maxsize=1024)
def _spec_to_json(spec: GemmSpec) -> str:
    return json.dumps(
        {
            "datapath": record_to_dict(spec.datapath),
            "plan": record_to_dict(spec.plan),
            "a": format_to_dict(spec.a),
            "b": format_to_dict(spec.b),
        }
    )


@lru_cache(maxsize=1024)
def gemm_spec_from_json(text: str) -> GemmSpec:
    """Read back what ``GemmSpec.to_json`` wrote."""
    record = json.loads(text)
    a, b = format_from_dict(record["a"]), format_from_dict(record["b"])
    assert isinstance(a, FloatFormat | IntFormat) and isinstance(b, FloatFormat | IntFormat)
    return GemmSpec(datapath=record_from_dict(record["datapath"]), plan=record_from_dict(record["plan"]), a=a, b=b)
