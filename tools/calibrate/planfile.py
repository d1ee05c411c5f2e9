# SPDX-License-Identifier: Apache-2.0
"""Write what was found as a plan file, which ``target="my_plan.json"`` reads: kernels, rules, else tables."""

import dataclasses
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmtsim.formats.registry import get_format
from fmtsim.gemm.targets.kernel import Kernel
from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import write_file
from tools.calibrate.arithmetic import Measured, bench_call
from tools.calibrate.campaign import Finding, Units, scalar_unit

TILES = (64, 128, 32, 16, 256, 512, 8)
SLICES = ((8, 64), (4, 32), (8, 0), (4, 0))  # align and line of Kernel


class Entry(NamedTuple):
    """A verified call, every (kernel, parts) that gives its order, and its unit where that is not the usual one."""

    call: GemmCall
    choices: tuple[tuple[Kernel, int], ...]
    unit: str | None = None


def kernels_of(call: GemmCall, plan: GemmPlan, units: Units) -> Iterator[tuple[Kernel, int]]:
    """Yield kernels of a plan file that give a plan's order for a call, each with the number of parts."""
    common = _common(call, plan)
    if plan.k_tile is None:
        for tile in TILES:
            yield Kernel.from_dict({"k_tile": tile, **common}), 1
        return
    arithmetic = units(call)
    for kernel in _shapes(common, plan):
        kernel_plan = kernel.split_plan(call, plan.split)  # more parts are shorter ones
        agrees = (kernel_plan.partial, kernel_plan.bias_after_rounding) == (plan.partial, plan.bias_after_rounding)
        if agrees and same_order(call.k, arithmetic, kernel_plan, plan):
            yield kernel, plan.split


def _common(call: GemmCall, plan: GemmPlan) -> dict[str, Any]:
    """Return the fields of a kernel that do not depend on how it cuts K."""
    names = ("instruction_k", "promote_every", "scaled_promotion", "successive_scales", "round_trip", "epilogue",
             "owner", "reduce", "bias_after_rounding")  # fmt: skip
    fields = {name: getattr(plan, name) for name in names}
    if plan.partial is not None:
        fields["partial"] = "out" if plan.partial == get_format(call.out) else plan.partial.name
    return fields


def _shapes(fields: dict[str, Any], plan: GemmPlan) -> Iterator[Kernel]:
    for tile in dict.fromkeys((*TILES, plan.k_tile)):
        if not plan.residue_first or plan.part_k is not None:
            yield Kernel.from_dict({"k_tile": tile, **fields})
        if plan.owner == "contiguous":
            for align, line in SLICES:
                yield Kernel.from_dict({"k_tile": tile, "slices": True, "align": align, "line": line, **fields})


def entries_of(found: Iterable[Finding], units: Units) -> tuple[list[Entry], list[GemmCall]]:
    """Return the verified calls that a plan file can say, and those that it cannot."""
    entries, beyond = [], []
    for finding in found:
        if finding.status != "verified":
            continue
        units_here = units if finding.unit is None else scalar_unit
        choices = dict.fromkeys(
            choice for plan in finding.plans for choice in kernels_of(finding.call, plan, units_here)
        )
        if choices:
            entries.append(Entry(finding.call, tuple(choices), finding.unit))
        else:
            beyond.append(finding.call)
    return entries, beyond


def cover(
    entries: Sequence[Entry], preferred: Container[Kernel] = ()
) -> list[tuple[Kernel, list[tuple[GemmCall, int]]]]:
    """Return few kernels that together give all entries' orders, the one with most entries first.

    A sum of one part says little about its kernel's tile: among equals a preferred kernel is taken.
    """
    uncovered, chosen = list(entries), []
    while uncovered:
        votes: Counter[Kernel] = Counter()
        for entry in uncovered:
            votes.update(dict.fromkeys((kernel for kernel, _ in entry.choices), 1))
        best = max(votes, key=lambda kernel: (votes[kernel], kernel in preferred))
        mine = [(entry.call, dict(entry.choices)[best]) for entry in uncovered if best in dict(entry.choices)]
        chosen.append((best, mine))
        uncovered = [entry for entry in uncovered if best not in dict(entry.choices)]
    return chosen


TESTED = 50  # calls that a rule must have predicted
FACTS = ("operation", "a", "b", "out", "accumulate", "fast_accum", "scaling", "bias", "a_layout", "b_layout")
_ANSWERS = ("architecture", "book", "trees", "settings")  # what a target knows of the library's own choices
FLOAT_UNITS = ((("fp32",), "fp32", "fp32_fma"),)

Facts = tuple[tuple[str, Any], ...]


def facts_of(call: GemmCall) -> Facts:
    """Return what a rule says about a call besides its sizes; without a bias, mm and linear are the same call."""
    plain = call.operation in ("mm", "linear") and not call.bias
    values = {name: getattr(call, name) for name in FACTS}
    values["operation"] = ("mm", "linear") if plain else call.operation
    values["out"] = "int32" if call.out == torch.int32 else get_format(call.out).name
    scaled = call.operation == "scaled_mm"  # whose operands may differ in format, and not in layout
    surplus = ("a_layout", "b_layout") if scaled else ("b", "fast_accum", "scaling")
    return tuple((name, value) for name, value in values.items() if name not in surplus)


