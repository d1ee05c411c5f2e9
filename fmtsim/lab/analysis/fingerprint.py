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
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fmtsim.casts.ops import fused_engine, load_engine
from fmtsim.support.dispatch import is_dense, is_readable
from fmtsim.support.errors import DtypeError

_RUN = 1 << 16  # words of one sum: their multipliers fit a processor's second-level cache
_SHORTEST = 256  # words of a row: shorter ones are taken together, but for the first dimension
_AT_ONCE = 1 << 26  # words whose products are kept at once
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MASKS = {torch.float32: (0x7FFFFFFF, 0), torch.bfloat16: (0x7FFF, 0x7FFF), torch.float16: (0x7FFF, 0x7FFF)}
_GOLDEN = 0x9E3779B97F4A7C15


Largest = tuple[torch.dtype, int] | tuple[Tensor, Tensor] | None  # bits of a magnitude, or least and greatest element
_NUMBERS = 1 << 16  # of a buffer on a GPU, which has room for the fingerprints of thousands of tensors


class Fingerprint(NamedTuple):
    """What is kept of a tensor."""

    hash: str  # 16 hexadecimal digits, of all its bits
    parts: tuple[str, ...]  # hashes of its shares, where its first dimension is a multiple of the batch's
    # largest magnitude of floating-point tensors of 16 bits and more, NaN where there is a NaN; else None
    amax: float | None


class Fingerprints:
    """Collect fingerprints without waiting for a device; a tensor that has not changed is read once.

    Attributes:
        batch: Size of the batch, whose members get hashes of their own.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._found: list[_Sums | _Place] = []
        self._kinds: dict[Any, _Kind] = {}
        self._rows: dict[Any, int] = {}
        self._known: dict[Any, tuple[weakref.ref[Tensor], int, int]] = {}

    def add(self, x: Any) -> tuple[int, "_Kind"] | None:
        """Read a tensor; return the place of its fingerprint, and what tensors like it have in common; or None."""
        dense = is_dense(x)
        if not dense and not has_bits(x):
            return None
        plain = dense and x.is_contiguous()
        kind = self._kinds.get((x.shape, x.dtype, x.device, self.batch)) or self._kind_of(x)
        version = -1 if x.is_inference() else x._version
        address = x.data_ptr() if plain else 0
        # Views of the same numbers in the same rows, as long as a tensor of them lives.
        key = (address, kind.rows) if plain else id(x)
        earlier = self._known.get(key)
        if earlier is not None and earlier[1] == version >= 0:
            other = earlier[0]()
            if other is not None and other._version == version and (other is x or plain):
                return earlier[2], kind
        place = None
        if kind.buffer is not None and plain:
            place = kind.read(x, address)
        elif kind.buffer is not None and dense:
            copy = x.detach().contiguous()
            place = kind.read(copy, copy.data_ptr())
        self._found.append(_Sums(*_read(x.detach()), kind.shared) if place is None else place)
        last = len(self._found) - 1
        self._known[key] = weakref.ref(x), version, last
        return last, kind

    def _kind_of(self, x: Tensor) -> "_Kind":
        """Return what tensors of a shape, dtype and device have in common."""
        shape, engine = x.shape, fused_engine(x)
        shared = self.batch > 1 and len(shape) > 1 and shape[0] % self.batch == 0
        width = _width(shape, x.element_size())
        # Of no numbers there is nothing to launch, and of float64 the kernel finds no largest magnitude.
        by_kernel = engine is not None and x.numel() and not x.is_complex() and x.dtype != torch.float64
        buffer = None
        if by_kernel:
            others = (b.buffer for b in self._kinds.values() if b.buffer is not None)
            buffer = next((b for b in others if b.device == x.device), None) or _Buffer(x.device, engine)
        rows = self._rows.setdefault((width, x.numel(), x.dtype, shared), len(self._rows))
        kind = _Kind(shape, width, self.batch if shared else 1, x.dtype, shared, rows, buffer)
        self._kinds[shape, x.dtype, x.device, self.batch] = kind
        return kind

    def forget(self) -> None:
        """Read every tensor anew from here on."""
        self._known.clear()

    def finish(self) -> list[Fingerprint]:
        """Return all fingerprints; they are computed where the tensors lie, and copied at once."""
        places = [item for item in self._found if isinstance(item, _Place)]
        # The fingerprints that kernels have written.
        copies = {id(numbers): numbers.cpu().numpy() for numbers in {id(p.numbers): p.numbers for p in places}.values()}
        texts = {key: numbers.astype(">i8").tobytes().hex() for key, numbers in copies.items()}
        largest: list[Largest] = [
            (kind.dtype, int(copies[id(numbers)][first + 1])) if kind.dtype in _MASKS else None
            for numbers, first, kind in places
        ]
        prints = []
        for (numbers, first, kind), amax in zip(places, _magnitudes(largest), strict=True):
            text, start = texts[id(numbers)], 16 * first
            parts = range(start + 32, start + 16 * (2 + kind.members), 16) if kind.shared else ()
            prints.append(Fingerprint(text[start : start + 16], tuple([text[at : at + 16] for at in parts]), amax))
        by_kernel = iter(prints)
        by_sums = iter(_prints_of([item for item in self._found if isinstance(item, _Sums)], self.batch))
        return [next(by_kernel if isinstance(item, _Place) else by_sums) for item in self._found]


class _Sums(NamedTuple):
    """A tensor's sums of runs, int64, where it lies, what tells its largest magnitude, and whether members count."""

    sums: Tensor
    largest: Largest
    shared: bool


