# SPDX-License-Identifier: Apache-2.0
"""From instructions to rows: what each name of PTX becomes. What no table knows is refused by name, with its line."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from fmtsim.machine.ptx import block
from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.contract import contracted
from fmtsim.machine.ptx.float_instructions import divided_by
from fmtsim.machine.ptx.instruction_table import TABLE
from fmtsim.machine.ptx.instructions import SIGN_ONLY, clamped, fused_factors, fused_sum, scaled_product, with_operand
from fmtsim.machine.ptx.integer_instructions import logic_of_three
from fmtsim.machine.ptx.kernel_program import (
    FENCES,
    NOTHING,
    SPACES,
    Builder,
    Program,
    callee_name,
    inlined,
    operand_name,
    space_number,
    tracer,
    unknown,
    vector_length,
    without_caches,
)
from fmtsim.machine.ptx.matrix_instructions import flush, prepare_product
from fmtsim.machine.ptx.parse import (
    Address,
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
from fmtsim.machine.ptx.sass import Listing
from fmtsim.machine.ptx.values import Vector, bits
from fmtsim.machine.ptx.warp_rows import (
    lower_active,
    lower_atomic,
    lower_elect,
    lower_match,
    lower_matrix,
    lower_redux,
    lower_shuffle,
    lower_vote,
)
from fmtsim.support.errors import ArgumentError


@cache
def _handlers() -> dict[str, Callable[[Builder, Instruction], None]]:
    return {
        "ld": _load,
        "ldu": _load,
        "st": _store,
        "mov": _move,
        "bra": partial(_one_row, kind=b.BRANCH),
        "brx": _branch_index,
        "ret": partial(_one_row, kind=b.EXIT),
        "exit": partial(_one_row, kind=b.EXIT),
        "trap": partial(_one_row, kind=b.TRAP),
        "brkpt": partial(_one_row, kind=b.TRAP),
        "bar": _bar,
        "barrier": _bar,
        "shfl": lower_shuffle,
        "vote": lower_vote,
        "match": lower_match,
        "redux": lower_redux,
        "elect": lower_elect,
        "activemask": lower_active,
        "ldmatrix": lower_matrix,
        "stmatrix": lower_matrix,
        "atom": lower_atomic,
        "red": lower_atomic,
        "mbarrier": _mbarrier,
        "cp": _copy,
        "call": _call,
        "cvta": _window,
        "isspacep": _is_space,
        "mapa": _map_shared,
        "getctarank": _rank,
        "createpolicy": _policy,
        "tensormap": _tensor_map,
        "lop3": _logic,
    }


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
            for register in register_names(instruction.operands):
                builder.place(register)
    pending: set[str] = set()  # registers of products that were collected
    for number, instruction in enumerate(function.body):
        # products that wait are computed before their registers are read, and where another way joins or begins
        name = instruction.opcode[0]
        is_product = _is_product(instruction)
        asked = (
            bool(pending)
            and not is_product
            and (
                name in ("bra", "brx", "ret", "exit", "bar", "barrier")
                or instruction.opcode[:2] == ("wgmma", "commit_group")
                or not pending.isdisjoint(register_names(instruction.operands))
            )
        )
        if pending and (asked or number in targets):
            builder.host(replace(instruction, predicate=None), flush)
            pending = set()
        for label in targets.get(number, ()):
            builder.labels[label] = len(builder.rows)
        try:
            if is_product:
                builder.host(instruction, prepare_product(instruction))
                pending |= set(register_names(instruction.operands[:1]))
            elif ".".join(instruction.opcode).startswith(FENCES):
                builder.add(instruction, b.FENCE)[b.FLAGS] = int("wait" in instruction.opcode)
            elif any(".".join(instruction.opcode).startswith(prefix) for prefix in NOTHING):
                builder.add(instruction, b.NOTHING)
            elif name in _handlers():
                _handlers()[name](builder, instruction)
            else:
                _elementwise(builder, instruction, number)
        except ArgumentError as error:
            raise ArgumentError(f"{error}: {instruction}") from None
        if not watched.isdisjoint((instruction.source, *instruction.callers)):
            if is_product:  # its result is there when it was computed
                builder.host(replace(instruction, predicate=None), flush)
            for register in _results(instruction):
                builder.host(instruction, partial(_note, instruction=instruction, register=register))
    for label in targets.get(len(function.body), ()):
        builder.labels[label] = len(builder.rows)
    if not builder.rows or builder.rows[-1][b.KIND] != b.EXIT:
        builder.add(Instruction(opcode=("ret",), operands=(), line=0, text="ret;"), b.EXIT)
    program = builder.program
    for row, instruction in zip(builder.rows, builder.owners, strict=True):
        if row[b.KIND] == b.BRANCH:
            label = operand_name(instruction.operands[-1])
            if label not in builder.labels:
                raise ArgumentError(f"label {label} is not declared: {instruction}")
            row[b.TARGET] = builder.labels[label]
    for at, key in builder.keys:
        builder.rows[at][b.FUNCTION] = tracer.address(key)
    program.rows = np.array(builder.rows, np.int64)
    program.piece_shift = _piece_shift(program)
    return program


def _piece_shift(program: Program) -> int:
    """Mark loads and stores that may put warps in order; return log2 of the smallest access to shared memory, or -1."""
    fenced = (program.rows[:, b.KIND] == b.FENCE).any()
    smallest = 0
    for row, instruction in zip(program.rows, program.instructions, strict=True):
        kind, parts = row[b.KIND], instruction.opcode
        if kind in (b.LOAD, b.STORE) and (
            {"relaxed", "acquire", "release"} & set(parts) or ("volatile" in parts and fenced)
        ):
            row[b.FLAGS] |= b.STRONG  # a flag, which threads wait for
        nbytes = 16 if kind in (b.LOAD_MATRIX, b.STORE_MATRIX) else int(row[b.SIZE])
        nbytes *= int(row[b.COUNT]) if kind in (b.LOAD, b.STORE) else 1
        if kind in (b.LOAD, b.STORE, b.ATOMIC) and row[b.SPACE] not in (b.SHARED, b.GENERIC):
            continue
        if kind in (b.LOAD, b.STORE, b.ATOMIC, b.COPY, b.LOAD_MATRIX, b.STORE_MATRIX):
            smallest = min(smallest or 16, nbytes)
    return smallest.bit_length() - 1


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
    return [r for r in register_names((first,)) if not r.startswith("%p")] if writes and first is not None else []


def _note(block: Any, running: np.ndarray, *, instruction: Instruction, register: str) -> None:
    """Note what an instruction of a watched line wrote."""
    if block.notes is not None:
        block.notes.append((instruction, register, block.register(register).copy(), running.copy()))


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
    pairs: list[tuple[Any, str]] = [(r, k) for r, k in zip(results, kinds, strict=True) if operand_name(r) != "_"]
    if len(pairs) < len(results) and len(results) == 2 and operand_name(results[0]) == "_":
        raise ArgumentError("a first result that is thrown away is not supported")
    if len(operands) != len(row.operands):
        raise ArgumentError(f"{len(operands)} operands; {name} has {len(row.operands)}")
    given: list[tuple[Any, str]] = list(zip(operands, row.operands, strict=True))
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
    if number in builder.scaled:  # the factors of the product that is scaled, in one rounding with 2^k
        product, scale = builder.scaled[number]
        given = [(f"#{product}.{side}", "f32") for side in "xy"]
        semantics, key = scaled_product(instruction.opcode, scale), f"{name}*{scale}"
    if fusion is not None:
        kept = [(f"#{fusion.product}.{side}", row.results[0]) for side in "xy"]
        semantics = fused_sum(instruction.opcode, fusion.negates_product, fusion.negates_addend)
        key, given = f"{name}+{fusion.negates_product}{fusion.negates_addend}", [*kept, given[1 - fusion.operand]]
    elif number in builder.used:
        pairs += [(f"#{number}.{side}", row.results[0]) for side in "xy"]
        semantics, key = factors, f"{key}#"
    builder.compute(instruction, key, semantics, tuple(pairs), tuple(given))


_MEMORY = re.compile(r"(b8|u8|s8|b16|u16|s16|b32|u32|s32|b64|u64|s64|f16|bf16|f32|f64|b128)$")


def _access(builder: Builder, instruction: Instruction, registers: Operand, kind: int) -> list[int]:
    """Write what loads and stores share: space, size, registers."""
    parts = without_caches(instruction)
    known = all(part in SPACES or re.fullmatch(r"v[24]", part) or _MEMORY.match(part) for part in parts[1:])
    if not known or not _MEMORY.match(parts[-1]) or parts[-1] == "b128":
        raise unknown(instruction)
    row = builder.add(instruction, kind)
    size = width(parts[-1]) // 8
    row[b.SIZE], row[b.COUNT], row[b.SPACE] = size, vector_length(parts), space_number(parts)
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


def _compute(
    builder: Builder, instruction: Instruction, key: str, semantics: Callable, kind: str, *operands: Any
) -> None:
    """Write a row whose result is the first operand, of a kind; the others are pairs of an operand and its kind."""
    builder.compute(instruction, key, semantics, ((instruction.operands[0], kind),), operands)


def _move(builder: Builder, instruction: Instruction) -> None:
    """mov, also of parts: ``mov.b64 {%r1, %r2}, %rd1`` and back."""
    target, source = instruction.operands[0], instruction.operands[1]
    kind = instruction.opcode[-1]
    if not isinstance(target, Group) and not isinstance(source, Group):
        if isinstance(source, Symbol) and source.name not in builder.symbols and kind not in ("u64", "b64", "s64"):
            raise ArgumentError(f"the address of {source.name} has 64 bits")
        name = ".".join(instruction.opcode)
        row = TABLE.get(name)
        if row is None:
            raise unknown(instruction)
        _compute(builder, instruction, name, row.semantics, row.results[0], (source, row.operands[0]))
        return
    if kind not in ("b32", "b64", "u32", "u64"):
        raise unknown(instruction)
    whole = bits(kind)
    if isinstance(target, Group):
        part = whole // len(target.items)
        for i, item in enumerate(target.items):
            if operand_name(item) != "_":
                builder.compute(
                    instruction,
                    f"mov.part{i}.{part}",
                    lambda x, i=i, part=part: (x >> (i * part)).to(f"u{part}"),
                    ((item, f"u{part}"),),
                    ((source, f"u{whole}"),),
                )
        return
    assert isinstance(source, Group)
    part = whole // len(source.items)

    def join(*items: Vector) -> Vector:
        result = items[0].to(f"u{whole}")
        for i, item in enumerate(items[1:], 1):
            result = result | (item.to(f"u{whole}") << (i * part))
        return result

    pairs = ((item, f"u{part}") for item in source.items)
    _compute(builder, instruction, f"mov.join{len(source.items)}.{whole}", join, f"u{whole}", *pairs)


def _one_row(builder: Builder, instruction: Instruction, *, kind: int) -> None:
    builder.add(instruction, kind)


def _branch_index(builder: Builder, instruction: Instruction) -> None:
    index, name = instruction.operands
    labels = builder.function.branch_targets.get(operand_name(name))
    if labels is None:
        raise ArgumentError(f"{operand_name(name)} names no targets")
    row = builder.add(instruction, b.BRANCH_INDEX)
    row[b.DATA], _ = builder.operand(index, "u32")
    row[b.COUNT], row[b.SIZE] = len(labels), len(builder.rows)
    for label in labels:
        jump = replace(instruction, opcode=("bra",), operands=(Symbol(label),), predicate=None)
        builder.add(jump, b.BRANCH)


def _bar(builder: Builder, instruction: Instruction) -> None:
    parts = [p for p in instruction.opcode[1:] if p not in ("cta", "aligned")]
    if parts not in (["sync"], ["arrive"]):
        raise unknown(instruction)
    row = builder.add(instruction, b.BARRIER if parts == ["sync"] else b.ARRIVE)
    row[b.DATA], _ = builder.operand(instruction.operands[0], "u32")
    if len(instruction.operands) > 1:
        row[b.DATA + 1], _ = builder.operand(instruction.operands[1], "u32")


def _mbarrier(builder: Builder, instruction: Instruction) -> None:
    parts = [p for p in without_caches(instruction)[1:] if p not in ("b64", "shared", "shared::cta", "shared::cluster")]
    operands = list(instruction.operands)
    kinds = {
        ("init",): block.M_INIT,
        ("expect_tx",): block.M_EXPECT,
        ("arrive",): block.M_ARRIVE,
        ("arrive", "expect_tx"): block.M_ARRIVE,
        ("try_wait",): block.M_WAIT,
        ("test_wait",): block.M_WAIT,
        ("try_wait", "parity"): block.M_WAIT_PARITY,
        ("test_wait", "parity"): block.M_WAIT_PARITY,
    }
    if tuple(parts) not in kinds:
        raise unknown(instruction)
    row = builder.add(instruction, b.MBARRIER)
    row[b.FUNCTION], row[b.SPACE], row[b.SIZE] = (
        kinds[tuple(parts)],
        b.SHARED if "shared" in str(instruction.opcode) else b.GENERIC,
        4,
    )
    row[b.FLAGS] = int("expect_tx" in parts) | 4 * ("test_wait" in parts)
    waits = "wait" in parts[0]
    if parts[0] == "arrive" or waits:
        result = operands.pop(0)
        if operand_name(result) != "_":
            row[b.DATA], _ = builder.operand(result, "pred" if waits else "b64")
    builder.memory(row, operands[0])
    if len(operands) > 1:
        wide = parts == ["try_wait"] or parts == ["test_wait"]
        row[b.SIZE] = 8 if wide else 4
        row[b.DATA + 1], _ = builder.operand(operands[1], "b64" if wide else "b32")


def _copy(builder: Builder, instruction: Instruction) -> None:
    """cp.async, and by the host cp.async.bulk."""
    text = ".".join(instruction.opcode)
    if text.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        from fmtsim.machine.ptx.tensor_map import prepare_bulk_copy

        builder.host(instruction, prepare_bulk_copy(instruction, builder))
        return
    if text.startswith("cp.async.mbarrier.arrive"):
        row = builder.add(instruction, b.MBARRIER)
        row[b.FUNCTION], row[b.SPACE], row[b.SIZE] = block.M_ARRIVE, b.SHARED if "shared" in text else b.GENERIC, 4
        row[b.FLAGS] = 0 if "noinc" in text else 2
        builder.memory(row, instruction.operands[0])
        return
    parts = [p for p in without_caches(instruction) if p not in ("cp", "async", *SPACES)]
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
    name = callee_name(instruction)
    if name == "__assertfail":
        builder.add(instruction, b.TRAP)
    elif name == "vprintf":
        builder.add(instruction, b.NOTHING)
        builder.program.reasons += ("printf prints nothing",)
    else:
        raise ArgumentError(f"the function {name or 'of a pointer'} has no body here")


def _window(builder: Builder, instruction: Instruction) -> None:
    """cvta: generic addresses of shared and local memory lie in windows of their own."""
    space = next((p for p in instruction.opcode if p in SPACES), "")
    start = {"shared": b.SHARED_WINDOW, "shared::cta": b.SHARED_WINDOW, "local": b.LOCAL_WINDOW}.get(space, 0)
    if not space or instruction.opcode[-1] != "u64":
        raise unknown(instruction)
    start = -start if "to" in instruction.opcode else start
    _compute(builder, instruction, f"cvta{start}", lambda x: x + start, "u64", (instruction.operands[1], "u64"))


def _is_space(builder: Builder, instruction: Instruction) -> None:
    space = instruction.opcode[1]
    least, most = {
        "global": (0, b.SHARED_WINDOW), "const": (0, 0), "param": (0, 0), "shared": (b.SHARED_WINDOW, b.LOCAL_WINDOW),
        "shared::cta": (b.SHARED_WINDOW, b.LOCAL_WINDOW), "local": (b.LOCAL_WINDOW, 1 << 63),
    }.get(space, (None, None))  # fmt: skip
    if least is None or most is None:
        raise unknown(instruction)
    address = instruction.operands[1], "u64"
    _compute(builder, instruction, f"isspacep.{space}", lambda x: (x >= least) & (x < most), "pred", address)


def _map_shared(builder: Builder, instruction: Instruction) -> None:
    """mapa of a cluster of one block: the address itself."""
    kind = instruction.opcode[-1]
    _compute(builder, instruction, f"mapa.{kind}", lambda x: x, kind, (instruction.operands[1], kind))


def _rank(builder: Builder, instruction: Instruction) -> None:
    _compute(builder, instruction, "getctarank", lambda x: x.to("u32") & 0, "u32", (instruction.operands[1], "u64"))


def _policy(builder: Builder, instruction: Instruction) -> None:
    """createpolicy: caches change no value."""
    _compute(builder, instruction, "createpolicy", lambda x: x, "b64", (Immediate(0), "b64"))


def _logic(builder: Builder, instruction: Instruction) -> None:
    """lop3 with its table as an immediate operand."""
    _, *operands, table = instruction.operands
    if instruction.opcode != ("lop3", "b32") or not isinstance(table, Immediate):
        raise unknown(instruction)
    pairs = ((operand, "b32") for operand in operands)
    _compute(builder, instruction, f"lop3/{table.value}", logic_of_three(table.value), "b32", *pairs)


def _tensor_map(builder: Builder, instruction: Instruction) -> None:
    from fmtsim.machine.ptx.tensor_map import prepare_fence_copy, prepare_replace

    if instruction.opcode[1] not in ("replace", "cp_fenceproxy"):
        raise unknown(instruction)
    prepare = prepare_replace if instruction.opcode[1] == "replace" else prepare_fence_copy
    builder.host(instruction, prepare(instruction, builder))
