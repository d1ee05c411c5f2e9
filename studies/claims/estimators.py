# SPDX-License-Identifier: Apache-2.0
"""Claims about how gradients, and what they are made of, are rounded: EDEN, stochastic rounding, QuEST, DGE."""

from dataclasses import replace
from typing import Any

import torch

from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import with_block
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scaled_cast import cast, slope
from fmtsim.spec.quantizer import Differentiable, Quantizer
from studies.claims.claim import Claim, Expected, Measured, Tell, exactly, near, settings
from studies.claims.experiment import normal, relative_error, slope_of, through, told

_QUARTET = "Castro et al., Quartet, arXiv:2505.14669; IST-DASLab/Quartet 00ccd38"
_EDEN = "Quartet II, arXiv:2601.22813; IST-DASLab/Quartet-II 8776a90"
_STOCHASTIC = Rounding(mode="stochastic")


def operand(recipe: str, name: str) -> Quantizer:
    """Return the quantiser of an operand (``"x_f"``, ``"g_d"``, ...) of a recipe's layers."""
    linear = get_recipe(recipe).linear
    assert isinstance(linear, LinearConfig)  # recipes of the catalogue that claims name have one
    return linear.operands[name]


def eden(tell: Tell, *, recipe: str, operand_name: str, headroom: float, shape: tuple[int, int], seed: int) -> Measured:
    """Compare EDEN's gradients with stochastically rounded NVFP4, whose scales leave room for a clip-free draw."""
    x = normal(*shape, seed)
    e4m3: Any = get_format("e4m3")
    scaling = Scaling(block=(1, 16), top=6 * headroom, scale=e4m3, tensor=TensorScale(order="quartet2"))
    plain = Quantizer(format=get_format("e2m1"), scaling=scaling, rounding=_STOCHASTIC)
    ours, other = through(x, operand(recipe, operand_name), seed), through(x, plain, seed)
    errors = relative_error(*ours), relative_error(*other)
    return Measured(
        numbers={
            "error, EDEN": errors[0], "error, stochastic": errors[1], "ratio of errors": errors[1] / errors[0],
            "slope, EDEN": slope_of(*ours), "slope, stochastic": slope_of(*other),
        },
    )  # fmt: skip


def stochastic(tell: Tell, *, random_bits: int, points: int, seed: int) -> Measured:
    """Measure the mean error, in steps, of stochastic rounding to E2M1 with few random bits."""
    x = (2 + 2 * (torch.arange(points) + 0.5) / points).repeat(1024)  # steps of 1 from 2 to 4
    rounding = Rounding(mode="stochastic", random_bits=random_bits)
    bias = (quantize(x, "e2m1", rounding=rounding, generator=seed).double() - x.double()).mean()
    tight = torch.full((1 << 18,), 2.0 + 2.0**-random_bits * 0.99)
    moved = quantize(tight, "e2m1", rounding=rounding, generator=seed) > 2
    return Measured(
        numbers={"mean error, steps": float(bias), "part that leaves 2 + 0.99/256": float(moved.float().mean())}
    )


def clip(tell: Tell, *, format: str, multiples: tuple[float, ...], samples: tuple[int, int], seed: int) -> Measured:
    """Find the clip of least error of normal numbers, in standard deviations."""
    x, fmt = normal(*samples, seed), get_format(format)
    top = float(fmt.max)  # type: ignore[union-attr]  # an element format
    curve = []
    for multiple in told(tell, multiples):
        curve.append((multiple, relative_error(x, quantize(x * (top / multiple), fmt) * (multiple / top))))
    best = min(curve, key=lambda point: point[1])
    return Measured(
        numbers={"best clip, sigma": best[0], "error at it": best[1]},
        curves={format: curve},
        axes=("clip, standard deviations", "relative squared error"),
    )


