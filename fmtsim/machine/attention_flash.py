# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of an H200 by FlashAttention-2, which takes 16-bit heads that are no multiple of 8.

PyTorch 2.11 fills such heads up with zeros. The order of operations was read in flash_fwd_kernel.h, softmax.h,
flash_bwd_kernel.h and flash_bwd_preprocess_kernel.h of flash-attention and compared with an H200 (docs/evidence.md).
Products run on ``hopper.mma``, 16 elements of k a step. PyTorch builds the kernels without fast math, and with
UNFUSE_FMA: a score is multiplied and rounded before the maximum is subtracted.
"""

import math

import numpy as np
import torch
from numpy import float32
from torch.nn.functional import pad

from fmtsim.cpu.runtime.jit import fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library, mufu, reduce
from fmtsim.machine.arrays import LN2, LOG2E, apply, canonical, chain_spec, fma, product, put, tree, words_of
from fmtsim.machine.attention import _heads
from fmtsim.machine.attention_efficient import dot_products
from fmtsim.machine.unknown import BySource, Guess, Nondeterministic, UnknownOrder

_QUERIES = 128  # of a block
_FULL = 0.8 * 264  # blocks of threads from which on none are added, by PyTorch's heuristic for 132 processors
_INF = float32(np.inf)


def _factors(scale: float | None, head: int) -> tuple[float32, float32]:
    """Return the factor of scores, and the factor that brings them to units of log2."""
    factor = float32(head**-0.5 if scale is None else scale)
    return factor, float32(float(factor) * math.log2(math.e))


@kernel
def _softmax_tile(scores, factor, limits, column, largest, sums, acc, p, start, stop):
    """Turn a tile of scores [heads, queries, keys] into P, for some heads; row i sees the first ``limits[i]`` keys.

    Each row's maximum and its four running sums are updated, acc [heads, queries, D] is multiplied by 2^(old - new).
    """
    for head in range(start, stop):
        for i in range(scores.shape[1]):
            # 1. the running maximum, before scores are scaled
            last = min(scores.shape[2], limits[i] - column)
            old = largest[head, i]
            new = old
            for j in range(last):
                new = scores[head, i, j] if scores[head, i, j] > new else new
            largest[head, i] = new
            new = new if new > -_INF else float32(0.0)
            # 2. what is there shrinks
            alpha = library.exp2((old - new) * factor)
            for j in range(acc.shape[2]):
                acc[head, i, j] *= alpha
            # 3. P = 2^(round(S c) - round(max c)); thread t of 4 holds columns 8 g + 2 t, 8 g + 2 t + 1
            for j in range(scores.shape[2]):
                y = library.exp2(scores[head, i, j] * factor - new * factor) if j < last else float32(0.0)
                put(p, (head, i, j), y)
                if j < 8 and j % 2 == 0:  # nvcc fuses the factor of what is there with a thread's first sum
                    sums[head, i, j // 2] = fma32(sums[head, i, j // 2], alpha, y)
                else:
                    sums[head, i, (j % 8) // 2] += y


def _limits(queries: int, keys: int, causal: bool) -> torch.Tensor:
    """Return the number of keys, from the first one on, that each query sees."""
    return torch.arange(1, queries + 1) if causal else torch.full((queries,), keys)


def _laid(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, D] in memory as the kernel's result is: like its operand, filled up to 8."""
    filled = torch.empty_like(pad(like.detach(), (0, -like.shape[-1] % 8)))
    return canonical(filled[..., : like.shape[-1]].copy_(x.reshape(like.shape)))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    (_, _, queries, head), keys = q.shape, k.shape[2]
    if q.element_size() != 2:
        raise UnknownOrder(f"attention in {q.dtype}")
    if head > 256 or head != v.shape[-1] or (causal and queries != keys) or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise UnknownOrder(f"attention with heads of {head}, values of {v.shape[-1]}, {queries} queries, {keys} keys")


