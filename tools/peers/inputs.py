# SPDX-License-Identifier: Apache-2.0
"""Numbers that tell casts apart: values, boundaries and their neighbours, ties, scale edges, NaN, Inf and zeros."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fmtsim.formats.element import ElementFormat
from fmtsim.formats.registry import get_format

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
COLUMNS = 256  # of rows that are cut into blocks
# NaN of both signs, quiet and signalling, with payloads; Inf, zeros, subnormals, the largest number
BITS = (
    0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA00000, 0x7F800000, 0xFF800000,
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
)  # fmt: skip


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Return every number of a 16-bit dtype, NaN with all payloads."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def boundaries(format: str) -> Tensor:
    """Return values, midpoints, and where overflow may begin, as float64: exact for formats of 16 bits or fewer."""
    fmt = get_format(format)
    # packed formats have no element of their own
    element = fmt if isinstance(fmt, ElementFormat) else getattr(fmt, "element", get_format("int8"))
    values = torch.tensor(element.values, dtype=torch.float64)
    top, step = values[-1], values[-1] - values[-2]
    # the next value of an unbounded format, its midpoint, powers of two above, beyond an integer's range
    beyond = torch.stack([top + step / 2, top + step, 1.5 * top, 2 * top, 4 * top, 1024 * top])
    least = values[values > 0][0]
    below = least * torch.tensor([0.5, 0.25, 0.75, 2.0**-0.5, 2.0**-10], dtype=torch.float64)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, beyond, below])
    return torch.cat([points, -points])


def neighbours(points: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 points and what stands up to two ulps of each dtype beside them, rounded to ``dtype``."""
    exponents = torch.frexp(points)[1].double() - 1
    few = len(points) < 1 << 12  # of formats of 8 bits or fewer
    parts = [points]
    for bits in (7, 10, 23, 52) if few else (23, 52):
        ulp = torch.exp2(exponents - bits)
        parts += [points + k * ulp / 2 for k in ((-4, -3, -2, -1, 1, 2, 3, 4) if few else (-4, -2, 2, 4))]
    exact = torch.cat(parts)
    # of float64, the two next numbers of each: they show double rounding
    if few:
        exact = torch.cat([exact, *(exact.nextafter(exact.new_tensor(side)) for side in (torch.inf, -torch.inf))])
    return exact.to(dtype)


