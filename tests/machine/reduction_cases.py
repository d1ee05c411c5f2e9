# SPDX-License-Identifier: Apache-2.0
"""Sums over any dimensions and layouts, spatial softmax, scans and norms: calls for a GPU and for ``simulate``."""

import functools
import math
import random
from collections.abc import Iterator

import torch
from torch.nn import functional

from tests.machine.cases import ATEN, BF16, DTYPES, F32, FP16, KINDS, Case, numbers

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 49, 64, 65, 96, 100, 128, 130, 196, 256, 384, 500, 512, 768,
         1000, 1024, 2048, 3000, 4096, 8193, 20000)  # fmt: skip
SHAPES = ((2, 64, 56, 56), (8, 64, 14, 14), (4, 512, 7, 7), (1, 3, 224, 224), (32, 16, 8, 8),
          (2, 197, 192), (4, 128, 768), (2, 12, 128, 128), (2, 8, 64, 64), (3, 5, 7, 11, 13), (16, 10),
          (64, 1000), (2, 300_000), (3, 100_001), (5, 40_000), (1_000_003,), (300_000, 2), (100_000, 7),
          (50_000, 12), (4, 20_000, 6), (1, 1, 70_000), (600, 600))  # fmt: skip


def _shape(draw: random.Random, dims: int, most: int) -> tuple[int, ...]:
    """Return a shape of at most so many elements."""
    shape: list[int] = []
    for _ in range(dims):
        shape.append(draw.choice([n for n in SIZES if n * math.prod(shape) <= most]))
    draw.shuffle(shape)
    return tuple(shape)


def _laid_out(draw: random.Random, seed: int, shape: tuple[int, ...], kind: str, dtype: torch.dtype, layout: int):  # type: ignore[no-untyped-def]
    """Return numbers in memory as a layout says: contiguous, permuted, every second, behind some others, expanded."""
    if layout == 1:
        order = draw.sample(range(len(shape)), len(shape))
        return numbers(seed, tuple(shape[d] for d in order), kind, dtype).permute(
            [order.index(d) for d in range(len(shape))]
        )
    if layout == 2:
        d = draw.randrange(len(shape))
        wider = tuple(2 * n if e == d else n for e, n in enumerate(shape))
        return numbers(seed, wider, kind, dtype)[(slice(None),) * d + (slice(None, None, 2),)]
    if layout == 3:
        shift = draw.randrange(1, 9)
        return numbers(seed, (shift + math.prod(shape),), kind, dtype)[shift:].view(shape)
    if layout == 4:
        d = draw.randrange(len(shape))
        return numbers(seed, tuple(1 if e == d else n for e, n in enumerate(shape)), kind, dtype).expand(shape)
    return numbers(seed, shape, kind, dtype)


