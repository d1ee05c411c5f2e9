# SPDX-License-Identifier: Apache-2.0
"""batch_norm, forward and backward, in the order of PyTorch 2.11's own kernels (Normalization.cuh)."""

import math

import numpy as np
import torch
from numpy import float32

from fmtsim.cpu.runtime.jit import device, fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library
from fmtsim.machine.arrays import add_halves, apply, fma, from_f32, put, read, to_f32, words_of
from fmtsim.machine.reduce import Plan, sums
from fmtsim.machine.unknown import UnknownOrder

_THREADS, _ONE, _ZERO = 512, float32(1.0), float32(0.0)
_MOST_OF_CUDNN = 6272  # elements of a channel
_ROWS_A_THREAD, _LOADS, _MOST_BLOCKS = 16, 4, 128  # of the kernels for channels that lie innermost


@device
def _exchange(mean, m2, count, first):
    """Merge Welford's moments of 32 lanes, each with lane xor 1, 2, 4, 8, 16: both compute, each from its side."""
    other_mean, other_m2 = np.empty(32, np.float32), np.empty(32, np.float32)
    step = 1
    while step < 32:
        for lane in range(32):
            other_mean[lane], other_m2[lane] = mean[first + (lane ^ step)], m2[first + (lane ^ step)]
        # lanes that are merged have equal counts on both sides of later steps, but not yet of this one
        counts = count[first : first + 32].copy()
        for lane in range(32):
            i, n, other = first + lane, counts[lane], counts[lane ^ step]
            factor = _ONE / max(_ONE, n + other)
            difference = mean[i] - other_mean[lane]
            m2[i] += fma32(difference * difference * n * other, factor, other_m2[lane])
            mean[i] = fma32(n, mean[i], other * other_mean[lane]) * factor
            count[i] = n + other
        step *= 2


@kernel
def _statistics(x, threads, means, squares, start, stop):
    images, _, inner = x.shape
    lines = _THREADS // threads
    mean, m2, count = np.empty(_THREADS, np.float32), np.empty(_THREADS, np.float32), np.empty(_THREADS, np.float32)
    for channel in range(start, stop):
        mean[:], m2[:], count[:] = _ZERO, _ZERO, _ZERO
        # 1. Welford's update: threads along the inner size, lines of them along the images
        for image in range(images):
            for j in range(inner):
                i = j % threads + threads * (image % lines)
                difference = x[image, channel, j] - mean[i]
                count[i] += _ONE
                mean[i] += difference / count[i]
                m2[i] = fma32(difference, x[image, channel, j] - mean[i], m2[i])
        # 2. lanes of each warp, then the 16 warps in a warp that zeros fill
        for warp in range(16):
            _exchange(mean, m2, count, warp * 32)
        for warp in range(32):
            filled = warp < 16
            mean[warp] = mean[32 * warp] if filled else _ZERO
            m2[warp] = m2[32 * warp] if filled else _ZERO
            count[warp] = count[32 * warp] if filled else _ZERO
        _exchange(mean, m2, count, 0)
        means[channel], squares[channel] = mean[0], m2[0]


@device
def _merge(mean, m2, count, into, other, within):
    """Merge moments; ``within`` a thread the other's mean is the product that is fused."""
    factor = _ONE / max(_ONE, count[into] + count[other])
    difference = mean[into] - mean[other]
    product = difference * difference * count[other] * count[into]
    m2[into] += fma32(product, factor, m2[other])
    if within:
        mean[into] = fma32(mean[other], count[other], mean[into] * count[into]) * factor
    else:
        mean[into] = fma32(mean[into], count[into], mean[other] * count[other]) * factor
    count[into] += count[other]


