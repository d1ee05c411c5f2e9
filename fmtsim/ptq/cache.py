# SPDX-License-Identifier: Apache-2.0
"""A cache of keys and values in a quantised format, as decoding appends to it token by token."""

import dataclasses

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.registry import get_format
from fmtsim.support.errors import ArgumentError, shown


class QuantisedCache:
    """Keep keys and values as packed codes and scales, and give them back as numbers.

    What is appended is quantised once, by itself, and never again: the cache holds the same bits whether tokens arrive
    one by one or together. So a block of a format must lie within a token and a head: ``(1, size)``, or ``(1, None)``
    for a scale a token and head. An element format is cast under the static scale that is given, and so is a format
    with a scale of the tensor, whose tensor scale it is (``"nvfp4"``: its block scales are amax / 6 in E4M3, and
    elements are multiplied by their reciprocals).

    Args:
        key: Format of the keys, a name or a record, such as ``"int8_channel"`` or ``"int4_channel"`` (a scale a token
            and head), ``"mxfp8"``, ``"nvfp4"`` or ``"e4m3"``.
        value: Format of the values; None is that of the keys.
        key_scale: The static scale of keys: what they are divided by before the cast.
        value_scale: The same of values.

    Raises:
        ArgumentError: A format that shares scales among tokens, or a static scale that is not above 0 or stands beside
            scales that are made of each block alone.

    >>> cache = QuantisedCache("int8_channel")
    >>> cache.append(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))
    >>> cache.append(torch.ones(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    >>> cache.keys().shape, cache.nbytes
    (torch.Size([1, 2, 4, 16]), 320)
    """

    def __init__(
        self, key: str | Format, value: str | Format | None = None, *, key_scale: float = 1.0, value_scale: float = 1.0
    ) -> None:
        formats = [get_format(f) for f in (key, key if value is None else value)]
        static = [not isinstance(f, BlockFormat) or f.tensor_scale for f in formats]
        self._formats, self._factors = tuple(map(_with_static_scale, formats)), (key_scale, value_scale)
        self._chunks: tuple[list[Encoded], list[Encoded]] = ([], [])
        for fmt, scale, takes_scale in zip(formats, self._factors, static, strict=True):
            if isinstance(fmt, BlockFormat) and fmt.block[0] != 1:
                raise ArgumentError(
                    f"{fmt.name} shares scales among tokens; choose a format with block=(1, size) or (1, None)"
                )
            if not (isinstance(scale, int | float) and 0 < scale < float("inf")) or (scale != 1 and not takes_scale):
                raise ArgumentError(
                    f"a scale of {shown(scale)} for {fmt.name}; pass a number above 0, and none beside scales that are "
                    "made of each block alone"
                )

    def rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as the cache would give them back, in their own dtypes, without adding them."""
        decoded = (self._decode(i, self._encode(i, t)).to(t.dtype) for i, t in enumerate((key, value)))
        return next(decoded), next(decoded)

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
            if chunks and (*chunks[0].shape[:-2], chunks[0].shape[-1]) != (*t.shape[:-2], t.shape[-1]):
                raise ArgumentError(
                    f"{kind} {tuple(t.shape)} do not continue {tuple(chunks[0].shape)}; only tokens grow"
                )
        for i, t in enumerate((key, value)):
            self._chunks[i].append(self._encode(i, t))

    def keys(self) -> Tensor:
        """Return all keys, float32 ``[..., tokens, d]``."""
        return self._read(0)

    def values(self) -> Tensor:
        """Return all values, float32 ``[..., tokens, dv]``."""
        return self._read(1)

    def __len__(self) -> int:
        return sum(chunk.shape[-2] for chunk in self._chunks[0])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(chunk.nbytes for chunks in self._chunks for chunk in chunks)

    def _read(self, index: int) -> Tensor:
        if not self._chunks[index]:
            raise ArgumentError("the cache is empty; append keys and values first")
        return torch.cat([self._decode(index, chunk) for chunk in self._chunks[index]], -2)

    def _encode(self, index: int, t: Tensor) -> Encoded:
        scale = self._factors[index]
        return encode(t if scale == 1 else t.float() / scale, self._formats[index], pad=True)

    def _decode(self, index: int, chunk: Encoded) -> Tensor:
        values = chunk.decode(out_dtype=torch.float32)
        return values if self._factors[index] == 1 else values * self._factors[index]


def _with_static_scale(fmt: Format) -> Format:
    """Return a format with a scale of the tensor as blocks under a scale that is given; others as they are."""
    if not (isinstance(fmt, BlockFormat) and fmt.tensor_scale):
        return fmt
    scaling = dataclasses.replace(fmt.scaling, tensor=None, arithmetic="reciprocal")
    return dataclasses.replace(fmt, name=f"{fmt.name}_static", scaling=scaling, aliases=())
