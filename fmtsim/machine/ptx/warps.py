# SPDX-License-Identifier: Apache-2.0
"""What the threads of a warp do together: shuffles, votes, matches, sums, matrices of 8 x 8; compiled by numba."""

import numpy as np
from numpy import int32, uint32, uint64

from fmtsim.cpu.runtime.jit import subroutine
from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.block_memory import (
    combined,
    found,
    is_shared,
    note_shared,
    operand_address,
    peek16,
    place,
    poke16,
    register,
    set_register,
)

S_UP, S_DOWN, S_BUTTERFLY, S_INDEX = range(4)


@subroutine
def shuffle(memory, row, running, threads, state):
    """shfl.sync (9.7.9.6): DATA the result, a predicate (below 0: none), the source, the lane, the clamp."""
    values = np.empty(32, np.uint32)
    for first in range(0, threads, 32):
        for lane in range(32):
            values[lane] = uint32(register(memory, row[b.DATA + 2], first + lane, 4))
        for lane in range(32):
            t = first + lane
            if not running[t]:
                continue
            by, c = int32(register(memory, row[b.DATA + 3], t, 4) & 31), int32(register(memory, row[b.DATA + 4], t, 4))
            segment, clamp = (c >> 8) & 31, c & 31
            most, least = (lane & segment) | (clamp & ~segment), lane & segment
            kind = row[b.FUNCTION]
            if kind == S_UP:
                source = lane - by
                inside = source >= most
            elif kind == S_DOWN:
                source = lane + by
                inside = source <= most
            elif kind == S_BUTTERFLY:
                source = lane ^ by
                inside = source <= most
            else:
                source = least | (by & ~segment)
                inside = source <= most
            source = source if inside else lane
            if not running[first + source]:
                state[b.UNDEFINED] += 1
            set_register(memory, row[b.DATA], t, 4, uint64(values[source]))
            if row[b.DATA + 1] >= 0:
                set_register(memory, row[b.DATA + 1], t, 1, uint64(inside))
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
                holds = (register(memory, row[b.DATA + 1], first + lane, 1) != 0) ^ (row[b.FLAGS] != 0)
                ballot |= uint32(holds) << uint32(lane)
                members |= uint32(1) << uint32(lane)
        if leader < 0:
            continue
        members &= uint32(register(memory, row[b.DATA + 2], leader, 4))
        ballot &= members
        kind = row[b.FUNCTION]
        result = uint64(ballot)
        if kind == V_ALL:
            result = uint64(ballot == members)
        elif kind == V_ANY:
            result = uint64(ballot != 0)
        elif kind == V_UNIFORM:
            result = uint64(ballot == members or ballot == 0)
        for lane in range(32):
            if running[first + lane]:
                set_register(memory, row[b.DATA], first + lane, 4 if kind == V_BALLOT else 1, result)
    return True


@subroutine
def match(memory, row, running, threads, state):
    """match.sync (9.7.13.8): DATA the mask, a predicate (all) or -1, the value of SIZE bytes, the member mask."""
    for t in range(threads):
        if not running[t]:
            continue
        first, mine = t - t % 32, register(memory, row[b.DATA + 2], t, row[b.SIZE])
        members, same = uint32(0), uint32(0)
        mask = uint32(register(memory, row[b.DATA + 3], t, 4))
        for lane in range(32):
            bit = uint32(1) << uint32(lane)
            if running[first + lane] and mask & bit:
                members |= bit
                if register(memory, row[b.DATA + 2], first + lane, row[b.SIZE]) == mine:
                    same |= bit
        every = same == members
        if row[b.FLAGS]:  # match.all
            same = same if every else uint32(0)
            if row[b.DATA + 1] >= 0:
                set_register(memory, row[b.DATA + 1], t, 1, uint64(every))
        set_register(memory, row[b.DATA], t, 4, uint64(same))
    return True


@subroutine
def reduce(memory, row, running, threads, state):
    """redux.sync (9.7.13.9): DATA the result, the value, the member mask."""
    for first in range(0, threads, 32):
        total, begun = uint64(0), False
        for lane in range(32):
            t = first + lane
            if running[t] and (register(memory, row[b.DATA + 2], t, 4) >> uint64(lane)) & uint64(1):
                value = register(memory, row[b.DATA + 1], t, 4)
                total = combined(row[b.FUNCTION], total, value, value, 4, 0) if begun else value
                begun = True
        for lane in range(32):
            if running[first + lane]:
                set_register(memory, row[b.DATA], first + lane, 4, total)
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
                if row[b.KIND] == b.ACTIVE:
                    set_register(memory, row[b.DATA], first + lane, 4, uint64(active))
                    continue
                if row[b.DATA] >= 0:
                    set_register(memory, row[b.DATA], first + lane, 4, uint64(leader))
                set_register(memory, row[b.DATA + 1], first + lane, 1, uint64(lane == leader))
    return True


@subroutine
def matrices(memory, row, running, threads, state):
    """ldmatrix and stmatrix (9.7.14.5): COUNT matrices of 8 rows of 16 bytes; lane 8 j + r names row r of matrix j.

    Lane l holds elements 2 (l % 4) and the next of row l // 4; with FLAGS those of the transposed matrix.
    """
    storing = row[b.KIND] == b.STORE_MATRIX
    for first in range(0, threads, 32):
        if not running[first]:
            continue
        for j in range(row[b.COUNT]):
            for lane in range(32):
                pair = register(memory, row[b.DATA + j], first + lane, 4) if storing else uint64(0)
                for half in range(2):
                    r, k = lane // 4, 2 * (lane % 4) + half
                    if row[b.FLAGS]:
                        r, k = k, r
                    t = first + 8 * j + r
                    address = operand_address(memory, row, t)
                    at = place(memory, b.SHARED, address, 16, t, 16)
                    if not found(state, at, row, t, address):
                        return False
                    value = np.uint16(pair >> uint64(16 * half))
                    if is_shared(memory, at) and (storing or k == 0):
                        writes = 0 if not storing else 2 if peek16(at + 2 * k) == value else 1
                        note_shared(
                            memory, state, at + 2 * k, 2 if storing else 16, first >> 5, state[b.TIME], writes, False
                        )
                    if storing:
                        poke16(at + 2 * k, value)
                    else:
                        pair |= uint64(peek16(at + 2 * k)) << uint64(16 * half)
                if not storing:
                    set_register(memory, row[b.DATA + j], first + lane, 4, pair)
    return True
