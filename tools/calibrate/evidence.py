# SPDX-License-Identifier: Apache-2.0
"""What a GPU showed of a matrix unit: calls with the digests of their bits, as records and as a JSON file."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fmtsim.formats.interop import torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.call import GemmCall, Operation, ScaleKind
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types, load_record, located, record_of
from tools.calibrate.arithmetic import family_of

Data = Literal["wide", "special"]
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvidence:
    """Describe a call that ran natively and emulated."""

    operation: Operation  # operation, m, n, k, a, b, scaling, accumulate, fast_accum: as in GemmCall
    m: int
    n: int
    k: int
    a: str
    b: str
    out: str  # format of the result, by name
    scaling: ScaleKind
    accumulate: str
    fast_accum: bool
    data: Data  # ``"wide"`` numbers, or with ``"special"`` ones among them
    seed: int  # of the operands
    tensor_scales: bool = False  # NVFP4 operands have scales of the tensor, too
    function: str  # the function of torch that ran
    # operands, native, emulated: SHA-256 of the bits of operands with scales, of the GPU's result and of our own
    operands: str
    native: str
    emulated: str
    outputs: int  # results
    mismatches: int  # those whose bits differ
    plan: GemmPlan = GemmPlan()  # the order in which ours adds
    first: str = ""  # the first difference, in words

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("operands", "native", "emulated"):
            if not _DIGEST.fullmatch(getattr(self, name)):
                raise ArgumentError(f"{name}={shown(getattr(self, name))} is not a SHA-256; write 64 digits 0-9 a-f")
        if self.m < 1 or self.n < 1 or self.k < 1 or self.outputs != self.m * self.n:
            raise ArgumentError(f"outputs={self.outputs} do not fit m={self.m}, n={self.n}, k={self.k}")
        if not 0 <= self.mismatches <= self.outputs or (self.mismatches == 0) != (self.native == self.emulated):
            raise ArgumentError(
                f"mismatches={self.mismatches} of {self.outputs} contradict the digests of native and emulated"
            )

    @property
    def call(self) -> GemmCall:
        """The call."""
        dtype = torch.int32 if self.out == "int32" else torch_dtype(get_format(self.out))  # type: ignore[arg-type]
        if dtype is None:
            raise ArgumentError(f"out={shown(self.out)} is not a format of torch's results")
        return GemmCall(
            operation=self.operation, m=self.m, n=self.n, k=self.k, a=self.a, b=self.b, out=dtype,
            scaling=self.scaling, accumulate=self.accumulate, fast_accum=self.fast_accum,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KindEvidence:
    """Describe what a kind of calls came to."""

    name: str  # of the kind, such as ``"nvfp4"``
    unit: str  # whose emulation it was compared with
    calls: tuple[CallEvidence, ...] = ()  # those that ran; none is a kind that says nothing about the unit
    note: str = ""  # why calls did not run

    def __post_init__(self) -> None:
        check_types(self)
        get_unit(self.unit)
        for i, call in enumerate(self.calls):
            with located(f"calls[{i}]"):
                get_unit(self.unit).find(call.a, call.b, call.accumulate)
                _ = call.call
        if not self.calls and not self.note:
            raise ArgumentError(f"kind {shown(self.name)} has neither calls nor a note that says why")

    @property
    def outputs(self) -> int:
        """Results compared."""
        return sum(call.outputs for call in self.calls)

    @property
    def mismatches(self) -> int:
        """Results whose bits differ."""
        return sum(call.mismatches for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Describe what a GPU showed of a unit."""

    unit: str
    card: str  # the GPU's name
    capability: tuple[int, int]  # its compute capability
    driver: str  # driver, torch, cublaslt, fmtsim: versions
    torch: str
    cublaslt: str
    fmtsim: str
    date: str  # when, as YYYY-MM-DD
    kinds: tuple[KindEvidence, ...]  # the kinds of calls

    def __post_init__(self) -> None:
        check_types(self)
        get_unit(self.unit)
        check_family(self.unit, self.card, self.capability)
        if not self.kinds:
            raise ArgumentError("kinds are empty; evidence has at least one")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            raise ArgumentError(f"date={shown(self.date)} is not a date; write YYYY-MM-DD")

    @property
    def proves(self) -> bool:
        """Whether every kind ran and no bit differs."""
        return all(kind.calls and not kind.mismatches for kind in self.kinds)


def check_family(unit: str, card: str, capability: tuple[int, int]) -> None:
    """Raise ArgumentError where a unit is not one of a GPU's."""
    family = family_of(capability)
    if unit.split(".")[0] != family:
        raise ArgumentError(
            f"unit {unit} is not one of {card}, compute capability {capability[0]}.{capability[1]}; "
            + (f"its units are called {family}.*" if family else "fmtsim knows no unit of that GPU")
        )


def load_evidence(path: str | Path) -> Evidence:
    """Read evidence from a JSON file.

    Raises:
        ArgumentError: It cannot be read, is not evidence, or contradicts itself; the message has file and field.
    """

    def read(value: Any, name: str) -> Any:
        return record_of(Evidence, value, f"{name}: evidence")

    return load_record(path, "evidence file", read)
