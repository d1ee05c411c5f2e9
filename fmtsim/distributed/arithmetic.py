# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a reduction, which the simulation and the processes share: scales, casts, hops, counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.arguments import check_dense, check_together
from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode
from fmtsim.distributed.reduction import Reduction
from fmtsim.formats.block import BlockFormat, Format, ScaledFormat
from fmtsim.formats.packing import pack, unpack
from fmtsim.formats.representable import FLOAT_DTYPES
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scaled_cast import scales
from fmtsim.scaling.scales import FLT_MAX, FLT_MIN, float32, reciprocal
from fmtsim.spec.cast import CastSpec, EncodedParts, RandomKey
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, shown

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
    packed = ops.encode_packed(values, spec, None)
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
    if not isinstance(fmt, ScaledFormat):
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


MAX_RANKS = 1 << 16
MAX_CALLS = 1 << 31


class Counts(NamedTuple):
    """Count what became of the elements of one reduction; int64, 0-d each.

    Attributes:
        elements: Elements of the result.
        saturated: Of the result, at the format's largest magnitude.
        spoiled: Of the result, NaN or Inf.
        clipped: Of this rank's finite elements, beyond the largest value before they were rounded.
        flushed: Of this rank's non-zero finite elements, rounded to zero.
        nonfinite: Of this rank's elements, NaN or Inf.
    """

    elements: Tensor
    saturated: Tensor
    spoiled: Tensor
    clipped: Tensor
    flushed: Tensor
    nonfinite: Tensor

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums of two counts."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def to_dict(self) -> dict[str, int]:
        """Return plain numbers; this waits for the device."""
        return {name: int(value) for name, value in self._asdict().items()}


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold the tensors of one rank that are reduced together.

    Args:
        x: [rows, columns], contiguous; the columns are the tensors one behind the other, rows are shards of them.
        sizes: Columns of each tensor, which has a scale of its own.
    """

    x: Tensor
    sizes: tuple[int, ...]

    def float(self) -> "Batch":
        """Return the batch in float32."""
        return self if self.x.dtype == torch.float32 else Batch(self.x.float(), self.sizes)

    def amaxes(self) -> Tensor:
        """Return the largest finite magnitude of each tensor, float32 [tensors], 0 for a tensor without one."""
        magnitudes = torch.where(self.x.isfinite(), self.x.abs(), 0)
        parts = magnitudes.split(self.sizes, 1)
        return torch.stack([part.amax() if part.numel() else part.new_zeros(()) for part in parts])


class Factors(NamedTuple):
    """Factors of each tensor's elements before the first cast and after the last; float32 [tensors]."""

    encode: Tensor
    decode: Tensor


class Hop:
    """Round partial sums to a reduction's format, as values or as the bytes that travel.

    Args:
        reduction: Which.
        call: Number of the reduction, 0 to 2**31 - 1; stochastic rounding draws from a stream of its own each time.
    """

    def __init__(self, reduction: Reduction, call: int = 0) -> None:
        if type(call) is not int or not 0 <= call < MAX_CALLS:
            raise ArgumentError(f"call={shown(call)} is not allowed; choose a whole number from 0 to {MAX_CALLS - 1}")
        self.reduction, self.call = reduction, call
        self.top = float(reduction.format.max)
        rounding, overflow = reduction.rounding, reduction.overflow_rule
        self.spec = CastSpec(format=reduction.format, rounding=rounding, overflow=overflow)
        self.draws = rounding.mode == "stochastic"

    @cached_property
    def exact(self) -> CastSpec:
        """The cast of values that are the format's already."""
        return replace(self.spec, rounding=Rounding())

    def key(self, rank: int, step: int) -> RandomKey | None:
        """Return the random stream of a cast: step 0 is a rank's own tensor, step h the sum that it forms at hop h."""
        return RandomKey(self.reduction.seed, (self.call << 32) + (rank << 16) + step) if self.draws else None

    def round(self, y: Tensor, key: RandomKey | None) -> Tensor:
        """Return float32 values of the format."""
        return ops.quantize(y, self.spec, torch.float32, key, None)

    def round_each(self, y: Tensor, ranks: Sequence[int], step: int, start: int = 0) -> Tensor:
        """Round row i of y as rank ``ranks[i]`` does at a step; random words are those of places from ``start`` on."""
        if not self.draws:
            return self.round(y, None)
        placed = torch.nn.functional.pad(y, (start, 0))
        rounded = [self.round(row, self.key(rank, step)) for row, rank in zip(placed, ranks, strict=True)]
        return torch.stack(rounded)[:, start:]

    def encode(self, values: Tensor) -> Tensor:
        """Return values of the format [..., n] as bytes: uint8 [..., packed_size(n, bits)]."""
        return to_bytes(values, self.exact)

    def decode(self, wire: Tensor, count: int) -> Tensor:
        """Return the float32 values of bytes."""
        return from_bytes(wire, self.spec, count)


