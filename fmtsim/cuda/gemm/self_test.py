# SPDX-License-Identifier: Apache-2.0
"""Self-test of a fast path at first use: its bits are compared with the general path's.

The first time that a fast path would serve a class of products, it multiplies the operands made here, and its bits are
compared with those of the general path: a compiler's mistake must not become a user's wrong bits. A class is what its
kernels are specialised by, unit, formats, dtypes, what lies where in memory, and the features of a plan; not the shape.
What has passed is remembered, on disk too, until a kernel, the engine around it, the compiler, the driver or the device
changes. A path that fails warns and is not used.
"""

import hashlib
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import general
from fmtsim.cuda.gemm.job import TILE, FastPath, Job, Plan, accumulation_order, accumulator_of
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.spec.call import OperandFormat
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DeviceError, KernelWarning
from fmtsim.support.replay.gpu import captures

_MOST: Final = 4096  # choices that are remembered at once
_UNKNOWN: Any = object()

# M, N, K, and how many powers of two from 1 the numbers reach: in each TILE rows of A, and of B. The first has whole
# tiles; the second cuts off rows, columns and blocks, and its B begins with NaN, Inf and all exponents.
SHAPES: Final = ((256, 256, 640, (2, 12), (1, 30)), (203, 133, 405, (4, 8), (200, 2)))

_NUMBERS = 1 << 20  # of an operand, at most; long products have fewer rows
_SPECIAL = 100  # numbers that reach as far have NaN and Inf among them
_SCALES = (3, 20)  # powers of two that scales reach in each TILE rows
_ALIGNED = 16  # bytes: kernels may ask where an address lies modulo these
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.int32: torch.int32}

_chosen: dict[tuple[Any, ...], tuple[FastPath, Plan] | None] = {}
_verdicts: dict[tuple[int, str], bool] = {}


def chosen(paths: tuple[FastPath, ...], job: Job) -> tuple[FastPath, Plan] | None:
    """Return the first path that takes a product and has passed its self-test, with its plan for the product, or None.

    A path decides by the definition, the device, and where operands lie modulo 16 bytes, so the choice is remembered.

    Raises:
        DeviceError: A path would have to be tested while a CUDA graph is captured.
    """
    operands = job.a, job.b, job.c, job.scale_a, job.scale_b
    facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in operands]
    key = paths, runtime.device_index(job.a), job.spec, job.random is None, *facts
    choice = _chosen.get(key, _UNKNOWN)
    if choice is _UNKNOWN:
        plans = ((path, path.plan(job)) for path in paths)
        choice = next(((path, plan) for path, plan in plans if plan is not None and passes(path, job, plan)), None)
        if len(_chosen) >= _MOST:
            _chosen.clear()
        _chosen[key] = choice
    return choice


def passes(path: FastPath, job: Job, plan: Plan) -> bool:
    """Return True if a path gives the general path's bits on products like one; test it where that is not known.

    A self-test waits for the device. Where bits differ, a KernelWarning says so, once for a class and device; a path
    that leaves every result of it to the general one is not used either.
    """
    index = runtime.device_index(job.a)
    # a digest of all that may decide how a path's kernels run a product, but shape and data
    gemm_plan, order = job.spec.plan, job.order
    lies = [(x.dtype, *(stride == 1 for stride in x.stride()), _alignment(x)) for x in (job.a, job.b)]
    present = [x is not None for x in (job.c, job.scale_a, job.scale_b, job.random)]
    features = (
        job.promotes, gemm_plan.scaled_promotion, gemm_plan.successive_scales, order.contiguous, len(order.parts) > 1,
    )  # fmt: skip
    facts = path.name, plan.programs, replace(job.spec, plan=GemmPlan()).to_json(), lies, present, features
    name = hashlib.sha256(repr(facts).encode()).hexdigest()
    verdict = _verdicts.get((index, name))
    if verdict is not None:
        return verdict
    passed = _passed(index)
    if passed is None or _line(passed, name) not in _lines(passed):
        if captures():
            raise DeviceError(
                f"{plan.programs[0][0]} has not been tested on cuda:{index} for products of this kind yet, and a CUDA "
                "graph that is being captured cannot wait for that; run the product once before the capture (see "
                "fmtsim.cuda.warmup)"
            )
        wrong, compared = _compared(path, job, plan)
        if wrong or not compared:
            _verdicts[index, name] = False
            if wrong:  # a path that left all tiles would leave those of a call too
                kernels = ", ".join(
                    " ".join([file, *(f"-D{key}={value}" for key, value in macros)])
                    for file, _, macros in plan.programs
                )
                text = (
                    f"a fast path does not give the bits of the general path on cuda:{index} ({wrong} of {compared} "
                    "results have other bits), so products of this kind take the general path, which is slower. "
                    f"Kernels: {kernels}; {runtime.architecture(index)}, {_versions()}. Another version of "
                    "nvidia-cuda-nvrtc may compile them rightly; please report this message."
                )
                warnings.warn(text, KernelWarning, stacklevel=2)
            return False
        _remember(passed, name)
    _verdicts[index, name] = True
    return True


