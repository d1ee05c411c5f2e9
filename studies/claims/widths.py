# SPDX-License-Identifier: Apache-2.0
"""Claims about models with fixed scale factors: unit variance at the start, and learning rates that transfer."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.quantize import quantize
from fmtsim.lab.training.decoders import Attention
from fmtsim.nn import unit_scaling as unit
from fmtsim.nn.convert import convert
from fmtsim.nn.scaled_model import MuLinear, MuReadout, MuResidual, UnitLinear, UnitReadout, mu_parameter_groups
from studies.claims.claim import Claim, Expected, Measured, Tell, settings
from studies.claims.experiment import generator, last_loss

_VOCABULARY = 64
_linear = partial(MuLinear, bias=False)


class _MuGPT(nn.Module):
    """A decoder of muS: branches that are normalised at their end, unit-variance weights, fixed factors."""

    def __init__(self, width: int, layers: int, tau: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(64, width))
        branches: list[nn.Module] = []
        for _ in range(layers):
            up, down = _linear(width, 4 * width), _linear(4 * width, width)
            branches += [Attention(width, 4, _linear), nn.Sequential(up, nn.GELU(), down)]
        self.blocks = nn.ModuleList(MuResidual(branch, width, tau) for branch in branches)
        self.norm, self.head = nn.LayerNorm(width), MuReadout(width, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embedding(tokens) + self.position[: tokens.shape[1]]) * 0.5**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def text(count: int, length: int, seed: int) -> Tensor:
    """Return sequences in which a token follows from the two before it by a fixed table, with one in ten at random."""
    source = generator(seed)
    table = torch.randint(_VOCABULARY, (_VOCABULARY, 8), generator=generator(12345))
    tokens = torch.randint(_VOCABULARY, (count, length), generator=source)
    choice = torch.rand(count, length, generator=source)
    for t in range(2, length):
        after = table[tokens[:, t - 1], tokens[:, t - 2] % 8]
        tokens[:, t] = torch.where(choice[:, t] < 0.9, after, tokens[:, t])
    return tokens


def _lion(groups: list[dict[str, Any]], momenta: dict[Tensor, Tensor], part: float) -> None:
    """Take a step of Lion (betas 0.9 and 0.99), with learning rates times ``part``."""
    for group in groups:
        for p in group["params"]:
            m = momenta.setdefault(p, torch.zeros_like(p))
            p.data -= group["lr"] * part * (0.9 * m + 0.1 * p.grad).sign()
            m.mul_(0.99).add_(p.grad, alpha=0.01)


def _trained(width: int, lr: float, recipe: str | None, how: dict[str, Any]) -> float:
    torch.manual_seed(how["seed"])
    model = _MuGPT(width, how["layers"], how["tau"])
    if recipe is not None:
        convert(model, recipe, generator=how["seed"])
    groups = list(mu_parameter_groups(model, lr, how["base_width"]))
    momenta: dict[Tensor, Tensor] = {}

    def loss_of(step: int) -> Tensor:
        tokens = text(how["batch"], 33, how["seed"] + 1 + step)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def update(step: int) -> None:
        _lion(groups, momenta, min(1.0, (step + 1) / 10) * (1 - step / how["steps"]))
        model.zero_grad()

    return last_loss(how["steps"], 5, loss_of, update)


def transfer(
    tell: Tell, *, widths: tuple[int, ...], exponents: tuple[int, ...], recipes: tuple[str, str], width: int, **how: Any
) -> Measured:
    """Find the best learning rate at each width, a power of two, and the gap of an FP8 recipe to another at one."""
    curves: dict[str, list[tuple[float, float]]] = {}
    numbers: dict[str, float] = {}
    total, done = len(widths) * len(exponents) + 2, 0
    for size in widths:
        curve = curves[f"width {size}"] = []
        for exponent in exponents:
            curve.append((2.0**exponent, _trained(size, 2.0**exponent, None, how)))
            done += 1
            tell(done / total)
        rate, loss = min(curve, key=lambda point: point[1])
        numbers |= {f"best rate at {size}, log2": math.log2(rate), f"loss at {size}": loss}
    best = 2.0 ** numbers[f"best rate at {width}, log2"]
    high, low = (_trained(width, best, recipe, how) for recipe in recipes)
    bests = [numbers[f"best rate at {size}, log2"] for size in widths]
    losses = [numbers[f"loss at {size}"] for size in widths]
    numbers |= {
        "octaves between the best rates": max(bests) - min(bests),
        "wider is better": float(losses == sorted(losses, reverse=True)),
        "best rates at the edge of the grid": float(sum(best in (exponents[0], exponents[-1]) for best in bests)),
        "gap of FP8 to bfloat16, %": 100 * (low / high - 1),
    }
    tell(1.0)
    return Measured(numbers=numbers, curves=curves, axes=("learning rate", "loss, nats"), logarithmic="x")


def unit_variance(tell: Tell, *, width: int, layers: int, format: str, seed: int) -> Measured:
    """Measure the tensors of a deep network at its start, unit-scaled and with weights of standard deviation 0.02."""
    numbers: dict[str, float] = {}
    for name in ("unit", "plain"):
        values, gradients = _tensors(name == "unit", width, layers, seed)
        for kind, tensors in (("values", values), ("gradients", gradients)):
            sizes = [float(t.std()) for t in tensors]
            numbers |= {f"{name}, least std of {kind}": min(sizes), f"{name}, largest std of {kind}": max(sizes)}
        lost = [float(((quantize(t, format) == 0) & (t != 0)).float().mean()) for t in gradients]
        numbers[f"{name}, largest part of a gradient lost"] = max(lost)
    return Measured(numbers=numbers)


def _tensors(scaled: bool, width: int, layers: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(seed)
    cls = UnitLinear if scaled else nn.Linear
    ups, downs = (
        [cls(*sizes, bias=False) for _ in range(layers)] for sizes in ((width, 4 * width), (4 * width, width))
    )
    head = (UnitReadout if scaled else nn.Linear)(width, _VOCABULARY, bias=False)
    table = torch.randn(_VOCABULARY, width)
    if not scaled:
        table *= 0.02
        for layer in (*ups, *downs, head):
            nn.init.normal_(layer.weight, std=0.02)
    tokens = torch.randint(_VOCABULARY, (1024,))
    x, seen = F.embedding(tokens, table.requires_grad_()), []
    for up, down in zip(ups, downs, strict=True):
        branch, skip = unit.residual_split(x) if scaled else (x, x)
        h = up(F.layer_norm(branch, (width,)))
        y = down(unit.gelu(h) if scaled else F.gelu(h))
        x = unit.residual_add(y, skip) if scaled else skip + y
        seen += [h, y, x]
    logits = head(F.layer_norm(x, (width,)))
    loss = unit.cross_entropy(logits, tokens.roll(1)) if scaled else F.cross_entropy(logits, tokens.roll(1))
    return [t.detach() for t in seen], list(torch.autograd.grad(loss, seen))


CLAIMS = (
    Claim(
        name="unit_scaling", recorded="shown in part", bounds="after",
        says="fixed factors keep every activation and gradient near unit variance, so that FP8 needs no scales",
        source="Blake et al., Unit Scaling, arXiv:2303.11257; unit-scaling a7b5b3c",
        measure=unit_variance, settings=settings(width=256, layers=6, format="e5m2", seed=0),
        expected=(
            Expected(name="unit, least std of values", low=0.5),
            Expected(name="unit, largest std of values", high=2.0),
            Expected(name="unit, least std of gradients", low=0.5),
            Expected(name="unit, largest std of gradients", high=2.0),
            Expected(name="unit, largest part of a gradient lost", high=1e-3),
            Expected(name="plain, largest part of a gradient lost", low=0.3),
        ),
    ),
    Claim(
        name="mus_transfer", recorded="shown", bounds="before", seeds=5, slow=True,
        says="the best learning rate of a mu-scaled model stays where it is over three octaves of width",
        source="Narayan et al., muS, arXiv:2502.05967",
        measure=transfer,
        settings=settings(
            widths=(32, 64, 128, 256), exponents=(-5, -4, -3, -2, -1), recipes=("amp_bf16", "mu_s"), width=64,
            base_width=32, layers=2, tau=0.4, steps=60, batch=8, seed=0,
        ),
        expected=(
            Expected(name="octaves between the best rates", low=0.0, high=1.0, published=0.0, origin="paper",
                     part=(0.0, 2.0)),
            Expected(name="best rates at the edge of the grid", high=0.0),
            Expected(name="gap of FP8 to bfloat16, %", high=2.0),
            *(Expected(name=f"best rate at {width}, log2") for width in (32, 64, 128, 256)),
        ),
        notes="60 steps of 256 tokens; rates lie an octave apart, in the paper too, and their grid was moved once, "
        "after every best rate had been its last. The paper's trainings end at the same losses in FP8 and bfloat16",
    ),
)  # fmt: skip
