# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of an H200 in 16 bits: cuDNN's forward and backward kernels for several queries.

Found by probing (docs/evidence.md). Products run on ``hopper.wgmma``, 16 elements of k a step; special functions are
the unit's. Forward passes with a mask or of one query are in ``attention_rows.py``; dropout is not known.
"""

import math

import numpy as np
import torch
from numpy import float32
from torch.nn.functional import pad

from fmtsim.cpu.runtime.jit import fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import mufu
from fmtsim.machine.arrays import LN2, LOG2E, SIXTEEN_BITS, canonical, chain_spec, flush, product, put, read, words_of
from fmtsim.machine.unknown import Nondeterministic, UnknownOrder

_QUERIES, _KEYS = 128, 128  # a tile; rows of scores do not depend on how many queries are computed at once
_HEADS = 128  # at once
_TAME = 2.0**50  # magnitudes below which no score, and no gradient of one, is Inf or NaN


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [batch * heads, length, D]: each key head repeated for the query heads of its group."""
    return x.detach().repeat_interleave(heads // x.shape[1], 1).reshape(-1, *x.shape[2:])


def _stored(x: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, D], stored as [batch, length, heads, D] as cuDNN does."""
    return canonical(x.transpose(1, 2).clone(memory_format=torch.contiguous_format)).transpose(1, 2)


def _is_tame(*tensors: torch.Tensor) -> bool:
    """Return True if products of these with zeros are zeros, and no sum of their products overflows."""
    return all(bool(x.abs().amax() < _TAME) for x in tensors if x.numel())


def _takes_heads(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True for heads of queries and values that cuDNN takes."""
    return all(size % 8 == 0 and size <= 256 for size in (q.shape[-1], v.shape[-1]))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> None:
    if q.dtype not in SIXTEEN_BITS:
        raise UnknownOrder(f"attention in {q.dtype}")
    if dropout:
        raise UnknownOrder("attention with dropout")
    if not _takes_heads(q, v):
        raise UnknownOrder(f"attention with heads of {q.shape[-1]}, values of {v.shape[-1]}")


def knows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Return True if ``forward`` and, where it may be asked, ``backward`` know attention without mask and dropout."""
    known = q.ndim == 4 and q.dtype in SIXTEEN_BITS and _takes_heads(q, v)
    return known and q.shape[-2] > 1 and (causal or k.shape[-2] <= 2 * _KEYS or not torch.is_grad_enabled())


@kernel
def _probabilities(scores, factor, row, column, causal, first, largest, sums, acc, p, start, stop):
    """Turn a tile of scores [heads, queries, keys] into P = 2^(score - max), for some heads.

    Each row's maximum and its four running sums are updated, acc [heads, queries, D] is multiplied by alpha. ``row``
    and ``column`` are the places of the tile's first score.
    """
    keys = scores.shape[2]
    x = np.empty(keys, np.float32)
    for head in range(start, stop):
        for i in range(scores.shape[1]):
            # 1. scores in units of log2: X = round(S c); the running maximum
            last = min(keys, row + i - column + 1) if causal else keys
            old = float32(-np.inf) if first else largest[head, i]
            new = old
            for j in range(keys):
                x[j] = scores[head, i, j] * factor if j < last else float32(-np.inf)
                new = x[j] if x[j] > new else new
            # 2. thread t of 4 holds columns 8 g + 2 t and 8 g + 2 t + 1, and adds them upward
            for j in range(keys):
                x[j] = mufu.ex2(x[j] - new)
                put(p, (head, i, j), x[j])
            for t in range(4):
                total = float32(0.0)
                for j in range(2 * t, keys, 8):
                    total += x[j]
                    if j + 1 < keys:
                        total += x[j + 1]
                # 3. l = l alpha + tile sum, fused
                alpha = mufu.ex2(old - new)
                sums[head, i, t] = total if first else fma32(sums[head, i, t], alpha, total)
            largest[head, i] = new
            # 4. acc = acc alpha
            if not first:
                for j in range(acc.shape[2]):
                    acc[head, i, j] = flush(acc[head, i, j] * alpha)


@kernel
def _finish(acc, largest, sums, skipped, row, output, logsumexp, start, stop):
    """Write O = acc rcp(L) to output [heads, D, queries], and the logarithms of L, for some heads."""
    for head in range(start, stop):
        for i in range(acc.shape[1]):
            l4 = sums[head, i]
            total = (l4[0] + l4[1]) + (l4[2] + l4[3])
            inverse = mufu.rcp(total)
            for j in range(acc.shape[2]):
                y = acc[head, i, j]
                if skipped:  # what a tile of zeros adds: no subnormal number and no -0 stays
                    y = flush(y) + float32(0.0)
                put(output, (head, row + i, j), flush(y * inverse))
            logsumexp[head, row + i] = fma32(largest[head, i], LN2, mufu.lg2(total) * LN2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, dropout: float, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, logsumexp) of attention of [batch, heads, length, D].

    Raises:
        UnknownOrder: What the module's header names.
    """
    _check(q, k, v, dropout)
    if mask is not None or q.shape[-2] == 1:
        raise UnknownOrder("attention with a mask tensor or of one query, tile by tile")
    (batch, heads, queries, d), keys, spec = q.shape, k.shape[2], chain_spec("hopper.wgmma", q.dtype)
    factor = float32(scale or d**-0.5) * LOG2E
    # tiles above the diagonal add zeros, unless v holds NaN or Inf
    skips = causal and _is_tame(v)
    q, k, v = _heads(q, heads), _heads(k, heads), _heads(v, heads)
    output = torch.empty(batch * heads, queries, v.shape[-1], dtype=q.dtype)
    logsumexp = torch.empty(batch * heads, queries)
    for head in range(0, len(q), _HEADS):
        some = slice(head, head + _HEADS)
        for row in range(0, queries, _QUERIES):
            # 1. a tile of queries, which see keys before `ends` alone
            rows = q[some, row : row + _QUERIES]
            ends = min(keys, row + rows.shape[1]) if skips else keys
            largest, sums = np.empty(rows.shape[:2], np.float32), np.empty((*rows.shape[:2], 4), np.float32)
            acc, work = torch.zeros(0, 0, 0), 16 * rows.shape[1] * _KEYS
            # 2. the keys, a tile after the other
            for column in range(0, ends, _KEYS):
                first, tile = column == 0, slice(column, column + _KEYS)
                scores = product(rows, k[some, tile], spec)
                p = torch.empty(scores.shape, dtype=q.dtype)
                arrays = scores.numpy(), factor, row, column, causal, first, largest, sums, acc.numpy(), words_of(p)
                run(lambda i, j: _probabilities(*arrays, i, j), len(rows), 1, work)  # noqa: B023
                acc = product(p, v[some, tile].mT, spec, c=None if first else acc)
            # 3. the output, and the logarithms of the sums
            skipped = -(-ends // _KEYS) < -(-keys // _KEYS)
            done = acc.numpy(), largest, sums, skipped, row, words_of(output[some]), logsumexp[some].numpy()
            run(lambda i, j: _finish(*done, i, j), len(rows), 1, rows.shape[1] * v.shape[-1])  # noqa: B023
    output = _stored(output.view(batch, heads, queries, -1))
    return output, logsumexp.view(batch, heads, queries)


@kernel
def _score_gradients(scores, dp, lse, bias, delta, factor, row, column, causal, ends, p, ds, start, stop):
    """Write P and dS of a tile [heads, queries, keys], for some heads; ``ends`` are queries and keys in all."""
    for head in range(start, stop):
        for i in range(scores.shape[1]):
            last = min(ends[1], row + i + 1) if causal else ends[1]
            lse_row = lse[head, row + i]
            hidden = len(bias) > 0 and lse_row == float32(-np.inf)  # every key has a bias of -Inf
            last = last - column if row + i < ends[0] and not hidden else 0
            for j in range(scores.shape[2]):
                # 1. P = 2^(fma(S, scale, -logsumexp) log2 e), with a bias 2^((fma(S, scale, bias) - logsumexp) log2 e)
                if len(bias):
                    x = fma32(scores[head, i, j], factor, bias[head, row + i, column + j]) - lse_row
                else:
                    x = fma32(scores[head, i, j], factor, -lse_row)
                x *= LOG2E
                y = mufu.ex2(x if j < last else float32(-np.inf))
                # 2. dS = round((P (dP - D)) scale)
                put(p, (head, i, j), y)
                put(ds, (head, i, j), flush(flush(y * (dp[head, i, j] - delta[head, row + i])) * factor))


@kernel
def _dot_products(g, output, delta, start, stop):
    """Write D = sum of dO O of each row: pairs, four pairs in order, then the chunks of 8 by halving."""
    chunks = np.empty(32, np.float32)
    for head in range(start, stop):
        for i in range(g.shape[1]):
            chunks[:] = float32(0.0)
            for c in range(g.shape[2] // 8):
                for pair in range(4):
                    j = 8 * c + 2 * pair
                    total = read(g[head, i, j]) * read(output[head, i, j])
                    total += read(g[head, i, j + 1]) * read(output[head, i, j + 1])
                    chunks[c] = total if pair == 0 else chunks[c] + total
            n = 1
            while n < g.shape[2] // 8:
                n *= 2
            while n > 1:
                n //= 2
                for c in range(n):
                    chunks[c] += chunks[c + n]
            delta[head, i] = chunks[0]


@kernel
def _sum_groups(x, y, start, stop):
    """Write sums over the heads of groups, from zero: x [groups, heads, elements], rounded to 16 bits."""
    for group in range(start, stop):
        for j in range(x.shape[2]):
            total = float32(0.0)
            for head in range(x.shape[1]):
                total = flush(total + flush(read(x[group, head, j])))
            put(y, (group, j), total)


def backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor,
    bias: torch.Tensor | None, dropout: float, causal: bool, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of (q, k, v); ``bias`` is [batch or 1, heads or 1, queries or 1, keys] in q's dtype.

    Raises:
        UnknownOrder: What the module's header names; a bias of another dtype; a bias that makes rows negative
            throughout, where the keys fill half of the last tile: the GPU returns NaN for some of them.
        Nondeterministic: More than two blocks of 128 keys, not causal: dQ is added by atomics.
    """
    _check(q, k, v, dropout)
    if bias is not None and (bias.dtype != q.dtype or causal):
        raise UnknownOrder(f"attention in {q.dtype} with a mask in {bias.dtype}, or causal with a mask")
    batch, heads, key_heads = q.shape[0], q.shape[1], k.shape[1]
    queries, keys, d = q.shape[2], k.shape[2], q.shape[3]
    if keys > 2 * _KEYS and not causal:
        raise Nondeterministic(f"the gradient of q for {keys} keys, not causal: blocks of keys are added by atomics")
    low = logsumexp[logsumexp > -math.inf]
    if bias is not None and keys % _KEYS == _KEYS // 2 and bool((low < -8).any()):
        raise UnknownOrder(f"the gradient of q for {keys} keys and rows that a mask makes negative throughout")
    factor, spec = float32(scale or d**-0.5), chain_spec("hopper.wgmma", q.dtype)
    skips = causal and _is_tame(g, q, k, v, output)
    to_tile = lambda x: pad(_heads(x, heads), (0, 0, 0, -x.shape[2] % 64))  # noqa: E731
    g, q, k, v, output = map(to_tile, (g, q, k, v, output))
    lse = pad(logsumexp.reshape(batch * heads, queries), (0, -queries % 64)).numpy()
    biases = np.empty((0, 0, 0), np.float32)
    if bias is not None:
        rows = bias.detach().float().expand(batch, heads, queries, keys).reshape(-1, queries, keys)
        biases = pad(rows, (0, -keys % 64, 0, -queries % 64)).numpy()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for head in range(0, len(q), _HEADS // 4):
        some = slice(head, head + _HEADS // 4)
        g_some, q_some, k_some, v_some, output_some = (x[some] for x in (g, q, k, v, output))
        count, rows_in_all = q_some.shape[:2]
        delta, total = np.empty((count, rows_in_all), np.float32), torch.zeros(count, rows_in_all, d)
        words = words_of(g_some), words_of(output_some)
        run(lambda i, j: _dot_products(*words, delta, i, j), count, 1, rows_in_all * d)  # noqa: B023
        # a tile of keys after the other: the last one first, as dQ is added
        last = (k_some.shape[1] - 1) // _KEYS * _KEYS
        for column in range(last, -1, -_KEYS):
            # 1. scores, and dP = dO V^T; above the diagonal P and dS are zeros
            tile, row = slice(column, column + _KEYS), min(column, rows_in_all) if skips else 0
            if row == rows_in_all:
                dk[some, tile] = dv[some, tile] = 0
                continue
            scores = product(q_some[:, row:], k_some[:, tile], spec)
            dp = product(g_some[:, row:], v_some[:, tile], spec)
            p, ds = torch.empty(scores.shape, dtype=q.dtype), torch.empty(scores.shape, dtype=q.dtype)
            arrays = (
                scores.numpy(), dp.numpy(), lse[some], biases[some], delta, factor, row, column, causal,
                (queries, keys), words_of(p), words_of(ds),
            )  # fmt: skip
            run(lambda i, j: _score_gradients(*arrays, i, j), count, 1, 32 * scores[0].numel())  # noqa: B023
            # 2. dV = P^T dO; dK = dS^T Q
            dv[some, tile] = product(p.mT, g_some[:, row:].mT, spec)
            dk[some, tile] = product(ds.mT, q_some[:, row:].mT, spec)
            # 3. dQ = dS K, a chain for each 128 keys
            part = product(ds, k_some[:, tile].mT, spec)
            total[:, row:] = part if column == last else total[:, row:] + part
        dq[some] = total
    dq, dk, dv = dq[:, :queries], dk[:, :keys], dv[:, :keys]
    # groups: the gradients of each head, rounded, are added in float32
    if key_heads < heads:
        dk, dv = (_grouped(x.reshape(batch * key_heads, heads // key_heads, -1)) for x in (dk, dv))
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    dq, dk, dv = (_stored(x.reshape(batch, h, n, -1)) for x, (h, n) in zip((dq, dk, dv), shapes, strict=True))
    return dq, dk, dv


def _grouped(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype)
    run(lambda i, j: _sum_groups(words_of(x), words_of(y), i, j), len(x), 1, x[0].numel())
    return y
