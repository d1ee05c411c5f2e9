# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transform that spreads outliers over a group before it is quantised, defined to the last bit."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fmtsim.casts.lanes import define_gradient, define_operator
from fmtsim.casts.ops import fused_engine, load_engine
from fmtsim.casts.quantize import quantize
from fmtsim.formats.packing import tensor_of_bytes
from fmtsim.scaling.hadamard_matrix import Signs, base_matrix, base_of, check_signs, mask_bits, sign_bits
from fmtsim.support.dispatch import is_dense, is_direct
from fmtsim.support.errors import ArgumentError, DtypeError, shown

# Elements that are transformed together: on a CPU they and their sums stay in the second-level cache.
_MOST = {"cpu": 1 << 18}
_MOST_ELSEWHERE = 1 << 26


def transform(x: Tensor, size: int, dim: int, matrix: Tensor, flips: Tensor | None, inverse: bool) -> Tensor:
    """Return the transform of every group of ``size`` neighbours along dim: float32, contiguous, NaN canonical.

    Args:
        x: Floats of any strides; size divides ``x.shape[dim]``.
        size: The order of the base matrix times a power of two.
        dim: The dimension, negative.
        matrix: The base, int8 [b, b].
        flips: bool [size] on x's device, elements that change their sign; None is none.
        inverse: Apply the transposed matrix and then the signs.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    across = math.prod(x.shape[x.dim() + dim + 1 :])
    blocks = x.contiguous().view(-1, size, across)
    target = out.view(blocks.shape)
    base = len(matrix)
    # for every four terms which of eight sums each result takes, int64 [b], and its sign, float32 [b, 1]
    plan = _sum_plan(matrix.numpy().tobytes(), len(matrix), inverse, x.device) if base > 1 else ()
    factor = root(size)
    negated = None if flips is None else flips[:, None]
    for part in _parts(len(blocks), size, across, _MOST.get(x.device.type, _MOST_ELSEWHERE)):
        # a plane for each place of a group: additions run along planes (steps 1 to 4 of ``hadamard``)
        chunk = blocks[part].float().transpose(0, 1).contiguous()
        y = chunk.view(size, -1)
        if negated is not None and not inverse:
            y = torch.where(negated, -y, y)
        # the power-of-two part: places that differ in bits of the index, from the lowest bit up
        distance = 1
        while distance < size // base:
            pairs = y.view(-1, 2, distance * y.shape[1])
            results = torch.empty_like(pairs)
            (a, b), (total, difference) = pairs.unbind(1), results.unbind(1)
            torch.add(a, b, out=total)
            torch.sub(a, b, out=difference)
            y = results.view(y.shape)
            distance *= 2
        if plan:
            # Add the terms of the base matrix, four by four; z is [b, rest]. Of the sixteen signs that four terms can
            # have, eight are the negated others, and +0 before the first sum makes the sign of a sum of zero
            # meaningless: eight sums serve all results.
            z = y.view(base, -1)
            sums = torch.zeros_like(z)
            for (a, b, c, d), (index, sign) in zip(z.view(len(plan), 4, -1), plan, strict=True):
                first = torch.stack((a + b, a - b))[:, None]
                second = torch.stack((c + d, c - d))
                eight = torch.stack((first + second, first - second)).view(8, -1)
                sums.addcmul_(eight[index], sign)  # the product by +-1 is exact, fused or not
            y = sums.view(size, -1)
        y = y * factor
        if negated is not None and inverse:
            y = torch.where(negated, -y, y)
        y = torch.where(y.isnan(), torch.nan, y)
        target[part].copy_(y.view(chunk.shape).transpose(0, 1))
    return out


def root(size: int) -> float:
    """Return ``RN32(1 / sqrt(size))``."""
    return float(torch.tensor(1 / math.sqrt(size), dtype=torch.float32, device="cpu"))


def checked_base(matrix: Tensor) -> Tensor:
    """Return a user's matrix as int8 on the host; raise ArgumentError if it is not a Hadamard matrix."""
    values = matrix.detach().cpu()
    if not bool((values.abs() == 1).all()):
        raise ArgumentError("matrix has elements other than +1 and -1; pass it as it is before it is scaled")
    base = values.to(torch.int8)
    if not _orthogonal(base.numpy().tobytes(), len(base)):
        raise ArgumentError(f"matrix {tuple(base.shape)} has rows that are not orthogonal; pass a Hadamard matrix")
    return base


@lru_cache(maxsize=64)
def _orthogonal(data: bytes, order: int) -> bool:
    """Return True if ``B B^T = b I``; sums of +-1 are exact in float32, whatever their order."""
    base = tensor_of_bytes(data, torch.int8).view(order, order).float()
    return bool((base @ base.T == order * torch.eye(order, device="cpu")).all())


