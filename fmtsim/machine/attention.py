# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of an H200 in 16 bits: cuDNN's forward and backward kernels for several queries.

Found by probing (docs/evidence.md). Products run on ``hopper.wgmma``, 16 elements of k a step; special functions are
the unit's. Masks, dropout, sliding windows and one query are not known.
"""

import math

import numpy as np
import torch
from numpy import float32

from fmtsim.engines.cpu.runtime.jit import fma32, kernel
from fmtsim.engines.cpu.runtime.pool import run
from fmtsim.gemm.products.scaled import mma
from fmtsim.machine import mufu
from fmtsim.machine.arrays import apply, canonical, chain, fma, to_f32, tree
from fmtsim.machine.unknown import Nondeterministic, UnknownOrder

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LOG2E, _LN2 = float32(math.log2(math.e)), float32(math.log(2.0))
_QUERIES, _KEYS = 64, 128  # a tile


def _product(a: np.ndarray, b: np.ndarray, acc_f32: np.ndarray | None, dtype: torch.dtype) -> np.ndarray:
    """Return a b^T + acc of [heads, M, K] and [heads, N, K]: one chain of wgmma steps."""
    operands = [torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in (a, b)]
    acc = None if acc_f32 is None else torch.from_numpy(np.ascontiguousarray(acc_f32))
    name = _FORMATS[dtype]
    return mma(operands[0], operands[1], acc, target="hopper.wgmma", formats=name, accumulate="fp32").numpy()


def _heads(x: torch.Tensor, heads: int) -> np.ndarray:
    """Return [batch * heads, length, D]: each key head repeated for the query heads of its group."""
    return to_f32(x.repeat_interleave(heads // x.shape[1], 1).reshape(-1, *x.shape[2:]))


def _padded(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _tensor(x_f32: np.ndarray, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [batch, heads, length, D], stored as [batch, length, heads, D] as cuDNN does."""
    x = torch.from_numpy(np.ascontiguousarray(x_f32.reshape(batch, -1, *x_f32.shape[1:]).swapaxes(1, 2)))
    return canonical(x.to(dtype)).transpose(1, 2)


def _flush(x_f32: np.ndarray) -> np.ndarray:
    """Return values with zeros of their sign for subnormal ones: the kernels are compiled so."""
    return np.where(np.abs(x_f32) < float32(2.0**-126), x_f32 * float32(0.0), x_f32)


def _sum_heads(x_f32: np.ndarray) -> np.ndarray:
    """Return the sums over the heads of groups, [groups, heads, length, D]."""
    total = np.zeros_like(x_f32[:, 0])
    for head in range(x_f32.shape[1]):
        total = _flush(total + x_f32[:, head])
    return total


def _rounded(x_f32: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x_f32)).to(dtype).float().numpy()


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, dropout: float) -> None:
    if q.dtype not in _FORMATS:
        raise UnknownOrder(f"attention in {q.dtype}")
    if mask is not None or dropout:
        raise UnknownOrder("attention with a mask tensor or dropout")
    if q.shape[-2] == 1:
        raise UnknownOrder("attention of one query")
    if q.shape[-1] % 32 or q.shape[-1] != v.shape[-1] or q.shape[-1] > 256:
        raise UnknownOrder(f"attention with heads of {q.shape[-1]}")


