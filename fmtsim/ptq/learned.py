"""Learned rounding: decide up or down for each weight by the error of the layer's output."""

import torch
from torch import Tensor

from fmtsim.ptq.gptq import output_error
from fmtsim.ptq.grid import Grid
from fmtsim.ptq.spec import LearnedRounding

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
    step, before = high - low, output_error(w, plain, h)
    share = torch.where(step > 0, (w - low) / torch.where(step > 0, step, 1.0), 0.0).clamp(0, 1)
    s = ((share + STRETCH) / (1 + 2 * STRETCH)).clamp(1e-6, 1 - 1e-6)
    narrow, start, gap, h32 = (t.float() for t in (w, low, step, h / before.sum().clamp(min=1e-300)))
    v = torch.log(s / (1 - s)).float().requires_grad_()
    adam = torch.optim.Adam([v], lr=settings.rate)
    with torch.enable_grad():
        for i in range(settings.steps):
            soft = (torch.sigmoid(v) * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)
            d = narrow - (start + gap * soft)
            loss = ((d @ h32) * d).sum()
            done = (i / settings.steps - settings.warmup) / (1 - settings.warmup)
            if done >= 0 and settings.regularisation:
                beta = settings.beta[0] + (settings.beta[1] - settings.beta[0]) * done
                loss = loss + settings.regularisation * (1 - (2 * soft - 1).abs().pow(beta)).mean()
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    up = torch.sigmoid(v.detach()) >= 0.5
    learned = torch.where(up, high, low)
    better = output_error(w, learned, h) < before
    chosen = torch.where(better[:, None], learned, plain)
    for _ in range(settings.sweeps):
        _sweep(w, chosen, low, high, h)
    return chosen


def _sweep(w: Tensor, q: Tensor, low: Tensor, high: Tensor, h: Tensor) -> None:
    """Turn choices, in place, column by column, where the output error falls."""
    slope = (q - w) @ h  # half the gradient of the error
    for j in range(w.shape[1]):
        other = torch.where(q[:, j] == low[:, j], high[:, j], low[:, j])
        change = other - q[:, j]
        change = torch.where(2 * change * slope[:, j] + change * change * h[j, j] < 0, change, 0.0)
        q[:, j] = torch.where(change != 0, other, q[:, j])
        slope += change[:, None] * h[j]
