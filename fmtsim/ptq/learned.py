# SPDX-License-Identifier: Apache-2.0
"""Learned rounding: decide up or down for each weight by the error of the layer's output."""

import torch
from torch import Tensor

from fmtsim.ptq.gptq import BLOCK, output_error
from fmtsim.ptq.grid import Grid
from fmtsim.ptq.spec import LearnedRounding

PIECE = 1 << 16  # elements that are learned together, so that they stay in the cache
STRETCH = 0.1  # the sigmoid reaches from -0.1 to 1.1 before it is clipped, so that 0 and 1 are reached


def learned_rounding(w: Tensor, hessian: Tensor, grid: Grid, settings: LearnedRounding) -> Tensor:
    """Round every weight to one of its two neighbours on the grid so that the squared error of ``x w^T`` is small.

    The choice is relaxed to ``h = clip(1.2 sigmoid(v) - 0.1, 0, 1)``, ``low + (high - low) h``, and v follows Adam down
    the squared output error, divided by that of nearest rounding, plus ``regularisation`` times the mean of
    ``1 - |2 h - 1|**beta``. Rows are independent of each other: one that ends above the error of rounding to nearest
    is rounded to nearest. Then ``sweeps`` passes over the columns turn every choice whose turning lowers the error of
    its row (this step is not the source's). So no row is ever worse than nearest on the data of the Hessian. No random
    numbers.

    Args:
        w: [N, K].
        hessian: [K, K], ``x^T x`` of the layer's inputs.
        grid: What to round to.
        settings: Steps and rates.

    Returns:
        [N, K], float64, on the grid.
    """
    w, h = w.double(), hessian.double()
    low, high = grid.round(w, slice(None), "down"), grid.round(w, slice(None), "up")
    plain = grid.round(w, slice(None))
    before = output_error(w, plain, h)
    h32, weight = (h / before.sum().clamp(min=1e-300)).float(), settings.regularisation / w.numel()
    rows = max(1, PIECE // max(1, w.shape[1]))
    up = [
        _up(*parts, h32, weight, settings)
        for parts in zip(w.split(rows), low.split(rows), high.split(rows), strict=True)
    ]
    learned = torch.where(torch.cat(up), high, low)
    better = output_error(w, learned, h) < before
    chosen = torch.where(better[:, None], learned, plain)
    for _ in range(settings.sweeps):
        _sweep(w, chosen, low, high, h)
    return chosen


def _up(w: Tensor, low: Tensor, high: Tensor, h: Tensor, weight: float, settings: LearnedRounding) -> Tensor:
    """Return where to round rows up, bool, by Adam in float32; gradients are written out, for speed."""
    gap = high - low
    share = torch.where(gap > 0, (w - low) / torch.where(gap > 0, gap, 1.0), 0.0).clamp(0, 1)
    s = (share + STRETCH) / (1 + 2 * STRETCH)  # at least 1/12 from 0 and 1
    v = torch.log(s / (1 - s)).float()
    off, gap = (w - low).float(), gap.float()
    slope = gap * (-2 * (1 + 2 * STRETCH))
    adam = _Adam(v, settings.rate)
    for i in range(settings.steps):
        s = torch.sigmoid(v)
        soft = (s * (1 + 2 * STRETCH)).sub_(STRETCH).clamp_(0, 1)
        grad = (torch.addcmul(off, gap, soft, value=-1) @ h).mul_(slope)  # h is symmetric
        far = soft.mul_(2).sub_(1)
        size = far.abs()
        inner = size < 1  # elsewhere the clamp stops the gradient
        done = (i / settings.steps - settings.warmup) / (1 - settings.warmup)
        if done >= 0 and weight:
            beta = settings.beta[0] + (settings.beta[1] - settings.beta[0]) * done
            grad.sub_(size.pow_(beta - 1).copysign_(far), alpha=2 * beta * weight * (1 + 2 * STRETCH))
        adam.step(grad.mul_(s).mul_(s.neg_().add_(1)).mul_(inner))
    return torch.sigmoid(v) >= 0.5


class _Adam:
    """Move numbers by Adam (Kingma and Ba, arXiv:1412.6980) with its usual constants, in place."""

    def __init__(self, v: Tensor, rate: float) -> None:
        self._v, self._rate, self._steps = v, rate, 0
        self._first, self._second = torch.zeros_like(v), torch.zeros_like(v)

    def step(self, grad: Tensor) -> None:
        """Make one step."""
        self._steps += 1
        self._first.lerp_(grad, 0.1)
        self._second.mul_(0.999).addcmul_(grad, grad, value=0.001)
        c1, c2 = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        self._v.addcdiv_(self._first, (self._second / c2).sqrt_().add_(1e-8), value=-self._rate / c1)


def _sweep(w: Tensor, q: Tensor, low: Tensor, high: Tensor, h: Tensor) -> None:
    """Turn choices, in place, column by column, where the output error falls."""
    slope = (q - w) @ h  # half the gradient of the error
    for start in range(0, w.shape[1], BLOCK):
        end = min(start + BLOCK, w.shape[1])
        changes = torch.empty(w.shape[0], end - start, dtype=torch.float64)
        for j in range(start, end):
            other = torch.where(q[:, j] == low[:, j], high[:, j], low[:, j])
            change = other - q[:, j]
            change = torch.where(2 * change * slope[:, j] + change * change * h[j, j] < 0, change, 0.0)
            q[:, j] = torch.where(change != 0, other, q[:, j])
            slope[:, j + 1 : end] += change[:, None] * h[j, j + 1 : end]
            changes[:, j - start] = change
        slope[:, end:] += changes @ h[start:end, end:]
