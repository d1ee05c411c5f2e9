# SPDX-License-Identifier: Apache-2.0
"""A cache of keys and values in a quantised format, as decoding appends to it token by token."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import BlockFormat, Format, scaled
from fmtsim.formats.element import CodebookFormat, IntFormat
from fmtsim.formats.registry import get_format
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.scales import float32
from fmtsim.spec.cast import EncodedParts
from fmtsim.support.errors import ArgumentError, shown

Parts = tuple[Encoded, ...]
Scale = float | Sequence[float] | Tensor
Static = Tensor | None  # float32, 0-d or [heads, 1, 1]; None is 1


class Rule(NamedTuple):
    """How a token of a head is kept: what encodes it under a static scale, and what decodes the parts under it."""

    name: str
    encode: Callable[[Tensor, Static], Parts]
    decode: Callable[[Parts, Static], Tensor]
    takes_scale: bool = False


def _cast(fmt: Format, x: Tensor, scale: Static) -> Parts:
    """Cast under a static scale; block scales of two levels are made in TensorRT-LLM's order, in float32."""
    if not (isinstance(fmt, BlockFormat) and _of_tensor(fmt)):
        return (encode(x if scale is None else x.float() / scale, fmt, pad=True),)
    size = fmt.block[1] or x.shape[-1]
    if x.shape[-1] % size:
        raise ArgumentError(
            f"{fmt.name} has blocks of {size}, which do not divide the {x.shape[-1]} features of a head; choose a "
            "format with a scale a head, such as 'int4_channel'"
        )
    # 1. g brings the tensor into range; the scale of a block as it is stored
    blocks, g = x.float().unflatten(-1, (-1, size)), x.new_ones((), dtype=torch.float32) if scale is None else 1 / scale
    g = g[..., None] if g.dim() else g
    amax = blocks.abs().amax(-1, keepdim=True)
    stored = quantize(g * (amax * float32(1 / fmt.element.max)), fmt.scale, overflow="saturate")
    # 2. elements meet one factor of both scales
    factor = torch.where(stored == 0, 0.0, 1 / (stored * (1 / g)))
    return (_blocks((blocks * factor).flatten(-2), stored.flatten(-2).flatten(0, -2), _one_level(fmt)),)


def _values(parts: Parts, scale: Static) -> Tensor:
    values = parts[0].decode(out_dtype=torch.float32)
    return values if scale is None else values * scale


def _per_token_head(fmt: BlockFormat, x: Tensor, _: Static) -> Parts:
    """Scale by ``s = max(amax / max, 1e-6)``; integers are rounded half away by adding 0.5 in float32."""
    s = (x.float().abs().amax(-1, keepdim=True) / fmt.element.max).clamp(min=1e-6)
    y = x.float() * (1 / s)
    y = (y + torch.where(y >= 0, 0.5, -0.5)).trunc() if isinstance(fmt.element, IntFormat) else y
    return (_blocks(y, s.reshape(-1, 1), fmt),)


def _blocks(y: Tensor, scales: Tensor, fmt: BlockFormat) -> Encoded:
    return Encoded.from_parts(EncodedParts(encode(y, fmt.element).unpacked(), scales), fmt, y.shape)


