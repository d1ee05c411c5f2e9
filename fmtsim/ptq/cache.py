# SPDX-License-Identifier: Apache-2.0
"""A cache of keys and values in a quantised format, as decoding appends to it token by token."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import CodebookFormat, IntFormat
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.scales import float32
from fmtsim.spec.cast import EncodedParts
from fmtsim.support.errors import ArgumentError, did_you_mean, shown

Parts = tuple[Encoded, ...]
Scale = float | Sequence[float] | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Cast under a static scale, of the cache or of each head; block scales of two levels follow TensorRT-LLM.

    With two levels the static scale s is the tensor's: ``g = 1 / s``, a block has
    ``b = e4m3(g * (amax * RN32(1 / 6)))``, elements are ``e2m1(x * (1 / (b * (1 / g))))`` (0 where b is), and values
    ``element * b * s``; all in float32.
    """

    format: Format

    def encode(self, x: Tensor, scale: float | Tensor) -> Parts:
        """Return the codes of tokens."""
        fmt = self.format
        if not (isinstance(fmt, BlockFormat) and fmt.tensor_scale):
            return (encode(x if _is_one(scale) else x.float() / scale, fmt, pad=True),)
        size = fmt.block[1] or x.shape[-1]
        if x.shape[-1] % size:
            raise ArgumentError(
                f"{fmt.name} has blocks of {size}, which do not divide the {x.shape[-1]} features of a head; choose "
                "a format with a scale a head, such as 'int4_channel'"
            )
        # 1. what brings the tensor into range, and the scale of each block as it is stored
        blocks, g = x.float().unflatten(-1, (-1, size)), 1 / torch.as_tensor(scale, device=x.device)
        g = g[..., None] if g.dim() else g
        amax = blocks.abs().amax(-1, keepdim=True)
        stored = quantize(g * (amax * float32(1 / fmt.element.max)), fmt.scale, overflow="saturate")
        # 2. elements meet one factor of both scales
        factor = torch.where(stored == 0, 0.0, 1 / (stored * (1 / g)))
        codes = encode((blocks * factor).flatten(-2), fmt.element).unpacked()
        parts = EncodedParts(codes, stored.flatten(-2).flatten(0, -2))
        return (Encoded.from_parts(parts, _one_level(fmt), x.shape),)

    def decode(self, parts: Parts, scale: float | Tensor) -> Tensor:
        """Return their values in float32."""
        values = parts[0].decode(out_dtype=torch.float32)
        return values if _is_one(scale) else values * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTokenHead:
    """Scale a token and head by its own amax: ``s = max(amax / max, 1e-6)``, elements ``x * (1 / s)``.

    Integers are rounded by adding half away from zero in float32 and truncating.
    """

    format: str

    def encode(self, x: Tensor, scale: float | Tensor) -> Parts:
        """Return codes and scales of tokens."""
        fmt = get_format(self.format)
        assert isinstance(fmt, BlockFormat)
        s = (x.float().abs().amax(-1, keepdim=True) / fmt.element.max).clamp(min=1e-6)
        y = x.float() * (1 / s)
        y = (y + torch.where(y >= 0, 0.5, -0.5)).trunc() if isinstance(fmt.element, IntFormat) else y
        codes = encode(y, fmt.element).unpacked()
        return (Encoded.from_parts(EncodedParts(codes, s.reshape(-1, 1)), fmt, x.shape),)

    def decode(self, parts: Parts, scale: float | Tensor) -> Tensor:
        """Return their values in float32."""
        return parts[0].decode(out_dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Count steps from a token and head's least value (TurboQuant's values).

    ``s = max((max - min) / (2**bits - 1), 1e-8)``, a code is ``floor((x - min) / s + 0.5)``, at most the last; s and
    min are kept in float16, and a value is ``code * s + min`` of those.
    """

    bits: int

    def encode(self, x: Tensor, scale: float | Tensor) -> Parts:
        """Return codes, steps and least values of tokens."""
        x = x.float()
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        s = ((high - low) / (2**self.bits - 1)).clamp(min=1e-8)
        return encode(((x - low) / s + 0.5).floor(), f"uint{self.bits}"), encode(s, "fp16"), encode(low, "fp16")

    def decode(self, parts: Parts, scale: float | Tensor) -> Tensor:
        """Return their values in float32."""
        codes, s, low = (part.decode(out_dtype=torch.float32) for part in parts)
        return codes * s + low


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """Round a rotated unit vector to Lloyd-Max centroids, beside its norm (TurboQuant's keys).

    ``y = hadamard(x / (norm + 1e-8))``, a code is the nearest centroid of ``lloyd_max``, the upper one half-way, and
    the norm is kept in float16. A value is ``hadamard(norm * (c * (1 / sqrt(sum(c * c) + 1e-16))))``: the centroids c
    are normalised before they are rotated back. Norms and sums of squares have the device's last bits.
    """

    bits: int

    def encode(self, x: Tensor, scale: float | Tensor) -> Parts:
        """Return codes and norms of tokens."""
        x, size = x.float(), x.shape[-1]
        if size < 8 or size & (size - 1):
            below = 1 << max(size.bit_length() - 1, 3)
            raise ArgumentError(
                f"TurboQuant rotates whole heads, and heads have {size} features; choose a model whose heads have "
                f"{below} or {2 * below}, powers of two, or a format without a rotation"
            )
        norm = x.norm(dim=-1, keepdim=True)
        return encode(hadamard(x / (norm + 1e-8), size), lloyd_max(size, self.bits)), encode(norm, "fp16")

    def decode(self, parts: Parts, scale: float | Tensor) -> Tensor:
        """Return their values in float32."""
        c, norm = (part.decode(out_dtype=torch.float32) for part in parts)
        c = c * (1 / ((c * c).sum(-1, keepdim=True) + 1e-16).sqrt())
        return hadamard(norm * c, c.shape[-1])


Rule = Direct | PerTokenHead | Uniform | Rotated
_E4M3, _FP8, _INT8 = Direct(format=get_format("e4m3")), PerTokenHead(format="e4m3_channel"), "int8_channel"
CACHES: Final[dict[str, tuple[Rule, Rule]]] = {
    "fp8_per_token_head": (_FP8, _FP8),
    "int8_per_token_head": (PerTokenHead(format=_INT8), PerTokenHead(format=_INT8)),
    "turboquant_k8v4": (_E4M3, Uniform(bits=4)),
    "turboquant_4bit_nc": (Rotated(bits=4), Uniform(bits=4)),
    "turboquant_k3v4_nc": (Rotated(bits=3), Uniform(bits=4)),
    "turboquant_3bit_nc": (Rotated(bits=3), Uniform(bits=3)),
}
"""vLLM's caches, of keys and of values, by its names (vLLM 0.33.0, vllm/v1/attention/ops)."""


@lru_cache(maxsize=32)
def lloyd_max(size: int, bits: int) -> CodebookFormat:
    """Return the codebook of least squared error for a coordinate of a unit vector: N(0, 1 / size).

    Iterated from even steps over 3.5 standard deviations until no centroid moves by 1e-10, integrals by trapezoids of
    200 steps; centroids and the middles between them are float32, and a number in the middle goes up. Source:
    vLLM 0.33.0, ``quantization/turboquant/centroids.py``, after Zandieh et al., TurboQuant.
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
        scale = self._scales[index]
        if isinstance(scale, Tensor):
            heads = t.shape[-3] if t.dim() > 2 else 1
            if len(scale) != heads:
                kind = ("keys", "values")[index]
                raise ArgumentError(f"{len(scale)} scales for {heads} heads of {kind}; pass one, or one a head of them")
            scale = scale.to(t.device)
        return self._rules[index].encode(t, scale)

    def _decode(self, index: int, parts: Parts) -> Tensor:
        scale = self._scales[index]
        return self._rules[index].decode(parts, scale.to(parts[0].device) if isinstance(scale, Tensor) else scale)


def _rule(fmt: str | Format, side: int) -> Rule:
    """Return how tokens are kept, by a name of a cache (0 for its keys, 1 for its values) or a format."""
    if isinstance(fmt, str) and fmt in CACHES:
        return CACHES[fmt][side]
    if isinstance(fmt, str) and fmt.startswith("turboquant"):
        raise ArgumentError(f"no cache is called {shown(fmt)}{did_you_mean(fmt, CACHES)}")
    record = get_format(fmt)
    if isinstance(record, BlockFormat) and record.block[0] != 1:
        raise ArgumentError(
            f"{record.name} shares scales among tokens; choose a format with block=(1, size) or (1, None)"
        )
    return Direct(format=record)


def _checked(scale: Scale, rule: Rule) -> float | Tensor:
    """Return a static scale, one a head as ``[heads, 1, 1]``."""
    numbers = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
    possible = bool(((numbers > 0) & numbers.isfinite()).all()) and numbers.numel() > 0
    fmt = rule.format if isinstance(rule, Direct) else None
    takes = fmt is not None and (not isinstance(fmt, BlockFormat) or fmt.tensor_scale)
    if not possible or not (takes or bool((numbers == 1).all())):
        raise ArgumentError(
            f"a scale of {shown(scale)} for {rule if fmt is None else fmt.name}; pass a number above 0, or one a head, "
            "and none beside scales that are made of each block alone"
        )
    return float(scale) if isinstance(scale, int | float) else numbers[:, None, None]


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1


@lru_cache(maxsize=32)
def _one_level(fmt: BlockFormat) -> BlockFormat:
    """Return a format of two levels as blocks whose tensor scale lies elsewhere."""
    scaling = dataclasses.replace(fmt.scaling, tensor=None, arithmetic="reciprocal")
    return dataclasses.replace(fmt, name=f"{fmt.name}_static", scaling=scaling, aliases=())
