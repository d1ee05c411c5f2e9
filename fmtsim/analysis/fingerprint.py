# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors: 64 bits that tell whether any bit differs, computed on the device where a tensor lies.

A tensor's elements are read in row-major order as whole numbers of up to 32 bits, so that strides do not matter while
NaN payloads and the signs of zeros do. Each run of ``_RUN`` of them at most is summed modulo 2**64, each times an odd
random number of its place; runs end where rows do. The sums of a tensor are mixed, multiplied likewise and added. Two
tensors that differ have one fingerprint with a probability below 2**-32 where only signs of 32-bit words differ, and
near 2**-64 otherwise. The definition names no device: fingerprints of two machines compare.
"""

import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from fmtsim.errors import DtypeError
from fmtsim.ops import load_engine

_RUN = 1 << 16  # words of one sum: their multipliers fit a processor's second-level cache
_SHORTEST = 256  # words of a row: shorter ones are taken together, but for the first dimension
_AT_ONCE = 1 << 26  # words whose products are kept at once
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MASKS = {torch.float32: (0x7FFFFFFF, 0), torch.bfloat16: (0x7FFF, 0x7FFF), torch.float16: (0x7FFF, 0x7FFF)}
_GOLDEN = 0x9E3779B97F4A7C15


Largest = tuple[torch.dtype, int] | tuple[Tensor, Tensor] | None  # bits of a magnitude, or least and greatest element


class Fingerprint(NamedTuple):
    """What is kept of a tensor.

    Attributes:
        hash: Of all its bits.
        parts: Hashes of its shares, where its first dimension is a multiple of the batch's.
        amax: Largest magnitude of floating-point tensors of 16 bits and more, NaN where there is a NaN; else None.
    """

    hash: int
    parts: tuple[int, ...]
    amax: float | None


class Fingerprints:
    """Collect fingerprints without waiting for a device; a tensor that has not changed is read once.

    Attributes:
        batch: Size of the batch, whose members get hashes of their own.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._sums: list[Tensor] = []
        self._largest: list[Largest] = []
        self._shared: list[bool] = []
        self._known: dict[Any, tuple[weakref.ref[Tensor], int, int]] = {}

    def add(self, x: Tensor) -> int:
        """Read a tensor; return the place of its fingerprint."""
        version = -1 if x.is_inference() else x._version
        shared = self.batch > 1 and x.dim() > 1 and x.shape[0] % self.batch == 0
        # Views of the same numbers in the same rows, as long as a tensor of them lives.
        plain = x.is_contiguous()
        key = (x.data_ptr(), _width(x.shape, x.element_size()), x.numel(), x.dtype, shared) if plain else id(x)
        known = self._known.get(key)
        if known is not None and known[1] == version >= 0:
            other = known[0]()
            if other is not None and other._version == version and (other is x or type(key) is tuple):
                return known[2]
        place = len(self._sums)
        found, largest = _read(x.detach())
        self._sums.append(found)
        self._largest.append(largest)
        self._shared.append(shared)
        self._known[key] = (weakref.ref(x), version, place)
        return place

    def forget(self) -> None:
        """Read every tensor anew from here on."""
        self._known.clear()

    def finish(self) -> list[Fingerprint]:
        """Return all fingerprints."""
        lengths, shared = numpy.array([len(each) for each in self._sums], int), numpy.array(self._shared, bool)
        mixed = _mixed(_numbers(self._sums))
        members = numpy.repeat(lengths[shared] // max(self.batch, 1), self.batch)
        parts = iter(_totals(mixed[numpy.repeat(shared, lengths)], members).reshape(-1, max(self.batch, 1)).tolist())
        hashes = zip(_totals(mixed, lengths).tolist(), _magnitudes(self._largest), self._shared, strict=True)
        return [Fingerprint(own, tuple(next(parts)) if apart else (), amax) for own, amax, apart in hashes]


def _read(x: Tensor) -> tuple[Tensor, Largest]:
    """Return the sums of a tensor's runs, int64, on its device, and what tells its largest magnitude.

    Raises:
        DtypeError: The tensor is sparse or quantised by torch.
    """
    words = _words(x)
    if not words.numel():
        return torch.zeros(0, dtype=torch.int64, device=x.device), None
    numbers, masks = _multipliers(x.device), _MASKS.get(x.dtype)
    if not x.is_cpu:
        return weighted_sums(words, numbers).flatten(), _range(x)
    if masks is None:
        return load_engine("cpu").weighted_sums(words, numbers)[0].view(-1), _range(x)
    both = masks if words.dtype == torch.int32 else (masks[0], 0)  # an odd row of 16 bits is not read in pairs
    found, largest = load_engine("cpu").weighted_sums(words, numbers, both)
    return found.view(-1), (x.dtype, largest)


def weighted_sums(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return what the CPU engine's function of this name does, in torch operations, for all devices."""
    rows, width = words.shape
    size = len(multipliers)
    runs, step = -(-width // size), max(1, _AT_ONCE // min(width, size))
    found = torch.empty(rows, runs, dtype=torch.int64, device=words.device)
    for run in range(runs):
        for start in range(0, rows, step):
            piece = words[start : start + step, run * size : (run + 1) * size]
            torch.sum(piece * multipliers[: piece.shape[1]], 1, out=found[start : start + step, run])
    return found


def _words(x: Tensor) -> Tensor:
    """View a tensor as a matrix of whole numbers, whose rows lie inside one of the first dimension."""
    if x.dtype == torch.float32 and x.is_contiguous() and x.numel() and not x.is_neg():  # the usual one, sooner
        return x.view(torch.int32).view(-1, _width(x.shape, 4))
    if x.layout != torch.strided or x.is_quantized:
        raise DtypeError(f"a tensor of layout {x.layout} and dtype {x.dtype} has no bits in order; leave it out")
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.resolve_neg().contiguous()
    size = x.element_size()
    width = _width(x.shape, size)
    flat = x.view(-1) if x.dim() else x.view(1)
    if size < 4 and width * size % 4 == 0 and flat.storage_offset() * size % 4 == 0:
        flat = flat.view(_WORDS[size]).view(torch.int32)
    elif size < 4 and width * size % 4 == 0:
        flat = flat.clone().view(torch.int32)
    else:
        flat = flat.view(_WORDS[size])
    count = x.numel() // width if width else 0
    return flat.view(count, -1) if count else flat.view(0, 1)


@lru_cache(maxsize=4096)
def _width(shape: tuple[int, ...], size: int) -> int:
    """Return how many elements are a row: all of a vector, else so many of the last dimensions."""
    width = 1
    for extent in reversed(shape if len(shape) < 2 else shape[1:]):
        width *= extent
        if len(shape) > 1 and width * size >= 4 * _SHORTEST:
            break
    return width


def _range(x: Tensor) -> tuple[Tensor, Tensor] | None:
    if not x.numel() or not x.is_floating_point() or x.element_size() == 1 or "x2" in str(x.dtype):
        return None  # torch has no such function of 8 bits, and casts cost more than hashes
    low, high = torch.aminmax(x)
    return low, high


@lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    return torch.from_numpy(_odd_numbers(_RUN).view(numpy.int64)).to(device)


@lru_cache(maxsize=4)
def _odd_numbers(count: int) -> Any:
    """Return the first numbers of splitmix64, made odd."""
    state = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(_GOLDEN)
    return _mixed(state) | numpy.uint64(1)


def _mixed(z: Any) -> Any:
    """Return the finaliser of splitmix64, which is one to one."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> numpy.uint64(shift))) * numpy.uint64(factor)
    return z ^ (z >> numpy.uint64(31))


def _totals(mixed: Any, lengths: Any) -> Any:
    """Return the sums of groups of these lengths, each number times an odd one of its place in its group."""
    found, some = numpy.zeros(len(lengths), numpy.uint64), lengths > 0
    if not some.any():
        return found
    starts = numpy.cumsum(lengths) - lengths
    places = numpy.arange(len(mixed)) - numpy.repeat(starts, lengths)
    numbers = _odd_numbers(1 << max(10, int(lengths.max() - 1).bit_length()))
    found[some] = numpy.add.reduceat(mixed * numbers[places], starts[some])
    return found


def _numbers(each: list[Tensor]) -> Any:
    """Return tensors of all devices one after another, copied once from each device."""
    devices = {x.device for x in each}
    if len(devices) > 1:
        each = [x.cpu() for x in each]
    whole = torch.cat(each).cpu() if each else torch.zeros(0, dtype=torch.int64)
    return whole.numpy().view(numpy.uint64)


def _magnitudes(largest: list[Largest]) -> list[float | None]:
    """Return the largest magnitudes, copied once for each dtype and device."""
    groups: dict[Any, list[int]] = {}
    for place, each in enumerate(largest):
        if each is not None:
            groups.setdefault(
                each[0] if isinstance(each[0], torch.dtype) else (each[0].dtype, each[0].device), []
            ).append(place)
    found: list[float | None] = [None] * len(largest)
    for kind, places in groups.items():
        if isinstance(kind, torch.dtype):
            words = torch.tensor([largest[place][1] for place in places], dtype=_WORDS[kind.itemsize])  # type: ignore[index]
            numbers = words.view(kind).double()
        else:
            pairs = torch.stack([x for place in places for x in largest[place] or ()])  # type: ignore[misc]
            numbers = pairs.cpu().double().view(-1, 2).abs().amax(1)
        for place, number in zip(places, numbers.tolist(), strict=True):
            found[place] = number
    return found
