# SPDX-License-Identifier: Apache-2.0
"""Calls of a persistent Triton product on an H100: operands, drawn anew, and digests of results that were recorded.

The kernel has the blocks, warps and stages of batch_invariant_ops' ``matmul_persistent``. Recorded are 16 rows by 16
columns of each result, on an NVIDIA H100 80GB HBM3 with Triton 3.6.0 and torch 2.11.0+cu130, 2026-11-27; ``mma`` marks
calls that ran with mma.sync (DISABLE_MMA_V3=1) instead of wgmma, in two blocks of the same bits.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "gemm" / "data" / "triton_h100.json"
ROUNDING = "rounding"  # every product has its negative, so that a result consists of rounding errors alone
SAMPLE = 16  # rows and columns of a result that are recorded
_BITS = {"bf16": 8, "fp16": 11, "tf32": 24, "ieee": 24}  # of a drawn number; float32 for the last two
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SPREAD = {"plain": 3, "cancel": 0, "wide": 12, "special": 6}  # largest exponent of two that numbers are scaled by


class Call(NamedTuple):
    """Describe a call: unit, operands and precision, sizes, layout of both operands, bias, kind of numbers."""

    unit: str
    what: str
    m: int
    n: int
    k: int
    layout: str
    bias: bool
    numbers: str
    seed: int
    digest: str


def calls() -> list[Call]:
    """Return 320 calls with wgmma, 100 with mma.sync, then 120 and 80 whose results are rounding errors alone."""
    rng, drawn = np.random.Generator(np.random.PCG64(45)), []
    digests = json.loads(FILE.read_text())
    for unit, count in (("wgmma", 320), ("mma", 100)):
        for i in range(count):
            what = ("bf16", "fp16", "tf32", "ieee")[i % 4]
            m = int(rng.choice([1, 7, 16, 48, 100, 128, 256, 333, 512]))
            n = int(rng.choice([16, 64, 100, 144, 257, 512]))
            k = int(rng.choice([1, 8, 17, 64, 72, 100, 255, 256, 1000, 1024, 2048, 3333, 4096, 8192, 11008]))
            layout = ("linear", "linear", "mm", "columns")[int(rng.integers(4))]
            bias, numbers = bool(rng.integers(3) == 0), int(rng.integers(5))
            kind = ("plain", "plain", "cancel", "wide", "special")[numbers]
            seed = int(rng.integers(1 << 40))
            drawn.append(Call(unit, what, m, n, k, layout, bias, kind, seed, digests[len(drawn)]))
    for unit, whats in (("wgmma", ("bf16", "fp16", "tf32")), ("mma", ("bf16", "fp16"))):
        for what, i in itertools.product(whats, range(40)):
            seed = 7000 + 100 * whats.index(what) + i + 50 * (unit == "mma")
            n, k = _sizes(np.random.Generator(np.random.PCG64(seed)))
            drawn.append(Call(unit, what, (64, 333)[i % 2], n, k, "linear", False, ROUNDING, seed, digests[len(drawn)]))
    return drawn


def _sizes(rng: np.random.Generator) -> tuple[int, int]:
    return (96, 256)[int(rng.integers(2))], (512, 1024, 2048, 4096, 8192)[int(rng.integers(5))]


def _cancelling(call: Call) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    """Return operands whose exact sums are zero, [m, k] and [n, k], and the recorded rows and columns."""
    rng = np.random.Generator(np.random.PCG64(call.seed))
    _sizes(rng)
    drawn = []
    for size in (call.m, call.n):
        shape, bits = (size, call.k // 2), _BITS[call.what]
        x = rng.integers(-(1 << bits) + 1, 1 << bits, shape).astype(np.float64) / (1 << bits)
        drawn.append(x * np.exp2(rng.integers(-6, 7, shape).astype(np.float64)))
    order = rng.permutation(call.k)
    a, w = (np.concatenate([x, sign * x], 1)[:, order] for x, sign in zip(drawn, (1, -1), strict=True))
    rows, columns = (np.sort(rng.permutation(size)[:SAMPLE]) for size in (call.m, call.n))
    dtype = _DTYPES.get(call.what, torch.float32)
    return *(torch.from_numpy(x.astype(np.float32)).to(dtype) for x in (a, w)), rows, columns


def _floats(rng: np.random.Generator, shape: tuple[int, ...], what: str, numbers: str) -> Tensor:
    bits, spread = _BITS[what], _SPREAD[numbers]
    x = rng.integers(-(1 << bits) + 1, 1 << bits, shape).astype(np.float64) / (1 << bits)
    exponents = rng.integers(-spread, spread + 1, shape)
    if numbers == "wide" and what != "fp16":
        exponents = exponents * 5 - 3
    return torch.from_numpy((x * np.exp2(exponents.astype(np.float64))).astype(np.float32)).to(
        _DTYPES.get(what, torch.float32)
    )


def operands(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a [rows, k], b [k, columns] and the bias of the recorded rows and columns."""
    if call.numbers == ROUNDING:
        a, w, rows, columns = _cancelling(call)
        return a[rows], w[columns].t(), None
    rng = np.random.Generator(np.random.PCG64(call.seed))
    a, w = (_floats(rng, (size, call.k), call.what, call.numbers) for size in (call.m, call.n))
    if call.numbers == "cancel" and call.k > 1:  # half of the products are the others' negatives, but for some
        half, order = call.k // 2, torch.from_numpy(rng.permutation(call.k))
        a[:, half : 2 * half], w[:, half : 2 * half] = a[:, :half], -w[:, :half]
        a, w = a[:, order], w[:, order]
        if call.k > 8:
            w[:, :: max(1, call.k // 7)] *= 1.0 + 2.0**-6
    if call.numbers == "special":
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0**-20])
        for x in (a, w):
            places = torch.from_numpy(rng.integers(0, x.numel(), max(1, x.numel() // 4000)))
            x.view(-1)[places] = values[torch.from_numpy(rng.integers(0, 6, places.numel()))].to(x.dtype)
    bias = _floats(rng, (call.n,), call.what, "plain") if call.bias else None
    rng = np.random.Generator(np.random.PCG64(call.seed + 1))
    rows, columns = (np.sort(rng.permutation(size)[:SAMPLE]) for size in (call.m, call.n))
    a, w = a[rows], w[columns]
    if call.layout == "columns":
        a = a.t().contiguous().t()
    return a, w.t().contiguous() if call.layout == "mm" else w.t(), None if bias is None else bias[columns]


def digest(y: Tensor) -> str:
    """Return 64 bits of the SHA-256 of a result's bits, as ``FILE`` has them."""
    bits = y.contiguous().view(torch.int16 if y.itemsize == 2 else torch.int32).to(torch.int32)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]
