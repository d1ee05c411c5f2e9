# SPDX-License-Identifier: Apache-2.0
"""Claims about what happens step after step: sums that stop growing, scales that follow late, loss scaling."""

import dataclasses
import math

import torch
from torch import Tensor, nn

from fmtsim.casts.quantize import quantize
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.recipes.recipe import LossScale
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.rounding.modes import RoundingName
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from studies.claims.claim import Claim, Expected, Measured, Tell, exactly, near, settings
from studies.claims.estimators import operand
from studies.claims.experiment import generator, told


def sums(tell: Tell, *, steps: int, copies: int, seed: int) -> Measured:
    """Add a small number to a large one again and again, rounding each sum."""
    cases: dict[str, tuple[str, float, float, RoundingName]] = {
        "int8, 10 + 100 x 0.2, truncated": ("int8", 10.0, 0.2, "toward_zero"),
        "int8, 10 + 100 x 0.2, stochastic": ("int8", 10.0, 0.2, "stochastic"),
        "bf16, 200 + 100 x 1, to nearest": ("bf16", 200.0, 1.0, "nearest_even"),
        "bf16, 200 + 100 x 1, stochastic": ("bf16", 200.0, 1.0, "stochastic"),
    }
    curves = {}
    for i, (name, (format, start, step, rounding)) in enumerate(told(tell, list(cases.items()))):
        x, curve = torch.full((copies,), start), [(0.0, start)]
        for count in range(steps):
            key = RandomKey(seed + i, count) if rounding == "stochastic" else None
            x = quantize(x + step, format, rounding=rounding, generator=key)
            curve.append((count + 1.0, float(x.double().mean())))
        curves[name] = curve
    numbers = {name: curve[-1][1] for name, curve in curves.items()}
    return Measured(numbers=numbers, curves=curves, axes=("numbers added", "sum"))


