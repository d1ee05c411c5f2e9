# SPDX-License-Identifier: Apache-2.0
"""Claims about tensors with outliers: clamping with compensation, rotations, and scales of their own."""

import dataclasses

import torch
from torch import Tensor

from fmtsim.gemm.layers.operand import quantize_operand
from fmtsim.lab.reproduce.claim import Claim, Expected, Measured, Tell, settings
from fmtsim.lab.reproduce.estimators import operand
from fmtsim.lab.reproduce.samples import decibels, draw, generator, normal, relative_error, through, told
from fmtsim.nn.smooth import smooth_swiglu
from fmtsim.scaling.cast import rotated
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Clamp, Hadamard, Quantizer

_HALO = "Ashkboos et al., HALO, arXiv:2501.02625; IST-DASLab/HALO d8c1dc9"
_FP4 = "Wang et al., arXiv:2501.17116, table 1"


def clamping(
    tell: Tell,
    *,
    recipe: str,
    distributions: tuple[str, ...],
    levels: tuple[float, ...],
    shape: tuple[int, int],
    seed: int,
) -> Measured:
    """Measure the signal-to-noise ratio of heavy-tailed numbers in four bits, as they are and clamped."""
    base, ordered = dataclasses.replace(operand(recipe, "x_f"), then=None), True
    found: dict[str, float] = {}
    for distribution in told(tell, distributions):
        x = draw(distribution, shape[0] * shape[1], seed).reshape(shape)
        numbers = {"not clamped, dB": _ratio(x, base, ())}
        numbers["clamped, rest lost, dB"] = _ratio(x, base, (Clamp(level=levels[0]),))
        for level in levels:
            numbers[f"clamped at {level}, rest kept, dB"] = _ratio(x, base, (Clamp(level=level, compensate=True),))
        rest_kept = [value for name, value in numbers.items() if "lost" not in name]
        ordered = ordered and rest_kept == sorted(rest_kept)
        gain = numbers["clamped, rest lost, dB"] - numbers["not clamped, dB"]
        found |= {f"{distribution}, {name}": ratio for name, ratio in numbers.items()}
        found[f"{distribution}, gain of a clamp alone, dB"] = gain
    return Measured(numbers=found | {"in the paper's order": float(ordered)})


def _ratio(x: Tensor, base: Quantizer, transforms: tuple[Clamp, ...]) -> float:
    made = quantize_operand(x, dataclasses.replace(base, transforms=transforms), Keys())
    q = made.values(torch.float32)
    return decibels(relative_error(x, q if made.rest is None else q + made.rest))


