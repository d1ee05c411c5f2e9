# SPDX-License-Identifier: Apache-2.0
"""Memory of a block: addresses of operands, loads and stores, copies, atomics; compiled by numba."""

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy import int32, int64, uint32, uint64

from fmtsim.cpu.runtime.jit import bits32, bits64, borrowing, device, float32_of, float64_of, kernel, subroutine
from fmtsim.cpu.runtime.kernel_numbers import number
from fmtsim.machine.arrays import put
from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.values import LANES


def _pointer_access(llvm_type: ir.Type, kind: types.Type):  # type: ignore[no-untyped-def]
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


peek8, poke8 = _pointer_access(ir.IntType(8), types.uint8)
peek16, poke16 = _pointer_access(ir.IntType(16), types.uint16)
peek32, poke32 = _pointer_access(ir.IntType(32), types.uint32)
peek64, poke64 = _pointer_access(ir.IntType(64), types.uint64)
peekf, pokef = _pointer_access(ir.FloatType(), types.float32)


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
    if space == b.GENERIC:
        if address >= b.LOCAL_WINDOW:
            space, address = b.LOCAL, address - b.LOCAL_WINDOW
        elif address >= b.SHARED_WINDOW:
            space, address = b.SHARED, address - b.SHARED_WINDOW
        else:
            space = b.GLOBAL
    if address & (align - 1):
        return int64(-2)
    if space == b.GLOBAL:
        for i in range(len(memory.starts)):
            if memory.starts[i] <= address and address + size <= memory.ends[i]:
                return address
        return int64(-1)
    if space == b.SHARED:
        return memory.shared + address if address >= 0 and address + size <= memory.shared_bytes else int64(-1)
    if address >= 0 and address + size <= memory.local_bytes:
        return memory.local + int64(thread) * memory.local_bytes + address
    return int64(-1)


@device
def operand_address(memory, row, thread):
    """Return the address that a memory operand names."""
    size = row[b.ADDRESS_BITS]
    if size == 0:  # a constant
        return row[b.OFFSET]
    base = register(memory, row[b.ADDRESS], thread, size)
    address = int64(base) + row[b.OFFSET]
    return address if size == 8 else address & int64(0xFFFFFFFF)


@device
def fail(state, status, row, thread, address):
    """Note an error; return False."""
    state[b.STATUS], state[b.THREAD], state[b.PLACE] = status, thread, address
    return False


@device
def found(state, where, row, thread, address):
    """Return True if a memory operand has a place; else note what is wrong."""
    if where >= 0:
        return True
    return fail(state, b.OUT_OF_RANGE if where == -1 else b.MISALIGNED, row, thread, address)


@device
def note_access(memory, state, address, size, value, writes):
    """Count accesses to elements that another block wrote: on a GPU blocks have no order.

    To write what is there already is none. Kernels with atomics are left out: they may put their blocks in order.
    """
    for i in range(len(memory.starts)):
        if memory.starts[i] <= address < memory.ends[i]:
            item = memory.item_sizes[i]
            first = memory.writer_starts[i] + (address - memory.starts[i]) // item
            last = memory.writer_starts[i] + (address + size - 1 - memory.starts[i]) // item
            for cell in range(first, last + 1):
                writer = memory.writers[cell]
                if writer != 0 and writer != state[b.BLOCK] and (not writes or peek(address, size) != value):
                    state[b.SHARES] += 1
                if writes:
                    memory.writers[cell] = state[b.BLOCK]
            return


@borrowing
def count_at(state, what):
    """Count what makes a launch uncertain, and keep the first row that did."""
    state[what] += 1
    if state[b.FIRST + what - b.RACES] == 0:
        state[b.FIRST + what - b.RACES] = 1 + state[b.ROW]


@borrowing
def learn(known, to, source):
    """Let a row of ``known`` know what another knows."""
    for v in range(known.shape[1]):
        known[to, v] = max(known[to, v], known[source, v])


@borrowing
def publish(memory, state, warp, place):
    """Let a place (a barrier, or the last) know a warp and all that this knows; what the warp does next is later.

    Return the time up to which the warp is known there.
    """
    learn(memory.known, place, warp)
    time = state[b.TIME]
    memory.known[place, warp] = time
    state[b.TIME] = time + 1
    return time


