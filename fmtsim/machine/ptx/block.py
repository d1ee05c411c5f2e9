# SPDX-License-Identifier: Apache-2.0
"""The threads of one block: who runs next, memory, barriers, and what threads do together; compiled by numba.

Threads of a block run in groups of one program counter, the lowest first, so that branches that part meet again. A
group waits at a barrier or an mbarrier while others run. A row of a program is 32 integers (``program``); registers are
arrays over the threads.
"""

from typing import NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy import int32, int64, uint32, uint64

from fmtsim.cpu.runtime.jit import bits32, bits64, device, float32_of, float64_of, kernel, subroutine
from fmtsim.cpu.runtime.kernel_numbers import number
from fmtsim.machine.arrays import put
from fmtsim.machine.ptx.values import FIRST_OPERAND, LANES

COLUMNS = 32  # of a row
KIND, FUNCTION, PREDICATE, NEGATED, SIZE, COUNT, FLAGS, SPACE = range(8)
DATA = FIRST_OPERAND  # first register of loads, stores and exchanges
ADDRESS, OFFSET, ADDRESS_BITS = 20, 21, 22  # of the memory operand
TARGET = FIRST_OPERAND  # row of a branch

# What a row does
(
    COMPUTE, NOTHING, BRANCH, BRANCH_INDEX, EXIT, TRAP, BARRIER, ARRIVE, LOAD, STORE, ATOMIC, COPY, SHUFFLE, VOTE, MATCH,
    REDUCE, ELECT, ACTIVE, LOAD_MATRIX, STORE_MATRIX, MBARRIER, HOST,
) = range(22)  # fmt: skip
GENERIC, GLOBAL, SHARED, LOCAL = range(4)
SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 1 << 57  # where generic addresses of these spaces begin
SHARED_START = 1024  # a block's own shared memory begins behind what Hopper keeps for itself

# How a run of a block ends; more than FAULT is an error at ``State.row`` of ``State.thread``
DONE, CALL_HOST, FAULT, OUT_OF_RANGE, MISALIGNED, TRAPPED, DEADLOCK, RACE, BAD_BRANCH, NOT_TOGETHER = range(10)
STATUS, ROW, THREAD, PLACE, STEPS, UNDEFINED, REPEATED, ANSWERS = range(8)  # entries of State
MOST_ANSWERS = 1 << 20  # of mbarrier.test_wait in a row, before this is a deadlock

ENDED = 1 << 30  # program counter of a thread that has returned


class Memory(NamedTuple):
    """Addresses of a block's memory, and the ranges of global memory that the launch was given."""

    registers: int64
    shared: int64  # address of byte 0
    shared_bytes: int64
    local: int64
    local_bytes: int64  # of a thread
    starts: np.ndarray  # int64, of global ranges
    ends: np.ndarray
    touched: np.ndarray  # uint8: bits of float atomics already made, one byte for each 2 bytes of the ranges
    touched_starts: np.ndarray  # int64: where a range begins in ``touched``


class Threads(NamedTuple):
    """Where the threads of a block are."""

    counters: np.ndarray  # int32: rows
    waits: np.ndarray  # int32: 0, 1 + number of a barrier, or -1 for an mbarrier
    active: np.ndarray  # uint8: the group that runs
    running: np.ndarray  # uint8: of it those whose predicate holds
    arrived: np.ndarray  # int32 [32]: threads at each barrier, then how many it needs (below 0: all)


