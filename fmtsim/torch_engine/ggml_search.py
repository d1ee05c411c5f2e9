# SPDX-License-Identifier: Apache-2.0
"""The searches of ggml's reference encoders for the scales of parts of a block that err least, as float32 computes it.

Arguments ``x`` are [size, parts]: the elements of a part run down a column, so that sums go row by row, in ggml's
order. Searches return scales [parts] and codes [size, parts], which stay where the stored scale is zero.
"""

from collections.abc import Callable, Iterable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fmtsim.formats.packed import PackedFormat

Tried = tuple[Tensor, ...]
"""What gives the codes that a search tried."""
Fit = tuple[Tensor, Tensor, Tried]
"""Scales and minima of parts, and what was tried."""

LEAST = 1e-15  # largest magnitudes below are zero (GROUP_MAX_EPS)
_FAR = -4194304.0  # what nearest_int makes of infinities


def over(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a / b rounded once: torch multiplies by a reciprocal in the place of some divisions by or of a number."""
    device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]
    return torch.div(*(t if isinstance(t, Tensor) else torch.full((1,), t, device=device) for t in (a, b)))


def total(rows: Iterable[Tensor]) -> Tensor:
    """Return the sum of rows, from the first to the last, in float32."""
    first, *others = rows
    return reduce(Tensor.add_, others, first + 0.0)


def signed_largest(x: Tensor) -> Tensor:
    """Return the first of the numbers of largest magnitude along dimension 1, kept; 0 for -0."""
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    largest, tied = torch.where(high > -low, high, low), (high == -low).squeeze(1)
    if bool(tied.any()):
        one = first(x[tied], x[tied].abs() == high[tied].abs())
        largest[tied] = torch.where(one == 0, 0.0, one)
    return largest


def first(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the first chosen number along dimension 1, kept."""
    return x.gather(1, chosen.to(torch.uint8).argmax(1, keepdim=True))


def nearest(x: Tensor, low: float, high: float) -> Tensor:
    """Return ggml's nearest_int of x, to nearest even, NaN as 0 and infinities as the lowest, clamped, in float32."""
    return x.nan_to_num(nan=0.0, posinf=_FAR, neginf=_FAR).round_().clamp_(low, high)


def nearest_wrapped(x: Tensor) -> Tensor:
    """Return nearest_int of any x, int32: the last bits of x + 1.5 * 2**23, wrapped beyond 2**22."""
    return ((x + 12582912.0).view(torch.int32) & 0x7FFFFF) - 0x400000


def reciprocal_or_zero(d: Tensor) -> Tensor:
    """Return 1 / d, 0 of 0."""
    return torch.where(d == 0, 0.0, over(1.0, d))


def coded(codes: Tensor, d: Tensor, inverse: Tensor, otherwise: int = 0) -> Tensor:
    """Return int8 codes as uint8; products that are not finite are the integer 0 in C, ``otherwise`` here."""
    usable = inverse.isfinite() & d.isfinite()
    return (codes if bool(usable.all()) else torch.where(usable, codes, otherwise)).view(torch.uint8)


def parts_of(x: Tensor, fmt: PackedFormat) -> Tensor:
    """Return blocks [blocks, elements] as parts [size, blocks * count]."""
    return x.reshape(-1, fmt.part).T.contiguous()


def fit_largest(x: Tensor, fmt: PackedFormat) -> tuple[Tensor, Tensor]:
    """Return scales [blocks, 1] and codes."""
    d = over(signed_largest(x), -float(fmt.zero))
    inverse = reciprocal_or_zero(d)
    codes = (x * inverse).add_(fmt.zero + 0.5).to(torch.int8).clamp_(max=2 * fmt.zero - 1)
    return d, coded(codes, d, inverse)


def fit_signed(x: Tensor, fmt: PackedFormat) -> Fit:
    """Return a scale for each part, of integers with a sign."""
    parts = parts_of(x, fmt)
    scale, codes = search_3bit(parts) if fmt.zero == 4 else search_signed(parts, fmt.zero)
    return scale, torch.zeros_like(scale), (parts, codes)


def recode(tried: Tried, d: Tensor, offset: Tensor, low: int, high: int, fmt: PackedFormat) -> Tensor:
    """Return the codes [blocks, elements] of parts under stored scales, those of the search where the scale is 0."""
    x, codes = tried
    counted = nearest(over(x + offset, d), low, high).sub_(low)
    return torch.where(d == 0, codes, counted).to(torch.uint8).T.reshape(-1, fmt.elements)


def fit_range(x: Tensor, fmt: PackedFormat) -> Fit:
    """Fit ``scale * code - minimum`` to parts (make_qkx2_quants), errors or their squares weighted by magnitudes."""
    top, steps, first = int(fmt.search[0]), int(fmt.search[1]), fmt.search[2]
    x, absolute = parts_of(x, fmt), top == 3
    weights = x.abs()
    if not absolute:
        mean = over(total(x * x), float(fmt.part))
        weights += mean.double().sqrt_().float()  # rounded to nearest, as torch's float32 root on a CPU is not
    low, high = torch.aminmax(x, dim=0)
    low = low.clamp(max=0.0)
    sum_w, sum_x = total(weights), total(weights * x)

    def codes_for(inverse: Tensor, minimum: Tensor) -> Tensor:  # an infinite one gives 0, of NaN and of Inf
        return (x - minimum).mul_(torch.where(inverse.isfinite(), inverse, 0.0)).round_().clamp_(0, top)

    def error(scale: Tensor, codes: Tensor, minimum: Tensor) -> Tensor:
        difference = (scale * codes).add_(minimum).sub_(x)
        difference = difference.abs_() if absolute else difference.mul_(difference)
        return total(difference.mul_(weights))

    # 1. the scale that spans the range
    inverse = over(float(top), high - low)
    scale, minimum, codes = over(1.0, inverse), low, codes_for(inverse, low)
    best, f = error(scale, codes, minimum), np.float32
    for i in range(steps + 1):
        # 2. a scale from the best minimum so far, and the least-squares scale and minimum for its codes
        tried = codes_for(over(float(f(first) + f(0.1) * f(i) + f(top)), high - minimum), minimum)
        weighted = weights * tried
        sum_l, sum_l2, sum_xl = total(weighted), total(weighted * tried), total(weighted.mul_(x))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_minimum = over(sum_l2 * sum_x - sum_l * sum_xl, determinant)
        positive = new_minimum > 0
        new_scale = torch.where(positive, over(sum_xl, sum_l2), over(sum_w * sum_xl - sum_x * sum_l, determinant))
        new_minimum = torch.where(positive, 0.0, new_minimum)
        # 3. taken where they err less
        new = error(new_scale, tried, new_minimum)
        better = (determinant > 0) & (new < best)
        best, scale = torch.where(better, new, best), torch.where(better, new_scale, scale)
        minimum, codes = torch.where(better, new_minimum, minimum), torch.where(better, tried, codes)
    # 4. parts of one number that is not positive are their minimum alone
    flat = high == low
    return torch.where(flat, 0.0, scale), -torch.where(flat, low, minimum), (x, torch.where(flat, 0.0, codes))


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of largest magnitude of every part, 1 where it counts as zero, and where it does."""
    largest = signed_largest(x.T).squeeze(1)
    zero = largest.abs() < LEAST
    return torch.where(zero, 1.0, largest), zero


def _best_scale(
    inverses: Iterable[Tensor], sums: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the least-squares scale that fits best among those for the codes of inverse scales, and its codes.

    ``sums`` returns codes, the weighted sum of products with x and that of squares.
    """
    first, *others = inverses
    codes, products, squares = sums(first)
    scale = torch.where(squares > 0, over(products, squares), 0.0)
    best = scale * products
    for inverse in others:
        tried, products, squares = sums(inverse)
        better = (squares > 0) & (products * products > best * squares)
        scale = torch.where(better, over(products, squares), scale)
        best, codes = torch.where(better, scale * products, best), torch.where(better, tried, codes)
    return scale, codes


def search_signed(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Fit ``scale * (code - top)`` (make_qx_quants): the best of 19 scales around ``-top / largest``."""
    (largest, zero), f = _largest(x), np.float32

    def sums(inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = (x * inverse).round_().clamp_(-top, top - 1)
        return codes, *_fit(x, codes)

    numerators = [float(-(f(top) + f(0.1) * f(i))) for i in (0, *range(-9, 0), *range(1, 10))]
    scale, codes = _best_scale((over(numerator, largest) for numerator in numerators), sums)
    return torch.where(zero, 0.0, scale), torch.where(zero, 0.0, codes + top)


def _fit(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of x^2 x c and of x^2 c c."""
    weights = x * x
    return total((weights * x).mul_(codes)), total((weights * codes).mul_(codes))


def search_3bit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Fit ``scale * (code - 4)`` (make_q3_quants): five rounds in which a code changes where that errs less."""
    (largest, zero), top = _largest(x), 4
    codes = (x * over(-4.0, largest)).round_().clamp_(-top, top - 1)
    products, squares = _fit(x, codes)
    for _ in range(5):
        for weight, value, code in zip(x * x, x, codes, strict=True):
            # 1. the sums without an element, and its best code beside the others
            new_products, new_squares = products - weight * value * code, squares - weight * code * code
            new = nearest_wrapped(over(value * new_squares, new_products)).clamp_(-top, top - 1).float()
            changed = (new_products > 0) & (new != code)
            # 2. taken where the fit gains
            new_products, new_squares = new_products + weight * value * new, new_squares + weight * new * new
            gains = new_products * new_products * squares > products * products * new_squares
            changed &= (new_squares > 0) & gains
            code.copy_(torch.where(changed, new, code))
            products = torch.where(changed, new_products, products)
            squares = torch.where(changed, new_squares, squares)
    scale = torch.where(squares > 0, over(products, squares), 0.0)
    return torch.where(zero, 0.0, scale), torch.where(zero, 0.0, codes + top)


def search_codebook(x: Tensor, values: tuple[float, ...], tries: int) -> tuple[Tensor, Tensor]:
    """Fit ``scale * values[code]``: the best of ``2 * tries + 2`` scales, of one where tries is 0."""
    largest, zero = _largest(x)

    def sums(inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = nearest_value(x * inverse, values)
        tried = values_of(codes, values)
        weighted = x * x * tried  # ggml's order of factors
        return codes, total(weighted * x), total(weighted.mul_(tried))

    inverses = [over(1.0, over(-largest if tries else largest, float(values[0])))]
    if tries:
        inverses += [over(float(i + values[0]), largest) for i in range(-tries, tries + 1)]
    scale, codes = _best_scale(inverses, sums)
    return torch.where(zero, 0.0, scale), torch.where(zero, 0, codes)


def nearest_value(x: Tensor, values: tuple[float, ...]) -> Tensor:
    """Return the index of the value of a rising codebook that is nearest, of two the upper one; int32."""
    middles = [(low + high) / 2 for low, high in zip(values, values[1:], strict=False)]
    return torch.bucketize(x, torch.tensor(middles, device=x.device), right=True, out_int32=True)


def values_of(codes: Tensor, values: tuple[float, ...]) -> Tensor:
    """Return the values of a codebook's codes, float32."""
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)
