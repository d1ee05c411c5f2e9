# SPDX-License-Identifier: Apache-2.0
"""conv1d and conv2d of an H200 as PyTorch 2.11 calls cuDNN 9.19, or its own kernels where a group has one channel.

cuDNN takes its kernel by shape, and kernels differ in the order of their sums (found by probing, docs/evidence.md).
``convolution.csv`` has the order by shape, in ranges whose recorded shapes have one order: patch embeddings and
Whisper's convolutions in 16 bits. ``convolution_shapes.csv.xz`` has recorded shapes; a shape that lies between twelve
of one order has it, and what most of five near ones have is a guess. Other shapes are unknown.
"""

import csv
import lzma
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch._prims_common import suggest_memory_format
from torch.nn.functional import pad

from fmtsim.machine.arrays import SIXTEEN_BITS, chain_spec, fma, from_f32, product, to_f32, tree
from fmtsim.machine.reduce import reduce
from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder

SHAPES = Path(__file__).parent / "convolution_shapes.csv.xz"
_STEP = 16  # of k, of hopper.mma and hopper.wgmma, which add 16-bit products alike
_LANES = 32
_SMALLEST = 2.0**-126  # normal number


class Order(NamedTuple):
    """In which order a kernel adds products: channels and taps of the filter, or pixels for the weight's gradient.

    ``mma``: a chain of steps of 16 (8 in float32) on the tensor cores: ``tile`` channels of one tap, of the next tap
    ..., then the next channels; a step has one tap. ``cutlass``: the same, and results below 2^-126 are zeros.
    ``gemm``: the same for one tap, and what tiles of channels or pixels leave over comes first. ``fma``: one product
    after the other, fused, by channel, row and column; ``taps``: by row, column and channel. ``lanes``: 32 threads, of
    which thread t has pixels t, t + 32 ...; then the threads by halving. ``images``: a chain of multiply-adds for each
    image; ``products``: a ``gemm`` for each image; ``trees``: 64 threads for each image, as ``lanes``; the images are
    added in order. ``sums``: a chain of multiply-adds
    for each tap; the taps are added in order. ``packed``: steps over taps and channels as they lie; the first of two
    takes the first half of every ``tile`` elements. ``blocks``: eight threads that share blocks of pixels. ``atomic``:
    no order.
    """

    unit: str
    tile: int = 64
    tf32: str = ""  # how float32 becomes TF32: to nearest even, ties away from zero (a), truncated (t)
    descending: bool = False  # taps
    slices: int = 1  # slice s has tiles s, s + slices ... of the pixels; the slices are added in order
    rounded: bool = False  # what the slices so far have is rounded to 16 bits
    guess: bool = False  # by recorded shapes that are near

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the order of an entry of the table: ``fma``, ``mma64-`` (descending), ``cutlass32/5`` (rounded)."""
        groups = re.fullmatch(r"([a-z]+)(\d*)([at]?)(-?)(?:([/+])(\d+))?", text).groups()  # type: ignore[union-attr]
        unit, tile, tf32, descending, how, slices = groups
        return cls(
            unit, int(tile or (_LANES if unit == "lanes" else 64)), tf32, bool(descending), int(slices or 1), how == "/"
        )


class Shape(NamedTuple):
    """A convolution in two dimensions: conv1d has one row."""

    batch: int
    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    out: tuple[int, int]  # rows and columns of the result
    size: tuple[int, int] = (0, 0)  # rows and columns of the input
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    channels_last: bool = False


@cache
def _table() -> dict[tuple[str, ...], list[tuple[Order, tuple[tuple[int, int], ...]]]]:
    """Return recorded orders by pass, form, channels, taps and dtype, each with the shapes that have it.

    Shapes are ranges of multiples of 16 output channels, of batch sizes, and of output pixels of the batch.
    """
    table: dict[tuple[str, ...], list[tuple[Order, tuple[tuple[int, int], ...]]]] = {}
    with (Path(__file__).parent / "convolution.csv").open(encoding="utf-8") as file:
        for row in csv.reader(line for line in file if not line.startswith("#")):
            *key, dtypes, order, outputs, batch, pixels = row
            bounds = tuple((int(low), int(high)) for low, high in (b.split("-") for b in (outputs, batch, pixels)))
            for dtype in ("bfloat16", "float16") if dtypes == "both" else (dtypes,):
                table.setdefault((*key, dtype), []).append((Order.parse(order), bounds))
    return table


def convolution_order(which: str, shape: Shape, dtype: torch.dtype) -> Order:
    """Return the order of sums of a pass: ``forward``, ``dgrad`` (the input's gradient), ``wgrad`` (the weight's).

    Raises:
        UnknownOrder: No recorded range has this shape.
    """
    (rows, taps), strides, pixels = shape.kernel, shape.stride, shape.out[0] * shape.out[1]
    patches = rows == taps and strides == shape.kernel and shape.padding == (0, 0) and shape.out[0] == shape.out[1]
    line = (rows, taps, shape.padding) == (1, 3, (0, 1)) and (strides[1] == 1 or shape.channels == shape.outputs)
    form = "patches" if patches else f"conv1d/{strides[1]}" if line else ""
    channels = "any" if form == "conv1d/2" else str(shape.channels)
    point = shape.outputs, shape.batch, shape.batch * pixels
    # not recorded: pixels at the edge that no window has, and an odd length by twos
    whole = all(
        (n + 2 * p - k) % s == min(p, s - 1)
        for n, p, k, s in zip(shape.size, shape.padding, shape.kernel, strides, strict=True)
    )
    plain = shape.groups == 1 and shape.dilation == (1, 1) and not shape.channels_last
    known, recorded = _recorded(which, shape, dtype)
    if known.get(recorded, "?") == "?" and shape.outputs % _STEP == 0 and plain and whole:
        for order, bounds in _table().get((which, form, channels, str(taps), str(dtype).removeprefix("torch.")), ()):
            if all(low <= n <= high for n, (low, high) in zip(point, bounds, strict=True)):
                return order
    text = known[recorded] if recorded in known else _by_neighbours(which, shape, dtype)
    if text.startswith("atomic"):
        raise Nondeterministic(f"{which} of a convolution, whose products the GPU adds in no order")
    if text.strip("?!"):
        return Order.parse(text.rstrip("?"))._replace(guess=text.endswith("?"))
    groups = f", {shape.groups} groups" if shape.groups > 1 else ""
    last = ", channels last" if shape.channels_last else ""
    raise UnknownOrder(
        f"{which} of a batch of {shape.batch}, {shape.channels} channels to {shape.outputs} of {shape.out[0]} x "
        f"{shape.out[1]} pixels, kernel {shape.kernel}, stride {shape.stride}, padding {shape.padding}{groups}{last}, "
        f"{dtype}: no recorded range of shapes has it"
    )


_PASSES = tuple(
    (which, dtype)
    for which in ("forward", "dgrad", "wgrad")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)


@cache
def _shapes() -> dict[tuple[str, str, torch.dtype], dict[tuple[int, ...], str]]:
    """Return recorded orders by pass, form and dtype, then by input channels, output channels, batch and side.

    ``?`` is an order that was not found, ``!`` one that ``convolution.csv`` has not right, ``atomic`` none at all.
    """
    shapes: dict[tuple[str, str, torch.dtype], dict[tuple[int, ...], str]] = {}
    with lzma.open(SHAPES, "rt", encoding="ascii") as file:
        for form, *point, orders in csv.reader(file):
            for (which, dtype), order in zip(_PASSES, orders.split(), strict=True):
                if order != "-":
                    shapes.setdefault((which, form, dtype), {})[tuple(map(int, point))] = order
    return shapes


def _recorded(which: str, shape: Shape, dtype: torch.dtype) -> tuple[dict[tuple[int, ...], str], tuple[int, ...]]:
    """Return the recorded shapes of a shape's form, and which of them it would be."""
    point = shape.channels, shape.outputs, shape.batch, shape.size[1]
    line = (shape.size[0], shape.kernel[0], shape.padding[0]) == (1, 1, 0)
    first, last = zip(shape.kernel, shape.stride, shape.padding, shape.dilation, shape.size, strict=True)
    if not (line or first == last):
        return {}, point
    kernel, stride, padding, dilation, side = last
    rest = (side + 2 * padding - dilation * (kernel - 1) - 1) % stride
    form = f"{'line' if line else 'image'}{kernel}/{stride}+{padding}"
    form += (f"x{dilation}" if dilation > 1 else "") + (f"~{rest}" if rest else "")
    if shape.groups > 1:
        form += "d" if shape.groups == shape.channels == shape.outputs else f"g{shape.groups}"
    return _shapes().get((which, form + ("l" if shape.channels_last else ""), dtype), {}), point


