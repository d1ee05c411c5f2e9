# SPDX-License-Identifier: Apache-2.0
"""Quantised attention of float32 heads, block by block of keys: the order of its sums, and its gradients.

The backward pass has four products, each with quantisers of its own or of the forward values.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.config import Gemm, element_format
from fmtsim.gemm.layers.quantize_operand import holder, quantize_operand
from fmtsim.gemm.layers.watch import Seen, Watchers
from fmtsim.gemm.products.matmul import bmm
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.recipes.attention_config import AttentionConfig, Exp2, Tile, element_formats
from fmtsim.recipes.build import HIGH
from fmtsim.scaling.scaled_cast import rotated
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys, last_cast, spread
from fmtsim.spec.quantizer import Clamp, Hadamard, Quantizer
from fmtsim.support.errors import ArgumentError, shown

_CUBIC: Final = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)


def without_means(
    config: AttentionConfig, q: Tensor, k: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return q and k without the means that a config removes, q's means by row, and their products with k.

    q is float32 ``[heads, L, d]``, k ``[heads, S, d]``; all of this is computed in ``dtype`` where it has 16 bits.
    """
    q, k = (x.to(dtype) if dtype.itemsize == 2 else x for x in (q, k))
    k = k - k.mean(-2, keepdim=True) if config.smooth_k else k
    if config.smooth_q is None:
        return q.float(), k.float(), None, None
    rows, size = q.shape[1], config.smooth_q
    groups = torch.nn.functional.pad(q, (0, 0, 0, -rows % size)).unflatten(1, (-1, size))  # a last group has zeros
    mean = groups.mean(2, keepdim=True)
    means, delta = (x.float().repeat_interleave(size, 1)[:, :rows] for x in (mean[:, :, 0], mean[:, :, 0] @ k.mT))
    return (groups - mean).flatten(1, 2)[:, :rows].float(), k.float(), means, delta