@kernel
def _statistics_last(x, height, blocks, means, squares, start, stop):
    rows, slots = len(x), height * blocks * _LOADS
    mean, m2, count = np.empty(slots, np.float32), np.empty(slots, np.float32), np.empty(slots, np.float32)
    for channel in range(start, stop):
        mean[:], m2[:], count[:] = _ZERO, _ZERO, _ZERO
        # 1. four accumulators of each thread, which take rows in turn
        for row in range(rows):
            i = row % slots
            count[i] += _ONE
            difference = x[row, channel] - mean[i]
            mean[i] = fma32(difference, _ONE / count[i], mean[i])
            m2[i] += difference * (x[row, channel] - mean[i])
        # turns without a row are zeros of no weight, which make NaN of what is infinite
        for row in range(rows, math.ceil(rows / slots) * slots):
            i = row % slots
            product = mean[i] * mean[i]
            mean[i] = fma32(-mean[i], _ZERO, mean[i])
            m2[i] = fma32(product, _ZERO, m2[i])
        # 2. accumulators in order, threads by halving, then blocks from zero
        for thread in range(height * blocks):
            for a in range(1, _LOADS):
                _merge(mean, m2, count, thread, thread + a * height * blocks, True)
        for block in range(blocks):
            n = height
            while n > 1:
                n //= 2
                for i in range(n):
                    _merge(mean, m2, count, block * height + i, block * height + i + n, False)
        if blocks > 1:
            for thread in range(height):
                # a place that no thread needs any more: the second accumulator's
                i = height * blocks + thread
                mean[i], m2[i], count[i] = _ZERO, _ZERO, _ZERO
                for block in range(thread, blocks, height):
                    _merge(mean, m2, count, i, block * height, False)
            n = height
            while n > 1:
                n //= 2
                for i in range(n):
                    _merge(mean, m2, count, height * blocks + i, height * blocks + i + n, False)
            mean[0], m2[0] = mean[height * blocks], m2[height * blocks]
        means[channel], squares[channel] = mean[0], m2[0]


@device
def _add_rounded(partial, word):
    """Return the sum of 16 warps, each by halving, then the warps; what moves between lanes is rounded to x's dtype."""
    for first in range(0, _THREADS, 32):
        n = 16
        while n > 0:
            for i in range(first, first + n):
                put(word, 0, partial[i + n])
                partial[i] += read(word[0])
            n //= 2
    for warp in range(16):
        partial[warp] = partial[32 * warp]
    n = 8
    while n > 0:
        for i in range(n):
            put(word, 0, partial[i + n])
            partial[i] += read(word[0])
        n //= 2
    return partial[0]


@kernel
def _gradient_sums(g, x, words, mean, threads, totals, dots, start, stop):
    images, _, inner = x.shape
    lines = _THREADS // threads
    partial, partial_dot, word = np.empty(_THREADS, np.float32), np.empty(_THREADS, np.float32), words.copy()
    for channel in range(start, stop):
        partial[:], partial_dot[:] = _ZERO, _ZERO
        for image in range(images):
            for j in range(inner):
                i = j % threads + threads * (image % lines)
                gradient, centred = g[image, channel, j], x[image, channel, j] - mean[channel]
                partial[i] += gradient
                if words.itemsize == 4:
                    partial_dot[i] = fma32(gradient, centred, partial_dot[i])
                else:
                    put(word, 0, gradient * centred)
                    partial_dot[i] += read(word[0])
        totals[channel], dots[channel] = _add_rounded(partial, word), _add_rounded(partial_dot, word)


@kernel
def _gradient_sums_last(g, x, mean, height, blocks, totals, dots, start, stop):
    rows, threads = len(x), height * blocks
    slots = threads * _LOADS
    partial, partial_dot = np.empty(slots, np.float32), np.empty(slots, np.float32)
    for channel in range(start, stop):
        partial[:], partial_dot[:] = _ZERO, _ZERO
        for row in range(rows):
            i = row % slots
            partial[i] += g[row, channel]
            partial_dot[i] = fma32(g[row, channel], x[row, channel] - mean[channel], partial_dot[i])
        for both in (partial, partial_dot):
            for i in range(threads):
                for a in range(1, _LOADS):
                    both[i] += both[i + a * threads]
            for block in range(blocks):
                add_halves(both[block * height :], height)
            if blocks > 1:
                for thread in range(height):
                    total = _ZERO
                    for block in range(thread, blocks, height):
                        total += both[block * height]
                    both[threads + thread] = total
                both[0] = add_halves(both[threads:], height)
        totals[channel], dots[channel] = partial[0], partial_dot[0]


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


