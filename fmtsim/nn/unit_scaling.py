# SPDX-License-Identifier: Apache-2.0
"""Unit scaling: operations whose outputs and gradients have unit variance at initialisation, by fixed factors.

Each operation multiplies its output by one number, and the gradients of its inputs by others; none is measured. By
default the gradient of an activation is multiplied by the factor of the output, so that gradients are those of the
function that runs; weights get a factor of their own, which an optimizer that divides by the gradient's size ignores.

Source: Blake et al., Unit Scaling, arXiv:2303.11257, and u-muP, arXiv:2407.17465; unit-scaling a7b5b3c, functional.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_OF_RELU = (2 / (1 - 1 / math.pi)) ** 0.5  # 1 over the standard deviation of relu(x), x normal


class _Scaled(torch.autograd.Function):
    """Multiply by one number forwards and by another backwards."""

    @staticmethod
    def forward(x: Tensor, forward: float | Tensor, backward: float) -> Tensor:
        """Return ``x * forward``, x itself where that is 1."""
        return x.view_as(x) if isinstance(forward, float) and forward == 1 else x * forward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the other number."""
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return ``g * backward``."""
        return (g if ctx.factor == 1 else g * ctx.factor), None, None


def scale_forward(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``x * factor`` with the gradient of x itself: the gradient is not multiplied."""
    by = factor if isinstance(factor, Tensor) else float(factor)
    return _Scaled.apply(x, by, 1.0)  # type: ignore[no-any-return, no-untyped-call]


