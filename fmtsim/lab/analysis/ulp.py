# SPDX-License-Identifier: Apache-2.0
"""Tensors as codes in their total order: what distances in units of the last place are counted on."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from fmtsim.casts.arguments import check_dense, check_readable
from fmtsim.casts.numpy_arrays import array_bits
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.registry import get_format
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError

FARTHEST = (1 << 63) - 1  # distances of 2**63 and more, between 64-bit numbers of opposite sign, count as this
CHUNK = 1 << 20  # elements looked at in one step: a dozen temporaries of 8 MB
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOWEST = -(1 << 63)


class Kind(NamedTuple):
    """What the bits of an operand mean: a floating-point format, or integers of so many bits."""

    name: str
    bits: int
    format: FloatFormat | None
    signed: bool
    dtype: torch.dtype | None


class Codes(NamedTuple):
    """An operand without a copy: its bits as signed integers of the same size, and their kind."""

    raw: Tensor
    kind: Kind


def read_codes(x: Any, role: str) -> Codes:
    """View a torch tensor or a numpy (or ml_dtypes) array as codes.

    Nothing is copied, but for tensors with torch's negative bit and arrays in foreign byte order or with negative
    strides. ``role`` names the operand in errors.

    Raises:
        ArgumentError: x is neither a tensor nor an array, or is sparse.
        DtypeError: its dtype is complex, packed, quantised by torch, or unknown.
    """
    if isinstance(x, Tensor):
        check_dense(role, x)
        check_readable(role, x)
        kind, raw = _dtype_kind(x.dtype, role), x.detach().resolve_neg()
        size = raw.element_size()
        return Codes(raw.view(_SIGNED[size]) if size in _SIGNED else raw, kind)
    if isinstance(x, numpy.ndarray | numpy.generic):
        array = numpy.asarray(x)
        name = array.dtype.name
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            kind = _dtype_kind(dtype, role)
            return Codes(array_bits(array), kind)
        # Of ml_dtypes those that torch lacks, a code a byte.
        try:
            fmt = get_format(array.dtype)
        except FormatError:
            fmt = None
        if not isinstance(fmt, FloatFormat) or fmt.bits > 8:
            raise DtypeError(f"{role} has dtype {name!r}, which has no order of codes; pass floats or integers")
        return Codes(array_bits(array), Kind(name, fmt.bits, fmt, fmt.signed, None))
    raise ArgumentError(f"{role} is a {type(x).__name__}; pass a torch tensor or a numpy array")


def values(raw: Tensor, kind: Kind) -> Tensor:
    """Return what codes stand for, in float64 (integers beyond 2**53 are rounded)."""
    if kind.format is None:  # integers; unsigned ones are read as signed
        number = raw.double()
        return number if kind.signed else torch.where(raw < 0, number + 2.0**kind.bits, number)
    if kind.dtype is not None:  # torch's own conversion is exact
        return raw.view(kind.dtype).double()
    return _table(kind.format).to(raw.device)[raw.long() & ((1 << kind.bits) - 1)]


def places(raw: Tensor, kind: Kind) -> Tensor:
    """Return the place of each code in the total order, int64; neighbours are 1 apart, so are -0 and +0."""
    wide = raw.long()
    if not kind.signed:
        # Unsigned 64-bit integers move down by 2**63, which keeps their order.
        return wide ^ _LOWEST if kind.bits == 64 else wide & ((1 << kind.bits) - 1)
    if kind.format is None:
        return wide
    # code: s mmm...m; the sign moves to the top of 64 bits, and negative codes count downwards.
    magnitude = wide & ((1 << (kind.bits - 1)) - 1)
    below = -magnitude - int(kind.format.has_negative_zero)
    return torch.where((wide << (64 - kind.bits)) < 0, below, magnitude)


def distances(actual: Tensor, expected: Tensor) -> Tensor:
    """Return how far apart two tensors of places are, at most ``FARTHEST``."""
    apart = torch.maximum(actual, expected) - torch.minimum(actual, expected)  # negative where int64 overflows
    return torch.where(apart < 0, torch.full_like(apart, FARTHEST), apart)


def chunks(actual: Tensor, expected: Tensor, size: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both tensors in row-major order as flat pieces of at most ``size`` elements, on actual's device.

    Only pieces are copied, where strides or devices ask for it.
    """
    count = actual.numel()
    if count <= size:
        yield actual.reshape(-1), expected.reshape(-1).to(actual.device)
    elif actual.is_contiguous() and expected.is_contiguous():
        pairs = zip(actual.view(-1).split(size), expected.view(-1).split(size), strict=True)
        yield from ((first, second.to(actual.device)) for first, second in pairs)
    else:
        # Pieces along the first dimension; of a row that is too long itself, along its own first one.
        rows = max(1, size // (count // actual.shape[0]))
        for first, second in zip(actual.split(rows), expected.split(rows), strict=True):
            whole = first.shape[0] == 1 and first.numel() > size
            yield from chunks(first[0], second[0], size) if whole else chunks(first, second, size)


def _dtype_kind(dtype: torch.dtype, role: str) -> Kind:
    name = dtype_name(dtype)
    try:
        fmt = get_format(dtype) if dtype.is_floating_point and not name.endswith("_x2") else None
    except FormatError:
        fmt = None
    if isinstance(fmt, FloatFormat):
        return Kind(name, fmt.bits, fmt, fmt.signed, dtype)
    if dtype.is_floating_point or dtype.is_complex or name.startswith("q"):
        raise DtypeError(
            f"{role} has dtype {dtype}, whose elements have no order of codes; compare {role}.view(torch.uint8), "
            "its parts, or decoded values"
        )
    return Kind(name, 8 * dtype.itemsize, None, dtype.is_signed, dtype)


@lru_cache(maxsize=16)
def _table(fmt: FloatFormat) -> Tensor:
    return torch.tensor([fmt.value(code) for code in range(1 << fmt.bits)], dtype=torch.float64)
