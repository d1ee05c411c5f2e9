# SPDX-License-Identifier: Apache-2.0
"""Operators that place elements or add them where they belong, and pools, as PyTorch 2.11's kernels do.

Atomic additions have bits where every place gets one of them, or two on a zero; else a GPU fixes no order.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fmtsim.machine.arrays import check_shapes, fma, from_f32, to_f32
from fmtsim.machine.loss import MOST_EXACT, add_in_turn, rounding
from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder

_ATEN = torch.ops.aten


def _flushed(x_f32: np.ndarray) -> np.ndarray:
    """Return numbers with zeros of their sign for subnormal ones."""
    return np.where(np.abs(x_f32) < np.float32(2.0**-126), np.copysign(np.float32(0.0), x_f32), x_f32)


def _positions(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel()).reshape(x.shape)


def _added(x: torch.Tensor, places: torch.Tensor, values: torch.Tensor, name: str) -> torch.Tensor:
    """Return x with values added at places of its flat order.

    Raises:
        Nondeterministic: Places that get several. It holds a result that is possible.
    """
    check_shapes(name, values=(values if x.ndim else values.reshape(places.shape), places.shape))
    flat, added = places.reshape(-1).numpy(), to_f32(values).reshape(-1)
    total = to_f32(x).reshape(-1).copy()
    counts = np.bincount(flat, minlength=total.size)
    with np.errstate(all="ignore"):
        # sums of small integers are exact in any order
        whole = (added == np.rint(added)).all() and np.abs(added).sum(dtype=np.float64) + np.abs(total[counts > 1]).sum(
            dtype=np.float64
        ) < MOST_EXACT[x.dtype]
        settled = counts.max(initial=0) <= 1 or (counts.max() == 2 and not total[counts > 1].any()) or whole  # noqa: PLR2004
        rounded, before = (None if x.dtype == torch.float32 else rounding(x.dtype)), total.copy()
        add_in_turn(total, flat, added, rounded)
        # PTX's manual says that atomic additions of float32 take and give zeros for subnormal numbers
        flushed = total
        if rounded is None and any((_flushed(y) != y).any() for y in (added, before[flat], total[flat])):
            flushed, before[flat] = before, _flushed(before[flat])
            add_in_turn(flushed, flat, _flushed(added), _flushed)
    if rounded is not None:  # two elements of 16 bits are added at once, of which one gets a zero
        beside = flat ^ 1
        total[beside[beside < total.size]] += np.float32(0.0)
    result = from_f32(flushed, x.dtype, x.shape)
    if not settled:
        raise Nondeterministic(f"{name} with several values at one place: they are added by atomics", result)
    if not np.array_equal(total, flushed, equal_nan=True):
        raise Guess(f"{name} of subnormal numbers, zeros in atomic additions by PTX's manual", result)
    return result


def _scatter_add(x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    places = _positions(x).gather(dim, index)
    return _added(x, places, values[tuple(slice(n) for n in index.shape)], "scatter_add")


def _index_add(x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor, *, alpha: float = 1) -> Any:
    scaled = values if alpha == 1 else values * torch.tensor(alpha).to(x.dtype)
    return _added(x, _positions(x).index_select(dim, index), scaled, "index_add")


def _placed(operator: Callable, places: torch.Tensor, values: Any) -> torch.Tensor:
    """Return what an operator of the host writes at places.

    Raises:
        Nondeterministic: Several values at one place, of which any may be the last.
    """
    result = operator()
    if torch.is_tensor(values) and values.ndim and places.numel() > places.unique().numel():
        raise Nondeterministic("several values at one place, of which a GPU does not fix the last", result)
    return result  # type: ignore[no-any-return]


def _scatter(x: torch.Tensor, dim: int, index: torch.Tensor, values: Any, **reduce: Any) -> torch.Tensor:
    if reduce:
        raise UnknownOrder("scatter that reduces")
    return _placed(lambda: _ATEN.scatter(x, dim, index, values), _positions(x).gather(dim, index), values)


def _scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    if reduce in ("amax", "amin"):
        return _ATEN.scatter_reduce(x, dim, index, values, reduce, include_self=include_self)  # type: ignore[no-any-return]
    base = x if include_self else x.scatter(dim, index, 1.0 if reduce == "prod" else 0.0)
    if reduce != "prod":
        total = _scatter_add(base, dim, index, values)
        counts = torch.full_like(x, float(include_self)).scatter_add(dim, index, torch.ones_like(values))
        return total if reduce == "sum" else total / counts.masked_fill(counts == 0, 1)
    places = _positions(x).gather(dim, index)
    if places.numel() > places.unique().numel():
        raise UnknownOrder("products of several values at one place")
    return _ATEN.scatter_reduce(base.float(), dim, index, values.float(), "prod").to(x.dtype)  # type: ignore[no-any-return]


def _put(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    places = index.reshape(-1) % x.numel()
    if accumulate:
        return _added(x, places, values.reshape(-1), "put")
    return _placed(lambda: _ATEN.put(x, index, values), places, values)


def in_float32(name: str) -> Callable:
    """Return an operator that adds in float32 as the host's does for float32, and rounds once."""
    packet = getattr(_ATEN, name)

    def call(*arguments: Any, **options: Any) -> Any:
        dtype = arguments[0].dtype
        results = packet(
            *(x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments), **options
        )
        if torch.is_tensor(results):
            return results.to(dtype)
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in results)

    return call