class _Place(NamedTuple):
    """Where a kernel writes a tensor's hash, the bits of its largest magnitude, and the hashes of its shares."""

    numbers: Tensor
    first: int
    kind: "_Kind"


class _Kind(NamedTuple):
    """What is known of tensors of a shape, dtype and device: elements of a row, shares, and where a kernel writes.

    ``rows`` is equal for tensors whose words lie in the same rows.
    """

    shape: tuple[int, ...]
    width: int
    members: int
    dtype: torch.dtype
    shared: bool
    rows: int
    buffer: "_Buffer | None"

    def read(self, x: Tensor, address: int) -> _Place | None:
        """Read a plain contiguous tensor by the kernel, None where it does not take it."""
        buffer = self.buffer
        assert buffer is not None
        launch = buffer.engine.fingerprint(x, self.width, self.members, address)
        if launch is None:
            return None
        numbers, first = buffer.room(2 + self.members)
        launch(address, buffer.address + 8 * first, buffer.multipliers)
        return _Place(numbers, first, self)


class _Buffer:
    """Zeros on a GPU for the numbers of many tensors: one copy brings all to the host."""

    def __init__(self, device: torch.device, engine: Any) -> None:
        self.device, self.engine, self._factors = device, engine, _multipliers(device)
        self.multipliers = self._factors.data_ptr()
        self._used, self._size, self._numbers, self.address = 0, 0, torch.empty(0), 0

    def room(self, count: int) -> tuple[Tensor, int]:
        """Return a tensor, which lies at ``address``, and where so many of its numbers are free."""
        first, self._used = self._used, self._used + count
        if self._used > self._size:
            first, self._used, self._size = 0, count, max(_NUMBERS, count)
            self._numbers = torch.zeros(self._size, dtype=torch.int64, device=self.device)
            self.address = self._numbers.data_ptr()
        return self._numbers, first


