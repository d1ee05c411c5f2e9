# SPDX-License-Identifier: Apache-2.0
"""What a row of a program holds and does, and the records of a block, as compiled code reads them."""

from typing import NamedTuple

import numpy as np
from numpy import int64

from fmtsim.machine.ptx.values import FIRST_OPERAND

COLUMNS = 32  # of a row
KIND, FUNCTION, PREDICATE, NEGATED, SIZE, COUNT, FLAGS, SPACE = range(8)
DATA = FIRST_OPERAND  # first register of loads, stores and exchanges
ADDRESS, OFFSET, ADDRESS_BITS = 20, 21, 22  # of the memory operand
TARGET = FIRST_OPERAND  # row of a branch

# What a row does
(
    COMPUTE,
    NOTHING,
    BRANCH,
    BRANCH_INDEX,
    EXIT,
    TRAP,
    BARRIER,
    ARRIVE,
    LOAD,
    STORE,
    ATOMIC,
    COPY,
    SHUFFLE,
    VOTE,
    MATCH,
    REDUCE,
    ELECT,
    ACTIVE,
    LOAD_MATRIX,
    STORE_MATRIX,
    MBARRIER,
    HOST,
    FENCE,
) = range(23)
GENERIC, GLOBAL, SHARED, LOCAL = range(4)
SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 1 << 57  # where generic addresses of these spaces begin
SHARED_START = 1024  # a block's own shared memory begins behind what Hopper keeps for itself

# How a run of a block ends; more than FAULT is an error at ``State.row`` of ``State.thread``
DONE, CALL_HOST, FAULT, OUT_OF_RANGE, MISALIGNED, TRAPPED, DEADLOCK, RACE, BAD_BRANCH = range(9)
(
    STATUS, ROW, THREAD, PLACE, STEPS, UNDEFINED, REPEATED, ANSWERS, BLOCK, SHARES, CLASHES, TIME, RACES, UNWRITTEN,
    SKIPPED, FIRST,
) = range(16)  # fmt: skip
# entries of State; from FIRST on 1 + the row that first counted in RACES, UNWRITTEN and SKIPPED
STATES = FIRST + SKIPPED - RACES + 1
STRONG = 32  # of FLAGS: a load or store that may put warps in order, as atomics do
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
    writers: np.ndarray  # int32: 1 + the block that wrote an element last, 0 of none; empty where none is noted
    writer_starts: np.ndarray  # int64: where a range begins in ``writers``
    item_sizes: np.ndarray  # int64: bytes of an element of a range
    # int64 [pieces, 2] of shared memory: who wrote a piece last, as time << 7 | STRONG << 1 where strong | warp (the
    # copy engine is the number behind the warps; 0: nobody), and who read it last, as time << 32 | mask of warps
    pieces: np.ndarray
    piece_shift: int64  # a piece has 2 ** piece_shift bytes
    # int64 [warps + 17, warps + 1]: up to which time a warp, a barrier (16), or whatever else orders knows the others
    known: np.ndarray


class Threads(NamedTuple):
    """Where the threads of a block are."""

    counters: np.ndarray  # int32: rows
    waits: np.ndarray  # int32: 0, 1 + number of a barrier, or -1 for an mbarrier
    active: np.ndarray  # uint8: the group that runs
    running: np.ndarray  # uint8: of it those whose predicate holds
    arrived: np.ndarray  # int32 [32]: threads at each barrier, then how many it needs (below 0: all)