def to_tiles(x: Tensor, tile: Tile) -> Tensor:
    """Return rows ``[heads, L, d]``, padded by zeros to whole tiles, those of one scale next to each other."""
    rows, stride, run = tile
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % rows))
    return x.unflatten(1, (-1, rows // stride, stride // run, run)).transpose(2, 3).flatten(1, 4)


def from_tiles(x: Tensor, tile: Tile, rows: int) -> Tensor:
    """Return what ``to_tiles`` took, in its own order, as so many rows."""
    size, stride, run = tile
    return x.unflatten(1, (-1, stride // run, size // stride, run)).transpose(2, 3).flatten(1, 4)[:, :rows]


def exp2(x: Tensor, config: Exp2 | None, columns: int) -> Tensor:
    """Return 2^x of a block of keys, float32: torch's, and FlashAttention-4's polynomial where a config has it."""
    y = torch.exp2(x)
    if config is None:
        return y
    (frequency, count, start), column = config, torch.arange(x.shape[-1], device=x.device)
    fragment, place = column // 32, column % 32 // 2 * 2  # pairs of neighbours go together
    chosen = (place % frequency >= frequency - count) & (fragment >= start)
    # 2^x for x up to 127 as a polynomial, by Cody and Waite's split and a cubic; NaN stays NaN
    # 1. x = n + f
    clamped = x.clamp(min=-127.0)
    whole = clamped.floor()
    fraction, r = clamped - whole, torch.full_like(x, _CUBIC[3])
    # 2. a polynomial of f, by fused multiply-adds
    for c in _CUBIC[2::-1]:
        r = _fma(r, fraction, c)
    # 3. n is added to the exponent field, also where results are subnormal
    bits = r.view(torch.int32) + (whole.nan_to_num().to(torch.int32) << 23)
    polynomial = torch.where(x.isnan(), x, bits.view(torch.float32))
    return torch.where(chosen & (fragment < columns // 32 - 1), polynomial, y)


def _fma(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Return ``RN32(a b + c)``: float64 rounded to odd, which a second rounding does not see."""
    product = a.double() * b.double()  # exact
    total = product + c
    rest = (product - (total - (total - product))) + (c - (total - product))  # what the sum lost, exactly
    bits = total.view(torch.int64)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    return torch.where((rest != 0) & (bits % 2 == 0), bits + away, bits).view(torch.float64).float()


_HALVES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LOG2E: Final = 1.4426950408889634


class CallKeys:
    """Give every use of random numbers in a call a key of its own; the signs of a pass are one.

    Args:
        key: Of the call; None where nothing is random.
    """

    def __init__(self, key: RandomKey | None) -> None:
        self._key, self._used = key, 0

    @property
    def signs(self) -> RandomKey | None:
        """Key of the signs of the forward pass."""
        return self._key

    def draws(self, *, backward: bool = False) -> Keys:
        """Return keys for one operand."""
        if self._key is None:
            return Keys()
        seed, offset = self._key
        self._used += 2
        signs = RandomKey(seed, offset + 1) if backward else self._key
        return Keys(RandomKey(seed, offset + self._used), RandomKey(seed, offset + self._used + 1), signs)


class Heads(NamedTuple):
    """A quantised operand of all heads: elements, or values where no unit multiplies, and the scales left to apply.

    Attributes:
        elements: ``[heads, rows, inner]``, float32 or a dtype that holds them.
        scale: float32, broadcasts to that; None where elements are values.
        slope: float32 ``[heads, rows, inner]``: what gradients are multiplied with, or None.
        block: Rows and inner elements that share a scale.
        quantizer: What made the elements; one without a format where they are values.
    """

    elements: Tensor
    scale: Tensor | None = None
    slope: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    quantizer: Quantizer = HIGH

    def values(self) -> Tensor:
        """Return what the elements stand for."""
        x = self.elements.float()
        return x if self.scale is None else x * self.scale

    def transposed(self) -> "Heads":
        """Return the transposed matrices, with the same elements and scales."""
        scale = None if self.scale is None else self.scale.mT
        return self._replace(elements=self.elements.mT, scale=scale, slope=None, block=self.block[::-1])

    def head(self, rows: int) -> "Heads":
        """Return the first rows of the first head."""
        scale = None if self.scale is None else self.scale[:1, :rows]
        return self._replace(elements=self.elements[:1, :rows], scale=scale, slope=None)

    def row_scale(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return elements and the scale of each row; values where scales change along it, or a dtype lacks elements."""
        if self.scale is None:
            return self.elements, None
        fmt = element_format(last_cast(self.quantizer).format)
        whole = self.block[1] >= self.elements.shape[-1]
        if whole and (dtype is None or is_representable(fmt, dtype)):  # type: ignore[arg-type]
            return self.elements, self.scale[..., :1]
        return self.values(), None


class Inputs(NamedTuple):
    """Hold the inputs of attention.

    Attributes:
        q: ``[..., L, d]``, floating point; k ``[..., S, d]`` and v ``[..., S, dv]`` alike in dtype and leading sizes.
        k: See q.
        v: See q.
        mask: float32, added to the scores, or None.
        hides: Whether the mask is known to hold nothing but 0 and -inf.
        factor: What scores are multiplied with.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    hides: bool
    factor: float


class Flash(NamedTuple):
    """Attention of all heads, and what its gradients are made of.

    Attributes:
        out: float32 ``[heads, L, dv]``.
        q, k, v: The operands, v as ``[heads, dv, S]``.
        weights: float32 ``[heads, L, S]``: normalised weights before they were quantised; empty if not asked for.
        rounded: Likewise, after.
    """

    out: Tensor
    q: Heads
    k: Heads
    v: Heads
    weights: Tensor
    rounded: Tensor


def flash(
    inputs: Inputs, config: AttentionConfig, call_keys: CallKeys, dtype: torch.dtype, *, keep: bool = False,
    watchers: Watchers = (),
) -> Flash:  # fmt: skip
    """Return the attention of float32 heads ``[heads, rows, features]``; ``keep`` asks for the weights.

    Units multiply operands in high precision in ``dtype``.
    """
    (q, k, v, mask, hides, factor), unit, coded = inputs, config.target, config.has_unit
    if coded:
        check_call(config, inputs, dtype)
    q, k, q_means, delta = without_means(config, q, k, dtype)
    operands = ("q", q, config.q, config.q_tile), ("k", k, config.k, config.k_tile), ("v", v.mT, config.v, None)
    q_heads, k_heads, v_heads = (
        quantised(name, x, quantizer, coded, call_keys.draws, watchers, tile) for name, x, quantizer, tile in operands
    )
    m = q.new_full((*q.shape[:2], 1), -math.inf)
    total, out = torch.zeros_like(m), q.new_zeros(*q.shape[:2], v.shape[-1])
    blocks: list[tuple[Tensor, Tensor, Tensor]] = []
    for first in reversed(range(0, k.shape[1], config.columns)):
        keys = slice(first, first + config.columns)
        # 1. Scores of a block of keys, as exponents to base 2.
        s = _watched("s", q_heads, _part(k_heads, keys, 1), unit, dtype, watchers)
        s = s if delta is None else s + delta[..., keys]
        # They are the logarithms of the weights before normalisation.
        if mask is None:
            t = s * (factor * _LOG2E)
        else:
            added, only_hides = mask[..., keys], hides
            if not only_hides and not isinstance(added, torch._subclasses.FakeTensor):
                only_hides = bool(((added == 0) | (added == -math.inf)).all())  # such a mask changes no score
            t = s * (factor * _LOG2E) + added if only_hides else (s * factor + added) * _LOG2E
        # 2. The running maximum of each row; earlier sums shrink by 2^(old maximum - new one).
        new = torch.maximum(m, t.amax(-1, keepdim=True))
        base = torch.where(new == -math.inf, 0.0, new)  # a row that has seen no key yet
        shrink, p = torch.exp2(m - base), exp2(t - (base - config.offset), config.exp2, config.columns)
        # 3. The weights before normalisation are quantised for the product with the values.
        weights = quantised("p", p.reshape(1, -1, p.shape[-1]), config.p, coded, call_keys.draws, watchers)
        scale = None if weights.scale is None else weights.scale.reshape(p.shape)
        weights = weights._replace(elements=weights.elements.reshape(p.shape), scale=scale)
        part = _watched("o", weights, _part(v_heads, keys, 2), unit, dtype, watchers)
        # 4. Sums of weights and of weighted values.
        summed = weights.values() if config.rounded_sum else p
        m, total, out = new, total * shrink + summed.sum(-1, keepdim=True), out * shrink + part
        blocks += [(p, weights.values(), base)] if keep else []
    # 5. Normalise once, at the end; a row that no key reaches is 0.
    y = torch.where(total == 0, 0.0, out / total)
    last = torch.where(m == -math.inf, 0.0, m)
    shares = [torch.where(total == 0, 0.0, torch.exp2(base - last) / total) for _, _, base in blocks]
    ends = [q.new_zeros(0)] * 2
    if keep:
        ends = [
            torch.cat([one[i] * share for one, share in zip(blocks, shares, strict=True)][::-1], -1) for i in range(2)
        ]
    if q_means is not None:  # the gradient of k meets the queries as they were
        q_heads = Heads(q_heads.values() + q_means, None, q_heads.slope)
    return Flash(y, q_heads, k_heads, v_heads, *ends)


def quantised(
    name: str, x: Tensor, quantizer: Quantizer, coded: bool, draws: Callable[[], Keys], watchers: Watchers,
    tile: Tile | None = None,
) -> Heads:  # fmt: skip
    """Quantise each head, to elements or values; all at once where no block reaches from one into the next."""
    heads, rows, inner = x.shape
    if tile is not None:
        tiled = quantised(name, to_tiles(x, tile), quantizer, coded, draws, watchers)
        elements, scale, slope = (None if t is None else from_tiles(t, tile, rows) for t in tiled[:3])
        return tiled._replace(elements=elements, scale=scale, slope=slope, block=(1, tiled.block[1]))  # type: ignore[arg-type]
    scaling = quantizer.scaling
    apart = scaling is None or (scaling.block[0] is not None and rows % scaling.block[0] == 0 and not scaling.tensor)
    # A clamp takes quantiles of the whole matrix, and the product needs the remainder that it cuts off.
    apart = apart and not any(isinstance(transform, Clamp) for transform in quantizer.transforms)
    if apart and isinstance(quantizer.format, FloatFormat | None):
        x, heads = x.reshape(1, heads * rows, inner), 1
    operands = []
    for head in x:
        drawn = draws()
        operands.append(quantize_operand(head, quantizer, drawn))
        for watcher in watchers:
            watcher.operand(Seen(name, head, operands[-1], drawn))
    shape = (-1, rows, inner)
    slopes = [one.slope for one in operands if one.slope is not None]  # all heads have what the first has
    slope = torch.stack(slopes).reshape(shape) if slopes else None
    if not coded or operands[0].tensor_scale is not None:
        return Heads(torch.stack([one.values(torch.float32) for one in operands]).reshape(shape), None, slope)
    elements = torch.stack([one.elements for one in operands]).reshape(shape)
    if operands[0].scale is None:
        return Heads(elements, None, slope, quantizer=quantizer)
    scale = torch.stack([spread(one.scale, one.block, one.elements.shape) for one in operands]).reshape(shape)  # type: ignore[arg-type]
    return Heads(elements, scale, slope, operands[0].block, quantizer)


def _part(heads: Heads, keys: slice, dim: int) -> Heads:
    """Return the keys of a block, which lie along the rows (1) or the inner axis (2)."""
    pick = (slice(None), keys) if dim == 1 else (slice(None), slice(None), keys)
    inner, length = heads.block[1], heads.elements.shape[-1]
    apart = dim == 2 and inner < length and inner % (keys.stop - keys.start) != 0  # scales may change inside
    block = (heads.block[0], 1 if apart else inner)
    scale = None if heads.scale is None else heads.scale[pick]
    return heads._replace(elements=heads.elements[pick], scale=scale, block=block)


def _watched(name: str, a: Heads, b: Heads, unit: Any, dtype: torch.dtype, watchers: Watchers) -> Tensor:
    """Return ``product``, and show it to watchers where a unit multiplies."""
    y = product(a, b, unit, dtype)
    for watcher in watchers if unit is not None else ():
        watcher.attention_product(name, a, b, y, partial(product, dtype=dtype))
    return y


def product(a: Heads, b: Heads, unit: Any, dtype: torch.dtype) -> Tensor:
    """Return ``a b^T`` of each head, float32: of the elements, times b's scales, then a's.

    Args:
        a, b: ``[heads, rows, inner]``.
        unit: Unit or datapath of the product, None for float32.
        dtype: That of the tensors, in which a unit takes what is in high precision.
    """
    if unit is None:
        return a.values() @ b.values().mT
    formats = element_formats(a.quantizer, b.quantizer)
    options: dict[str, Any] = {"target": unit, "out_dtype": torch.float32}
    if formats is not None:
        options["formats"] = formats
        first, second = map(holder, formats)  # dtypes in which units take such elements
        (a_elements, a_scale), (b_elements, b_scale) = a.row_scale(), b.row_scale()
    else:
        high = any(last_cast(x.quantizer).format is None for x in (a, b))
        wide = dtype if high and dtype in _HALVES else torch.float32
        if wide == torch.float32 and not unit_takes(unit, "fp32"):
            options["target"] = "fp32_fma"
        first = second = wide
        (a_elements, a_scale), (b_elements, b_scale) = a.row_scale(wide), b.row_scale(wide)
    y = bmm(a_elements.to(first), b_elements.to(second).mT, **options)
    y = y if b_scale is None else y * b_scale.mT  # b's scales first, then a's: one rounding each
    return y if a_scale is None else y * a_scale


def check_call(config: AttentionConfig, inputs: Inputs, dtype: torch.dtype) -> None:
    """Refuse, before anything runs, operands of this size and dtype that a unit does not multiply.

    Raises:
        ArgumentError: A scale changes inside the sums of a product of elements, or a unit lacks the dtype.
    """
    queries, keys, features = inputs.q.shape[-2], inputs.k.shape[-2], inputs.v.shape[-1]
    lengths = {"s": inputs.q.shape[-1], "dv": queries, "dp": features, "dq": keys, "dk": queries}
    for name, (unit, operands, quantizers, inner) in config.products.items():
        if unit is None:
            continue
        if element_formats(*quantizers) is None:
            pairs = zip(operands, quantizers, strict=True)
            high = [operand for operand, quantizer in pairs if last_cast(quantizer).format is None]
            if high and dtype in _HALVES and not unit_takes(unit, _HALVES[dtype]):
                raise ArgumentError(
                    f"AttentionConfig {high[0]} is in high precision, and {shown(unit)} does not multiply {dtype}; "
                    f"pass tensors of another dtype, or give {high[0]} a quantiser"
                )
            continue
        for operand, block in zip(operands, inner, strict=True):
            length = lengths.get(name, min(keys, config.columns) if operand == "p" else keys)
            changes = block is not None and block < length
            if changes and (operand != "v" or block % config.columns):  # type: ignore[operator]
                raise ArgumentError(
                    f"AttentionConfig {operand}: one scale for {block} of {length} numbers changes inside the sums of "
                    f"{name}; choose blocks of whole rows, for v of config.columns keys or a multiple, an operand in "
                    "high precision, or no unit"
                )


class _Source(NamedTuple):
    """A tensor of the forward pass that a backward product may take: as it was, and as it became.

    Attributes:
        original: float32 ``[heads, rows, inner]``, the product's sums along inner.
        forward: Elements and scales, or values, likewise.
    """

    original: Tensor
    forward: Heads


def flash_gradients(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    factor: float,
    config: AttentionConfig,
    call_keys: CallKeys,
    forward: Flash,
    dtype: torch.dtype,
    watchers: Watchers = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in float32.

    Args:
        tensors: float32: do ``[heads, L, dv]``, the gradient of the result, and unrounded q ``[heads, L, d]``, k
            ``[heads, S, d]`` and v ``[heads, S, dv]``.
        factor: What scores are multiplied with.
        config: The definition.
        call_keys: Random numbers, behind those of the forward pass.
        made: The forward pass with its weights.
        dtype: In which units multiply operands in high precision.
        watchers: See the operands that are quantised here, as ``"dv.b"``, and products on units, as ``"dv"``.
    """
    g, q, k, v = tensors

    def run(name: str, a: Tensor | _Source, b: Tensor | _Source) -> Tensor:
        gemm: Gemm = getattr(config, name)
        sides = zip("ab", (a, b), (gemm.a, gemm.b), strict=True)
        first, second = (
            _operand(f"{name}.{side}", x, by, gemm, call_keys, () if by.format is None else watchers)
            for side, x, by in sides
        )
        return _watched(name, first, second, gemm.target, dtype, watchers)

    dv = run("dv", _Source(forward.weights.mT, Heads(forward.rounded.mT)), g.mT)
    dv = dv if forward.v.slope is None else dv * forward.v.slope.mT  # the quantiser of v has a gradient of its own
    dp = run("dp", g, _Source(v, forward.v.transposed()))
    ds = forward.weights * (dp - (g * forward.out).sum(-1, keepdim=True))
    dq = run("dq", ds, _Source(k.mT, forward.k.transposed())) * factor
    dk = run("dk", ds.mT, _Source(q.mT, forward.q.transposed())) * factor
    dq = _back(dq, forward.q.slope, config.q, config.dq.b, call_keys)
    return dq, _back(dk, forward.k.slope, config.k, config.dk.b, call_keys), dv


def _operand(
    name: str, x: Tensor | _Source, quantizer: Quantizer, gemm: Gemm, call_keys: CallKeys, watchers: Watchers
) -> Heads:
    """Return an operand along the sums of its product."""
    if isinstance(x, Tensor):
        t = x
    elif quantizer.source == "forward":
        return x.forward
    else:
        t = x.original if quantizer.source == "original" else x.forward.values()
    draws = partial(call_keys.draws, backward=True)
    return quantised(name, t.contiguous(), quantizer, gemm.target is not None, draws, watchers)


def _back(y: Tensor, slope: Tensor | None, quantizer: Quantizer, other: Quantizer, call_keys: CallKeys) -> Tensor:
    """Turn the gradient of a rounded, rotated operand into that of the tensor itself.

    Args:
        y: The product.
        slope: Of the rounding.
        quantizer: What made the operand.
        other: Quantiser of the product's second operand; where it is made of the original, nothing is rotated.
        call_keys: Give the signs.
    """
    rotated_forward = other.source != "original"
    if slope is not None and rotated_forward:
        y = y * slope
    for transform in reversed(quantizer.transforms if rotated_forward else ()):
        if isinstance(transform, Hadamard):
            shape = y.shape
            y = rotated(y.reshape(-1, shape[-1]), transform, call_keys.signs, inverse=True).reshape(shape)
    return y
