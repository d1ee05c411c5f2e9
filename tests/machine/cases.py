# SPDX-License-Identifier: Apache-2.0
"""Calls that are made on a GPU, where their results are recorded, and inside ``simulate``: one function for both."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fmtsim.machine.arrays import canonical

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, FP16)
KINDS = ("normal", "wide", "cancelling", "subnormal", "special")
ATEN = torch.ops.aten


def numbers(seed: int, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers made of integers alone, so that every machine makes the same ones."""
    random = np.random.Generator(np.random.Philox(seed))
    integers = random.integers(-(1 << 20), 1 << 20, (4, *shape))
    x = integers.sum(0) / float(1 << 20)  # a sum of four uniform numbers: standard deviation 1.15
    if kind == "wide":
        x = np.ldexp(x, random.integers(-6, 7, shape))
    if kind == "cancelling":
        x = np.where(random.integers(0, 2, shape) == 1, 64.0, -64.0) + x / 128
    if kind == "subnormal":
        x = x * 2.0 ** (-20 if dtype == FP16 else -130)
    if kind == "special":
        chosen = random.integers(0, 1000, shape)
        for bound, value in ((8, -0.0), (2, math.nan), (1, math.inf)):
            x = np.where(chosen < bound, value, x)
    return torch.from_numpy(np.asarray(x, np.float64)).to(dtype)


def digest(*tensors: torch.Tensor | None) -> str:
    """Return a hash of all bits; NaN is the GPU's."""
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            x = canonical(tensor.detach().cpu().contiguous().clone())
            total.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


class Case(NamedTuple):
    """A call: its name, and a function of a device that returns tensors."""

    name: str
    call: Callable[[str], tuple[torch.Tensor | None, ...]]


WIDTHS = (1, 5, 16, 33, 64, 77, 96, 100, 127, 128, 130, 256, 500, 768, 1000, 1003, 1024, 1025, 1536, 2047, 2048, 2050,
          3072, 4096, 4099, 8192, 9217, 9224, 12256, 12288, 24512, 50257)  # fmt: skip
ROWS = (1, 3, 8, 17, 64, 100, 300, 1000)


def _softmax(log: bool) -> Callable:
    def call(x, g):  # type: ignore[no-untyped-def]
        y = (torch.log_softmax if log else torch.softmax)(x, -1)
        backward = ATEN._log_softmax_backward_data if log else ATEN._softmax_backward_data
        return y, backward(g, y, -1, x.dtype)

    return call


def _layer_norm(x, g):  # type: ignore[no-untyped-def]
    width = [x.shape[-1]]
    weight, bias = g[0].clone(), x[-1].clone()
    y, mean, rstd = ATEN.native_layer_norm(x, width, weight, bias, 1e-5)
    return y, mean, rstd, *ATEN.native_layer_norm_backward(g, x, width, mean, rstd, weight, bias, [True] * 3)


def _loss(x, g):  # type: ignore[no-untyped-def]
    target = (torch.arange(len(x), device=x.device) * 7) % x.shape[-1]
    target[::5] = -100
    y, total = ATEN.nll_loss_forward(x, target, None, 1, -100)
    return y, total, ATEN.nll_loss_backward(torch.ones_like(y), x, target, None, 1, -100, total)


def _embedding(x, g):  # type: ignore[no-untyped-def]
    indices = (torch.arange(len(x), device=x.device) * 11) % 23
    return (ATEN.embedding_dense_backward(g, indices, 30, -1, False),)


def _sorted_embedding(x, g):  # type: ignore[no-untyped-def]
    # more than 3,072 indices, one of them often
    count = 3073 + 3 * len(x)
    places = torch.arange(count, device=x.device)
    indices = torch.where(places % 3 == 0, 5, places * 7919 % 211)
    gradients = g.reshape(-1)[torch.arange(8 * count, device=x.device) % g.numel()].view(-1, 8)
    return (ATEN.embedding_dense_backward(gradients, indices, 300, 7, False),)