def _alignment(x: Tensor) -> bool:
    """Return True if rows, or columns, begin at multiples of 16 bytes."""
    return not (x.data_ptr() | max(x.stride()) * x.element_size()) % 16


def _compared(path: FastPath, job: Job, plan: Plan) -> tuple[int, int]:
    """Return the number of a path's results with wrong bits, and the number compared."""
    counts = []
    for place in range(len(SHAPES)):
        sample_and_plan = _like(path, job, plan, place)
        if sample_and_plan is None:
            continue
        like, like_plan = sample_and_plan
        m, n = like.out.shape
        parts = 1 if general.ignores_order(like.spec) else len(like.order.parts)
        fast, exact = (torch.full((parts, m, n), 7, dtype=like.dtype, device=like.out.device) for _ in range(2))
        marks = torch.zeros(-(-m // TILE), -(-n // TILE), dtype=torch.uint8, device=like.out.device)
        path.run(like, like_plan, fast, marks)
        general.run(like, exact, None)
        unmarked = (marks == 0).repeat_interleave(TILE, 0)[:m].repeat_interleave(TILE, 1)[:, :n]
        wrong = (fast.view(_BITS[like.dtype]) != exact.view(_BITS[like.dtype])) & unmarked
        counts.append(torch.stack([wrong.sum(), unmarked.sum() * parts]))
    wrong_bits, compared = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    return wrong_bits, compared


def _like(path: FastPath, job: Job, plan: Plan, place: int) -> tuple[Job, Plan] | None:
    """Return a product that reaches the same kernels as another, with its K where the usual one does not."""
    usual = SHAPES[place][2]
    for k in (usual, job.shape[2]):
        like = sample(job, place, k)
        sample_plan = path.plan(like)
        if sample_plan is not None and sample_plan.programs == plan.programs:
            return like, sample_plan
    return None


# What has passed, on disk: a file for each environment, a line for each class.


@cache
def _passed(index: int) -> Path | None:
    """Return the file with the classes that have passed on devices like one, None where none can be written."""
    folder = runtime.cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(_environment(index).encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), *sorted(runtime.KERNELS.rglob("*.cu*"))):
        digest.update(file.read_bytes())
    return folder / "self_tests" / digest.hexdigest()


def _environment(index: int) -> str:
    return f"{torch.cuda.get_device_name(index)} {runtime.architecture(index)} {_versions()}"


@cache
def _versions() -> str:
    """Return the versions of compiler and driver."""
    from cuda.bindings import driver, nvrtc

    compiler = ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:])
    return f"NVRTC {compiler}, driver {driver.cuDriverGetVersion()[1]}"


def _line(file: Path, name: str) -> str:
    """Return the line of a class, which says nothing in a file that was renamed."""
    return hashlib.sha256(f"{file.name} {name}".encode()).hexdigest()


def _lines(file: Path) -> set[str]:
    try:
        return set(file.read_text(errors="replace").split())
    except OSError:
        return set()


def _remember(file: Path | None, name: str) -> None:
    """Add a class to those that have passed; a folder that cannot be written costs a self-test in every process."""
    if file is None:
        return
    try:
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as lines:
            lines.write(f"{_line(file, name)}\n")
    except OSError:
        pass


# Operands: values of any format from a fixed seed, near 1 and across its exponents.


