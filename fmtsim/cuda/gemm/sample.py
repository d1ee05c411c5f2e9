"""Operands on which kernels are tried: values of any format from a fixed seed, near 1 and across its exponents."""

from typing import Final

import torch
from torch import Tensor

from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.order import order_of
from fmtsim.cuda.gemm.unit import accumulator_of
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath

# M, N, K, and how many powers of two from 1 the numbers reach: in each TILE rows of A, and of B. The first has whole
# tiles; the second cuts off rows, columns and blocks, and its B begins with NaN, Inf and all exponents.
SHAPES: Final = ((256, 256, 640, (2, 12), (1, 30)), (203, 133, 405, (4, 8), (200, 2)))

_NUMBERS = 1 << 20  # of an operand, at most; long products have fewer rows
_SPECIAL = 100  # numbers that reach as far have NaN and Inf among them
_SCALES = (3, 20)  # powers of two that scales reach in each TILE rows
_ALIGNED = 16  # bytes: kernels may ask where an address lies modulo these


def sample(job: Job, place: int, k: int) -> Job:
    """Return K products an output, like another in unit, formats, dtypes and layout, of ``SHAPES[place]`` otherwise."""
    *sides, _, reach_a, reach_b = SHAPES[place]
    m, n = (min(side, max(1, _NUMBERS // k)) for side in sides)
    generator = torch.Generator(device="cpu").manual_seed(place + 1)
    a = _operand(job.a, job.spec.a, (m, k), reach_a, -1, generator)
    b = _operand(job.b, job.spec.b, (n, k), reach_b, 1, generator)
    given = (job.scale_a, m), (job.scale_b, n)
    scale_a, scale_b = (None if x is None else _scales(job, rows, k, generator) for x, rows in given)
    return Job(
        a=a, b=b, c=None if job.c is None else _addend(job, m, n, generator), scale_a=scale_a, scale_b=scale_b,
        spec=job.spec, random=None if job.random is None else RandomKey(1, 2),
        out=torch.empty(m, n, dtype=job.dtype, device=a.device), order=order_of(k, job.spec, a.device),
    )  # fmt: skip


def _operand(
    like: Tensor, fmt: FloatFormat | IntFormat, shape: tuple[int, int], reach: tuple[int, ...], sign: int,
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
    specials = [value for value, known in ((torch.nan, fmt.has_nan), (torch.inf, fmt.infinities)) if known]
    for first in (first for first, far in zip(starts, reach, strict=False) if far >= _SPECIAL):
        for row, value in enumerate(specials):
            x[first + 2 * row : first + 2 * row + 1, k // 2] = value
    x = x if fmt.has_negative_zero else x + 0.0
    return _laid_out(x, like)


def _drawn(fmt: FloatFormat | IntFormat, shape: tuple[int, int], reach: int, generator: torch.Generator) -> Tensor:
    """Return float64 values of a format, one in eight a zero, the others from ``2**-reach`` to ``2**reach``."""

    def uniform(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device="cpu", dtype=torch.int64)

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
