# SPDX-License-Identifier: Apache-2.0
"""Time Triton kernels launched on a CPU with an H100's bits: least of three, after a first launch that compiles.

python benchmarks/kernels.py
"""

import time

import torch
import triton
import triton.language as tl

import fmtsim


@triton.jit
def softmax(x, y, n, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * n + i, (e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def matmul(a, b, c, n, T: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    sums = tl.zeros((T, T), tl.float32)
    for start in range(0, n, K):
        k = start + tl.arange(0, K)
        left, right = tl.load(a + rows[:, None] * n + k[None, :]), tl.load(b + k[:, None] * n + columns[None, :])
        sums = tl.dot(left, right, sums)
    tl.store(c + rows[:, None] * n + columns[None, :], sums.to(c.dtype.element_ty))


@triton.jit
def attention(q, k, v, o, scale, L: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1) * L * D
    m, d = block * T + tl.arange(0, T), tl.arange(0, D)
    queries = tl.load(q + head + m[:, None] * D + d[None, :])
    largest, total = tl.full((T,), -float("inf"), tl.float32), tl.zeros((T,), tl.float32)
    sums = tl.zeros((T, D), tl.float32)
    for start in range(0, (block + 1) * T, T):
        n = start + tl.arange(0, T)
        scores = tl.dot(queries, tl.load(k + head + n[None, :] * D + d[:, None])) * scale
        scores = tl.where(m[:, None] >= n[None, :], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        p, factor = tl.math.exp2(scores - new[:, None]), tl.math.exp2(largest - new)
        total = total * factor + tl.sum(p, 1)
        values = tl.load(v + head + n[:, None] * D + d[None, :])
        sums = tl.dot(p.to(tl.bfloat16), values, sums * factor[:, None])
        largest = new
    tl.store(o + head + m[:, None] * D + d[None, :], (sums / total[:, None]).to(o.dtype.element_ty))


def main() -> None:
    """Print a line a kernel."""
    x = torch.randn(4096, 4096).bfloat16()
    a, b = torch.randn(2, 1024, 1024).bfloat16()
    q, k, v = torch.randn(3, 4, 1024, 64).bfloat16()
    launches = {
        "softmax of 4096 x 4096": lambda: fmtsim.launch(
            softmax, 4096, x, torch.empty_like(x), 4096, B=4096, num_warps=8
        ),
        "matmul 1024^3": lambda: fmtsim.launch(
            matmul, (8, 8), a, b, torch.empty_like(a), 1024, T=128, K=64, num_warps=8, num_stages=3
        ),
        "attention, 4 heads of 1024 x 64": lambda: fmtsim.launch(
            attention, (16, 4), q, k, v, torch.empty_like(q), 0.18033688, L=1024, D=64, T=64
        ),
    }
    for name, run in launches.items():
        times = []
        for _ in range(4):
            start = time.perf_counter()
            record = run()
            times.append(time.perf_counter() - start)
        exact = "every bit" if record.exact else "not certain"
        print(f"{name:34} first {times[0]:6.2f} s, then {min(times[1:]):6.2f} s  {exact}")


if __name__ == "__main__":
    main()
