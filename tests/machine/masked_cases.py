# SPDX-License-Identifier: Apache-2.0
"""Calls of attention with a mask and of one query, recorded on an H200 with those of ``cases.py``."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional

from tests.machine.cases import BF16, DTYPES, FP16, Case, numbers


def attention_mask(kind: str, seed: int, b: int, h: int, q: int, k: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a bias, or a boolean mask with ``pad`` on the left of a causal one or ``rows`` that are masked whole."""
    drawn = torch.from_numpy(np.random.Generator(np.random.Philox(seed + 50)).integers(0, 10, (b, 1, q, k)))
    if kind == "add":
        return numbers(seed + 51, (b, h, q, k), "normal", dtype)
    if kind == "inf":
        drawn[..., 0] = 9
        return numbers(seed + 51, (b, 1, q, k), "normal", dtype).masked_fill(drawn < 3, -math.inf)
    if kind == "pad":
        visible = torch.ones(q, k, dtype=torch.bool).tril(k - q).repeat(b, 1, 1, 1)
        for i in range(b):
            visible[i, ..., : 1 + i * 9 + k // 8] = False
        return visible
    drawn[..., 0] = 9
    if kind == "rows":
        drawn[:, :, 3::5] = 0
    return drawn > 2 if kind in ("bool", "rows") else None


MASKED = (
    [(1, 2, 2, 64, k, 64, dtype, "rows") for k in (64, 100, 128, 130, 180, 192, 200, 256) for dtype in DTYPES[1:]]
    + [(1 + (i + 1) % 2, *shape, DTYPES[1 + (i + j + 1) % 2], kind)
       for i, shape in enumerate(((2, 2, 64, 77, 32), (2, 2, 70, 33, 96), (4, 2, 64, 128, 128), (8, 2, 40, 150, 64),
                                  (2, 1, 64, 200, 256), (6, 3, 20, 100, 128)))
       for j, kind in enumerate(("add", "inf", "bool", "pad"))]
    + [(2, 4, 4, 1, k, 64, dtype, kind)
       for k in (20, 64, 100, 250) for dtype in DTYPES[1:] for kind in ("bool", "add", "rows")]
    + [(2, 2, 2, 1, 100, 64, BF16, "none"), (2, 4, 2, 1, 70, 128, FP16, "none")]
)  # fmt: skip

# of the data that the card was given
SEEDS = [*range(16), *range(25, 49), *(n for n in range(62, 93) if n % 4 != 1), 49, 50]


def masked_attention_cases() -> Iterator[Case]:
    """Yield forward passes of attention with a mask, and of one query."""
    for i, (b, h, key_heads, q, k, d, dtype, kind) in enumerate(MASKED):

        def call(device, i=i, b=b, h=h, key_heads=key_heads, q=q, k=k, d=d, dtype=dtype, kind=kind):  # type: ignore[no-untyped-def]
            seed = 50_000 + 100 * SEEDS[i]
            shapes = (b, h, q, d), (b, key_heads, k, d), (b, key_heads, k, d)
            inputs = [numbers(seed + n, shape, "normal", dtype).to(device) for n, shape in enumerate(shapes)]
            mask = attention_mask(kind, seed, b, h, q, k, dtype)
            mask = None if mask is None else mask.to(device)
            return (functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=h != key_heads),)

        yield Case(f"masked attention {h}/{key_heads} {q}x{k} {d} {kind} {str(dtype)[6:]} {i}", call)


def masked_gradient_cases() -> Iterator[Case]:
    """Yield gradients of the same calls, up to two tiles of keys; without rows whose gradient is NaN on the card."""
    for i, (b, h, key_heads, q, k, d, dtype, kind) in enumerate(MASKED):
        if kind == "rows" and q > 1 and k % 128 == 64:
            continue

        def call(device, i=i, b=b, h=h, key_heads=key_heads, q=q, k=k, d=d, dtype=dtype, kind=kind):  # type: ignore[no-untyped-def]
            seed = 50_000 + 100 * SEEDS[i]
            shapes = (b, h, q, d), (b, key_heads, k, d), (b, key_heads, k, d), (b, h, q, d)
            *inputs, g = (numbers(seed + n, shape, "normal", dtype).to(device) for n, shape in enumerate(shapes))
            mask = attention_mask(kind, seed, b, h, q, k, dtype)
            mask = None if mask is None else mask.to(device)
            inputs = [x.requires_grad_() for x in inputs]
            y = functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=h != key_heads)
            return torch.autograd.grad(y, inputs, g)

        yield Case(f"masked gradient {h}/{key_heads} {q}x{k} {d} {kind} {str(dtype)[6:]} {i}", call)