def _folded(
    blocks: np.ndarray, size: list[int], steps: list[int], strides: list[int], corner: list[int]
) -> np.ndarray:  # fmt: skip
    """Return images whose pixels add what windows have for them, in ascending order of the windows.

    Args:
        blocks: [batch, channels, kernel height, kernel width, windows down, windows across].
        size: of the images.
        steps: from one element of a window to the next, down and across.
        strides: from one window to the next.
        corner: the image's first pixel, counted from the first window's.
    """
    *outer, height, width = blocks.shape
    kernel = outer[2:]
    whole = [
        max(strides[d] * (n - 1) + steps[d] * (kernel[d] - 1) + 1, corner[d] + size[d])
        for d, n in enumerate((height, width))
    ]
    image = np.zeros((*outer[:2], *whole), np.float32)
    for i in reversed(range(kernel[0])):
        for j in reversed(range(kernel[1])):
            rows, columns = (
                slice(at * steps[d], at * steps[d] + strides[d] * (n - 1) + 1, strides[d])
                for d, (at, n) in enumerate(((i, height), (j, width)))
            )
            image[:, :, rows, columns] += blocks[:, :, i, j]
    return image[:, :, corner[0] : corner[0] + size[0], corner[1] : corner[1] + size[1]]


def _col2im(
    columns: torch.Tensor, size: list[int], kernel: list[int], dilation: list[int], padding: list[int],
    stride: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return fold's image."""
    counts = [(size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(2)]
    blocks = to_f32(columns).reshape(columns.shape[0] if columns.ndim > 2 else 1, -1, *kernel, *counts)  # noqa: PLR2004
    image = from_f32(_folded(blocks, size, dilation, stride, padding), columns.dtype)
    return image if columns.ndim > 2 else image[0]  # noqa: PLR2004


def _avg_pool2d_backward(
    g: torch.Tensor, x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool,
    counts_padding: bool, divisor: int | None,
) -> torch.Tensor:  # fmt: skip
    """Return avg_pool2d's gradient: quotients in the dtype, added in float32.

    The kernel for channels_last leaves the padding out where it looks for a pixel's windows.
    """
    kernel, padding = (list(n) * (3 - len(n)) for n in (kernel, padding))
    stride = list(stride) * (3 - len(stride)) or kernel
    # 1. the elements of each window
    counts = []
    for d in range(2):
        size, start = x.shape[d - 2], np.arange(g.shape[d - 2]) * stride[d] - padding[d]
        end = np.minimum(start + kernel[d], size + padding[d])
        counts.append(end - start if counts_padding else np.minimum(end, size) - np.maximum(start, 0))
    area = np.outer(*counts) if divisor is None else np.float32(divisor)
    # 2. their sums
    rounded = rounding(x.dtype)
    share = rounded(to_f32(g) / rounded(np.asarray(area, np.float32)))
    share = share.reshape(-1, 1, 1, 1, *share.shape[-2:])
    blocks = np.broadcast_to(share, (len(share), 1, *kernel, *share.shape[-2:]))
    corner = [0, 0] if _channels_last(g, x) else padding
    image = _folded(blocks, list(x.shape[-2:]), [1, 1], stride, corner)
    return torch.empty_like(x).copy_(from_f32(image, x.dtype, x.shape))


def _adaptive_avg_pool2d(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    if _channels_last(x, x):
        raise UnknownOrder("adaptive_avg_pool2d of channels_last images")
    return in_float32("_adaptive_avg_pool2d")(x, size)  # type: ignore[no-any-return]


def _sources(size: int, count: int, corners: bool, scale: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return along a dimension which two pixels each one of a result lies between, and the second one's weight."""
    at = np.arange(count, dtype=np.float32)
    if corners:
        place = at * (np.float32(size - 1) / np.float32(count - 1) if count > 1 else np.float32(0.0))
    else:
        ratio = np.float32(1.0 / scale) if scale else np.float32(size) / np.float32(count)
        place = np.maximum(fma(float(ratio), at + np.float32(0.5), -0.5), np.float32(0.0))
    first = place.astype(np.int64)
    return first, np.minimum(first + 1, size - 1), place - first.astype(np.float32)


def _interpolated(x: torch.Tensor, size: list[int], corners: bool, *scales: float | None) -> torch.Tensor:
    """Return upsample_linear1d or upsample_bilinear2d: weights in float32, one rounding."""
    values = to_f32(x)
    for d in range(-1, -1 - len(size), -1):  # along rows first
        first, second, weight = _sources(x.shape[d], size[d], corners, (*scales, None, None)[len(size) + d])
        shape = [-1 if n == d else 1 for n in range(-x.ndim, 0)]
        a, b, w = np.take(values, first, d), np.take(values, second, d), weight.reshape(shape)
        with np.errstate(all="ignore"):
            values = fma(np.float32(1.0) - w, a, w * b)
    result = from_f32(values, x.dtype)
    return result.contiguous(memory_format=torch.channels_last) if _channels_last(x, x) else result


def _settled(name: str, overlaps: Callable[..., bool]) -> Callable:
    """Return a gradient that is added in float32, where windows do not overlap; else by atomics."""
    operator = in_float32(name)

    def call(*arguments: Any, **options: Any) -> Any:
        if overlaps(*arguments):
            raise Nondeterministic(f"{name} of windows that overlap: they are added by atomics", operator(*arguments))
        return operator(*arguments, **options)

    return call


def _uneven(g: torch.Tensor, x: torch.Tensor, *_: Any) -> bool:
    """Return True if an adaptive pool's windows overlap."""
    dims = range(2, x.ndim) if x.ndim == g.ndim else ()
    return any(x.shape[d] % g.shape[d] for d in dims)


def _strided_windows(g: Any, x: Any, kernel: list[int], stride: list[int], *_: Any) -> bool:
    """Return True if windows overlap."""
    steps = stride or kernel
    return any(step < width for step, width in zip(steps, kernel, strict=False))


def _channels_last(*arguments: Any) -> bool:
    """Return True if images lie as [batch, height, width, channels]."""
    x = arguments[1]
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004


_MOVED = """
max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d im2col unfold unfold_backward
pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d reflection_pad1d reflection_pad2d
reflection_pad3d replication_pad1d replication_pad2d replication_pad3d diagonal diagonal_backward diag_embed
masked_select masked_scatter masked_scatter_backward take index_fill searchsorted bucketize
hardshrink copysign nextafter heaviside frac
"""
_WIDE = """
avg_pool2d avg_pool3d upsample_nearest1d_backward upsample_nearest2d_backward
upsample_nearest3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
_upsample_nearest_exact3d_backward
"""
OPERATORS: dict[str, Callable] = {
    **{name: getattr(_ATEN, name) for name in _MOVED.split()},
    **{name: in_float32(name) for name in _WIDE.split()},
    "scatter": _scatter, "scatter_add": _scatter_add, "scatter_reduce": _scatter_reduce, "index_add": _index_add,
    "put": _put, "col2im": _col2im, "avg_pool2d_backward": _avg_pool2d_backward,
    "_adaptive_avg_pool2d": _adaptive_avg_pool2d, "upsample_linear1d": _interpolated,
    "upsample_bilinear2d": _interpolated,
    "index_copy": lambda x, dim, index, values: _placed(
        lambda: _ATEN.index_copy(x, dim, index, values), index, values
    ),
    "max_pool2d_with_indices_backward": _settled("max_pool2d_with_indices_backward", _channels_last),
    "max_pool3d_with_indices_backward": _settled("max_pool3d_with_indices_backward", _strided_windows),
    "avg_pool3d_backward": _settled("avg_pool3d_backward", _strided_windows),
    **{name: _settled(name, _uneven) for name in (
        "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
    )},
}  # fmt: skip
"""Operators of ATen by name, each with the operator's arguments."""