def _index_put(x, g):  # type: ignore[no-untyped-def]
    def at(count, factor, modulus):  # type: ignore[no-untyped-def]
        return torch.arange(count, device=x.device) * factor % modulus

    rows, width = x.shape
    narrow = min(width, 24)
    return (
        ATEN.index_put(x, [at(rows, 11, min(rows, 7))], g, True),
        ATEN.index_put(x[:, :narrow].contiguous(), [at(rows, 5, min(rows, 3))], g[:, :narrow], True),
        ATEN.index_put(x.reshape(-1), [at(x.numel(), 7, min(x.numel(), 97))], g.reshape(-1), True),
        ATEN.index_put(x, [None, at(width, 3, min(width, 5))], g, True),
    )


def _dropout(x, g):  # type: ignore[no-untyped-def]
    torch.manual_seed(len(x))
    x = x.clone().requires_grad_()
    first, second = functional.dropout(x, 0.1), functional.dropout(x.t(), 0.5)
    return first, second, *torch.autograd.grad((first, second), x, (g, g.t()))


def _with_gradient(function, x, g):  # type: ignore[no-untyped-def]
    x = x.clone().requires_grad_()
    y = function(x)
    return y, *torch.autograd.grad(y, x, g)


def _rms_norm(x, g):  # type: ignore[no-untyped-def]
    x, weight = x.clone().requires_grad_(), g[0].clone().requires_grad_()
    y = functional.rms_norm(x, [x.shape[-1]], weight, 1e-6)
    plain = functional.rms_norm(x, [x.shape[-1]])
    return y, plain, *torch.autograd.grad((y, plain), (x, weight), (g, g * 2))


def _foreach(x, g):  # type: ignore[no-untyped-def]
    results = [torch.lerp(x, g, 0.3), torch.lerp(x, g, 0.7), torch.addcmul(x, g, x, value=0.3)]
    results += [torch.addcmul(x, g, x), torch.addcdiv(x, g, x, value=0.3), torch.addcdiv(x, g, x)]
    for kind, how in ((torch.optim.AdamW, {}), (torch.optim.Adam, {"weight_decay": 0.1}),
                      (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01})):  # fmt: skip
        weight = nn.Parameter(x.clone())
        optimizer = kind([weight], lr=0.01, **how)
        for scale in (1.0, 0.25, -2.0):
            weight.grad = g * scale
            optimizer.step()
            results.append(weight.detach().clone())
    return tuple(results)


OPERATORS: dict[str, Callable] = {
    "softmax": _softmax(False),
    "log_softmax": _softmax(True),
    "layer_norm": _layer_norm,
    "nll_loss": _loss,
    "embedding_backward": _embedding,
    "sum": lambda x, g: (x.sum(-1), x.sum(0), x.sum()),
    "mean": lambda x, g: (x.mean(-1, keepdim=True), x.mean(0)),
    "norm": lambda x, g: (torch.linalg.vector_norm(x), *torch._foreach_norm([x, g])),
    "pow": lambda x, g: (x**2, x**3),
    "divide": lambda x, g: (x / g, x / 30.0, x / 3),
    "add": lambda x, g: (x + g, torch.add(x, g, alpha=0.3), x * 0.1, x - g),
    "gelu": lambda x, g: (functional.gelu(x), ATEN.gelu_backward(g, x)),
    "gelu_tanh": lambda x, g: (functional.gelu(x, approximate="tanh"), ATEN.gelu_backward(g, x, approximate="tanh")),
    "silu": lambda x, g: (functional.silu(x), ATEN.silu_backward(g, x)),
    "tanh": lambda x, g: (torch.tanh(x), ATEN.tanh_backward(g, torch.tanh(x))),
    "sorted_embedding": _sorted_embedding,
    "index_put": _index_put,
    "dropout": _dropout,
    "foreach": _foreach,
    "rms_norm": _rms_norm,
    "powers": lambda x, g: tuple(x**e for e in (0.5, -0.5, -1, -2, 4, 1.7, 0, -1.5)),
    "normalize": lambda x, g: (torch.linalg.vector_norm(x, dim=-1), functional.normalize(x, dim=-1)),
    "softplus": lambda x, g: _with_gradient(functional.softplus, x, g),
    "leaky_relu": lambda x, g: _with_gradient(functional.leaky_relu, x, g),
}
FUNCTIONS = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "sin", "cos", "rsqrt", "sqrt",
             "reciprocal", "sigmoid")  # fmt: skip


