# SPDX-License-Identifier: Apache-2.0
"""Claims about loss scaling: its schedule, and what it saves."""

import math

import torch
from torch import Tensor, nn

from fmtsim.casts.quantize import quantize
from fmtsim.lab.reproduce.claim import Claim, Expected, Measured, Tell, exactly, near, settings
from fmtsim.lab.reproduce.samples import generator
from fmtsim.recipes.registry import get_recipe
from fmtsim.recipes.spec import LossScale

_AMP = "PyTorch 0202916b, torch/amp/grad_scaler.py; Micikevicius et al., arXiv:1710.03740, section 3.2"


def schedule(tell: Tell, *, recipe: str, bad_steps: tuple[int, ...], steps: int) -> Measured:
    """Follow torch's GradScaler under a recipe's loss scaling, with gradients that overflow at some steps."""
    scale = get_recipe(recipe).loss_scale or LossScale(interval=1)
    interval = scale.interval or steps
    scaler = torch.amp.GradScaler("cpu", scale.initial, scale.growth, scale.backoff, interval)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=2.0**-10)
    curve, kept = [], True
    for step in range(steps):
        optimizer.zero_grad()
        factor = math.inf if step in bad_steps else 1.0
        scaler.scale((weight * factor).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        kept = kept and bool((weight == before).all()) == (step in bad_steps)
        curve.append((float(step + 1), scaler.get_scale()))
    bad = bad_steps[0]
    numbers = {
        "first scale": curve[0][1],
        "scale after 2000 clean steps": curve[1999][1],
        "factor of an overflow": curve[bad][1] / curve[bad - 1][1],
        "scale after 1999 more": curve[bad + 1999][1],
        "scale after 2000 more": curve[bad + 2000][1],
        "weights moved in clean steps alone": float(kept),
    }
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


CLAIMS = (
    Claim(
        name="loss_scaling",
        says="the loss scale doubles after 2000 clean steps, is halved by an overflow, and that step is skipped",
        source=_AMP,
        measure=schedule,
        settings=settings(recipe="amp_fp16", bad_steps=(2500,), steps=4600),
        expected=(
            exactly("first scale", 65536.0, "code"),
            exactly("scale after 2000 clean steps", 131072.0, "code"),
            exactly("factor of an overflow", 0.5, "code"),
            exactly("scale after 1999 more", 65536.0, "code"),
            exactly("scale after 2000 more", 131072.0, "code"),
            exactly("weights moved in clean steps alone", 1.0, "code"),
        ),
        recorded="shown",
        bounds="source",
    ),
    Claim(
        name="underflow",
        says="gradients near 1e-9 vanish in float16, a loss scale of 65536 brings all of them back",
        source=_AMP,
        measure=underflow,
        settings=settings(format="fp16", scale=65536.0, gradient=1e-9, steps=60, seed=0),
        expected=(
            near("1e-7 becomes", 2.0**-23, 0.0, "formula"),
            exactly("2e-8 becomes", 0.0),
            exactly("largest power of two lost, log2", -41.0),
            Expected(name="progress without scaling", low=-0.01, high=0.01, published=0.0, origin="formula"),
            near("progress with scaling", 1.0, 0.001, "formula"),
        ),
        recorded="shown",
        bounds="source",
    ),
)
