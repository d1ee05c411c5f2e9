# SPDX-License-Identifier: Apache-2.0
"""bisect of two launches of one kernel: find the first source line that hands on values of other bits."""

import inspect
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.lab.analysis.compare import Comparison, Difference, compare
from fmtsim.machine.ptx.launching import Launch, copied, launch, prepared, run
from fmtsim.machine.ptx.parse import Group, Instruction, parse, register_names
from fmtsim.machine.ptx.triton import Program
from fmtsim.machine.ptx.watched_lines import Note, Watch, all_places, source_function
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, shown

_MOST_BYTES = 1 << 31  # of values that are noted
_FLOAT = re.compile(r"(b?f16|t?f32|f64|e4m3|e5m2)(x[24])?")
_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_WAY = "pass functools.partial(fmtsim.launch, kernel, grid, ...) for both, which bisect runs on copies"
Values = dict[tuple[str, int, int], tuple[np.ndarray, str]]  # of a line, a round and a width: codes and their type


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LaunchBisection(table.Result):
    """Say where two launches of a kernel part; ``print`` shows it, notebooks a table.

    Args:
        tensor, comparison: The first argument whose bits differ after the launches (actual is launch a's), or before
            them where no launch wrote it; empty and None where no bit differs.
        line, source: The first line that hands on values of other bits, as ``kernels.py:7``, and its text; empty where
            none shows it.
        block: The block that was compared, of the first element that differs; None: all blocks together.
        round: How often the line had run before, None where its rounds were compared together.
        first: A value that launch a alone has, and the nearest one that launch b alone has.
        distinct: For each launch how many different values it alone has, and of how many.
        compared, different: Lines that both launches have, and how many of them have other values.
        note: What else has to be known.
    """

    tensor: str = ""
    comparison: Comparison | None = None
    line: str = ""
    source: str = ""
    block: tuple[int, ...] | None = None
    round: int | None = None
    first: Difference | None = None
    distinct: tuple[tuple[int, int], ...] = ()
    compared: int = 0
    different: int = 0
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether no bit of the arguments differs after the launches."""
        return self.comparison is None

    def _content(self) -> tuple[table.Facts]:
        facts = [("result", "no bit differs")] if self.comparison is None else []
        if self.first is not None:
            where = f"block {self.block}" if self.block is not None else "all blocks together"
            where += f", round {self.round}" if self.round else ""
            facts.append(("first difference", f"{self.line}  {self.source}  ({where})"))
            pairs = zip("ab", self.first.hex, self.first.values, strict=True)
            facts.append(("values", ", ".join(f"{run} {code} = {value!r}" for run, code, value in pairs)))
            counts = zip("ab", self.distinct, strict=True)
            alone = (f"{other:,} of {of:,} values in {run} alone" for run, (other, of) in counts)
            facts += [("how many", ", ".join(alone)), ("lines", f"{self.different:,} of {self.compared:,} differ")]
        if self.comparison is not None:
            text = f"{self.tensor}: {self.comparison.mismatches:,} of {self.comparison.count:,} elements differ"
            facts.append(("grows to" if self.line else "result", text))
        return (table.Facts([*facts, *[("note", self.note)] * bool(self.note)]),)


class _Launch:
    """A launch that has not run: ``functools.partial`` of it."""

    def __init__(self, name: str, given: Any) -> None:
        if isinstance(given, Launch):
            raise ArgumentError(f"{name} is a launch that has run, and has written its tensors; {_WAY}")
        if not isinstance(given, partial) or given.func is not launch:
            raise ArgumentError(f"{name}={shown(given)} is not a launch; {_WAY} (tensors compare with fmtsim.compare)")
        try:
            found = inspect.signature(launch).bind(*given.args, **given.keywords).arguments
        except TypeError as error:
            raise ArgumentError(f"{name}: {error}; {_WAY}") from None
        self.kernel, self.grid = found["kernel"], found["grid"]
        self.args, self.named = found.get("args", ()), found.get("named", {})
        self.options = {key: found[key] for key in ("target", "config", "entry", "block") if key in found}

    def prepared(self) -> Program:
        """Return the program on copies of its arguments."""
        return prepared(self.kernel, self.grid, *copied(self.args, self.named), **self.options)

    def run(self, watch: Watch, before: Sequence[Tensor]) -> tuple[Launch, list[tuple[str, Tensor]]]:
        """Run on tensors that begin as ``before``; return the record and the tensors by name."""
        program = self.prepared()
        for (_, x), y in zip(program.tensors, before, strict=True):
            x.copy_(y)
        return run(program, self.options.get("target", "h100"), watch), program.tensors


def bisect_launches(first: Any, second: Any) -> LaunchBisection:
    """Find the first source line whose values differ between two launches of one kernel; as ``fmtsim.bisect``.

    Raises:
        ArgumentError: No launches, or of different kernels or arguments; a block that needs others; no line numbers.
    """
    a, b = launches = _Launch("run_a", first), _Launch("run_b", second)
    if a.kernel is not b.kernel and a.kernel != b.kernel:
        raise ArgumentError("the launches are of different kernels, whose lines do not pair; pass launches of one")
    # 1. Both in full, from the same memory: which argument differs, and which block wrote the difference?
    before, others = (one.prepared().tensors for one in launches)
    if (facts := [(name, x.shape, x.dtype) for name, x in before]) != [(name, x.shape, x.dtype) for name, x in others]:
        raise ArgumentError(f"the launches' tensors differ in number, shape or dtype: a has {facts}; pass the same")
    start, watches, notes = [x for _, x in before], (Watch(), Watch()), dict[str, None]()
    record_a, out_a = a.run(watches[0], start)
    for (name, x), (_, y), (_, after) in zip(before, others, out_a, strict=True):
        if not (comparison := compare(x, y)).equal:
            if compare(x, after).equal:  # read, not written
                return LaunchBisection(tensor=name, comparison=comparison, note=f"{name} differed before the launches")
            notes[f"{name} differed before the launches: both began with a's"] = None
    record_b, out_b = b.run(watches[1], start)
    records = record_a, record_b
    notes |= {f"{run} is not certain: {x}": None for run, one in zip("ab", records, strict=True) for x in one.reasons}
    pairs = ((name, x, y, compare(x, y)) for (name, x), (_, y) in zip(out_a, out_b, strict=True))
    pair = next((pair for pair in pairs if not pair[3].equal), None)
    if pair is None or pair[3].first is None:
        return LaunchBisection(note="; ".join(notes))
    name, x, y, comparison = pair
    index = pair[3].first.index
    together = record_a.grid != record_b.grid  # a block of one has other elements
    if together:
        notes["the grids differ: values of all blocks, and of all rounds of a loop, are compared together"] = None
    # 2. What the lines write there
    values, block = [], None
    for one, record, watch, out in zip(launches, records, watches, (x, y), strict=True):
        block = None if together else watch.writer(out, index, record.grid)
        count = 1 if together else int(np.prod(record.grid))
        if record.instructions // count * int(np.prod(record.block)) * 8 > _MOST_BYTES:
            raise ArgumentError(f"{record.kernel} writes too many values to note them; pass fewer elements or blocks")
        body = parse(record.ptx).functions[record.entry].body
        if not (places := all_places(body)):
            raise ArgumentError(f"{record.kernel} is PTX without line numbers (.loc); pass Triton or CUDA C++")
        seen = Watch(places=places, block=block, alone=not together)
        if not compare(dict(one.run(seen, start)[1])[name][index], out[index]).equal:
            raise ArgumentError(f"block {block} reads what others write, and does not run alone; look with watch=")
        values.append(_by_line(body, seen.notes, together))
    # 3. The first line, in launch a's order, of which both have values that the other has not.
    lines = {line for line, *_ in values[0]} & {line for line, *_ in values[1]}
    merged = {line for line in lines if len({max(key[1] for key in v if key[0] == line) for v in values}) > 1}
    values = [_merged(v, merged) for v in values]
    different: dict[str, LaunchBisection] = {}
    for (line, number, size), (codes_a, kind) in values[0].items():
        codes_b, _ = values[1].get((line, number, size), (codes_a, kind))
        alone = codes_a[~np.isin(codes_a, codes_b)], codes_b[~np.isin(codes_b, codes_a)]
        if not all(map(len, alone)):
            if any(map(len, alone)) and not different:
                notes[f"{line} has more values in one of the launches, which tells nothing"] = None
        elif line not in different:
            nearest = np.argmin(np.abs(alone[1].astype(object) - int(alone[0][0])))
            counts = zip(alone, (codes_a, codes_b), strict=True)
            codes = [one[None].view(f"i{size}") for one in (alone[0][0], alone[1][nearest])]
            numbers = [torch.from_numpy(c).view(_DTYPES[kind]).item() if kind in _DTYPES else int(c[0]) for c in codes]
            difference = Difference(
                index=(), actual_code=int(alone[0][0]), expected_code=int(alone[1][nearest]), actual=numbers[0],
                expected=numbers[1], bits=8 * size,
            )  # fmt: skip
            if line in merged and not different:
                notes[f"{line} runs another number of rounds in a and b, which are compared together"] = None
            different[line] = LaunchBisection(
                line=line, source=_text(a.kernel, line), block=block, first=difference,
                round=None if together or line in merged else number,
                distinct=tuple((len(np.unique(own)), len(np.unique(every))) for own, every in counts),
            )  # fmt: skip
    if not different:
        notes["no line shows it: each writes the same set of values, perhaps at other places"] = None
    return replace(
        next(iter(different.values()), LaunchBisection()), tensor=name, comparison=comparison, compared=len(lines),
        different=len(different), note="; ".join(notes),
    )  # fmt: skip


def _by_line(body: Sequence[Instruction], notes: Sequence[Note], together: bool) -> Values:
    """Return what each line hands on to others, in order."""
    readers: dict[str, list[Instruction]] = {}
    for x in body:
        predicate = (x.predicate.name,) if x.predicate else ()
        for register in (*register_names(x.operands[x.opcode[0] not in ("st", "red") :]), *predicate):
            readers.setdefault(register, []).append(x)

    def leaves(register: str, line: str, seen: frozenset[str] = frozenset()) -> bool:
        """Return True if another line reads a register, or a copy of it."""
        for x in readers.get(register, ()) if register not in seen else ():
            copies = register_names(x.operands[:1]) if x.opcode[0] == "mov" else []
            if _line(x) != line or any(leaves(copy, line, seen | {register}) for copy in copies):
                return True
        return False

    counts: dict[tuple[int, str], int] = {}
    found: dict[tuple[str, int, int], tuple[list[np.ndarray], str]] = {}
    for x, register, words, running in notes:
        line, kind = _line(x), _kind(x, readers.get(register, []))
        if kind and leaves(register, line):
            counts[id(x), register] = number = counts.get((id(x), register), -1) + 1
            codes = words[running.view(bool)]
            size = 1 if kind[0] == "e" else int(re.sub(r"x[24]|\D", "", kind)) // 8
            codes = codes.view(f"u{size}") if "x" in kind else codes.astype(f"u{size}")
            key = line, 0 if together else number, size
            found.setdefault(key, ([], re.sub("x[24]", "", kind)))[0].append(codes)
    return {key: (np.concatenate(codes), kind) for key, (codes, kind) in found.items()}


def _line(x: Instruction) -> str:
    """Return the innermost line of the kernel's own file that an instruction is of."""
    places = x.source, *x.callers
    return next(place for place in places if place.rpartition(":")[0] == places[-1].rpartition(":")[0])