@cache
def _by_neighbours(which: str, shape: Shape, dtype: torch.dtype) -> str:
    """Return the order of the recorded shapes that lie around a shape; ``?`` ends a guess."""
    known, point = _recorded(which, shape, dtype)
    if len(known) < 12:
        return "?"
    points = np.array(list(known))
    distances = np.abs(np.log2(points / point)).sum(1)
    nearest = np.argsort(distances, kind="stable")[:12]
    around, orders = points[nearest], [list(known.values())[i] for i in nearest]
    between = ((around.min(0) <= point) & (around.max(0) >= point)).all() and distances[nearest[-1]] <= 3
    # channels that are no multiples of 8, and sides that were not recorded, are aligned otherwise
    aligned = all(n % 8 == 0 or (around[:, i] == n).all() for i, n in enumerate(point[:2]))
    if between and aligned and (around[:, 3] == point[3]).sum() >= 2 and len(set(orders)) == 1:
        return orders[0]
    # a guess: what most of the five nearest have, five of six times
    return Counter(orders[:5]).most_common(1)[0][0] + "?" if distances[nearest[0]] <= 3 else "?"


def _product(a: torch.Tensor, b: torch.Tensor, order: Order) -> torch.Tensor:
    """Return the sums of [..., M, K] and [..., N, K] in float32, along K as they lie."""
    if a.ndim == 3:
        # a channel a group: multiply-adds over all groups at a time
        total, a_f32, b_f32 = np.zeros((*a.shape[:2], b.shape[1]), np.float32), to_f32(a), to_f32(b)
        for k in range(a.shape[2]):
            total = fma(a_f32[:, :, None, k], b_f32[:, None, :, k], total)
        return torch.from_numpy(total)
    if order.unit in ("fma", "taps", "lanes", "sums", "blocks"):
        return product(a.float(), b.float(), chain_spec("fp32_fma", torch.float32))
    if a.dtype == torch.float32:
        a, b = (_to_tf32(x, order.tf32) for x in (a, b))
    return product(a, b, chain_spec("hopper.mma", "tf32" if a.dtype == torch.float32 else a.dtype))