def _placed(x: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor on a device with its strides and its place in its storage."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def _reductions(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, ...]:
    results = [x.sum(dims), x.mean(dims, keepdim=True), torch.linalg.vector_norm(x, 2, dims)]
    results += [torch.linalg.vector_norm(x, 1, dims), torch.linalg.vector_norm(x, math.inf, dims)]
    if x.dtype != F32:
        results += [x.sum(dims, dtype=F32), x.mean(dims, dtype=F32)]
    return *results, x.amax(dims)


def _variances(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, ...]:
    return (x.var(dims), x.std(dims, correction=0), *torch.var_mean(x, dims, keepdim=True))


def reduction_cases() -> Iterator[Case]:
    """Yield 600 sums, means and norms, and 200 variances: 1 to 5 dimensions, five layouts."""
    for i in range(800):
        draw = random.Random(i)
        sizes = (
            SHAPES[i // 2 % len(SHAPES)]
            if i % 2
            else _shape(draw, 1 + i // 2 % 5, (3000, 60_000, 400_000)[i // 10 % 3])
        )
        dims = sorted(draw.sample(range(len(sizes)), draw.randrange(1, len(sizes) + 1)))
        kind, dtype, layout = KINDS[i // 3 % 5], DTYPES[i % 3], draw.choice((0, 0, 1, 1, 1, 2, 3, 4))
        name, function = ("sums", _reductions) if i % 4 < 3 else ("variances", _variances)

        def call(
            device, draw=draw, i=i, sizes=sizes, kind=kind, dtype=dtype, layout=layout, dims=dims, function=function
        ):  # type: ignore[no-untyped-def]
            x = _laid_out(random.Random(1000 + i), 20_000 + i, sizes, kind, dtype, layout)
            return function(_placed(x, device), dims)

        yield Case(f"{name} {i}", call)


def softmax_cases() -> Iterator[Case]:
    """Yield 120 softmax and log_softmax over dimensions that are not the last one, with gradients."""
    for i in range(120):
        draw = random.Random(5000 + i)
        dims, kind, dtype = 2 + i % 3, KINDS[i // 3 % 5], DTYPES[i % 3]
        sizes = _shape(draw, dims, 60_000)
        sizes = tuple(max(n, 2) for n in sizes) if math.prod(sizes) < 10_000 else sizes
        dim, name = draw.randrange(dims - 1), ("softmax", "log_softmax")[i // 2 % 2]

        def call(device, i=i, sizes=sizes, dim=dim, kind=kind, dtype=dtype, name=name):  # type: ignore[no-untyped-def]
            x = numbers(30_000 + i, sizes, kind, dtype).to(device)
            g = numbers(31_000 + i, sizes, "normal", dtype).to(device)
            y = getattr(torch, name)(x, dim)
            results = (y, getattr(ATEN, f"_{name}_backward_data")(g, y, dim, dtype))
            return (*results, getattr(torch, name)(x, dim, dtype=F32)) if dtype == FP16 else results

        yield Case(f"spatial {i}", call)


def scan_cases() -> Iterator[Case]:
    """Yield 120 cumulative sums and products."""
    for i in range(120):
        draw = random.Random(6000 + i)
        dims, kind, dtype = 1 + i % 4, KINDS[i // 3 % 5], DTYPES[i % 3]
        sizes = _shape(draw, dims, 40_000)
        dim = draw.randrange(dims)

        def call(device, i=i, sizes=sizes, dim=dim, kind=kind, dtype=dtype):  # type: ignore[no-untyped-def]
            x = numbers(32_000 + i, sizes, kind, dtype).to(device)
            results = torch.cumsum(x, dim), torch.cumprod(x, dim)
            return (*results, torch.cumsum(x, dim, dtype=F32)) if dtype != F32 else results

        yield Case(f"scan {i}", call)


GROUPS = (((4, 32, 8, 8), 8), ((2, 64, 14, 14), 32), ((2, 12, 7, 5), 3), ((3, 16), 4), ((130, 24), 6),
          ((200, 16, 3, 3), 2), ((2, 320, 16, 16), 32), ((1, 6, 50, 50), 1), ((2, 8, 4000), 8),
          ((5, 10, 9), 10), ((2, 96, 1, 1), 12), ((1, 1024, 4), 2), ((2, 1200), 2),
          ((1, 128, 32, 32), 32), ((4, 4, 4, 4, 4), 2), ((129, 7, 2), 7))  # fmt: skip


def group_norm_cases() -> Iterator[Case]:
    """Yield 120 group norms with gradients."""
    for i in range(120):
        (sizes, groups), kind, dtype = GROUPS[i % len(GROUPS)], KINDS[i // 3 % 5], DTYPES[i % 3]
        affine, inner = (3, 3, 3, 1, 0)[i // 4 % 5], math.prod(sizes[2:])

        def call(device, i=i, sizes=sizes, groups=groups, kind=kind, dtype=dtype, affine=affine, inner=inner):  # type: ignore[no-untyped-def]
            x, g = (numbers(33_000 + 1000 * j + i, sizes, (kind, "normal")[j], dtype).to(device) for j in range(2))
            w, b = (
                numbers(35_000 + 1000 * j + i, sizes[1:2], "normal", dtype).to(device) if affine >> j & 1 else None
                for j in range(2)
            )
            leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
            y, mean, rstd = ATEN.native_group_norm(x, w, b, sizes[0], sizes[1], inner, groups, 1e-5)
            return y, mean, rstd, *torch.autograd.grad(y, leaves, g)

        yield Case(f"group_norm {i}", call)


BATCHES = ((16, 10), (4, 8, 30), (8, 16, 14, 14), (2, 64, 28, 28), (32, 24, 4, 4), (64, 128),
           (2, 3, 33, 17), (100, 5), (1, 12, 16, 16), (4, 32, 7, 7), (2, 6, 3, 4, 5), (600, 3),
           (128, 16, 1, 1), (7, 9, 50), (1, 2, 130, 130), (300, 33), (3, 40, 20, 20), (2, 1, 9, 9),
           (16, 256, 2, 2), (2000, 2))  # fmt: skip


def _batch_norm(device, i, sizes, kind, dtypes, train, cudnn, layout, affine, running):  # type: ignore[no-untyped-def]
    """Return a batch norm's results; x and its gradient are contiguous, channels_last (1), others, or differ (3, 4)."""
    dtype, stats = dtypes
    x, g = (numbers(37_000 + 1000 * j + i, sizes, (kind, "normal")[j], dtype).to(device) for j in range(2))
    x = x.contiguous(memory_format=torch.channels_last) if layout in (1, 3) else x
    g = g.contiguous(memory_format=torch.channels_last) if layout in (1, 4) else g
    if layout == 2:
        x, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    w, b, mean, var = (numbers(39_000 + 1000 * j + i, sizes[1:2], "normal", stats).to(device) for j in range(4))
    var = var.abs()
    leaves = [t.requires_grad_() for t in ((x, w, b) if affine else (x,))]
    tensors = *((w, b) if affine else (None, None)), *((mean, var) if running else (None, None))
    with torch.backends.cudnn.flags(enabled=cudnn, deterministic=False):
        y, saved_mean, saved_rstd, *_ = torch._batch_norm_impl_index(x, *tensors, train, 0.1, 1e-5, cudnn)
        gradients = torch.autograd.grad(y, leaves, g)
    return y, saved_mean, saved_rstd, *((mean, var) if running else ()), *gradients


def batch_norm_cases() -> Iterator[Case]:
    """Yield 360 batch norms with gradients, in turn by cuDNN where PyTorch takes it and by PyTorch itself."""
    for i in range(360):
        sizes, kind = BATCHES[i % len(BATCHES)], KINDS[i // 3 % 5] if i % 2 else "normal"
        dtypes = ((F32, F32), (BF16, BF16), (FP16, FP16), (F32, F32), (BF16, F32), (FP16, F32))[i // 20 % 6]
        train, cudnn, last = i // 7 % 3 > 0, i // 10 % 2 == 0, len(sizes) == 4 and i // 4 % 3 == 0
        affine, running = i // 11 % 5 > 0, not train or i // 13 % 4 > 0
        call = functools.partial(
            _batch_norm, i=i, sizes=sizes, kind=kind, dtypes=dtypes, train=train, cudnn=cudnn, layout=int(last),
            affine=affine, running=running,
        )  # fmt: skip
        yield Case(f"batch_norm {i}", call)


IMAGES = ((4, 16, 40, 40), (1, 8, 100, 100), (16, 8, 32, 32), (8, 16, 56, 56), (64, 4, 28, 28),
          (256, 8, 14, 14), (4, 6, 224, 224), (32, 8, 56, 56), (128, 4, 32, 32), (16, 3, 112, 112),
          (4, 2048, 7, 7), (32, 64, 8, 8), (16, 512, 2, 2), (2, 8, 1, 1), (9, 4, 3), (3, 5, 4097),
          (16, 1, 14, 14), (1, 300, 5, 5), (5, 7, 33, 31), (6, 32, 16, 16), (2, 16, 128, 128),
          (7, 12, 3, 3), (10, 2, 8, 8, 8), (3, 6, 2, 2, 2))  # fmt: skip


def large_batch_norm_cases() -> Iterator[Case]:
    """Yield 144 batch norms of larger images, of training by cuDNN, and 30 of other layouts."""
    for i in range(174):
        sizes, kind = IMAGES[i % len(IMAGES)] if i < 144 else (4, 6, 5, 7), KINDS[i // 24 % 3]
        dtypes = ((F32, F32), (FP16, F32), (BF16, BF16))[i // 48 if i < 144 and i // 48 < 2 else i % 3]
        layout = i // 24 % 2 * (len(sizes) == 4) if i < 144 else 2 + i // 3 % 3
        train = i < 144 or i // 9 % 2 == 0
        cudnn = i < 96 or i % 2 == 0
        call = functools.partial(
            _batch_norm, i=5000 + i, sizes=sizes, kind=kind, dtypes=dtypes, train=train, cudnn=cudnn, layout=layout,
            affine=True, running=True,
        )  # fmt: skip
        yield Case(f"images {i}", call)


def instance_norm_cases() -> Iterator[Case]:
    """Yield 30 instance norms with gradients."""
    for i in range(30):
        sizes, dtype, kind = ((2, 6, 9, 9), (3, 4, 40), (1, 32, 16, 16))[i % 3], DTYPES[i // 3 % 3], KINDS[i // 2 % 5]

        def call(device, i=i, sizes=sizes, dtype=dtype, kind=kind):  # type: ignore[no-untyped-def]
            x, g = (numbers(43_000 + 100 * j + i, sizes, (kind, "normal")[j], dtype).to(device) for j in range(2))
            w, b = (numbers(43_200 + 100 * j + i, sizes[1:2], "normal", dtype).to(device) for j in range(2))
            leaves = [t.requires_grad_() for t in ((x, w, b) if i % 2 else (x,))]
            y = functional.instance_norm(x, weight=w if i % 2 else None, bias=b if i % 2 else None)
            return y, *torch.autograd.grad(y, leaves, g)

        yield Case(f"instance_norm {i}", call)


def odd_norm_cases() -> Iterator[Case]:
    """Yield 120 layer norms, and rms norms, of widths that 4 does not divide, with gradients."""
    for i in range(120):
        width = (1, 3, 5, 10, 33, 49, 65, 127, 130, 255, 258, 513, 1025, 2050, 4099, 6, 20_003)[i % 17]
        rows = min((1, 3, 17, 64, 100, 130, 300, 1000)[i // 3 % 8], 60_000 // width)
        kind, dtype = KINDS[i // 3 % 5], DTYPES[i % 3]

        def call(device, i=i, shape=(rows, width), kind=kind, dtype=dtype):  # type: ignore[no-untyped-def]
            x, g = (numbers(44_000 + 1000 * j + i, shape, (kind, "normal")[j], dtype).to(device) for j in range(2))
            w, b = (numbers(46_000 + 1000 * j + i, shape[1:], "normal", dtype).to(device) for j in range(2))
            width = [shape[1]]
            y, mean, rstd = ATEN.native_layer_norm(x, width, w, b, 1e-5)
            results = y, mean, rstd, *ATEN.native_layer_norm_backward(g, x, width, mean, rstd, w, b, [True] * 3)
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = functional.rms_norm(leaves[0], width, leaves[1], 1e-6)
            return *results, y, *torch.autograd.grad(y, leaves, g)

        yield Case(f"odd_norm {i}", call)


_ALL = (
    reduction_cases, softmax_cases, scan_cases, group_norm_cases, batch_norm_cases, large_batch_norm_cases,
    instance_norm_cases, odd_norm_cases,
)  # fmt: skip
# Calls that ``simulate`` names as not known: extremes that are zeros of both signs, scans of CUB, cuDNN on large images
# or channels_last, gradients that lie otherwise than x.
UNKNOWN = {
    "sums": "41 146 161 385 416 536",
    "scan": "0 4 8 12 16 20 24-25 28 32 36 40 44 48 52 56 60 64 68-69 72 76 80 84 88 92 96 100-101 104 108 112 116",
    "batch_norm": "101-104 108-109 122-123 182-183 242-243 302-303 343-344 348-349",
    "images": "2-9 20 24-36 41-45 48-57 59-60 64 67-68 70-84 88-95 100 102 112 118 120 124 126 130 132 136 138 142 "
    "144 147-149 151-152 154 156-162 165-167 169-170 172",
}


def _known(name: str) -> bool:
    kind, number = name.rsplit(" ", 1)
    spans = [span.split("-") for span in UNKNOWN.get(kind, "").split()]
    return not any(int(span[0]) <= int(number) <= int(span[-1]) for span in spans)


def reduced_cases(known: bool = True) -> Iterator[Case]:
    """Yield every case of this file whose bits are known, or those that ``simulate`` refuses."""
    for cases in _ALL:
        yield from (case for case in cases() if _known(case.name) is known)
