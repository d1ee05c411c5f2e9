# SPDX-License-Identifier: Apache-2.0
"""PyTorch's memory-efficient kernel of scaled_dot_product_attention on an H200, and its math path in float32.

Float32 takes it, and in 16 bits a mask that takes a gradient (T5's position bias). The kernel is
``fmha_cutlassF_{f32,bf16,f16}_aligned_{64x64,64x128,32x128}`` and its ``cutlassB`` (aten/.../mem_eff_attention); its
order was read there and compared with an H200 (docs/evidence.md). A float32 product is three of TF32 on
``hopper.mma``; one of 16 bits is a chain of instructions of 8 elements of K, and P and dS are rounded to 16 bits.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy import float32
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import enable_reentrant_dispatch

from fmtsim.cpu.runtime.jit import kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import arrays, library, reduce
from fmtsim.machine.arrays import LOG2E, SIXTEEN_BITS, apply, fma, from_f32, to_f32
from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder

_INF = float32(np.inf)
_STEP, _K_TILE, _WARP_KEYS = 8, 32, 32  # products of an instruction; of a tile of K; keys of a warp
_BIG = np.uint32(0xFFFFE000)  # the bits of TF32


def _split(x_f32: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return TF32 numbers that x consists of: x truncated, and the rest rounded to nearest, ties away from zero."""
    big = (x_f32.view(np.uint32) & _BIG).view(np.float32)
    rest = x_f32 - big
    small = ((rest.view(np.uint32) + np.uint32(0x1000)) & _BIG).view(np.float32)
    return big, np.where(np.isfinite(rest), small, rest)


def _triples(x_f32: np.ndarray, order: str, residue_first: bool) -> np.ndarray:
    """Return [heads, rows, instructions, 8] operands: of 8 elements of K three times big or small, as ``order`` says.

    The incomplete tile of K, filled up with zeros, is the first or the last.
    """
    residue = x_f32.shape[-1] % _K_TILE
    if residue:
        zeros = np.zeros((*x_f32.shape[:-1], _K_TILE - residue), np.float32)
        place = residue if residue_first else x_f32.shape[-1]
        x_f32 = np.concatenate([x_f32[..., :place], zeros, x_f32[..., place:]], -1)
    big, small = (part.reshape(*x_f32.shape[:-1], -1, 1, _STEP) for part in _split(np.ascontiguousarray(x_f32)))
    parts = [big if which == "b" else small for which in order]
    return np.concatenate(parts, -2).reshape(*x_f32.shape[:-1], -1, _STEP)