@borrowing
def meet(memory, state, warp):
    """Order a warp behind all that published where mbarriers, atomics and flags do: any of them may have told it."""
    last = len(memory.known) - 1
    learn(memory.known, warp, last)
    return publish(memory, state, warp, last)


@borrowing
def note_shared(memory, state, at, size, warp, time, writes, strong):
    """Count reads of shared memory that nobody wrote, and accesses that race with another warp's (``Memory.pieces``).

    Accesses of two warps race where no barrier, and nothing else that orders, is between; strong ones do not race with
    each other. To write what is there already is no race. ``writes``: 0 reads, 1 writes, 2 writes what is there.
    """
    first = (at - memory.shared) >> memory.piece_shift
    for piece in range(first, ((at + size - 1 - memory.shared) >> memory.piece_shift) + 1):
        i = uint64(piece)  # numba asks whether signed ones are below 0
        writer, reader = memory.pieces[i, 0], memory.pieces[i, 1]
        other = uint64(writer & 63)
        free = int64(other) == warp or writer >> 7 <= memory.known[uint64(warp), other]
        free = free or (strong and writer & (b.STRONG << 1) != 0)
        if writer == 0 and writes == 0:
            count_at(state, b.UNWRITTEN)
            memory.pieces[i, 0] = 1
        if writes == 2 and writer != 0:
            memory.pieces[i, 0] = writer if free else 1  # two warps wrote one value: it is there for both
            continue
        if not free:
            count_at(state, b.RACES)
        if writes == 0:
            if not strong:
                mask = int64(1) << warp
                seen = reader | mask if reader >> 32 == time else time << 32 | mask
                if seen != reader:
                    memory.pieces[i, 1] = seen
            continue
        mask = reader & int64(0xFFFFFFFF) & ~(int64(1) << warp)
        if mask != 0:
            for v in range(memory.known.shape[1] - 1):
                if (mask >> v) & 1 and reader >> 32 > memory.known[warp, v]:
                    count_at(state, b.RACES)
                    break
        memory.pieces[i, 0] = time << 7 | (b.STRONG << 1 if strong else 0) | warp


@borrowing
def is_shared(memory, at):
    """Return True for an address of this process that lies in the block's shared memory, if accesses are noted."""
    return len(memory.pieces) > 0 and memory.shared <= at < memory.shared + memory.shared_bytes


@borrowing
def load(memory, row, running, threads, state):
    """ld: COUNT numbers of SIZE bytes each into registers of FLAGS & 15 bytes, signed ones by FLAGS & 16."""
    size, count, wide, signed = row[b.SIZE], row[b.COUNT], row[b.FLAGS] & 15, row[b.FLAGS] & 16
    notes = len(memory.writers) > 0 and row[b.SPACE] <= b.GLOBAL
    space, total = row[b.SPACE], row[b.SIZE] * row[b.COUNT]
    strong, met, time, last = row[b.FLAGS] & b.STRONG != 0, int64(-1), state[b.TIME], int64(-1)
    for t in range(threads):
        if not running[t]:
            continue
        address = operand_address(memory, row, t)
        at = place(memory, space, address, total, t, total)
        if not found(state, at, row, t, address):
            return False
        if at != last or met != t >> 5:  # else as the thread before it
            if strong and met != t >> 5:
                time = meet(memory, state, t >> 5)
            met, last = t >> 5, at
            if is_shared(memory, at):
                note_shared(memory, state, at, total, met, time, 0, strong)
        for i in range(count):
            value = peek(at + i * size, size)
            if notes and at == address:
                note_access(memory, state, at + i * size, size, value, False)
            if signed:
                shift = uint64(64 - 8 * size)
                value = uint64(int64(value << shift) >> int64(shift))
            if row[b.DATA + i] >= 0:
                set_register(memory, row[b.DATA + i], t, wide, value)
    return True