def plan_file(
    name: str, library: str, found: Sequence[Finding], units: Units, *, measured: Sequence[Measured] = (),
    base: str | Target | None = None, date: str = "",
) -> Target:  # fmt: skip
    """Build a target from findings.

    Args:
        name: Name of the target.
        library: GPU, library and versions.
        found: What was found.
        units: The arithmetic of a call's unit, as ``calibrate`` was given it.
        measured: Units that were measured; those with a name in the catalogue become the target's.
        base: A target whose rules are kept after the new ones; calls that it knows already are not listed again.
        date: When the GPU was asked.

    Raises:
        ArgumentError: Nothing was verified, or no unit has a name.
    """
    target = None if base is None else get_target(base)
    listed = [finding for finding in found if not _knows(target, finding)]
    entries, beyond = entries_of(listed, units)
    calls = sum(finding.status == "verified" for finding in found)
    if not calls:
        raise ArgumentError("no accumulation order was verified: there is nothing to write; see the notes of the calls")
    outputs = sum(finding.outputs for finding in found if finding.status == "verified")
    when = f" on {date}" if date else ""
    evidence = f"{calls:,} calls asked{when}, {outputs:,} results equal to their plans bit for bit"
    record: dict[str, Any] = {
        "name": name,
        "library": library,
        "source": f"{evidence}; python -m tools.calibrate" if target is None else f"{target.source} {evidence}.",
        **({} if target is None else {key: value for key, value in target.to_dict().items() if key in _ANSWERS}),
        "units": _units(measured) if target is None else target.to_dict()["units"],
        "kernels": {} if target is None else target.to_dict()["kernels"],
        "splits": {} if target is None else target.to_dict()["splits"],
    }
    unknown = [finding.call for finding in found if finding.status == "not found"] + beyond
    record["rules"] = [] if target is None else target.to_dict()["rules"]
    rules = [*_unknown_rules(unknown, record["kernels"]), *_tables(entries, record, learn=target is None)]
    record["rules"] = merged(rules) + record["rules"]
    if not any(rule["when"] == {"a": "int8"} for rule in record["rules"]):
        record["rules"].append(_rule({"a": "int8"}, _name(record["kernels"], Kernel()), 1, "rule",
                                     "Sums of integers modulo 2^32 are the same in every order."))  # fmt: skip
    return Target.from_dict(record)


def _knows(base: Target | None, finding: Finding) -> bool:
    """Return True if a target has a call's order already, and not as a guess."""
    if base is None or finding.status != "verified":
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolution = base.resolve(finding.call)
    plan = dataclasses.replace(resolution.plan, source="", verified=False)
    call = finding.call
    unit = finding.unit or base.takes(call.a, call.b, call.accumulate, call.scaling)
    return resolution.basis != "guess" and plan in finding.plans and resolution.unit == unit


def _units(measured: Sequence[Measured]) -> list[list[Any]]:
    """Return the units of a target; FP8 formats that share one may be multiplied with each other."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for finding in measured:
        if finding.unit is not None and finding.known:
            call = bench_call(finding.mode)
            groups["fp8" if call.a in ("e4m3", "e5m2") else call.a, call.accumulate, finding.unit].append(call.a)
    if not groups:
        raise ArgumentError("no measured unit has a name in the catalogue; register a Unit for it first")
    units = [[inputs, sums, unit] for (_, sums, unit), inputs in groups.items()]
    return [*units, *([list(inputs), sums, unit] for inputs, sums, unit in FLOAT_UNITS)]


def _unknown_rules(calls: Iterable[GemmCall], kernels: dict[str, Any]) -> Iterator[dict[str, Any]]:
    groups: dict[Facts, list[GemmCall]] = defaultdict(list)
    for call in calls:
        groups[facts_of(call)].append(call)
    for facts, group in groups.items():
        yield _rule(dict(facts), _name(kernels, Kernel()), _table((call, 1) for call in group), "guess",
                    "Asked, and no accumulation order was found that a plan can say.")  # fmt: skip


def _tables(entries: Sequence[Entry], record: dict[str, Any], *, learn: bool) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[Facts, str | None], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[facts_of(entry.call), entry.unit].append(entry)
    for (facts, unit), group in groups.items():
        chosen = cover(group, _used(record, dict(facts)))
        general = _general(dict(facts), chosen, record) if learn and unit is None else None
        for kernel, calls in chosen:
            rest = [(call, parts) for call, parts in calls if general is None or call.k > general["when"]["k"]["max"]]
            if rest:
                rule = _rule(dict(facts), _name(record["kernels"], kernel), _table(rest), "recorded",
                             "The bits of this call were recorded and equal to the plan.")  # fmt: skip
                if unit is not None:  # not the usual one, which takes float32 as it is
                    rule |= {"unit": unit, **({"operands": "fp32"} if rest[0][0].a == "tf32" else {})}
                yield rule
        if general is not None:
            yield general


def _used(record: dict[str, Any], facts: dict[str, Any]) -> list[Kernel]:
    """Return the kernels that rules of the base take for calls of this kind."""
    names = []
    for rule in record.get("rules", []):
        when = rule["when"]
        if facts["a"] in _members(when.get("a")) and when.get("scaling") == facts.get("scaling"):
            names.append(rule["kernel"])
    return [Kernel.from_dict(record["kernels"][name]) for name in dict.fromkeys(names)]


def _members(value: Any) -> Any:
    return value if isinstance(value, list) else (value,)


def _general(facts: dict[str, Any], chosen: list[tuple[Kernel, Any]], record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rule that calls up to some K are one chain, where one kernel explains all and enough were asked."""
    if len(chosen) != 1 or chosen[0][0].slices:
        return None
    kernel, calls = chosen[0]
    split = min((call.k for call, parts in calls if parts > 1), default=None)
    whole = [call for call, parts in calls if split is None or call.k < split]
    if len(whole) < TESTED:
        return None
    most = max(call.k for call in whole)
    reason = f"No call with K up to {most} is split: {len(whole)} calls of other sizes were recorded."
    return _rule(facts | {"k": {"max": most}}, _name(record["kernels"], kernel), 1, "rule", reason)


