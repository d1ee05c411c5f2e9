# SPDX-License-Identifier: Apache-2.0
"""Kernels and rules of plan files: how a kernel cuts K, into how many parts, and which kernel a call runs."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.targets.cublaslt import choice_order
from fmtsim.gemm.targets.question import Architecture, Choice, Order, ceil_div
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall, ScaleKind
from fmtsim.spec.datapath import FP32
from fmtsim.spec.gemm_spec import Basis
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import at, check_types, located, record_fields, record_of, type_hints

_KERNEL_FIELDS = ("algorithm", "stages", "slices", "align", "line")
_LINE = 16  # bytes a row must be a multiple of, for kernels that load by tensor maps
_BITS = {"fp16": 16, "bf16": 16, "tf32": 32, "fp32": 32, "fp64": 64}

CHAINS: dict[ScaleKind, GemmPlan] = {
    kind: GemmPlan(
        promote_every=128,
        scaled_promotion=True,
        successive_scales=kind == "row_block_128",
        source="a chain for every 128 products",
    )
    for kind in LARGE_BLOCKS
}
"""Orders of a unit alone whose sums are scaled on the way; those of other kinds of scales are ``ONE_CHAIN``."""
ONE_CHAIN = GemmPlan(source="one chain, k in order: a unit alone names no library")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Describe a kernel configuration: an algorithm of cuBLASLt, or a plan without its number of parts.

    Args:
        algorithm: ALGO_ID of cuBLASLt, whose orders ``fmtsim.gemm.targets.cublaslt`` knows; the fields below are then
            left out. None for a kernel that is described by them.
        stages: STAGES_ID of the algorithm.
        plan: The plan of a call that the kernel splits; of ``k_tile`` nothing is left where nothing is split.
        slices: Parts are slices of K of ``ceil(K / parts)`` products, rounded up to ``align``, or to ``line`` where
            K is a multiple of it and lies along the rows of an operand; each slice has its own residue first
            (CUTLASS 2.x). Otherwise whole tiles are dealt to the parts.
        align: See ``slices``.
        line: See ``slices``; 0 never applies.
        partial_out: Parts are rounded to the dtype of the result, which stands for ``plan.partial``.
        bias_unsplit: As ``plan.bias_after_rounding``, but only where the kernel makes one part of K, because whatever
            adds several parts adds the bias with them.
    """

    algorithm: int | None = None
    stages: int = 0
    plan: GemmPlan = GemmPlan()
    slices: bool = False
    align: int = 1
    line: int = 0
    partial_out: bool = False
    bias_unsplit: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.align < 1 or self.line < 0:
            raise ArgumentError(
                f"align={self.align}, line={self.line} is not possible; choose an align from 1, a line from 0"
            )
        if self.algorithm is not None and set(_differing(self)) - {"algorithm", "stages"}:
            raise ArgumentError(f"algorithm={self.algorithm} says how K is cut; leave all fields but stages out")

    @classmethod
    def from_dict(cls, record: dict[str, Any], path: str = "") -> "Kernel":
        """Build a kernel from JSON: its own fields and those of the plan side by side, in the words of plan files.

        There ``partial`` may be ``"out"``, and ``bias_after_rounding`` ``"unsplit"``.
        """
        fields = record_fields(record, path, "a Kernel")
        kernel_fields: dict[str, Any] = {name: fields.pop(name) for name in _KERNEL_FIELDS if name in fields}
        after = fields.get("bias_after_rounding", False)
        if not isinstance(after, bool | str) or (isinstance(after, str) and after != "unsplit"):
            text = f"bias_after_rounding={shown(after)} is not possible; choose false, true or 'unsplit'"
            raise at(path, ArgumentError, text)
        partial = fields.get("partial")
        kernel_fields |= {
            "partial_out": isinstance(partial, str) and partial == "out",
            "bias_unsplit": after == "unsplit",
        }
        if kernel_fields["partial_out"]:
            fields["partial"] = FP32.name
        plan = record_of(GemmPlan, {**fields, "bias_after_rounding": after is True}, path)
        with located(path):
            return cls(plan=plan, **kernel_fields)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``from_dict`` reads, without the fields that have their default."""
        fields = _differing(self.plan) | _differing(self)
        for name in ("plan", "partial_out", "bias_unsplit"):
            fields.pop(name, None)
        if self.plan.partial is not None:
            fields["partial"] = "out" if self.partial_out else self.plan.partial.name
        if self.bias_unsplit:
            fields["bias_after_rounding"] = "unsplit"
        order = ("k_tile", *_KERNEL_FIELDS, *GemmPlan.__dataclass_fields__)
        return {name: fields[name] for name in sorted(fields, key=order.index)}

    def split_order(self, call: GemmCall, split: int, architecture: Architecture | None) -> Order | None:
        """Return the order of a call that is split into ``split`` parts; None where it is not known."""
        if self.algorithm is None:
            return Order(self.split_plan(call, split))
        choice = Choice(self.algorithm, split, 2 if split > 1 else 0, 0, self.stages)  # partial sums as they are
        return None if architecture is None else choice_order(choice, call, architecture)

    def split_plan(self, call: GemmCall, split: int) -> GemmPlan:
        """Return the plan of a call split into ``split`` parts, for a kernel without an algorithm."""
        # 1. how K is cut: slices whose residues come first, or whole tiles
        tile = self.plan.k_tile
        after = self.plan.bias_after_rounding or (self.bias_unsplit and split == 1)
        cut: dict[str, Any] = {"k_tile": None, "bias_after_rounding": after}
        if self.slices and tile is not None and split > 1:
            by_rows = "row" in (call.a_layout, call.b_layout)
            step = self.line if self.line and call.k % self.line == 0 and by_rows else self.align
            width = ceil_div(ceil_div(call.k, split), step) * step
            split = ceil_div(call.k, width)  # fewer parts where rounding up makes them wider
            cut |= {"k_tile": tile, "part_k": width, "residue_first": True}
        elif tile is not None and (split > 1 or self.slices):
            cut |= {"k_tile": tile, "residue_first": self.slices}
        # 2. how the parts are added; one part has no partial sums
        partial = get_format(_dtype_format(call.out)) if self.partial_out else self.plan.partial
        if split > 1:
            partial = None if partial is None or partial.name == "fp32" else partial  # sums are float32 as they are
            cut |= {"split": split, "partial": partial, "round_trip": self.plan.round_trip and partial is not None}
        else:
            cut |= {"partial": None, "round_trip": False, "owner": "contiguous", "reduce": "serial"}
        return replace(self.plan, **cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Describe how many parts a library makes of K, as far as that is known.

    With T tiles the library wants ``ceil(T / tiles_per_part) - 1`` parts, and takes fewer where the result has too
    many elements to run them all at once.

    Args:
        whole: Up to this many tiles nothing is split.
        tiles_per_part: See above.
        certain: ``(parts, area)``: up to so many wanted parts, the wanted number is taken where it times the area is
            below ``area``; the area is M N, both rounded up to 8. The last entry's None stands for any number.
        workspace: Bytes for partial sums in float32: no split where two parts do not fit; None has no limit.
        largest: Results with more elements are never split; None where that is not known.
        room: The guess for what is not certain: ``room // area`` parts at most.
    """

    whole: int
    tiles_per_part: int
    certain: tuple[tuple[int | None, int], ...]
    workspace: int | None = None
    largest: int | None = None
    room: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if self.tiles_per_part < 1 or self.room < 0:
            values = f"tiles_per_part={self.tiles_per_part}, room={self.room}"
            raise ArgumentError(f"{values} is not possible; choose tiles_per_part from 1, room from 0")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not the default."""
        return {**_differing(self), "certain": [list(pair) for pair in self.certain]}

    def count(self, call: GemmCall, k_tile: int) -> tuple[int, bool]:
        """Return the number of parts, and whether it is certain."""
        # H200, torch 2.11.0+cu130, cuBLASLt 13.1.0, 2026-11-21, T tiles: T <= 40 is one part in 117,403 logged choices;
        # FP8 and F.linear with a bias have 1 MiB of workspace: one part where two float32 sums exceed it (22,479); mm
        # of more than 2.7 million results: one (2,553); ceil(T / 20) - 1 where `certain` says so (25,386): no exception
        # to any. On 21,910 further random calls none that was called certain was wrong. The guess is right in 66 %
        # (FP8), 60 % (linear) and 51 % (mm). On an H100 PCIe (cuBLASLt 12.8.3.14, room 184000) none of 769,216 certain
        # answers was wrong.
        tiles = ceil_div(call.k, k_tile)
        elements, area = call.m * call.n, ceil_div(call.m, 8) * ceil_div(call.n, 8) * 64
        # 1. one part: few tiles, no workspace for two partial sums of 4 bytes an element, or a large result
        if tiles <= self.whole:
            return 1, True
        if self.workspace is not None and 8 * elements > self.workspace:
            return 1, True
        if self.largest is not None and elements > self.largest:
            return 1, True
        # 2. the wanted number where the table is certain of it, else at most as many as the room holds
        wanted = max(1, ceil_div(tiles, self.tiles_per_part) - 1)
        limit = next((area for parts, area in self.certain if parts is None or wanted <= parts), 0)
        return (wanted, True) if wanted * area < limit else (min(wanted, max(1, self.room // max(area, 1))), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Describe the plan of all calls that fulfil some conditions.

    Args:
        when: Conditions on the call (``fmtsim.gemm.targets.kernel.matches`` has them).
        kernel: Name of the kernel that runs.
        split: Parts of K: a number, the name of a split rule, or a table from ``"MxN"`` and K to the number. Calls
            that a table lacks go on to the next rule.
        basis: The evidence for it.
        reason: One sentence that says what.
        unit: Name of the unit that runs, where it is not the target's for such operands.
        operands: Format in which that unit takes them: ``"fp32"`` where float32 is not rounded to TF32, ``"tf32"``
            where the unit ignores the low 13 bits of float32.
    """

    when: dict[str, Any]
    kernel: str
    split: int | str | dict[str, dict[str, int]]
    basis: Basis
    reason: str
    unit: str | None = None
    operands: str | None = None

    def __post_init__(self) -> None:
        basis: object = self.basis
        if isinstance(basis, str) and basis == "logged":  # the word of older plan files
            object.__setattr__(self, "basis", "reported")
        if not isinstance(self.basis, str) or self.basis not in get_args(Basis):
            raise ArgumentError(
                f"basis={shown(self.basis)} is not possible; choose one of {', '.join(get_args(Basis))}"
            )
        check_types(self)
        check_conditions(self.when)
        tables = self.split.values() if isinstance(self.split, dict) else [{"": self.split}]
        few = next((n for table in tables for n in table.values() if isinstance(n, int) and n < 1), None)
        if few is not None:
            raise ArgumentError(f"split={few} is not possible; choose 1 or more parts")
        if self.operands is not None and self.unit is None:
            raise ArgumentError(f"operands={self.operands!r} are those of a unit; name it with unit=")
        if self.operands is not None and not isinstance(get_format(self.operands), FloatFormat):
            raise ArgumentError(f"operands={self.operands!r} is not a floating-point format; choose 'fp32' or another")
        if self.unit is not None:
            get_unit(self.unit)