def _pointer_access(llvm_type: ir.Type, kind: types.Type, name: str):  # type: ignore[no-untyped-def]
    """Return functions that read and write a number at an address."""

    @intrinsic
    def peek(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            loaded = builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()))
            loaded.align = 1
            return loaded

        return kind(types.int64), generate

    @intrinsic
    def poke(typing_context, address, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            stored = builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            stored.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return peek, poke


peek8, poke8 = _pointer_access(ir.IntType(8), types.uint8, "8")
peek16, poke16 = _pointer_access(ir.IntType(16), types.uint16, "16")
peek32, poke32 = _pointer_access(ir.IntType(32), types.uint32, "32")
peek64, poke64 = _pointer_access(ir.IntType(64), types.uint64, "64")
peekf, pokef = _pointer_access(ir.FloatType(), types.float32, "f")


def lanes_of(function):  # type: ignore[no-untyped-def]
    """Return a kernel that applies a function of float32 to the 16 numbers at an address."""

    @kernel
    def over(source, result):  # type: ignore[no-untyped-def]
        for i in range(LANES):
            pokef(result + 4 * i, function(peekf(source + 4 * i)))
        return int64(0)

    return over


def c_address(dispatcher, arguments) -> int:  # type: ignore[no-untyped-def]
    """Return the address of a kernel, compiled for arguments of these types, as C calls it."""
    dispatcher.compile(arguments)
    compiled = dispatcher.overloads[arguments]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


@intrinsic
def call_row(typing_context, function, registers, row, mask, threads):  # type: ignore[no-untyped-def]
    """Call a compiled row: void(registers, row, mask, threads)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@device
def peek(address, size):
    """Return a number of 1, 2, 4 or 8 bytes as uint64."""
    if size == 4:
        return uint64(peek32(address))
    if size == 2:
        return uint64(peek16(address))
    if size == 8:
        return peek64(address)
    return uint64(peek8(address))


@device
def poke(address, size, value):
    """Write the low 1, 2, 4 or 8 bytes of uint64."""
    if size == 4:
        poke32(address, uint32(value))
    elif size == 2:
        poke16(address, np.uint16(value))
    elif size == 8:
        poke64(address, value)
    else:
        poke8(address, np.uint8(value))


@device
def register(memory, offset, thread, size):
    """Return a register of a thread."""
    return peek(memory.registers + offset + int64(thread) * size, size)


@device
def set_register(memory, offset, thread, size, value):
    """Write a register of a thread."""
    poke(memory.registers + offset + int64(thread) * size, size, value)


@device
def place(memory, space, address, size, thread, align):
    """Return the address of a memory operand in this process; below 0 where nothing is, or where it is not aligned."""
    if space == GENERIC:
        if address >= LOCAL_WINDOW:
            space, address = LOCAL, address - LOCAL_WINDOW
        elif address >= SHARED_WINDOW:
            space, address = SHARED, address - SHARED_WINDOW
        else:
            space = GLOBAL
    if address & (align - 1):
        return int64(-2)
    if space == GLOBAL:
        for i in range(len(memory.starts)):
            if memory.starts[i] <= address and address + size <= memory.ends[i]:
                return address
        return int64(-1)
    if space == SHARED:
        return memory.shared + address if address >= 0 and address + size <= memory.shared_bytes else int64(-1)
    if address >= 0 and address + size <= memory.local_bytes:
        return memory.local + int64(thread) * memory.local_bytes + address
    return int64(-1)


@device
def operand_address(memory, row, thread):
    """Return the address that a memory operand names."""
    size = row[ADDRESS_BITS]
    if size == 0:  # a constant
        return row[OFFSET]
    base = register(memory, row[ADDRESS], thread, size)
    address = int64(base) + row[OFFSET]
    return address if size == 8 else address & int64(0xFFFFFFFF)


@device
def fail(state, status, row, thread, address):
    """Note an error; return False."""
    state[STATUS], state[THREAD], state[PLACE] = status, thread, address
    return False


@device
def found(state, where, row, thread, address):
    """Return True if a memory operand has a place; else note what is wrong."""
    if where >= 0:
        return True
    return fail(state, OUT_OF_RANGE if where == -1 else MISALIGNED, row, thread, address)


@subroutine
def load(memory, row, running, threads, state):
    """ld: COUNT numbers of SIZE bytes each into registers of FLAGS & 15 bytes, signed ones by FLAGS & 16."""
    size, count, wide, signed = row[SIZE], row[COUNT], row[FLAGS] & 15, row[FLAGS] & 16
    space, total = row[SPACE], row[SIZE] * row[COUNT]
    for t in range(threads):
        if not running[t]:
            continue
        address = operand_address(memory, row, t)
        at = place(memory, space, address, total, t, total)
        if not found(state, at, row, t, address):
            return False
        for i in range(count):
            value = peek(at + i * size, size)
            if signed:
                shift = uint64(64 - 8 * size)
                value = uint64(int64(value << shift) >> int64(shift))
            if row[DATA + i] >= 0:
                set_register(memory, row[DATA + i], t, wide, value)
    return True


@subroutine
def store(memory, row, running, threads, state):
    """st: COUNT numbers of SIZE bytes each from registers of FLAGS & 15 bytes."""
    size, count, wide = row[SIZE], row[COUNT], row[FLAGS] & 15
    space, total = row[SPACE], row[SIZE] * row[COUNT]
    for t in range(threads):
        if running[t]:
            address = operand_address(memory, row, t)
            at = place(memory, space, address, total, t, total)
            if not found(state, at, row, t, address):
                return False
            for i in range(count):
                poke(at + i * size, size, register(memory, row[DATA + i], t, wide))
    if space == LOCAL:
        return True
    # two threads of one instruction that wrote different values to one place: only one of them is there now
    mask = (uint64(1) << uint64(8 * size)) - uint64(1) if size < 8 else ~uint64(0)
    for t in range(threads):
        if running[t]:
            address = operand_address(memory, row, t)
            at = place(memory, space, address, total, t, total)
            for i in range(count):
                if peek(at + i * size, size) != register(memory, row[DATA + i], t, wide) & mask:
                    return fail(state, RACE, row, t, address)
    return True


@subroutine
def copy(memory, row, running, threads, state):
    """cp.async: SIZE bytes from global to shared memory, at once; zeros behind the first DATA + 1 bytes of them."""
    size = row[SIZE]
    for t in range(threads):
        if not running[t]:
            continue
        count = size
        if row[DATA + 1] >= 0:
            count = min(size, int64(register(memory, row[DATA + 1], t, 4)))
        if row[FLAGS] and register(memory, row[DATA + 2], t, 1):  # ignore-src
            count = int64(0)
        target = operand_address(memory, row, t)
        to = place(memory, SHARED, target, size, t, size)
        if not found(state, to, row, t, target):
            return False
        source = int64(register(memory, row[DATA], t, 8)) + row[DATA + 3]
        at = to
        if count > 0:
            at = place(memory, GLOBAL, source, count, t, size)
            if not found(state, at, row, t, source):
                return False
        for i in range(size):
            poke8(to + i, peek8(at + i) if i < count else np.uint8(0))
    return True


(
    A_ADD, A_ADD_F32, A_ADD_F64, A_ADD_F16, A_ADD_BF16, A_MIN, A_MAX, A_MIN_S, A_MAX_S, A_AND, A_OR, A_XOR, A_EXCHANGE,
    A_COMPARE, A_INCREMENT, A_DECREMENT,
) = range(16)  # fmt: skip


@device
def _signed(value, size):
    shift = int64(64 - 8 * size)
    return (int64(value) << shift) >> shift


@device
def _flushed(x):
    return float32_of(bits32(x) & int32(-0x80000000)) if abs(x) < np.float32(2.0**-126) else x


@device
def _sum_16(kind, old, value):
    """Return the sum of two codes of 16 bits: float32 has bits enough for a second rounding to be that of the exact sum."""
    code = np.empty(1, np.uint16)
    if kind == A_ADD_F16:
        put(code, 0, number(np.uint16(old), np.float32(0.0)) + number(np.uint16(value), np.float32(0.0)))
        return uint64(code[0])
    total = float32_of(int32(uint32(old)) << int32(16)) + float32_of(int32(uint32(value)) << int32(16))
    word = uint64(uint32(bits32(total)))
    rounded = (word + uint64(0x7FFF) + ((word >> uint64(16)) & uint64(1))) >> uint64(16)
    return rounded if total == total else uint64(0x7FFF)


@device
def combined(kind, old, value, other, size, flush):
    """Return what an atomic operation leaves in memory."""
    if kind == A_ADD:
        return old + value
    if kind == A_ADD_F32:
        x, y = float32_of(int32(uint32(old))), float32_of(int32(uint32(value)))
        if flush:
            x, y = _flushed(x), _flushed(y)
        z = x + y
        z = _flushed(z) if flush else z
        return uint64(uint32(bits32(z))) if z == z else uint64(0x7FFFFFFF)
    if kind == A_ADD_F64:
        a, x = float64_of(int64(old)), float64_of(int64(value))
        total = a + x
        nan = value if x != x else old if a != a else uint64(0xFFF8000000000000)
        return uint64(bits64(total)) if total == total else nan | uint64(1 << 51)
    if kind == A_ADD_F16 or kind == A_ADD_BF16:
        total = _sum_16(kind, old & uint64(0xFFFF), value & uint64(0xFFFF))
        if size == 4:
            total |= _sum_16(kind, old >> uint64(16), value >> uint64(16)) << uint64(16)
        return total
    if kind == A_MIN:
        return min(old, value)
    if kind == A_MAX:
        return max(old, value)
    if kind == A_MIN_S:
        return old if _signed(old, size) < _signed(value, size) else value
    if kind == A_MAX_S:
        return old if _signed(old, size) > _signed(value, size) else value
    if kind == A_AND:
        return old & value
    if kind == A_OR:
        return old | value
    if kind == A_XOR:
        return old ^ value
    if kind == A_COMPARE:
        return other if old == value else old
    if kind == A_INCREMENT:
        return uint64(0) if old >= value else old + uint64(1)
    if kind == A_DECREMENT:
        return value if old == uint64(0) or old > value else old - uint64(1)
    return value  # exchange


@subroutine
def atomic(memory, row, running, threads, state):
    """atom and red: DATA is the old value (below 0: none), then COUNT operands; threads in order."""
    size, kind, space = row[SIZE], row[FUNCTION], row[SPACE]
    for t in range(threads):
        if not running[t]:
            continue
        address = operand_address(memory, row, t)
        for i in range(row[COUNT]):
            at = place(memory, space, address + i * size, size, t, size)
            if not found(state, at, row, t, address):
                return False
            if (
                A_ADD_F32 <= kind <= A_ADD_BF16 and at == address + i * size
            ):  # global: a second addition has no fixed order
                for j in range(len(memory.starts)):
                    if memory.starts[j] <= at < memory.ends[j]:
                        cell = memory.touched_starts[j] + (at - memory.starts[j]) // 2
                        state[REPEATED] += memory.touched[cell]
                        memory.touched[cell] = 1
            old = peek(at, size)
            value = register(memory, row[DATA + 4 + i], t, size)
            other = register(memory, row[DATA + 4 + i + 1], t, size) if kind == A_COMPARE else value
            poke(at, size, combined(kind, old, value, other, size, row[FLAGS] & 1))
            if row[DATA + i] >= 0:
                set_register(memory, row[DATA + i], t, size, old)
    return True


S_UP, S_DOWN, S_BUTTERFLY, S_INDEX = range(4)


@subroutine
def shuffle(memory, row, running, threads, state):
    """shfl.sync (9.7.9.6): DATA the result, a predicate (below 0: none), the source, the lane, the clamp."""
    values = np.empty(32, np.uint32)
    for first in range(0, threads, 32):
        for lane in range(32):
            values[lane] = uint32(register(memory, row[DATA + 2], first + lane, 4))
        for lane in range(32):
            t = first + lane
            if not running[t]:
                continue
            b, c = int32(register(memory, row[DATA + 3], t, 4) & 31), int32(register(memory, row[DATA + 4], t, 4))
            segment, clamp = (c >> 8) & 31, c & 31
            most, least = (lane & segment) | (clamp & ~segment), lane & segment
            kind = row[FUNCTION]
            if kind == S_UP:
                source = lane - b
                inside = source >= most
            elif kind == S_DOWN:
                source = lane + b
                inside = source <= most
            elif kind == S_BUTTERFLY:
                source = lane ^ b
                inside = source <= most
            else:
                source = least | (b & ~segment)
                inside = source <= most
            source = source if inside else lane
            if not running[first + source]:
                state[UNDEFINED] += 1
            set_register(memory, row[DATA], t, 4, uint64(values[source]))
            if row[DATA + 1] >= 0:
                set_register(memory, row[DATA + 1], t, 1, uint64(inside))
    return True


V_ALL, V_ANY, V_UNIFORM, V_BALLOT = range(4)


@subroutine
def vote(memory, row, running, threads, state):
    """vote.sync (9.7.13.6): DATA the result, the predicate, FLAGS its negation, the member mask."""
    for first in range(0, threads, 32):
        ballot, members, leader = uint32(0), uint32(0), -1
        for lane in range(32):
            if running[first + lane]:
                leader = first + lane if leader < 0 else leader
                holds = (register(memory, row[DATA + 1], first + lane, 1) != 0) ^ (row[FLAGS] != 0)
                ballot |= uint32(holds) << uint32(lane)
                members |= uint32(1) << uint32(lane)
        if leader < 0:
            continue
        members &= uint32(register(memory, row[DATA + 2], leader, 4))
        ballot &= members
        kind = row[FUNCTION]
        result = uint64(ballot)
        if kind == V_ALL:
            result = uint64(ballot == members)
        elif kind == V_ANY:
            result = uint64(ballot != 0)
        elif kind == V_UNIFORM:
            result = uint64(ballot == members or ballot == 0)
        for lane in range(32):
            if running[first + lane]:
                set_register(memory, row[DATA], first + lane, 4 if kind == V_BALLOT else 1, result)
    return True


@subroutine
def match(memory, row, running, threads, state):
    """match.sync (9.7.13.8): DATA the mask, a predicate (all) or -1, the value of SIZE bytes, the member mask."""
    for t in range(threads):
        if not running[t]:
            continue
        first, mine = t - t % 32, register(memory, row[DATA + 2], t, row[SIZE])
        members, same = uint32(0), uint32(0)
        mask = uint32(register(memory, row[DATA + 3], t, 4))
        for lane in range(32):
            bit = uint32(1) << uint32(lane)
            if running[first + lane] and mask & bit:
                members |= bit
                if register(memory, row[DATA + 2], first + lane, row[SIZE]) == mine:
                    same |= bit
        every = same == members
        if row[FLAGS]:  # match.all
            same = same if every else uint32(0)
            if row[DATA + 1] >= 0:
                set_register(memory, row[DATA + 1], t, 1, uint64(every))
        set_register(memory, row[DATA], t, 4, uint64(same))
    return True


@subroutine
def reduce(memory, row, running, threads, state):
    """redux.sync (9.7.13.9): DATA the result, the value, the member mask."""
    for first in range(0, threads, 32):
        total, begun = uint64(0), False
        for lane in range(32):
            t = first + lane
            if running[t] and (register(memory, row[DATA + 2], t, 4) >> uint64(lane)) & uint64(1):
                value = register(memory, row[DATA + 1], t, 4)
                total = combined(row[FUNCTION], total, value, value, 4, 0) if begun else value
                begun = True
        for lane in range(32):
            if running[first + lane]:
                set_register(memory, row[DATA], first + lane, 4, total)
    return True


@subroutine
def elect(memory, row, running, threads, state):
    """elect.sync: DATA the leader's lane or -1, the predicate; activemask without a predicate."""
    for first in range(0, threads, 32):
        leader, active = -1, uint32(0)
        for lane in range(32):
            if running[first + lane]:
                leader = lane if leader < 0 else leader
                active |= uint32(1) << uint32(lane)
        for lane in range(32):
            if running[first + lane]:
                if row[KIND] == ACTIVE:
                    set_register(memory, row[DATA], first + lane, 4, uint64(active))
                    continue
                if row[DATA] >= 0:
                    set_register(memory, row[DATA], first + lane, 4, uint64(leader))
                set_register(memory, row[DATA + 1], first + lane, 1, uint64(lane == leader))
    return True


@subroutine
def matrices(memory, row, running, threads, state):
    """ldmatrix and stmatrix (9.7.14.5): COUNT matrices of 8 rows of 16 bytes; lane 8 j + r names row r of matrix j.

    Lane l holds elements 2 (l % 4) and the next of row l // 4; with FLAGS those of the transposed matrix.
    """
    storing = row[KIND] == STORE_MATRIX
    for first in range(0, threads, 32):
        if not running[first]:
            continue
        for j in range(row[COUNT]):
            for lane in range(32):
                pair = register(memory, row[DATA + j], first + lane, 4) if storing else uint64(0)
                for half in range(2):
                    r, k = lane // 4, 2 * (lane % 4) + half
                    if row[FLAGS]:
                        r, k = k, r
                    t = first + 8 * j + r
                    address = operand_address(memory, row, t)
                    at = place(memory, SHARED, address, 16, t, 16)
                    if not found(state, at, row, t, address):
                        return False
                    if storing:
                        poke16(at + 2 * k, np.uint16(pair >> uint64(16 * half)))
                    else:
                        pair |= uint64(peek16(at + 2 * k)) << uint64(16 * half)
                if not storing:
                    set_register(memory, row[DATA + j], first + lane, 4, pair)
    return True


M_INIT, M_EXPECT, M_ARRIVE, M_WAIT, M_WAIT_PARITY, M_INVALIDATE = range(6)


@device
def mbarrier_settled(value):
    """Return an mbarrier whose phase ends where nothing is pending: arrivals in bits 0 to 19, the count of a phase in 20 to
    39, bytes that are expected in 40 to 62 (offset 2^22), the phase in bit 63."""
    pending, count = value & uint64(0xFFFFF), (value >> uint64(20)) & uint64(0xFFFFF)
    expected = (value >> uint64(40)) & uint64(0x7FFFFF)
    if pending == uint64(0) and expected == uint64(1 << 22):
        phase = (value >> uint64(63)) ^ uint64(1)
        return count | (count << uint64(20)) | (uint64(1 << 22) << uint64(40)) | (phase << uint64(63))
    return value


@subroutine
def mbarrier(memory, row, running, threads, state):
    """mbarrier.* (9.7.13.15): DATA the result (a state, or a predicate), DATA + 1 the count, the bytes, the state or the parity.

    Return 1 where all threads go on, 2 where threads that wait are to look again, 3 where this group has to wait.
    """
    outcome, kind = 1, row[FUNCTION]
    for t in range(threads):
        if not running[t]:
            continue
        address = operand_address(memory, row, t)
        at = place(memory, row[SPACE], address, 8, t, 8)
        if not found(state, at, row, t, address):
            return 0
        old = peek64(at)
        value = register(memory, row[DATA + 1], t, row[SIZE]) if row[DATA + 1] >= 0 else uint64(1)
        if kind == M_INIT:
            new = (uint64(1 << 22) << uint64(40)) | (value << uint64(20)) | value
        elif kind == M_WAIT or kind == M_WAIT_PARITY:
            phase = old >> uint64(63)
            awaited = value >> uint64(63) if kind == M_WAIT else value & uint64(1)
            done = phase != awaited
            if not done:
                outcome = 3
            set_register(memory, row[DATA], t, 1, uint64(done))
            continue
        else:
            new = old
            if row[FLAGS] & 1:  # expect_tx: bytes
                new += value << uint64(40)
            if kind == M_ARRIVE:
                new -= uint64(1) if row[FLAGS] & 1 else value
            if row[FLAGS] & 2:  # a phase's arrivals that are announced and made at once
                new = old
            if row[DATA] >= 0:
                set_register(memory, row[DATA], t, 8, old)
            new = mbarrier_settled(new)
        if (new ^ old) >> uint64(63) and kind != M_INIT:
            outcome = 2
        poke64(at, new)
    return outcome


@device
def _select(threads, count):
    """Choose the group of the lowest row among threads that do not wait; return its row and the next group's, or -1."""
    counters, waits = threads.counters, threads.waits
    at, following = int32(ENDED), int32(ENDED)
    for t in range(count):
        if waits[t] == 0 and counters[t] < at:
            at = counters[t]
    for t in range(count):
        chosen = waits[t] == 0 and counters[t] == at
        threads.active[t] = chosen
        if waits[t] == 0 and at < counters[t] < following:
            following = counters[t]
    return at, following


@device
def _move(threads, count, at):
    """Set the program counters of the group."""
    for t in range(count):
        if threads.active[t]:
            threads.counters[t] = at


@device
def _release(threads, count, number):
    """Let the threads go that wait at a barrier to which all have come; number below 0: look at all barriers."""
    alive = 0
    for t in range(count):
        alive += threads.counters[t] < ENDED
    for i in range(16):
        if (number < 0 or i == number) and threads.arrived[i] > 0:
            needed = threads.arrived[16 + i]
            if threads.arrived[i] >= (alive if needed < 0 else needed):
                threads.arrived[i] = 0
                for t in range(count):
                    if threads.waits[t] == 1 + i:
                        threads.waits[t] = 0


@device
def _answer(rows, threads, count, state):
    """Let mbarrier.test_wait answer no where nothing else can run; False if none asks, or they ask without end."""
    asks = False
    for t in range(count):
        if threads.waits[t] == -1 and rows[threads.counters[t]][FLAGS] & 4:
            threads.waits[t], asks = 0, True
            threads.counters[t] += 1
    state[ANSWERS] += 1
    return asks and state[ANSWERS] < MOST_ANSWERS


@subroutine
def _barrier(memory, row, threads, count, at):
    """bar.sync and bar.arrive (9.7.13.1): DATA the barrier, DATA + 1 how many threads (below 0: all that live)."""
    running, leader = threads.running, 0
    while not running[leader]:
        leader += 1
    number = int64(register(memory, row[DATA], leader, 4)) & 15
    needed = int64(register(memory, row[DATA + 1], leader, 4)) if row[DATA + 1] >= 0 else int64(-1)
    arrived = 0
    for first in range(0, count, 32):
        lanes = 0
        for t in range(first, first + 32):
            lanes += running[t]
            if running[t] and row[KIND] == BARRIER:
                threads.waits[t] = 1 + number
        arrived += 32 if lanes and needed >= 0 else lanes  # a number of threads counts whole warps
    threads.arrived[number] += arrived
    threads.arrived[16 + number] = needed
    _move(threads, count, at + 1)
    _release(threads, count, number)
    return True


@subroutine
def _branch_index(memory, row, threads, count, at, state):
    """brx.idx (9.7.12.3): DATA the index into COUNT rows of branches from row SIZE on."""
    for t in range(count):
        if threads.active[t]:
            threads.counters[t] = at + 1
        if threads.running[t]:
            choice = int64(register(memory, row[DATA], t, 4))
            if choice >= row[COUNT]:
                return fail(state, BAD_BRANCH, row, t, choice)
            threads.counters[t] = row[SIZE] + choice
    return True


@subroutine
def _together(memory, row, running, threads, state):
    """Run a row of which threads of a warp, or shared memory, are part."""
    kind = row[KIND]
    if kind == SHUFFLE:
        return shuffle(memory, row, running, threads, state)
    if kind == LOAD_MATRIX or kind == STORE_MATRIX:
        return matrices(memory, row, running, threads, state)
    if kind == ATOMIC:
        return atomic(memory, row, running, threads, state)
    if kind == VOTE:
        return vote(memory, row, running, threads, state)
    if kind == MATCH:
        return match(memory, row, running, threads, state)
    if kind == REDUCE:
        return reduce(memory, row, running, threads, state)
    return elect(memory, row, running, threads, state)


@kernel
def run_block(rows, memory, threads, count, state):
    """Run the threads of a block until all have returned, a row asks for the host, or something is wrong (``state``)."""
    active, running, counters, waits = threads.active, threads.running, threads.counters, threads.waits
    mask = int64(running.ctypes.data)
    state[STATUS] = DONE
    while state[STATUS] == DONE:
        at, following = _select(threads, count)
        if at >= ENDED and _answer(rows, threads, count, state):
            continue
        if at >= ENDED:
            for t in range(count):
                if waits[t] != 0:  # none is left to wake it
                    fail(state, DEADLOCK, rows[0], t, 0)
                    state[ROW] = counters[t]
                    break
            break
        members = 0
        for t in range(count):
            members += active[t]
        # One group runs until it parts, waits, or comes to where the next one is
        while True:
            if at >= following:
                _move(threads, count, at)
                break
            row = rows[at]
            kind = row[KIND]
            state[ROW] = at
            state[STEPS] += 1
            # 1. who runs: the group, where the predicate holds
            runs = members
            if row[PREDICATE] >= 0:
                runs = 0
                negated, base = np.uint8(row[NEGATED]), memory.registers + row[PREDICATE]
                for t in range(count):
                    holds = active[t] & (peek8(base + t) ^ negated)
                    running[t] = holds
                    runs += holds
            elif kind != COMPUTE or members < count:
                for t in range(count):
                    running[t] = active[t]
            # 2. what they do; ``parted`` where the program counters are already written
            ok, parted = True, False
            if kind == NOTHING or (runs == 0 and kind != BRANCH):
                pass
            elif kind == COMPUTE:
                address = int64(rows.ctypes.data) + at * (COLUMNS * 8)
                call_row(row[FUNCTION], memory.registers, address, int64(0) if runs == count else mask, count)
            elif kind == LOAD:
                ok = load(memory, row, running, count, state)
            elif kind == STORE:
                ok = store(memory, row, running, count, state)
            elif kind == COPY:
                ok = copy(memory, row, running, count, state)
            elif kind == BRANCH:
                if runs == members:
                    at = row[TARGET] - 1
                elif runs > 0:
                    parted = True
                    for t in range(count):
                        if active[t]:
                            counters[t] = row[TARGET] if running[t] else at + 1
            elif kind == BRANCH_INDEX:
                ok, parted = _branch_index(memory, row, threads, count, at, state), True
            elif kind == EXIT:
                parted = True
                for t in range(count):
                    if active[t]:
                        counters[t] = ENDED if running[t] else at + 1
                _release(threads, count, -1)
            elif kind == BARRIER or kind == ARRIVE:
                ok, parted = _barrier(memory, row, threads, count, at), True
            elif kind == MBARRIER:
                outcome = mbarrier(memory, row, running, count, state)
                state[ANSWERS] = int64(0) if outcome == 2 else state[ANSWERS]
                ok, parted = outcome > 0, outcome > 1
                if parted:  # 2: others look again; 3: this group waits, and looks again later
                    _move(threads, count, at + 1 if outcome == 2 else at)
                    for t in range(count):
                        if outcome == 2 and waits[t] == -1:
                            waits[t] = 0
                        elif outcome == 3 and active[t]:
                            waits[t] = -1
            elif kind == HOST:
                parted = True
                _move(threads, count, at + row[COUNT])
                state[STATUS] = CALL_HOST
            elif kind == TRAP:
                for t in range(count):
                    if running[t]:
                        ok = fail(state, TRAPPED, row, t, 0)
                        break
            else:
                ok = _together(memory, row, running, count, state)
            if parted or not ok:
                break
            at += 1
