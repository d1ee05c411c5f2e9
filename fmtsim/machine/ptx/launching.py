# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.launch``: a kernel of Triton, PTX or CUDA C++ on CPU tensors, with the bits of an H100."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.machine.ptx import nvrtc, triton
from fmtsim.machine.ptx.contract import may_contract
from fmtsim.machine.ptx.parse import Function, Variable, parse, width
from fmtsim.machine.ptx.sass import Listing, disassembled
from fmtsim.machine.ptx.triton import Program
from fmtsim.machine.ptx.watched_lines import Watch, Watched, places, watched
from fmtsim.machine.ptx.watched_sum import WatchedSum, watched_sum
from fmtsim.support.errors import ArgumentError, DtypeError, did_you_mean, shown

TARGETS = ("h100", "h200")
_MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)  # CUDA C++ Programming Guide, technical specifications of 9.0
_MOST_THREADS = (1_024, 1_024, 64)
_DOUBTS = (
    "warps of a block access shared memory that another writes, without a barrier between",
    "shared memory is read before it was written",
    "threads never reach a barrier at which others of their block wait, or another one",
)
_parsed = lru_cache(maxsize=256)(parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a launch did; ``print`` shows it.

    ``exact`` is True if every bit is the GPU's; else ``reasons`` say which part is not certain.
    """

    kernel: str
    target: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]  # threads
    shared_bytes: int
    config: str = ""  # of @triton.autotune: what was taken, and why
    instructions: int  # of groups of threads
    contractions: int  # products that ptxas fuses into sums
    checked: bool  # the number of fused products was compared with the machine code
    exact: bool
    reasons: tuple[str, ...] = ()
    ptx: str = field(repr=False)
    entry: str = field(repr=False)
    watched: tuple[Watched, ...] = ()
    watched_sum: WatchedSum | None = None

    @property
    def threads(self) -> int:
        """Threads of the launch."""
        return int(numpy.prod(self.grid, dtype=object) * numpy.prod(self.block, dtype=object))

    def __str__(self) -> str:
        size = f"{' x '.join(map(str, self.grid))} blocks of {' x '.join(map(str, self.block))} threads"
        how = "checked against the machine code" if self.checked else "not checked against machine code"
        lines = [
            f"{self.kernel} on {self.target}: {'every bit' if self.exact else 'not certain'}",
            f"  {size}, {self.shared_bytes:,} bytes of shared memory",
            f"  {self.instructions:,} instructions; {self.contractions} products fused into sums ({how})",
        ]
        lines += [f"  configuration: {self.config}"] * bool(self.config)
        lines += [f"  {x}" for x in (*self.reasons, *self.watched)]
        return "\n".join([*lines, *[str(self.watched_sum)] * (self.watched_sum is not None)])


def launch(
    kernel: Any, grid: Any, *args: Any, target: str = "h100", config: Any = None, entry: str | None = None,
    block: int | Sequence[int] | None = None, watch: str | int | Sequence[str | int] | None = None,
    watch_block: int | Sequence[int] = 0, watch_threads: int | Sequence[int] = 0,
    watch_sum: Sequence[torch.Tensor] | None = None, **named: Any,
) -> Launch:  # fmt: skip
    """Run a kernel on CPU tensors, which it writes in place, with the bits of an H100 or H200.

    Args:
        kernel: A ``triton.jit`` function, also under ``autotune`` or ``heuristics``; PTX of any architecture up to
            ``sm_90a``; or CUDA C++, which NVRTC compiles.
        grid: Blocks: an int, a tuple of up to three, or for Triton a function of the arguments by name.
        args: The kernel's arguments: strided CPU tensors for pointers, numbers, and for Triton whatever its launcher
            takes. A struct of PTX or CUDA C++ is ``bytes``, or a tensor of its size that is passed by value.
        target: ``"h100"`` or ``"h200"``; their results are the same.
        config: For ``@triton.autotune`` the configuration: a ``triton.Config``, its place, or a dict of keywords. None
            takes the first that the kernel's own pruning leaves (nothing is timed), and the record says so.
        entry: The kernel's name in PTX or CUDA C++, where there are several; in C++ also ``"ns::kernel<float, 4>"``.
        block: Threads of a block for PTX and CUDA C++; None takes what the PTX requires.
        watch: What to show while the kernel runs: a variable of a Triton function, a line's number, ``"kernels.py:5"``,
            or several. The record's ``watched`` has what the instructions of these lines, and of functions that they
            call, wrote, in their order.
        watch_block: The block that is watched.
        watch_threads: Its threads; which elements a thread holds is the compiler's choice.
        watch_sum: One element of a result and its terms, views of the launch's tensors, as ``(y[1], x[1])``: the
            record's ``watched_sum`` has the order in which n terms are added. It asks a block about n log n times.
        named: For Triton the kernel's arguments and constants by name, ``num_warps``, ``num_stages``, ``maxnreg``,
            ``enable_fp_fusion`` and Triton's other options. For PTX and CUDA C++ ``shared``, bytes of dynamic shared
            memory, and for CUDA C++ the compiler's options (``use_fast_math=True``, ``std="c++20"``).

    Returns:
        The record of the launch: instructions, products that ptxas fuses into sums, exact or not and why.

    >>> kernel = '''
    ...     .version 8.0
    ...     .target sm_90
    ...     .address_size 64
    ...     .visible .entry exp2(.param .u64 x) {
    ...         .reg .u32 %t; .reg .u64 %a, %d; .reg .f32 %f;
    ...         ld.param.u64 %a, [x]; mov.u32 %t, %tid.x; mul.wide.u32 %d, %t, 4; add.u64 %a, %a, %d;
    ...         ld.global.f32 %f, [%a]; ex2.approx.f32 %f, %f; st.global.f32 [%a], %f; ret;
    ...     }'''
    >>> x = torch.tensor([0.5, 1.4])
    >>> launch(kernel, 1, x, block=2).exact
    True
    >>> x.tolist()  # the nearest float32 to 2^1.4 is 2.6390156745910645
    [1.4142135381698608, 2.6390159130096436]

    NaN, Inf and -0 are the GPU's. Runs of one launch give the same bits, unless blocks race for one place:
    then ``exact`` is False.

    Raises:
        ArgumentError: A target, grid, block, argument or keyword that does not fit; PTX for another architecture;
            an instruction that is not known; an address outside of the tensors; a source that does not compile.
        DtypeError: An argument of a kind that the parameter does not take.
        DeviceError: Triton or NVRTC is missing.
    """
    seen = Watch()
    if watch is not None:
        at: Any = watch_block if isinstance(watch_block, list | tuple) else [watch_block]
        of: Any = watch_threads if isinstance(watch_threads, list | tuple | range) else [watch_threads]
        seen = Watch(places=places(kernel, watch), block=(*at, 0, 0)[:3], threads=tuple(of))
    prepare = partial(prepared, kernel, grid, target=target, config=config, entry=entry, block=block)
    total = None
    if watch_sum is not None:
        if not isinstance(watch_sum, tuple | list) or [isinstance(x, torch.Tensor) for x in watch_sum] != [True, True]:
            raise ArgumentError(f"watch_sum={shown(watch_sum)}; give an element and its terms: watch_sum=(y[1], x[1])")
        (*copies, out, terms), others = copied([*args, *watch_sum], named)
        program = prepare(copies, others)
        total = watched_sum(partial(run, program, target), program, out, terms)
    return replace(run(prepare(args, named), target, seen), watched_sum=total)


def prepared(
    kernel: Any, grid: Any, args: Sequence[Any], named: dict[str, Any], *, target: str = "h100", config: Any = None,
    entry: str | None = None, block: int | Sequence[int] | None = None,
) -> Program:  # fmt: skip
    """Return a launch that has not run.

    Raises:
        ArgumentError: As ``launch``.
        DtypeError: As ``launch``.
        DeviceError: As ``launch``.
    """
    if target not in TARGETS:
        what = "whose PTX is refused until a GPU has recorded it" if target == "b200" else "which is not known"
        raise ArgumentError(f"target={shown(target)}, {what}{did_you_mean(target, TARGETS)}; choose from {TARGETS}")
    if triton.is_triton(kernel):
        given = {"entry": entry, "block": block}  # a kernel's arguments may have these names
        named |= {name: value for name, value in given.items() if value is not None}
        return triton.program(kernel, grid, tuple(args), named, config)
    if not isinstance(kernel, str):
        raise DtypeError(f"kernel is {type(kernel).__name__}; give a triton.jit function, PTX or CUDA C++ source")
    if config is not None:
        raise ArgumentError(f"config={shown(config)} is for @triton.autotune; PTX and CUDA C++ have none")
    shared, label = named.pop("shared", 0), entry
    if re.search(r"^\s*\.version\s", kernel, re.MULTILINE):
        if named:
            raise ArgumentError(f"{', '.join(named)}: PTX takes arguments by position, block=, entry= and shared=")
    elif "__global__" in kernel:
        kernel, entry = nvrtc.compiled(kernel, entry, named)
    else:
        raise ArgumentError("kernel is text without .version (PTX) and without __global__ (CUDA C++)")
    module = _parsed(kernel)
    if entry is None and len(module.entries) != 1:
        raise ArgumentError(f"the kernel's text has {len(module.entries)} entries; choose entry= from {module.entries}")
    name = module.entries[0] if entry is None else entry
    if name not in module.entries:
        raise ArgumentError(f"entry={name!r} is not in the text{did_you_mean(name, module.entries)}: {module.entries}")
    threads = block if block is not None else module.functions[name].required_threads
    if threads is None:
        raise ArgumentError(f"{name} does not say how many threads a block has: pass block=")
    return Program(
        name=label or name, entry=name, ptx=kernel, grid=grid, block=_extent("block", threads, _MOST_THREADS),
        shared_bytes=shared, arguments=tuple(args),
    )  # fmt: skip


def copied(args: Sequence[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with copies of their tensors, which share memory as the tensors do."""
    memo: dict[Any, Any] = {}

    def copy_one(x: Any) -> Any:
        x = x.detach() if isinstance(x, torch.Tensor) else x
        return copy.deepcopy(x, memo) if isinstance(x, torch.Tensor | tuple | list) or hasattr(x, "base") else x

    return [copy_one(x) for x in args], {name: copy_one(x) for name, x in named.items()}


def run(program: Program, target: str, seen: Watch | None = None) -> Launch:
    """Run a kernel that is ready, and return the record.

    Raises:
        ArgumentError: As ``launch``.
        DtypeError: As ``launch``.
    """
    from fmtsim.machine.ptx.execute import execute  # with numba, which takes a second

    seen = seen or Watch()
    module = _parsed(program.ptx)
    # 1. the architecture, the grid and the block
    number, letter = re.fullmatch(r"sm_(\d+)([a-z]?)", module.target).groups()  # type: ignore[union-attr]
    if int(number) > 90 or (letter and module.target != "sm_90a"):
        raise ArgumentError(f"{program.name} is for {module.target}, which does not run on {target} (sm_90a)")
    grid = _extent("grid", program.grid, _MOST_BLOCKS)
    function = module.functions[program.entry]
    required = function.required_threads
    if required is not None and (*required, 1, 1)[:3] != program.block:
        raise ArgumentError(f"block={program.block}, but {program.name} requires {required} threads (.reqntid)")
    if (threads := int(numpy.prod(program.block))) > 1_024:
        raise ArgumentError(f"block={program.block} has {threads:,} threads; a block has at most 1,024")
    if not isinstance(program.shared_bytes, int) or not 0 <= program.shared_bytes <= triton.SHARED_LIMIT:
        raise ArgumentError(f"shared={shown(program.shared_bytes)}; a block has 0 to {triton.SHARED_LIMIT:,} bytes")
    _check_watch(seen, function, grid, threads)
    # 2. the arguments, each as its parameter takes it
    blocks = int(numpy.prod(grid, dtype=object))
    scratch = (torch.zeros(size * blocks, dtype=torch.uint8) if size else 0 for size in program.scratch)
    arguments = [*program.arguments, *scratch]
    if len(arguments) != len(function.parameters):
        raise ArgumentError(f"{program.name} takes {len(function.parameters)} arguments and got {len(arguments)}")
    values = [_argument(i, p, value) for i, (p, value) in enumerate(zip(function.parameters, arguments, strict=True))]
    # 3. all blocks
    listing = _listing(program.ptx, program.entry, program.fuses)
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # a simulation counts the launch alone
            done = execute(module, program.entry, grid, program.block, values, shared_bytes=program.shared_bytes,
                           listing=listing, watch=seen)  # fmt: skip
    except ArgumentError as error:
        # Triton's PTX numbers its parameters and leaves constants out; the source's name says more
        text = str(error)
        for i, name in enumerate(program.names):
            text = text.replace(f"argument {i} ({program.entry}_param_{i})", f"argument {name}")
        raise ArgumentError(text) from None
    reasons = program.doubts + done.reasons + done.contraction.doubts
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if program.compiled is not None and any(x.untyped_storage().data_ptr() % 16 for x in tensors):
        reasons += ("a tensor's memory begins where 16 does not divide the address, as it does on a GPU: clone it",)
    if done.clashes:
        reasons += (
            f"{done.clashes:,} numbers in shared memory had two threads' different values: "
            "the last thread's were taken",
        )
    for (count, where), what in zip(done.doubts, _DOUBTS, strict=True):
        if count:
            reasons += (f"{what}: {count:,} times, first at {where}",)
    if done.undefined_shuffles:
        reasons += (f"{done.undefined_shuffles:,} shuffles read threads that did not take part",)
    if done.shared_accesses:
        reasons += (f"{done.shared_accesses:,} accesses are to what another block wrote: a GPU does not order blocks",)
    if done.repeated_atomics:
        reasons += (
            f"{done.repeated_atomics:,} atomic sums of floats came after others at their place: a GPU does not fix the "
            "order",
        )
    return Launch(
        kernel=program.name, target=target, grid=grid, block=program.block, shared_bytes=program.shared_bytes,
        config=program.config, instructions=done.instructions, contractions=len(done.contraction.fusions),
        checked=done.contraction.basis == "sass",
        exact=not reasons, reasons=reasons, ptx=program.ptx, entry=program.entry,
        watched=watched(seen.notes, seen.threads),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _listing(ptx: str, entry: str, fuses: bool) -> Listing | None:
    """Return the machine code of a text where it may differ from the text; launches of one kernel ask once."""
    return disassembled(ptx, fuse=fuses) if may_contract(_parsed(ptx).functions[entry]) else None


def _extent(name: str, extent: Any, most: tuple[int, ...]) -> tuple[int, int, int]:
    """Return a grid or block as three numbers.

    Raises:
        ArgumentError: None, more than three, or one that is zero, negative or too large.
    """
    numbers = list(extent) if isinstance(extent, Sequence) and not isinstance(extent, str) else [extent]
    whole = [hasattr(n, "__index__") and not isinstance(n, bool) for n in numbers]
    if not 1 <= len(numbers) <= 3 or not all(whole):
        raise ArgumentError(f"{name}={shown(extent)}; give an int or a tuple of up to three")
    x, y, z = (*(int(n) for n in numbers), 1, 1)[:3]
    if not all(1 <= n <= limit for n, limit in zip((x, y, z), most, strict=True)):
        limits = " x ".join(f"{limit:,}" for limit in most)
        raise ArgumentError(f"{name}={shown(extent)}; each number is at least 1, and at most {limits}")
    return x, y, z


def _check_watch(seen: Watch, function: Function, grid: tuple[int, int, int], threads: int) -> None:
    """Refuse to watch what does not run.

    Raises:
        ArgumentError: A line without an instruction, or a block or thread that the launch does not have.
    """
    if not seen.places or seen.block is None:
        return
    lines = {place for x in function.body for place in (x.source, *x.callers) if place}
    if seen.places.isdisjoint(lines):
        raise ArgumentError(
            f"watch= names {', '.join(sorted(seen.places))}, of which no instruction is left in the PTX; it has "
            f"{', '.join(sorted(lines)) or 'no line numbers'}"
        )
    if not all(isinstance(n, int) for n in (*seen.block, *seen.threads)):
        raise ArgumentError(f"watch_block={seen.block}, watch_threads={seen.threads}; give an int or several")
    if not all(0 <= n < most for n, most in zip(seen.block, grid, strict=True)):
        raise ArgumentError(f"watch_block={seen.block} is not in the grid {grid}")
    if outside := [t for t in seen.threads if not 0 <= t < threads]:
        raise ArgumentError(f"watch_threads={outside}; a block has {threads} threads, from 0 on")


def _argument(place: int, parameter: Variable, value: Any) -> Any:
    """Return an argument as ``execute`` takes it for a parameter.

    Raises:
        ArgumentError: A number out of the parameter's range, a struct of another size, a tensor that is not here.
        DtypeError: A kind that the parameter does not take.
    """
    kind, what = parameter.type, f"argument {place} ({parameter.name})"
    if isinstance(value, torch.Tensor) and not parameter.is_array and kind in ("u64", "b64", "s64"):
        return triton.checked_tensor(what, value)
    if parameter.is_array:
        if isinstance(value, torch.Tensor) and value.is_cpu:  # by value: a struct, or a bfloat16
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, bytes) and len(value) != parameter.nbytes:
            raise ArgumentError(f"{what} has {len(value)} bytes; the parameter has {parameter.nbytes}")
        if not isinstance(value, bytes | triton.TensorMap):
            raise DtypeError(f"{what} is {type(value).__name__}; the parameter is {parameter.nbytes} bytes: give bytes")
        return value
    if isinstance(value, bool | numpy.bool_ | numpy.integer):
        value = int(value)
    if kind[0] == "f" and isinstance(value, int | float | numpy.floating):
        if isinstance(value, int) and abs(value) > 2**1023:
            raise ArgumentError(f"{what} is {shown(value)}, which .{kind} does not hold")
        return float(value)
    if not isinstance(value, int):
        wanted = "a tensor or an int" if width(kind) == 64 else "a float" if kind[0] == "f" else "an int"
        raise DtypeError(f"{what} is {type(value).__name__}; the parameter is .{kind}: give {wanted}")
    if not -(1 << (width(kind) - 1)) <= value < 1 << width(kind):
        raise ArgumentError(f"{what} is {value}, which .{kind} does not hold")
    return value
