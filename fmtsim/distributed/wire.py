# SPDX-License-Identifier: Apache-2.0
"""Encoded tensors as rows of bytes, and back."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.packing import pack, unpack
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.errors import ArgumentError

_PARTS = ("codes", "scales", "tensor_scale", "offsets")


def to_rows(encoded: Encoded, rows: int) -> Tensor:
    """Return codes, scales and offsets side by side, uint8 [rows, bytes]; rows is 1 or that of a matrix."""
    parts = [getattr(encoded, name) for name in _PARTS]
    wires = [part.reshape(rows, -1).contiguous().view(torch.uint8) for part in parts if part is not None]
    return torch.cat(wires, 1)


def from_rows(wire: Tensor, like: Encoded, rows: int | None = None) -> Encoded:
    """Return what ``to_rows`` was given.

    Args:
        wire: uint8 [rows, bytes], or [1, bytes] of a whole tensor.
        like: An encoded tensor of the same format: one row of the matrix, or of the whole tensor's shape.
        rows: Rows of the matrix; None returns ``like``'s shape.
    """
    fields: dict[str, Any] = {}
    start = 0
    for name in _PARTS:
        part: Tensor | None = getattr(like, name)
        if part is None:
            continue
        piece = wire[:, start : start + part.nbytes].clone(memory_format=torch.contiguous_format)
        taken = piece.reshape(-1).view(part.dtype)
        fields[name] = taken.reshape(part.shape if rows is None else (rows, *part.shape[1:]))
        start += part.nbytes
    shape = like.shape if rows is None else torch.Size((rows, *like.shape[1:]))
    return Encoded(format=like.format, shape=shape, dim=like.dim, **fields)


def to_bytes(values: Tensor, spec: CastSpec) -> Tensor:
    """Return values of an element format, 1-d, as uint8 [packed_size(n, bits)].

    A kernel that writes packed codes is taken where there is one. The codes' range is not looked at, here and in
    ``from_bytes``: that would wait for a device.
    """
    packed = ops.encode_packed(values, spec.to_json(), None)
    if packed is not None:
        return packed.codes.view(torch.uint8)
    return pack(ops.encode(values, spec).codes, spec.format.bits, validated=True)


def from_bytes(wire: Tensor, spec: CastSpec, count: int) -> Tensor:
    """Return the float32 values [..., count] of bytes [..., packed_size(count, bits)]."""
    return ops.decode(EncodedParts(unpack(wire, spec.format.bits, count)), spec, torch.float32, validated=True)


def require_row_blocks(fmt: Format) -> None:
    """Refuse formats whose scales reach over several rows, which could not be sent apart.

    Raises:
        ArgumentError: The format has such scales.
    """
    if not isinstance(fmt, BlockFormat | LogTileFormat):
        return
    level = isinstance(fmt, BlockFormat) and fmt.tensor_scale
    if fmt.block[0] != 1 or level:
        what = "a scale of the whole tensor" if level else f"blocks of {fmt.block[0] or 'all'} rows"
        raise ArgumentError(
            f"{fmt.name} has {what}, but rows are sent apart; choose a format with blocks (1, size), such as 'logfmt8'"
        )


@lru_cache(maxsize=64)
def row_template(fmt: Format, width: int, device: torch.device) -> Encoded:
    """Return one encoded row of zeros."""
    return encode(torch.zeros(1, width, device=device), fmt, pad=True)
