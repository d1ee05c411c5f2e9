# SPDX-License-Identifier: Apache-2.0
"""Operands that show how a product is added: numbers far apart, special ones among others, terms that cancel.

Each function draws in a fixed order: recorded evidence names seeds, whose bits must not change.
"""

import torch
from torch import Tensor

NEAR = ((2, 64), (0, 64), (1, 48))  # products between near pairs, before the first, and within one


def spread(
    shape: tuple[int, ...], ends: tuple[int, int], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return normal numbers times powers of two, from ``ends[0]`` to below ``ends[1]``, on the generator's device."""
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    return x * torch.exp2(torch.randint(*ends, shape, generator=generator, device=generator.device).to(dtype))


def sprinkled(x: Tensor, values: tuple[float, ...], one_in: int, generator: torch.Generator) -> Tensor:
    """Return x with one element in ``one_in`` replaced by one of the values."""
    chosen = torch.tensor(values, dtype=x.dtype)[torch.randint(len(values), x.shape, generator=generator)]
    return torch.where(torch.randint(one_in, x.shape, generator=generator) == 0, chosen, x)


def cancel_neighbours(x: Tensor, generator: torch.Generator) -> None:
    """Make every second column its left neighbour, negated and up to a sixteenth larger or smaller."""
    pairs = x.shape[-1] // 2 * 2
    bend = torch.randint(-1, 2, (*x.shape[:-1], pairs // 2), generator=generator) / 16
    x[..., 1:pairs:2] = -x[..., 0:pairs:2] * (1 + bend)


def cancel_scattered(x: Tensor, small: int, large: int, generator: torch.Generator) -> None:
    """Scale every other row by 2**small, except for values times 2**large in pairs that cancel, far apart or near."""
    x[1::2] *= 2.0**small
    for number, row in enumerate(x[1::2]):
        positions = torch.randperm(len(row), generator=generator)
        first, second = positions[: len(row) // 4 * 2].reshape(2, -1)
        stride, offset, apart = (int(torch.randint(*ends, (), generator=generator)) for ends in NEAR)
        apart = min(apart, len(row) // 2)
        if number % 2 and apart:
            first = torch.arange(offset % (len(row) - apart), len(row) - apart, stride + apart)
            second = first + apart
        row[first] *= 2.0 ** (large - small)
        row[second] = -row[first]
