# SPDX-License-Identifier: Apache-2.0
"""The numbers that tell one rounding from another: values, ties and boundaries, each with its float neighbours."""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch

from fmtsim.formats.display import count_of
from fmtsim.formats.spec import ElementFormat, IntFormat, LogFormat

SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@lru_cache(maxsize=64)
def finite_values(fmt: ElementFormat) -> tuple[float, ...]:
    """Return the distinct finite values of a format of at most 16 bits, in order."""
    values = (fmt.value(code) for code in range(count_of(fmt)))
    return tuple(sorted({value for value in values if math.isfinite(value)}))


def boundaries(fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return values, ties and places beyond the ends with both neighbours in the dtype, and special values.

    Args:
        fmt: An element format of at most 16 bits.
        dtype: float32 or float64; numbers beyond it are left out.

    Returns:
        1-D tensor in which every bit pattern appears once.
    """
    points = torch.tensor(list(_points(fmt)), dtype=torch.float64)
    points = torch.cat([points, -points]).to(dtype)
    up, down = (torch.nextafter(points, torch.full_like(points, end)) for end in (math.inf, -math.inf))
    info = torch.finfo(dtype)
    smallest = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    ends = [info.max, info.tiny, smallest]
    extra = torch.tensor([*SPECIALS, *ends, *(-end for end in ends)], dtype=dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    every = torch.cat([points, up, down, extra])
    every = torch.where(every.isnan(), torch.full_like(every, math.nan), every)
    return every.view(integers).unique().view(dtype)


def _points(fmt: ElementFormat) -> Iterator[float]:
    values = finite_values(fmt)
    yield from values
    for low, high in zip(values, values[1:], strict=False):
        yield (low + high) / 2
    if isinstance(fmt, LogFormat):
        yield from fmt.thresholds
    # Beyond the end the grid goes on in the mind: its next value, and the tie before it.
    step = values[-1] - values[-2] if len(values) > 1 else values[-1]
    for steps in (0.5, 1.0, 1.5, 2.0, 3.0):
        yield values[-1] + steps * step
    if isinstance(fmt, IntFormat):
        yield from (values[0] - step / 2, values[0] - step)


def words_for(count: int, bits: int) -> torch.Tensor:
    """Return random integers below ``2**bits`` with a fixed seed, int64."""
    return torch.randint(1 << bits, (count,), generator=torch.Generator().manual_seed(20), dtype=torch.int64)


def rough_matrix(dtype: torch.dtype, columns: int = 150) -> torch.Tensor:
    """Return a matrix whose rows hold ordinary, wide-ranged, tiny, huge, zero, NaN and infinite numbers.

    The columns divide into no usual block, so that the last block of each row is short.
    """
    generator = torch.Generator().manual_seed(21)
    x = torch.randn(9, columns, generator=generator, dtype=torch.float64)
    x[1] *= torch.exp2(torch.randint(-30, 30, (columns,), generator=generator).to(torch.float64))
    x[2] *= 2.0**-140
    x[3] *= 1e38
    x[4] = 0.0
    x[5, 3] = math.nan
    x[6, 5], x[6, columns - 3] = math.inf, -math.inf
    x[7] = torch.round(x[7] * 4) / 2  # ties
    x[8, ::2] = -0.0
    return x.to(dtype)
