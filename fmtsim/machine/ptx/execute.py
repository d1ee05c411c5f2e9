# SPDX-License-Identifier: Apache-2.0
"""Running a program over the blocks of a grid, in as many threads as the CPU engine has."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fmtsim.cpu.runtime.pool import get_num_threads
from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.block import run_block
from fmtsim.machine.ptx.contract import Contraction
from fmtsim.machine.ptx.kernel_program import Program
from fmtsim.machine.ptx.lowering import build
from fmtsim.machine.ptx.parse import Module, Variable, width
from fmtsim.machine.ptx.sass import Listing
from fmtsim.machine.ptx.watched_lines import Note, Watch
from fmtsim.support.errors import ArgumentError


class Encodes(Protocol):
    """An argument by value that is made for a launch: a tensor map."""

    def encode(self, address: Callable[[Tensor], int]) -> bytes:
        """Return its bytes, given what tells the address of a tensor."""


Argument = Tensor | int | float | bytes | Encodes


@dataclass(frozen=True, slots=True)
class Execution:
    """What a launch did: instructions of groups of threads, and what makes its result uncertain."""

    instructions: int  # of groups of threads
    undefined_shuffles: int  # from threads that did not take part
    repeated_atomics: int  # sums of floats whose order a GPU does not fix
    shared_accesses: int  # to elements that another block wrote
    clashes: int  # numbers in shared memory that two threads of one instruction wrote differently
    doubts: tuple[tuple[int, str], ...]  # races of warps, reads of what nobody wrote, barriers that threads left out:
    # how many, and an instruction
    contraction: Contraction  # products that are fused into sums
    reasons: tuple[str, ...]  # of the program: why results may not be a GPU's


class Range:
    """A piece of global memory and what it is called in errors."""

    def __init__(self, name: str, start: int, nbytes: int, owner: Any, itemsize: int = 1) -> None:
        self.name, self.start, self.nbytes, self.owner, self.itemsize = name, start, nbytes, owner, itemsize


class GlobalMemory:
    """All that a kernel may touch: the tensors' storages, the parameters, the module's variables."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.addresses: dict[str, int] = {}  # of variables and parameters

    def add(self, name: str, array: np.ndarray) -> int:
        """Keep an array and return its address."""
        self.ranges.append(Range(name, array.ctypes.data, array.nbytes, array))
        return int(array.ctypes.data)

    def add_tensor(self, name: str, tensor: Tensor) -> int:
        """Keep a tensor's storage and return the address of the tensor."""
        storage = tensor.untyped_storage()
        if not any(r.start == storage.data_ptr() and r.nbytes == storage.nbytes() for r in self.ranges):
            self.ranges.append(Range(name, storage.data_ptr(), storage.nbytes(), tensor, tensor.element_size()))
        return tensor.data_ptr()

    def describe(self, address: int) -> str:
        """Return which piece an address is in or nearest to, and which element of it."""
        if not self.ranges:
            return "no tensor was given"
        nearest = min(self.ranges, key=lambda r: max(r.start - address, address - (r.start + r.nbytes - 1), 0))
        element = (address - nearest.start) // nearest.itemsize
        return f"element {element} of {nearest.name}, which has {nearest.nbytes // nearest.itemsize}"


def bind(module: Module, parameters: Sequence[Variable], arguments: Sequence[Argument]) -> GlobalMemory:
    """Lay the arguments of a launch, which fit the parameters (``launching``), and the module's variables in memory."""
    memory = GlobalMemory()
    for variable in module.variables.values():
        if variable.space in ("global", "const"):
            raw = np.zeros(max(variable.nbytes, 1) + 256, np.uint8)
            aligned = raw[-raw.ctypes.data % 256 :][: max(variable.nbytes, 1)]
            memory.addresses[variable.name] = memory.add(variable.name, aligned)
    for variable in module.variables.values():
        if variable.space in ("global", "const") and variable.values:
            size = width(variable.type) // 8
            codes = [memory.addresses[v] if isinstance(v, str) else v for v in variable.values]
            data = b"".join((code & ((1 << 8 * size) - 1)).to_bytes(size, "little") for code in codes)
            ctypes.memmove(memory.addresses[variable.name], data, len(data))
    block = np.zeros(sum(p.nbytes + 128 for p in parameters) + 256, np.uint8)
    at = -block.ctypes.data % 128
    for position, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        at += -(block.ctypes.data + at) % max(parameter.align, parameter.nbytes if not parameter.is_array else 1, 1)
        data = _encoded(memory, parameter, argument, position)
        block[at : at + len(data)] = np.frombuffer(data, np.uint8)
        memory.addresses[parameter.name] = block.ctypes.data + at
        at += parameter.nbytes
    memory.ranges.append(Range("the parameters", block.ctypes.data, block.nbytes, block))
    return memory


