# SPDX-License-Identifier: Apache-2.0
"""batch_norm, forward and backward, in the order of PyTorch 2.11's own kernels (Normalization.cuh) and of cuDNN's."""

import math

import numpy as np
import torch
from numpy import float32

from fmtsim.machine import library
from fmtsim.machine.arrays import SIXTEEN_BITS, apply, chain, check_shapes, fma, from_f32, to_f32
from fmtsim.machine.reduce import Plan, sums
from fmtsim.machine.unknown import UnknownOrder

_THREADS, _ONE = 512, float32(1.0)
_ROWS_A_THREAD, _LOADS, _MOST_BLOCKS = 16, 4, 128  # of the kernels for channels that lie innermost
_Moments = tuple[np.ndarray, ...]  # mean, sum of squared differences, count


def _welford(turns: np.ndarray, counted: np.ndarray, divides: bool) -> _Moments:
    """Return the moments of float32 [turns, ...] by Welford's updates; ``counted`` says which elements exist."""
    mean, m2, count = (np.zeros(turns.shape[1:], np.float32) for _ in range(3))
    for x, exists in zip(turns, counted, strict=True):
        count = count + exists
        difference, steps = x - mean, np.maximum(count, _ONE)
        if divides:
            new = np.where(exists, mean + difference / steps, mean)
            mean, m2 = new, np.where(exists, fma(difference, x - new, m2), m2)
        else:
            # what does not exist is a zero of no weight, which makes NaN of what is infinite
            mean = fma(difference, np.where(exists, _ONE / steps, float32(0.0)), mean)
            m2 = fma(difference * (x - mean), exists.astype(np.float32), m2)
    return mean, m2, count


def _merged(a: _Moments, b: _Moments, within: bool = False, exchanged: bool = False) -> _Moments:
    """Return the moments of a and b as the thread that has a computes them.

    Of the two means' products the second is rounded first, a's ``within`` a thread; lanes that are ``exchanged``
    multiply by their own count first.
    """
    (mean, m2, count), (other_mean, other_m2, other) = a, b
    factor, square = _ONE / np.maximum(_ONE, count + other), (mean - other_mean) * (mean - other_mean)
    product = square * count * other if exchanged else square * other * count
    means = fma(other_mean, other, mean * count) if within else fma(mean, count, other_mean * other)
    return means * factor, m2 + fma(product, factor, other_m2), count + other