def _kind(x: Instruction, reads: list[Instruction]) -> str:
    """Return the type of the numbers that an instruction writes, empty for integers and addresses."""
    kinds = [part for part in x.opcode if _FLOAT.fullmatch(part)]
    if x.opcode[0] == "cvt":
        return x.opcode[-2] if kinds else ""
    if x.opcode[0] in ("ld", "shfl") and "param" not in x.opcode:  # bits: two halves where a reader takes them
        halves = any("x2" in part for read in reads for part in read.opcode)
        halves |= any(isinstance(read.operands[0], Group) for read in reads)
        return ("b16x2" if halves else "f32") if x.opcode[-1] == "b32" else x.opcode[-1]
    return "" if not kinds else kinds[0] if x.opcode[0] in ("mma", "wgmma") else kinds[-1]


def _merged(values: Values, lines: set[str]) -> Values:
    """Return values with the rounds of some lines as one."""
    result: Values = {}
    for (line, number, size), (codes, kind) in values.items():
        key = line, 0 if line in lines else number, size
        result[key] = np.concatenate([result[key][0], codes]) if key in result else codes, kind
    return result


def _text(kernel: Any, line: str) -> str:
    """Return a source line."""
    function, number = source_function(kernel), int(line.rpartition(":")[2])
    lines = linecache.getlines(function.__code__.co_filename) if function is not None else kernel.splitlines()
    return lines[number - 1].strip() if number <= len(lines) else ""