def scale_backward(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient is multiplied by ``factor``."""
    return _Scaled.apply(x, 1.0, float(factor))  # type: ignore[no-any-return, no-untyped-call]


def interpolated(weight: float, low: float, high: float) -> float:
    """Return ``low ** (1 - weight) * high ** weight``, the empirical model of a nonlinearity's size."""
    return math.exp(weight * math.log(high) + (1 - weight) * math.log(low))


def scaled_product(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    factors: tuple[float, float, float],
) -> Tensor:
    """Return ``product(x, w, bias)`` times the first factor; x's gradient has the second, w's and bias's the third."""
    out, of_x, of_w = factors
    bias = None if bias is None else scale_backward(bias, of_w)
    return scale_forward(product(scale_backward(x, of_x), scale_backward(w, of_w), bias), out)


def linear_factors(x: Tensor, w: Tensor, *, constrained: bool = True, power: float = 0.5) -> tuple[float, float, float]:
    """Return the factors of ``x w^T``: of the output, of x's gradient, of w's (and a bias's) gradient.

    They are ``K ** -power``, ``N ** -0.5`` and ``T ** -0.5`` with w [N, K] and T rows of x; ``constrained`` makes the
    second one the first. Readouts take ``power=1`` and no constraint.
    """
    n, k = w.shape
    out, back = k**-power, n**-0.5
    return out, out if constrained else back, max(x.numel() // k, 1) ** -0.5  # w's gradient sums over the rows of x


class Factors(NamedTuple):
    """Describe the factors of a linear layer's three products.

    Attributes:
        by: ``"UnitScaled"``, those of ``linear_factors``; or ``"MuScaled"``, ``K ** -0.5`` for all three, so that the
            gradient is the function's own.
        head: Whether the layer makes logits: its output has ``1 / K``.
    """

    by: str
    head: bool

    def __call__(self, x: Tensor, w: Tensor) -> tuple[float, float, float]:
        """Return the factors of the output, of x's gradient and of w's gradient."""
        power = 1.0 if self.head else 0.5
        if self.by == "MuScaled":
            return (w.shape[1] ** -power,) * 3  # one factor: the gradient is the function's own
        return linear_factors(x, w, constrained=not self.head, power=power)

    def __str__(self) -> str:
        return f"times 1 / {'K' if self.head else 'sqrt(K)'}"


def matmul(a: Tensor, b: Tensor, *, constrained: bool = True) -> Tensor:
    """Return ``a b`` times ``K ** -0.5``; unconstrained gradients have ``N ** -0.5`` (of a) and ``M ** -0.5``."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    out = k**-0.5
    of_a, of_b = (out, out) if constrained else (n**-0.5, m**-0.5)  # the gradient of a sums over N, that of b over M
    return scale_forward(scale_backward(a, of_a) @ scale_backward(b, of_b), out)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of a weight ``[V, features]`` whose gradient is multiplied by ``sqrt(V / tokens)``."""
    return F.embedding(tokens, scale_backward(weight, (weight.shape[0] / tokens.numel()) ** 0.5))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension; gradients of weight and bias are multiplied by ``sqrt(features / elements)``."""
    factor = (x.shape[-1] / x.numel()) ** 0.5
    weight, bias = (None if p is None else scale_backward(p, factor) for p in (weight, bias))
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Divide by the root mean square of the last dimension; the weight's gradient is scaled as in ``layer_norm``."""
    factor = (x.shape[-1] / x.numel()) ** 0.5
    return F.rms_norm(x, x.shape[-1:], None if weight is None else scale_backward(weight, factor), eps)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return ``(a + b) / sqrt(2)`` of tensors of one shape."""
    return scale_forward(scale_backward(a, 0.5**0.5) + scale_backward(b, 0.5**0.5), 0.5**0.5)


def residual_split(x: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return x for a residual branch and for its skip connection; ``residual_add`` has the other half of the factors.

    Gradients are multiplied by ``tau / sqrt(1 + tau^2)`` and ``1 / sqrt(1 + tau^2)`` here, values there.
    """
    whole = (1 + tau**2) ** 0.5
    return scale_backward(x, tau / whole), scale_backward(x, 1 / whole)


def residual_add(branch: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Return ``(tau branch + skip) / sqrt(1 + tau^2)``, whose gradients are not multiplied."""
    whole = (1 + tau**2) ** 0.5
    return scale_forward(branch, tau / whole) + scale_forward(skip, 1 / whole)


def relu(x: Tensor, *, constrained: bool = True) -> Tensor:
    """Return ``relu(x)``, scaled: the limit of ``gelu`` for a large ``mult``, by the variance of half a normal."""
    out = _OF_RELU
    return scale_forward(F.relu(scale_backward(x, out if constrained else 2**0.5)), out)  # half passes


def gelu(x: Tensor, mult: float = 1.0, *, constrained: bool = True, approximate: str = "none") -> Tensor:
    """Return ``gelu(mult x) / mult``, scaled; ``approximate`` is torch's."""
    weight = 1 / (1 + 0.25 / mult**2)  # from x / 2 for a small mult (0) to relu(x) for a large one (1)
    out = interpolated(weight, 2.0, _OF_RELU)
    back = out if constrained else interpolated(weight, 2.0, 2**0.5)
    return scale_forward(F.gelu(scale_backward(x, back) * mult, approximate=approximate) / mult, out)


def silu(x: Tensor, mult: float = 1.0, *, constrained: bool = True) -> Tensor:
    """Return ``x sigmoid(mult x)``, scaled."""
    out = interpolated(1 / (1 + 0.25 / mult**2), 2.0, _OF_RELU)
    back = out if constrained else interpolated(1 / (1 + 1 / mult**2), 2.0, 2**0.5)
    x = scale_backward(x, back)
    return scale_forward(x * torch.sigmoid(x * mult), out)


def silu_glu(x: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """Return ``x gate sigmoid(mult gate)``, scaled; both gradients have the output's factor."""
    factor = interpolated(1 / (1 + 1 / mult**2), 2.0, 2**0.5)
    x, gate = scale_backward(x, factor), scale_backward(gate, factor)
    return scale_forward(x * gate * torch.sigmoid(gate * mult), factor)


def softmax(x: Tensor, mult: float = 1.0, *, constrained: bool = True) -> Tensor:
    """Return the softmax of ``mult x`` over the last dimension of n, scaled between ``n`` (flat) and ``sqrt(n)``."""
    n, weight = x.shape[-1], 1 / (1 + 4 / mult**2)  # from a flat softmax (0) to one key's (1)
    out = interpolated(weight, n, n**0.5)
    back = out if constrained else interpolated(weight, n / mult, (n / mult) ** 0.5)
    return scale_forward(F.softmax(scale_backward(x, back) * mult, -1), out)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, mult: float = 1.0, dropout_p: float = 0.0, **masks: Any
) -> Tensor:
    """Return scaled dot product attention with logits ``mult q k^T / d``, scaled.

    ``masks`` are ``attn_mask`` and ``enable_gqa`` of torch's function; the factor does not look at a mask.
    """
    length, d = v.shape[-2], q.shape[-1]
    # flat weights make a mean of the values; under a causal mask 1 / keys is log(L) / L on average
    flat = (math.log(length) / length) ** 0.5 if is_causal and length > 1 else length**-0.5
    factor = (1 - dropout_p) ** 0.5 / interpolated(1 / (1 + 4 * d / mult**2), flat, 1.0)
    q, k, v = (scale_backward(t, factor) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=mult / d, **masks)
    return scale_forward(y, factor)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Return the mean cross entropy; the gradient of the logits is that of the sum times ``V / sqrt(V - 1)``.

    Rows whose target is ``ignore_index`` count neither in the mean nor in the sum; ``reduction`` is ``"mean"`` or
    ``"sum"``, both with the same gradient.
    """
    classes = logits.shape[-1]
    logits = scale_backward(logits, classes / (classes - 1) ** 0.5)  # over the deviation of 1 / V - one_hot(target)
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignore_index)
    if reduction == "sum":
        return loss
    count = (targets != ignore_index).sum().double().reciprocal()  # exact in float64, rounded once
    return scale_forward(loss, count.to(loss.dtype))


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Return dropout times ``sqrt(1 - p)``, values and gradients, in training and in evaluation alike."""
    factor = (1 - p) ** 0.5  # torch's dropout divides by 1 - p, so its variance grows by that
    return scale_forward(F.dropout(scale_backward(x, factor), p, training), factor)