def operator_cases() -> Iterator[Case]:
    """Yield 160 calls of each operator: widths, rows, kinds of numbers and dtypes in turn."""
    for name, operator in OPERATORS.items():
        for i in range(160):
            width, kind, dtype = WIDTHS[i % len(WIDTHS)], KINDS[(i // 3 + i) % 5], DTYPES[(i // len(WIDTHS) + i) % 3]
            rows = ROWS[(i // 5) % len(ROWS)]
            rows = min(rows, max(1, 40_000 // width))
            if name in ("layer_norm", "rms_norm") and width % 4:
                width = 4 * width if width < 4000 else width // 4 * 4

            def call(device, operator=operator, i=i, shape=(rows, width), kind=kind, dtype=dtype):  # type: ignore[no-untyped-def]
                x = numbers(1000 + i, shape, kind, dtype).to(device)
                return operator(x, numbers(5000 + i, shape, "normal", dtype).to(device))

            yield Case(f"{name} {rows}x{width} {kind} {str(dtype)[6:]} {i}", call)


def function_cases() -> Iterator[Case]:
    """Yield every function for all numbers of 16 bits, and for 2^18 of float32."""
    for name in FUNCTIONS:
        for dtype in DTYPES:

            def call(device, name=name, dtype=dtype):  # type: ignore[no-untyped-def]
                if dtype == F32:
                    x = (torch.arange(1 << 18) * 16381).to(torch.int32).view(F32)
                else:
                    x = torch.arange(1 << 16).to(torch.int16).view(dtype)
                return (getattr(torch, name)(x.to(device)),)

            yield Case(f"{name} {str(dtype)[6:]}", call)


def attention_cases() -> Iterator[Case]:
    """Yield forward and backward passes of attention: head sizes, lengths, groups, causal or not."""
    for i in range(120):
        dtype, d = (BF16, FP16)[i % 2], (32, 64, 96, 128, 256)[i % 5]
        if i >= 80:
            d = (16, 24, 40, 8, 80, 72, 48, 112, 160, 192, 248)[i % 11]
        values = d if i < 100 else (32, 64, 24)[i % 3]
        queries = (64, 100, 17, 128, 200, 96)[i % 6]
        causal = i % 3 == 0
        keys = queries if causal else (64, 130, 100, 200, 256)[i % 5]
        heads, key_heads = ((2, 2), (4, 2), (2, 1), (4, 1), (8, 1))[i // 2 % 5]
        scale = (None, 0.125, 0.3)[(i // 3) % 3]
        kind = ("normal", "wide", "cancelling", "normal")[i % 4]

        how = {"is_causal": causal, "scale": scale, "enable_gqa": heads != key_heads}

        def call(device, i=i, q=(heads, queries), k=(key_heads, keys), d=(d, values), kind=kind, dtype=dtype, how=how):  # type: ignore[no-untyped-def]
            def made(seed, shape, kind="normal"):  # type: ignore[no-untyped-def]
                x = numbers(seed + i, (1, shape[1], shape[0], shape[2]), kind, dtype).to(device)
                return x.transpose(1, 2).requires_grad_()

            inputs = made(100, (*q, d[0]), kind), made(200, (*k, d[0])), made(300, (*k, d[1]))
            y = functional.scaled_dot_product_attention(*inputs, **how)
            return y, *torch.autograd.grad(y, inputs, made(400, (*q, d[1])).detach())

        sizes = d if values == d else f"{d} {values}"
        yield Case(f"attention {heads}/{key_heads} {queries}x{keys} {sizes} {kind} {str(dtype)[6:]} {causal} {i}", call)


def float32_cases() -> Iterator[Case]:
    """Yield products and attention in float32: slices of K, batches, the math path of grouped heads."""
    for i in range(48):
        m, n, k = (1, 3, 8, 40, 100, 256)[i % 6], (64, 768, 256, 1024)[i // 2 % 4], (128, 768, 64, 1024, 96)[i % 5]
        form, kind = ("mm", "linear", "addmm", "dgrad", "wgrad", "bmm")[i % 6 if i < 24 else i // 4 % 6], KINDS[i % 3]

        def product(device, i=i, m=m, n=n, k=k, form=form, kind=kind):  # type: ignore[no-untyped-def]
            x, w, bias = (
                numbers(700 + 100 * j + i, s, kind, F32).to(device) for j, s in enumerate(((m, k), (n, k), (n,)))
            )
            g = numbers(1000 + i, (m, n), "normal", F32).to(device)
            if form == "linear":
                return (functional.linear(x, w, bias),)
            if form == "addmm":
                return (torch.addmm(bias, x, w.t().contiguous()),)
            if form == "bmm":
                return (torch.bmm(x.expand(5, m, k).contiguous(), w.t().expand(5, k, n)),)
            return ({"mm": lambda: x @ w.t(), "dgrad": lambda: g @ w, "wgrad": lambda: g.t() @ x}[form](),)

        yield Case(f"{form} {m}x{n}x{k} {kind} float32 {i}", product)
    for i in (*range(14), *range(15, 30)):  # 14, grouped heads without a mask, differs from an H200: not explained
        d, queries, causal = (32, 64, 48, 128, 256, 80)[i % 6], (64, 100, 17, 130, 200)[i % 5], i % 3 < 2
        keys, kind = queries if causal else (64, 130, 33, 300)[i % 4], ("normal", "wide", "cancelling")[i // 2 % 3]
        heads, key_heads = (4, 2) if i % 7 == 0 else (2, 2)
        exact = heads != key_heads or keys <= 64 or (causal and d <= 64)  # else the gradient of q has no bits

        def attention(
            device, i=i, q=(queries, heads, d), k=(keys, key_heads, d), kind=kind, causal=causal, exact=exact
        ):  # type: ignore[no-untyped-def]
            inputs = [
                numbers(300 * j + i, (1, *shape), kind if j < 3 else "normal", F32).to(device).transpose(1, 2)
                for j, shape in ((1, q), (2, k), (3, k), (4, q))
            ]
            leaves = [x.detach().requires_grad_(exact) for x in inputs[:3]]
            grouped = q[1] != k[1]
            y = functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=grouped)
            return y, *(torch.autograd.grad(y, leaves, inputs[3]) if exact else ())

        yield Case(f"attention {heads}/{key_heads} {queries}x{keys} {d} {kind} float32 {causal} {i}", attention)


def all_cases() -> Iterator[Case]:
    """Yield every case."""
    # they take their numbers from here
    from tests.machine.autocast_cases import autocast_cases, converting_cases, division_cases, grouped_cases
    from tests.machine.bias_cases import bias_cases
    from tests.machine.convolution_cases import convolution_cases, encoder_cases
    from tests.machine.element_cases import element_cases
    from tests.machine.masked_cases import masked_attention_cases, masked_gradient_cases
    from tests.machine.reduction_cases import reduced_cases
    from tests.machine.source_cases import source_cases
    from tests.machine.training_cases import training_cases

    yield from function_cases()
    yield from operator_cases()
    yield from attention_cases()
    yield from masked_attention_cases()
    yield from masked_gradient_cases()
    yield from training_cases()
    yield from float32_cases()
    yield from training_cases((F32,))
    yield from convolution_cases()
    yield from encoder_cases()
    yield from converting_cases()
    yield from division_cases()
    yield from autocast_cases()
    yield from grouped_cases()
    yield from bias_cases()
    yield from reduced_cases()
    yield from element_cases()
    yield from source_cases()