def _doubt(q: torch.Tensor, keys: int, result: tuple[torch.Tensor, ...]) -> None:
    """Raise unless calls with heads that take such a kernel, and of such lengths, were compared with an H200.

    Raises:
        Guess: No call of such a kernel was compared: heads of 57 to 96, and of more than 120.
        BySource: Only calls of at most as many keys as queries were.
    """
    queries, head = q.shape[2:]
    if 56 < head <= 96 or head > 120:
        raise Guess(f"attention by FlashAttention-2 of {queries} x {keys}, heads of {head}, was not compared", result)
    if keys > queries:
        raise BySource("FlashAttention-2 of more keys than queries", result)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, logsumexp) of attention of [batch, heads, length, D].

    Raises:
        UnknownOrder: Heads of more than 256, values of another size, causal with unequal lengths, or keys that are
            shared among blocks of threads.
        Guess, BySource: It was not compared with an H200; it holds the result.
    """
    _check(q, k, v, causal)
    (batch, heads, queries, head), keys, spec = q.shape, k.shape[2], chain_spec("hopper.mma", q.dtype)
    if keys > (256 if head <= 64 else 128 if head <= 128 else 64) and batch * heads * -(-queries // 64) < _FULL:
        raise UnknownOrder(f"attention by FlashAttention-2 that may share {keys} keys among blocks of threads")
    factor, log2_factor = _factors(scale, head)
    tile_keys, limits = 128 if head <= 64 else 64, _limits(queries, keys, causal).numpy()
    q_rows, k_rows, v_rows = (_heads(x, heads) for x in (q, k, v))
    acc, largest = torch.zeros(q_rows.shape), np.full(q_rows.shape[:2], -_INF)
    sums = np.zeros((*largest.shape, 4), np.float32)
    # 1. the keys, the last tile first, and the blocks of queries that see them
    for column in range((keys - 1) // tile_keys * tile_keys, -1, -tile_keys):
        tile, first = slice(column, column + tile_keys), column // _QUERIES * _QUERIES if causal else 0
        scores = product(q_rows[:, first:], k_rows[:, tile], spec)
        p, some = torch.empty(scores.shape, dtype=q.dtype), acc[:, first:]
        state = largest[:, first:], sums[:, first:], some.numpy(), words_of(p)
        rows = scores.numpy(), log2_factor, limits[first:], column, *state
        run(lambda i, j: _softmax_tile(*rows, i, j), len(p), 1, 16 * scores[0].numel())  # noqa: B023
        some.copy_(product(p, v_rows[:, tile].mT, spec, c=some))
    # 2. O = acc (1 / L), and the logarithm of L; Inf, and no division, for an L of 0 or NaN
    total = (sums[..., 0] + sums[..., 2]) + (sums[..., 1] + sums[..., 3])
    logsumexp = np.where(total > 0, fma(largest, factor, apply(mufu.lg2, total) * LN2), _INF)
    inverse = float32(1.0) / np.where(total > 0, total, float32(1.0))
    output = _laid(acc * torch.from_numpy(inverse)[..., None], q)
    result = output, torch.from_numpy(logsumexp).view(batch, heads, queries)
    _doubt(q, keys, result)
    return result


@kernel
def _score_gradients(scores, dp, lse, delta, factor, limits, column, p, ds, start, stop):
    """Write P and dS of a tile [heads, queries, keys], for some heads; row i sees the first ``limits[i]`` keys."""
    for head in range(start, stop):
        for i in range(scores.shape[1]):
            shift = float32(0.0) if lse[head, i] == -_INF else lse[head, i] * LOG2E
            for j in range(scores.shape[2]):
                y = library.exp2(scores[head, i, j] * factor - shift) if column + j < limits[i] else float32(0.0)
                put(p, (head, i, j), y)
                put(ds, (head, i, j), y * (dp[head, i, j] - delta[head, i]))


def backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor,
    causal: bool, scale: float | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of (q, k, v).

    Raises:
        UnknownOrder: As ``forward``; more than four heads of a group.
        Nondeterministic: More than two blocks of keys: dQ is added by atomics. It holds the gradients.
        Guess, BySource: They were not compared with an H200; it holds the gradients.
    """
    _check(q, k, v, causal)
    (batch, heads, queries, head), (_, key_heads, keys, _) = q.shape, k.shape
    spec, (factor, log2_factor) = chain_spec("hopper.mma", q.dtype), _factors(scale, head)
    # queries and keys of a block; threads that add a row of dO O
    block, key_block, threads = 128 if head <= 64 else 64, 128 if head <= 128 else 64, 4 if 64 < head <= 96 else 8

    def turned(x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Return rows [batch * heads, queries, D] in whole blocks, the last block first, as the kernel takes them."""
        return pad(x, (0, 0, 0, -queries % block), value=fill).unflatten(1, (-1, block)).flip(1).flatten(1, 2)

    g_rows, q_rows, output_rows = (turned(_heads(x, heads)) for x in (g, q, output))
    k_rows, v_rows = _heads(k, heads), _heads(v, heads)
    count, rows = q_rows.shape[:2]
    lse = turned(logsumexp.reshape(count, queries, 1), torch.inf)[..., 0].numpy()
    limits = turned(_limits(queries, keys, causal)[None, :, None], keys).flatten().numpy()
    # 1. D = sum of dO O
    delta = tree(dot_products(g_rows, output_rows, threads))
    dq, dk, dv = torch.zeros(q_rows.shape), torch.empty_like(k_rows), torch.empty_like(v_rows)
    for column in range(0, keys, key_block):
        # 2. P and dS = P (dP - D), of the blocks of queries that see the keys
        tile, ends = slice(column, column + key_block), rows - column // block * block if causal else rows
        q_some, g_some = q_rows[:, :ends], g_rows[:, :ends]
        scores, dp = product(q_some, k_rows[:, tile], spec), product(g_some, v_rows[:, tile], spec)
        p, ds = torch.empty(scores.shape, dtype=q.dtype), torch.empty(scores.shape, dtype=q.dtype)
        arrays = scores.numpy(), dp.numpy(), lse, delta, log2_factor, limits, column, words_of(p), words_of(ds)
        run(lambda i, j: _score_gradients(*arrays, i, j), count, 1, 16 * scores[0].numel())  # noqa: B023
        # 3. dV = P^T dO; dK = dS^T Q scale; dQ, to which each block of keys adds its part
        dv[:, tile] = product(p.mT, g_some.mT, spec)
        dk[:, tile] = product(ds.mT, q_some.mT, spec) * float(factor)
        dq[:, :ends] += product(ds, k_rows[:, tile].mT, spec)
    dq = (dq * float(factor)).to(q.dtype).unflatten(1, (-1, block)).flip(1).flatten(1, 2)[:, :queries]
    dk, dv = (x.view(batch, key_heads, -1, keys, head) for x in (dk, dv))
    # 4. of grouped heads an operator adds the gradients
    if key_heads < heads:
        dk, dv = (reduce.reduce(x, [2], False, False, q.dtype) for x in (dk, dv))
    gradients = tuple(_laid(x, like).clone() for x, like in zip((dq, dk, dv), (q, k, v), strict=True))
    if keys > 2 * key_block:
        raise Nondeterministic(f"the gradient of q for {keys} keys: blocks of keys are added by atomics", gradients)
    _doubt(q, keys, gradients)
    return gradients