def matches(when: dict[str, Any], call: GemmCall) -> bool:
    """Return True if a call fulfils conditions, which ``check_conditions`` explains."""
    for name, wanted in when.items():
        value = _aligned(call) if name == "aligned" else getattr(call, name)
        if isinstance(value, torch.dtype):
            value = _dtype_format(value)
        if isinstance(wanted, dict):
            low, high, step = wanted.get("min", 0), wanted.get("max", value), wanted.get("multiple_of", 1)
            fulfilled = low <= value <= high and value % step == 0
        else:
            fulfilled = value in wanted if isinstance(wanted, list) and name != "aligned" else value == wanted
        if not fulfilled:
            return False
    return True


def check_conditions(when: dict[str, Any]) -> None:
    """Raise ArgumentError where a condition is not one on a GemmCall.

    Each key is a field of GemmCall, or ``"aligned"``: rows of both operands and of the result are multiples of 16
    bytes of the operand (a result with one column needs that of its rows). A value is compared; a list allows its
    members; a dict has ``min``, ``max`` and ``multiple_of``. Dtypes are written as names of formats.
    """
    types = type_hints(GemmCall)
    for name, wanted in when.items():
        if name != "aligned" and name not in CONDITIONS:
            raise ArgumentError(
                f"{shown(name)} is not a condition; choose one of {', '.join(CONDITIONS)}, or 'aligned'"
            )
        if isinstance(wanted, dict) and (set(wanted) - set(_RANGE) or types.get(name) is not int):
            raise ArgumentError(f"{name}={shown(wanted)} is not a condition; a dict has min, max and multiple_of")
        kind = bool if name == "aligned" else types[name] if types[name] in (int, bool) else str
        for value in wanted.values() if isinstance(wanted, dict) else wanted if isinstance(wanted, list) else [wanted]:
            if type(value) is not kind or (isinstance(value, int) and value.bit_length() > 63):
                raise ArgumentError(f"{name}={shown(wanted)} is not a condition; it compares {_COMPARED[kind]}")
        if isinstance(wanted, dict) and wanted.get("multiple_of", 1) < 1:
            raise ArgumentError(f"{name}={shown(wanted)} is not a condition; multiple_of is 1 or more")