@borrowing
def store(memory, row, running, threads, state):
    """st: COUNT numbers of SIZE bytes each from registers of FLAGS & 15 bytes."""
    size, count, wide = row[b.SIZE], row[b.COUNT], row[b.FLAGS] & 15
    space, total = row[b.SPACE], row[b.SIZE] * row[b.COUNT]
    notes = len(memory.writers) > 0 and space <= b.GLOBAL
    mask = (uint64(1) << uint64(8 * size)) - uint64(1) if size < 8 else ~uint64(0)
    strong, met, time = row[b.FLAGS] & b.STRONG, -1, state[b.TIME]
    for t in range(threads):
        if running[t]:
            address = operand_address(memory, row, t)
            at = place(memory, space, address, total, t, total)
            if not found(state, at, row, t, address):
                return False
            if strong and met != t >> 5:
                met, time = t >> 5, meet(memory, state, t >> 5)
            shared = is_shared(memory, at)
            for i in range(count):
                value = register(memory, row[b.DATA + i], t, wide) & mask
                if notes and at == address:
                    note_access(memory, state, at + i * size, size, value, True)
                if shared:
                    same = 2 if peek(at + i * size, size) == value else 1
                    note_shared(memory, state, at + i * size, size, t >> 5, time, same, strong != 0)
                poke(at + i * size, size, value)
    if space == b.LOCAL:
        return True
    # two threads of one instruction that wrote different values to one place: the last one's is there now. Compilers do
    # so in shared memory, where threads computed one number in two orders
    for t in range(threads):
        if running[t]:
            address = operand_address(memory, row, t)
            at = place(memory, space, address, total, t, total)
            for i in range(count):
                if peek(at + i * size, size) != register(memory, row[b.DATA + i], t, wide) & mask:
                    if at == address:
                        return fail(state, b.RACE, row, t, address)
                    state[b.CLASHES] += 1
    return True


@subroutine
def copy(memory, row, running, threads, state):
    """cp.async: SIZE bytes from global to shared memory, at once; zeros behind the first DATA + 1 bytes of them."""
    size = row[b.SIZE]
    for t in range(threads):
        if not running[t]:
            continue
        count = size
        if row[b.DATA + 1] >= 0:
            count = min(size, int64(register(memory, row[b.DATA + 1], t, 4)))
        if row[b.FLAGS] and register(memory, row[b.DATA + 2], t, 1):  # ignore-src
            count = int64(0)
        target = operand_address(memory, row, t)
        to = place(memory, b.SHARED, target, size, t, size)
        if not found(state, to, row, t, target):
            return False
        source = int64(register(memory, row[b.DATA], t, 8)) + row[b.DATA + 3]
        at = to
        if count > 0:
            at = place(memory, b.GLOBAL, source, count, t, size)
            if not found(state, at, row, t, source):
                return False
        writes = 2
        for i in range(size):
            value = peek8(at + i) if i < count else np.uint8(0)
            if value != peek8(to + i):
                writes = 1
            poke8(to + i, value)
        if is_shared(memory, to):
            note_shared(memory, state, to, size, t >> 5, state[b.TIME], writes, False)
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
    """Return the sum of two codes of 16 bits: in float32 first, whose 24 bits make the second rounding right."""
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
    if kind in (A_ADD_F16, A_ADD_BF16):
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
    size, kind, space = row[b.SIZE], row[b.FUNCTION], row[b.SPACE]
    met, time = -1, state[b.TIME]
    for t in range(threads):
        if not running[t]:
            continue
        if met != t >> 5:
            met, time = t >> 5, meet(memory, state, t >> 5)
        address = operand_address(memory, row, t)
        for i in range(row[b.COUNT]):
            at = place(memory, space, address + i * size, size, t, size)
            if not found(state, at, row, t, address):
                return False
            if (
                A_ADD_F32 <= kind <= A_ADD_BF16 and at == address + i * size
            ):  # global: a second addition has no fixed order
                for j in range(len(memory.starts)):
                    if memory.starts[j] <= at < memory.ends[j]:
                        cell = memory.touched_starts[j] + (at - memory.starts[j]) // 2
                        state[b.REPEATED] += memory.touched[cell]
                        memory.touched[cell] = 1
            if is_shared(memory, at):
                note_shared(memory, state, at, size, t >> 5, time, 0, True)
                note_shared(memory, state, at, size, t >> 5, time, 1, True)
            old = peek(at, size)
            value = register(memory, row[b.DATA + 4 + i], t, size)
            other = register(memory, row[b.DATA + 4 + i + 1], t, size) if kind == A_COMPARE else value
            poke(at, size, combined(kind, old, value, other, size, row[b.FLAGS] & 1))
            if row[b.DATA + i] >= 0:
                set_register(memory, row[b.DATA + i], t, size, old)
    return True
