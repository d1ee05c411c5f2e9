# SPDX-License-Identifier: Apache-2.0
"""Calls of operators on elements, losses, indices, pools and random numbers; a case is one function in all dtypes."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from tests.machine.cases import ATEN, BF16, DTYPES, F32, KINDS, Case, numbers

SPECIALS = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 1.5, 2.5, -2.5, 100.0, -100.0, 1e-3, 1e-30, -1e-30,
            1e-40, -1e-40, 1e30, -1e30, 3e38, math.inf, -math.inf, math.nan, 7.0, 8.0, 1 / 3, 16777216.0, 16777217.0,
            65504.0, 6e-5, 6e-8, 0.1, -0.1, 20.0, 88.7, -88.7, -104.0]  # fmt: skip


def integers(seed, shape, low, high, dtype=torch.int64):  # type: ignore[no-untyped-def]
    """Return whole numbers that every machine makes alike."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).integers(low, high, shape)).to(dtype)


def permuted(seed: int, n: int) -> torch.Tensor:
    """Return the numbers below n in another order."""
    keys = np.random.Generator(np.random.Philox(seed)).integers(0, 1 << 40, n)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


@cache
def line(dtype: torch.dtype) -> torch.Tensor:
    """Return arguments of a function of one number: all words of 16 bits, 1.8 million of float32."""
    if dtype != F32:
        return torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    n = 1 << 20
    bits = (torch.arange(n, dtype=torch.int64) * ((1 << 32) // n - 1) + 12345) & 0xFFFFFFFF
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(F32)
    grid = (torch.arange(n // 2, dtype=torch.float64) - n // 4) * (40.0 / n)
    unit = (torch.arange(n // 4, dtype=torch.float64) - n // 8) * (9.0 / n)
    return torch.cat([bits, grid.to(F32), unit.to(F32), *(numbers(9, (n // 16,), kind, F32) for kind in KINDS[:4])])


@cache
def several(count: int, dtype: torch.dtype, n: int = 1 << 16) -> list[torch.Tensor]:
    """Return arguments of a function of several numbers: kinds in all pairs, and pairs of special numbers."""
    special, k, result = torch.tensor(SPECIALS, dtype=torch.float64), len(SPECIALS), []
    for j in range(count):
        parts = [numbers(31 * j + i, (n // 8,), KINDS[(i // (1 + 2 * (j > 0)) + 2 * j) % 5], dtype) for i in range(10)]
        pairs = special.repeat_interleave(k) if j == 0 else special.repeat(k) if j == 1 else special.roll(j).repeat(k)
        result.append(torch.cat([*parts, pairs.to(dtype)]))
    return result


def gradients(function: Callable, inputs: list[torch.Tensor], seed: int = 77) -> tuple[torch.Tensor | None, ...]:
    """Return a function's results and gradients."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*leaves)
    everything = list(y) if isinstance(y, tuple | list) else [y]
    outputs = [o for o in everything if o.is_floating_point() and o.requires_grad]
    if outputs:
        g = [numbers(seed + i, tuple(o.shape), "normal", o.dtype).to(o.device) for i, o in enumerate(outputs)]
        everything += torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], g, allow_unused=True)
    return tuple(everything)


_ONE = """
exp exp2 expm1 log log2 log10 log1p tanh erf sin cos rsqrt sqrt reciprocal sigmoid tan asin acos atan sinh cosh
asinh acosh atanh erfc erfinv sinc square frac deg2rad rad2deg relu logit
"""
_ACTIVATIONS = """mish hardswish hardsigmoid hardtanh relu6 elu selu celu softsign softshrink hardshrink tanhshrink
logsigmoid gelu silu softplus"""
UNARY: dict[str, Callable] = {
    **{name: getattr(torch, name) for name in _ONE.split()},
    **{name: getattr(F, name) for name in _ACTIVATIONS.split()},
    "logit_eps": lambda x: torch.logit(x, 1e-6), "entr": torch.special.entr, "ndtr": torch.special.ndtr,
    "elu_half": lambda x: F.elu(x, 0.3), "celu_0.7": lambda x: F.celu(x, 0.7),
    "softplus_2_5": lambda x: F.softplus(x, 2.0, 5.0), "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "clamp": lambda x: x.clamp(-0.3, 1.7), "clamp_min": lambda x: x.clamp(min=0.1),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], device=x.device, dtype=x.dtype)),
    **{f"pow_{e}": lambda x, e=e: x**e for e in (1.7, 2.5, 0.33, -3, 5, 4, 3, 1.5, 10, -2, 0.1)},
    **{f"base_{b}": lambda x, b=b: torch.pow(b, x) for b in (2, 0.5, 10000, 10000.0, 1, 500000.0, -2.0)},
    **{f"rdiv_{b}": lambda x, b=b: b / x for b in (1, 3, 0.7)}, "rsub_0.3": lambda x: 0.3 - x,
    **{f"fmod_{b}": lambda x, b=b: torch.fmod(x, b) for b in (3, 0.7)},
    **{f"remainder_{b}": lambda x, b=b: torch.remainder(x, b) for b in (3, 0.7, -2.5)},
    **{f"floordiv_{b}": lambda x, b=b: torch.floor_divide(x.detach(), b) for b in (3, 0.7)},
    **{f"divtrunc_{b}": lambda x, b=b: torch.div(x, b, rounding_mode="trunc") for b in (3, 0.7)},
    "rxlogy": lambda x: torch.xlogy(2.0, x),
}  # fmt: skip


def _elements(name: str, **options: float) -> Callable:
    return lambda a, b: getattr(F, name)(a, b, reduction="none", **options)


_TWO = "pow atan2 fmod remainder hypot logaddexp logaddexp2 xlogy maximum minimum fmax fmin"
BINARY: dict[str, Callable] = {
    **{name: getattr(torch, name) for name in _TWO.split()}, "xlog1py": torch.special.xlog1py,
    "floor_divide": lambda a, b: torch.floor_divide(a.detach(), b.detach()),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "sigmoid_backward": lambda a, b: ATEN.sigmoid_backward(a.detach(), b.detach()),
    "glu": lambda a, b: F.glu(torch.stack([a, b], -1).reshape(-1, 2), -1), "mse": _elements("mse_loss"),
    "smooth_l1": _elements("smooth_l1_loss"), "smooth_l1_0.3": _elements("smooth_l1_loss", beta=0.3),
    "huber": _elements("huber_loss"), "huber_0.3": _elements("huber_loss", delta=0.3),
    "bce_logits": _elements("binary_cross_entropy_with_logits"), "kl_div": _elements("kl_div"),
    "kl_div_log": _elements("kl_div", log_target=True), "poisson": _elements("poisson_nll_loss"),
    "prelu_channels": lambda a, b: F.prelu(a[: len(a) // 8 * 8].view(-1, 8), b[1000:1008]),
}  # fmt: skip
TERNARY: dict[str, Callable] = {"lerp": torch.lerp, "clamp": torch.clamp}
INTEGER: dict[str, Callable] = {
    "true": lambda a, b: a / b, "div3": lambda a, b: a / 3, "div_half": lambda a, b: a / 0.7,
    "mul_half": lambda a, b: a * 0.7, "sqrt": lambda a, b: torch.sqrt(a), "exp": lambda a, b: torch.exp(a % 50),
    "sin": lambda a, b: torch.sin(a), "sigmoid": lambda a, b: torch.sigmoid(a % 30),
    "powf": lambda a, b: torch.pow(a % 100, 0.3), "base": lambda a, b: torch.pow(10000.0, (b % 64) / 64),
    "rsqrt": lambda a, b: torch.rsqrt(a), "divfloor_half": lambda a, b: torch.div(a, 0.7, rounding_mode="floor"),
}  # fmt: skip


def _loss(**how) -> Callable:  # type: ignore[no-untyped-def]
    def call(a, b):  # type: ignore[no-untyped-def]
        target = (torch.arange(len(a), device=a.device) * 7) % a.shape[-1]
        options = {key: value for key, value in how.items() if key not in ("ignore", "weight")}
        if "ignore" in how:
            target[::5] = -100
        if "weight" in how:
            options["weight"] = torch.arange(a.shape[-1], device=a.device).to(a.dtype) / 7 + 0.5
        return F.cross_entropy(a, target, **options)

    return call


def _both(name: str) -> Callable:
    return lambda a, b: tuple(getattr(F, name)(a, b, reduction=reduction) for reduction in ("mean", "sum"))


_SUMMED = {"mse": "mse_loss", "l1": "l1_loss", "smooth_l1": "smooth_l1_loss", "huber": "huber_loss",
           "bce_logits": "binary_cross_entropy_with_logits"}  # fmt: skip
LOSSES: dict[str, Callable] = {
    **{name: _both(function) for name, function in _SUMMED.items()},
    "bce": lambda a, b: tuple(
        F.binary_cross_entropy(a.sigmoid().nan_to_num(0.5), b.detach().sigmoid().nan_to_num(0.5), reduction=r)
        for r in ("mean", "sum")
    ),
    "topk": lambda a, b: a.topk(min(5, a.shape[-1]), -1),
    "ce_none": _loss(reduction="none"), "ce_smooth_ignore": _loss(label_smoothing=0.1, ignore=True),
    "ce_weight": _loss(weight=1), "ce_weight_none": _loss(weight=1, reduction="none"),
    "ce_weight_smooth": _loss(weight=1, label_smoothing=0.1),
    "ce_probabilities": lambda a, b: F.cross_entropy(a, b.detach().softmax(-1)),
}  # fmt: skip
SHAPES = ((1, 5), (17, 33), (64, 1000), (3, 257), (128, 10), (4, 4099))


def _few(x, n, seed=5):  # type: ignore[no-untyped-def]
    return integers(seed, (n,), 0, len(x)).to(x.device)


def _once(x, n, seed=6):  # type: ignore[no-untyped-def]
    return permuted(seed, len(x))[:n].to(x.device)


def _in_rows(x, k, seed=7):  # type: ignore[no-untyped-def]
    return torch.stack([permuted(seed + r, x.shape[1])[:k] for r in range(len(x))]).to(x.device)


def _half(x):  # type: ignore[no-untyped-def]
    return _in_rows(x, 1 + x.shape[1] // 2)


def _reduce(how: str, include: bool) -> Callable:
    return lambda x, y: x.scatter_reduce(1, _half(x), y[:, : 1 + x.shape[1] // 2], how, include_self=include)


INDEX: dict[str, Callable] = {
    "gather": lambda x, y: x.gather(1, _in_rows(x, min(4, x.shape[1]))),
    "index_select": lambda x, y: x.index_select(0, _once(x, max(1, len(x) // 2))),
    "scatter": lambda x, y: x.scatter(1, _half(x), y[:, : 1 + x.shape[1] // 2]),
    "scatter_add": lambda x, y: x.scatter_add(1, _half(x), y[:, : 1 + x.shape[1] // 2]),
    "index_add": lambda x, y: x.index_add(0, _once(x, len(x)), y),
    "index_add_alpha": lambda x, y: x.index_add(0, _once(x, len(x)), y, alpha=0.3),
    "index_copy": lambda x, y: x.index_copy(0, _once(x, len(x)), y),
    **{f"reduce_{how}": _reduce(how, True) for how in ("sum", "prod", "mean", "amax", "amin")},
    **{f"reduce_{how}_self": _reduce(how, False) for how in ("sum", "prod", "mean", "amax", "amin")},
    "put_add": lambda x, y: x.put(_once(x.view(-1), 5), y.view(-1)[:5], accumulate=True),
    "index_put_add": lambda x, y: x.index_put((_few(x, len(x)),), y, accumulate=True),
}


def _last(x):  # type: ignore[no-untyped-def]
    return x.contiguous(memory_format=torch.channels_last)


POOLS: dict[str, Callable] = {
    "max3s2p1": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max3d2": lambda x: F.max_pool2d(x, 3, 1, 1, 2),
    "avg2": lambda x: F.avg_pool2d(x, 2), "avg3s2p1": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg3nopad": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avgceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "channels_last_avg": lambda x: F.avg_pool2d(_last(x), 3, 2, 1),
    "avgdiv": lambda x: F.avg_pool2d(x, 2, divisor_override=3), "nearest57": lambda x: F.interpolate(x, size=(5, 17)),
    "nearest_exact": lambda x: F.interpolate(x, size=(9, 17), mode="nearest-exact"),
    "bilinear57": lambda x: F.interpolate(x.detach(), size=(5, 17), mode="bilinear"),
    "bilinear_align": lambda x: F.interpolate(x.detach(), size=(13, 19), mode="bilinear", align_corners=True),
    "fold": lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1),
    "fold2": lambda x: F.fold(
        F.unfold(x, (2, 3), stride=(2, 1), dilation=(1, 2)), x.shape[-2:], (2, 3), stride=(2, 1), dilation=(1, 2)
    ),
}  # fmt: skip
TABLES = ((4, 5), (17, 33), (8, 128), (100, 64))
IMAGES = ((2, 4, 8, 8), (1, 5, 7, 13), (3, 16, 32, 32), (2, 8, 14, 9), (1, 64, 56, 56))

RANDOM: dict[str, Callable] = {
    "rand": lambda d, t, s: torch.rand(s, device=d, dtype=t),
    "randn": lambda d, t, s: torch.randn(s, device=d, dtype=t),
    "randint": lambda d, t, s: torch.randint(3, 1000, s, device=d),
    "uniform_": lambda d, t, s: torch.empty(s, device=d, dtype=t).uniform_(-0.7, 1.3),
    "normal_": lambda d, t, s: torch.empty(s, device=d, dtype=t).normal_(0.3, 1.7),
    "exponential2": lambda d, t, s: torch.empty(s, device=d, dtype=t).exponential_(2.5),
    "bernoulli": lambda d, t, s: torch.empty(s, device=d, dtype=t).bernoulli_(0.3),
    "bernoulli_tensor": lambda d, t, s: torch.bernoulli(numbers(9, s, "normal", t).to(d).sigmoid()),
    "normal_tensors": lambda d, t, s: torch.normal(
        numbers(9, s, "normal", t).to(d), numbers(8, s, "normal", t).to(d).abs()
    ),
    "alpha_dropout": lambda d, t, s: F.alpha_dropout(torch.ones(s, device=d, dtype=t), 0.2, True),
    "gumbel": lambda d, t, s: F.gumbel_softmax(numbers(9, s, "normal", t).to(d)) if s[-1] > 1 else torch.zeros(1),
}  # fmt: skip


def _drawn(device: str, function: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1234567890123 + len(shape))
    return function(device, dtype, shape), function(device, dtype, shape)


def _multinomial(device: str, i: int, shape: tuple[int, int], dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
    p = numbers(70 + i, (max(shape[0], 1), shape[1]), "wide", dtype).abs().clone().to(device)
    p[:, ::3] = 0
    torch.manual_seed(42 + i)
    return tuple(torch.multinomial(p if shape[0] else p[0], n) for _ in range(2))


def _sampled(device: str, i: int, rows: int, width: int, temperature: float, k: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(7 + i)
    out: list[torch.Tensor] = []
    for step in range(4):
        logits = (numbers(800 + 10 * i + step, (rows, width), "normal", BF16 if i % 2 else F32).float() * 3).to(device)
        scores = logits / temperature
        if k:
            scores = scores.masked_fill(scores < torch.topk(scores, k)[0][..., -1, None], -math.inf)
        probabilities = F.softmax(scores, dim=-1)
        out += [probabilities, torch.multinomial(probabilities, 1).squeeze(1)]
    return tuple(out)


def _together(name: str, calls: list[Callable]) -> Case:
    return Case(name, lambda device: tuple(x for call in calls for x in call(device)))


def element_cases() -> Iterator[Case]:
    """Yield every function once: dtypes, shapes and kinds of numbers together."""
    for count, table in ((1, UNARY), (2, BINARY), (3, TERNARY)):
        for name, function in table.items():
            inputs = [[line(dtype)] if count == 1 else several(count, dtype) for dtype in DTYPES]
            yield _together(f"elements {name} {count}", [
                lambda device, f=function, xs=xs: gradients(f, [x.to(device) for x in xs]) for xs in inputs
            ])  # fmt: skip
    for name, function in INTEGER.items():
        pairs = [
            (integers(1, (5000,), -40000, 40000, dtype), integers(2, (5000,), -100, 100, dtype))
            for dtype in (torch.int64, torch.int32)
        ]
        yield _together(f"elements {name} of integers", [
            lambda device, f=function, xs=xs: (f(*(x.to(device) for x in xs)),) for xs in pairs
        ])  # fmt: skip
    tables = (
        ("loss", LOSSES, SHAPES, (200, 300)),
        ("index", INDEX, TABLES, (600, 700)),
        ("pool", POOLS, IMAGES, (400,)),
    )
    for what, functions, shapes, seeds in tables:
        for name, function in functions.items():
            kinds = ["normal" if what == "loss" and not i else KINDS[(i + len(name)) % 5] for i in range(len(shapes))]
            yield _together(f"{what} {name}", [
                lambda device, f=function, i=i, shape=shape, dtype=dtype, kinds=kinds, seeds=seeds: gradients(f, [
                    numbers(seed + i, shape, "normal" if j else kinds[i], dtype).to(device)
                    for j, seed in enumerate(seeds)
                ]) for i, shape in enumerate(shapes) for dtype in DTYPES
            ])  # fmt: skip
    for name, function in RANDOM.items():
        yield _together(f"random {name}", [
            lambda device, f=function, shape=shape, dtype=dtype: _drawn(device, f, shape, dtype)
            for shape in ((1,), (5,), (1000,), (100_003,), (300, 4000), (33, 257)) for dtype in DTYPES
        ])  # fmt: skip
    for i, (rows, width) in enumerate(((0, 10), (1, 10), (4, 1000), (3, 50257), (64, 33), (0, 50257), (2, 1 << 18))):
        yield _together(f"multinomial {rows}x{width}", [
            lambda device, i=i, shape=(rows, width), dtype=dtype, n=n: _multinomial(device, i, shape, dtype, n)
            for dtype in DTYPES for n in (1, 3)
        ])  # fmt: skip
    for i, (rows, width) in enumerate(((1, 50257), (4, 50257), (2, 1000), (4, 128256), (8, 32000))):
        yield _together(f"sampled {rows}x{width}", [
            lambda device, i=i, rows=rows, width=width, t=t, k=k: _sampled(device, i, rows, width, t, k)
            for t, k in ((1.0, 0), (0.8, 50))
        ])  # fmt: skip