def sample(job: Job, place: int, k: int) -> Job:
    """Return K products an output, like another in unit, formats, dtypes and layout, of ``SHAPES[place]`` otherwise."""
    *sides, _, reach_a, reach_b = SHAPES[place]
    m, n = (min(side, max(1, _NUMBERS // k)) for side in sides)
    generator = torch.Generator(device="cpu").manual_seed(place + 1)
    a = _operand(job.a, job.spec.a, (m, k), reach_a, -1, generator)
    b = _operand(job.b, job.spec.b, (n, k), reach_b, 1, generator)
    scales = (job.scale_a, m), (job.scale_b, n)
    scale_a, scale_b = (None if x is None else _scales(job, rows, k, generator) for x, rows in scales)
    return Job(
        a=a, b=b, c=None if job.c is None else _addend(job, m, n, generator), scale_a=scale_a, scale_b=scale_b,
        spec=job.spec, random=None if job.random is None else RandomKey(1, 2),
        out=torch.empty(m, n, dtype=job.dtype, device=a.device), order=accumulation_order(k, job.spec, a.device),
        gpu=job.gpu,
    )  # fmt: skip


def _operand(
    like: Tensor, fmt: OperandFormat, shape: tuple[int, int], reach: tuple[int, ...], sign: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Return values as another operand lies in memory: rows of zeros, and rows whose products cancel, among others.

    Where ``sign`` is -1 for one operand and 1 for the other, products of every fourth row cancel in pairs but some.
    """
    rows, k = shape
    starts = range(0, rows, TILE)
    panels = zip(starts, reach, strict=False)
    x = torch.cat([_drawn(fmt, (min(TILE, rows - first), k), far, generator) for first, far in panels])
    paired = torch.arange(0, k - 1, 2, device="cpu")
    paired = paired[paired % 16 < 14]
    cancelling = x[1::4]
    cancelling[:, paired + 1] = sign * cancelling[:, paired]
    x = x.clamp(fmt.min, fmt.max)
    if not isinstance(fmt, FloatFormat):
        return _laid_out(x, like)
    if fmt.has_zero:
        x[5::64] = 0
        x[6::32, : k // 2] = 0
    specials = [value for value, exists in ((torch.nan, fmt.has_nan), (torch.inf, fmt.infinities)) if exists]
    for first in (first for first, far in zip(starts, reach, strict=False) if far >= _SPECIAL):
        for row, value in enumerate(specials):
            x[first + 2 * row : first + 2 * row + 1, k // 2] = value
    x = x if fmt.has_negative_zero else x + 0.0
    return _laid_out(x, like)


def _drawn(fmt: OperandFormat, shape: tuple[int, int], reach: int, generator: torch.Generator) -> Tensor:
    """Return float64 values of a format, one in eight a zero, the others from ``2**-reach`` to ``2**reach``."""

    def uniform(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device="cpu", dtype=torch.int64)

    assert not isinstance(fmt, LogFormat)  # no kernel takes them
    if isinstance(fmt, IntFormat):
        return (uniform(fmt.min_code, fmt.max_code).double() + 0.5 * fmt.half_offset) * fmt.eps
    lowest = fmt.min_exponent - fmt.mantissa_bits * fmt.has_subnormals
    low, high = (min(max(exponent, lowest), fmt.max_exponent) for exponent in (-reach, reach))
    exponent = uniform(low, high)
    steps = (1 << fmt.mantissa_bits) + uniform(0, (1 << fmt.mantissa_bits) - 1)
    lost = (fmt.min_exponent - exponent).clamp(min=0)  # bits that a subnormal has no room for
    x = torch.ldexp((steps >> lost).double(), exponent + lost - fmt.mantissa_bits).clamp(max=fmt.max)
    if fmt.signed:
        x = torch.where(uniform(0, 1) > 0, x, -x)
    if fmt.has_zero:
        x = torch.where(uniform(0, 7) > 0, x, x * 0)
    return x


def _scales(job: Job, rows: int, k: int, generator: torch.Generator) -> Tensor:
    """Return scales inside the unit where it has some, else those of a scaled promotion, float32 [rows, groups]."""
    unit, every = job.spec.datapath, job.spec.plan.promote_every
    fmt, width = FP32, every or k
    if isinstance(unit, Datapath) and unit.scale is not None:
        fmt, width = unit.scale, unit.scale_block
    shapes = ((min(TILE, rows - first), -(-k // width)) for first in range(0, rows, TILE))
    x = torch.cat([_drawn(fmt, shape, far, generator) for shape, far in zip(shapes, _SCALES, strict=False)])
    return (x if fmt is FP32 else x.abs()).float().to(job.a.device)


def _addend(job: Job, m: int, n: int, generator: torch.Generator) -> Tensor:
    """Return numbers of the accumulator's format, or any integers, in the dtype of the sums."""
    if not job.dtype.is_floating_point:
        return torch.randint(-(1 << 31), 1 << 31, (m, n), generator=generator, device="cpu").to(job.a.device, job.dtype)
    return _drawn(accumulator_of(job.spec.datapath), (m, n), 12, generator).to(job.dtype).to(job.a.device)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return values in the dtype, the order of dimensions and the places modulo 16 bytes of another operand."""
    inner = int(like.stride(0) > like.stride(1) or like.stride(1) == 1)
    words = _ALIGNED // like.element_size()
    rows, step = x.shape[1 - inner], max(like.stride(inner), 1)
    pitch = x.shape[inner] * step
    pitch += (like.stride(1 - inner) - pitch) % words
    first = like.data_ptr() % _ALIGNED // like.element_size()
    memory = torch.zeros(first + rows * pitch, dtype=like.dtype, device="cpu")
    strides = (pitch, step) if inner else (step, pitch)
    memory.as_strided(tuple(x.shape), strides, first).copy_(x)
    return memory.to(like.device).as_strided(tuple(x.shape), strides, first)
