# SPDX-License-Identifier: Apache-2.0
"""Rows of what threads do together, and of atomics."""

import re

from fmtsim.machine.ptx import block_memory, warps
from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.kernel_program import (
    SPACES,
    Builder,
    operand_name,
    space_number,
    unknown,
    vector_length,
    without_caches,
)
from fmtsim.machine.ptx.parse import Group, Instruction, Operand, Register, Symbol, width
from fmtsim.machine.ptx.values import bits


def _results(builder: Builder, row: list[int], operand: Operand) -> None:
    """Write a result of 32 bits into a row, unless it is thrown away, and a predicate beside it."""
    target, *predicates = operand.items if isinstance(operand, Group) else (operand,)
    if operand_name(target) != "_":
        row[b.DATA], _ = builder.operand(target, "b32")
    for predicate in predicates:
        row[b.DATA + 1], _ = builder.operand(predicate, "pred")


def lower_shuffle(builder: Builder, instruction: Instruction) -> None:
    """Write a row of shfl.sync."""
    if instruction.opcode[1] != "sync" or instruction.opcode[3] != "b32":
        raise unknown(instruction)
    row = builder.add(instruction, b.SHUFFLE)
    row[b.FUNCTION] = {"up": warps.S_UP, "down": warps.S_DOWN, "bfly": warps.S_BUTTERFLY, "idx": warps.S_INDEX}[
        instruction.opcode[2]
    ]
    _results(builder, row, instruction.operands[0])
    for i in range(3):
        row[b.DATA + 2 + i], _ = builder.operand(instruction.operands[1 + i], "b32")


def lower_vote(builder: Builder, instruction: Instruction) -> None:
    """Write a row of vote.sync, in both orders of its modifiers."""
    kinds = {"all": warps.V_ALL, "any": warps.V_ANY, "uni": warps.V_UNIFORM, "ballot": warps.V_BALLOT}
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


def lower_match(builder: Builder, instruction: Instruction) -> None:
    """Write a row of match.sync."""
    _, kind, sync, size = instruction.opcode
    if kind not in ("any", "all") or sync != "sync" or size not in ("b32", "b64"):
        raise unknown(instruction)
    row = builder.add(instruction, b.MATCH)
    row[b.SIZE], row[b.FLAGS] = bits(size) // 8, int(kind == "all")
    _results(builder, row, instruction.operands[0])
    row[b.DATA + 2], _ = builder.operand(instruction.operands[1], size)
    row[b.DATA + 3], _ = builder.operand(instruction.operands[2], "b32")


_ATOMS = {
    "add": block_memory.A_ADD,
    "and": block_memory.A_AND,
    "or": block_memory.A_OR,
    "xor": block_memory.A_XOR,
    "exch": block_memory.A_EXCHANGE,
    "cas": block_memory.A_COMPARE,
    "inc": block_memory.A_INCREMENT,
    "dec": block_memory.A_DECREMENT,
    "min": block_memory.A_MIN,
    "max": block_memory.A_MAX,
}


def _atom_kind(instruction: Instruction, operation: str, kind: str) -> int:
    """Return the number of an atomic operation on a type."""
    floats = {
        "f32": block_memory.A_ADD_F32,
        "f64": block_memory.A_ADD_F64,
        "f16": block_memory.A_ADD_F16,
        "bf16": block_memory.A_ADD_BF16,
        "f16x2": block_memory.A_ADD_F16,
        "bf16x2": block_memory.A_ADD_BF16,
    }
    if operation == "add" and kind in floats:
        return floats[kind]
    if operation not in _ATOMS or not re.fullmatch(r"[bus](32|64)|b16", kind) or (kind == "b16" and operation != "cas"):
        raise unknown(instruction)
    if kind[0] == "s" and operation in ("min", "max"):
        return block_memory.A_MIN_S if operation == "min" else block_memory.A_MAX_S
    return _ATOMS[operation]


def lower_redux(builder: Builder, instruction: Instruction) -> None:
    """Write a row of redux.sync."""
    if len(instruction.opcode) != 4 or instruction.opcode[3] not in ("u32", "s32", "b32"):
        raise unknown(instruction)
    row = builder.add(instruction, b.REDUCE)
    row[b.FUNCTION] = _atom_kind(instruction, instruction.opcode[2], instruction.opcode[3])
    for i in range(3):
        row[b.DATA + i], _ = builder.operand(instruction.operands[i], "b32")


def lower_elect(builder: Builder, instruction: Instruction) -> None:
    """Write a row of elect.sync."""
    _results(builder, builder.add(instruction, b.ELECT), instruction.operands[0])


def lower_active(builder: Builder, instruction: Instruction) -> None:
    """Write a row of activemask."""
    row = builder.add(instruction, b.ACTIVE)
    row[b.DATA], _ = builder.operand(instruction.operands[0], "b32")


def lower_matrix(builder: Builder, instruction: Instruction) -> None:
    """Write a row of ldmatrix and stmatrix."""
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


def lower_atomic(builder: Builder, instruction: Instruction) -> None:
    """Write a row of atom and red."""
    parts = without_caches(instruction)
    returns = parts[0] == "atom"
    operation = next((p for p in parts[1:] if p in _ATOMS), "")
    kind, count = parts[-1], vector_length(parts)
    rest = [p for p in parts[1:] if p not in SPACES and p not in (operation, kind) and not re.fullmatch(r"v[248]", p)]
    number, size = _atom_kind(instruction, operation, kind), width(kind) // 8
    if rest or count * size > 16:  # noqa: PLR2004, bytes
        raise unknown(instruction)
    operands = list(instruction.operands)
    old = operands.pop(0) if returns else Group(())
    olds = old.items if isinstance(old, Group) else (old,)
    values = [
        item for operand in operands[1:] for item in (operand.items if isinstance(operand, Group) else (operand,))
    ]
    values = values[: count + (operation == "cas")]  # behind them a cache policy
    if count == 8 and set(olds[:4]) & set(values[4:]) - {Symbol("_")}:  # noqa: PLR2004
        raise unknown(instruction)  # the first four's old numbers would be the last four's addends
    for first in range(0, count, 4):
        row = builder.add(instruction, b.ATOMIC)
        row[b.FUNCTION], row[b.SIZE], row[b.COUNT], row[b.SPACE] = number, size, min(count, 4), space_number(parts)
        # a global sum of float32 flushes subnormal numbers
        row[b.FLAGS] = int(kind == "f32" and row[b.SPACE] != b.SHARED)
        for i, item in enumerate(olds[first : first + 4]):
            if operand_name(item) != "_":
                row[b.DATA + i], _ = builder.operand(item, kind)
        builder.memory(row, operands[0])
        row[b.OFFSET] += first * size
        chosen = values if operation == "cas" else values[first : first + 4]  # cas has two of one number
        for i, item in enumerate(chosen):
            row[b.DATA + 4 + i], _ = builder.operand(item, kind)
        builder.program.has_atomics |= row[b.SPACE] != b.SHARED