def each(verb: Callable[[Tensor, Tensor], Tensor], x: Tensor, sizes: Sequence[int], numbers: Tensor) -> Tensor:
    """Return what a verb makes of each tensor's columns of x and of that tensor's number.

    Args:
        verb: Works on elements.
        x: [..., columns].
        sizes: Columns of each tensor.
        numbers: [tensors].
    """
    if len(sizes) == 1:
        return verb(x, numbers)
    return torch.cat([verb(part, n) for part, n in zip(x.split(sizes, -1), numbers.unbind(), strict=True)], -1)


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return a tensor as a list of one, or a list of tensors.

    Raises:
        DtypeError: It is neither.
    """
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, Sequence):
        raise DtypeError(f"the argument is a {type(tensors).__name__}; pass a tensor, or a list of tensors")
    return list(tensors)


def batch_of(tensors: Sequence[Tensor]) -> Batch:
    """Return tensors of one rank as a batch of one row.

    Raises:
        ArgumentError: There is none, or they are on several devices.
        DtypeError: One is not a floating-point tensor, or their dtypes differ.
    """
    if not tensors:
        raise ArgumentError("there are no tensors to reduce; pass at least one")
    for i, x in enumerate(tensors):
        if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DtypeError(f"tensor {i} is {kind}; reduce float16, bfloat16, float32 or float64")
        check_dense(f"tensor {i}", x)
        if (x.dtype, x.device) != (tensors[0].dtype, tensors[0].device):
            raise DtypeError(
                f"tensor {i} is {x.dtype} on {x.device}, tensor 0 {tensors[0].dtype} on {tensors[0].device}; "
                "reduce tensors of one dtype and device at a time"
            )
    check_together(**{f"tensor {i}": x for i, x in enumerate(tensors)})
    flat = [x.detach().reshape(-1) for x in tensors]
    whole = torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()
    return Batch(whole.unsqueeze(0), tuple(x.numel() for x in tensors))


def fixed_factor(reduction: Reduction, ranks: int) -> float:
    """Return the float32 of what multiplies a scaled tensor; 1 where mu does."""
    return float32({"pre": 1 / ranks, "sqrt": 1 / math.sqrt(ranks)}.get(reduction.factor, 1.0))


def factors_of(amaxes: Tensor, reduction: Reduction, ranks: int, mu: Tensor | None) -> Factors:
    """Return the factors of tensors with these largest magnitudes on all ranks.

    Every operation is float32, rounded to nearest even: ``e = RN(r * f)``, r the reciprocal of the scale by the
    reduction's rule and f the float32 of 1/N, 1, 1/sqrt(N) or mu; e is kept within the normal numbers;
    ``d = RN(RN(1 / e) / N)`` for a mean, ``RN(1 / e)`` for a sum.
    """
    scaling = reduction.scaling
    ones = torch.ones_like(amaxes)
    r = (
        ones
        if scaling is None
        else scales(ones if scaling.statistic == "one" else amaxes, scaling, float(reduction.format.max)).factor
    )
    f = mu if mu is not None else ones * fixed_factor(reduction, ranks)
    encode = (r * f).clamp(min=FLT_MIN, max=FLT_MAX)
    decode = reciprocal(encode)
    return Factors(encode, torch.div(decode, torch.full_like(decode, ranks)) if reduction.average else decode)


def scaled(batch: Batch, encode: Tensor, reduction: Reduction) -> Tensor:
    """Return float32 [rows, columns]: what is rounded for the first hop, ``RN(x * e)``."""
    x = batch.x
    y = each(torch.mul, x, batch.sizes, encode)
    return torch.where(x.isfinite(), y, torch.nan) if reduction.nonfinite == "propagate" else y


def own_counts(x: Tensor, y: Tensor, q: Tensor, top: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return clipped, flushed and nonfinite elements of x, which became y before rounding and q behind it."""
    finite = x.isfinite()
    clipped = (finite & (y.abs() > top)).sum()
    flushed = (finite & (x != 0) & (q == 0)).sum()
    return clipped, flushed, x.numel() - finite.sum()


def result_counts(sums: Tensor, top: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements, saturated and spoiled elements of reduced sums."""
    elements = torch.full((), sums.numel(), device=sums.device)  # a kernel; torch.tensor would wait for the device
    return elements, (sums.abs() == top).sum(), (~sums.isfinite()).sum()


def canonical(x: Tensor) -> Tensor:
    """Return x with every NaN positive and quiet, as processors make others out of products and casts of NaN."""
    return x.masked_fill(x.isnan(), torch.nan)


def chunked(flat: Tensor, ranks: int) -> Tensor:
    """Return a vector as [ranks, ceil(n / ranks)], filled up with zeros: chunk c is row c."""
    length = -(-flat.numel() // ranks)
    return torch.nn.functional.pad(flat, (0, ranks * length - flat.numel())).reshape(ranks, length)


def require_mu(reduction: Reduction, mu: float | Tensor | None, device: torch.device) -> Tensor | None:
    """Return mu as float32, 0-d, the controller's first where none is given; None for fixed factors.

    Raises:
        ArgumentError: mu is given for a fixed factor, or is a number that can be none.
    """
    if reduction.auto is None:
        if mu is not None:
            raise ArgumentError(f"mu={shown(mu)} belongs to factor='auto', not {reduction.factor!r}; leave it out")
        return None
    auto_mu = reduction.auto.initial if mu is None else mu
    if isinstance(auto_mu, Tensor):
        check_dense("mu", auto_mu)
        good = auto_mu.numel() == 1 and auto_mu.dtype in FLOAT_DTYPES
        good = good and (
            auto_mu.device.type != "cpu" or (is_readable(auto_mu) and 0 < float32(float(auto_mu)) < math.inf)
        )
    else:
        good = isinstance(auto_mu, int | float) and 0 < auto_mu <= FLT_MAX and float32(auto_mu) > 0
    if not good:
        raise ArgumentError(f"mu={shown(auto_mu)} is not a factor; pass a finite number above 0")
    return torch.as_tensor(auto_mu, dtype=torch.float32, device=device).reshape(())


def require_ranks(ranks: int) -> None:
    """Refuse a number of ranks that random streams do not number."""
    if not 1 <= ranks < MAX_RANKS:
        raise ArgumentError(f"{ranks} ranks are not supported; choose 1 to {MAX_RANKS - 1}")
