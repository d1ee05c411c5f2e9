# SPDX-License-Identifier: Apache-2.0
"""Claims about what happens step after step: sums that stop growing, and scales that follow late."""

import dataclasses

import torch

from fmtsim.casts.quantize import quantize
from fmtsim.gemm.layers.operand import quantize_operand
from fmtsim.lab.reproduce.claim import Claim, Measured, Tell, exactly, near, settings
from fmtsim.lab.reproduce.estimators import operand
from fmtsim.lab.reproduce.samples import told
from fmtsim.rounding.modes import RoundingName
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys


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
            "first factor": factors[0],
            "second factor": factors[1],
            "what the jump to 8 becomes": seen[jump],
            "factor behind the jump": factors[jump + 1],
            "steps under it": float(len(late)),
            "last factor": factors[-1],
        },
        curves={"factor": [(float(i), factor) for i, factor in enumerate(factors)]},
        axes=("step", "factor that elements are multiplied by"),
        logarithmic="y",
        steps=True,
    )


CLAIMS = (
    Claim(
        name="stochastic_sums",
        says="sums in INT8 and bfloat16 stop growing under rounding to nearest, under stochastic rounding they do not",
        source="gpu-mode/lectures 7cb40f6, lecture 30",
        measure=sums,
        settings=settings(steps=100, copies=4096, seed=0),
        expected=(
            exactly("int8, 10 + 100 x 0.2, truncated", 10.0),
            near("int8, 10 + 100 x 0.2, stochastic", 30.0, 0.01, "formula"),
            exactly("bf16, 200 + 100 x 1, to nearest", 256.0),
            near("bf16, 200 + 100 x 1, stochastic", 300.0, 0.01, "formula"),
        ),
        recorded="shown",
        bounds="source",
    ),
    Claim(
        name="delayed_scaling",
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
        recorded="shown",
        bounds="source",
    ),
)