def random_numbers(count: int, dtype: torch.dtype, points: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers of all bit patterns, then as many within the range of a format."""
    half = count // 2
    if dtype == torch.float64:  # exponents of float32 and somewhat beyond
        exponents = torch.randint(-160, 140, (half,), generator=generator)
        sign = torch.randint(2, (half,), generator=generator).double() * 2 - 1
        bits = sign * (1 + torch.rand(half, dtype=dtype, generator=generator)) * torch.exp2(exponents.double())
    else:
        size = dtype.itemsize * 8
        integers = torch.randint(0, 1 << size, (half,), generator=generator)
        bits = (integers - (1 << (size - 1))).to(torch.int32 if size == 32 else torch.int16).view(dtype)
    limits = points[points > 0].log2()
    low, high = limits.min().clamp(min=-150) - 1, limits.max().clamp(max=127)
    within = torch.exp2(low + (high - low) * torch.rand(count - half, dtype=torch.float64, generator=generator))
    within *= torch.randint(2, (count - half,), generator=generator) * 2 - 1
    return torch.cat([bits, within.to(dtype)])


def beside_each_other(x: Tensor, block: int) -> Tensor:
    """Return finite blocks whose largest numbers are 2**-10 to 2**10: one scale of the tensor reaches all of them."""
    blocks = x.where(x.isfinite(), 0.5).reshape(-1, block)
    exponents = torch.frexp(blocks.abs().amax(1, keepdim=True).float())[1]
    wanted = torch.arange(len(blocks))[:, None] * 7 % 21 - 10
    return torch.ldexp(blocks.double(), wanted - exponents).to(x.dtype).reshape(x.shape)


def elements(format: str, dtype_name: str, count: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield 1-d tensors for casts element by element: all that the page of profiles names, at most 4 M at once."""
    dtype, points = DTYPES[dtype_name], boundaries(format)
    generator = torch.Generator().manual_seed(seed)
    if dtype.itemsize == 2:
        yield all_patterns(dtype)
        return
    specials = (torch.tensor(BITS) - (torch.tensor(BITS) >> 31 << 32)).to(torch.int32).view(torch.float32)
    patterns = [all_patterns(t).to(dtype) for t in (torch.float16, torch.bfloat16)]
    yield torch.cat([specials.to(dtype), neighbours(points, dtype), *patterns])
    for start in range(0, count, 1 << 22):
        yield random_numbers(min(1 << 22, count - start), dtype, points, generator)


def blocks(format: str, dtype_name: str, block: int | str, count: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield 2-d tensors whose blocks along the last dimension stand at the edges of scales.

    Args:
        format: The element format, whose values and midpoints make ties.
        dtype_name: Of the tensors.
        block: Elements of a block, ``"row"`` or ``"tensor"``, whose tensors are small, one scale each.
        count: Elements in all.
        seed: Of the random numbers.
    """
    dtype, points = DTYPES[dtype_name], boundaries(format)
    generator = torch.Generator().manual_seed(seed)
    size = {"row": COLUMNS, "tensor": 16 * COLUMNS}.get(block, block) if isinstance(block, str) else block
    number = max(count // size, 64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    # 1. amaxes: a power of two times a factor, or times the largest value of the format; some ulps beside it
    exponents = torch.where(uniform(number) < 0.6, (uniform(number) * 24 - 12), (uniform(number) * 290 - 155)).floor()
    if dtype == torch.float16:
        exponents = exponents.clamp(-22, 14)
    top = float(points[: len(points) // 2][:-11].max())
    edges = torch.tensor([1.0, 0.75, 0.875, 1.75, 1.5, 0.9375, top, 1.25 * top, top / 3, 1.1], dtype=torch.float64)
    factors = edges[(uniform(number) * len(edges)).long()]
    amaxes = (factors * torch.exp2(exponents)).to(dtype).double()
    steps = (uniform(number) * 5).floor() - 2
    digits = {torch.float16: 10, torch.bfloat16: 7}.get(dtype, 23)
    amaxes += steps * torch.exp2(torch.frexp(amaxes)[1].double() - 1 - digits)
    # 2. five kinds of data under each amax: normal, uniform, ties of the grid, one outlier, numbers of one sign
    noise = torch.randn(number, size, dtype=torch.float64, generator=generator)
    uniforms = uniform(number, size) * 2 - 1
    within = points[points.abs() <= top]
    ties = within[(uniform(number, size) * len(within)).long()] / top
    kinds = torch.stack([noise / noise.abs().amax(1, keepdim=True), uniforms, ties, uniforms**15, uniforms.abs()])
    chosen = (uniform(number) * len(kinds)).long()
    data = kinds[chosen, torch.arange(number)]
    data[torch.arange(number), (uniform(number) * size).long()] = torch.where(uniform(number) < 0.5, 1.0, -1.0).double()
    x = (data * amaxes[:, None]).to(dtype)
    # 3. one block in 50 of zeros, of -0, with NaN, with Inf, of one number, of subnormals
    least = torch.finfo(dtype).smallest_normal
    for first, special in enumerate((0.0, -0.0, torch.nan, torch.inf, -torch.inf, least, least / 2, None)):
        rows = torch.arange(first * 3, number, 150)
        if special is None:
            x[rows] = x[rows, :1]
        elif special == special and abs(special) <= least:
            x[rows] = special
        else:
            x[rows, (uniform(len(rows)) * size).long()] = special
    if block == "tensor":
        yield from (part.reshape(16, COLUMNS).contiguous() for part in x)
    else:
        columns = size if block == "row" else size * max(COLUMNS // size, 1)
        yield x[: number * size // columns * columns // size].reshape(-1, columns)
