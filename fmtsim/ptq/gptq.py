# SPDX-License-Identifier: Apache-2.0
"""GPTQ: round a weight column by column, the columns that are left making up for each error."""

import torch
from torch import Tensor

from fmtsim.ptq.grid import Grid
from fmtsim.ptq.spec import Gptq
from fmtsim.support.errors import ArgumentError

BLOCK = 128  # columns whose errors reach the rest of the weight in one product


def gptq(w: Tensor, hessian: Tensor, grid: Grid, settings: Gptq) -> Tensor:
    """Round a weight so that the squared error of ``x w^T`` stays small.

    With H = hessian + damping * mean(diag) * I, the columns in the order given, and U the upper Cholesky factor of
    ``H^-1`` (``U^T U``): column j becomes q = round(w_j), and ``(w_j - q) / U_jj * U_jk`` is taken from every later
    column k. All in float64. ``act_order`` takes columns by falling diagonal of the hessian (stable). Where groups are
    not static, scales are made anew at the first column of each group, in the order that columns are taken.

    Args:
        w: [N, K], any float dtype.
        hessian: [K, K], ``x^T x`` of the layer's inputs, up to a factor.
        grid: What to round to, with the scales of the original weight.
        settings: Damping, which also keeps inputs that are linearly dependent from dividing by zero, order and groups.

    Returns:
        [N, K], float64, on the grid. A column whose input is always zero is rounded to nearest.

    Raises:
        ArgumentError: H is not positive definite.
    """
    h = hessian.double().clone()
    diagonal = h.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    diagonal += settings.damping * diagonal[~dead].mean() if not bool(dead.all()) else 0.0
    order = diagonal.argsort(descending=True, stable=True) if settings.act_order else torch.arange(w.shape[1])
    upper, grid = _factor(h[order][:, order], settings.damping), grid.permuted(order)
    rest, q = w.double()[:, order].clone(), torch.empty(w.shape, dtype=torch.float64)
    for start in range(0, w.shape[1], BLOCK):
        end = min(start + BLOCK, w.shape[1])
        errors = torch.empty(w.shape[0], end - start, dtype=torch.float64)
        before = rest.clone() if settings.groups == "lazy" else rest
        for j in range(start, end):
            if settings.groups != "static" and grid.width and j % grid.width == 0:
                if settings.groups == "dynamic" and j + grid.width > end:
                    before = _current(rest, errors[:, : j - start], upper[start:j], end)
                grid.remake(j, before[:, j : j + grid.width])
            q[:, j] = grid.round(rest[:, j], j)
            error = (rest[:, j] - q[:, j]) / upper[j, j]
            rest[:, j + 1 : end] -= error[:, None] * upper[j, j + 1 : end]
            errors[:, j - start] = error
        rest[:, end:] -= errors @ upper[start:end, end:]
    result = torch.empty_like(q)
    result[:, order] = q
    return result


def _factor(h: Tensor, damping: float) -> Tensor:
    """Return U with ``U^T U = h^-1``."""
    lower, fault = torch.linalg.cholesky_ex(h)
    upper, again = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(fault) or int(again) or not bool(torch.isfinite(upper).all()):
        raise ArgumentError(
            f"GPTQ: the Hessian of {h.shape[0]} inputs is not positive definite with damping={damping}; "
            "raise Gptq(damping=), or pass more calibration data"
        )
    return upper


def _current(rest: Tensor, errors: Tensor, upper: Tensor, end: int) -> Tensor:
    """Return the weight with those errors of a block taken from the columns behind it that did not reach them yet."""
    found = rest.clone()
    found[:, end:] -= errors @ upper[:, end:]
    return found


def output_error(w: Tensor, q: Tensor, hessian: Tensor) -> Tensor:
    """Return ``|x (w - q)^T|^2`` of each row, float64 [N], from the Hessian ``x^T x``."""
    d = w.double() - q.double()
    return ((d @ hessian.double()) * d).sum(1)