def _steps(bits: int, x: Tensor, _: Static) -> Parts:
    """Count steps from the least value (TurboQuant's values); step and least value are kept in float16."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    s = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return encode(((x - low) / s + 0.5).floor(), f"uint{bits}"), encode(s, "fp16"), encode(low, "fp16")


def _from_steps(parts: Parts, _: Static) -> Tensor:
    codes, s, low = (part.decode(out_dtype=torch.float32) for part in parts)
    return codes * s + low


def _rotated(bits: int, x: Tensor, _: Static) -> Parts:
    """Round a rotated unit vector to Lloyd-Max centroids, beside its norm in float16 (TurboQuant's keys)."""
    x, size = x.float(), x.shape[-1]
    if size < 8 or size & (size - 1):
        raise ArgumentError(
            f"TurboQuant rotates heads of 8, 16, 32 and so on features, and these have {size}; choose a format without "
            "a rotation, such as 'int4_channel'"
        )
    norm = x.norm(dim=-1, keepdim=True)  # this and the sum below have the device's last bits
    return encode(hadamard(x / (norm + 1e-8), size), lloyd_max(size, bits)), encode(norm, "fp16")


def _rotated_back(parts: Parts, _: Static) -> Tensor:
    c, norm = (part.decode(out_dtype=torch.float32) for part in parts)
    # Centroids are normalised before they are rotated; torch's float32 root on a CPU is not rounded to nearest.
    c = c * (1 / ((c * c).sum(-1, keepdim=True) + 1e-16).double().sqrt().float())
    return hadamard(norm * c, c.shape[-1])


def _of_tensor(fmt: Format) -> bool:
    """Return True if the second level of scales is the whole tensor's, not a row's or a window's."""
    return isinstance(fmt, BlockFormat) and fmt.tensor_scale and fmt.scaling.level_block == (None, None)


def _direct(fmt: Format) -> Rule:
    return Rule(fmt.name, partial(_cast, fmt), _values, not isinstance(fmt, BlockFormat) or _of_tensor(fmt))


_FP8, _INT8 = (
    Rule(f"{name} a token and head", partial(_per_token_head, scaled(get_format(name), (1, None))), _values)  # type: ignore[arg-type]
    for name in ("e4m3", "int8")
)
_STEPS_3, _STEPS_4 = (Rule(f"steps of {bits} bits", partial(_steps, bits), _from_steps) for bits in (3, 4))
_KEYS_3, _KEYS_4 = (Rule(f"{bits} bits, rotated", partial(_rotated, bits), _rotated_back) for bits in (3, 4))
CACHES: Final[dict[str, tuple[Rule, Rule]]] = {
    "fp8_per_token_head": (_FP8, _FP8), "int8_per_token_head": (_INT8, _INT8),
    "turboquant_k8v4": (_direct(get_format("e4m3")), _STEPS_4), "turboquant_4bit_nc": (_KEYS_4, _STEPS_4),
    "turboquant_k3v4_nc": (_KEYS_3, _STEPS_4), "turboquant_3bit_nc": (_KEYS_3, _STEPS_3),
}  # fmt: skip
"""vLLM's caches, of keys and of values, by its names (vLLM 0.33.0, vllm/v1/attention/ops)."""


@lru_cache(maxsize=32)
def lloyd_max(size: int, bits: int) -> CodebookFormat:
    """Return the codebook of least squared error for a coordinate of a unit vector: N(0, 1 / size).

    Integrals are trapezoids of 200 steps; centroids and the middles between them are float32, and a number in the
    middle goes up. Source: vLLM 0.33.0, ``quantization/turboquant/centroids.py``, after Zandieh et al., TurboQuant.
    """
    count, sigma = 2**bits, math.sqrt(1.0 / size)
    low, high = -3.5 * sigma, 3.5 * sigma
    c = low + (high - low) * (np.arange(count) + 0.5) / count
    for _ in range(200):
        edges = np.array([low * 3, *(c[:-1] + c[1:]) / 2, high * 3])
        x = edges[:-1, None] + np.arange(201) * ((edges[1:] - edges[:-1]) / 200)[:, None]
        density = np.exp(-x * x * (size / 2)) / (math.sqrt(2 * math.pi) * sigma)
        density[:, [0, -1]] /= 2
        mass = density.sum(1) * (edges[1:] - edges[:-1]) / 200
        moment = (x * density).sum(1) * (edges[1:] - edges[:-1]) / 200
        new = np.where(mass > 1e-15, moment / mass, c)
        if np.abs(new - c).max() < 1e-10:
            break
        c = new
    values = c.astype(np.float32)
    middles = (values[:-1] + values[1:]) / np.float32(2)
    turns = (middles.astype(float) + np.nextafter(middles, np.float32(-1))) / 2  # no float32 number lies on one
    return CodebookFormat(
        name=f"lloyd_max_{bits}bit_{size}", values=tuple(map(float, values)), thresholds=tuple(map(float, turns)),
        source="vLLM 0.33.0, quantization/turboquant/centroids.py",
    )  # fmt: skip


class QuantisedCache:
    """Keep keys and values as packed codes and scales, and give them back as numbers.

    What is appended is quantised once, by itself, and never again: the cache holds the same bits whether tokens arrive
    one by one or together. So a block of a format must lie within a token and a head: ``(1, size)``, or ``(1, None)``
    for a scale a token and head. An element format is cast under the static scale that is given, and so is a format
    with a scale of the tensor, whose tensor scale it is: ``"nvfp4"`` keeps the calibrated scale (amax / (448 * 6))
    for every later token, and blocks beyond it saturate, as in vLLM and TensorRT-LLM.

    Args:
        key: Format of the keys, a name or a record, such as ``"int8_channel"`` or ``"int4_channel"`` (a scale a token
            and head), ``"mxfp8"``, ``"nvfp4"`` or ``"e4m3"``; or a name of vLLM's caches (``CACHES``).
        value: Format of the values; None is that of the keys, or of the named cache.
        key_scale: The static scale of keys, what they are divided by before the cast: one number, or one a head of
            keys (grouped queries share heads of keys).
        value_scale: The same of values.

    Raises:
        ArgumentError: A format that shares scales among tokens, a static scale that is not above 0 or stands beside
            scales that are made of each token alone, or, in use, scales or blocks that do not fit the heads.

    >>> cache = QuantisedCache("int8_channel")
    >>> cache.append(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))
    >>> cache.append(torch.ones(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    >>> cache.keys().shape, cache.nbytes
    (torch.Size([1, 2, 4, 16]), 320)
    """

    def __init__(
        self, key: str | Format, value: str | Format | None = None, *, key_scale: Scale = 1.0, value_scale: Scale = 1.0
    ) -> None:
        self._rules = _rule(key, 0), _rule(key if value is None else value, 1)
        self._scales = _checked(key_scale, self._rules[0]), _checked(value_scale, self._rules[1])
        self._chunks: tuple[list[Parts], list[Parts]] = ([], [])

    def rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as the cache would give them back, in their own dtypes, without adding them."""
        k, v = (self._decode(i, self._encode(i, t)).to(t.dtype) for i, t in enumerate((key, value)))
        return k, v

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens.

        Args:
            key: ``[..., tokens, d]``.
            value: ``[..., tokens, dv]``.

        Raises:
            ArgumentError: Leading dimensions, tokens or features that do not fit each other or what is in the cache.
        """
        if key.shape[:-1] != value.shape[:-1] or key.dim() < 2:
            raise ArgumentError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} are not of the same tokens")
        for kind, t, chunks in zip(("keys", "values"), (key, value), self._chunks, strict=True):
            before = tuple(chunks[0][0].shape) if chunks else tuple(t.shape)
            if (*before[:-2], before[-1]) != (*t.shape[:-2], t.shape[-1]):
                raise ArgumentError(f"{kind} {tuple(t.shape)} do not continue {before}; only tokens grow")
        encoded = [self._encode(i, t) for i, t in enumerate((key, value))]
        for chunks, parts in zip(self._chunks, encoded, strict=True):
            chunks.append(parts)

    def keys(self) -> Tensor:
        """Return all keys, float32 ``[..., tokens, d]``."""
        return self._read(0)

    def values(self) -> Tensor:
        """Return all values, float32 ``[..., tokens, dv]``."""
        return self._read(1)

    def __len__(self) -> int:
        return sum(parts[0].shape[-2] for parts in self._chunks[0])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for chunks in self._chunks for parts in chunks for part in parts)

    def _read(self, index: int) -> Tensor:
        if not self._chunks[index]:
            raise ArgumentError("the cache is empty; append keys and values first")
        return torch.cat([self._decode(index, chunk) for chunk in self._chunks[index]], -2)

    def _encode(self, index: int, t: Tensor) -> Parts:
        scale = self._static(index, t.device)
        heads = t.shape[-3] if t.dim() > 2 else 1
        if scale is not None and scale.dim() and len(scale) != heads:
            kind = ("keys", "values")[index]
            raise ArgumentError(f"{len(scale)} scales for {heads} heads of {kind}; pass one, or one a head of them")
        return self._rules[index].encode(t, scale)

    def _decode(self, index: int, parts: Parts) -> Tensor:
        return self._rules[index].decode(parts, self._static(index, parts[0].device))

    def _static(self, index: int, device: torch.device) -> Static:
        scale = self._scales[index]
        return None if scale is None else scale.to(device)


