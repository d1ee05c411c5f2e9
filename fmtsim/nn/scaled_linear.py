"""Linear layers with fixed factors on their three products, for unit-scaled and mu-scaled models."""

import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.arguments import check_features
from fmtsim.errors import ArgumentError
from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.nn.unit_scaling import linear_factors, scale_backward, scale_forward
from fmtsim.records import checked


class ScaledLinear(nn.Linear):
    """Apply ``y = f (x w^T + bias)`` with a factor of its own for y, for the gradient of x and for that of w.

    Weights begin as standard normal numbers, biases as zeros. Converted by ``fmtsim.convert`` the operands are
    quantised before the factors, which multiply the products: no operand needs a scale. The gradient of the bias has
    w's factor.
    """

    def reset_parameters(self) -> None:
        """Draw the weight from the standard normal distribution."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return the factors of the output, of x's gradient and of w's gradient."""
        raise NotImplementedError

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """Return ``x w^T``."""
        return F.linear(x, w)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out_features]`` from ``[..., in_features]``."""
        check_features(input, self.weight)
        out, of_x, of_w = self.factors(input)
        y = self.product(scale_backward(input, of_x), scale_backward(self.weight, of_w))
        y = y if self.bias is None else y + scale_backward(self.bias, of_w).to(y.dtype)
        return scale_forward(y, out)


class UnitLinear(ScaledLinear):
    """Apply a unit-scaled linear layer (factors: ``fmtsim.nn.unit_scaling.linear_factors``)."""

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return ``K ** -0.5`` twice, and ``T ** -0.5``."""
        return linear_factors(x, self.weight)


class UnitReadout(ScaledLinear):
    """Apply the unit-scaled layer that makes logits: ``1 / K`` forwards, ``N ** -0.5`` and ``T ** -0.5`` backwards."""

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return the three."""
        return linear_factors(x, self.weight, constrained=False, power=1.0)


class MuLinear(ScaledLinear):
    """Apply a hidden layer of muS: ``x w^T / sqrt(fan_in)``, the same factor on the products of the gradients.

    Source: Narayan et al., muS, arXiv:2502.05967.
    """

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return ``fan_in ** -0.5`` three times."""
        return (self.in_features**-0.5,) * 3


class MuReadout(ScaledLinear):
    """Apply the head of muS: ``x w^T / fan_in``; recipes leave it in bfloat16."""

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return ``1 / fan_in`` three times."""
        return (1 / self.in_features,) * 3


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
    """Yield parameter groups of muS: weights of hidden layers at ``lr * sqrt(base_width / fan_in)``, others at ``lr``.

    Weight decay, where an optimizer has one, stays the same for all widths.
    """
    hidden = {module.weight: module.in_features for module in model.modules() if isinstance(module, MuLinear)}
    for parameter in model.parameters():
        factor = math.sqrt(base_width / hidden[parameter]) if parameter in hidden else 1.0
        yield {"params": [parameter], "lr": lr * factor}


class _EmulatedScaled(EmulatedModule, ScaledLinear):
    """Quantise the operands of a layer with factors."""

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """Return ``x w^T`` under the module's quantisers."""
        return self.gemm(x, w, None)


def _emulated(original: type[ScaledLinear]) -> type[EmulatedModule]:
    fields = {"original_class": original, "__doc__": original.__doc__, "__module__": __name__}
    return type(f"Emulated{original.__name__}", (_EmulatedScaled, original), fields)


for _original in (UnitLinear, UnitReadout, MuLinear, MuReadout):
    register_emulated(_emulated(_original))
