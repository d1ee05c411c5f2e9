# SPDX-License-Identifier: Apache-2.0
"""GPUs with their libraries: which unit a call runs on, and in which order it adds, read from plan files and books."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fmtsim.formats.registry import get_format
from fmtsim.gemm.targets import ask
from fmtsim.gemm.targets.cublaslt import choice_order, nvjet_tile, same_order
from fmtsim.gemm.targets.doubts import sibling_hint, warn_once
from fmtsim.gemm.targets.kernel import CHAINS, ONE_CHAIN, matches
from fmtsim.gemm.targets.planfile import PlanFile
from fmtsim.gemm.targets.question import (
    DEFAULT,
    Choice,
    Question,
    Settings,
    answers_question,
    book_question,
    find_settings,
    library_question,
    sourced,
)  # fmt: skip
from fmtsim.gemm.units.unit import PLANS, Unit, get_unit, is_unit, list_units, units_that_take
from fmtsim.spec.call import SCALE_KINDS, GemmCall, ScaleKind
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.gemm_spec import DATAPATHS, Basis, GemmSpec, datapath_from_dict, datapath_from_text
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, FmtsimError, PlanUnknownWarning, did_you_mean, shown
from fmtsim.support.records import load_record, located, parse_json


class TargetPlan(NamedTuple):
    """The accumulation order that a target gives a call, and its evidence.

    plan: The accumulation order.
    basis: The evidence for it.
    rule: Index of the rule that matched the call, None if it came from elsewhere.
    unit, operands: As in Rule.
    """

    plan: GemmPlan
    basis: Basis
    rule: int | None = None
    unit: str | None = None
    operands: str | None = None


_UNCOVERED = GemmPlan(source="one chain, k in order: no rule covers this call")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Target(PlanFile):
    """A GPU with its library, as a plan file describes it: ``resolve`` returns a call's unit and accumulation order."""

    def __repr__(self) -> str:
        count = Counter(rule.basis for rule in self.rules)
        return (
            f"Target({self.name!r}: {self.library}; rules: {', '.join(f'{n} {basis}' for basis, n in count.items())})"
        )

    def __deepcopy__(self, memo: Any) -> "Target":
        return self  # copies of a model share what never changes; a book's bytes cannot be copied

    def with_settings(self, settings: str | Settings | None = None, **changes: Any) -> "Target":
        """Return the target of a process whose settings change what torch asks cuBLASLt.

        Args:
            settings: A name, ``"batch_invariant"`` as vLLM's VLLM_BATCH_INVARIANT=1 sets them; a record; or None.
            changes: Fields of Settings to change: workspace, lt_workspace (bytes), reductions, library.

        Raises:
            ArgumentError: There is no such setting, or no record of the library under it; the message has those known.

        >>> get_target("h200").with_settings("batch_invariant").name
        'h200.batch_invariant'
        """
        settings = find_settings(settings, self.settings, **changes)
        name = self.name.removesuffix(f".{self.settings.describe()}")
        name += f".{settings.describe()}" if settings != DEFAULT else ""
        return replace(self, name=name, settings=settings)

    @property
    def families(self) -> frozenset[str]:
        """Names of the families of GPUs that the units belong to."""
        return frozenset(unit.split(".")[0] for _, _, unit in self.units)

    def resolve(self, call: GemmCall, *, strict: bool = False) -> GemmSpec:
        """Return the unit of a call, its plan, and the formats in which the unit takes the operands.

        ``find`` says what comes first. A guess warns once a process, then with counts.

        Args:
            call: The facts of the call (``GemmCall.facts``).
            strict: Raise where the plan is a guess.

        Raises:
            ArgumentError: The target has no unit for these operands, or the plan is a guess and ``strict`` is set.
        """
        spec = _resolution(self, call)
        if spec.basis == "guess":
            self.doubt(call, spec.plan, strict)
        return spec

    def takes(self, a: str, b: str, accumulate: str, scaling: ScaleKind) -> str:
        """Return the name of the unit for operands of two formats, sums in ``accumulate``, and a kind of scales.

        Raises:
            ArgumentError: There is none.
        """
        fitting = self._unit(a, b, accumulate, scaling)
        if fitting is not None:
            return fitting
        taken = "; ".join(f"{' '.join(inputs)} -> {sums} ({unit})" for inputs, sums, unit in self.units)
        names = [name for name in list_targets() if "." not in name]  # others have the units of these
        others = [name for name in names if get_target(name)._unit(a, b, accumulate, scaling) is not None]
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
            scales = {mode.scale for mode in get_unit(unit).modes}  # None: scales multiply the result
            if {a, b} <= set(inputs) and sums == accumulate and scale in scales:
                return unit
        return None

    def find(self, call: GemmCall) -> TargetPlan:
        """Return the plan of a call and the evidence for it.

        In order of precedence: (1) the first ``overrides`` rules; (2) tables of sizes and recorded calls; (3) the
        library's choice, from the books or asked on this machine; (4) other rules; (5) the decision trees; (6) rules
        that are guesses. A single row or column has both layouts, so a rule for either matches. A product of no
        elements has the plan of one chain. Rules from (2) on are about torch's own settings: where others change what
        torch asks, (3) and (5) alone count.
        """
        if 0 in (call.m, call.n, call.k, call.batch):
            return TargetPlan(sourced(CHAINS.get(call.scaling, ONE_CHAIN), "nothing is multiplied"), "rule")
        # 1. rules about other libraries than cuBLASLt
        override = self._ruled(call, list(range(self.overrides)))
        if override is not None:
            return override
        # 2. tables and recorded calls
        question = None if self.architecture is None else library_question(call, self.settings)
        usual = question is None or (not question.kind.room and question.kind.reductions == "any")
        recorded, others, tables = _rules_by_size(self) if usual else ([], [], {})
        first = sorted(recorded + tables.get((f"{call.m}x{call.n}", str(call.k)), []))
        resolved = self._ruled(call, first)
        if resolved is not None:
            return resolved
        # 3. the library's own choice
        chosen = None if question is None else self._chosen(call, question)
        if chosen is not None:
            return chosen
        # 4. other rules
        ruled = self._ruled(call, others)
        if ruled is not None and ruled.basis != "guess":
            return ruled
        # 5. its most likely choice, by the first decision trees that know the kind of calls; where those of small sizes
        # are not certain, by the next if both agree; 6. a rule's guess
        asked = None if question is None else book_question(question)
        guesses = (guess for tree in self.trees if asked is not None and (guess := tree.find(asked)) is not None)
        nearest = next(guesses, None)
        doubted = nearest is not None and nearest.group.most > 0 and not nearest.known
        likely = next(guesses, None) if doubted else nearest
        if question is None or likely is None:
            return ruled or TargetPlan(_UNCOVERED, "guess")
        answers = self._library_under(question, "answers")
        source = f"a tree learned from {likely.group.learned:,} of {answers}, {likely.describe()}"
        known = likely.known and answers_question(likely.choice, question)
        if doubted and known and nearest is not None and asked is not None and self.architecture is not None:
            # of 12,000 held-out calls of each kind 7 in batches in float32 were others before this rule, 3 by it
            known = same_order(nearest.choice, likely.choice, asked, self.architecture)
        return self._ordered(call, likely.choice, f"{source}: the order of", "rule" if known else "guess")

    def _ruled(self, call: GemmCall, numbers: list[int]) -> TargetPlan | None:
        if not numbers:
            return None
        # a single row or column has both layouts; of their rules one that is no guess counts first
        calls = call.same_calls() if 1 in (call.m, call.n, call.k) else [call]
        answers = [answer for answer in (self._by_rule(one, numbers) for one in calls) if answer is not None]
        return next((answer for answer in answers if answer.basis != "guess"), answers[0] if answers else None)

    def _by_rule(self, call: GemmCall, numbers: list[int]) -> TargetPlan | None:
        for number in numbers:
            rule = self.rules[number]
            if not matches(rule.when, call):
                continue
            kernel, basis = self.kernels[rule.kernel], rule.basis
            if isinstance(rule.split, dict):  # a table, which ``find`` asks only about sizes that it has
                split = rule.split[f"{call.m}x{call.n}"][str(call.k)]
            elif isinstance(rule.split, str):
                tile = {None: kernel.plan.k_tile, 66: nvjet_tile(call)}.get(kernel.algorithm)  # None: of one product
                split, certain = self.splits[rule.split].count(call, tile or 1)
                basis = basis if certain else "guess"
            else:
                split = rule.split
            order = kernel.split_order(call, split, self.architecture)
            if order is None:  # not known of its algorithm: another rule may
                continue
            plan = sourced(order.plan, rule.reason, verified=basis == "recorded")
            return TargetPlan(plan, basis, number, rule.unit or order.unit, rule.operands or order.operands)
        return None

    def _chosen(self, call: GemmCall, question: Question) -> TargetPlan | None:
        """Return the order of the library's own choice, from a book or asked on this machine; None without either."""
        library = self._library_under(question, "choice")
        recorded = None
        for book in self.books:
            run = book.run(book_question(question))
            if run is None:
                continue
            certain = run.certain(question) and answers_question(run.choice, question)
            source = f"{library} in the book {Path(book.name).stem}, {run.describe(question)}:"
            found = self._ordered(call, run.choice, source, "reported" if certain else "guess")
            if found.basis != "guess":
                return found
            recorded = recorded or found
        # the library, which says more of kernels that share tiles than a book has
        choice = ask.choice(question, self)
        if choice is None:
            return recorded
        return self._ordered(call, choice, f"{library}, asked on this machine:", "reported")

    def _library_under(self, question: Question, what: str) -> str:
        """Return "cuBLASLt 13.1.0's choices", with the settings that changed the question."""
        changes = question.kind.room or question.kind.reductions != "any"
        settings = f" with the settings {self.settings.describe()}" if changes else ""
        return f"{self.library.rpartition(', ')[2]}'s {what}{settings}"

    def _ordered(self, call: GemmCall, choice: Choice, source: str, basis: Basis) -> TargetPlan:
        """Return the order of a choice; a guess where no order is known for it."""
        assert self.architecture is not None
        source = f"{source} {choice.describe()}"
        order = choice_order(choice, call, self.architecture)
        if order is None:
            return TargetPlan(
                sourced(_UNCOVERED, f"one chain, k in order; {source}, whose order is not known"), "guess"
            )
        basis = basis if order.certain else "guess"
        return TargetPlan(sourced(order.plan, source), basis, None, order.unit, order.operands)

    def doubt(self, call: GemmCall, plan: GemmPlan, strict: bool) -> None:
        """Warn of a plan that is a guess, once a process, then with a count of calls; or refuse it."""
        text = (
            f"target {self.name} has no recorded accumulation order for {call.operation} "
            f"M={call.m} N={call.n} K={call.k} {call.a} x {call.b} -> {call.out}; "
        )
        step = "pass plan=GemmPlan(...), or record the call on the GPU and name the plan file as target="
        if strict:
            raise ArgumentError(f"{text}{step}")
        warn_once(PlanUnknownWarning, self.name, call, lambda: f"{text}guessing ({plan.source}); {step}")