def _rule(fmt: str | Format, side: int) -> Rule:
    """Return how tokens are kept, by a name of a cache (0 for its keys, 1 for its values) or a format."""
    if isinstance(fmt, str) and fmt in CACHES:
        return CACHES[fmt][side]
    record = get_format(fmt)
    if isinstance(record, BlockFormat) and record.block[0] != 1:
        raise ArgumentError(
            f"{record.name} shares scales among tokens; choose a format with block=(1, size) or (1, None)"
        )
    if isinstance(record, BlockFormat) and _of_tensor(record) and not record.scaling.is_direct:
        raise ArgumentError(
            f"{record.name} makes block scales by a rule that needs the whole tensor; choose 'nvfp4' or 'nvfp4_row'"
        )
    return _direct(record)


def _checked(scale: Scale, rule: Rule) -> Static:
    numbers = torch.as_tensor(scale, dtype=torch.float32)
    possible = bool(((numbers > 0) & numbers.isfinite()).all()) and numbers.numel() > 0
    if not possible or not (rule.takes_scale or bool((numbers == 1).all())):
        raise ArgumentError(
            f"a scale of {shown(scale)} for {rule.name}; pass a number above 0, or one a head, and none beside scales "
            "that are made of each block alone"
        )
    if numbers.dim():
        return numbers.reshape(-1, 1, 1)
    return None if numbers == 1 else numbers


@lru_cache(maxsize=32)
def _one_level(fmt: BlockFormat) -> BlockFormat:
    """Return a format of two levels as blocks whose tensor scale lies elsewhere."""
    scaling = dataclasses.replace(fmt.scaling, tensor=None, arithmetic="reciprocal")
    return dataclasses.replace(fmt, name=f"{fmt.name}_static", scaling=scaling, aliases=())
