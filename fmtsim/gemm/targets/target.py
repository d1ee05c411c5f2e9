"""GPUs with their libraries: which unit a call runs on, and in which order it adds, read from JSON plan files."""

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_args

import torch

from fmtsim.errors import ArgumentError, PlanUnknownWarning, did_you_mean, shown
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.targets.kernel import Kernel, Splits, check_conditions, matches
from fmtsim.gemm.units.unit import get_unit, units_that_take
from fmtsim.records import READERS, check_types, load_record, located, record_of
from fmtsim.spec.call import SCALE_KINDS, GemmCall, ScaleKind
from fmtsim.spec.gemm_spec import Basis, GemmSpec
from fmtsim.spec.plan import GemmPlan

PLANS = Path(__file__).with_name("plans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Describe the plan of all calls that fulfil some conditions.

    Args:
        when: Conditions on the call (``fmtsim.gemm.targets.kernel.matches`` has them).
        kernel: Name of the kernel that runs.
        split: Parts of K: a number, the name of a split rule, or a table from ``"MxN"`` and K to the number. Calls
            that a table lacks go on to the next rule.
        basis: What stands behind it.
        reason: One sentence that says what.
        unit: Name of the unit that runs, where it is not the target's for such operands.
        operands: Format in which that unit takes them: ``"fp32"`` where float32 is not rounded to TF32.
    """

    when: dict[str, Any]
    kernel: str
    split: int | str | dict[str, dict[str, int]]
    basis: Basis
    reason: str
    unit: str | None = None
    operands: str | None = None

    def __post_init__(self) -> None:
        given: object = self.basis
        if isinstance(given, str) and given == "logged":  # the word of older plan files
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """Describe a GPU and its library: units by operand formats, kernels, and rules that say which one runs.

    Args:
        name: Name of the target.
        library: GPU, library and versions.
        source: Where the rules come from.
        units: ``(inputs, accumulate, unit)``: the first that fits is the unit of a call; None stands for any unit
            the caller names a format for (not used by GPUs).
        kernels: By name, how each orders its sums.
        splits: By name, rules for the number of parts.
        rules: In order; the first that fits is taken.
    """

    name: str
    library: str
    source: str
    units: tuple[tuple[tuple[str, ...], str, str], ...]
    kernels: dict[str, Kernel]
    splits: dict[str, Splits]
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        check_types(self)
        for inputs, accumulate, unit in self.units:
            for name in inputs:
                get_unit(unit).find(name, name, accumulate)
        for number, rule in enumerate(self.rules):
            with located(f"rules[{number}]"):
                self._check_names(rule)

    def _check_names(self, rule: Rule) -> None:
        if rule.kernel not in self.kernels:
            raise ArgumentError(f"kernel={rule.kernel!r} is not listed; kernels are {', '.join(self.kernels)}")
        if isinstance(rule.split, str) and rule.split not in self.splits:
            raise ArgumentError(f"split={rule.split!r} is not listed; splits are {', '.join(self.splits)}")

    def __repr__(self) -> str:
        return f"Target({self.name!r}: {self.library}, {len(self.rules)} rules)"

    @property
    def families(self) -> frozenset[str]:
        """Names of the families of GPUs that the units belong to."""
        return frozenset(unit.split(".")[0] for _, _, unit in self.units)

    def resolve(self, call: GemmCall, *, strict: bool = False) -> GemmSpec:
        """Return what the target makes of a call: unit, plan, and the formats in which the unit takes operands.

        Exact recorded shapes come first, then rules, then guesses. A guess warns once a process for each call.

        Args:
            call: The facts of the call (``GemmCall.facts``).
            strict: Raise where the plan is a guess.

        Raises:
            ArgumentError: The target has no unit for these operands, or the plan is a guess and ``strict`` is set.
        """
        found = _resolution(self, call)
        if found.basis == "guess":
            self.doubt(call, found.plan, strict)
        return found

    def unit(self, call: GemmCall) -> str:
        """Return the name of the unit for a call's operands; a rule may name another.

        Raises:
            ArgumentError: There is none.
        """
        return self.takes(call.a, call.b, call.accumulate, call.scaling)

    def takes(self, a: str, b: str, accumulate: str, scaling: ScaleKind) -> str:
        """Return the name of the unit for operands of two formats, sums in ``accumulate``, and a kind of scales.

        Raises:
            ArgumentError: There is none.
        """
        found = self._unit(a, b, accumulate, scaling)
        if found is not None:
            return found
        taken = "; ".join(f"{' '.join(inputs)} -> {sums} ({unit})" for inputs, sums, unit in self.units)
        others = [name for name in list_targets() if get_target(name)._unit(a, b, accumulate, scaling) is not None]
        if others:
            elsewhere = f"targets that do: {', '.join(others)}"
        else:
            elsewhere = units_that_take(get_format(a), get_format(b), accumulate, _unit_scale(scaling))
        raise ArgumentError(
            f"target {self.name} has no unit for {a} x {b} -> {accumulate} with scaling {scaling!r}; it has {taken}; "
            f"{elsewhere}"
        )

    def _unit(self, a: str, b: str, accumulate: str, scaling: ScaleKind) -> str | None:
        scale = _unit_scale(scaling)
        for inputs, sums, unit in self.units:
            scales = {mode.scale for mode in get_unit(unit).modes}
            if {a, b} <= set(inputs) and sums == accumulate and scale in scales:
                return unit
        return None

    def find(self, call: GemmCall) -> tuple[int | None, GemmPlan, Basis]:
        """Return the number of the rule that a call falls under, None where there is none, its plan and its basis.

        A single row or column has no layout: what is known of either serves.
        """
        found = [self._find(each) for each in call.same_calls()]
        return next((each for each in found if each[2] != "guess"), found[0])

    def _find(self, call: GemmCall) -> tuple[int | None, GemmPlan, Basis]:
        for number, rule in enumerate(self.rules):
            if not matches(rule.when, call):
                continue
            kernel, basis = self.kernels[rule.kernel], rule.basis
            if isinstance(rule.split, dict):
                split = rule.split.get(f"{call.m}x{call.n}", {}).get(str(call.k))
                if split is None:
                    continue
            elif isinstance(rule.split, str):
                split, certain = self.splits[rule.split].count(call, kernel.plan.k_tile or 1)
                basis = basis if certain else "guess"
            else:
                split = rule.split
            plan, exact = kernel.plan_of(call, split, source=rule.reason, verified=basis == "recorded")
            if not exact:
                plan, basis = replace(plan, verified=False), "guess"
            return number, plan, basis
        return None, GemmPlan(source="one chain, k in order: no rule covers this call"), "guess"

    def doubt(self, call: GemmCall, plan: GemmPlan, strict: bool) -> None:
        """Warn of a plan that is a guess, once a process for each call, or refuse it."""
        text = (
            f"target {self.name} has no recorded accumulation order for {call.operation} "
            f"M={call.m} N={call.n} K={call.k} {call.a} x {call.b} -> {call.out}; "
        )
        step = "pass plan=GemmPlan(...), or record the call on the GPU and name the plan file as target="
        if strict:
            raise ArgumentError(f"{text}{step}")
        if _silent.get():
            return
        with _lock:
            known = (self.name, call) in _warned
            _warned.add((self.name, call))
        if not known:
            warnings.warn(f"{text}guessing ({plan.source}); {step}", PlanUnknownWarning, stacklevel=caller_level())


@contextmanager
def without_doubts() -> Iterator[None]:
    """Warn of no guess in this thread, and count none as warned of."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


_silent = ContextVar("silent", default=False)
_warned: set[tuple[str, GemmCall]] = set()
_lock = threading.Lock()
# Files that lie between a user's line and a warning: modules, autograd and torch.compile call fmtsim out of torch.
_INNER = tuple(f"{folder}{os.sep}" for folder in (PLANS.parents[2], Path(torch.__file__).parent))


def caller_level() -> int:
    """Return the stacklevel at which a warning of the calling function names the line of the user's that led to it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    return level


def list_targets() -> list[str]:
    """Return the names of the targets that come with fmtsim."""
    return sorted(path.stem for path in PLANS.glob("*.json"))


def get_target(name: str | Path | Target | Any) -> Target:
    """Return a target by name, or read it from a plan file.

    Args:
        name: A name from ``list_targets()``, the path of a JSON plan file, or a Target, which is returned as it is.

    Raises:
        ArgumentError: The name is unknown (the message has names that are close), or the file is no plan file.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str | os.PathLike):
        raise ArgumentError(f"target={shown(name)} is not a name or a path; choose one of {', '.join(list_targets())}")
    text = os.fspath(name)
    if text.lower() in _shipped() or text.lower() in list_targets():
        return _load(str(PLANS / f"{text.lower()}.json"), 0)
    if text.endswith(".json"):
        return _load(text, _changed(text))
    hint = did_you_mean(text, list_targets())
    raise ArgumentError(
        f"unknown target {shown(text)}{hint} (choose one of {', '.join(list_targets())}, or a plan file, *.json)"
    )


