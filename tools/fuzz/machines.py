# SPDX-License-Identifier: Apache-2.0
"""Targets that compute as a GPU does, or explain what a GPU did: simulate, identify, explain_mismatch.

What torch refuses on the host may be refused inside ``simulate``, too; all else has torch's shapes and dtypes,
and its numbers within roundings. A product that fmtsim computed has an explanation.
"""

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fmtsim
from tools.fuzz import tensors
from tools.fuzz.calls import Passed, Values, backward, either, junk_of, maybe, net, passed, silent, target

Function = Callable[[Tensor], Any]
_OPERATORS: tuple[Function, ...] = (
    F.gelu, F.silu, F.relu, F.softplus, torch.sigmoid, torch.tanh, torch.exp, torch.sin, torch.rsqrt, torch.sqrt,
    torch.abs, torch.neg, torch.sum, torch.mean, torch.amax, torch.argmax, torch.var, torch.clone,
    lambda x: x.cumsum(-1), lambda x: x.sum(0), lambda x: x.mean(-1), lambda x: x.norm(), lambda x: x * x,
    lambda x: x + 1, lambda x: 2 / (x.abs() + 1), lambda x: x.pow(3), lambda x: F.softmax(x, -1),
    lambda x: x.softmax(0), lambda x: F.log_softmax(x, -1), lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.rms_norm(x, x.shape[-1:]), lambda x: x @ x.mT, lambda x: torch.einsum("...i,...j->...ij", x, x),
    lambda x: x.to(torch.bfloat16).float(), lambda x: torch.cat([x, x]), lambda x: x.t().contiguous(),
    lambda x: x.reshape(-1)[::2], lambda x: x.sort(-1)[0], lambda x: torch.where(x > 0, x, -x),
    lambda x: x.clamp(-1, 1), lambda x: F.dropout(x, 0.0), lambda x: x.add_(1),
    lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)),
    lambda x: F.mse_loss(x, torch.zeros_like(x)), lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), lambda x: F.group_norm(x, 1),
    lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.pad(x, (1, 1)),
    lambda x: F.interpolate(x, scale_factor=2), lambda x: x.masked_fill(x > 0, 0.0), lambda x: x.std(-1),
    lambda x: x[..., :3], lambda x: x.unfold(-1, 2, 1), lambda x: torch.linalg.vector_norm(x, dim=-1),
    lambda x: x.prod(-1), lambda x: x.roll(1), lambda x: x.index_select(0, torch.tensor([0])),
    lambda x: x.gather(-1, torch.zeros_like(x, dtype=torch.long)),
)  # fmt: skip


def _module(r: Random, width: int) -> nn.Module:
    return r.choice((
        lambda: nn.Linear(width, 8), lambda: nn.Linear(width, 8, bias=False), lambda: net(r, width),
        lambda: nn.LayerNorm(width),
        lambda: nn.RMSNorm(width), lambda: nn.Conv1d(width, 4, 3, padding=1), lambda: nn.Conv2d(width, 4, 3, padding=1),
        lambda: nn.BatchNorm1d(width), lambda: nn.GroupNorm(1, width), lambda: nn.Bilinear(width, width, 3),
        lambda: nn.TransformerEncoderLayer(width, 1, 16, dropout=0.0, batch_first=True), lambda: nn.GRU(width, 4),
    ))()  # fmt: skip


def _outputs(function: Function, x: Any) -> list[Tensor]:
    """Return what a function gives for a tensor, and the gradient where there is one."""
    torch.manual_seed(0)
    y = function(x)
    first = y[0] if isinstance(y, tuple) else y
    backward(first.float() if isinstance(first, Tensor) and first.dtype.is_floating_point else first)
    return [
        t for t in (first, getattr(x, "grad", None) if getattr(x, "is_leaf", False) else None) if isinstance(t, Tensor)
    ]


