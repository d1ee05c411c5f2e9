# SPDX-License-Identifier: Apache-2.0
"""A cache of keys and values in a quantised format, as decoding appends to it token by token."""

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
    for a scale a token and head. An element format is cast under the static scale that is given.

    Args:
        key: Format of the keys, a name or a record, such as ``"int8_channel"`` (a scale a token and head),
            ``"nvfp4"``-like blocks without a scale of the tensor, or ``"e4m3"``.
        value: Format of the values; None is that of the keys.
        key_scale: What keys are divided by before an element format's cast.
        value_scale: The same of values.

    >>> cache = QuantisedCache("int8_channel")
    >>> cache.append(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))
    >>> cache.append(torch.ones(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    >>> cache.keys().shape, cache.nbytes
    (torch.Size([1, 2, 4, 16]), 320)
    """

    def __init__(
        self, key: str | Format, value: str | Format | None = None, *, key_scale: float = 1.0, value_scale: float = 1.0
    ) -> None:
        self._formats = tuple(get_format(f) for f in (key, key if value is None else value))
        self._factors = (key_scale, value_scale)
        self._chunks: tuple[list[Encoded], list[Encoded]] = ([], [])
        for fmt, scale in zip(self._formats, self._factors, strict=True):
            blocks = isinstance(fmt, BlockFormat)
            if blocks and (fmt.block[0] != 1 or fmt.tensor_scale):  # type: ignore[union-attr]
                raise ArgumentError(
                    f"{fmt.name} shares scales among tokens; choose a format with block=(1, size) or (1, None) and no "
                    "scale of the tensor"
                )
            if not scale > 0 or (blocks and scale != 1):
                raise ArgumentError(
                    f"a scale of {shown(scale)} for {fmt.name}; pass one above 0, and none beside blocks"
                )

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
        for t, chunks, fmt, scale in zip((key, value), self._chunks, self._formats, self._factors, strict=True):
            chunks.append(encode(t if scale == 1 else t / scale, fmt, pad=True))

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
        whole = torch.cat([chunk.decode(out_dtype=torch.float32) for chunk in self._chunks[index]], -2)
        return whole if self._factors[index] == 1 else whole * self._factors[index]