def product(a: np.ndarray, b: np.ndarray, acc_f32: np.ndarray | None = None, residue_first: bool = False) -> np.ndarray:
    """Return a b^T + acc of [heads, M, K] and [heads, N, K].

    Each 8 elements of K are three instructions: small times big, big times small, big times big. Their sum waits in
    a register of its own: it is added to the accumulator, and begins anew, behind the first instructions of each tile
    of 32, and at the end.
    """
    a_triples, b_triples = _triples(a, "sbb", residue_first), _triples(b, "bsb", residue_first)
    acc = np.zeros((*a.shape[:2], b.shape[1]), np.float32) if acc_f32 is None else acc_f32
    spec = arrays.chain_spec("hopper.mma", "tf32")
    ends = [*range(3, a_triples.shape[2], 3 * _K_TILE // _STEP), a_triples.shape[2]]
    for start, end in zip([0, *ends], ends, strict=False):
        lhs, rhs = (
            torch.from_numpy(x[:, :, start:end].reshape(*x.shape[:2], -1).copy()) for x in (a_triples, b_triples)
        )
        acc = acc + arrays.product(lhs, rhs, spec).numpy()
    return acc


def _products(dtype: torch.dtype) -> Callable:
    """Return ``product`` for operands of a dtype: in 16 bits a chain of steps of 8 elements of K, from acc on."""
    if dtype not in SIXTEEN_BITS:
        return product
    spec = arrays.chain_spec("hopper.wgmma", dtype, _STEP)

    def multiply(a: np.ndarray, b: np.ndarray, acc_f32: np.ndarray | None = None, residue_first: bool = False) -> Any:
        a16, b16 = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in (a, b))
        c_f32 = None if acc_f32 is None else torch.from_numpy(np.ascontiguousarray(acc_f32))
        return arrays.product(a16, b16, spec, c=c_f32).numpy()

    return multiply


@kernel
def _softmax_tile(scores, keys, largest, sums, factors, start, stop):
    """Turn a tile's scores into 2^(x - max) in place; update each row's maximum and sum, and give its old factor."""
    for row in range(start, stop):
        # 1. the running maximum, in units of log2
        old = largest[row]
        new = old
        for j in range(keys):
            scores[row, j] = scores[row, j] * LOG2E
            new = scores[row, j] if scores[row, j] > new else new
        # 2. what is there shrinks, where the maximum grows
        factors[row] = library.exp2(old - new) if old < new else float32(1.0)
        total = sums[row] * factors[row]
        largest[row] = new
        if new == -_INF:  # only masked keys so far
            new = float32(0.0)
        # 3. threads of a quad own columns 8 g + 2 t, 8 g + 2 t + 1 of a warp's 32; pairs of threads; then the warps
        for first in range(0, scores.shape[1], _WARP_KEYS):
            quad = np.zeros(4, np.float32)
            for j in range(first, first + _WARP_KEYS):
                p = library.exp2(scores[row, j] - new) if j < keys else float32(0.0)
                scores[row, j] = p
                quad[(j % 8) // 2] += p
            total += (quad[0] + quad[1]) + (quad[2] + quad[3])
        sums[row] = total


def takes_math_path(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True if PyTorch has no fused kernel on a GPU: grouped heads, or rows that are not aligned to 16 bytes."""
    return q.shape[1] != k.shape[1] or q.shape[-1] % 4 > 0


def _math(run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
    mask, dropout, causal, scale = options
    grouped = q.shape[1] != k.shape[1]
    with run, sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def math_forward(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention by the operators of PyTorch's math path, each simulated by ``run``, and no logsumexp: zeros.

    Options are mask, dropout, causal and scale.

    Raises:
        Guess: Not causal (one call of one differs from an H200, and why is not known), or not compared with one.
    """
    with enable_reentrant_dispatch(), torch.no_grad():
        result = _math(run, q, k, v, *options), q.new_zeros(q.shape[:3], dtype=torch.float32)
    _doubt(q, k, options[2], result)
    return result


def math_backward(run: Any, g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    """Return the gradients of (q, k, v) by the same operators; the first pass is made again.

    Raises:
        Guess: As ``math_forward``.
    """
    with enable_reentrant_dispatch(), torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        y = _math(run, *inputs, *options)
        with run:
            gradients = torch.autograd.grad(y, inputs, g)
    _doubt(q, k, options[2], gradients)
    return gradients


def _doubt(q: torch.Tensor, k: torch.Tensor, causal: bool, result: Any) -> None:
    if not causal or q.shape[1] == k.shape[1]:
        raise Guess("the math path of attention that is not causal, or whose heads are no multiple of 4 long", result)


def _check(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, dropout: float) -> None:
    if dropout:
        raise UnknownOrder(f"attention in {q.dtype} with dropout")
    if bias is not None and bias.dtype != q.dtype:
        raise UnknownOrder(f"attention in {q.dtype} with a mask in {bias.dtype}")
    if q.shape[-1] != v.shape[-1]:
        raise UnknownOrder(f"attention in {q.dtype} with heads of {q.shape[-1]} and {v.shape[-1]}")


def _biases(bias: torch.Tensor | None, q: torch.Tensor, keys: int) -> np.ndarray | None:
    """Return a bias as float32 [batch * heads, queries, keys]."""
    return None if bias is None else to_f32(bias.expand(*q.shape[:3], keys)).reshape(-1, q.shape[2], keys)


def _scores(product_f32: np.ndarray, factor: float32, bias_f32: np.ndarray | None) -> np.ndarray:
    """Return Q K^T scale, with a bias by one fma."""
    return product_f32 * factor if bias_f32 is None else product_f32 * factor + bias_f32


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, dropout: float, causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (output, logsumexp) of attention of [batch, heads, length, D] by the memory-efficient kernel.

    ``bias`` is added to the scores: [batch or 1, heads or 1, queries or 1, keys].

    Raises:
        UnknownOrder: Dropout, a bias of another dtype, or heads of two lengths.
    """
    _check(q, v, bias, dropout)
    batch, heads, queries, head = q.shape
    keys, multiply = k.shape[2], _products(q.dtype)
    # queries and keys of a block; whether its output waits in registers, or in memory between tiles of keys
    query_tile, key_tile, in_registers = (
        (64, 64, True) if head <= 64 else (64, 128, True) if head <= 128 else (32, 128, False)
    )
    q_f32, k_f32, v_f32 = (to_f32(x).reshape(-1, *x.shape[2:]) for x in (q, k, v))
    bias_f32 = _biases(bias, q, keys)
    factor = float32(head**-0.5 if scale is None else scale)
    rows = q_f32.shape[:2]
    largest, sums = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
    factors, acc = np.empty(rows, np.float32), np.zeros((*rows, head), np.float32)
    # keys that the block of a query goes through
    ends = np.full(queries, keys)
    if causal:
        ends = np.minimum(keys, (np.arange(queries) // query_tile + 1) * query_tile)
    for start in range(0, keys, key_tile):
        first = int((ends <= start).sum())  # blocks of queries in front of it are through
        if first == queries:
            break
        stop = min(start + key_tile, keys)
        # 1. S = round(Q K^T scale)
        scores = np.zeros((rows[0], queries - first, key_tile), np.float32)
        bias_tile = None if bias_f32 is None else bias_f32[:, first:, start:stop]
        tile = multiply(q_f32[:, first:], k_f32[:, start:stop], residue_first=True)
        scores[..., : stop - start] = _scores(tile, factor, bias_tile)
        if causal:
            later = np.arange(start, start + key_tile) > np.arange(first, queries)[:, None]
            scores[:, later] = -np.inf
        # 2. P, the maxima and the sums
        flat = scores.reshape(-1, key_tile)
        states = [np.ascontiguousarray(x[:, first:]).reshape(-1) for x in (largest, sums, factors)]
        run(lambda i, j: _softmax_tile(flat, stop - start, *states, i, j), len(flat), 1, 8 * key_tile)  # noqa: B023
        for x, state in zip((largest, sums, factors), states, strict=True):
            x[:, first:] = state.reshape(rows[0], -1)
        # 3. acc = acc factor + P V
        v_tile, old = v_f32[:, start:stop].swapaxes(1, 2), factors[:, first:, None]
        p, before = scores[..., : stop - start], acc[:, first:]
        if in_registers:
            acc[:, first:] = multiply(p, v_tile, before * old)
        else:
            part = multiply(p, v_tile)
            alpha = float32(1.0) / _denominators(sums[:, first:])[..., None]
            last = fma(alpha, part, (alpha * old) * before)
            acc[:, first:] = np.where((ends[first:] <= stop)[:, None], last, fma(old, before, part))
    if in_registers:
        acc *= (float32(1.0) / _denominators(sums))[..., None]
    # 4. logsumexp = m / log2 e + ln(l), Inf for a row that is masked whole: P is 0 in the backward pass
    logsumexp = np.where(sums == 0, float32(np.inf), largest / LOG2E + apply(library.log, sums))
    return _tensor(acc, q), torch.from_numpy(logsumexp.reshape(batch, heads, queries))


def _blocks_of(head: int, dtype: torch.dtype) -> tuple[int, int, bool]:
    """Return the blocks of the backward kernel, and whether it sums dK and dV in registers."""
    half = dtype in SIXTEEN_BITS
    if head <= 64:
        return 64, 64, half
    return (128, 128, True) if half and head <= 128 else (128, 64, False)


def dot_products(g: torch.Tensor, output: torch.Tensor, threads: int) -> np.ndarray:
    """Return the sums of dO O [batch * heads, queries, T] of a row's T threads, in 16 bits.

    Thread t takes chunks t, t + T ... of 8 elements, one element after the other.
    """
    missing = [(0, 0), (0, 0), (0, -g.shape[-1] % (8 * threads))]
    chunks = (np.pad(to_f32(x).reshape(-1, *x.shape[-2:]), missing) for x in (g, output))
    a, b = [x.reshape(*x.shape[:2], -1, threads, 8).swapaxes(2, 3).reshape(*x.shape[:2], threads, -1) for x in chunks]
    total: np.ndarray = np.zeros(a.shape[:3], np.float32)
    for i in range(a.shape[-1]):
        total = fma(a[..., i], b[..., i], total)
    return total


def _delta(g: torch.Tensor, output: torch.Tensor, head: int) -> np.ndarray:
    """Return D = sum of dO O [batch * heads, queries, 1] in 16 bits: pairs of threads are added."""
    total = dot_products(g, output, 4 if 64 < head <= 128 else 2)
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total


def backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor,
    bias: torch.Tensor | None, dropout: float, causal: bool, scale: float | None, of_q: bool = True,
    of_bias: bool | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of (q, k, v), and unless ``of_bias`` is None that of the bias or None.

    That of the bias is [batch, heads, queries, keys]. ``of_q``: False if the caller does not use the gradient of q.

    Raises:
        UnknownOrder: As ``forward``.
        Nondeterministic: Blocks of keys add to the gradient of a query as they take a lock. It holds the gradients:
            those of k, v and the bias are exact.
        Guess: Under ``torch.use_deterministic_algorithms`` and with several blocks of keys.
    """
    _check(q, v, bias, dropout)
    batch, heads, queries, head = q.shape
    keys, multiply, block_sizes = k.shape[2], _products(q.dtype), _blocks_of(head, q.dtype)
    rows, columns, in_registers = block_sizes
    blocks, tiles = math.ceil(keys / columns), math.ceil(queries / rows)
    half = q.dtype in SIXTEEN_BITS
    # blocks of threads that share the keys of a head
    splits = 1 if batch * heads >= 256 and keys <= 2 * columns else blocks
    if half and not in_registers:
        splits = max(1, min(splits, 200 // (batch * heads)))
    if torch.are_deterministic_algorithms_enabled():
        splits = 1
    g_f32, q_f32, k_f32, v_f32 = (to_f32(x).reshape(-1, *x.shape[2:]) for x in (g, q, k, v))
    bias_f32 = _biases(bias, q, keys)
    factor = float32(head**-0.5 if scale is None else scale)
    # 1. D = sum of dO O, in float32 by the operators of sums
    if half:
        delta = _delta(g, output, head)
    else:
        products = reduce.reduce((g * output).transpose(1, 2), [-1], False, False, q.dtype).transpose(1, 2)
        delta = to_f32(products).reshape(-1, queries, 1)
    # 2. P^T = exp(S^T scale - logsumexp), with S^T = K Q^T
    scores = multiply(k_f32, q_f32, residue_first=True).swapaxes(1, 2)
    scores = _scores(scores, factor, bias_f32) - to_f32(logsumexp).reshape(-1, queries, 1)
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = apply(library.exp, scores)
    if half:
        p = to_f32(torch.from_numpy(p).to(q.dtype))
    # 3. dBias = (dP - D) P, with dP = dO V^T; dS = dBias scale
    dbias = (multiply(g_f32, v_f32, residue_first=True) - delta) * p
    ds = dbias * factor
    # 4. dV = P^T dO and dK = dS^T Q, through the blocks of queries; in float32 a product for each, added in memory
    dk, dv, dq = (np.zeros_like(x) for x in (k_f32, v_f32, q_f32))
    block_of = [slice(j * columns, (j + 1) * columns) for j in range(blocks)]
    part_of = [slice(i * rows, (i + 1) * rows) for i in range(tiles)]
    # the first block of queries: where the mask lets any through, else each block of threads has its own
    starts = [j * columns // rows if causal else j % splits % tiles for j in range(blocks)]
    for total, left, right in ((dv, p, g_f32), (dk, ds, q_f32)):
        for block, first in zip(block_of, starts, strict=True):
            for i in [*range(first, tiles), *range(0 if causal else first)]:
                operands = left[:, part_of[i], block].swapaxes(1, 2), right[:, part_of[i]].swapaxes(1, 2)
                if half:
                    total[:, block] = multiply(*operands, total[:, block])
                else:
                    total[:, block] = multiply(*operands) + (total[:, block] if i != first else float32(-0.0))
    # 5. dQ = dS K: of a block of queries through the blocks of keys, as these come to it
    for i, part in enumerate(part_of):
        for j in sorted(range(blocks), key=lambda j: (j // splits, (i - starts[j]) % tiles)):  # noqa: B023
            if not causal or starts[j] <= i:
                dq[:, part] = multiply(ds[:, part, block_of[j]], k_f32[:, block_of[j]].swapaxes(1, 2), dq[:, part])
    gradients: tuple[torch.Tensor | None, ...] = _tensor(dq, q), _tensor(dk, k), _tensor(dv, v)
    if of_bias:  # its rows begin at multiples of 16 elements
        bias_gradient = torch.empty(batch, heads, queries, keys + -keys % 16, dtype=q.dtype)[..., :keys]
        gradients += (bias_gradient.copy_(from_f32(dbias, q.dtype, (batch, heads, queries, keys))),)
    elif of_bias is not None:
        gradients += (None,)
    if torch.are_deterministic_algorithms_enabled() and blocks > 1:
        raise Guess("the gradients of attention under use_deterministic_algorithms, which were not compared", gradients)
    # observed: with few blocks of threads, each starts at its own block of queries, and they pass the lock in turn
    few = 256 if half else 128
    if causal:
        few = 0 if head > 64 else 512 if keys <= 256 else 132 if keys <= 512 else 0
    settled = batch * heads * splits <= few and (causal or splits <= tiles)
    if of_q and splits > 1 and not settled:
        locked = f"the gradient of q for {keys} keys: blocks of keys are added as they take a lock"
        raise Nondeterministic(locked, gradients)
    return gradients


def _tensor(x_f32: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, D], stored as [batch, length, heads, D]."""
    x = x_f32.reshape(*like.shape[:2], *x_f32.shape[1:]).swapaxes(1, 2)
    return from_f32(x, like.dtype).transpose(1, 2)


def _denominators(sums: np.ndarray) -> np.ndarray:
    """Return sums, and one for rows that are masked whole."""
    return np.where(sums == 0, float32(1.0), sums)
