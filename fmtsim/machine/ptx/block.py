# SPDX-License-Identifier: Apache-2.0
"""The threads of one block: who runs next, memory, barriers, and what threads do together; compiled by numba.

Threads of a block run in groups of one program counter, the lowest first, so that branches that part meet again. A
group waits at a barrier or an mbarrier while others run. A row of a program is 32 integers (``program``); registers are
arrays over the threads.
"""

import numpy as np
from numpy import int32, int64, uint64

from fmtsim.cpu.runtime.jit import device, kernel, subroutine
from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.block_memory import (
    atomic,
    call_row,
    copy,
    count_at,
    fail,
    found,
    learn,
    load,
    meet,
    operand_address,
    peek8,
    peek64,
    place,
    poke64,
    publish,
    register,
    set_register,
    store,
)
from fmtsim.machine.ptx.warps import elect, match, matrices, reduce, shuffle, vote

M_INIT, M_EXPECT, M_ARRIVE, M_WAIT, M_WAIT_PARITY, M_INVALIDATE = range(6)


@device
def mbarrier_settled(value):
    """Return an mbarrier whose phase ends where nothing is pending.

    Bits 0 to 19: arrivals; 20 to 39: the count of a phase; 40 to 62: bytes that are expected, plus 2^22; 63: the phase.
    """
    pending, count = value & uint64(0xFFFFF), (value >> uint64(20)) & uint64(0xFFFFF)
    expected = (value >> uint64(40)) & uint64(0x7FFFFF)
    if pending == uint64(0) and expected == uint64(1 << 22):
        phase = (value >> uint64(63)) ^ uint64(1)
        return count | (count << uint64(20)) | (uint64(1 << 22) << uint64(40)) | (phase << uint64(63))
    return value


@subroutine
def mbarrier(memory, row, running, threads, state):
    """mbarrier.* (9.7.13.15): DATA the result (a state, a predicate), DATA + 1 the count, bytes, state or parity.

    Return 1 where all threads go on, 2 where threads that wait are to look again, 3 where this group has to wait.
    """
    outcome, kind, met = 1, row[b.FUNCTION], -1
    for t in range(threads):
        if not running[t]:
            continue
        if met != t >> 5:
            met = t >> 5
            meet(memory, state, met)
        address = operand_address(memory, row, t)
        at = place(memory, row[b.SPACE], address, 8, t, 8)
        if not found(state, at, row, t, address):
            return 0
        old = peek64(at)
        value = register(memory, row[b.DATA + 1], t, row[b.SIZE]) if row[b.DATA + 1] >= 0 else uint64(1)
        if kind == M_INIT:
            new = (uint64(1 << 22) << uint64(40)) | (value << uint64(20)) | value
        elif kind in (M_WAIT, M_WAIT_PARITY):
            phase = old >> uint64(63)
            awaited = value >> uint64(63) if kind == M_WAIT else value & uint64(1)
            done = phase != awaited
            if not done:
                outcome = 3
            set_register(memory, row[b.DATA], t, 1, uint64(done))
            continue
        else:
            new = old
            if row[b.FLAGS] & 1:  # expect_tx: bytes
                new += value << uint64(40)
            if kind == M_ARRIVE:
                new -= uint64(1) if row[b.FLAGS] & 1 else value
            if row[b.FLAGS] & 2:  # a phase's arrivals that are announced and made at once
                new = old
            if row[b.DATA] >= 0:
                set_register(memory, row[b.DATA], t, 8, old)
            new = mbarrier_settled(new)
        if (new ^ old) >> uint64(63) and kind != M_INIT:
            outcome = 2
        poke64(at, new)
    return outcome