def _threads(inner: int) -> int:
    return next(n for n in (32, 64, 128, 256, 512) if inner <= n or n == 512)


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
    return y.movedim(-1, 1) if last else y


def _affine(x: torch.Tensor | None, channels: int, missing: float) -> np.ndarray:
    return np.full(channels, missing, np.float32) if x is None else to_f32(x)


def _takes_cudnn(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: torch.Tensor | None, train: bool,
    eps: float,
) -> bool:  # fmt: skip
    if weight is None or bias is None or (running is None and not train) or not torch.backends.cudnn.enabled:
        return False
    dtypes = x.dtype == torch.float32 or (x.dtype == torch.float16 and weight.dtype == torch.float32)
    return dtypes and x.ndim >= 3 and x.shape[0] <= (880801 if train else 65535) and eps >= 1e-5


def _cudnn_sums(
    rows: np.ndarray, inner: int, dtype: torch.dtype, factors: np.ndarray | None, pairs: bool
) -> np.ndarray:
    """Return sums over rows as 512 threads of cuDNN add them: by halving, or (``pairs``) neighbours first."""
    vector = 2 if dtype == torch.float16 and inner % 2 == 0 else 1
    turns, lanes = math.ceil(rows.shape[1] / (_THREADS * vector)), np.arange(_THREADS)
    if pairs:
        reverse = [int(f"{i:05b}"[::-1], 2) for i in range(32)], [int(f"{i:04b}"[::-1], 2) for i in range(16)]
        lanes = np.add.outer(32 * np.array(reverse[1]), reverse[0]).reshape(-1)
    # the elements of a thread: vectors, turn by turn; zeros behind the last one
    order = np.arange(turns * _THREADS * vector).reshape(turns, _THREADS, vector)[:, lanes].swapaxes(1, 2).reshape(-1)
    dealt = [np.pad(t, ((0, 0), (0, order.size - t.shape[1])))[:, order] for t in (rows, factors) if t is not None]
    return sums(dealt[0], Plan(32, 16), dealt[1] if factors is not None else None)


def _cudnn_rows(x: torch.Tensor) -> np.ndarray:
    """Return float32 [channels, images x inner size].

    Raises:
        UnknownOrder: Channels lie innermost, or a channel is larger than what was compared.
    """
    if not x.is_contiguous() or x.numel() // x.shape[1] > _MOST_OF_CUDNN:
        raise UnknownOrder("batch_norm by cuDNN, of channels_last or of large images")
    return to_f32(x.transpose(0, 1)).reshape(x.shape[1], -1)