def _table(calls: Iterable[tuple[GemmCall, int]]) -> dict[str, dict[str, int]]:
    table: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for call, parts in calls:
        table[call.m, call.n][call.k] = parts
    return {f"{m}x{n}": {str(k): row[k] for k in sorted(row)} for (m, n), row in sorted(table.items())}


def _rule(when: dict[str, Any], kernel: str, split: Any, basis: str, reason: str) -> dict[str, Any]:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in when.items()}
    return {"when": plain, "kernel": kernel, "basis": basis, "reason": reason, "split": split}


def _name(kernels: dict[str, Any], kernel: Kernel) -> str:
    """Return the name of a kernel in a record, which gets it where it lacks it."""
    fields = kernel.to_dict()
    for name, kernel_fields in kernels.items():
        if kernel_fields == fields:
            return name
    tile = kernel.plan.k_tile
    parts = ["chain" if tile is None else f"{'slices' if kernel.slices else 'tiles'}{tile}"]
    parts += [
        f"{key}_{value}" for key, value in fields.items() if key not in ("k_tile", "slices") and value is not True
    ]
    parts += [key for key, value in fields.items() if value is True and key != "slices"]
    kernels[".".join(parts)] = fields
    return ".".join(parts)


def merged(rules: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rules with those joined that say the same for several values of one fact."""
    rules = list(rules)
    for key in ("out", "a_layout", "b_layout", "a"):
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for rule in rules:
            others = {name: value for name, value in rule["when"].items() if name != key}
            groups[json.dumps([others, {k: v for k, v in rule.items() if k != "when"}], sort_keys=True)].append(rule)
        rules = [_joined(key, group) for group in groups.values()]
    return rules


def _joined(key: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    if len(group) == 1:
        return group[0]
    when = dict(group[0]["when"])
    values = sorted({value for rule in group for value in _members(rule["when"].get(key)) if value is not None})
    if values:
        when[key] = values if len(values) > 1 else values[0]
    return group[0] | {"when": when}


def write_plan(target: Target, path: str | Path) -> None:
    """Write a target as JSON that people can read: a line for each rule and for each M and N."""
    write_file(path, plan_text(target))


def plan_text(target: Target) -> str:
    """Return a target as JSON, one line for each rule, kernel, and size of results."""
    record = target.to_dict()
    texts = ("name", "library", "source", *_ANSWERS, "overrides")
    lines = ["{", *(f" {json.dumps(key)}: {json.dumps(record[key])}," for key in texts if key in record)]
    lines += [' "units": [', ",\n".join(f"  {json.dumps(unit)}" for unit in record["units"]), " ],"]
    for key in ("kernels", "splits"):
        body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in record[key].items())
        lines += [f' "{key}": {{', *([body] if body else []), " },"]
    return "\n".join([*lines, ' "rules": [', ",\n".join(map(_rule_text, record["rules"])), " ]", "}", ""])


def _rule_text(rule: dict[str, Any]) -> str:
    keys = (key for key in ("when", "kernel", "unit", "operands", "basis", "reason") if key in rule)
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(rule[key])}" for key in keys)
    split = rule["split"]
    if not isinstance(split, dict):
        return f'  {{{head}, "split": {json.dumps(split)}}}'
    rows = ",\n".join(f"   {json.dumps(size)}: {json.dumps(row, separators=(',', ':'))}" for size, row in split.items())
    return f'  {{{head}, "split": {{\n{rows}\n  }}}}'