def rotation(tell: Tell, *, times: float, shape: tuple[int, int], seed: int) -> Measured:
    """Measure INT8 with one scale a tensor where one channel, or one token, is ``times`` as large as the others."""
    channel, token = normal(*shape, seed), normal(*shape, seed)
    channel[:, shape[1] // 3] *= times
    token[shape[0] // 3] *= times
    plain, rotating = operand("halo0", "x_f"), operand("halo1", "x_f")
    tokens = operand("halo2", "g_d")  # along the tokens
    others = torch.arange(shape[1]) != shape[1] // 3
    numbers = {
        "channel, level 0": _error(channel, plain),
        "channel, level 1": _error(channel, rotating),
        "other channels, level 0": _error(channel, plain, others),
        "other channels, level 1": _error(channel, rotating, others),
    }
    rows = torch.arange(shape[0]) != shape[0] // 3
    numbers |= {
        "other tokens, level 1": _error(token, rotating, rows=rows),
        "other tokens, level 2": _error(token, tokens, rows=rows),
    }
    for name, low, high in (("channel", 1, 0), ("other channels", 1, 0), ("other tokens", 2, 1)):
        numbers[f"{name}: level {low} over level {high}"] = (
            numbers[f"{name}, level {low}"] / numbers[f"{name}, level {high}"]
        )
    return Measured(numbers=numbers)


def _error(x: Tensor, quantizer: Quantizer, columns: Tensor | None = None, *, rows: Tensor | None = None) -> float:
    """Return the relative error (not squared) of a quantised matrix that is rotated back."""
    _, q = through(x, quantizer)
    for transform in reversed(quantizer.transforms):
        assert isinstance(transform, Hadamard)  # these recipes only rotate
        q = rotated(q, transform, None, inverse=True)
    pick = (slice(None) if rows is None else rows, slice(None) if columns is None else columns)
    return relative_error(x[pick], q[pick]) ** 0.5


def spike(tell: Tell, *, recipe: str, times: float, calls: int, shape: tuple[int, int], seed: int) -> Measured:
    """Send a spike through SwiGLU's output under delayed and current scales, plain and divided by a scale a token.

    ``calls`` ordinary batches fill the history; then one token's values are ``times`` as large.
    """
    delayed, current = operand(recipe, "x_f"), operand("te_current", "x_f")
    sources = [generator(seed + i) for i in range(calls + 1)]
    batches = [tuple(torch.randn(shape, generator=source) for _ in "uv") for source in sources]
    u, v = batches[-1]
    v = v.clone()
    v[shape[0] // 2] *= times
    numbers: dict[str, float] = {}
    for smooth in (False, True):
        state = DelayedScale(delayed)
        for first, second in batches[:-1]:
            state.record(_product(first, second, smooth)[0].abs().amax())
        z, scale = _product(u, v, smooth)
        kind = "smooth" if smooth else "plain"
        for rule, quantizer in (("delayed", delayed), ("current", current)):
            made = quantize_operand(z, quantizer, Keys(), state)
            q, exact = made.values(torch.float32) * scale, z * scale
            each = (q - exact).double().norm(dim=1) / exact.double().norm(dim=1)
            numbers[f"{rule}, {kind}: the spike"] = float(each[shape[0] // 2])
            numbers[f"{rule}, {kind}: other tokens"] = float(each[torch.arange(shape[0]) != shape[0] // 2].mean())
    return Measured(numbers=numbers)


def _product(u: Tensor, v: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    if smooth:
        return smooth_swiglu(u, v)
    return torch.nn.functional.silu(u) * v, torch.ones(())


CLAIMS = (
    Claim(
        name="occ",
        says="keeping what a clamp cuts off in high precision raises the signal to noise of FP4, the more the lower",
        source=_FP4,
        measure=clamping,
        settings=settings(
            recipe="fp4_ms", distributions=("t3", "rare"), levels=(0.999, 0.99, 0.97), shape=(1024, 1024), seed=0
        ),
        expected=(
            Expected(name="in the paper's order", low=1.0),
            *(Expected(name=f"{distribution}, gain of a clamp alone, dB") for distribution in ("t3", "rare")),
        ),
        recorded="shown in part",
        bounds="source",
        seeds=5,
        notes="Student's t of 3 degrees (t3), and one normal number in a thousand fifty times as large (rare). A "
        "clamp alone loses with them; with the paper's activations it gains 5.9 dB",
    ),
    Claim(
        name="halo",
        says="a rotation takes an outlier channel out of INT8's way, one along the tokens an outlier token",
        source=_HALO,
        measure=rotation,
        settings=settings(times=50.0, shape=(1024, 1024), seed=0),
        expected=(
            Expected(name="channel: level 1 over level 0", high=1.0),
            Expected(name="other channels: level 1 over level 0", high=1.0),
            Expected(name="other tokens: level 2 over level 1", high=1.0),
        ),
        recorded="shown in part",
        bounds="source",
        seeds=5,
        notes="errors of made matrices; the paper fine-tunes language models",
    ),
    Claim(
        name="smooth_swiglu",
        says="a token a hundred times as large saturates under delayed scaling, behind Smooth-SwiGLU it does not",
        source="Fishman et al., arXiv:2409.12517; Megatron-DeepSpeed 20029cf, class ScaledSwiglu",
        measure=spike,
        settings=settings(recipe="te_delayed", times=100.0, calls=8, shape=(256, 1024), seed=0),
        expected=(
            Expected(name="delayed, plain: the spike", low=0.5),
            Expected(name="delayed, smooth: the spike", high=0.0625),
        ),
        recorded="shown in part",
        bounds="after",
        notes="relative errors; 0.0625 is the largest of a number within E4M3's range. Under current scaling E4M3 "
        "does not mind the spike: the scheme is one for delayed scales",
    ),
)
