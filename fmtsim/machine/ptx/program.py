# SPDX-License-Identifier: Apache-2.0
"""A kernel's instructions as the rows that a block runs: registers get places, opcodes their code.

Calls of device functions are written out where they stand. What no table knows is refused by name, with its line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from fmtsim.machine.ptx import block as b
from fmtsim.machine.ptx.contract import Contraction, constant_divisors, contracted
from fmtsim.machine.ptx.instructions import (
    SIGN_ONLY,
    TABLE,
    clamped,
    divided_by,
    fused_factors,
    fused_sum,
    logic_of_three,
    with_operand,
)
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
    width,
)
from fmtsim.machine.ptx.products import flush, prepare_product, registers_of
from fmtsim.machine.ptx.sass import Listing
from fmtsim.machine.ptx.values import Tracer, Vector, bits
from fmtsim.support.errors import ArgumentError

_tracer = Tracer()

# Modifiers of memory operations that change no value: caches, scopes and order (threads of a block run in order here)
_NO_VALUE = re.compile(
    r"L1::\w+|L2::\w+|\d+B|nc|relaxed|acquire|release|acq_rel|volatile|weak|cta|gpu|sys|cluster|ca|cg|cs|lu|cv|wb|wt|noftz"
)
_SPACES = {
    "global": b.GLOBAL, "const": b.GLOBAL, "param": b.GLOBAL, "param::entry": b.GLOBAL, "shared": b.SHARED, "shared::cta": b.SHARED,
    "shared::cluster": b.SHARED, "local": b.LOCAL, "param::func": b.LOCAL,
}  # fmt: skip
_NOTHING = ["fence", "membar", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "prefetch", "prefetchu", "setmaxnreg", "griddepcontrol", "nanosleep", "pmevent", "applypriority", "discard", "bar.warp", "barrier.cluster", "mbarrier.inval"]  # fmt: skip


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
    shared: dict[str, int] = field(default_factory=dict)  # addresses of shared variables
    shared_bytes: int = 0  # of static ones
    local_bytes: int = 0
    has_atomics: bool = False
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
            callee = module.functions.get(_called(instruction)) if name == "call" else None
            if callee is not None and not callee.is_declared:
                count += 1
                inner = f"${count}"
                given = [group for group in instruction.operands if isinstance(group, Group)]
                returned, passed = (given[0].items, given[-1].items) if len(given) == 2 else (
                    (given[0].items, ()) if callee.results and given else ((), given[0].items if given else ()))  # fmt: skip
                bound = {
                    v.name: _name(renamed_operand(o, suffix, names))
                    for v, o in zip(callee.results, returned, strict=True)
                }
                bound |= {
                    v.name: _name(renamed_operand(o, suffix, names))
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


def _called(instruction: Instruction) -> str:
    return next((o.name for o in instruction.operands if isinstance(o, Symbol)), "")


def _name(operand: Operand) -> str:
    assert isinstance(operand, Symbol | Register)
    return operand.name


_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyzw]|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|"
    r"clock64|globaltimer|globaltimer_lo|globaltimer_hi|lanemask_(eq|lt|le|gt|ge)|dynamic_smem_size|total_smem_size|"
    r"cluster_ctarank|cluster_nctarank|is_explicit_cluster)"
)
_CHANGING = ("%clock", "%globaltimer", "%smid")


def _is_special(name: str) -> bool:
    return _SPECIAL.fullmatch(name) is not None


_ONE = {"f32": 0x3F800000, "f16": 0x3C00, "f64": 0x3FF0 << 48}


class Builder:
    """Rows while they are written."""

    def __init__(self, module: Module, function: Function, threads: int, contraction: Contraction) -> None:
        self.module, self.function, self.threads, self.fusions = module, function, threads, contraction.fusions
        self.used = {fusion.product for fusion in self.fusions.values()}  # products whose factors are kept
        self.divisors = constant_divisors(function)
        self.readers: dict[str, list[Instruction]] = {}  # instructions that name a register behind their first operand
        self.writers: dict[str, list[int]] = {}
        for number, instruction in enumerate(function.body):
            for name in _registers(instruction.operands[1:]):
                self.readers.setdefault(name, []).append(instruction)
            for name in _registers(instruction.operands[:1]):
                self.writers.setdefault(name, []).append(number)
        self.clamps = self._clamps()
        self.rows: list[list[int]] = []
        self.owners: list[Instruction] = []
        self.keys: list[tuple[int, Any]] = []  # rows whose code is not compiled yet
        self.program = Program(
            name=function.name, rows=np.zeros((0, b.COLUMNS), np.int64), instructions=self.owners, register_bytes=0, offsets={},
            constants=[], special=[], addresses=[], contraction=contraction,
        )  # fmt: skip
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
            if not isinstance(zero, Immediate) or zero.value or len(writers) != 1 or len(self.readers[_name(first)]) != 1:
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
        readers = self.readers.get(_name(instruction.operands[0]), [])
        return bool(readers) and all(reader.opcode[0] == "selp" for reader in readers)

    def _lay_out_variables(self) -> None:
        """Give shared and local variables their addresses: aligned, in order; arrays of the launch's size come last."""
        shared, local = b.SHARED_START, 0
        own = [*self.module.variables.values(), *self.function.variables]
        for variable in sorted((v for v in own if v.space == "shared"), key=lambda v: v.count is None):
            shared += -shared % max(variable.align, 16 if variable.count is None else 1)
            self.program.shared[variable.name] = self.symbols[variable.name] = shared
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
        if _is_special(name):
            size = 8 if name in ("%clock64", "%globaltimer", "%gridid") else 4
            offset = self._allocate(name, size)
            self.program.special.append((name, offset, size))
            return offset
        return self._allocate(name, max(bits(storage(kind or self.kind(name))) // 8, 1))

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
        _tracer.request(whole, _adapted(semantics, kinds, wanted, negated, count), kinds[:count], kinds[count:])
        self.keys.append((len(self.rows) - 1, whole))
        return row


def _adapted(
    semantics: Callable, kept: list[str], wanted: tuple[str, ...], negated: tuple[bool, ...], count: int
) -> Callable:
    """Return semantics on registers as they are kept: operands cut to their kinds, results extended to the register's bits."""

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


@cache
def _handlers() -> dict[str, Callable[[Builder, Instruction], None]]:
    return {
        "ld": _load, "ldu": _load, "st": _store, "mov": _move, "bra": _branch, "brx": _branch_index, "ret": _exit, "exit": _exit,
        "trap": _trap, "brkpt": _trap, "bar": _bar, "barrier": _bar, "shfl": _shuffle, "vote": _vote, "match": _match, "redux": _redux,
        "elect": _elect, "activemask": _active, "ldmatrix": _matrix, "stmatrix": _matrix, "atom": _atomic, "red": _atomic,
        "mbarrier": _mbarrier, "cp": _copy, "call": _call, "cvta": _window, "isspacep": _is_space, "mapa": _map_shared,
        "getctarank": _rank, "createpolicy": _policy, "tensormap": _tensor_map, "lop3": _logic,
    }  # fmt: skip


def build(
    module: Module, entry: str, threads: int, listing: Listing | None = None, watched: frozenset[str] = frozenset()
) -> Program:
    """Return a kernel as a program for blocks of a number of threads (a multiple of 32).

    ``listing`` is the machine code that says which products are fused; ``watched`` are places of the source
    (``kernels.py:5``) whose results blocks note (``Block.notes``).

    Raises:
        ArgumentError: An instruction that is not known, with its line.
    """
    function = inlined(module, module.functions[entry])
    whole = len(function.body) == len(module.functions[entry].body)  # else the code's numbers are other ones
    builder = Builder(module, function, threads, contracted(function, listing if whole else None))
    targets: dict[int, list[str]] = {}
    for label, number in function.labels.items():
        targets.setdefault(number, []).append(label)
    for instruction in function.body:  # registers of a fragment lie side by side
        if _is_product(instruction):
            for register in _registers(instruction.operands):
                builder.place(register)
    pending: set[str] = set()  # registers of products that were collected
    for number, instruction in enumerate(function.body):
        # products that wait are computed before their registers are read, and where another way joins or begins
        name = instruction.opcode[0]
        is_product = _is_product(instruction)
        asked = bool(pending) and not is_product and (
            name in ("bra", "brx", "ret", "exit", "bar", "barrier") or instruction.opcode[:2] == ("wgmma", "commit_group")
            or not pending.isdisjoint(_registers(instruction.operands)))  # fmt: skip
        if pending and (asked or number in targets):
            builder.host(replace(instruction, predicate=None), flush)
            pending = set()
        for label in targets.get(number, ()):
            builder.labels[label] = len(builder.rows)
        try:
            if is_product:
                builder.host(instruction, prepare_product(instruction))
                pending |= set(registers_of(instruction.operands[0]))
            elif name in _handlers():
                _handlers()[name](builder, instruction)
            elif any(".".join(instruction.opcode).startswith(prefix) for prefix in _NOTHING):
                builder.add(instruction, b.NOTHING)
            else:
                _elementwise(builder, instruction, number)
        except ArgumentError as error:
            raise ArgumentError(f"{error}: {instruction}") from None
        if instruction.source in watched:
            for register in _results(instruction):
                builder.host(instruction, partial(_note, instruction=instruction, register=register))
    for label in targets.get(len(function.body), ()):
        builder.labels[label] = len(builder.rows)
    if not builder.rows or builder.rows[-1][b.KIND] != b.EXIT:
        builder.add(Instruction(opcode=("ret",), operands=(), line=0, text="ret;"), b.EXIT)
    program = builder.program
    for row, instruction in zip(builder.rows, builder.owners, strict=True):
        if row[b.KIND] == b.BRANCH:
            label = _name(instruction.operands[-1])
            if label not in builder.labels:
                raise ArgumentError(f"label {label} is not declared: {instruction}")
            row[b.TARGET] = builder.labels[label]
    for at, key in builder.keys:
        builder.rows[at][b.FUNCTION] = _tracer.address(key)
    program.rows = np.array(builder.rows, np.int64)
    return program


def _registers(operands: tuple[Operand, ...]) -> list[str]:
    """Return the names of all registers among operands."""
    names = []
    for operand in operands:
        if isinstance(operand, Register):
            names += [operand.name] if operand.name != "_" else []
        elif isinstance(operand, Group):
            names += _registers(operand.items)
        elif isinstance(operand, Address):
            names += _registers((operand.base, *operand.coordinates))
    return names


def _is_product(instruction: Instruction) -> bool:
    return instruction.opcode[0] == "mma" or instruction.opcode[:2] == ("wgmma", "mma_async")


def _results(instruction: Instruction) -> list[str]:
    """Return the registers of numbers that an instruction writes."""
    first = instruction.operands[0] if instruction.operands else None
    writes = isinstance(first, Register | Group) and instruction.opcode[0] not in (
        "setp",
        "bra",
        "ret",
        "bar",
        "red",
        "mov",
        "cvta",
    )
    return [r for r in _registers((first,)) if not r.startswith("%p")] if writes and first is not None else []


def _note(block: Any, running: np.ndarray, *, instruction: Instruction, register: str) -> None:
    """Note what an instruction of a watched line wrote."""
    if block.notes is not None:
        block.notes.append((instruction, register, block.register(register).copy(), running.copy()))


def unknown(instruction: Instruction) -> ArgumentError:
    """Return the refusal of an instruction that no table knows."""
    return ArgumentError(f"{'.'.join(instruction.opcode)} is not an instruction that fmtsim runs")


def _elementwise(builder: Builder, instruction: Instruction, number: int) -> None:
    """Write a row of ``TABLE``."""
    name = ".".join(part for part in instruction.opcode if part != "uni")
    row = TABLE.get(name)
    if row is None:
        raise unknown(instruction)
    results, operands = list(instruction.operands[:1]), list(instruction.operands[1:])
    if isinstance(results[0], Group):
        results = list(results[0].items)
    carries = [part for part in ("cc", "addc", "subc", "madc") if part in instruction.opcode]
    if carries:  # the carry flag is a register of its own
        builder.function.registers.setdefault("%cc", "pred")
        if "cc" in carries:
            results.append(Register("%cc"))
        if len(row.operands) > len(operands):
            operands.append(Register("%cc"))
    kinds = row.results[: len(results)]
    pairs = [(r, k) for r, k in zip(results, kinds, strict=True) if _name(r) != "_"]
    if len(pairs) < len(results) and len(results) == 2 and _name(results[0]) == "_":
        raise ArgumentError("a first result that is thrown away is not supported")
    if len(operands) != len(row.operands):
        raise ArgumentError(f"{len(operands)} operands; {name} has {len(row.operands)}")
    given = list(zip(operands, row.operands, strict=True))
    semantics, factors, key = row.semantics, fused_factors(instruction.opcode, row), name
    if number in builder.divisors:  # a product with the constant's reciprocal
        semantics, factors = divided_by(instruction.opcode, builder.divisors[number])
        key = f"{name}/{builder.divisors[number]:x}"
    if builder.is_negated_in_place(instruction):
        semantics, key = SIGN_ONLY[instruction.opcode[0]], f"{name}!"
    if number in builder.clamps.values():
        pairs.append((f"#{number}.x", row.results[0]))
        semantics, key = with_operand(row.semantics), f"{name}^"
    if number in builder.clamps:
        given = [(f"#{builder.clamps[number]}.x", row.results[0])]
        semantics, key = clamped(instruction.opcode), f"{name}.sat"
    fusion = builder.fusions.get(number)
    if fusion is not None:
        kept = [(f"#{fusion.product}.{side}", row.results[0]) for side in "xy"]
        semantics = fused_sum(instruction.opcode, fusion.negates_product, fusion.negates_addend)
        key, given = f"{name}+{fusion.negates_product}{fusion.negates_addend}", [*kept, given[1 - fusion.operand]]
    elif number in builder.used:
        pairs += [(f"#{number}.{side}", row.results[0]) for side in "xy"]
        semantics, key = factors, f"{key}#"
    builder.compute(instruction, key, semantics, tuple(pairs), tuple(given))


def _plain(instruction: Instruction) -> list[str]:
    """Return the opcode without what changes no value."""
    return [part for part in instruction.opcode if not _NO_VALUE.fullmatch(part)]


def _space(parts: list[str]) -> int:
    return next((_SPACES[part] for part in parts if part in _SPACES), b.GENERIC)


def _vector(parts: list[str]) -> int:
    return next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)


_MEMORY = re.compile(r"(b8|u8|s8|b16|u16|s16|b32|u32|s32|b64|u64|s64|f16|bf16|f32|f64|b128)$")


def _access(builder: Builder, instruction: Instruction, registers: Operand, kind: int) -> list[int]:
    """Write what loads and stores share: space, size, registers."""
    parts = _plain(instruction)
    known = all(part in _SPACES or re.fullmatch(r"v[24]", part) or _MEMORY.match(part) for part in parts[1:])
    if not known or not _MEMORY.match(parts[-1]) or parts[-1] == "b128":
        raise unknown(instruction)
    row = builder.add(instruction, kind)
    size = width(parts[-1]) // 8
    row[b.SIZE], row[b.COUNT], row[b.SPACE] = size, _vector(parts), _space(parts)
    items = registers.items if isinstance(registers, Group) else (registers,)
    if len(items) != row[b.COUNT]:
        raise ArgumentError(f"{len(items)} registers for {row[b.COUNT]} numbers")
    wide = size
    for i, item in enumerate(items):
        if isinstance(item, Register) and item.name == "_":
            continue
        row[b.DATA + i], kept = builder.operand(item, parts[-1] if size > 1 else "b16")
        wide = max(bits(kept) // 8, 1)
    row[b.FLAGS] = wide | (16 if parts[-1][0] == "s" else 0)
    return row


def _load(builder: Builder, instruction: Instruction) -> None:
    row = _access(builder, instruction, instruction.operands[0], b.LOAD)
    _address(builder, instruction, row, instruction.operands[1])


def _store(builder: Builder, instruction: Instruction) -> None:
    row = _access(builder, instruction, instruction.operands[1], b.STORE)
    _address(builder, instruction, row, instruction.operands[0])


def _address(builder: Builder, instruction: Instruction, row: list[int], operand: Operand) -> None:
    """Write a memory operand; parameters of calls lie in local memory."""
    builder.memory(row, operand)
    if (
        isinstance(operand, Address)
        and isinstance(operand.base, Symbol)
        and operand.base.name in builder.local_parameters
    ):
        row[b.SPACE] = b.LOCAL


def _move(builder: Builder, instruction: Instruction) -> None:
    """mov, also of parts: ``mov.b64 {%r1, %r2}, %rd1`` and back."""
    target, source = instruction.operands[0], instruction.operands[1]
    kind = instruction.opcode[-1]
    if not isinstance(target, Group) and not isinstance(source, Group):
        if isinstance(source, Symbol) and source.name not in builder.symbols and kind not in ("u64", "b64", "s64"):
            raise ArgumentError(f"the address of {source.name} has 64 bits")
        row = TABLE.get(".".join(instruction.opcode))
        if row is None:
            raise unknown(instruction)
        builder.compute(
            instruction,
            ".".join(instruction.opcode),
            row.semantics,
            ((target, row.results[0]),),
            ((source, row.operands[0]),),
        )
        return
    if kind not in ("b32", "b64", "u32", "u64"):
        raise unknown(instruction)
    whole = bits(kind)
    if isinstance(target, Group):
        part = whole // len(target.items)
        for i, item in enumerate(target.items):
            if _name(item) != "_":
                builder.compute(instruction, f"mov.part{i}.{part}", lambda x, i=i, part=part: (x >> (i * part)).to(f"u{part}"),
                                ((item, f"u{part}"),), ((source, f"u{whole}"),))  # fmt: skip
        return
    assert isinstance(source, Group)
    part = whole // len(source.items)

    def join(*items: Vector) -> Vector:
        result = items[0].to(f"u{whole}")
        for i, item in enumerate(items[1:], 1):
            result = result | (item.to(f"u{whole}") << (i * part))
        return result

    builder.compute(instruction, f"mov.join{len(source.items)}.{whole}", join, ((target, f"u{whole}"),),
                    tuple((item, f"u{part}") for item in source.items))  # fmt: skip


def _branch(builder: Builder, instruction: Instruction) -> None:
    builder.add(instruction, b.BRANCH)


def _branch_index(builder: Builder, instruction: Instruction) -> None:
    index, name = instruction.operands
    labels = builder.function.branch_targets.get(_name(name))
    if labels is None:
        raise ArgumentError(f"{_name(name)} names no targets")
    row = builder.add(instruction, b.BRANCH_INDEX)
    row[b.DATA], _ = builder.operand(index, "u32")
    row[b.COUNT], row[b.SIZE] = len(labels), len(builder.rows)
    for label in labels:
        jump = replace(instruction, opcode=("bra",), operands=(Symbol(label),), predicate=None)
        builder.add(jump, b.BRANCH)


def _exit(builder: Builder, instruction: Instruction) -> None:
    builder.add(instruction, b.EXIT)


def _trap(builder: Builder, instruction: Instruction) -> None:
    builder.add(instruction, b.TRAP)


def _bar(builder: Builder, instruction: Instruction) -> None:
    parts = [p for p in instruction.opcode[1:] if p not in ("cta", "aligned")]
    if parts == ["warp", "sync"] or instruction.opcode[:2] == ("barrier", "cluster"):
        builder.add(instruction, b.NOTHING)
        return
    if parts not in (["sync"], ["arrive"]):
        raise unknown(instruction)
    row = builder.add(instruction, b.BARRIER if parts == ["sync"] else b.ARRIVE)
    row[b.DATA], _ = builder.operand(instruction.operands[0], "u32")
    if len(instruction.operands) > 1:
        row[b.DATA + 1], _ = builder.operand(instruction.operands[1], "u32")


def _with_predicate(operand: Operand) -> tuple[Operand, Operand | None]:
    return (operand.items[0], operand.items[1]) if isinstance(operand, Group) else (operand, None)


def _shuffle(builder: Builder, instruction: Instruction) -> None:
    if instruction.opcode[1] != "sync" or instruction.opcode[3] != "b32":
        raise unknown(instruction)
    row = builder.add(instruction, b.SHUFFLE)
    row[b.FUNCTION] = {"up": b.S_UP, "down": b.S_DOWN, "bfly": b.S_BUTTERFLY, "idx": b.S_INDEX}[instruction.opcode[2]]
    target, predicate = _with_predicate(instruction.operands[0])
    row[b.DATA], _ = builder.operand(target, "b32")
    if predicate is not None:
        row[b.DATA + 1], _ = builder.operand(predicate, "pred")
    for i in range(3):
        row[b.DATA + 2 + i], _ = builder.operand(instruction.operands[1 + i], "b32")


def _vote(builder: Builder, instruction: Instruction) -> None:
    kinds = {"all": b.V_ALL, "any": b.V_ANY, "uni": b.V_UNIFORM, "ballot": b.V_BALLOT}
    mode = next((part for part in instruction.opcode if part in kinds), "")
    if "sync" not in instruction.opcode or not mode or len(instruction.opcode) != 4:  # noqa: PLR2004
        raise unknown(instruction)
    row = builder.add(instruction, b.VOTE)
    row[b.FUNCTION] = kinds[mode]
    row[b.DATA], _ = builder.operand(instruction.operands[0], "b32")
    source = instruction.operands[1]
    row[b.DATA + 1], _ = builder.operand(source, "pred")
    row[b.FLAGS] = int(isinstance(source, Register) and source.negated)
    row[b.DATA + 2], _ = builder.operand(instruction.operands[2], "b32")


def _match(builder: Builder, instruction: Instruction) -> None:
    _, kind, sync, size = instruction.opcode
    if kind not in ("any", "all") or sync != "sync" or size not in ("b32", "b64"):
        raise unknown(instruction)
    row = builder.add(instruction, b.MATCH)
    row[b.SIZE], row[b.FLAGS] = bits(size) // 8, int(kind == "all")
    target, predicate = _with_predicate(instruction.operands[0])
    row[b.DATA], _ = builder.operand(target, "b32")
    if predicate is not None:
        row[b.DATA + 1], _ = builder.operand(predicate, "pred")
    row[b.DATA + 2], _ = builder.operand(instruction.operands[1], size)
    row[b.DATA + 3], _ = builder.operand(instruction.operands[2], "b32")


_ATOMS = {
    "add": b.A_ADD, "and": b.A_AND, "or": b.A_OR, "xor": b.A_XOR, "exch": b.A_EXCHANGE, "cas": b.A_COMPARE, "inc": b.A_INCREMENT,
    "dec": b.A_DECREMENT, "min": b.A_MIN, "max": b.A_MAX,
}  # fmt: skip


def _atom_kind(instruction: Instruction, operation: str, kind: str) -> int:
    """Return the number of an atomic operation on a type."""
    floats = {
        "f32": b.A_ADD_F32,
        "f64": b.A_ADD_F64,
        "f16": b.A_ADD_F16,
        "bf16": b.A_ADD_BF16,
        "f16x2": b.A_ADD_F16,
        "bf16x2": b.A_ADD_BF16,
    }
    if operation == "add" and kind in floats:
        return floats[kind]
    if operation not in _ATOMS or not re.fullmatch(r"[bus](32|64)|b16", kind) or (kind == "b16" and operation != "cas"):
        raise unknown(instruction)
    if kind[0] == "s" and operation in ("min", "max"):
        return b.A_MIN_S if operation == "min" else b.A_MAX_S
    return _ATOMS[operation]


def _redux(builder: Builder, instruction: Instruction) -> None:
    if len(instruction.opcode) != 4 or instruction.opcode[3] not in ("u32", "s32", "b32"):
        raise unknown(instruction)
    row = builder.add(instruction, b.REDUCE)
    row[b.FUNCTION] = _atom_kind(instruction, instruction.opcode[2], instruction.opcode[3])
    for i in range(3):
        row[b.DATA + i], _ = builder.operand(instruction.operands[i], "b32")


def _elect(builder: Builder, instruction: Instruction) -> None:
    row = builder.add(instruction, b.ELECT)
    target, predicate = _with_predicate(instruction.operands[0])
    if _name(target) != "_":
        row[b.DATA], _ = builder.operand(target, "b32")
    row[b.DATA + 1], _ = builder.operand(predicate, "pred")  # type: ignore[arg-type]


def _active(builder: Builder, instruction: Instruction) -> None:
    row = builder.add(instruction, b.ACTIVE)
    row[b.DATA], _ = builder.operand(instruction.operands[0], "b32")


def _matrix(builder: Builder, instruction: Instruction) -> None:
    name, *rest = instruction.opcode
    parts = [p for p in rest if p not in ("sync", "aligned", "shared", "shared::cta", "trans")]
    if len(parts) != 3 or parts[0] != "m8n8" or parts[1] not in ("x1", "x2", "x4") or parts[2] != "b16":
        raise unknown(instruction)
    row = builder.add(instruction, b.LOAD_MATRIX if name == "ldmatrix" else b.STORE_MATRIX)
    registers, address = instruction.operands if name == "ldmatrix" else instruction.operands[::-1]
    items = registers.items if isinstance(registers, Group) else (registers,)
    row[b.COUNT], row[b.FLAGS] = int(parts[1][1:]), int("trans" in rest)
    for i, item in enumerate(items):
        row[b.DATA + i], _ = builder.operand(item, "b32")
    builder.memory(row, address)


def _atomic(builder: Builder, instruction: Instruction) -> None:
    parts = _plain(instruction)
    returns = parts[0] == "atom"
    operation = next((p for p in parts[1:] if p in _ATOMS), "")
    kind, count = parts[-1], _vector(parts)
    rest = [p for p in parts[1:] if p not in _SPACES and p not in (operation, kind) and not re.fullmatch(r"v[248]", p)]
    number, size = _atom_kind(instruction, operation, kind), width(kind) // 8
    if rest or count * size > 16:
        raise unknown(instruction)
    operands = list(instruction.operands)
    old = operands.pop(0) if returns else Group(())
    olds = old.items if isinstance(old, Group) else (old,)
    values = [
        item for operand in operands[1:] for item in (operand.items if isinstance(operand, Group) else (operand,))
    ]
    values = values[: count + (operation == "cas")]  # behind them a cache policy
    if count == 8 and set(olds[:4]) & set(values[4:]) - {Symbol("_")}:
        raise unknown(instruction)  # the first four's old numbers would be the last four's addends
    for first in range(0, count, 4):
        row = builder.add(instruction, b.ATOMIC)
        row[b.FUNCTION], row[b.SIZE], row[b.COUNT], row[b.SPACE] = number, size, min(count, 4), _space(parts)
        # a global sum of float32 flushes subnormal numbers
        row[b.FLAGS] = int(kind == "f32" and row[b.SPACE] != b.SHARED)
        for i, item in enumerate(olds[first : first + 4]):
            if _name(item) != "_":
                row[b.DATA + i], _ = builder.operand(item, kind)
        builder.memory(row, operands[0])
        row[b.OFFSET] += first * size
        for i, item in enumerate(values[first : first + 4]):  # cas has two of one number
            row[b.DATA + 4 + i], _ = builder.operand(item, kind)
        builder.program.has_atomics |= row[b.SPACE] != b.SHARED


def _mbarrier(builder: Builder, instruction: Instruction) -> None:
    parts = [p for p in _plain(instruction)[1:] if p not in ("b64", "shared", "shared::cta", "shared::cluster")]
    operands = list(instruction.operands)
    kinds = {
        ("init",): b.M_INIT, ("expect_tx",): b.M_EXPECT, ("arrive",): b.M_ARRIVE, ("arrive", "expect_tx"): b.M_ARRIVE,
        ("try_wait",): b.M_WAIT, ("test_wait",): b.M_WAIT, ("try_wait", "parity"): b.M_WAIT_PARITY,
        ("test_wait", "parity"): b.M_WAIT_PARITY,
    }  # fmt: skip
    if parts == ["inval"]:
        builder.add(instruction, b.NOTHING)
        return
    if tuple(parts) not in kinds:
        raise unknown(instruction)
    row = builder.add(instruction, b.MBARRIER)
    row[b.FUNCTION], row[b.SPACE], row[b.SIZE] = (
        kinds[tuple(parts)],
        b.SHARED if "shared" in str(instruction.opcode) else b.GENERIC,
        4,
    )
    row[b.FLAGS] = int("expect_tx" in parts)
    waits = "wait" in parts[0]
    if parts[0] == "arrive" or waits:
        result = operands.pop(0)
        if _name(result) != "_":
            row[b.DATA], _ = builder.operand(result, "pred" if waits else "b64")
    builder.memory(row, operands[0])
    if len(operands) > 1:
        wide = parts == ["try_wait"] or parts == ["test_wait"]
        row[b.SIZE] = 8 if wide else 4
        row[b.DATA + 1], _ = builder.operand(operands[1], "b64" if wide else "b32")


def _copy(builder: Builder, instruction: Instruction) -> None:
    """cp.async, and by the host cp.async.bulk."""
    text = ".".join(instruction.opcode)
    if any(text.startswith(prefix) for prefix in _NOTHING):
        builder.add(instruction, b.NOTHING)
        return
    if text.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        from fmtsim.machine.ptx.tensor_map import prepare_bulk_copy

        builder.host(instruction, prepare_bulk_copy(instruction, builder))
        return
    if text.startswith("cp.async.mbarrier.arrive"):
        row = builder.add(instruction, b.MBARRIER)
        row[b.FUNCTION], row[b.SPACE], row[b.SIZE] = b.M_ARRIVE, b.SHARED if "shared" in text else b.GENERIC, 4
        row[b.FLAGS] = 0 if "noinc" in text else 2
        builder.memory(row, instruction.operands[0])
        return
    parts = [p for p in _plain(instruction) if p not in ("cp", "async", *_SPACES)]
    if parts or "global" not in instruction.opcode:
        raise unknown(instruction)
    target, source, size, *rest = instruction.operands
    row = builder.add(instruction, b.COPY)
    assert isinstance(size, Immediate) and isinstance(source, Address)
    row[b.SIZE] = size.value
    builder.memory(row, target)
    row[b.DATA], _ = builder.operand(source.base, "b64")
    row[b.DATA + 3] = source.offset
    if rest and "cache_hint" not in text or len(rest) > 1:
        place, kind = builder.operand(rest[0], "u32")
        row[b.DATA + (2 if kind == "pred" else 1)] = place
        row[b.FLAGS] = int(kind == "pred")


def _call(builder: Builder, instruction: Instruction) -> None:
    """Calls of the system: a failed assertion stops the kernel, printf prints nothing."""
    name = _called(instruction)
    if name == "__assertfail":
        builder.add(instruction, b.TRAP)
    elif name == "vprintf":
        builder.add(instruction, b.NOTHING)
        builder.program.reasons += ("printf prints nothing",)
    else:
        raise ArgumentError(f"the function {name or 'of a pointer'} has no body here")


def _window(builder: Builder, instruction: Instruction) -> None:
    """cvta: generic addresses of shared and local memory lie in windows of their own."""
    space = next((p for p in instruction.opcode if p in _SPACES), "")
    start = {"shared": b.SHARED_WINDOW, "shared::cta": b.SHARED_WINDOW, "local": b.LOCAL_WINDOW}.get(space, 0)
    if not space or instruction.opcode[-1] != "u64":
        raise unknown(instruction)
    start = -start if "to" in instruction.opcode else start
    builder.compute(
        instruction,
        f"cvta{start}",
        lambda x: x + start,
        ((instruction.operands[0], "u64"),),
        ((instruction.operands[1], "u64"),),
    )


def _is_space(builder: Builder, instruction: Instruction) -> None:
    space = instruction.opcode[1]
    least, most = {
        "global": (0, b.SHARED_WINDOW), "const": (0, 0), "param": (0, 0), "shared": (b.SHARED_WINDOW, b.LOCAL_WINDOW),
        "shared::cta": (b.SHARED_WINDOW, b.LOCAL_WINDOW), "local": (b.LOCAL_WINDOW, 1 << 63),
    }.get(space, (None, None))  # fmt: skip
    if least is None or most is None:
        raise unknown(instruction)
    builder.compute(instruction, f"isspacep.{space}", lambda x: (x >= least) & (x < most), ((instruction.operands[0], "pred"),),
                    ((instruction.operands[1], "u64"),))  # fmt: skip


def _map_shared(builder: Builder, instruction: Instruction) -> None:
    """mapa of a cluster of one block: the address itself."""
    kind = instruction.opcode[-1]
    builder.compute(
        instruction, f"mapa.{kind}", lambda x: x, ((instruction.operands[0], kind),), ((instruction.operands[1], kind),)
    )


def _rank(builder: Builder, instruction: Instruction) -> None:
    builder.compute(
        instruction,
        "getctarank",
        lambda x: x.to("u32") & 0,
        ((instruction.operands[0], "u32"),),
        ((instruction.operands[1], "u64"),),
    )


def _policy(builder: Builder, instruction: Instruction) -> None:
    """createpolicy: caches change no value."""
    builder.compute(
        instruction, "createpolicy", lambda x: x, ((instruction.operands[0], "b64"),), ((Immediate(0), "b64"),)
    )


def _logic(builder: Builder, instruction: Instruction) -> None:
    """lop3 with its table as an immediate operand."""
    target, *operands, table = instruction.operands
    if instruction.opcode != ("lop3", "b32") or not isinstance(table, Immediate):
        raise unknown(instruction)
    builder.compute(instruction, f"lop3/{table.value}", logic_of_three(table.value), ((target, "b32"),),
                    tuple((operand, "b32") for operand in operands))  # fmt: skip


def _tensor_map(builder: Builder, instruction: Instruction) -> None:
    from fmtsim.machine.ptx.tensor_map import prepare_fence_copy, prepare_replace

    if instruction.opcode[1] not in ("replace", "cp_fenceproxy"):
        raise unknown(instruction)
    prepare = prepare_replace if instruction.opcode[1] == "replace" else prepare_fence_copy
    builder.host(instruction, prepare(instruction, builder))
