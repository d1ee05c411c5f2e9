# SPDX-License-Identifier: Apache-2.0
"""Attention in 16 bits of one query, and of several with a mask, as cuDNN 9.19 computes it on an H200: row by row.

One query (decoding with a KV cache) takes kernels ``sm80_flash_fprop_wmma``: 32 keys a tile up to 32 keys, 64 up to
256. Several queries take ``sm90_flash_fprop_wgmma`` of 128 keys a tile; without a mask that is ``attention.py``. Found
by probing (docs/evidence.md). ``hopper.mma`` and ``hopper.wgmma`` add 16-bit products alike. A row is one vector by a
matrix, too small for the engine of matrix products: its aligned sums of 16 products and the accumulator are added here.
"""

import numpy as np
import torch
from numpy import float32, float64, int32, int64

from fmtsim.cpu.runtime.jit import bits32, device, float32_of, float64_of, fma32, kernel, subroutine
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import mufu
from fmtsim.machine.arrays import LN2, LOG2E, flush, from_f32, to_f32
from fmtsim.machine.unknown import Nondeterministic, UnknownOrder

MIN_EXPONENTS = {torch.bfloat16: (-126, 7), torch.float16: (-14, 10)}  # of a normal number; mantissa bits
_STEP, _FRACTION_BITS, _LOWEST = 16, int32(25), int32(-133)  # unit hopper.mma of 16-bit operands
_ABSENT, _NOT_FINITE = int32(-1000), int32(2000)  # in place of the exponents of zeros, of Inf and NaN
_PROCESSORS = 132  # of an H100 or H200; with more blocks, above 128 keys, one query takes another kernel


@device
def _exponent(x, lowest):
    """Return the exponent that the unit aligns by: subnormals have the lowest normal one, zeros do not count."""
    bits = bits32(x) & int32(0x7FFFFFFF)
    exponent = max((bits >> int32(23)) - int32(127), lowest)
    return _ABSENT if bits == int32(0) else _NOT_FINITE if exponent == int32(128) else exponent


@device
def _power(exponent):
    """Return 2^exponent as float64."""
    return float64_of((int64(exponent) + int64(1023)) << int64(52))


@subroutine
def _add_product(a, b, acc, lowest, largest, total):
    """Add a vector by a matrix [K, N] to acc [N], as ``hopper.mma`` does: chains of aligned sums over 16 of k."""
    columns = len(acc)
    for first in range(0, len(a), _STEP):
        # 1. the largest exponent of the 16 products and the accumulator
        for n in range(columns):
            largest[n] = max(_exponent(acc[n], int32(-126)), _LOWEST)
        for i in range(first, first + _STEP):
            exponent = _exponent(a[i], lowest)
            for n in range(columns):
                largest[n] = max(largest[n], exponent + _exponent(b[i, n], lowest))
        # 2. each term in units of 2^(largest - 25), toward zero; their sum is exact
        for n in range(columns):
            total[n] = int64(int32(float64(acc[n]) * _power(_FRACTION_BITS - largest[n])))
        for i in range(first, first + _STEP):
            factor = float64(a[i])
            for n in range(columns):
                total[n] += int64(int32(factor * float64(b[i, n]) * _power(_FRACTION_BITS - largest[n])))
        # 3. the sum to float32, toward zero
        for n in range(columns):
            exact = float64(total[n]) * _power(largest[n] - _FRACTION_BITS)
            if largest[n] >= _NOT_FINITE + _ABSENT:
                exact = float64(acc[n])
                for i in range(first, first + _STEP):
                    exact += float64(a[i]) * float64(b[i, n])
            y = float32(exact)
            acc[n] = float32_of(bits32(y) - int32(1)) if np.abs(float64(y)) > np.abs(exact) else y


@device
def _round16(p, lowest, mantissa_bits):
    """Return a probability rounded to a 16-bit format, to nearest even."""
    # p's last place in that format, times 3 * 2^22, pushes out what lies below it
    exponent = max((bits32(p) >> int32(23)) - int32(127), lowest)
    shift = float32(3 << 22) * float32(_power(exponent - mantissa_bits))
    return (p + shift) - shift