def quest(tell: Tell, *, phases: int, shape: tuple[int, int], seed: int) -> Measured:
    """Measure Quartet's two quantisers, averaged over the place of the standard deviation between powers of two."""
    forward, backward = operand("quartet", "x_f"), operand("quartet", "g_d")
    curves: dict[str, list[tuple[float, float]]] = {"forward (QuEST)": [], "backward (stochastic)": []}
    rules: dict[str, list[float]] = {"floor": [], "even": []}
    slopes, largest = [], 0.0
    for i in told(tell, range(phases)):
        sigma = 2.0 ** (i / phases)
        x = normal(*shape, seed + i) * sigma
        first, second = through(x, forward, seed + i), through(x, backward, seed + i)
        curves["forward (QuEST)"].append((sigma, relative_error(*first)))
        curves["backward (stochastic)"].append((sigma, relative_error(*second)))
        for rule, errors in rules.items():
            errors.append(relative_error(x, quantize(x, with_block(get_format("mxfp4"), None, rule))))  # type: ignore[arg-type]
        slopes.append(slope_of(*second))
        largest = max(largest, _largest_scaled(second[0], backward))
    mean = {name: sum(error for _, error in points) / phases for name, points in curves.items()}
    return Measured(
        numbers={
            "error, forward": mean["forward (QuEST)"],
            "least over phases": min(error for _, error in curves["forward (QuEST)"]),
            "largest over phases": max(error for _, error in curves["forward (QuEST)"]),
            **{f"error, MXFP4 {rule}": sum(errors) / phases for rule, errors in rules.items()},
            "error, backward": mean["backward (stochastic)"], "slope, backward": sum(slopes) / phases,
            "largest |x / s|, backward": largest,
        },
        curves=curves, axes=("standard deviation", "relative squared error"),
    )  # fmt: skip


def quest_error(tell: Tell, *, phases: int, shape: tuple[int, int], seed: int) -> Measured:
    """Measure casts to MXFP4 behind a Hadamard matrix, averaged as ``quest`` averages."""
    forward, stochastic_absmax = operand("quartet", "x_f"), operand("quartet", "g_d")
    assert forward.scaling is not None and forward.scaling.factor is not None
    raised = replace(forward.scaling, factor=forward.scaling.factor * 2**0.5)  # rounded down: the nearest in log2
    casts = {
        "QuEST, scale to the nearest": replace(forward, scaling=raised), "QuEST, released code": forward,
        "AbsMax": replace(stochastic_absmax, rounding=Rounding()), "AbsMax, stochastic": stochastic_absmax,
    }  # fmt: skip
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in casts}
    for i in told(tell, range(phases)):
        sigma = 2.0 ** (i / phases)
        x = normal(*shape, seed + i) * sigma
        for name, quantizer in casts.items():
            curves[name].append((sigma, relative_error(*through(x, quantizer, seed + i))))
    numbers = {name: sum(error for _, error in points) / phases for name, points in curves.items()}
    for name in ("QuEST, scale to the nearest", "QuEST, released code"):
        numbers[f"{name}, over AbsMax"] = numbers[name] / numbers["AbsMax"]
    return Measured(numbers=numbers, curves=curves, axes=("standard deviation", "relative squared error"))


def differentiable(tell: Tell, *, k: float, cap: float, points: int) -> Measured:
    """Average the slope of the differentiable estimator over one interval of E2M1."""
    fmt, scaling = get_format("e2m1"), Scaling(statistic="one", factor=1.0)
    x = ((torch.arange(points, dtype=torch.float64) + 0.5) / points + 2.0).float().reshape(1, -1)  # from 2 to 3
    result = cast(x, fmt, scaling, Rounding(), "saturate")  # type: ignore[arg-type]  # an element format
    capped = slope(Differentiable(k=k, cap=cap), result, fmt)  # type: ignore[arg-type]
    assert capped is not None  # the rule has a slope everywhere
    return Measured(
        numbers={
            "mean slope": float(capped.double().mean()),
            "least slope": float(capped.min()),
            "part at the cap": float((capped == cap).float().mean()),
        },
        curves={"slope": [(float(a), float(b)) for a, b in zip(x[0, ::997], capped[0, ::997], strict=True)]},
        axes=("scaled element", "slope of the gradient"),
    )


def _largest_scaled(x: torch.Tensor, quantizer: Quantizer) -> float:
    assert quantizer.scaling is not None
    result = cast(x, quantizer.format, quantizer.scaling, Rounding(), "saturate")  # type: ignore[arg-type]
    return float(result.scaled.abs().max())