def history(tell: Tell, *, recipe: str, length: int, sizes: tuple[float, ...]) -> Measured:
    """Send tensors of these sizes through delayed scaling; say what each becomes, and under which factor."""
    base = operand(recipe, "x_f")
    assert base.scaling is not None and base.scaling.history is not None  # such a recipe was asked for
    short = dataclasses.replace(base.scaling, history=dataclasses.replace(base.scaling.history, length=length))
    quantizer = dataclasses.replace(base, scaling=short)
    state, factors, seen = DelayedScale(quantizer), [], []
    for size in sizes:
        factors.append(float(state.factor))
        seen.append(float(quantize_operand(torch.full((1, 1), size), quantizer, Keys(), state).values(torch.float32)))
    jump = max(range(len(sizes)), key=lambda step: sizes[step])
    late = [step for step in range(jump + 1, len(sizes)) if factors[step] == factors[jump + 1]]
    return Measured(
        numbers={
            "first factor": factors[0], "second factor": factors[1], "what the jump to 8 becomes": seen[jump],
            "factor behind the jump": factors[jump + 1], "steps under it": float(len(late)), "last factor": factors[-1],
        },
        curves={"factor": [(float(i), factor) for i, factor in enumerate(factors)]},
        axes=("step", "factor that elements are multiplied by"), logarithmic="y", steps=True,
    )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="stochastic_sums", recorded="shown", bounds="source",
        says="sums in INT8 and bfloat16 stop growing under rounding to nearest, under stochastic rounding they do not",
        source="gpu-mode/lectures 7cb40f6, lecture 30",
        measure=sums, settings=settings(steps=100, copies=4096, seed=0),
        expected=(
            exactly("int8, 10 + 100 x 0.2, truncated", 10.0),
            near("int8, 10 + 100 x 0.2, stochastic", 30.0, 0.01, "formula"),
            exactly("bf16, 200 + 100 x 1, to nearest", 256.0),
            near("bf16, 200 + 100 x 1, stochastic", 300.0, 0.01, "formula"),
        ),
    ),
    Claim(
        name="delayed_scaling", recorded="shown", bounds="source",
        says="under delayed scaling a jump saturates in its own step, and lowers the scale until it leaves the history",
        source="Transformer Engine d0067d0, DelayedScaling",
        measure=history,
        settings=settings(recipe="te_delayed", length=4, sizes=(1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
        expected=(
            exactly("first factor", 1.0),
            exactly("second factor", 448.0),
            exactly("what the jump to 8 becomes", 1.0),
            exactly("factor behind the jump", 56.0),
            exactly("steps under it", 4.0),
            exactly("last factor", 448.0),
        ),
    ),
)  # fmt: skip


_AMP = "PyTorch 0202916b, torch/amp/grad_scaler.py; Micikevicius et al., arXiv:1710.03740, section 3.2"


def schedule(tell: Tell, *, recipe: str, bad_steps: tuple[int, ...], steps: int) -> Measured:
    """Follow torch's GradScaler under a recipe's loss scaling, with gradients that overflow at some steps."""
    scale = get_recipe(recipe).loss_scale or LossScale(interval=1)
    interval = scale.interval or steps
    scaler = torch.amp.GradScaler("cpu", scale.initial, scale.growth, scale.backoff, interval)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=2.0**-10)
    curve, skips_match = [], True
    for step in range(steps):
        optimizer.zero_grad()
        factor = math.inf if step in bad_steps else 1.0
        scaler.scale((weight * factor).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        skips_match = skips_match and bool((weight == before).all()) == (step in bad_steps)
        curve.append((float(step + 1), scaler.get_scale()))
    bad = bad_steps[0]
    numbers = {
        "first scale": curve[0][1], "scale after 2000 clean steps": curve[1999][1],
        "factor of an overflow": curve[bad][1] / curve[bad - 1][1], "scale after 1999 more": curve[bad + 1999][1],
        "scale after 2000 more": curve[bad + 2000][1], "weights moved in clean steps alone": float(skips_match),
    }  # fmt: skip
    axes = ("step", "loss scale")
    return Measured(numbers=numbers, curves={recipe: curve}, axes=axes, logarithmic="y", steps=True)


def underflow(tell: Tell, *, format: str, scale: float, gradient: float, steps: int, seed: int) -> Measured:
    """Train one layer on gradients far below a format's smallest number, with a loss scale and without."""
    source = generator(seed)
    x, target = torch.randn(32, 8, generator=source), torch.randn(32, 8, generator=source)
    plain, scaled = f"{format}, loss as it is", f"{format}, loss times {scale:g}"
    runs: dict[str, tuple[str | None, float]] = {"fp32": (None, 1.0), plain: (format, 1.0), scaled: (format, scale)}
    losses = {name: _trained(x, target, fmt, factor, gradient, steps) for name, (fmt, factor) in runs.items()}
    start, end = losses["fp32"][0], losses["fp32"][-1]
    small = quantize(torch.tensor([1e-7, 2e-8]), format)
    sizes = torch.exp2(torch.arange(-60, 1).float())
    lost = sizes[quantize(sizes * scale, format) == 0]
    return Measured(
        numbers={
            "1e-7 becomes": float(small[0]),
            "2e-8 becomes": float(small[1]),
            "largest power of two lost, log2": math.log2(float(lost.max())) if lost.numel() else math.nan,
            "progress without scaling": (start - losses[plain][-1]) / (start - end),
            "progress with scaling": (start - losses[scaled][-1]) / (start - end),
        },
        curves={name: [(float(i), value) for i, value in enumerate(values)] for name, values in losses.items()},
        axes=("step", "mean squared error"),
    )


def _trained(x: Tensor, target: Tensor, format: str | None, scale: float, gradient: float, steps: int) -> list[float]:
    """Return the losses of a layer whose incoming gradients are rounded to a format, divided by ``gradient``."""
    weight = torch.zeros(target.shape[1], x.shape[1])
    losses = []
    for _ in range(steps):
        difference = x @ weight.T - target
        losses.append(float(difference.square().mean()))
        g = difference * (gradient * scale)
        g = g if format is None else quantize(g, format)
        weight = weight - 0.1 / (gradient * scale) * (g.T @ x) / len(x)
    return losses


CLAIMS += (
    Claim(
        name="loss_scaling", recorded="shown", bounds="source",
        says="the loss scale doubles after 2000 clean steps, is halved by an overflow, and that step is skipped",
        source=_AMP,
        measure=schedule, settings=settings(recipe="amp_fp16", bad_steps=(2500,), steps=4600),
        expected=(
            exactly("first scale", 65536.0, "code"),
            exactly("scale after 2000 clean steps", 131072.0, "code"),
            exactly("factor of an overflow", 0.5, "code"),
            exactly("scale after 1999 more", 65536.0, "code"),
            exactly("scale after 2000 more", 131072.0, "code"),
            exactly("weights moved in clean steps alone", 1.0, "code"),
        ),
    ),
    Claim(
        name="underflow", recorded="shown", bounds="source",
        says="gradients near 1e-9 vanish in float16, a loss scale of 65536 brings all of them back",
        source=_AMP,
        measure=underflow, settings=settings(format="fp16", scale=65536.0, gradient=1e-9, steps=60, seed=0),
        expected=(
            near("1e-7 becomes", 2.0**-23, 0.0, "formula"),
            exactly("2e-8 becomes", 0.0),
            exactly("largest power of two lost, log2", -41.0),
            Expected(name="progress without scaling", low=-0.01, high=0.01, published=0.0, origin="formula"),
            near("progress with scaling", 1.0, 0.001, "formula"),
        ),
    ),
)  # fmt: skip
