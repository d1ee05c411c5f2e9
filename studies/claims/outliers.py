# SPDX-License-Identifier: Apache-2.0
"""Claims about outliers: where they come from, how they grow in training, and what they do to scales."""

import copy
import dataclasses
import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.gemm.layers.config import PRODUCTS, LinearConfig
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.nn.convert import convert
from fmtsim.nn.swaps import scaled_down, smooth_scale, smooth_swiglu
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.scaling.history import DelayedScale
from fmtsim.scaling.scaled_cast import rotated
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Clamp, Hadamard, Quantizer
from studies.claims.claim import Claim, Expected, Measured, Tell, settings
from studies.claims.estimators import operand
from studies.claims.experiment import decibels, descend, draw, generator, normal, relative_error, through, told

_HALO = "Ashkboos et al., HALO, arXiv:2501.02625; IST-DASLab/HALO d8c1dc9"
_FP4 = "Wang et al., arXiv:2501.17116, table 1"


def clamping(
    tell: Tell, *, recipe: str, distributions: tuple[str, ...], levels: tuple[float, ...], shape: tuple[int, int],
    seed: int,
) -> Measured:  # fmt: skip
    """Measure the signal-to-noise ratio of heavy-tailed numbers in four bits, as they are and clamped."""
    base, ordered = dataclasses.replace(operand(recipe, "x_f"), then=None), True
    gains: dict[str, float] = {}
    for distribution in told(tell, distributions):
        x = draw(distribution, shape[0] * shape[1], seed).reshape(shape)
        numbers = {"not clamped, dB": _ratio(x, base, ())}
        numbers["clamped, rest lost, dB"] = _ratio(x, base, (Clamp(level=levels[0]),))
        for level in levels:
            numbers[f"clamped at {level}, rest kept, dB"] = _ratio(x, base, (Clamp(level=level, compensate=True),))
        rest_kept = [value for name, value in numbers.items() if "lost" not in name]
        ordered = ordered and rest_kept == sorted(rest_kept)
        gain = numbers["clamped, rest lost, dB"] - numbers["not clamped, dB"]
        gains |= {f"{distribution}, {name}": ratio for name, ratio in numbers.items()}
        gains[f"{distribution}, gain of a clamp alone, dB"] = gain
    return Measured(numbers=gains | {"in the paper's order": float(ordered)})