def _to_tf32(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return float32 values rounded to TF32: the nearest even one, ties away from zero (a), or truncated (t)."""
    bits = x.contiguous().view(torch.int32)
    half = {"a": 0x1000, "t": 0}.get(how, 0xFFF + ((bits >> 13) & 1))
    return torch.where(x.isfinite(), ((bits + half) & ~0x1FFF).view(torch.float32), x)


def _stored(y: torch.Tensor, order: Order, dtype: torch.dtype) -> torch.Tensor:
    """Return sums rounded to the result's dtype."""
    return (y.masked_fill_(y.abs() < _SMALLEST, 0.0) if order.unit == "cutlass" else y).to(dtype)


def _in_order(x: torch.Tensor, order: Order) -> torch.Tensor:
    """Return [M, taps, channels] as the operand [M, K] of a kernel."""
    if order.unit == "fma":
        return x.transpose(1, 2).flatten(1)
    x = x.flip(1) if order.descending else x
    if order.unit == "taps":
        return x.flatten(1)
    step = _STEP if x.dtype in SIXTEEN_BITS else _STEP // 2
    if order.unit == "packed":
        half = order.tile // 2
        x = pad(x.flatten(1), (0, -x[0].numel() % (8 * half))).view(len(x), -1, 4, 2, half)
        return x.transpose(2, 3).flatten(1)
    tiles = x.split(order.tile, dim=2)
    if order.unit == "gemm" and (rest := x.shape[2] % order.tile):
        tiles = (x[..., :rest], x[..., rest:])
    return torch.cat([pad(tile, (0, -tile.shape[2] % step)).flatten(1) for tile in tiles], 1)


def _over_taps(a: torch.Tensor, b: torch.Tensor, order: Order, dtype: torch.dtype) -> torch.Tensor:
    """Return sums over taps and channels of [M, taps, channels] and [N, taps, channels], rounded to a dtype."""
    if order.unit == "sums":
        parts = [_product(a[:, tap], b[:, tap], order) for tap in range(a.shape[1])]
        return sum(parts[1:], parts[0]).to(dtype)
    return _stored(_product(_in_order(a, order), _in_order(b, order), order), order, dtype)


def _windows(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the input of each output pixel: [batch * pixels, taps, channels]."""
    (top, left), (rows, columns), (down, right), (low, wide) = shape.padding, shape.kernel, shape.stride, shape.dilation
    x = pad(x, (left, left, top, top)).contiguous()
    image, channel, row, column = x.stride()
    sizes = (*x.shape[:2], *shape.out, rows, columns)
    x = x.as_strided(sizes, (image, channel, row * down, column * right, row * low, column * wide))
    return x.permute(0, 2, 3, 4, 5, 1).reshape(-1, rows * columns, x.shape[1])


def _forward(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the result [batch, outputs, rows, columns] without a bias."""
    order = convolution_order("forward", shape, x.dtype)
    if shape.groups == shape.channels > 1 and order.unit in ("fma", "taps"):
        start = np.zeros((shape.batch, shape.outputs, *shape.out), np.float32)
        return _depthwise(x, weight, start, shape, False, order.descending)
    filters = weight.permute(0, 2, 3, 1).flatten(1, 2)
    parts = [
        _over_taps(_windows(of, shape), by, order, x.dtype)
        for of, by in zip(x.chunk(shape.groups, 1), filters.chunk(shape.groups), strict=True)
    ]
    return torch.cat(parts, 1).view(shape.batch, *shape.out, shape.outputs).permute(0, 3, 1, 2).contiguous()


def _input_gradient(g: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the gradient [batch, channels, rows, columns] of the input; each pixel has the taps that reach it."""
    order = convolution_order("dgrad", shape, g.dtype)
    if shape.groups == shape.channels == shape.outputs > 1 and order.unit in ("fma", "taps"):
        start = np.zeros((shape.batch, shape.channels, *shape.size), np.float32)
        return _depthwise(g, weight, start, shape, True, order.descending)
    dx = torch.empty(shape.batch, shape.channels, *shape.size, dtype=g.dtype)
    width, height = (
        max(n, k * d) for n, k, d in zip(shape.size[::-1], shape.kernel[::-1], shape.dilation[::-1], strict=True)
    )
    padded = pad(g, (width, width, height, height))
    for first in np.ndindex(shape.stride):
        # by dimension: pixels of the input, taps that reach them, and the result's pixels there [taps, pixels]
        places = [torch.arange(f, n, s) for f, n, s in zip(first, shape.size, shape.stride, strict=True)]
        reaching, sources = [], []
        sides = zip(first, places, shape.kernel, shape.stride, shape.padding, shape.dilation, strict=True)
        for f, at, k, s, p, d in sides:
            taps = [tap for tap in range(k) if (f + p - tap * d) % s == 0]
            reaching.append(taps)
            sources.append(torch.stack([(at + p - tap * d) // s for tap in taps]) if taps else torch.empty(0, 0))
        if not all(len(at) for at in places):
            continue
        here = dx[:, :, first[0] :: shape.stride[0], first[1] :: shape.stride[1]]
        if not all(reaching):
            here.zero_()
            continue
        rows, columns = (source + more for source, more in zip(sources, (height, width), strict=True))
        windows = padded[:, :, rows[:, None, :, None], columns[None, :, None, :]]
        filters = weight[:, :, reaching[0]][:, :, :, reaching[1]]
        for of, by, to in zip(
            windows.chunk(shape.groups, 1), filters.chunk(shape.groups), here.chunk(shape.groups, 1), strict=True
        ):
            a = of.permute(0, 4, 5, 2, 3, 1).flatten(3, 4).flatten(0, 2)
            part = _over_taps(a, by.permute(1, 2, 3, 0).flatten(1, 2), order, g.dtype)
            to.copy_(part.view(shape.batch, *(len(at) for at in places), -1).permute(0, 3, 1, 2))
    return dx


def _weight_gradient(g: torch.Tensor, x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the gradient of the weight: sums over the pixels of the batch."""
    order = convolution_order("wgrad", shape, g.dtype)
    parts, pixels = [], (shape.batch, *shape.out)
    if shape.groups == shape.channels == shape.outputs > 1 and order.unit in ("fma", "lanes", "blocks", "trees"):
        a = g.permute(1, 0, 2, 3).reshape(shape.outputs, 1, -1)
        b = _windows(x, shape).permute(2, 1, 0).contiguous()
        return _over_pixels(a, b, order, pixels).to(g.dtype).view(shape.outputs, 1, *shape.kernel)
    for of, by in zip(g.chunk(shape.groups, 1), x.chunk(shape.groups, 1), strict=True):
        a = of.permute(1, 0, 2, 3).flatten(1)
        b = _windows(by, shape).transpose(1, 2).flatten(1).t().contiguous()
        parts.append(_stored(_over_pixels(a, b, order, pixels), order, g.dtype))
    return torch.cat(parts).view(shape.outputs, -1, *shape.kernel)


def _over_pixels(a: torch.Tensor, b: torch.Tensor, order: Order, pixels: tuple[int, int, int]) -> torch.Tensor:
    """Return sums over the pixels, of images, rows and columns, of [..., M, pixels] and [..., N, pixels]."""
    if order.unit == "lanes":
        # threads, each one chain of multiply-adds
        threads = range(min(order.tile, a.shape[-1]))
        chains = [_product(a[..., t :: order.tile], b[..., t :: order.tile], order) for t in threads]
        chains += [torch.zeros_like(chains[0])] * (order.tile - len(threads))
        return torch.from_numpy(tree(torch.stack(chains, -1).numpy()))
    if order.unit in ("images", "products", "trees"):
        inner = order._replace(unit={"images": "fma", "products": "gemm", "trees": "lanes"}[order.unit])
        images = zip(a.chunk(pixels[0], -1), b.chunk(pixels[0], -1), strict=True)
        parts = [_over_pixels(of, by, inner, pixels) for of, by in images]
        return sum(parts[1:], parts[0])
    if order.unit == "blocks":
        # a thread has some columns of every second (fourth) row of a block; its pixels of all blocks are one chain
        down, across, width = (2, 4, 2) if order.tile == 8 else (4, 2, 6)
        height, places = (8 if order.tile == 8 else 16), torch.arange(a.shape[-1]).view(pixels)
        parts = []
        for row, column in np.ndindex(down, across):
            total = torch.zeros(*a.shape[:-1], b.shape[-2])
            for image, first in np.ndindex(pixels[0], height // down):
                rows = places[image, first * down + row :: height]
                at = rows[:, torch.arange(pixels[2]) % order.tile // width == column].flatten()
                total = total + _product(a[..., at], b[..., at], order) if len(at) else total
            parts.append(total)
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return (pairs[0] + pairs[3]) + (pairs[1] + pairs[2])
    if order.unit == "fma":
        return _product(a, b, order)
    if order.unit == "gemm":
        return _product(_in_order(a[:, None], order), _in_order(b[:, None], order), order)
    step = _STEP if a.dtype in SIXTEEN_BITS else _STEP // 2
    tile = step if order.slices == 1 else order.tile
    a, b = (pad(operand, (0, -operand.shape[1] % tile)).view(len(operand), -1, tile) for operand in (a, b))
    total = torch.zeros(())
    for s in range(min(order.slices, a.shape[1])):
        part = _product(a[:, s :: order.slices].flatten(1), b[:, s :: order.slices].flatten(1), order)
        total = part if s == 0 else (total.to(a.dtype).float() if order.rounded else total) + part
        if order.slices > 1 and any(((x.abs() < _SMALLEST) & (x != 0)).any() for x in (part, total)):
            raise UnknownOrder("wgrad in slices whose sums are subnormal in float32")
    return total


def _is_depthwise(shape: Shape, dtype: torch.dtype) -> bool:
    """Return whether PyTorch takes its own kernels (DepthwiseConv2d.cu): one channel a group, and not cuDNN."""
    (rows, columns), channels, width = shape.kernel, shape.channels, shape.size[1]
    if shape.groups != channels or shape.groups == 1 or shape.channels_last:
        return False
    line, step = shape.size[0] == 1, shape.stride[1]
    if dtype != torch.float16 or channels < 32 or shape.dilation != (1, 1) or not (line or step == shape.stride[0]):
        return True
    if line and step == 1:
        return False
    if rows != columns or rows not in (1, 3, 5) or width < 7 or step > 2:
        return True
    if step == 1:
        return False
    if rows == 1:
        return width > 28 if shape.batch == 1 else not (shape.batch <= 16 and channels >= 128 and width <= 7)
    return shape.batch > 1 and channels < 512 and not (channels >= 256 and width >= 28)


def _reaching(shape: Shape, row: int, column: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Return the pixels of the result that a tap reaches inside the input, and the input's pixels there."""
    ours, theirs = [], []
    for tap, step, left, gap, size, out in zip(
        (row, column), shape.stride, shape.padding, shape.dilation, shape.size, shape.out, strict=True
    ):
        shift = tap * gap - left
        first, last = max(0, -(shift // step)), min(out - 1, (size - 1 - shift) // step)
        ours.append(slice(first, max(last + 1, first)))
        theirs.append(
            slice(first * step + shift, max(last, first - 1) * step + shift + 1, step) if last >= first else slice(0, 0)
        )
    return (ours[0], ours[1]), (theirs[0], theirs[1])


def _depthwise(
    source: torch.Tensor,
    weight: torch.Tensor,
    start: np.ndarray,
    shape: Shape,
    backward: bool,
    descending: bool = False,
) -> torch.Tensor:
    """Return the result or the input's gradient: multiply-adds by filter of a channel, row and column."""
    source_f32, weight_f32, total = to_f32(source), to_f32(weight), start
    count = shape.outputs // shape.channels
    for which in range(count if backward else 1):
        for row, column in sorted(np.ndindex(shape.kernel), reverse=descending):
            ours, theirs = _reaching(shape, row, column)
            w = weight_f32[:, 0, row, column, None, None]
            if backward:
                part = total[..., *theirs]
                total[..., *theirs] = fma(w[which::count], source_f32[:, which::count, *ours], part)
            else:
                x = np.repeat(source_f32[..., *theirs], count, 1)
                total[..., *ours] = fma(w, x, total[..., *ours])
    return from_f32(total, source.dtype)


def _depthwise_weight(g: torch.Tensor, x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the weight's gradient: a warp takes every eighth image at most, thread t its pixels t, t + 32 ..."""
    warps, pixels = min(shape.batch, 8), shape.out[0] * shape.out[1]
    g_f32, x_f32 = to_f32(g), np.repeat(to_f32(x), shape.outputs // shape.channels, 1)
    dw = np.empty((shape.outputs, 1, *shape.kernel), np.float32)

    def threads(a: np.ndarray) -> np.ndarray:
        a = a.reshape(*a.shape[:2], pixels)
        return np.pad(a, ((0, 0), (0, 0), (0, -pixels % _LANES))).reshape(*a.shape[:2], -1, _LANES)

    g_f32 = threads(g_f32)
    for row, column in np.ndindex(shape.kernel):
        ours, theirs = _reaching(shape, row, column)
        there, inside = np.zeros((*x_f32.shape[:2], *shape.out), np.float32), np.zeros((1, 1, *shape.out), bool)
        there[..., *ours], inside[..., *ours] = x_f32[..., *theirs], True
        there, inside = threads(there), threads(inside)[0, 0]
        total = np.zeros((_LANES, shape.outputs, _LANES), np.float32)  # by warp; more warps than there are add zeros
        for first in range(0, shape.batch, warps):
            images = slice(first, min(first + warps, shape.batch))
            part = total[: images.stop - first]
            for step in range(len(inside)):
                added = fma(there[images, :, step], g_f32[images, :, step], part)
                part[...] = np.where(inside[step], added, part)
        dw[:, 0, row, column] = tree(tree(total).T)
    return from_f32(dw, g.dtype)


def _shape(x: torch.Tensor, weight: torch.Tensor, options: tuple) -> Shape:
    """Return the shape of a convolution in two dimensions.

    Raises:
        UnknownOrder: Arguments, a dtype, a layout or switches for which nothing was recorded.
    """
    stride, padding, dilation, transposed, more, groups = options
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    reasons = {
        f"{x.dtype} operands": x.dtype not in (*SIXTEEN_BITS, torch.float32) or x.dtype != weight.dtype,
        "other than one or two dimensions": x.ndim not in (3, 4),
        "transposed in groups": transposed and groups != 1,
        "float32 without torch.backends.cudnn.allow_tf32": (
            x.dtype == torch.float32 and cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]
        ),
        "cudnn.benchmark, deterministic algorithms, or no cuDNN": (
            cudnn.benchmark or deterministic or not cudnn.enabled
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnknownOrder(reason)
    lines = x.ndim == 3
    size, kernel, stride, padding, dilation, more = (
        (fill, *values) if lines else tuple(values)
        for fill, values in (
            (1, x.shape[2:]), (1, weight.shape[2:]), (1, stride), (0, padding), (1, dilation), (0, more)
        )
    )  # fmt: skip
    sides = zip(size, padding, dilation, kernel, stride, more, strict=True)
    if transposed:
        out = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + m for n, p, d, k, s, m in sides)
    else:
        out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s, _ in sides)
    channels_last = not lines and any(suggest_memory_format(t) == torch.channels_last for t in (x, weight))
    if transposed:
        size, out = out, size
    channels = weight.shape[1] * groups
    return Shape(
        x.shape[0], channels, weight.shape[0], kernel, stride, padding, out, size, dilation, groups, channels_last
    )  # type: ignore[arg-type]


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().contiguous()
    return x.unsqueeze(2) if x.ndim == 3 else x


def _laid_out(y: torch.Tensor, ndim: int, shape: Shape) -> torch.Tensor:
    """Return a result in the layout that PyTorch gives it."""
    if ndim == 3:
        return y.squeeze(2)
    return y.contiguous(memory_format=torch.channels_last) if shape.channels_last else y


def _certain(result: Any, passes: list[str], shape: Shape, operands: tuple[torch.Tensor, ...]) -> Any:
    """Return a result of recorded orders, or raise it as a guess.

    Raises:
        UnknownOrder: NaN or Inf where a kernel multiplies padding; float32 with subnormal numbers.
    """
    dtype = operands[0].dtype
    for which in passes:
        order = convolution_order(which, shape, dtype)
        pads = order.unit in ("blocks", "packed") or (order.unit in ("lanes", "trees") and any(shape.padding))
        if pads and not all(x.isfinite().all() for x in operands):
            raise UnknownOrder(f"{which} of NaN or Inf by a kernel that multiplies padding")
        results = (y for y in (result if isinstance(result, tuple) else (result,)) if y is not None)
        if dtype == torch.float32 and any(((x != 0) & (x.abs() < _SMALLEST)).any() for x in (*operands, *results)):
            raise UnknownOrder(f"{which} in float32 with subnormal numbers, which some kernels flush")
        if order.guess:
            raise Guess(f"{which} of a convolution in the order of recorded shapes that are near", result)
    return result


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """Return aten.convolution of [batch, channels, (rows,) columns]; the bias is added to the rounded result.

    Raises:
        UnknownOrder: A shape, dtype or layout without a recorded order.
        Guess: A shape that lies between recorded ones.
        Nondeterministic: The GPU adds in no order.
    """
    shape = _shape(x, weight, options)
    if _is_depthwise(shape, x.dtype) and not options[3]:
        start = np.zeros((shape.batch, shape.outputs, *shape.out), np.float32)
        if bias is not None:
            start += to_f32(bias)[:, None, None]
        return _laid_out(_depthwise(_rows(x), _rows(weight), start, shape, False), x.ndim, shape)
    # a transposed convolution is the input's gradient of another
    run = _input_gradient if options[3] else _forward
    y = _laid_out(run(_rows(x), _rows(weight), shape), x.ndim, shape)
    y = y if bias is None else y + bias.detach().view(-1, *[1] * (x.ndim - 2))
    return _certain(y, ["dgrad" if options[3] else "forward"], shape, (x, weight))  # type: ignore[no-any-return]


def convolution_backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *options: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of (x, weight, bias) that the mask names: aten.convolution_backward.

    Raises:
        UnknownOrder: As of ``convolution``.
    """
    mask = options[-1]
    shape = _shape(x, weight, options[:-1])
    dx = dw = db = None
    transposed = options[3]
    depthwise = _is_depthwise(shape, x.dtype) and not transposed
    of, by, through = _rows(g), _rows(x), _rows(weight)
    if mask[0] and depthwise:
        dx = _depthwise(of, through, np.zeros(by.shape, np.float32), shape, True)
    elif mask[0]:
        dx = (_forward if transposed else _input_gradient)(of, through, shape)
    if mask[1] and depthwise:
        dw = _depthwise_weight(of, by, shape)
    elif mask[1]:
        dw = _weight_gradient(by, of, shape) if transposed else _weight_gradient(of, by, shape)
    if mask[2]:
        # rows in the order in which they lie in memory
        strides = g.stride()
        dims = sorted(range(g.ndim), key=lambda d: -strides[d])
        db = reduce(g.detach().permute(dims), [n for n, d in enumerate(dims) if d != 1], False, False, g.dtype)
    result = *(None if y is None else _laid_out(y, x.ndim, shape) for y in (dx, dw)), db
    passes = ["forward" if transposed else "dgrad"] * mask[0] + ["wgrad"] * mask[1]
    return _certain(result, [] if depthwise else passes, shape, (g, x, weight))  # type: ignore[no-any-return]