@lru_cache(maxsize=64)
def _sum_plan(data: bytes, order: int, inverse: bool, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    matrix = tensor_of_bytes(data, torch.int8).view(order, order)
    weights = (matrix.T if inverse else matrix).contiguous()  # row u holds the weights of term u in every result
    plan = []
    for first, second, third, fourth in weights.view(-1, 4, order):
        index = 4 * (first != third).long() + 2 * (first != second) + (third != fourth)
        plan.append((index.to(device), first.float()[:, None].to(device)))
    return tuple(plan)


def _parts(count: int, size: int, across: int, limit: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield indices into ``[count, size, across]`` that hold whole groups, about ``limit`` elements each."""
    width = min(across, max(16, limit // size // 16 * 16))
    height = max(1, limit // (size * width))
    for top in range(0, count, height):
        for start in range(0, across, width):
            yield slice(top, top + height), slice(None), slice(start, start + width)


__all__ = ["check_hadamard", "hadamard", "root", "sign_bits"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def hadamard(
    x: Tensor,
    size: int | Literal["full"] | None,
    signs: Signs = None,
    *,
    dim: int = -1,
    inverse: bool = False,
    matrix: Tensor | None = None,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """Return ``(s x) H / sqrt(size)`` of every group of ``size`` neighbours along a dimension, in float32.

    H is ``hadamard_matrix(size)``, Sylvester's matrix where size is a power of two, and s the diagonal of the signs.
    The order of operations (docs/transforms.md) defines every bit, and kernels follow it; ``size = b * 2**k``:

    1. x becomes float32 (float64 is rounded to nearest even), and elements whose sign is set are negated.
    2. For the distances h = 1, 2, 4, ..., 2**(k - 1): each pair of places i and i + h (bit h of ``i mod 2**k`` is 0)
       takes ``RN32(a + b)`` and ``RN32(a - b)``.
    3. Where b > 1: of the terms ``t_u = B[u][v] z_u``, u = 0 ... b - 1, each four make
       ``RN32(RN32(t_0 + t_1) + RN32(t_2 + t_3))``, and these are added in order, the first one to +0.
    4. Each number is multiplied by ``RN32(1 / sqrt(size))``.

    The inverse takes ``B[v][u]`` in step 3 and negates after step 4: ``x H^T / sqrt(size) s``. It is also the
    derivative: the gradient of a transform is the inverse transform of the gradient, rounded to x's dtype, and vice
    versa. For powers of two, where H is symmetric, it is the transform by ``H diag(s)``.

    **Transformer Engine** multiplies groups of 16 bfloat16 numbers by ``diag(s) H / 4`` (+-1/4 in bfloat16) on the
    tensor core, sums in float32 and rounds to bfloat16: ``size=16, round_to=torch.bfloat16``. The bits are equal where
    the exponents of a group's elements that are not zero lie at most 12 apart (and below 2**124; a subnormal counts as
    2**-126): every sum of either order is then exact. Otherwise a result may differ in its last place; so may the sign
    of a result where all elements of the group are zeros, of which tensor cores make +0.

    Args:
        x: ``[..., K, ...]``, float16, bfloat16, float32 or float64; size divides K.
        size: A power of two or a base of ``CONSTRUCTIONS`` times one (with ``matrix``: its order times one); None or
            "full" is K.
        signs: What the elements of each group are multiplied with first: a bit mask (bit j set: element j is
            negated), or a tensor [size] whose negative elements negate. None negates nothing. It has no gradient.
        dim: The dimension that groups run along.
        inverse: Undo the transform, but for rounding.
        matrix: Another base B instead of the published one: ``[b, b]`` of +1 and -1, b a multiple of 4, orthogonal
            rows; H is ``B x Sylvester(size / b)`` (Kronecker product).
        round_to: torch.bfloat16 or torch.float16: round the result to nearest even as ``quantize`` does (overflow
            gives Inf), and return that dtype.

    Returns:
        float32, or ``round_to``, of x's shape, contiguous. NaN and Inf spread over their group as IEEE arithmetic
        says; NaN is canonical. A sum of zero is +0, but without step 3 it is -0 where all its terms are. The same on
        every device.

    Raises:
        ArgumentError: There is no matrix of that size, it does not divide K, or signs, matrix, dim or round_to do not
            fit.
        DtypeError: x is not a floating-point tensor of those.

    >>> hadamard(torch.tensor([4.0, 0.0, 0.0, 0.0]), 4), hadamard(torch.ones(12), "full").count_nonzero()
    (tensor([2., 2., 2., 2.]), tensor(1))
    """
    # dim as a negative number
    if not isinstance(x, Tensor):
        raise DtypeError(f"x is {type(x).__name__}, not a tensor; pass torch.tensor(x)")
    rank = max(x.dim(), 1)
    if type(dim) is not int or not -rank <= dim < rank:
        shape = tuple(x.shape)
        raise ArgumentError(f"dim={shown(dim)} is not a dimension of x of shape {shape}; choose {-rank} to {rank - 1}")
    dim = dim - rank if dim >= 0 else dim
    length = x.shape[dim] if size in (None, "full") and x.dim() else size
    check_hadamard(x, length, signs, dim, matrix)
    if round_to not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(f"round_to={shown(round_to)} is not allowed; choose torch.bfloat16, torch.float16 or None")
    mask = "" if signs is None or isinstance(signs, Tensor) else str(signs)
    constants = signs.detach() if isinstance(signs, Tensor) else None, None if matrix is None else matrix.detach()
    direct = is_direct(x, *(t for t in constants if t is not None))
    run = _hadamard if direct else torch.ops.fmtsim.hadamard if torch.compiler.is_compiling() else _Hadamard.apply
    y = run(x, length, dim, inverse, mask, *constants)
    return _rounded(y, round_to or torch.float32)


def check_hadamard(
    x: Tensor, size: Any, signs: int | Tensor | None, dim: int = -1, matrix: Tensor | None = None
) -> None:
    """Raise for a transform that is not defined."""
    if x.dtype not in _FLOATS:
        raise DtypeError(f"x has dtype {x.dtype}; pass float16, bfloat16, float32 or float64")
    if x.dim() == 0:
        raise ArgumentError("x has no dimensions; pass a tensor [..., K]")
    if matrix is None:
        base_of(size)
    else:
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) % 4:
            kind = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ArgumentError(f"matrix is {kind}; pass a tensor [b, b] of +1 and -1, b a multiple of 4")
        doublings, rest = divmod(size, len(matrix)) if type(size) is int and len(matrix) else (0, 1)
        if rest or doublings < 1 or doublings & (doublings - 1):
            raise ArgumentError(
                f"size={shown(size)} is not the order of matrix {tuple(matrix.shape)} times a power of two"
            )
    if x.shape[dim] % size:
        where = "the last dimension" if dim == -1 else f"dimension {dim}"
        raise ArgumentError(f"size={size} does not divide {where} of x {tuple(x.shape)}; pad x or choose less")
    check_signs(signs, size)


def _rounded(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to another dtype by the project's own cast."""
    if y.dtype == dtype:
        return y
    return quantize(y, dtype, overflow="ieee", out_dtype=dtype)


def _hadamard(x, size, dim, inverse, mask, signs=None, matrix=None):  # type: ignore[no-untyped-def]
    # kernels take Sylvester's matrices of some sizes, torch ops the others
    flips = mask_bits(int(mask), size, x.device) if mask else None if signs is None else signs.signbit().to(x.device)
    if matrix is None and (engine := fused_engine(x)) is not None and engine.covers_hadamard(size, dim):
        return engine.hadamard(x.detach(), size, flips, inverse)
    if matrix is None and x.is_cpu and is_dense(x):
        y = load_engine("cpu").hadamard(x, size, dim, flips, inverse)
        if y is not None:
            return y
    base = base_matrix(base_of(size)) if matrix is None else checked_base(matrix)
    return transform(x.detach(), size, dim, base, flips, inverse)


define_operator(
    "hadamard(Tensor x, int size, int dim, bool inverse, str mask, Tensor? signs=None, Tensor? matrix=None) -> Tensor",
    _hadamard,
    lambda x, size, dim, inverse, mask, signs=None, matrix=None: x.new_empty(x.shape, dtype=torch.float32),
)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, *ctx.how, signs, matrix = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(signs, matrix)
    ctx.save_for_forward(signs, matrix)


def _gradient(ctx, grad):  # type: ignore[no-untyped-def]
    """Return the inverse transform of a gradient, which can be differentiated again, and nothing for the others."""
    size, dim, inverse, mask = ctx.how
    run = torch.ops.fmtsim.hadamard if torch.compiler.is_compiling() else _Hadamard.apply
    grad_x = run(grad, size, dim, not inverse, mask, *ctx.saved_tensors)
    return _rounded(grad_x, ctx.dtype), *(None,) * 6


def _tangent(ctx, tangent, *_):  # type: ignore[no-untyped-def]
    return torch.ops.fmtsim.hadamard(tangent, *ctx.how, *ctx.saved_tensors)  # the transform is linear


_Hadamard = define_gradient("hadamard", _keep, _gradient, _tangent, torch.ops.fmtsim.hadamard)
