# SPDX-License-Identifier: Apache-2.0
"""Calls of operators whose order ``simulate`` took from PyTorch's source: padding, pools, indices, FlashAttention-2."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F  # noqa: N812

from tests.machine.cases import ATEN, BF16, DTYPES, FP16, KINDS, Case, numbers


def _gradient(function: Callable) -> Callable:
    """Return a function that returns another one's result and gradient."""

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return y, *torch.autograd.grad(y, leaf, numbers(77, tuple(y.shape), "normal", y.dtype).to(y.device))

    return call


def _padded(mode: str) -> Callable:
    return lambda x: tuple(F.pad(x, (2, 1) * n, mode) for n in (min(3, x.ndim - 2),))


def _mask(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.numel(), device=x.device) * 7 % 3 == 0).view(x.shape)


def _loss(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # [batch, classes, places]: one class of each place, some are left out
    x, target = x.flatten(2)[..., None], (torch.arange(x[:, 0].numel(), device=x.device) * 5 % x.shape[1])
    target = torch.where(target == 1, -100, target).view(len(x), -1, 1)
    return tuple(y for how in ("none", "mean", "sum") for y in _gradient(
        lambda z: F.nll_loss(z, target, reduction=how)  # noqa: B023
    )(x))  # fmt: skip


LINES, IMAGES, VOLUMES = ((2, 4, 33), (1, 3, 100)), ((2, 4, 8, 12), (1, 6, 15, 10)), ((2, 3, 4, 6, 8), (1, 2, 5, 7, 9))
CALLS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    **{f"{mode}_pad{n}": (_padded(mode), shapes) for n, shapes in ((1, LINES), (2, IMAGES), (3, VOLUMES))
       for mode in ("reflect", "replicate")},
    "unfold": (_gradient(lambda x: x.unfold(-1, 3, 2) * 1), LINES),
    "pixel_shuffle": (lambda x: (F.pixel_shuffle(x[:, :1].repeat(1, 4, 1, 1), 2), F.pixel_unshuffle(x[..., :4, :8], 2)),
                      IMAGES),
    "channel_shuffle": (lambda x: (F.channel_shuffle(x, 2),), IMAGES),
    "diagonal": (_gradient(lambda x: x.diagonal(1, -2, -1) * 1), IMAGES),
    "diag_embed": (lambda x: (x.diag_embed(),), LINES),
    "masked_select": (lambda x: (x.masked_select(_mask(x)),), IMAGES),
    "masked_scatter": (_gradient(lambda x: x.masked_scatter(_mask(x), x.flip(0) * 2)), IMAGES),
    "searchsorted": (lambda x: (torch.searchsorted(x.nan_to_num().sort(-1)[0], x), torch.bucketize(x, x.new_tensor(
        [-1.0, 0.0, 0.5]))), LINES),
    "copysign": (lambda x: (x.copysign(x.flip(0)), x.abs().copysign(x.flip(-1))), IMAGES),
    "heaviside": (lambda x: (torch.heaviside(x, x.flip(-1)),), IMAGES),
    "lgamma": (lambda x: (x.lgamma(), (x * 20).lgamma()), IMAGES),
    "nextafter": (lambda x: (torch.nextafter(x.float(), x.float().flip(-1)),), IMAGES),
    "extremes": (lambda x: (x.amin(-1), x.amin(0), x.max(), x.min(), *x.max(-1), *x.min(1)), IMAGES),
    "sort": (lambda x: (*x.sort(-1), *x.sort(1, descending=True), *x.sort(dim=-1, stable=True)), IMAGES),
    "std_mean": (lambda x: (*torch.std_mean(x), *torch.std_mean(x, -1), *torch.std_mean(x, (0, 2), correction=0)),
                 IMAGES),
    "foreach_mul": (lambda x: (*torch._foreach_mul([x, x.flip(0)], 0.3), *torch._foreach_mul([x], [x.flip(-1)])),
                    IMAGES),
    "safe_softmax": (lambda x: (ATEN._safe_softmax(x, -1), ATEN._safe_softmax(x.masked_fill(_mask(x), -torch.inf), -1)),
                     IMAGES),
    "max_pool3d": (_gradient(lambda x: F.max_pool3d(x, 2)), VOLUMES),
    "avg_pool3d": (_gradient(lambda x: F.avg_pool3d(x, 2)), VOLUMES),
    "avg_pool3d overlapping": (lambda x: (F.avg_pool3d(x, 3, 2, 1),), VOLUMES),
    "adaptive_max_pool2d": (_gradient(lambda x: F.adaptive_max_pool2d(x[..., :4], (x.shape[-2], 2))), IMAGES),
    "adaptive_max_pool3d": (_gradient(lambda x: F.adaptive_max_pool3d(x[..., :4, :6], (x.shape[2], 2, 3))), VOLUMES),
    "adaptive_avg_pool2d": (_gradient(lambda x: F.adaptive_avg_pool2d(x[..., :4], (x.shape[-2], 2))), IMAGES),
    "adaptive_avg_pool2d uneven": (lambda x: (F.adaptive_avg_pool2d(x, (3, 5)),), IMAGES),
    **{f"{mode} {n}d": (_gradient(lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode)), shapes)
       for n, shapes in ((1, LINES), (3, VOLUMES)) for mode in ("nearest", "nearest-exact")},
    "linear 1d": (lambda x: (F.interpolate(x, size=50, mode="linear"), F.interpolate(x, size=17, mode="linear",
                                                                                    align_corners=True)), LINES),
    "nll_loss2d": (_loss, IMAGES),
}  # fmt: skip
HEADS = (5, 12, 20, 33, 50, 100, 116)


def source_cases() -> Iterator[Case]:
    """Yield every call in three dtypes, kinds of numbers in turn, and FlashAttention-2 of more than 128 keys."""
    for i, (name, (function, shapes)) in enumerate(CALLS.items()):
        for j, dtype in enumerate(DTYPES):

            def call(device, function=function, shapes=shapes, dtype=dtype, i=i, j=j):  # type: ignore[no-untyped-def]
                xs = [
                    numbers(900 + i, shape, KINDS[(i + j + n) % 5], dtype).to(device) for n, shape in enumerate(shapes)
                ]
                return tuple(y for x in xs for y in function(x))

            yield Case(f"source {name} {str(dtype)[6:]}", call)
    for i in range(28):
        d, queries, causal = HEADS[i % 7], (130, 200, 256, 333)[i // 7], i % 3 < 2
        keys, dtype = queries if causal or i % 2 else queries - 70, (BF16, FP16)[i % 2]
        gradient = keys <= (256 if d <= 128 else 128)

        def attention(device, i=i, d=d, q=queries, k=keys, causal=causal, dtype=dtype, gradient=gradient):  # type: ignore[no-untyped-def]
            # so many heads that no keys are shared among blocks of threads
            leaves = [numbers(500 + i + n, (4, 24, rows, d), "normal", dtype).to(device).requires_grad_(gradient)
                      for n, rows in enumerate((q, k, k))]  # fmt: skip
            y = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            g = numbers(400 + i, tuple(y.shape), "normal", dtype).to(device)
            return y, *(torch.autograd.grad(y, leaves, g) if gradient else ())

        yield Case(f"source attention {queries}x{keys} {d} {str(dtype)[6:]} {causal} {i}", attention)