@kernel
def _attend(q, k, v, bias, group, keys, tile, factor, low, bits, one, output, logsumexp, start, stop):
    """Compute rows of attention: q [rows, D], k [heads, tiles, D, keys], v [heads, keys, D], bias [rows or 0, keys].

    ``group`` rows share a key head; ``one`` query a head rounds the logsumexp's two products in the other order.
    """
    d = q.shape[1]
    x, sums, tile_sums = np.empty(tile, np.float32), np.empty(4, np.float32), np.empty(4, np.float32)
    largest, total = np.empty(max(d, tile), np.int32), np.empty(max(d, tile), np.int64)
    for row in range(start, stop):
        head, acc, maximum = row // group, output[row], float32(-np.inf)
        sums[:] = float32(0.0)
        acc[:] = float32(0.0)
        for step in range(k.shape[1]):
            first = step * tile
            # 1. scores in units of log2: round(round(S scale) log2 e), with a bias round(fma(S, scale, bias) log2 e)
            x[:] = float32(0.0)
            _add_product(q[row], k[head, step], x, low, largest, total)
            new = maximum
            for j in range(tile):
                score = fma32(x[j], factor, bias[row, first + j]) if len(bias) else x[j] * factor
                x[j] = score * LOG2E if first + j < keys else float32(-np.inf)
                new = x[j] if x[j] > new else new
            # 2. P = 2^(X - m); thread t of 4 adds columns 8 g + 2 t and 8 g + 2 t + 1 upward
            offset = new if new > float32(-np.inf) else float32(0.0)
            tile_sums[:] = float32(0.0)
            for j in range(tile):
                p = mufu.ex2(x[j] - offset)
                tile_sums[(j % 8) // 2] += p
                x[j] = _round16(p, low, bits)
            # 3. l = fma(l, alpha, tile sum); acc = acc alpha + P V
            alpha = mufu.ex2(maximum - offset)
            for t in range(4):
                sums[t] = fma32(sums[t], alpha, tile_sums[t])
            for c in range(d):
                acc[c] = flush(acc[c] * alpha)
            _add_product(x, v[head, first : first + tile], acc, low, largest, total)
            maximum = new
        # 4. O = acc rcp(L), zeros where every key has a bias of -Inf; logsumexp = (m + lg2(L)) ln 2
        length = (sums[0] + sums[1]) + (sums[2] + sums[3])
        if maximum > float32(-np.inf):
            for c in range(d):
                acc[c] = flush(acc[c] * mufu.rcp(length))
        a, b = (mufu.lg2(length), maximum) if one else (maximum, mufu.lg2(length))
        logsumexp[row] = fma32(a, LN2, b * LN2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, logsumexp) of q [batch, heads, queries, D], k and v [batch, key heads, keys, D].

    ``bias`` is added to the scores: [batch or 1, heads or 1, queries or 1, keys] in q's dtype.

    Raises:
        UnknownOrder: Several queries without a bias; a bias of another dtype; heads that cuDNN does not take.
        Nondeterministic: One query and more than 256 keys, or more than 128 with over 132 heads of keys in a batch.
    """
    batch, heads, queries, d = q.shape
    key_heads, keys = k.shape[1:3]
    if bias is not None and bias.dtype != q.dtype:
        raise UnknownOrder(f"attention in {q.dtype} with a mask in {bias.dtype}")
    if d % 8 or d != v.shape[-1] or d > 256:
        raise UnknownOrder(f"attention with heads of {d}")
    if queries > 1 and bias is None:
        raise UnknownOrder("several queries without a mask, row by row")
    if queries == 1 and (keys > 256 or (keys > 128 and batch * key_heads > _PROCESSORS)):
        raise Nondeterministic(f"attention of one query and {keys} keys: four warps add their sums as they come")
    tile = 128 if queries > 1 else 32 if keys <= 32 else 64
    # 1. rows of queries, tiles of keys; zeros after the last key and up to a whole k step of D
    padding = ((0, 0), (0, -keys % tile), (0, -d % _STEP))
    k_f32, v_f32 = (np.pad(to_f32(x).reshape(batch * key_heads, keys, d), padding) for x in (k, v))
    k_f32 = np.ascontiguousarray(k_f32.reshape(len(k_f32), -1, tile, k_f32.shape[2]).swapaxes(2, 3))
    q_f32 = np.pad(to_f32(q).reshape(-1, d), (padding[0], padding[2]))
    bias_f32 = np.empty((0, 0), np.float32)
    if bias is not None:
        bias_f32 = np.pad(to_f32(bias.expand(batch, heads, queries, keys)).reshape(-1, keys), padding[:2])
    # 2. all rows
    output, logsumexp = np.empty_like(q_f32), np.empty(len(q_f32), np.float32)
    group, (low, bits) = heads // key_heads * queries, (int32(n) for n in MIN_EXPONENTS[q.dtype])
    arguments = (group, keys, tile, float32(scale or d**-0.5), low, bits, queries == 1, output, logsumexp)
    run(lambda i, j: _attend(q_f32, k_f32, v_f32, bias_f32, *arguments, i, j), len(q_f32), 1, 8 * k_f32[0].size)
    # 3. stored as [batch, queries, heads, D], as cuDNN does
    rows = output[:, :d].reshape(batch, heads, queries, d).swapaxes(1, 2)
    return from_f32(rows, q.dtype).transpose(1, 2), torch.from_numpy(logsumexp.reshape(batch, heads, queries))