@lru_cache(maxsize=64)
def _rules_by_size(target: Target) -> tuple[list[int], list[int], dict[tuple[str, str], list[int]]]:
    """Return the numbers of rules without a table, recorded ones and others, and of tables by "MxN" and K."""
    recorded: list[int] = []
    others: list[int] = []
    tables: dict[tuple[str, str], list[int]] = {}
    for number, rule in enumerate(target.rules):
        if not isinstance(rule.split, dict):
            (recorded if rule.basis == "recorded" else others).append(number)
            continue
        for size, row in rule.split.items():
            for k in row:
                tables.setdefault((size, k), []).append(number)
    return recorded, others, tables


def list_targets() -> list[str]:
    """Return the names of the targets that come with fmtsim.

    >>> list_targets()  # doctest: +NORMALIZE_WHITESPACE
    ['a100', 'a100.triton_persistent', 'b200', 'chain', 'gb200', 'gb300',
     'h100', 'h100.batch_invariant', 'h100.sglang', 'h100.triton_persistent',
     'h200', 'h200.batch_invariant', 'h200.sglang', 'h200.triton_persistent', 'l40s']
    """
    return sorted(path.stem for path in PLANS.glob("*.json"))


def get_target(name: str | Path | Target | Any) -> Target:
    """Return a target by name, or read it from a plan file.

    Args:
        name: A name from ``list_targets()``, the path of a JSON plan file, or a Target, which is returned as it is.

    Raises:
        ArgumentError: The name is unknown (the message has names that are close), or the file is not a plan file.

    >>> get_target("H200").name
    'h200'
    """
    target = name if isinstance(name, Target) else find_target(name)
    if not isinstance(target, Target):
        raise ArgumentError(
            f"target={shown(name)} is a {type(target).__name__} alone, which has no library; choose one of "
            f"{', '.join(list_targets())}, or a plan file, *.json"
        )
    return target


