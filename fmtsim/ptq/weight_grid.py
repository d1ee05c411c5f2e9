# SPDX-License-Identifier: Apache-2.0
"""The grid of a weight, and rounding to it: to nearest, by GPTQ (later columns make up for errors), learned, by HQQ."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import BlockFormat, LogTileFormat, PackedFormat
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.recipes.ptq_methods import Clip, Gptq, Hqq, LearnedRounding
from fmtsim.rounding.modes import RoundingName
from fmtsim.spec.operand import Keys, block_of, spread
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError


def nearest(w: Tensor, quantizer: Quantizer) -> Tensor:
    """Return a weight as its quantiser rounds it, with the bits of ``fmtsim.convert``'s products; float32."""
    return w if quantizer.format is None else quantize_operand(w, quantizer, Keys()).values(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Hold the values that the elements of a weight may take, each under its own scale.

    Args:
        element: The element format.
        scale: float64 [N, K].
        quantizer: What made the scales, where they may be made anew.
        width: Columns that share scales; 0 where all do, or none, so that scales stay.
        whole: Largest magnitude of the weight under a scale of the tensor, which stays; 0 without one.
    """

    element: Any
    scale: Tensor
    quantizer: Quantizer = Quantizer()
    width: int = 0
    whole: float = 0.0

    def round(self, w: Tensor, columns: slice | int, mode: RoundingName = "nearest_even") -> Tensor:
        """Return values of some columns rounded to the grid, saturating; float64 of w's shape.

        w, its scale and their quotient are float32, as in plain casts.
        """
        s = self.scale[:, columns]
        y = w.float() / s.float()
        return quantize(y, self.element, rounding=mode, overflow="saturate", out_dtype=torch.float64) * s

    def permuted(self, order: Tensor) -> "Grid":
        """Return the grid of the columns in another order."""
        return replace(self, scale=self.scale[:, order])

    def remake(self, start: int, w: Tensor) -> None:
        """Make the scales of one group of columns, in place, as the quantiser makes them of other numbers.

        Args:
            start: The group's first column.
            w: [N, at most width], rounded to float32; beyond ``whole`` it counts as that.
        """
        columns, w = w.shape[1], w.float()
        if self.whole:
            w = torch.nn.functional.pad(w.clamp(-self.whole, self.whole), (0, 2 * self.width - columns))
            w[0, -1] = self.whole  # a group beside them that the scale of the tensor is made of
        self.scale[:, start : start + columns] = _scales(w, self.quantizer)[:, :columns]


def grid_of(w: Tensor, quantizer: Quantizer) -> Grid:
    """Return the grid that a quantiser lays over a weight: scales made of the weight as it is.

    Raises:
        ArgumentError: The quantiser has no grid that stays while elements change.
    """
    fmt = quantizer.format
    blocks = isinstance(fmt, BlockFormat)
    first = quantize_operand(w[:1, :1], quantizer, Keys()) if blocks else None
    hidden = first is not None and (first.scale is None or first.has_row_level)
    if fmt is None or isinstance(fmt, LogTileFormat | PackedFormat) or hidden:
        raise ArgumentError(
            f"weights = {quantizer} have no scales apart from their elements; choose an element format with "
            "scaling=Scaling(...), an MX format or nvfp4, or weights=None"
        )
    width = block_of(quantizer)[1] or 0
    scaling = quantizer.scaling
    two = fmt.tensor_scale if isinstance(fmt, BlockFormat) else scaling is not None and scaling.tensor is not None
    return Grid(
        element=fmt.element if isinstance(fmt, BlockFormat) else fmt,
        scale=_scales(w, quantizer),
        quantizer=quantizer,
        width=width if blocks or scaling is not None else 0,
        whole=float(w.abs().max()) if two else 0.0,
    )


def _scales(w: Tensor, quantizer: Quantizer) -> Tensor:
    """Return the scale of every element of a weight, float64."""
    operand = quantize_operand(w, quantizer, Keys())
    scale = torch.ones(w.shape, dtype=torch.float64)
    if operand.scale is not None:
        scale = spread(operand.scale, operand.block, w.shape).double()
    if operand.tensor_scale is not None:
        scale = scale * operand.tensor_scale.double()
    return torch.where(scale == 0, 2.0**-126, scale)  # a block of zeros under a scale that underflowed


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
    # upper: U with U^T U = h^-1
    h = h[order][:, order]
    lower, fault = torch.linalg.cholesky_ex(h)
    upper, again = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(fault) or int(again) or not bool(torch.isfinite(upper).all()):
        raise ArgumentError(
            f"GPTQ: the Hessian of {hessian.shape[0]} inputs is not positive definite with damping={settings.damping}; "
            "raise Gptq(damping=), or pass more calibration data"
        )
    del h, diagonal, lower  # float64 [K, K]: the loop below needs the factor alone
    grid = grid.permuted(order)
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


def _current(rest: Tensor, errors: Tensor, upper: Tensor, end: int) -> Tensor:
    """Return the weight with those errors of a block taken from the columns behind it that did not reach them yet."""
    w_current = rest.clone()
    w_current[:, end:] -= errors @ upper[:, end:]
    return w_current


def output_error(w: Tensor, q: Tensor, hessian: Tensor) -> Tensor:
    """Return ``|x (w - q)^T|^2`` of each row, float64 [N], from the Hessian ``x^T x``."""
    d = w.double() - q.double()
    return ((d @ hessian.double()) * d).sum(1)


def clip(w: Tensor, hessian: Tensor, quantizer: Quantizer, settings: Clip) -> Tensor:
    """Return a weight whose groups are clipped where that lowers the squared error of what they add to ``x w^T``.

    Args:
        w: [N, K], any float dtype.
        hessian: [K, K], ``x^T x`` of the layer's inputs.
        quantizer: What the clipped weight is rounded by; groups are the columns that share its scales.
        settings: The shares that are tried.
    """
    n, k = w.shape
    width = block_of(quantizer)[1] or k
    count = -(-k // width)
    pad = (0, count * width - k)
    blocks = torch.nn.functional.pad(hessian.double(), pad + pad).unflatten(0, (count, -1)).unflatten(2, (count, -1))
    h = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [count, width, width]: inputs of one group with each other
    top = torch.nn.functional.pad(w.abs(), pad).unflatten(1, (count, width)).amax(-1)
    best, least = top.clone(), torch.full((n, count), float("inf"), dtype=torch.float64)
    for i in range(settings.steps - settings.steps // 2):
        tried = top * (1 - i / settings.steps)
        limit = tried.repeat_interleave(width, 1)[:, :k]
        q = nearest(torch.clamp(w, -limit, limit), quantizer)
        d = torch.nn.functional.pad(w.double() - q.double(), pad).unflatten(1, (count, width))
        error = (torch.einsum("ngi,gij->ngj", d, h) * d).sum(-1)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    limit = best.repeat_interleave(width, 1)[:, :k]
    return torch.clamp(w, -limit, limit)


def hqq(w: Tensor, quantizer: Quantizer, settings: Hqq) -> Tensor:
    """Round a weight under zero points that half-quadratic splitting moves; float32 [N, K], no random numbers.

    Args:
        w: [N, K], any float dtype.
        quantizer: An unsigned integer block format with zero points whose groups divide K.
        settings: Steps, norm and weight of the error.

    Raises:
        ArgumentError: The quantiser has no zero points, or groups that do not divide K.
    """
    fmt = quantizer.format
    width = block_of(quantizer)[1] or w.shape[1]
    if not (isinstance(fmt, BlockFormat) and fmt.zero_point and fmt.block[0] == 1) or w.shape[1] % width:
        raise ArgumentError(
            f"HQQ rounds groups that divide K={w.shape[1]} to unsigned integers with zero points, not {quantizer}; "
            "choose w = Quantizer(format=get_format('uint4_g64_zp')) or another group"
        )
    levels, g = float(fmt.element.max), w.float().reshape(-1, width)
    # 1. Codes are round(w scale + zero): the range of a group fills the grid.
    low, high = g.amin(1, keepdim=True), g.amax(1, keepdim=True)
    scale = torch.where(high - low <= 1e-4, 1.0, levels / (high - low)).clamp(max=2e4)
    zero, least = -low * scale, torch.tensor(float("inf"))
    for _ in range(settings.steps):
        codes = torch.round(g * scale + zero).clamp(0, levels)
        off = g - (codes - zero) / scale
        # 2. Shrink the error: what is left of it should be sparse.
        size = off.abs()
        sparse = (size - size.pow(settings.norm - 1) * (1 / settings.beta)).clamp(min=0) * off.sign()
        # 3. Move the zero point to the mean that codes and the weight without the sparse error agree on.
        zero = (codes - (g - sparse) * scale).mean(1, keepdim=True)
        error = size.mean()
        if not error < least:
            break
        least = error
    codes = torch.round(g * scale + zero).clamp(0, levels)
    return ((codes - zero) * (1 / scale)).reshape(w.shape)


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
        # turn choices, in place, column by column, where the output error falls
        slope = (chosen - w) @ h  # half the gradient of the error
        for start in range(0, w.shape[1], BLOCK):
            end = min(start + BLOCK, w.shape[1])
            changes = torch.empty(w.shape[0], end - start, dtype=torch.float64)
            for j in range(start, end):
                other = torch.where(chosen[:, j] == low[:, j], high[:, j], low[:, j])
                change = other - chosen[:, j]
                change = torch.where(2 * change * slope[:, j] + change * change * h[j, j] < 0, change, 0.0)
                chosen[:, j] = torch.where(change != 0, other, chosen[:, j])
                slope[:, j + 1 : end] += change[:, None] * h[j, j + 1 : end]
                changes[:, j - start] = change
            slope[:, end:] += changes @ h[start:end, end:]
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
