# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of an H200 by FlashAttention-2, which takes 16-bit heads that are no multiple of 8.

PyTorch 2.11 fills such heads up with zeros. The order of operations was read in flash_fwd_kernel.h, softmax.h,
flash_bwd_kernel.h and flash_bwd_preprocess_kernel.h of flash-attention and compared with an H200 (docs/evidence.md).
Products run on ``hopper.mma``, 16 elements of k a step. PyTorch builds the kernels without fast math, and with
UNFUSE_FMA: a score is multiplied and rounded before the maximum is subtracted.
"""

import numpy as np
import torch
from numpy import float32
from torch.nn.functional import pad

from fmtsim.cpu.runtime.jit import fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library, mufu, reduce
from fmtsim.machine.arrays import LN2, LOG2E, add_threads, canonical, chain_spec, product, put, read, words_of
from fmtsim.machine.attention import _heads
from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder

_QUERIES = 128  # of a block
_FULL = 0.8 * 264  # blocks of threads from which on none are added, by PyTorch's heuristic for 132 processors
_INF = float32(np.inf)


def _factors(scale: float | None, head: int) -> tuple[float32, float32]:
    """Return the factor of scores, and the factor that brings them to units of log2."""
    factor = float32(head**-0.5 if scale is None else scale)
    return factor, float32(float(factor) * np.log2(np.e))


@kernel
def _softmax_tile(scores, factor, row, column, causal, largest, sums, acc, p, start, stop):
    """Turn a tile of scores [heads, queries, keys] into P, for some heads.

    Each row's maximum and its four running sums are updated, acc [heads, queries, D] is multiplied by 2^(old - new).
    ``row`` and ``column`` are the places of the tile's first score.
    """
    keys = scores.shape[2]
    for head in range(start, stop):
        for i in range(scores.shape[1]):
            # 1. the running maximum, before scores are scaled
            last = min(keys, row + i - column + 1) if causal else keys
            old = largest[head, i]
            new = old
            for j in range(last):
                new = scores[head, i, j] if scores[head, i, j] > new else new
            known = new if new > -_INF else float32(0.0)
            # 2. what is there shrinks
            alpha = library.exp2((old - known) * factor)
            for t in range(4):
                sums[head, i, t] *= alpha
            for j in range(acc.shape[2]):
                acc[head, i, j] *= alpha
            # 3. P = 2^(round(S c) - round(max c)); thread t of 4 holds columns 8 g + 2 t, 8 g + 2 t + 1
            shift = known * factor
            for j in range(keys):
                y = library.exp2(scores[head, i, j] * factor - shift) if j < last else float32(0.0)
                put(p, (head, i, j), y)
                sums[head, i, (j % 8) // 2] += y
            largest[head, i] = new


@kernel
def _finish(acc, largest, sums, factor, row, output, logsumexp, start, stop):
    """Write O = acc (1 / L) to output [heads, queries, D], and the logarithms of L, for some heads."""
    for head in range(start, stop):
        for i in range(acc.shape[1]):
            l4 = sums[head, i]
            total = (l4[0] + l4[2]) + (l4[1] + l4[3])
            known = total > float32(0.0)
            inverse = float32(1.0) / total if known else float32(1.0)
            for j in range(acc.shape[2]):
                put(output, (head, row + i, j), acc[head, i, j] * inverse)
            logsumexp[head, row + i] = fma32(largest[head, i], factor, mufu.lg2(total) * LN2) if known else _INF


def _laid(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, D] in memory as the kernel's own result is: like its filled-up operand."""
    return canonical(torch.empty_like(_filled(like))[..., : like.shape[-1]].copy_(x.reshape(like.shape)))


def _filled(x: torch.Tensor) -> torch.Tensor:
    """Return x with heads of a multiple of 8."""
    return pad(x.detach(), (0, -x.shape[-1] % 8))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    (_, _, queries, head), keys = q.shape, k.shape[2]
    if head > 256 or head != v.shape[-1] or (causal and queries != keys) or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise UnknownOrder(f"attention with heads of {head}, values of {v.shape[-1]}, {queries} queries, {keys} keys")