def find_target(target: Any) -> Target | Unit | Arithmetic:
    """Return the record behind ``target=``: a GPU with its library, a matrix unit alone, or a datapath.

    Args:
        target: A name, the path of a plan file or of a datapath's JSON, that JSON itself, a datapath's fields
            (``"block=32,fraction_bits=10"``, ``"integers,accumulator_bits=24"``), or a record.

    Raises:
        ArgumentError: It is none of them; the message lists names of targets and units that are close.
    """
    # 1. a record, or a name as most callers write it
    if isinstance(target, Target | Unit | Arithmetic):
        return target
    if isinstance(target, str) and target.lower() in _shipped():
        return _load(str(PLANS / f"{target.lower()}.json"), 0)
    if is_unit(target):
        return get_unit(target)
    if not isinstance(target, str | os.PathLike):
        raise ArgumentError(f"target={shown(target)} is neither a name, nor a path, nor a record; {_kinds()}")
    # 2. a file, or the JSON or fields of a datapath
    text = os.fspath(target)
    if text.lower() in list_targets():  # a name that came as a Path
        return _load(str(PLANS / f"{text.lower()}.json"), 0)
    if text.endswith(".json"):
        changed = 0  # of a file that cannot be read, which ``_load`` then reports
        with suppress(OSError, ValueError):
            changed = os.stat(text).st_mtime_ns
        return _load(text, changed)
    if text.lstrip().startswith("{"):
        try:
            return datapath_from_dict(parse_json(text), "target")
        except ValueError as error:
            raise error if isinstance(error, FmtsimError) else ArgumentError(f"target={shown(text)}: {error}") from None
    if (path := datapath_from_text(text)) is not None:
        return path
    # 3. none of them
    hint = did_you_mean(text, (*list_targets(), *list_units(), *DATAPATHS))
    raise ArgumentError(sibling_hint(text) or f"unknown target {shown(text)}{hint} ({_kinds()})")