def has_bits(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a tensor whose elements have one order in memory: not sparse, distributed, fake or None."""
    return is_dense(x) or (
        isinstance(x, Tensor)
        and x.layout == torch.strided
        and not x.is_quantized
        and is_readable(x)
        and not is_traceable_wrapper_subclass(x)
    )


def _prints_of(read: list[_Sums], batch: int) -> list[Fingerprint]:
    if not read:
        return []
    sums = [item.sums for item in read]
    together = sums if len({x.device for x in sums}) == 1 else [x.cpu() for x in sums]
    mixed = _mixed(torch.cat(together))
    lengths, shares = [len(item) for item in together], [batch if item.shared else 1 for item in read]
    members = iter(_totals(mixed, [n // many for n, many in zip(lengths, shares, strict=True) for _ in range(many)]))
    totals = [
        (hashes, [next(members) for _ in range(many)])
        for hashes, many in zip(_totals(mixed, lengths), shares, strict=True)
    ]
    return [
        Fingerprint(hashes, tuple(parts) if item.shared else (), amax)
        for (hashes, parts), item, amax in zip(totals, read, _magnitudes([item.largest for item in read]), strict=True)
    ]


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
    sums, largest = load_engine("cpu").weighted_sums(words, numbers, both)
    return sums.view(-1), (x.dtype, largest)


def weighted_sums(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return what the CPU engine's function of this name does, in torch operations, for all devices."""
    rows, width = words.shape
    size = len(multipliers)
    runs, step = -(-width // size), max(1, _AT_ONCE // min(width, size))
    sums = torch.empty(rows, runs, dtype=torch.int64, device=words.device)
    for run in range(runs):
        for start in range(0, rows, step):
            piece = words[start : start + step, run * size : (run + 1) * size]
            torch.sum(piece * multipliers[: piece.shape[1]], 1, out=sums[start : start + step, run])
    return sums


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
def _multipliers(device: torch.device, count: int = _RUN) -> Tensor:
    """Return the first numbers of splitmix64, made odd; int64, as all arithmetic modulo 2**64 is here."""
    return (_mixed(torch.arange(1, count + 1) * _signed(_GOLDEN)) | 1).to(device)


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)


def _mixed(z: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, which is one to one, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        upper = z >> shift
        upper &= (1 << 64 - shift) - 1
        z ^= upper
        z *= _signed(factor)
    return z


def _totals(mixed: Tensor, lengths: list[int]) -> list[str]:
    """Return the sums of groups of these lengths, each number times an odd one of its place in its group."""
    if not len(mixed):
        return ["0" * 16] * len(lengths)
    count, device = torch.tensor(lengths), mixed.device
    ends = count.cumsum(0).to(device)
    starts, places = ends - count.to(device), torch.arange(len(mixed), device=device)
    places -= torch.repeat_interleave(starts, count.to(device), output_size=len(mixed))
    products = _multipliers(device, 1 << max(10, (max(lengths) - 1).bit_length())).index_select(0, places)
    products *= mixed
    sums = torch.nn.functional.pad(products.cumsum(0), (1, 0))
    text = (sums[ends] - sums[starts]).cpu().numpy().astype(">i8").tobytes().hex()
    return [text[at : at + 16] for at in range(0, len(text), 16)]


def _magnitudes(largest: list[Largest]) -> list[float | None]:
    """Return the largest magnitudes, copied once for each dtype and device."""
    groups: dict[Any, list[int]] = {}
    for place, values in enumerate(largest):
        if values is not None:
            groups.setdefault(
                values[0] if isinstance(values[0], torch.dtype) else (values[0].dtype, values[0].device), []
            ).append(place)
    amaxes: list[float | None] = [None] * len(largest)
    for kind, places in groups.items():
        if isinstance(kind, torch.dtype):
            words = torch.tensor([largest[place][1] for place in places], dtype=_WORDS[kind.itemsize])  # type: ignore[index]
            numbers = words.view(kind).double()
        else:
            pairs = torch.stack([x for place in places for x in largest[place] or ()])  # type: ignore[misc]
            numbers = pairs.cpu().double().view(-1, 2).abs().amax(1)
        for place, number in zip(places, numbers.tolist(), strict=True):
            amaxes[place] = number
    return amaxes