@device
def _select(threads, count):
    """Choose the group of the lowest row among threads that do not wait; return its row and the next group's, or -1."""
    counters, waits = threads.counters, threads.waits
    at, following = int32(b.ENDED), int32(b.ENDED)
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
def _release(memory, threads, count, number):
    """Let the threads go that wait at a barrier to which all have come; number below 0: look at all barriers."""
    alive = 0
    for t in range(count):
        alive += threads.counters[t] < b.ENDED
    for i in range(16):
        if (number < 0 or i == number) and threads.arrived[i] > 0:
            needed = threads.arrived[16 + i]
            if threads.arrived[i] >= (alive if needed < 0 else needed):
                threads.arrived[i] = 0
                met, warps = -1, count // 32
                for t in range(count):
                    if threads.waits[t] == 1 + i:
                        threads.waits[t] = 0
                        if met != t >> 5:
                            met = t >> 5
                            learn(memory.known, met, warps + i)


@device
def _answer(rows, threads, count, state):
    """Let mbarrier.test_wait answer no where nothing else can run; False if none asks, or they ask without end."""
    asks = False
    for t in range(count):
        if threads.waits[t] == -1 and rows[threads.counters[t]][b.FLAGS] & 4:
            threads.waits[t], asks = 0, True
            threads.counters[t] += 1
    state[b.ANSWERS] += 1
    return asks and state[b.ANSWERS] < b.MOST_ANSWERS