CLAIMS = (
    Claim(
        name="eden", recorded="shown", bounds="source", seeds=5,
        says="correcting each group's scale errs less than half of what stochastic rounding does, and is unbiased too",
        source=_EDEN,
        measure=eden,
        settings=settings(recipe="quartet2", operand_name="g_d", headroom=16 / 17, shape=(2048, 1024), seed=0),
        expected=(
            Expected(name="ratio of errors", low=2.0, published=2.0, origin="paper"),
            near("slope, EDEN", 1.0, 0.001, "formula"),
        ),
        notes="normal numbers; the paper says more than twice",
    ),
    Claim(
        name="stochastic_bits", recorded="shown", bounds="source",
        says="eight random bits round toward zero by 1/512 of a step on average, and never move the last 1/256",
        source="Transformer Engine d0067d0, ptx.cuh (random bits of cvt.rs)",
        measure=stochastic, settings=settings(random_bits=8, points=1 << 13, seed=0),
        expected=(near("mean error, steps", -1 / 512, 0.25, "formula"), exactly("part that leaves 2 + 0.99/256", 0.0)),
    ),
    Claim(
        name="clip", recorded="shown", bounds="after", seeds=5,
        says="four-bit normal numbers err least when clipped at 2.92 standard deviations",
        source=f"{_QUARTET} (the constant 2.92247856)",
        measure=clip,
        settings=settings(
            format="e2m1", multiples=tuple(2.6 + 0.02 * i for i in range(33)), samples=(1024, 1024), seed=0,
        ),
        expected=(Expected(name="best clip, sigma", low=2.86, high=2.98, published=2.922, origin="code"),),
        notes="the minimum is flat: neighbouring clips differ by less than a sample's scatter",
    ),
    Claim(
        name="quest", recorded="shown", bounds="source",
        says="Quartet's backward cast is unbiased and never clips",
        source=_QUARTET,
        measure=quest, settings=settings(phases=16, shape=(256, 1024), seed=0),
        expected=(
            near("slope, backward", 1.0, 0.001, "formula"),
            Expected(name="largest |x / s|, backward", low=5.9, high=6.0, published=6.0, origin="formula"),
        ),
    ),
    Claim(
        name="quest_error", recorded="shown in part", bounds="after",
        says="QuEST's cast to MXFP4 errs less on normal numbers than rounding to nearest under the largest magnitude",
        source=f"{_QUARTET}, table 2",
        measure=quest_error, settings=settings(phases=16, shape=(256, 1024), seed=0),
        card=settings(phases=64, shape=(1024, 1024)),
        expected=(
            near("QuEST, scale to the nearest", 1.32e-2, 0.03, "paper"),
            near("QuEST, released code", 1.32e-2, 0.03, "paper", part=(0.0, 2.64e-2)),
            near("AbsMax", 1.37e-2, 0.03, "paper"),
            near("AbsMax, stochastic", 2.77e-2, 0.03, "paper"),
            Expected(name="QuEST, scale to the nearest, over AbsMax", high=1.0),
            Expected(name="QuEST, released code, over AbsMax"),
        ),
        notes="averaged over the place of the standard deviation between two powers of two; AbsMax is the code's, "
        "which never clips. The table's figure is that of a scale rounded to the nearest power of two; the released "
        "code rounds it down, and so clips between half and all of the best place. A part is within a factor of two",
    ),
    Claim(
        name="dge", recorded="shown", bounds="source",
        says="the capped differentiable estimator passes 0.59 of the gradient on average: 3 * 15^-1.25 + 1 - 15^-0.25",
        source="Wang et al., arXiv:2501.17116 (k = 5, cap 3)",
        measure=differentiable, settings=settings(k=5.0, cap=3.0, points=1 << 20),
        expected=(
            near("mean slope", 3 * 15**-1.25 + 1 - 15**-0.25, 1e-4, "formula"),
            near("least slope", 0.2, 1e-4, "formula"),
            near("part at the cap", 15**-1.25, 1e-4, "formula"),
        ),
        notes="integrals of the derivative |u|^(1/k - 1) / k, of which 2^20 points see a part; what the estimator "
        "does for a training is not in it",
    ),
)  # fmt: skip
