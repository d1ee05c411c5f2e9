# SPDX-License-Identifier: Apache-2.0
"""A kernel's instructions as the rows that a block runs: registers get places, opcodes their code.

Calls of device functions are written out where they stand. What no table knows is refused by name, with its line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.contract import Contraction, constant_divisors
from fmtsim.machine.ptx.parse import (
    Address,
    Function,
    Group,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Symbol,
    register_names,
    width,
)
from fmtsim.machine.ptx.values import Tracer, Vector, bits
from fmtsim.support.errors import ArgumentError

tracer = Tracer()

# Modifiers of memory operations that change no value: caches, scopes and order (threads of a block run in order here)
NO_VALUE = re.compile(
    r"L1::\w+|L2::\w+|\d+B|nc|relaxed|acquire|release|acq_rel|volatile|weak|cta|gpu|sys|cluster|ca|cg|cs|lu|cv|wb|wt|noftz"
)
SPACES = {
    "global": b.GLOBAL,
    "const": b.GLOBAL,
    "param": b.GLOBAL,
    "param::entry": b.GLOBAL,
    "shared": b.SHARED,
    "shared::cta": b.SHARED,
    "shared::cluster": b.SHARED,
    "local": b.LOCAL,
    "param::func": b.LOCAL,
}
FENCES = ("membar", "fence.acq_rel", "fence.sc", "fence.acquire", "fence.release", "barrier.cluster")
NOTHING = [
    "fence",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "prefetch",
    "prefetchu",
    "setmaxnreg",
    "griddepcontrol",
    "nanosleep",
    "pmevent",
    "applypriority",
    "discard",
    "bar.warp",
    "mbarrier.inval",
]


@dataclass(slots=True, kw_only=True)
class Program:
    """A kernel as rows, and where its registers and variables are."""

    name: str
    rows: np.ndarray  # int64 [rows, COLUMNS]
    instructions: list[Instruction]  # of the rows
    contraction: Contraction
    register_bytes: int
    offsets: dict[str, tuple[int, int]]  # of a register: where its array begins, bytes a thread
    constants: list[tuple[int, int, int]]  # offset, bytes, value: the same in all threads and blocks
    special: list[tuple[str, int, int]]  # name, offset, bytes: registers that the launch fills
    addresses: list[tuple[str, int, int]]  # name of a parameter or a module's variable, offset, bytes: its address
    host: dict[int, Callable[[Any, np.ndarray], None]] = field(default_factory=dict)  # what Python does for a row
    shared_bytes: int = 0  # of static ones
    local_bytes: int = 0
    has_atomics: bool = False
    piece_shift: int = -1  # log2 of the smallest access to shared memory; -1: none
    reasons: tuple[str, ...] = ()  # why results may not be a GPU's


def storage(kind: str) -> str:
    """Return how a register is kept: ``b16``, ``b32``, ``b64`` or ``pred``."""
    return "pred" if kind == "pred" else f"b{max(width(kind), 16)}"


def inlined(module: Module, function: Function) -> Function:
    """Return a function whose calls of functions with a body are written out."""
    result = replace(
        function, body=[], labels={}, registers=dict(function.registers), variables=list(function.variables)
    )
    targets, count = dict(function.branch_targets), 0

    def write(source: Function, suffix: str, names: Mapping[str, str], depth: int) -> None:
        nonlocal count
        if depth > 20:
            raise ArgumentError(f"{source.name} calls itself; a GPU's stack is not simulated")
        ends = f"$end{suffix}"
        places = {
            number: [label for label, at in source.labels.items() if at == number] for number in source.labels.values()
        }
        for i, instruction in enumerate(source.body):
            for label in places.get(i, ()):
                result.labels[label + suffix] = len(result.body)
            name = instruction.opcode[0]
            callee = module.functions.get(callee_name(instruction)) if name == "call" else None
            if callee is not None and not callee.is_declared:
                count += 1
                inner = f"${count}"
                given = [group for group in instruction.operands if isinstance(group, Group)]
                returned, passed = (
                    (given[0].items, given[-1].items)
                    if len(given) == 2
                    else ((given[0].items, ()) if callee.results and given else ((), given[0].items if given else ()))
                )
                bound = {
                    v.name: operand_name(renamed_operand(o, suffix, names))
                    for v, o in zip(callee.results, returned, strict=True)
                }
                bound |= {
                    v.name: operand_name(renamed_operand(o, suffix, names))
                    for v, o in zip(callee.parameters, passed, strict=True)
                }
                result.registers.update({f"{r}{inner}": kind for r, kind in callee.registers.items()})
                bound |= {v.name: f"{v.name}{inner}" for v in callee.variables}
                result.variables += [replace(v, name=f"{v.name}{inner}") for v in callee.variables]
                targets.update({f"{k}{inner}": tuple(t + inner for t in v) for k, v in callee.branch_targets.items()})
                write(callee, inner, bound, depth + 1)
            elif name == "ret" and suffix:
                result.body.append(replace(instruction, opcode=("bra",), operands=(Symbol(ends),),
                                           predicate=_renamed_predicate(instruction, suffix)))  # fmt: skip
            else:
                operands = tuple(renamed_operand(o, suffix, names) for o in instruction.operands)
                result.body.append(
                    replace(instruction, operands=operands, predicate=_renamed_predicate(instruction, suffix))
                )
        for label in places.get(len(source.body), ()):
            result.labels[label + suffix] = len(result.body)
        if suffix:
            result.labels[ends] = len(result.body)

    def renamed_operand(operand: Operand, suffix: str, names: Mapping[str, str]) -> Operand:
        if isinstance(operand, Register):
            special = operand.name.startswith("%") and operand.name not in function.registers and not suffix
            known = operand.name == "_" or special or _is_special(operand.name)
            return operand if known or not suffix else replace(operand, name=operand.name + suffix)
        if isinstance(operand, Symbol):
            if operand.name in names:
                return Symbol(names[operand.name])
            return Symbol(operand.name + suffix) if suffix and operand.name.startswith("$") else operand
        if isinstance(operand, Group):
            return Group(tuple(renamed_operand(item, suffix, names) for item in operand.items))
        if isinstance(operand, Address):
            base = renamed_operand(operand.base, suffix, names)
            coordinates = tuple(renamed_operand(item, suffix, names) for item in operand.coordinates)
            return Address(base, operand.offset, coordinates)  # type: ignore[arg-type]
        return operand

    def _renamed_predicate(instruction: Instruction, suffix: str) -> Register | None:
        p = instruction.predicate
        return p if p is None or not suffix else replace(p, name=p.name + suffix)

    write(function, "", {}, 0)
    result.branch_targets = targets
    return result


def callee_name(instruction: Instruction) -> str:
    """Return the function that a call names, empty where it calls through a pointer."""
    return next((o.name for o in instruction.operands if isinstance(o, Symbol)), "")


def operand_name(operand: Operand) -> str:
    """Return the name of a register or symbol."""
    assert isinstance(operand, Symbol | Register)
    return operand.name


_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyzw]|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|"
    r"clock64|globaltimer|globaltimer_lo|globaltimer_hi|lanemask_(eq|lt|le|gt|ge)|dynamic_smem_size|total_smem_size|"
    r"cluster_ctarank|cluster_nctarank|is_explicit_cluster)"
)


def _is_special(name: str) -> bool:
    return _SPECIAL.fullmatch(name) is not None


_UNREPEATABLE = ("%smid", "%gridid")  # and clocks
_ONE = {"f32": 0x3F800000, "f16": 0x3C00, "f64": 0x3FF0 << 48}


class Builder:
    """Rows while they are written."""

    def __init__(self, module: Module, function: Function, threads: int, contraction: Contraction) -> None:
        self.module, self.function, self.threads, self.fusions = module, function, threads, contraction.fusions
        self.scaled = contraction.scaled
        # products whose factors are kept
        self.used = {fusion.product for fusion in self.fusions.values()} | {
            product for product, _ in self.scaled.values()
        }
        self.divisors = constant_divisors(function)
        self.readers: dict[str, list[Instruction]] = {}  # instructions that name a register behind their first operand
        self.writers: dict[str, list[int]] = {}
        for number, instruction in enumerate(function.body):
            for name in register_names(instruction.operands[1:]):
                self.readers.setdefault(name, []).append(instruction)
            for name in register_names(instruction.operands[:1]):
                self.writers.setdefault(name, []).append(number)
        self.clamps = self._clamps()
        self.rows: list[list[int]] = []
        self.owners: list[Instruction] = []
        self.keys: list[tuple[int, Any]] = []  # rows whose code is not compiled yet
        self.program = Program(
            name=function.name,
            rows=np.zeros((0, b.COLUMNS), np.int64),
            instructions=self.owners,
            register_bytes=0,
            offsets={},
            constants=[],
            special=[],
            addresses=[],
            contraction=contraction,
        )
        self._constants: dict[tuple[int, int], str] = {}
        self.symbols: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self._lay_out_variables()

    def _clamps(self) -> dict[int, int]:
        """Return the maxima with 0 of minima with 1 that ptxas makes .sat, of NaN 0, by their numbers: the minimum's.

        The minimum has no other reader.
        """
        found = {}
        for number, x in enumerate(self.function.body):
            if x.opcode[0] != "max" or x.opcode[-1] not in _ONE or "NaN" in x.opcode or len(x.operands) != 3:  # noqa: PLR2004
                continue
            first, zero = x.operands[1:]
            writers = self.writers.get(first.name, []) if isinstance(first, Register) else []
            if (
                not isinstance(zero, Immediate)
                or zero.value
                or len(writers) != 1
                or len(self.readers[operand_name(first)]) != 1
            ):
                continue
            inner = self.function.body[writers[0]]
            last = inner.operands[-1]
            same = inner.opcode == ("min", *x.opcode[1:]) and inner.predicate is None and x.predicate is None
            if same and isinstance(last, Immediate) and last.value == _ONE[x.opcode[-1]]:
                found[number] = writers[0]
        return found

    def is_negated_in_place(self, instruction: Instruction) -> bool:
        """Return True for a neg or abs that only selp reads: ptxas makes it part of that, which keeps NaN's bits."""
        if instruction.opcode not in (("neg", "f32"), ("abs", "f32")):
            return False
        readers = self.readers.get(operand_name(instruction.operands[0]), [])
        return bool(readers) and all(reader.opcode[0] == "selp" for reader in readers)

    def _lay_out_variables(self) -> None:
        """Give shared and local variables their addresses: aligned, in order; arrays of the launch's size come last."""
        shared, local = b.SHARED_START, 0
        own = [*self.module.variables.values(), *self.function.variables]
        for variable in sorted((v for v in own if v.space == "shared"), key=lambda v: v.count is None):
            shared += -shared % max(variable.align, 16 if variable.count is None else 1)
            self.symbols[variable.name] = shared
            shared += variable.nbytes
        for variable in self.function.variables:
            if variable.space in ("local", "param"):
                local += -local % max(variable.align, 8)
                self.symbols[variable.name] = local
                local += variable.nbytes
        self.program.shared_bytes, self.program.local_bytes = shared, local + -local % 8
        self.local_parameters = {v.name for v in self.function.variables if v.space == "param"}

    # Registers

    def _allocate(self, name: str, size: int) -> int:
        offset = self.program.register_bytes
        self.program.offsets[name] = offset, size
        self.program.register_bytes += size * self.threads + (-size * self.threads) % 64
        return offset

    def place(self, name: str, kind: str | None = None) -> int:
        """Return where the array of a register begins."""
        if name in self.program.offsets:
            return self.program.offsets[name][0]
        size = max(bits(storage(kind or self.kind(name))) // 8, 1)
        offset = self._allocate(name, size)
        if _is_special(name):
            self.program.special.append((name, offset, size))
            if name in _UNREPEATABLE or name.startswith(("%clock", "%globaltimer")):
                self.program.reasons += (f"{name} differs from run to run on a GPU and is 0 here",)
        return offset

    def kind(self, name: str) -> str:
        """Return the declared type of a register."""
        if _is_special(name):
            return "b64" if name in ("%clock64", "%globaltimer", "%gridid") else "b32"
        if name not in self.function.registers:
            raise ArgumentError(f"register {name} is not declared")
        return self.function.registers[name]

    def constant(self, value: int, size: int) -> int:
        """Return where a constant is kept, of ``size`` bytes a thread."""
        value &= (1 << (8 * size)) - 1
        name = self._constants.get((value, size))
        if name is None:
            name = self._constants[value, size] = f"#{value:x}/{size}"
            self.program.constants.append((self._allocate(name, size), size, value))
        return self.program.offsets[name][0]

    def symbol(self, name: str, size: int) -> int:
        """Return where the address of a variable is kept."""
        if name in self.symbols:
            return self.constant(self.symbols[name], size)
        known = name in self.module.variables or any(v.name == name for v in self.function.parameters)
        if not known:
            raise ArgumentError(f"{name} is not declared")
        key = f"&{name}/{size}"
        if key not in self.program.offsets:
            self.program.addresses.append((name, self._allocate(key, size), size))
        return self.program.offsets[key][0]

    def operand(self, operand: Operand, kind: str) -> tuple[int, str]:
        """Return where an operand of a kind is kept, and as what."""
        if isinstance(operand, Register):
            declared = storage(self.kind(operand.name))
            return self.place(operand.name), declared
        size = max(bits(kind) // 8, 1)
        if isinstance(operand, Immediate):
            return self.constant(_immediate(operand, kind), size), storage(kind) if size > 1 else kind
        if isinstance(operand, Symbol):
            return self.symbol(operand.name, size), storage(kind)
        if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.name in self.symbols:
            return self.constant(self.symbols[operand.base.name] + operand.offset, size), storage(kind)
        raise ArgumentError(f"operand {operand} cannot be read")

    # Rows

    def add(self, instruction: Instruction, kind: int) -> list[int]:
        """Append a row of an instruction, and return it."""
        row = [0] * b.COLUMNS
        row[b.KIND], row[b.PREDICATE] = kind, -1
        row[b.DATA : b.ADDRESS] = [-1] * (b.ADDRESS - b.DATA)
        if instruction.predicate is not None:
            row[b.PREDICATE] = self.place(instruction.predicate.name)
            row[b.NEGATED] = int(instruction.predicate.negated)
        self.rows.append(row)
        self.owners.append(instruction)
        return row

    def host(self, instruction: Instruction, handler: Callable[[Any, np.ndarray], None]) -> list[int]:
        """Append a row that Python runs: ``handler(block, threads that run)``."""
        row = self.add(instruction, b.HOST)
        row[b.COUNT] = 1
        self.program.host[len(self.rows) - 1] = handler
        return row

    def memory(self, row: list[int], operand: Operand) -> None:
        """Write a memory operand into a row."""
        if not isinstance(operand, Address):
            operand = Address(operand)  # type: ignore[arg-type]
        row[b.OFFSET] = operand.offset
        if isinstance(operand.base, Immediate):
            row[b.OFFSET] += operand.base.value
        elif isinstance(operand.base, Symbol) and operand.base.name in self.symbols:
            row[b.OFFSET] += self.symbols[operand.base.name]
        elif isinstance(operand.base, Symbol):
            row[b.ADDRESS], row[b.ADDRESS_BITS] = self.symbol(operand.base.name, 8), 8
        else:
            row[b.ADDRESS] = self.place(operand.base.name)
            row[b.ADDRESS_BITS] = bits(storage(self.kind(operand.base.name))) // 8

    def compute(
        self, instruction: Instruction, key: str, semantics: Callable, results: tuple, operands: tuple
    ) -> list[int]:
        """Append a row of compiled code; results and operands are pairs of an operand and its kind."""
        row = self.add(instruction, b.COMPUTE)
        places, kinds = [], []
        for operand, kind in results:
            register = operand if isinstance(operand, str) else operand.name
            own = kind if register.startswith("#") else self.kind(register)  # the register's, which may be wider
            places.append(self.place(register, own))
            kinds.append(storage(own))
        for operand, kind in operands:
            at, kept = (
                (self.place(operand, kind), storage(kind)) if isinstance(operand, str) else self.operand(operand, kind)
            )
            places.append(at)
            kinds.append(kept)
        if len(places) > b.COLUMNS - b.DATA:
            raise ArgumentError(f"{len(places)} operands are too many")
        row[b.DATA : b.DATA + len(places)] = places
        wanted = tuple(kind for _, kind in (*results, *operands))
        negated = tuple(isinstance(o, Register) and o.negated for o, _ in operands)
        whole = (key, tuple(kinds), wanted, negated)
        count = len(results)
        tracer.request(whole, _adapted(semantics, kinds, wanted, negated, count), kinds[:count], kinds[count:])
        self.keys.append((len(self.rows) - 1, whole))
        return row


def _adapted(
    semantics: Callable, kept: list[str], wanted: tuple[str, ...], negated: tuple[bool, ...], count: int
) -> Callable:
    """Return semantics on registers as they are kept: operands are cut to their kinds, results extended."""

    def traced(*values: Vector) -> tuple[Vector, ...]:
        operands = []
        for value, kind, negate in zip(values, wanted[count:], negated, strict=True):
            operand = value
            if kind != "pred":
                if bits(value.kind) > bits(kind):
                    operand = value.view(f"u{bits(value.kind)}").to(f"u{bits(kind)}")
                operand = operand.view(kind)
            operands.append(~operand if negate else operand)
        outcome = semantics(*operands)
        outcomes = outcome if isinstance(outcome, tuple) else (outcome,)
        results = []
        for value, kind, keep in zip(outcomes[:count], wanted[:count], kept[:count], strict=True):
            if keep != "pred":
                whole = value if bits(value.kind) == bits(kind) else value.to(f"{value.kind[0]}{bits(kind)}")
                signed = kind[0] == "s"
                word = whole.view(f"{'s' if signed else 'u'}{bits(kind)}")
                value = word.to(f"{'s' if signed else 'u'}{bits(keep)}") if bits(keep) > bits(kind) else word
                value = value.view(keep)
            results.append(value)
        return tuple(results)

    return traced


def _immediate(operand: Immediate, kind: str) -> int:
    """Return the code of a constant as an operand of a kind."""
    if operand.kind == "f64" and kind in ("f32", "b32"):
        return int(np.float32(np.uint64(operand.value).view(np.float64)).view(np.uint32))
    if operand.kind == "int" and kind in ("f32", "f64") and operand.value != 0:
        number = (
            np.float32(operand.value).view(np.uint32) if kind == "f32" else np.float64(operand.value).view(np.uint64)
        )
        return int(number)
    return operand.value


def unknown(instruction: Instruction) -> ArgumentError:
    """Return the refusal of an instruction that no table knows."""
    return ArgumentError(f"{'.'.join(instruction.opcode)} is not an instruction that fmtsim runs")


def without_caches(instruction: Instruction) -> list[str]:
    """Return the opcode without what changes no value."""
    return [part for part in instruction.opcode if not NO_VALUE.fullmatch(part)]


def space_number(parts: list[str]) -> int:
    """Return the number of the state space among an opcode's parts, generic where there is none."""
    return next((SPACES[part] for part in parts if part in SPACES), b.GENERIC)


def vector_length(parts: list[str]) -> int:
    """Return the numbers of a vector access: 4 of .v4."""
    return next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
