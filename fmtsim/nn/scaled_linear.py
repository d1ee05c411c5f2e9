# SPDX-License-Identifier: Apache-2.0
"""Linear layers with fixed factors on their three products, for unit-scaled and mu-scaled models."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.arguments import check_features
from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.nn.scaled_model import SCALED, ScaledModel
from fmtsim.nn.unit_scaling import Factors, scaled_product
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import checked


class ScaledLinear(nn.Linear):
    """Apply ``y = f (x w^T + bias)`` with a factor of its own for y, for the gradient of x and for that of w.

    Weights begin as standard normal numbers, biases as zeros. Converted by ``fmtsim.convert`` the operands are
    quantised before the factors, which multiply the products: no operand needs a scale. The gradient of the bias has
    w's factor.
    """

    rule: ClassVar[Factors]

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return the factors of the output, of x's gradient and of w's gradient."""
        return self.rule(x, self.weight)

    def reset_parameters(self) -> None:
        """Draw the weight from the standard normal distribution."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x w^T + bias``."""
        y = F.linear(x, w)
        return y if bias is None else y + bias.to(y.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out_features]`` from ``[..., in_features]``."""
        check_features(input, self.weight)
        return scaled_product(self.product, input, self.weight, self.bias, self.factors(input))


class UnitLinear(ScaledLinear):
    """Apply a unit-scaled linear layer (factors: ``fmtsim.nn.unit_scaling.linear_factors``)."""

    rule = Factors("UnitScaled", head=False)


class UnitReadout(ScaledLinear):
    """Apply the unit-scaled layer that makes logits: ``1 / K`` forwards, ``N ** -0.5`` and ``T ** -0.5`` backwards."""

    rule = Factors("UnitScaled", head=True)


class MuLinear(ScaledLinear):
    """Apply a hidden layer of muS: ``x w^T / sqrt(fan_in)``, the same factor on the products of the gradients.

    Source: Narayan et al., muS, arXiv:2502.05967.
    """

    rule = Factors("MuScaled", head=False)


class MuReadout(ScaledLinear):
    """Apply the head of muS: ``x w^T / fan_in``; recipes leave it in bfloat16."""

    rule = Factors("MuScaled", head=True)


class MuResidual(nn.Module):
    """Add a normalised branch, ``sqrt(1 - tau) x + sqrt(tau) norm(branch(x))``, as muS does (Res-Post-LayerNorm).

    Args:
        branch: The module of the branch.
        width: Features that are normalised.
        tau: Part of the variance that comes from the branch; the paper takes 0.4 for 4 layers.
    """

    def __init__(self, branch: nn.Module, width: int, tau: float = 0.4) -> None:
        super().__init__()
        if not 0 <= checked("tau", tau, float) <= 1:
            raise ArgumentError(f"tau={tau} is not a part of the variance; choose 0 to 1")
        self.branch, self.norm, self.tau = branch, nn.LayerNorm(width), tau

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to itself."""
        check_features(x, self.norm.weight)
        return math.sqrt(1 - self.tau) * x + math.sqrt(self.tau) * self.norm(self.branch(x))


def mu_parameter_groups(model: nn.Module, lr: float, base_width: int = 256) -> Iterator[dict[str, Any]]:
    """Yield parameter groups whose learning rates carry over from one width to another (muS and, for Adam, u-muP).

    Weights of hidden layers learn at ``lr * sqrt(base_width / fan_in)``, under unit scaling embeddings too (by their
    features); heads, biases, norms and, under muS, embeddings at ``lr``. Weight decay, where an optimizer has one,
    stays the same for all widths.

    Args:
        model: One of UnitLinear or MuLinear layers, or one that ``fmtsim.convert`` scaled.
        lr: The learning rate at ``base_width``.
        base_width: The width at which all rates are equal; 1 gives the numbers of u-muP's own library.

    >>> from fmtsim import convert
    >>> model = nn.Sequential(nn.Linear(1024, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    >>> [group["lr"] for group in mu_parameter_groups(convert(model, recipe="mu_s"), lr=0.5)]
    [0.25, 0.5]
    """
    hidden: dict[Tensor, int] = {}
    for module in model.modules():
        hidden |= dict(_hidden(module, model.__dict__.get(SCALED)))
    for parameter in model.parameters():
        factor = math.sqrt(base_width / hidden[parameter]) if parameter in hidden else 1.0
        yield {"params": [parameter], "lr": lr * factor}


def _hidden(module: nn.Module, how: ScaledModel | None) -> Iterator[tuple[Tensor, int]]:
    """Yield the weights of a module that are of a hidden layer, with their fan-in."""
    if isinstance(module, ScaledLinear):
        if not module.rule.head:
            yield module.weight, module.in_features
    elif how is None or module in how.heads or getattr(module, "owner", None) in how.heads:
        return
    elif isinstance(module, EmulatedModule):
        width = next(iter(module.matrices(module)))[1]
        yield from ((p, width) for _, p in module.named_parameters("", False) if p.dim() > 1)
    elif isinstance(module, nn.Linear):
        yield module.weight, module.in_features
    elif isinstance(module, nn.Embedding) and how.by == "UnitScaled":
        yield module.weight, module.embedding_dim


class _EmulatedScaled(EmulatedModule, ScaledLinear):
    """Quantise the operands of a layer with factors."""

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x w^T + bias`` under the module's quantisers."""
        y = self.gemm(x, w, None)
        return y if bias is None else y + bias.to(y.dtype)


def _emulated(original: type[ScaledLinear]) -> type[EmulatedModule]:
    fields = {"original_class": original, "__doc__": original.__doc__, "__module__": __name__}
    return type(f"Emulated{original.__name__}", (_EmulatedScaled, original), fields)


for _original in (UnitLinear, UnitReadout, MuLinear, MuReadout):
    register_emulated(_emulated(_original))