def _doubt(q: torch.Tensor, k: torch.Tensor, result: tuple[torch.Tensor, ...]) -> None:
    """Raise Guess unless calls of such a kernel and of such lengths were compared with an H200."""
    filled, longest = -(-q.shape[3] // 8) * 8, max(q.shape[2], k.shape[2])
    if filled % 32 == 0 or 64 < filled < 96 or filled > 128 or longest > 128 or q.shape[2] != k.shape[2]:
        raise Guess("attention by FlashAttention-2 that was not compared with an H200", result)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, logsumexp) of attention of [batch, heads, length, D].

    Raises:
        UnknownOrder: Heads of more than 256, values of another size, causal with unequal lengths, or keys that are
            shared among blocks of threads.
        Guess: It was not compared with an H200; it holds the result.
    """
    _check(q, k, v, causal)
    (batch, heads, queries, head), keys, spec = q.shape, k.shape[2], chain_spec("hopper.mma", q.dtype)
    if keys > (256 if head <= 64 else 128 if head <= 128 else 64) and batch * heads * -(-queries // 64) < _FULL:
        raise UnknownOrder(f"attention by FlashAttention-2 that may share {keys} keys among blocks of threads")
    factor, log2_factor = _factors(scale, head)
    tile_keys = 128 if head <= 64 else 64
    q_rows, k_rows, v_rows = (_heads(x, heads) for x in (q, k, v))
    output, logsumexp = torch.empty(q_rows.shape, dtype=q.dtype), torch.empty(q_rows.shape[:2])
    for row in range(0, queries, _QUERIES):
        # 1. a block of queries
        rows = q_rows[:, row : row + _QUERIES]
        ends = min(keys, row + _QUERIES) if causal else keys
        largest, sums = np.full(rows.shape[:2], -_INF), np.zeros((*rows.shape[:2], 4), np.float32)
        acc = torch.zeros(rows.shape)
        # 2. the keys, the last tile first
        for column in range((ends - 1) // tile_keys * tile_keys, -1, -tile_keys):
            tile = slice(column, column + tile_keys)
            scores = product(rows, k_rows[:, tile], spec)
            p = torch.empty(scores.shape, dtype=q.dtype)
            arrays = scores.numpy(), log2_factor, row, column, causal, largest, sums, acc.numpy(), words_of(p)
            run(lambda i, j: _softmax_tile(*arrays, i, j), len(rows), 1, 16 * scores[0].numel())  # noqa: B023
            acc = product(p, v_rows[:, tile].mT, spec, c=acc)
        # 3. the output, and the logarithms of the sums
        done = acc.numpy(), largest, sums, factor, row, words_of(output), logsumexp.numpy()
        run(lambda i, j: _finish(*done, i, j), len(rows), 1, rows[0].numel())  # noqa: B023
    result = _laid(output, q), logsumexp.view(batch, heads, queries)
    _doubt(q, k, result)
    return result


@kernel
def _dot_products(g, output, threads, delta, start, stop):
    """Write D = sum of dO O of each row: thread t of T takes chunks t, t + T ... of 8, then halving adds the threads."""
    for head in range(start, stop):
        for i in range(g.shape[1]):
            partial = np.zeros(threads, np.float32)
            for j in range(g.shape[2]):
                partial[(j // 8) % threads] += read(g[head, i, j]) * read(output[head, i, j])
            delta[head, i] = add_threads(partial, threads)


@kernel
def _score_gradients(scores, dp, lse, delta, factor, places, column, causal, p, ds, start, stop):
    """Write P and dS of a tile [heads, queries, keys], for some heads; ``places`` are the queries' own places."""
    for head in range(start, stop):
        for i in range(scores.shape[1]):
            shift = lse[head, i] * LOG2E if lse[head, i] > -_INF else float32(0.0)
            for j in range(scores.shape[2]):
                y = library.exp2(scores[head, i, j] * factor - shift)
                if causal and column + j > places[i]:
                    y = float32(0.0)
                put(p, (head, i, j), y)
                put(ds, (head, i, j), y * (dp[head, i, j] - delta[head, i]))


def backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor,
    causal: bool, scale: float | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of (q, k, v).

    Raises:
        UnknownOrder: As ``forward``.
        Nondeterministic: More than two blocks of keys: dQ is added by atomics. It holds the gradients.
        Guess: They were not compared with an H200; it holds the gradients.
    """
    _check(q, k, v, causal)
    (batch, heads, queries, head), (_, key_heads, keys, _) = q.shape, k.shape
    spec, (factor, log2_factor) = chain_spec("hopper.mma", q.dtype), _factors(scale, head)
    # queries and keys of a block; threads that add a row of dO O
    block, key_block, threads = 128 if head <= 64 else 64, 128 if head <= 128 else 64, 4 if 64 < head <= 96 else 8

    def turned(x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Return [batch * heads, rows, D] in whole blocks of queries, the last block first, as the kernel goes."""
        return pad(x, (0, 0, 0, -queries % block), value=fill).unflatten(1, (-1, block)).flip(1).flatten(1, 2)

    g_rows, q_rows, output_rows = (turned(_heads(_filled(x), heads)) for x in (g, q, output))
    k_rows, v_rows = _heads(_filled(k), heads), _heads(_filled(v), heads)
    lse = turned(logsumexp.reshape(len(q_rows), queries, 1), torch.inf)[..., 0].numpy()
    places = turned(torch.arange(queries)[None, :, None]).flatten().numpy()
    # 1. D = sum of dO O
    count, rows, delta = *q_rows.shape[:2], np.empty(lse.shape, np.float32)
    words = words_of(g_rows), words_of(output_rows)
    run(lambda i, j: _dot_products(*words, threads, delta, i, j), count, 1, 4 * q_rows[0].numel())
    dq, dk, dv = torch.zeros(q_rows.shape), torch.empty_like(k_rows), torch.empty_like(v_rows)
    for column in range(0, keys, key_block):
        # 2. P and dS = P (dP - D), of the blocks of queries that see the keys
        tile, ends = slice(column, column + key_block), rows - column // block * block if causal else rows
        q_some, g_some = q_rows[:, :ends], g_rows[:, :ends]
        scores, dp = product(q_some, k_rows[:, tile], spec), product(g_some, v_rows[:, tile], spec)
        p, ds = torch.empty(scores.shape, dtype=q.dtype), torch.empty(scores.shape, dtype=q.dtype)
        arrays = scores.numpy(), dp.numpy(), lse, delta, log2_factor, places, column, causal, words_of(p), words_of(ds)
        run(lambda i, j: _score_gradients(*arrays, i, j), count, 1, 16 * scores[0].numel())  # noqa: B023
        # 3. dV = P^T dO; dK = dS^T Q scale; dQ, to which each block of keys adds its part
        dv[:, tile] = product(p.mT, g_some.mT, spec)
        dk[:, tile] = product(ds.mT, q_some.mT, spec) * factor
        dq[:, :ends] += product(ds, k_rows[:, tile].mT, spec)
    dq = (dq * factor).to(q.dtype).unflatten(1, (-1, block)).flip(1).flatten(1, 2)[:, :queries]
    # 4. of grouped heads an operator adds the gradients
    if key_heads < heads:
        shape = batch, key_heads, heads // key_heads, keys, -1
        grouped = (x.view(shape).permute(0, 3, 1, 2, 4).contiguous() for x in (dk, dv))
        dk, dv = (reduce.reduce(x, [3], False, False, q.dtype).transpose(1, 2) for x in grouped)
    gradients = tuple(_laid(x[..., :head], y).clone() for x, y in zip((dq, dk, dv), (q, k, v), strict=True))
    if keys > 2 * key_block:
        raise Nondeterministic(f"the gradient of q for {keys} keys: blocks of keys are added by atomics", gradients)
    _doubt(q, k, gradients)
    return gradients
