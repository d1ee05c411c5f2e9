# SPDX-License-Identifier: Apache-2.0
"""Tensors of numbers from seeds, and the tables that name dtypes."""

import torch

from fmtsim.lab.verify.probe_operands import spread

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIALS = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-40, 3e38, 6e-8, -1e-30)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device="cpu") -> torch.Tensor:
    """Return normal numbers, rounded to a dtype."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=drawn)
    return x.to(device, dtype)


def bfloat16s(*shape: int, seed: int = 0, device="cpu") -> torch.Tensor:
    """Return normal numbers in bfloat16."""
    return normal(*shape, seed=seed, dtype=torch.bfloat16, device=device)


def float64s(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers in float64."""
    return normal(*shape, seed=seed, dtype=torch.float64)


def wide(*shape: int, seed: int = 0, low: int = -12, high: int = 12, dtype: torch.dtype = torch.float32):
    """Return normal numbers times powers of two from ``low`` to below ``high``."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).to(dtype)


def wide_with_specials(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers over many binades, with zeros, subnormals, NaN and Inf where there is room for them."""
    x = wide(*shape, seed=seed, low=-12, high=8)
    if x.numel() > 100:
        specials = torch.tensor([0.0, -0.0, 1e-42, 3e38, torch.nan, torch.inf, -torch.inf])
        x.view(-1)[3 : 3 + 9 * len(specials) : 9] = specials
    return x.to(dtype)


def numbers(shape, dtype, seed=0, special=True):
    """Return normal numbers over many binades, with whole blocks of zeros, tiny, huge and special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = spread(shape, (-6, 6), generator)
    if special and x.dim():
        flat = x.view(-1)
        for i, value in enumerate(SPECIALS):
            flat[(i * 997 + 13) % flat.numel()] = value
        rows = x.view(x.shape[0], -1)
        for row, factor in ((2, 0.0), (3, 1e-38), (4, 1e30), (5, 1e-43)):
            if row < rows.shape[0]:
                rows[row] *= factor
    return x.to(dtype)


def e4m3_pair(m=6, n=10, k=160):
    """Return a [M, K] and b [N, K] in E4M3."""
    return wide(m, k, seed=1, low=-3, high=3).to(torch.float8_e4m3fn), wide(n, k, seed=2, low=-3, high=3).to(
        torch.float8_e4m3fn
    )