@lru_cache(maxsize=4096)
def _resolution(target: Target, call: GemmCall) -> GemmSpec:
    """Look a call up among the rules, which a training asks for the same products in every step."""
    unit = target.unit(call)
    number, plan, basis = target.find(call)
    rule = None if number is None else target.rules[number]
    a, b, scale = call.a, call.b, _unit_scale(call.scaling)
    if rule is not None and rule.unit is not None:
        unit, scale = rule.unit, None
        a, b = rule.operands or a, rule.operands or b
    mode = get_unit(unit).find(a, b, call.accumulate, scale)
    formats: Any = {"a": get_format(a), "b": get_format(b)}
    return GemmSpec(
        datapath=mode.datapath, plan=plan, unit=unit, accumulate=mode.accumulate, basis=basis, **formats
    )  # fmt: skip


def _unit_scale(kind: ScaleKind) -> str | None:
    extent = SCALE_KINDS.get(kind)
    return None if extent is None else extent.unit_scale


@cache
def _shipped() -> tuple[str, ...]:
    """Return the names of the first look: every product with a target asks, and a folder is slow to read."""
    return tuple(list_targets())


def _changed(path: str) -> int:
    """Return when a file was changed, 0 where there is none, which reading it says."""
    try:
        return os.stat(path).st_mtime_ns
    except (OSError, ValueError):
        return 0


@lru_cache(maxsize=16)
def _load(path: str, changed: int) -> Target:
    """Read a plan file; ``changed`` keeps an edited file from being answered out of the cache."""
    return load_record(path, "plan file", lambda record, name: target_from_dict(record, f"{name}: plan"))


def target_from_dict(record: dict[str, Any], path: str = "") -> Target:
    """Build a Target from what ``target_to_dict`` gives; raise ArgumentError or FormatError where it is not one.

    Args:
        record: The record.
        path: What errors call it.
    """
    return record_of(Target, record, path)  # type: ignore[no-any-return]


READERS[Kernel] = Kernel.from_dict


def target_to_dict(target: Target) -> dict[str, Any]:
    """Return a Target as plain JSON types."""
    return {
        "name": target.name,
        "library": target.library,
        "source": target.source,
        "units": [[list(inputs), accumulate, unit] for inputs, accumulate, unit in target.units],
        "kernels": {name: kernel.to_dict() for name, kernel in target.kernels.items()},
        "splits": {name: split.to_dict() for name, split in target.splits.items()},
        "rules": [_said(rule) for rule in target.rules],
    }


def _said(rule: Rule) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in Rule.__dataclass_fields__ if getattr(rule, name) is not None}