def _simulated(function: Function, x: Any, **options: Any) -> None:
    host: list[Tensor] | None = None
    with contextlib.suppress(Exception):
        host = _outputs(function, tensors.plain(x))
    try:
        with fmtsim.simulate(**options) as run:
            ours = _outputs(function, x)
        assert run.summary
    except Exception as error:
        if isinstance(error, fmtsim.FmtsimError):
            raise
        try:
            _outputs(function, x)
        except Exception:
            raise Passed(f"torch itself refuses it: {error}") from error
        if "Inference tensors cannot be saved" in str(error):  # rms_norm is one operator there, which saves its input
            raise Passed(f"torch refuses it on a GPU: {error}") from error
        raise
    calm = isinstance(x, Tensor) and x.dtype in tensors.FLOATS and x.layout == torch.strided and not x.is_meta
    calm = calm and not x.is_nested and x.numel() > 0 and bool((x.abs() < 1e3).all())
    for y, expected in zip(ours, host or (), strict=False) if not (isinstance(x, Tensor) and x.is_nested) else ():
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype), (
            f"{y.dtype} {y.shape}, torch has {expected.shape}"
        )
        if calm and y.is_floating_point() and y.numel() and expected.isfinite().all():
            room = 64 * torch.finfo(torch.bfloat16 if x.dtype != torch.float64 else y.dtype).eps
            top = expected.double().abs().max()
            assert ((y.double() - expected.double()).abs() <= room * (top + 1)).all(), (
                f"{y} is far from torch's {expected}"
            )


@target("simulated", 60)
def _simulate(r: Random) -> tuple[Any, list[Any], Values]:
    width = r.choice((1, 3, 8, 16, 33))
    of = r.choice(
        (None, (width,), (2, width), (2, 5, width), (2, width, 5), (1, width, 4, 4), (0, width), (2, 2, 5, width))
    )
    x = either(r, tensors.tensor(r, dtypes=(torch.float32, torch.float32, torch.bfloat16, torch.float16), of=of), 0.03)
    function: Any = r.choice(_OPERATORS)
    if r.random() < 0.4:
        function = _module(r, width)
        if isinstance(x, Tensor) and x.dtype in tensors.FLOATS and r.random() < 0.8:
            function = function.to(x.dtype)
    if r.random() < 0.1:
        function = either(r, function, 0.9)
    options = maybe(r, {}, target=("h200", "h100"), strict=(True, False))
    return _simulated, [function, x], options


def _identified(a: Any, b: Any, y: Any, known: bool, **options: Any) -> None:
    result = fmtsim.identify(a, b, y, **options)
    assert str(result) and result.to_dict()
    assert result.groups or not known, "no explanation of a product that fmtsim computed"


@target("identify", 16)
def _identify(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = (r.choice((1, 2, 3, 8, 17)) for _ in range(3))
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn)
    dtype = r.choice(dtypes)
    a, b = (tensors.numbers(r, size, dtype) for size in ((m, k), (k, n)))
    options: Values = {}
    unit = r.choice(("hopper.wgmma", "hopper.mma", "exact", "ampere.mma", "fp32_fma"))
    y: Any = None
    with contextlib.suppress(fmtsim.FmtsimError):
        y = fmtsim.mm(a, b, target=unit, out_dtype=r.choice((None, torch.float32)))
    known = y is not None and r.random() < 0.5
    if known:
        options = {"target": r.choice((None, unit))}
    else:
        y = tensors.tensor(r, of=(m, n)) if y is None or r.random() < 0.5 else y
        a, b = (tensors.layout(r, x) if r.random() < 0.7 else either(r, x, 0.3) for x in (a, b))
        y = either(r, y, 0.1)
        maybe(r, options, bias=lambda r: tensors.tensor(r, of=(n,)), target=("h200", unit), wrong=0.06,
              scale_a=(torch.tensor(2.0),), scale_b=(torch.tensor(1.0),))  # fmt: skip
    return _identified, [a, b, y, known], options


_SIDES = ("h200", "h100", "chain", "a100")


@target("mismatch", 24)
def _mismatch(r: Random) -> tuple[Any, list[Any], Values]:
    good: Values = {
        "trainer": r.choice(_SIDES), "rollout": r.choice(_SIDES), "trainer_tokens": r.choice((1, 64, 8192)),
        "prefill": 64, "decode": r.choice(([1], (1, 2, 8), range(1, 9), 4)), "dtype": r.choice(("bf16", "fp16", "no")),
    }  # fmt: skip
    models = [(64, 32, False), (8, 4096, True)], [("head", 64, 32, False)], net(r, 32), "llama3_8b", [(0, 1, False)]
    model = either(r, r.choice(models), 0.2)
    options = junk_of(r, fmtsim.lab.explain_mismatch, good) if r.random() < 0.5 else good
    options.pop("model", None)
    return silent(fmtsim.lab.explain_mismatch), [passed(model)], options