def _ratio(x: Tensor, base: Quantizer, transforms: tuple[Clamp, ...]) -> float:
    quantised = quantize_operand(x, dataclasses.replace(base, transforms=transforms), Keys())
    q = quantised.values(torch.float32)
    return decibels(relative_error(x, q if quantised.rest is None else q + quantised.rest))


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
            quantised = quantize_operand(z, quantizer, Keys(), state)
            q, exact = quantised.values(torch.float32) * scale, z * scale
            errors = (q - exact).double().norm(dim=1) / exact.double().norm(dim=1)
            numbers[f"{rule}, {kind}: the spike"] = float(errors[shape[0] // 2])
            numbers[f"{rule}, {kind}: other tokens"] = float(errors[torch.arange(shape[0]) != shape[0] // 2].mean())
    return Measured(numbers=numbers)


def _product(u: Tensor, v: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    if smooth:
        return smooth_swiglu(u, v)
    return torch.nn.functional.silu(u) * v, torch.ones(())


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="occ", recorded="shown in part", bounds="source", seeds=5,
        says="keeping what a clamp cuts off in high precision raises the signal to noise of FP4, the more the lower",
        source=_FP4,
        measure=clamping,
        settings=settings(
            recipe="fp4_ms", distributions=("t3", "rare"), levels=(0.999, 0.99, 0.97), shape=(1024, 1024), seed=0,
        ),
        expected=(
            Expected(name="in the paper's order", low=1.0),
            *(Expected(name=f"{distribution}, gain of a clamp alone, dB") for distribution in ("t3", "rare")),
        ),
        notes="Student's t of 3 degrees (t3), and one normal number in a thousand fifty times as large (rare). A "
        "clamp alone loses with them; with the paper's activations it gains 5.9 dB",
    ),
    Claim(
        name="halo", recorded="shown in part", bounds="source", seeds=5,
        says="a rotation takes an outlier channel out of INT8's way, one along the tokens an outlier token",
        source=_HALO,
        measure=rotation, settings=settings(times=50.0, shape=(1024, 1024), seed=0),
        expected=(
            Expected(name="channel: level 1 over level 0", high=1.0),
            Expected(name="other channels: level 1 over level 0", high=1.0),
            Expected(name="other tokens: level 2 over level 1", high=1.0),
        ),
        notes="errors of made matrices; the paper fine-tunes language models",
    ),
    Claim(
        name="smooth_swiglu", recorded="shown in part", bounds="after",
        says="a token a hundred times as large saturates under delayed scaling, behind Smooth-SwiGLU it does not",
        source="Fishman et al., arXiv:2409.12517; Megatron-DeepSpeed 20029cf, class ScaledSwiglu",
        measure=spike, settings=settings(recipe="te_delayed", times=100.0, calls=8, shape=(256, 1024), seed=0),
        expected=(
            Expected(name="delayed, plain: the spike", low=0.5),
            Expected(name="delayed, smooth: the spike", high=0.0625),
        ),
        notes="relative errors; 0.0625 is the largest of a number within E4M3's range. Under current scaling E4M3 "
        "does not mind the spike: the scheme is one for delayed scales",
    ),
)  # fmt: skip


_BETAS: Final = (0.9, 0.95)
INTEL: Final = "Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv:2409.12517"
_RUNS: Final = {  # whether the weights are aligned, and how the product is quantised
    "aligned, high precision": (True, "high precision"),
    "aligned, plain": (True, "plain"),
    "aligned, a scale a token": (True, "token"),
    "aligned, a scale a channel": (True, "channel"),
    "not aligned, plain": (False, "plain"),
}
_EACH: Final = 24  # steps from one spike to the next, more than the window remembers


class _Gated(nn.Module):
    """A gated layer, whose product is smoothed by a scale a token, by one a channel of the product, or not."""

    def __init__(self, width: int, hidden: int, std: float, source: torch.Generator) -> None:
        super().__init__()
        shapes = (hidden, width), (hidden, width), (width, hidden)
        layers = [nn.Linear(shape[1], shape[0], bias=False) for shape in shapes]
        self.gate_proj, self.up_proj, self.down_proj = layers
        for layer in layers:
            nn.init.normal_(layer.weight, std=std / math.sqrt(layer.in_features), generator=source)
        self.how = "plain"

    def product(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.down_proj(self.product(x))  # type: ignore[no-any-return]
        u, v = self.gate_proj(x), self.up_proj(x)
        if self.how == "token":
            return scaled_down(self.down_proj, *smooth_swiglu(u, v), "token")
        z, s = smooth_swiglu(u, v, scale=smooth_scale(F.silu(u) * v, "channel"))
        return scaled_down(self.down_proj, z, s, "channel")


def _direction(width: int, source: torch.Generator) -> Tensor:
    """Return a unit vector of equal magnitudes: tokens along it have no outlier of their own."""
    return (torch.randint(0, 2, (width,), generator=source) * 2 - 1) / math.sqrt(width)


def align(tell: Tell, *, width: int, hidden: int, steps: int, decay: float, seed: int) -> Measured:
    """Teach a layer a quadratic function of one direction, with decay of its weights, and look at its two matrices."""
    source = generator(seed)
    along, out = _direction(width, source), _direction(width, source)
    layer = _Gated(width, hidden, 0.3, source)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, weight_decay=decay, betas=_BETAS)

    def cosines() -> Tensor:
        return F.cosine_similarity(layer.gate_proj.weight, layer.up_proj.weight, dim=1).abs().detach()

    def outlier() -> float:
        z = layer.product(torch.randn(4096, width, generator=generator(seed + 1))).detach()
        return float(z.abs().max() / z.square().mean().sqrt())

    numbers = {"mean |cosine| at first": float(cosines().mean()), "largest over rms at first": outlier()}

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, width, generator=source)
        wanted = 4 * (x @ along).clamp(min=0).square()[:, None] * out
        return (layer(x) - wanted).square().sum(1).mean()  # type: ignore[no-any-return]

    for _ in descend(told(tell, range(steps)), loss_of, optimizer):
        pass
    numbers |= {"mean |cosine| at the end": float(cosines().mean()), "largest over rms at the end": outlier()}
    numbers["growth of the outlier"] = numbers["largest over rms at the end"] / numbers["largest over rms at first"]
    return Measured(numbers=numbers)


def clipped(
    tell: Tell, *, recipe: str, window: int, width: int, hidden: int, norm: float, steps: int, seed: int
) -> Measured:
    """Train layers with one channel's weights aligned on purpose, or not, on batches of which few have its direction.

    Numbers are the loss of those batches over that of the zero function, in the second half of the training.
    """
    layers = delayed(get_recipe(recipe).linear, window)
    numbers = {}
    for name, (aligned, how) in told(tell, tuple(_RUNS.items())):
        numbers[name] = _train(layers, aligned, how, width, hidden, norm, steps, seed)
    numbers["a scale a token over plain"] = numbers["aligned, a scale a token"] / numbers["aligned, plain"]
    return Measured(numbers=numbers)


def _train(
    layers: LinearConfig, aligned: bool, how: str, width: int, hidden: int, norm: float, steps: int, seed: int
) -> float:
    source = generator(seed)
    along, other = _direction(width, source), torch.randn(width, generator=source)
    other = F.normalize(other - (other @ along) * along, dim=0)
    teacher = _Gated(width, hidden, 1.0, source).requires_grad_(False)
    teacher.gate_proj.weight[0], teacher.up_proj.weight[0] = norm * along, norm * (along if aligned else other)
    layer = copy.deepcopy(teacher).requires_grad_(True)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * p.std() * torch.randn(p.shape, generator=source))
    if how != "high precision":
        convert(layer, layers)
        layer.how = how
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0.0, betas=_BETAS)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, width, generator=source)
        if step % _EACH == 0:
            x[0] = 3 * math.sqrt(width) * along  # every number of it is 3 or -3
        wanted = teacher(x)
        return (layer(x) - wanted).square().sum() / wanted.square().sum()  # type: ignore[no-any-return]

    seen = descend(range(1, steps + 1), loss_of, optimizer)
    losses = [loss for step, loss in seen if step % _EACH == 0 and step > steps // 2]
    return sum(losses) / len(losses) if losses else math.nan


def delayed(config: LinearConfig | None, window: int) -> LinearConfig:
    """Return a layer's config whose scales remember so many calls, and change at least as often."""
    assert config is not None

    def shortened(q: Quantizer) -> Quantizer:
        if q.scaling is None or q.scaling.history is None:
            return q
        often = min(window, q.scaling.history.refresh_every)
        history = dataclasses.replace(q.scaling.history, length=window, refresh_every=often)
        return dataclasses.replace(q, scaling=dataclasses.replace(q.scaling, history=history))

    fields: dict[str, Any] = {}
    for name in PRODUCTS:
        gemm = getattr(config, name)
        fields[name] = dataclasses.replace(gemm, a=shortened(gemm.a), b=shortened(gemm.b))
    return dataclasses.replace(config, **fields)


CLAIMS += (
    Claim(
        name="swiglu_alignment", recorded="shown in part", bounds="after", seeds=5,
        says="weight decay aligns the two matrices of SwiGLU where a direction pays, and the product's outliers grow",
        source=INTEL,
        measure=align, settings=settings(width=32, hidden=16, steps=1000, decay=1.0, seed=0),
        expected=(
            Expected(name="mean |cosine| at first", high=0.3),
            Expected(name="mean |cosine| at the end", low=0.8),
            Expected(name="largest over rms at first"),
            Expected(name="largest over rms at the end"),
            Expected(name="growth of the outlier", low=1.2),
        ),
        notes="one layer learns a quadratic function of one direction, under a strong decay; the paper sees it after "
        "200 billion tokens of a model of 7 billion parameters",
    ),
    Claim(
        name="swiglu_clipped", recorded="shown in part", bounds="after", seeds=3,
        says="delayed scales clip the outliers of aligned weights; of others hardly; Smooth-SwiGLU clips them less",
        source=INTEL,
        measure=clipped,
        settings=settings(recipe="te_delayed", window=16, width=32, hidden=64, norm=1.5, steps=144, seed=0),
        expected=(
            Expected(name="aligned, high precision", high=0.01),
            Expected(name="aligned, plain", low=0.5),
            Expected(name="not aligned, plain", high=0.25),
            Expected(name="aligned, a scale a token"),
            Expected(name="a scale a token over plain", high=0.9),
            Expected(name="aligned, a scale a channel"),
        ),
        notes="losses on batches with a token along the aligned direction, of that of the zero function. The training "
        "does not diverge: other batches pull it back. The token's scale makes a quadratic outlier linear, which is "
        "still clipped; a scale a channel (of the product) moves it into the weights behind, whose delayed scale clips",
    ),
)  # fmt: skip