def _encoded(memory: GlobalMemory, parameter: Variable, argument: Argument, position: int) -> bytes:
    """Return an argument as the bytes of its parameter."""
    name, size = f"argument {position} ({parameter.name})", parameter.nbytes
    if not isinstance(argument, Tensor | int | float | bytes):
        argument = argument.encode(lambda tensor: memory.add_tensor(name, tensor))
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, Tensor):
        return memory.add_tensor(name, argument).to_bytes(8, "little")
    if parameter.type == "f32":
        with np.errstate(over="ignore"):  # Inf, as in C
            return np.float32(argument).tobytes()
    if parameter.type == "f64":
        return np.float64(argument).tobytes()
    return (int(argument) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


class Block:
    """One block while it runs: registers and memory, as the instructions of the host see them."""

    def __init__(
        self, program: Program, memory: GlobalMemory, grid: Sequence[int], shape: Sequence[int], shared_bytes: int,
        writers: np.ndarray,
    ) -> None:  # fmt: skip
        live = shape[0] * shape[1] * shape[2]
        threads = live + -live % 32  # the last warp is whole; threads that are none have ended
        self.program, self.memory, self.threads, self.live = program, memory, threads, live
        self.registers = _aligned(program.register_bytes, 64)
        self.shared_bytes = program.shared_bytes + shared_bytes
        self.shared = _aligned(self.shared_bytes + -self.shared_bytes % 16, 1024)  # whole pieces of 16 bytes
        self.local = _aligned(max(program.local_bytes * threads, 8), 64)
        self.state = np.zeros(b.STATES, np.int64)
        self._fragments: dict[tuple[str, ...], np.ndarray | None] = {}
        self.pending: list[Any] = []  # products that were collected (``matrix_instructions``)
        self.notes: list[Note] | None = None  # of watched lines, where this block is to note them
        starts = np.array([r.start for r in memory.ranges], np.int64)
        ends = starts + np.array([r.nbytes for r in memory.ranges], np.int64)
        sizes = [r.nbytes // 2 + 1 if program.has_atomics else 0 for r in memory.ranges]
        self.touched = np.zeros(max(sum(sizes), 1), np.uint8)
        pieces = -(-len(self.shared) >> program.piece_shift) if program.piece_shift >= 0 else 0
        self.pieces = np.zeros((pieces, 2), np.int64)
        self._memory = b.Memory(
            np.int64(self.registers.ctypes.data), np.int64(self.shared.ctypes.data), np.int64(self.shared_bytes),
            np.int64(self.local.ctypes.data), np.int64(program.local_bytes), starts, ends, self.touched,
            np.cumsum([0, *sizes[:-1]]).astype(np.int64),
            writers,
            np.cumsum([0, *(r.nbytes // r.itemsize + 1 for r in memory.ranges[:-1])]).astype(np.int64),
            np.array([r.itemsize for r in memory.ranges], np.int64),
            self.pieces,
            np.int64(program.piece_shift),
            np.zeros((threads // 32 + 17, threads // 32 + 1), np.int64),
        )  # fmt: skip
        self._threads = b.Threads(
            np.zeros(threads, np.int32),
            np.zeros(threads, np.int32),
            np.zeros(threads, np.uint8),
            np.zeros(threads, np.uint8),
            np.zeros(32, np.int32),
        )
        for offset, size, value in program.constants:
            self.array(offset, size)[:] = value
        for name, offset, size in program.addresses:
            self.array(offset, size)[:] = memory.addresses[name]
        self.grid = grid
        self._indices = _fill_special(self, grid, shape, shared_bytes)

    def array(self, offset: int, size: int) -> np.ndarray:
        """Return what is kept at an offset, of ``size`` bytes a thread, for all threads."""
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        return self.registers[offset : offset + size * self.threads].view(kind)

    def register(self, name: str) -> np.ndarray:
        """Return a register of all threads, to read and to write."""
        return self.array(*self.program.offsets[name])

    def fragment(self, names: tuple[str, ...]) -> np.ndarray | None:
        """Return registers as [registers, threads], to read and to write; None where they do not lie side by side."""
        if names not in self._fragments:
            places = [self.program.offsets[name] for name in names]
            offset, size = places[0]
            step = size * self.threads
            whole = all(place == (offset + i * step, size) for i, place in enumerate(places))
            kind = {4: np.uint32, 8: np.uint64}[size]
            raw = self.registers[offset : offset + step * len(names)]
            self._fragments[names] = raw.view(kind).reshape(len(names), self.threads) if whole else None
        return self._fragments[names]

    def note_copy(self, places: np.ndarray | slice) -> None:
        """Note that the copy engine writes 16 bytes at each place of shared memory; an mbarrier orders readers."""
        if len(self.pieces):
            time = self._memory.known[-1, -1] = self.state[b.TIME]
            self.pieces.reshape(-1, 16 >> self.program.piece_shift, 2)[places, :, 0] = time << 7 | self.threads // 32
            self.state[b.TIME] += 1

    def wake(self) -> None:
        """Let threads look again at the mbarriers that they wait for."""
        self._threads.waits[self._threads.waits == -1] = 0

    def run(self, index: tuple[int, int, int]) -> None:
        """Run the block of an index of the grid.

        Raises:
            ArgumentError: What a GPU would report as an error, or hang on; with the instruction and its source line.
        """
        for register, axis in self._indices:
            register[:] = index[axis]
        threads, state = self._threads, self.state
        threads.counters[:], threads.waits[:], threads.arrived[:] = 0, 0, 0
        self.pieces[:], self._memory.known[:], state[b.TIME] = 0, 0, 1
        threads.counters[self.live :] = b.ENDED
        state[b.BLOCK] = 1 + index[0] + self.grid[0] * (index[1] + self.grid[1] * index[2])
        while True:
            run_block(self.program.rows, self._memory, threads, self.threads, state)
            if state[b.STATUS] != b.CALL_HOST:
                break
            running = threads.running.view(np.bool_)
            self.program.host[int(state[b.ROW])](self, running)
        if state[b.STATUS] != b.DONE:
            raise ArgumentError(self._fault(index))

    def _fault(self, index: tuple[int, int, int]) -> str:
        """Return the text of an error."""
        status, row, thread, place = (int(self.state[i]) for i in (b.STATUS, b.ROW, b.THREAD, b.PLACE))
        instruction = self.program.instructions[min(row, len(self.program.instructions) - 1)]
        where = f"thread {thread} of block {index}: {instruction}"
        match status:
            case b.OUT_OF_RANGE:
                shared = place < b.SHARED_WINDOW and any("shared" in part for part in instruction.opcode)
                what = (
                    f"byte {place} of shared memory, which has {self.shared_bytes}"
                    if shared
                    else self.memory.describe(place)
                )
                return f"an address is out of range ({what}), {where}"
            case b.MISALIGNED:
                return f"an address is not aligned ({self.memory.describe(place)}), {where}"
            case b.RACE:
                return f"two threads write different values to one place ({self.memory.describe(place)}), {where}"
            case b.DEADLOCK:
                return f"threads wait at a barrier to which the others never come, {where}"
            case b.BAD_BRANCH:
                return f"a branch has no target {place}, {where}"
        return f"the kernel stopped at a trap or a failed assertion, {where}"


def _aligned(nbytes: int, align: int) -> np.ndarray:
    """Return zeros that begin at a multiple of ``align`` bytes."""
    whole = np.zeros(nbytes + align, np.uint8)
    start = -whole.ctypes.data % align
    return whole[start : start + nbytes]


def _fill_special(
    block: Block, grid: Sequence[int], shape: Sequence[int], dynamic_bytes: int
) -> list[tuple[np.ndarray, int]]:
    """Write the special registers that a kernel reads (PTX ISA, chapter 10).

    Return those that hold a block's index, each with its axis: they are another number in every block.
    """
    thread = np.arange(block.threads)
    lane = thread % 32
    axes = {"x": 0, "y": 1, "z": 2, "w": 3}
    within = [thread % shape[0], thread // shape[0] % shape[1], thread // (shape[0] * shape[1]), thread * 0]
    one = np.uint64(1)
    fixed: dict[str, Any] = {
        "%laneid": lane, "%warpid": thread // 32, "%nwarpid": 64, "%smid": 0, "%nsmid": 132, "%gridid": 0,
        "%lanemask_eq": one << lane.astype(np.uint64), "%lanemask_lt": (one << lane.astype(np.uint64)) - one,
        "%lanemask_le": (one << (lane + 1).astype(np.uint64)) - one,
        "%lanemask_gt": 0xFFFFFFFF - ((one << (lane + 1).astype(np.uint64)) - one),
        "%lanemask_ge": 0xFFFFFFFF - ((one << lane.astype(np.uint64)) - one),
        "%dynamic_smem_size": dynamic_bytes, "%total_smem_size": block.shared_bytes - b.SHARED_START,
        "%cluster_ctarank": 0, "%cluster_nctarank": 1, "%is_explicit_cluster": 0,
    }  # fmt: skip
    indices = []
    for name, offset, size in block.program.special:
        stem, _, axis = name.partition(".")
        at = axes.get(axis, 0)
        values = {
            "%tid": within[at], "%ntid": (*shape, 1)[at], "%nctaid": (*grid, 1)[at], "%nclusterid": (*grid, 1)[at],
            "%cluster_ctaid": 0, "%cluster_nctaid": 1,
        }  # fmt: skip
        register = block.array(offset, size)
        register[:] = values[stem] if stem in values else fixed.get(name, 0)
        if stem in ("%ctaid", "%clusterid") and at < len(grid):
            indices.append((register, at))
    return indices


def execute(
    module: Module,
    entry: str,
    grid: tuple[int, int, int],
    shape: tuple[int, int, int],
    arguments: Sequence[Argument],
    *,
    shared_bytes: int = 0,
    listing: Listing | None = None,
    watch: Watch | None = None,
) -> Execution:
    """Run a kernel on CPU tensors.

    Args:
        module: The PTX.
        entry: The kernel's name.
        grid: Blocks.
        shape: Threads of a block.
        arguments: In the order of the kernel's parameters: a tensor for a pointer, written in place; a number; or bytes
            for a struct, a tensor map among them.
        shared_bytes: Dynamic shared memory of a block.
        listing: Machine code that says which products are fused into sums; None: the rule does.
        watch: Places of the source whose results are noted, and the block that notes them.

    Raises:
        ArgumentError: An instruction that is not known, or what a GPU would stop or hang at.
    """
    threads = shape[0] * shape[1] * shape[2]
    watch = watch or Watch()
    program = module.programs.get((entry, threads, watch.places))
    if program is None:
        program = build(module, entry, threads + -threads % 32, listing, watch.places)
        module.programs[entry, threads, watch.places] = program
    memory = bind(module, module.functions[entry].parameters, arguments)
    return run_grid(program, memory, grid, shape, shared_bytes, watch)


def run_grid(
    program: Program, memory: GlobalMemory, grid: Sequence[int], shape: Sequence[int], dynamic_bytes: int,
    watch: Watch,
) -> Execution:  # fmt: skip
    """Run all blocks of a grid; blocks with atomics in global memory one after the other, else two or more at once."""
    count = grid[0] * grid[1] * grid[2]
    numbers = range(count)
    if watch.alone and watch.block is not None:
        x, y, z = watch.block
        numbers = range(number := x + grid[0] * (y + grid[1] * z), number + 1)
    # threads that ask the host wait for each other more than they gain
    workers = 1 if program.has_atomics or program.host else min(get_num_threads(), len(numbers))
    lock, next_block = threading.Lock(), iter(numbers)
    failures: list[tuple[int, BaseException]] = []
    states: list[np.ndarray] = []
    elements = sum(r.nbytes // r.itemsize + 1 for r in memory.ranges)
    writers = np.zeros(elements if count > 1 and not program.has_atomics else 0, np.int32)

    def work() -> None:
        block = Block(program, memory, grid, shape, dynamic_bytes, writers)
        states.append(block.state)
        while not failures:
            with lock:
                number = next(next_block, None)
            if number is None:
                return
            index = number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])
            block.notes = watch.notes if watch.block in (None, index) else None
            try:
                block.run(index)
            except BaseException as error:
                failures.append((number, error))
                return

    if workers == 1:
        work()
    else:
        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    starts = np.cumsum([0, *(r.nbytes // r.itemsize + 1 for r in memory.ranges)])
    for r, first, last in zip(memory.ranges, starts, starts[1:], strict=False):
        watch.writers[r.start] = writers[first:last]
    total: Any = np.sum(states, 0, dtype=np.int64).tolist()
    firsts = [max(state[b.FIRST + i] for state in states) - 1 for i in range(3)]
    doubts = [(total[b.RACES + i], str(program.instructions[at]) if at >= 0 else "") for i, at in enumerate(firsts)]
    return Execution(
        total[b.STEPS], total[b.UNDEFINED], total[b.REPEATED], total[b.SHARES], total[b.CLASHES], tuple(doubts),
        program.contraction, program.reasons,
    )  # fmt: skip