def _from_rows(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return from_f32(rows.reshape(like.shape[1], like.shape[0], -1).swapaxes(0, 1), like.dtype, like.shape)


def batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, train: bool, momentum: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (y, mean, rstd) of native_batch_norm, the statistics in float32; update running ones in place.

    Raises:
        UnknownOrder: cuDNN computes it: float32, or float16 with float32 weights, of 3 dimensions or more.
    """
    cudnn = _takes_cudnn(x, weight, bias, running_mean, train, eps)
    if cudnn and train:
        return _cudnn_forward(x, to_f32(weight), to_f32(bias), running_mean, running_var, momentum, eps)
    last, channels = _layout(x), x.shape[1]
    elements = _elements(x, last)
    mean, squares = np.empty(channels, np.float32), np.empty(channels, np.float32)
    count = x.numel() // channels
    if not train:
        assert running_mean is not None and running_var is not None  # or torch refuses
        mean, rstd = to_f32(running_mean), apply(library.rsqrt, to_f32(running_var) + float32(eps))
    else:
        # 1. moments, and what they make of the running ones
        if last:
            shape = _blocks(count, channels)
            run(lambda i, j: _statistics_last(elements, *shape, mean, squares, i, j), channels, 1, 8 * count)
        else:
            threads = _threads(elements.shape[2])
            run(lambda i, j: _statistics(elements, threads, mean, squares, i, j), channels, 1, 8 * count)
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
    x: torch.Tensor, w: np.ndarray, b: np.ndarray, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    momentum: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rows, inner, share = _cudnn_rows(x), math.prod(x.shape[2:]), float32(momentum)
    count = rows.shape[1]
    with np.errstate(all="ignore"):
        # 1. the mean, then the mean of squared differences
        mean = _cudnn_sums(rows, inner, x.dtype, None, False) * (_ONE / float32(count))
        centred = rows - mean[:, None]
        variance = _cudnn_sums(centred, inner, x.dtype, centred, False) * (_ONE / float32(count))
        rstd = apply(library.rsqrt, variance + float32(eps))
        if running_mean is not None and running_var is not None:
            kept = [(_ONE - share) * to_f32(running_var), to_f32(running_mean)]
            unbiased = fma(variance * share, float32(count) / float32(count - 1), kept[0])
            running_var.copy_(from_f32(unbiased, torch.float32))
            running_mean.copy_(from_f32(fma(kept[1], _ONE - share, mean * share), torch.float32))
        # 2. a x + (b - mean a)
        slope = w * rstd
        y = fma(slope[:, None], rows, (b - mean * slope)[:, None])
    return _from_rows(y, x), from_f32(mean, torch.float32), from_f32(rstd, torch.float32)


def _cudnn_backward(
    g: torch.Tensor, x: torch.Tensor, w: np.ndarray, mean: np.ndarray, rstd: np.ndarray, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    g_rows, rows, inner = _cudnn_rows(g), _cudnn_rows(x), math.prod(x.shape[2:])
    share, centred = _ONE / float32(rows.shape[1]), rows - mean[:, None]
    with np.errstate(all="ignore"):
        total = _cudnn_sums(g_rows, inner, x.dtype, None, True)
        dot = _cudnn_sums(g_rows, inner, x.dtype, centred, True)
        factor = w * rstd
        slope = -factor * (dot * rstd * rstd * share)
        part = fma(factor[:, None], g_rows, -(factor * (total * share))[:, None])
        dx, dweight = fma(slope[:, None], centred, part), dot * rstd
    results = _from_rows(dx, x), from_f32(dweight, torch.float32), from_f32(total, torch.float32)
    return tuple(result if asked else None for result, asked in zip(results, mask, strict=True))


def batch_norm_backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, mean: torch.Tensor | None, rstd: torch.Tensor | None, train: bool, eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of (x, weight, bias) of native_batch_norm.

    Raises:
        UnknownOrder: cuDNN computes it, or g lies otherwise than x.
    """
    if train and _takes_cudnn(x, weight, weight, running_mean, train, eps):
        return _cudnn_backward(g.contiguous(), x, to_f32(weight), to_f32(mean), to_f32(rstd), mask)
    # of one channel, or images of one pixel, both hold
    last = _layout(x) or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    channels = x.shape[1]
    if g.stride() != x.stride() or mean is None or rstd is None or not mask[0]:
        raise UnknownOrder("the gradient of batch_norm in another layout than x, or without x's")
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
    total, dot = np.empty(channels, np.float32), np.empty(channels, np.float32)
    with np.errstate(all="ignore"):
        # 1. sums of g and of g (x - mean); the products are rounded to 16 bits unless channels lie innermost
        if last:
            shape = _blocks(count, channels)
            run(
                lambda i, j: _gradient_sums_last(g_f32, x_f32, centre, *shape, total, dot, i, j), channels, 1, 8 * count
            )
        else:
            threads, word = _threads(x_f32.shape[2]), words_of(x.new_empty(1))
            run(
                lambda i, j: _gradient_sums(g_f32, x_f32, word, centre, threads, total, dot, i, j),
                channels, 1, 8 * count,
            )  # fmt: skip
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
