# SPDX-License-Identifier: Apache-2.0
"""Calls that convert dtypes: ``torch.autocast``, softmax and sums in float32, divisions by numbers."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from tests.machine.cases import BF16, F32, FP16, Case, numbers
from tests.machine.training_cases import initial, trained


def _attention(x, y):  # type: ignore[no-untyped-def]
    return functional.scaled_dot_product_attention(*(t.view(1, 2, -1, 32) for t in (x, y, y)))


def _cross_entropy(x, y):  # type: ignore[no-untyped-def]
    return functional.cross_entropy(x, torch.arange(len(x), device=x.device))


FUNCTIONS = {
    "linear": functional.linear, "matmul": lambda x, y: x @ y.t(),
    "einsum": lambda x, y: torch.einsum("ik,jk->ij", x, y),
    "addmm": lambda x, y: torch.addmm(y[0, :16], x, y[:16].t()),
    "layer_norm": lambda x, y: functional.layer_norm(x, (64,), y[0], y[1]),
    "rms_norm": lambda x, y: functional.rms_norm(x, (64,)), "softmax": lambda x, y: functional.softmax(x, -1),
    "log_softmax": lambda x, y: functional.log_softmax(x, -1), "cross_entropy": _cross_entropy,
    "sum": lambda x, y: x.sum(-1), "mean": lambda x, y: x.mean(-1), "exp": lambda x, y: x.exp(),
    "pow": lambda x, y: x.pow(2), "rsqrt": lambda x, y: x.abs().rsqrt(), "gelu": lambda x, y: functional.gelu(x),
    "silu": lambda x, y: functional.silu(x), "add": lambda x, y: x + y[: len(x)],
    "cat": lambda x, y: torch.cat((x, y)), "addcmul": lambda x, y: torch.addcmul(x, x, y[: len(x)]),
    "attention": _attention, "softplus": lambda x, y: functional.softplus(x),
    "reciprocal": lambda x, y: x.reciprocal(),
}  # fmt: skip


def converting_cases() -> Iterator[Case]:
    """Yield softmax of 16-bit numbers in float32, which is one kernel for float16, and sums that convert."""
    for width in (500, 1024, 1025, 1500, 2048, 2050, 3000, 4096, 4100, 8192, 12288, 50257):
        for rows in (1, 8, 300):
            for log in (False, True):

                def call(device, width=width, rows=rows, log=log):  # type: ignore[no-untyped-def]
                    x = numbers(width, (rows, width), "normal", FP16).to(device).requires_grad_()
                    g = numbers(width + 1, (rows, width), "normal", F32).to(device)
                    y = (functional.log_softmax if log else functional.softmax)(x, -1, dtype=F32)
                    return y, *torch.autograd.grad(y, x, g)

                yield Case(f"{'log_' * log}softmax float16 to float32 {rows}x{width}", call)
    shapes = (8, 64), (8, 100), (3, 1000), (1, 4096), (17, 5000), (64, 130), (300, 768), (1, 200000)
    for lower in (FP16, BF16):
        for i, shape in enumerate(shapes):
            for dim in (-1, 0, None):
                for function in (torch.sum, torch.mean):

                    def reduce(device, i=i, shape=shape, dim=dim, function=function, lower=lower):  # type: ignore[no-untyped-def]
                        x = numbers(900 + i, shape, "cancelling", lower).to(device)
                        return (function(x, dtype=F32) if dim is None else function(x, dim, dtype=F32),)

                    yield Case(f"{function.__name__} {str(lower)[6:]} to float32 {shape} {dim}", reduce)


def division_cases() -> Iterator[Case]:
    """Yield divisions by numbers that float32 does not hold, which multiply by a reciprocal or divide."""
    for dtype in (F32, BF16, FP16):
        for number in (0.1, 0.0316227766, 3.3, 7):

            def call(device, dtype=dtype, number=number):  # type: ignore[no-untyped-def]
                x = numbers(60, (20000,), "normal", dtype).to(device)
                lists = [[x.clone(), x[:7].clone()] for _ in range(2)]
                torch._foreach_div_(lists[0], number)
                torch._foreach_div_(lists[1], [number] * 2)
                weights = [torch.nn.Parameter(x.clone()), torch.nn.Parameter(x[:9].clone())]
                for kind, options in (
                    (torch.optim.AdamW, {}),
                    (torch.optim.Adam, {}),
                    (torch.optim.SGD, {"momentum": 0.9}),
                ):
                    for foreach in (False, True):
                        optimizer = kind(weights, lr=2e-3, foreach=foreach, **options)
                        for _ in range(2):
                            for weight in weights:
                                weight.grad = x[: len(weight)] / 4
                            optimizer.step()
                return x / number, x.clone().div_(number), *lists[0], *lists[1], *weights

            yield Case(f"divide by {number} {str(dtype)[6:]}", call)


def grouped_cases() -> Iterator[Case]:
    """Yield products of groups of rows, and their weights' gradients: one kernel in bfloat16, else one for each."""
    for dtype in (F32, BF16, FP16):
        for i, (ends, n, k) in enumerate((((16, 16, 48, 64), 64, 128), ((3, 40, 41, 96), 128, 64), ((5, 9), 256, 512))):
            if dtype == F32 and 41 in ends:
                continue  # the plan of one row is a guess

            def call(device, i=i, ends=ends, n=n, k=k, dtype=dtype):  # type: ignore[no-untyped-def]
                x = numbers(70 + i, (ends[-1], k), "normal", dtype).to(device).requires_grad_()
                w = numbers(80 + i, (len(ends), n, k), "normal", dtype).to(device).requires_grad_()
                offsets = torch.tensor(ends, dtype=torch.int32, device=device)
                y = torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)
                g = numbers(90 + i, tuple(y.shape), "normal", dtype).to(device)
                return y, *torch.autograd.grad(y, (x, w), g)

            yield Case(f"grouped {ends} N={n} K={k} {str(dtype)[6:]}", call)


def autocast_cases() -> Iterator[Case]:
    """Yield operators and trainings under ``torch.autocast``, whose dtypes count as bits."""
    dtypes = {"bf16": BF16, "fp16": FP16}
    for name, function in FUNCTIONS.items():
        for autocast, lower in dtypes.items():
            for first, second in ((F32, F32), (lower, F32), (lower, lower)):

                def call(device, function=function, lower=lower, kinds=(first, second)):  # type: ignore[no-untyped-def]
                    x, y = (numbers(40 + i, (32 + 32 * i, 64), "normal", kind) for i, kind in enumerate(kinds))
                    x, y = x.to(device).requires_grad_(), y.to(device).requires_grad_()
                    with torch.autocast("cuda", dtype=lower):
                        result = function(x, y)
                    g = numbers(50, tuple(result.shape), "normal", result.dtype).to(device)
                    return result, *torch.autograd.grad(result, (x, y), g, allow_unused=True)

                yield Case(f"autocast {autocast} {name} {str(first)[6:]} {str(second)[6:]}", call)
    for llama in (False, True):
        for autocast, lower in dtypes.items():
            start = initial(llama)

            def train(device, start=start, lower=lower):  # type: ignore[no-untyped-def]
                return trained(start, 2, 64, device, lower)

            yield Case(f"autocast {autocast} {'llama' if llama else 'gpt'} 2x64", train)