_COMPARED = {int: "whole numbers of 64 bits", bool: "True or False", str: "names"}
_RANGE = ("min", "max", "multiple_of")
_CALLER_FIELDS = ("formats", "target", "plan", "strict")
CONDITIONS = tuple(name for name in GemmCall.__dataclass_fields__ if name not in _CALLER_FIELDS)
"""What a rule may test of a call, beside ``"aligned"``."""


def _aligned(call: GemmCall) -> bool:
    # 16-bit calls run on nvjet if and only if this is True: about 200,000 logged choices (H200, 2026-11-21).
    elements = _LINE * 8 // max(_BITS.get(call.a, 8), 8)
    a = call.k if call.a_layout == "row" else call.m
    b = call.k if call.b_layout == "row" else call.n
    sizes = {(True, False): (call.n, call.k), (False, True): (call.m, call.k)}.get(  # a vector has no rows
        (call.m == 1, call.n == 1), (a, b, call.n)
    )
    return all(size % elements == 0 for size in sizes)


def _dtype_format(dtype: torch.dtype) -> str:
    return "int32" if dtype == torch.int32 else get_format(dtype).name


def _differing(record: Any) -> dict[str, Any]:
    fields = dataclasses.fields(record)
    return {f.name: getattr(record, f.name) for f in fields if getattr(record, f.name) != f.default}