def _kinds() -> str:
    """Return the kinds of targets, as error messages list them."""
    return (
        f"choose a GPU with its library ({', '.join(list_targets())}, a plan file or a Target), a matrix unit alone "
        f"({', '.join(list_units())}, or a Unit) or a datapath (a record, its JSON, or 'block=32,fraction_bits=10')"
    )


@lru_cache(maxsize=4096)
def _resolution(target: Target, call: GemmCall) -> GemmSpec:
    """Resolve a call, cached: training asks for the same products in every step."""
    # 1. the unit for the operands, and the accumulation order
    unit = target.takes(call.a, call.b, call.accumulate, call.scaling)
    order = target.find(call)
    # 2. a rule or a choice may run another unit, which has no scales inside, on operands of another format
    a, b, scale = call.a, call.b, _unit_scale(call.scaling)
    if order.unit is not None:
        unit, scale = order.unit, None
        a, b = order.operands or a, order.operands or b
    mode = get_unit(unit).find(a, b, call.accumulate, scale)
    formats: Any = {"a": get_format(a), "b": get_format(b)}
    return GemmSpec(
        datapath=mode.datapath, plan=order.plan, unit=unit, accumulate=mode.accumulate, basis=order.basis, **formats
    )  # fmt: skip


def _unit_scale(kind: ScaleKind) -> str | None:
    extent = SCALE_KINDS.get(kind)
    return None if extent is None else extent.unit_scale


@cache
def _shipped() -> tuple[str, ...]:
    """Return ``list_targets()``, cached: every product with a target asks, and reading a folder is slow."""
    return tuple(list_targets())


@lru_cache(maxsize=16)
def _load(path: str, changed: int) -> Target | Arithmetic:
    """Read a plan file or a datapath, cached by path and time of change: an edited file is read again."""
    folder = Path(path).parent

    def read(record: Any, name: str) -> Target | Arithmetic:
        if isinstance(record, dict) and "kind" in record:
            return datapath_from_dict(record, name)
        if isinstance(record, dict) and "base" in record:
            with located(f"{name}: plan"):
                base = get_target(record["base"]).with_settings(record.get("settings"))
                return base.changed(Path(path).stem, {key: record[key] for key in record.keys() - {"base", "settings"}})
        return Target.from_dict(record, f"{name}: plan", folder)

    return load_record(path, "plan file", read)