def _halved(moments: _Moments) -> _Moments:
    """Merge along the last axis: thread i gets thread i + n / 2, then i + n / 4 ..."""
    while (half := moments[0].shape[-1] // 2) > 0:
        moments = _merged(tuple(t[..., :half] for t in moments), tuple(t[..., half:] for t in moments))
    return tuple(t[..., 0].copy() for t in moments)


def _exchanged(moments: _Moments) -> _Moments:
    """Merge the 32 lanes of the last axis: each with lane xor 1, 2, 4, 8, 16, and both compute; return lane 0."""
    for step in (1, 2, 4, 8, 16):
        lanes = np.arange(32) ^ step
        moments = _merged(moments, tuple(t[..., lanes] for t in moments), exchanged=True)
    return tuple(t[..., 0].copy() for t in moments)


def _dealt(x: np.ndarray, threads: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return [channels, turns, threads] of [images, channels, inner size], zeros behind the last; and which exist.

    Threads lie along the inner size, lines of them along the images.
    """
    images, channels, inner = x.shape
    threads = threads or next(n for n in (32, 64, 128, 256, 512) if inner <= n or n == 512)
    lines = _THREADS // threads
    padding = (0, -images % lines), (0, 0), (0, -inner % threads)

    def deal(y: np.ndarray) -> np.ndarray:
        y = np.pad(y, padding).reshape(-1, lines, y.shape[1], math.ceil(inner / threads), threads)
        return y.transpose(2, 0, 3, 1, 4).reshape(y.shape[2], -1, _THREADS)

    return deal(x), deal(np.ones((images, 1, inner), bool))[0]


def _statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, sum of squared differences) of each channel of [images, channels, inner size]."""
    dealt, exists = _dealt(x)
    warps = _exchanged(tuple(t.reshape(-1, 16, 32) for t in _welford(dealt.swapaxes(0, 1), exists, True)))
    mean, m2, _ = _exchanged(tuple(np.pad(t, ((0, 0), (0, 16))) for t in warps))
    return mean, m2


def _statistics_last(x: np.ndarray, height: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, sum of squared differences) of each channel of [rows, channels]."""
    (rows, channels), slots = x.shape, height * blocks * _LOADS
    padded = np.pad(x, ((0, -rows % slots), (0, 0))).reshape(-1, slots, channels).swapaxes(1, 2)
    exists = (np.arange(len(padded) * slots) < rows).reshape(-1, 1, slots)
    # 1. accumulators of each thread in order; 2. threads by halving; 3. blocks from zero, then by halving
    loads = [t.reshape(channels, _LOADS, blocks, height) for t in _welford(padded, exists, False)]
    threads: _Moments = tuple(t[:, 0] for t in loads)
    for i in range(1, _LOADS):
        threads = _merged(threads, tuple(t[:, i] for t in loads), within=True)
    moments = _halved(threads)
    if blocks > 1:
        last = [np.zeros((channels, height), np.float32) for _ in range(3)]
        for first in range(0, blocks, height):
            some = [t[:, first : first + height] for t in moments]
            width = some[0].shape[1]
            for t, new in zip(last, _merged(tuple(t[:, :width] for t in last), tuple(some)), strict=True):
                t[:, :width] = new
        moments = _halved(tuple(last))
    else:
        moments = tuple(t[:, 0] for t in moments)
    return moments[0], moments[1]


def _rounded_tree(partial: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return sums of [..., 16 warps, 32 lanes] by halving; what moves from thread to thread is rounded to a dtype."""
    for _ in range(2):
        while (half := partial.shape[-1] // 2) > 0:
            partial = partial[..., :half] + to_f32(from_f32(partial[..., half:], dtype))
        partial = partial[..., 0]
    return partial


def _layout(x: torch.Tensor) -> bool:
    """Return True if channels lie innermost.

    Raises:
        UnknownOrder: Neither contiguous nor so.
    """
    if x.is_contiguous():
        return x.stride(1) == 1
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return True
    raise UnknownOrder(f"batch_norm of strides {x.stride()}")


def _power(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _blocks(rows: int, channels: int) -> tuple[int, int]:
    """Return (threads of a block that share a channel, blocks that do) where channels lie innermost."""
    width = min(_power(channels), 32)
    height = min(_power(math.ceil(rows / _ROWS_A_THREAD)), _THREADS // width)
    blocks = min(math.ceil(rows / (height * _ROWS_A_THREAD)), _MOST_BLOCKS)
    return height, blocks if blocks >= 8 else 1


def _elements(x: torch.Tensor, last: bool) -> np.ndarray:
    """Return float32 [rows, channels] if channels lie innermost, else [images, channels, inner size]."""
    return to_f32(x.movedim(1, -1)).reshape(-1, x.shape[1]) if last else to_f32(x).reshape(*x.shape[:2], -1)


def _tensor(y_f32: np.ndarray, like: torch.Tensor, last: bool) -> torch.Tensor:
    shape = [like.shape[0], *like.shape[2:], like.shape[1]] if last else list(like.shape)
    y = from_f32(y_f32, like.dtype, shape)
    return torch.empty_like(like).copy_(y.movedim(-1, 1)) if last else y


def _affine(x: torch.Tensor | None, channels: int, missing: float) -> np.ndarray:
    return np.full(channels, missing, np.float32) if x is None else to_f32(x)


def _takes_cudnn(x: torch.Tensor, weight: torch.Tensor | None, running: torch.Tensor | None, train: bool) -> bool:
    """Return True where PyTorch calls cuDNN, if there is a bias with the weight."""
    if weight is None or (running is None and not train) or not torch.backends.cudnn.enabled:
        return False
    dtypes = x.dtype == torch.float32 or (x.dtype == torch.float16 and weight.dtype == torch.float32)
    return dtypes and x.ndim >= 3 and x.shape[0] <= (880801 if train else 65535)


def _cudnn_elements(x: torch.Tensor) -> np.ndarray:
    """Return float32 [images, channels, inner size].

    Raises:
        UnknownOrder: Channels lie innermost.
    """
    if not x.is_contiguous() and x.ndim > 3 and x.stride(1) == 1:
        raise UnknownOrder("batch_norm by cuDNN, of channels_last")
    return to_f32(x).reshape(*x.shape[:2], -1)


def _cudnn_threads(x: torch.Tensor, inner: int, backward: bool) -> int | None:
    """Return how many threads lie along the inner size, None where a block reads a channel as one row.

    Raises:
        UnknownOrder: Sizes that were not compared.
    """
    count, half = x.numel() // x.shape[1], x.dtype == torch.float16
    if count <= (12291 if backward or (half and inner % 2) else 25088):
        return None
    if backward and count >= 16384 and not half:
        for threads, least, most in ((32, 196, 784), (128, 1024, 3136), (512, 12544, 1 << 30)):
            if least <= inner <= most:
                return threads
    raise UnknownOrder(f"batch_norm by cuDNN, of {count:,} elements in a channel")


def _cudnn_sums(
    x: np.ndarray, factors: np.ndarray | None, threads: int | None, vector: int = 1, pairs: bool = False
) -> np.ndarray:
    """Return sums of each channel as 512 threads of cuDNN add them: by halving, or (``pairs``) neighbours first.

    Threads take single elements or vectors of a channel as of one row, or lie along the inner size.
    """
    dealt = []
    for t in (x, factors):
        if t is not None and threads is None:
            row = t.swapaxes(0, 1).reshape(t.shape[1], -1)
            row = np.pad(row, ((0, 0), (0, -row.shape[1] % (_THREADS * vector))))
            dealt.append(row.reshape(len(row), -1, _THREADS, vector).swapaxes(2, 3).reshape(len(row), -1, _THREADS))
        elif t is not None:
            dealt.append(_dealt(t, threads)[0])
    if pairs:
        lanes, warps = (np.array([int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)]) for bits in (5, 4))
        dealt = [t[..., np.add.outer(32 * warps, lanes).reshape(-1)] for t in dealt]
    rows = [t.reshape(len(t), -1) for t in dealt]
    return sums(rows[0], Plan(32, 16), rows[1] if factors is not None else None)


def batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, train: bool, momentum: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (y, mean, rstd) of native_batch_norm, the statistics in float32; update running ones in place.

    Raises:
        UnknownOrder: A layout that is not known, or cuDNN's order for large images; cuDNN computes float32, and float16
            with float32 weights, of 3 dimensions or more.
    """
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_shapes("batch_norm", **{name: (t, x.shape[1:2]) for name, t in vectors.items()})
    cudnn = _takes_cudnn(x, weight, running_mean, train)
    if cudnn and bias is None:
        raise UnknownOrder("batch_norm with a weight alone")
    if cudnn and train:
        assert weight is not None and bias is not None
        return _cudnn_forward(x, weight, bias, running_mean, running_var, momentum, eps)
    last, channels = _layout(x), x.shape[1]
    if cudnn and last and x.dtype == torch.float16:
        raise UnknownOrder("batch_norm by cuDNN, of float16 in channels_last")
    elements = _elements(x, last)
    count = x.numel() // channels
    if not train:
        assert running_mean is not None and running_var is not None  # or torch refuses
        mean, rstd = to_f32(running_mean), apply(library.rsqrt, to_f32(running_var) + float32(eps))
    else:
        # 1. moments, and what they make of the running ones
        with np.errstate(all="ignore"):
            mean, squares = _statistics_last(elements, *_blocks(count, channels)) if last else _statistics(elements)
        variance, share = squares / float32(count), float32(momentum)
        rstd = apply(library.rsqrt, variance + float32(eps))
        with np.errstate(all="ignore"):
            unbiased = variance * float32(np.float64(count) / np.float64(count - 1))
            for running, new in ((running_mean, mean), (running_var, unbiased)):
                if running is not None:
                    running.copy_(from_f32(fma(new, share, (_ONE - share) * to_f32(running)), running.dtype))
    # 2. w (x - mean) rstd + b
    w, b = _affine(weight, channels, 1.0), _affine(bias, channels, 0.0)
    per_channel = [t if last else t[:, None] for t in (w, b, mean, rstd)]
    with np.errstate(all="ignore"):
        y = fma(per_channel[0] * (elements - per_channel[2]), per_channel[3], per_channel[1])
    if cudnn:  # which keeps no statistics for evaluation
        return _tensor(y, x, last), torch.empty(0), torch.empty(0)
    return _tensor(y, x, last), from_f32(mean, torch.float32), from_f32(rstd, torch.float32)


def _cudnn_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, momentum: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    elements, share = _cudnn_elements(x), float32(momentum)
    inner, count = elements.shape[2], x.numel() // x.shape[1]
    threads, vector = _cudnn_threads(x, inner, False), 2 if x.dtype == torch.float16 and inner % 2 == 0 else 1
    with np.errstate(all="ignore"):
        # 1. the mean, then the mean of squared differences
        mean = _cudnn_sums(elements, None, threads, vector) * (_ONE / float32(count))
        centred = elements - mean[:, None]
        variance = _cudnn_sums(centred, centred, threads, vector) * (_ONE / float32(count))
        rstd = apply(library.rsqrt, variance + float32(eps))
        if running_mean is not None and running_var is not None:
            kept = [(_ONE - share) * to_f32(running_var), to_f32(running_mean)]
            unbiased = fma(variance * share, float32(count) / float32(count - 1), kept[0])
            running_var.copy_(from_f32(unbiased, torch.float32))
            running_mean.copy_(from_f32(fma(kept[1], _ONE - share, mean * share), torch.float32))
        # 2. a x + (b - mean a)
        slope = to_f32(weight) * rstd
        y = fma(slope[:, None], elements, (to_f32(bias) - mean * slope)[:, None])
    return from_f32(y, x.dtype, x.shape), from_f32(mean, torch.float32), from_f32(rstd, torch.float32)


def _cudnn_backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: np.ndarray, rstd: np.ndarray, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    gradients, elements = _cudnn_elements(g), _cudnn_elements(x)
    if x.dtype == torch.float16 and elements.shape[2] % 2 == 0:
        raise UnknownOrder("the gradient of batch_norm by cuDNN, of pairs of float16")
    threads, share = _cudnn_threads(x, elements.shape[2], True), _ONE / float32(x.numel() // x.shape[1])
    with np.errstate(all="ignore"):
        centred = elements - mean[:, None]
        total = _cudnn_sums(gradients, None, threads, pairs=True)
        dot = _cudnn_sums(gradients, centred, threads, pairs=True)
        w, scale, average = to_f32(weight)[:, None], rstd[:, None], (total * share)[:, None]
        if threads is None:
            slope = -(w * scale) * (dot * rstd * rstd * share)[:, None]
            dx = fma(slope, centred, fma(w * scale, gradients, -(w * scale * average)))
        else:
            dx = (fma(-centred, (dot * share * rstd * rstd)[:, None], gradients) - average) * scale * w
        dweight = dot * rstd
    results = from_f32(dx, x.dtype, x.shape), from_f32(dweight, torch.float32), from_f32(total, torch.float32)
    return tuple(result if asked else None for result, asked in zip(results, mask, strict=True))


def batch_norm_backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, mean: torch.Tensor | None, rstd: torch.Tensor | None, train: bool, eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of (x, weight, bias) of native_batch_norm.

    Raises:
        UnknownOrder: g lies otherwise than x, or as for ``batch_norm``.
    """
    if mean is None or rstd is None:
        raise UnknownOrder("the gradient of batch_norm without saved statistics")
    vectors = {"weight": weight, "running_mean": running_mean, "running_var": running_var}
    vectors |= {name: t for name, t in (("mean", mean), ("rstd", rstd)) if t.numel()}  # evaluation may keep none
    shapes = {name: (t, x.shape[1:2]) for name, t in vectors.items()}
    check_shapes("the gradient of batch_norm", g=(g, x.shape), **shapes)
    if train and _takes_cudnn(x, weight, running_mean, train):
        assert weight is not None
        return _cudnn_backward(g.contiguous(), x, weight, to_f32(mean), to_f32(rstd), mask)
    # of one channel, or images of one pixel, both hold
    last = _layout(x) or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    channels = x.shape[1]
    if (last and g.stride() != x.stride()) or not mask[0]:
        raise UnknownOrder("the gradient of batch_norm in another layout than x in channels_last, or without x's")
    g_f32, x_f32 = _elements(g, last), _elements(x, last)
    w = _affine(weight, channels, 1.0)
    if not train and not mean.numel():
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, from_f32(apply(library.rsqrt, to_f32(running_var) + float32(eps)), torch.float32)
    centre, scale = to_f32(mean), to_f32(rstd)
    if not train and not last and (mask[1] or mask[2]):
        assert running_var is not None
        scale = _ONE / np.sqrt(to_f32(running_var) + float32(eps))
    count = x.numel() // channels
    with np.errstate(all="ignore"):
        # 1. sums of g and of g (x - mean); in 16 bits they are rounded on their way unless channels lie innermost
        if last:
            plan = Plan(1, *_blocks(count, channels), _LOADS)
            total, dot = sums(g_f32.T, plan), sums(g_f32.T, plan, (x_f32 - centre).T)
        else:
            dealt, centred = (_dealt(t)[0] for t in (g_f32, x_f32 - centre[:, None]))
            if x.dtype in SIXTEEN_BITS:
                partial = [chain(t.swapaxes(1, 2)) for t in (dealt, to_f32(from_f32(dealt * centred, x.dtype)))]
                total, dot = (_rounded_tree(t.reshape(-1, 16, 32), x.dtype) + float32(0.0) for t in partial)
            else:
                rows = [t.reshape(channels, -1) for t in (dealt, centred)]
                total, dot = sums(rows[0], Plan(32, 16)), sums(rows[0], Plan(32, 16), rows[1])
        # 2. the gradient of x
        share = _ONE / float32(count)
        if last:
            slope, factor = scale * scale * dot * share, w * scale
        else:
            slope, factor = dot * share * scale * scale, scale * w
        bring = (lambda t: t) if last else (lambda t: t[:, None])
        per_channel = [bring(t) for t in (centre, slope, factor, total * share)]
        if not train:
            simple = last or not (mask[1] or mask[2])
            dx = (g_f32 * bring(w)) * bring(scale) if simple else g_f32 * per_channel[2]
        elif last:
            dx = fma(-(x_f32 - centre), slope, fma(-total, share, g_f32)) * factor
        else:
            dx = (fma(-(x_f32 - per_channel[0]), per_channel[1], g_f32) - per_channel[3]) * per_channel[2]
        dweight = dot * scale
    dtype = x.dtype if weight is None else weight.dtype
    return (
        _tensor(dx, x, last),
        from_f32(dweight, dtype) if mask[1] else None,
        from_f32(total, dtype) if mask[2] else None,
    )