@subroutine
def _barrier(memory, rows, threads, count, at, state):
    """bar.sync and bar.arrive (9.7.13.1): DATA the barrier, DATA + 1 how many threads (below 0: all that live)."""
    row, running, leader = rows[at], threads.running, 0
    while not running[leader]:
        leader += 1
    number = int64(register(memory, row[b.DATA], leader, 4)) & 15
    needed = int64(register(memory, row[b.DATA + 1], leader, 4)) if row[b.DATA + 1] >= 0 else int64(-1)
    arrived = 0
    for first in range(0, count, 32):
        lanes = 0
        for t in range(first, first + 32):
            lanes += running[t]
            if running[t] and row[b.KIND] == b.BARRIER:
                threads.waits[t] = 1 + number
        arrived += 32 if lanes and needed >= 0 else lanes  # a number of threads counts whole warps
        if lanes:
            publish(memory, state, first >> 5, count // 32 + number)
            for t in range(first, first + 32):  # a warp's threads may come one by one, but to one instruction
                if threads.waits[t] == 1 + number and not running[t] and threads.counters[t] != at + 1:
                    count_at(state, b.SKIPPED)
                    break
    threads.arrived[number] += arrived
    threads.arrived[16 + number] = needed
    _move(threads, count, at + 1)
    for t in range(count):  # threads that only have to return have ended
        stands = min(threads.counters[t], len(rows) - 1)
        if threads.waits[t] == 0 and rows[stands, b.KIND] == b.EXIT and rows[stands, b.PREDICATE] < 0:
            threads.counters[t] = b.ENDED
    _release(memory, threads, count, number)
    return True


@subroutine
def _branch_index(memory, row, threads, count, at, state):
    """brx.idx (9.7.12.3): DATA the index into COUNT rows of branches from row SIZE on."""
    for t in range(count):
        if threads.active[t]:
            threads.counters[t] = at + 1
        if threads.running[t]:
            choice = int64(register(memory, row[b.DATA], t, 4))
            if choice >= row[b.COUNT]:
                return fail(state, b.BAD_BRANCH, row, t, choice)
            threads.counters[t] = row[b.SIZE] + choice
    return True


@subroutine
def _together(memory, row, running, threads, state):
    """Run a row of which threads of a warp, or shared memory, are part."""
    kind = row[b.KIND]
    if kind == b.SHUFFLE:
        return shuffle(memory, row, running, threads, state)
    if kind in (b.LOAD_MATRIX, b.STORE_MATRIX):
        return matrices(memory, row, running, threads, state)
    if kind == b.ATOMIC:
        return atomic(memory, row, running, threads, state)
    if kind == b.VOTE:
        return vote(memory, row, running, threads, state)
    if kind == b.MATCH:
        return match(memory, row, running, threads, state)
    if kind == b.REDUCE:
        return reduce(memory, row, running, threads, state)
    return elect(memory, row, running, threads, state)


@kernel
def run_block(rows, memory, threads, count, state):
    """Run a block until all threads have returned, a row asks for the host, or something is wrong (``state``)."""
    active, running, counters, waits = threads.active, threads.running, threads.counters, threads.waits
    mask = int64(running.ctypes.data)
    state[b.STATUS] = b.DONE
    while state[b.STATUS] == b.DONE:
        at, following = _select(threads, count)
        if at >= b.ENDED and _answer(rows, threads, count, state):
            continue
        if at >= b.ENDED:
            for t in range(count):
                if waits[t] != 0:  # none is left to wake it
                    fail(state, b.DEADLOCK, rows[0], t, 0)
                    state[b.ROW] = counters[t]
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
            kind = row[b.KIND]
            state[b.ROW] = at
            state[b.STEPS] += 1
            # 1. who runs: the group, where the predicate holds
            runs = members
            if row[b.PREDICATE] >= 0:
                runs = 0
                negated, base = np.uint8(row[b.NEGATED]), memory.registers + row[b.PREDICATE]
                for t in range(count):
                    holds = active[t] & (peek8(base + t) ^ negated)
                    running[t] = holds
                    runs += holds
            elif kind != b.COMPUTE or members < count:
                for t in range(count):
                    running[t] = active[t]
            # 2. what they do; ``parted`` where the program counters are already written
            ok, parted = True, False
            if kind == b.NOTHING or (runs == 0 and kind != b.BRANCH):
                pass
            elif kind == b.COMPUTE:
                address = int64(rows.ctypes.data) + at * (b.COLUMNS * 8)
                call_row(row[b.FUNCTION], memory.registers, address, int64(0) if runs == count else mask, count)
            elif kind == b.LOAD:
                ok = load(memory, row, running, count, state)
            elif kind == b.STORE:
                ok = store(memory, row, running, count, state)
            elif kind == b.COPY:
                ok = copy(memory, row, running, count, state)
            elif kind == b.BRANCH:
                if runs == members:
                    at = row[b.TARGET] - 1
                elif runs > 0:
                    parted = True
                    for t in range(count):
                        if active[t]:
                            counters[t] = row[b.TARGET] if running[t] else at + 1
            elif kind == b.BRANCH_INDEX:
                ok, parted = _branch_index(memory, row, threads, count, at, state), True
            elif kind == b.EXIT:
                parted = True
                for i in range(16):  # others wait at a barrier of all threads, to which these did not come
                    if threads.arrived[i] > 0 and threads.arrived[16 + i] < 0:
                        count_at(state, b.SKIPPED)
                for t in range(count):
                    if active[t]:
                        counters[t] = b.ENDED if running[t] else at + 1
                _release(memory, threads, count, -1)
            elif kind in (b.BARRIER, b.ARRIVE):
                ok, parted = _barrier(memory, rows, threads, count, at, state), True
            elif kind == b.MBARRIER:
                outcome = mbarrier(memory, row, running, count, state)
                state[b.ANSWERS] = int64(0) if outcome == 2 else state[b.ANSWERS]
                ok, parted = outcome > 0, outcome > 1
                if parted:  # 2: others look again; 3: this group waits, and looks again later
                    _move(threads, count, at + 1 if outcome == 2 else at)
                    for t in range(count):
                        if outcome == 2 and waits[t] == -1:
                            waits[t] = 0
                        elif outcome == 3 and active[t]:
                            waits[t] = -1
            elif kind == b.HOST:
                parted = True
                _move(threads, count, at + row[b.COUNT])
                state[b.STATUS] = b.CALL_HOST
            elif kind == b.FENCE:
                for t in range(0, count, 32):
                    for i in range(t, t + 32):
                        if running[i]:
                            if row[b.FLAGS]:  # what waits learns, what arrives tells
                                learn(memory.known, t >> 5, len(memory.known) - 1)
                            else:
                                publish(memory, state, t >> 5, len(memory.known) - 1)
                            break
            elif kind == b.TRAP:
                for t in range(count):
                    if running[t]:
                        ok = fail(state, b.TRAPPED, row, t, 0)
                        break
            else:
                ok = _together(memory, row, running, count, state)
            if parted or not ok:
                break
            at += 1