@kernel
def _probabilities(x, largest, sums, alphas, first, start, stop):
    """Turn a tile's scores into 2^(score - max) in place; update each row's maximum and its four running sums."""
    keys = x.shape[1]
    for row in range(start, stop):
        # 1. the running maximum
        new = largest[row]
        for j in range(keys):
            new = x[row, j] if x[row, j] > new else new
        # 2. thread t of 4 holds columns 8 g + 2 t and 8 g + 2 t + 1, and adds them upward
        tile = np.zeros(4, np.float32)
        for j in range(keys):
            p = mufu.ex2(x[row, j] - new)
            x[row, j] = p
            tile[(j % 8) // 2] += p
        # 3. l = l alpha + tile sum, fused
        alpha = mufu.ex2(largest[row] - new)
        for t in range(4):
            sums[row, t] = tile[t] if first else fma32(sums[row, t], alpha, tile[t])
        alphas[row], largest[row] = alpha, new


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, dropout: float, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, logsumexp) of attention of [batch, heads, length, D].

    Raises:
        UnknownOrder: What the module's header names.
    """
    _check(q, k, v, mask, dropout)
    dtype, batch, heads = q.dtype, q.shape[0], q.shape[1]
    factor = float32((scale or q.shape[-1] ** -0.5) * math.log2(math.e))
    queries, keys = q.shape[2], k.shape[2]
    padded_queries, padded_keys = (math.ceil(n / t) * t for n, t in ((queries, _QUERIES), (keys, _KEYS)))
    q_f32 = _padded(_heads(q, heads), padded_queries)
    k_f32, v_f32 = (_padded(_heads(x, heads), padded_keys) for x in (k, v))
    # 1. scores in units of log2: X = round(S c)
    scores = _product(q_f32, k_f32, None, dtype) * factor
    scores[:, :, keys:] = -np.inf
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    rows = scores.shape[0] * padded_queries
    largest, alphas = np.full(rows, -np.inf, np.float32), np.empty(rows, np.float32)
    sums, acc = np.empty((rows, 4), np.float32), np.empty(0, np.float32)
    # 2. tiles of 128 keys: p = 2^(X - m), l, and acc = acc alpha + P V
    for start in range(0, padded_keys, _KEYS):
        tile = np.ascontiguousarray(scores[:, :, start : start + _KEYS]).reshape(rows, _KEYS)
        first = start == 0
        run(lambda i, j: _probabilities(tile, largest, sums, alphas, first, i, j), rows, 1, 8 * _KEYS)  # noqa: B023
        v_tile = v_f32[:, start : start + _KEYS].swapaxes(1, 2)
        p = tile.reshape(scores.shape[0], padded_queries, _KEYS)
        if first:
            acc = _product(p, v_tile, None, dtype)
        else:
            acc = _product(p, v_tile, _flush(acc * alphas.reshape(*acc.shape[:2], 1)), dtype)
    # 3. O = acc rcp(L); logsumexp = fma(m, ln 2, round(lg2(L) ln 2))
    total = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    output = _flush(acc * apply(mufu.rcp, total).reshape(*acc.shape[:2], 1))
    logsumexp = fma(largest, _LN2, apply(mufu.lg2, total) * _LN2).reshape(batch, heads, padded_queries)
    return _tensor(output[:, :queries], batch, dtype), torch.from_numpy(logsumexp[:, :, :queries].copy())


def backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor,
    mask: object, dropout: float, causal: bool, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of (q, k, v).

    Raises:
        UnknownOrder: What the module's header names, and groups of more than two heads.
        Nondeterministic: More than two blocks of 128 keys, not causal: dQ is added by atomics.
    """
    _check(q, k, v, mask, dropout)
    dtype, batch, heads, key_heads = q.dtype, q.shape[0], q.shape[1], k.shape[1]
    queries, keys, d = q.shape[2], k.shape[2], q.shape[3]
    if keys > 2 * _KEYS and not causal:
        raise Nondeterministic(f"the gradient of q for {keys} keys, not causal: blocks of keys are added by atomics")
    factor = float32(scale or d**-0.5)
    padded_queries, padded_keys = (math.ceil(n / 64) * 64 for n in (queries, keys))
    g_f32, q_f32, o_f32 = (_padded(_heads(x, heads), padded_queries) for x in (g, q, output))
    k_f32, v_f32 = (_padded(_heads(x, heads), padded_keys) for x in (k, v))
    lse = _padded(logsumexp.reshape(batch * heads, queries, 1).numpy(), padded_queries)
    # 1. D = sum of dO O: pairs, four pairs in order, then the chunks of 8 by halving
    pairs = (g_f32 * o_f32).reshape(*o_f32.shape[:2], d // 8, 4, 2)
    chunks = chain(pairs[..., 0] + pairs[..., 1])
    width = 1 << (d // 8 - 1).bit_length()
    delta = tree(np.pad(chunks, [(0, 0), (0, 0), (0, width - chunks.shape[-1])]))[..., None]
    # 2. P = 2^(fma(S, scale, -logsumexp) log2 e)
    scores = fma(_product(q_f32, k_f32, None, dtype), factor, -lse) * _LOG2E
    scores[:, :, keys:] = -np.inf
    scores[:, queries:] = -np.inf
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = apply(mufu.ex2, scores)
    # 3. dV = P^T dO; dS = round((P (dP - D)) scale); dK = dS^T Q
    dv = _product(_rounded(p, dtype).swapaxes(1, 2), g_f32.swapaxes(1, 2), None, dtype)[:, :keys]
    dp = _flush(p * (_product(g_f32, v_f32, None, dtype) - delta))
    ds = _rounded(_flush(dp * factor), dtype)
    dk = _product(ds.swapaxes(1, 2), q_f32.swapaxes(1, 2), None, dtype)[:, :keys]
    # 4. dQ = dS K, a chain for each 128 keys; the last block first
    k_columns = k_f32.swapaxes(1, 2)
    blocks = [slice(start, start + _KEYS) for start in reversed(range(0, padded_keys, _KEYS))]
    parts = [_product(ds[:, :, block], k_columns[:, :, block], None, dtype) for block in blocks]
    dq = chain(np.stack(parts, -1))
    # 5. groups: the gradients of each head, rounded, are added in float32, from zero
    if key_heads < heads:
        groups = (batch * key_heads, heads // key_heads, keys, d)
        dk, dv = (_sum_heads(_flush(_rounded(x, dtype)).reshape(groups)) for x in (dk, dv))
    return tuple(_tensor(x, batch, dtype) for x in (dq[:, :queries], dk, dv))  # type: ignore[return-value]
