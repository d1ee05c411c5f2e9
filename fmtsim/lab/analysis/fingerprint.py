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

_RUN = 1 << 16  # words of one sum: their multipliers fit a processor's second-level cache
_SHORTEST = 256  # words of a row: shorter ones are joined, but for the first dimension
_AT_ONCE = 1 << 26  # words whose products are kept at once
_NUMBERS = 1 << 16  # of a buffer on a GPU, which has room for the fingerprints of thousands of tensors
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MASKS = {torch.float32: (0x7FFFFFFF, 0), torch.bfloat16: (0x7FFF, 0x7FFF), torch.float16: (0x7FFF, 0x7FFF)}
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of splitmix64, signed as int64 is
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))

Largest = tuple[torch.dtype, int] | tuple[Tensor, Tensor] | None  # bits of a magnitude, or least and greatest element


class Fingerprint(NamedTuple):
    """What is kept of a tensor."""

    hash: str  # 16 hexadecimal digits, of all its bits
    parts: tuple[str, ...]  # hashes of its shares, where its first dimension is a multiple of the batch's
    # largest magnitude of floating-point tensors of 16 bits and more, NaN where there is a NaN; else None
    amax: float | None


class Layout(NamedTuple):
    """What tensors of one shape, dtype and device have in common, in a batch of one size."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    width: int  # elements of a row
    members: int  # of the batch, whose hashes are the parts; 1 where the first dimension is no multiple of the batch
    rows: int  # a number that tensors share whose words lie in the same rows
    engine: Any  # the engine whose kernel reads such tensors, None where torch or the CPU engine does


class _Reading(NamedTuple):
    """What was computed of a tensor before its fingerprint is asked for."""

    layout: Layout
    numbers: Tensor  # int64: the sums of its runs, or the buffer that a kernel adds to
    first: int  # place in the buffer of hash, bits of the largest magnitude and the members' hashes; -1 for sums
    largest: Largest  # of sums


class Fingerprints:
    """Collect fingerprints without waiting for a device; a tensor that has not changed is read once.

    Attributes:
        batch: Size of the batch, whose members get hashes of their own.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._readings: list[_Reading] = []
        self._layouts: dict[Any, Layout] = {}
        self._rows: dict[Any, int] = {}
        self._buffers: dict[torch.device, tuple[Tensor, int]] = {}  # the last one, and how many of its numbers are used
        self._earlier: dict[Any, tuple[weakref.ref[Tensor], int, int]] = {}  # tensor, version, index of its reading

    def add(self, x: Any) -> tuple[int, Layout] | None:
        """Read a tensor; return the index of its fingerprint and its layout, None of what has no bits."""
        dense = is_dense(x)
        if not dense and not has_bits(x):
            return None
        plain = dense and x.is_contiguous()
        layout = self._layouts.get((x.shape, x.dtype, x.device, self.batch)) or self._layout(x)
        # 1. A tensor of the same version has the same bits, and so has a view of the same numbers in the same rows, as
        #    long as a tensor of them lives. Inference tensors count no versions.
        version = -1 if x.is_inference() else x._version
        address = x.data_ptr() if plain else 0
        key = (address, layout.rows) if plain else id(x)
        earlier = self._earlier.get(key)
        if earlier is not None and earlier[1] == version >= 0:
            other = earlier[0]()
            if other is not None and other._version == version and (other is x or plain):
                return earlier[2], layout
        # 2. On a GPU one kernel adds all that a fingerprint consists of to zeros in a buffer.
        reading = None
        if layout.engine is not None and dense:
            contiguous = x if plain else x.detach().contiguous()
            address = address or contiguous.data_ptr()
            launch = layout.engine.fingerprint(contiguous, layout.width, layout.members, address)
            if launch is not None:
                numbers, first = self._reserve(x.device, 2 + layout.members)
                launch(address, numbers.data_ptr() + 8 * first, _multipliers(x.device).data_ptr())
                reading = _Reading(layout, numbers, first, None)
        # 3. Elsewhere the sums of runs are computed now, and their hash with those of all other tensors.
        if reading is None:
            sums, largest = _sum_runs(x.detach())
            reading = _Reading(layout, sums, -1, largest)
        index = len(self._readings)
        self._readings.append(reading)
        self._earlier[key] = weakref.ref(x), version, index
        return index, layout

    def _layout(self, x: Tensor) -> Layout:
        shape, engine = x.shape, fused_engine(x)
        members = self.batch if self.batch > 1 and len(shape) > 1 and shape[0] % self.batch == 0 else 1
        width = _row_width(shape, x.element_size())
        # Of no numbers there is nothing to launch, and of float64 the kernel finds no largest magnitude.
        if not x.numel() or x.is_complex() or x.dtype == torch.float64:
            engine = None
        rows = self._rows.setdefault((width, x.numel(), x.dtype, members), len(self._rows))
        layout = Layout(shape, x.dtype, width, members, rows, engine)
        self._layouts[shape, x.dtype, x.device, self.batch] = layout
        return layout

    def _reserve(self, device: torch.device, count: int) -> tuple[Tensor, int]:
        """Return a buffer of zeros and the first of so many of its numbers: one copy brings a buffer to the host."""
        numbers, first = self._buffers.get(device) or (torch.empty(0), 0)
        if first + count > len(numbers):
            numbers, first = torch.zeros(max(_NUMBERS, count), dtype=torch.int64, device=device), 0
        self._buffers[device] = numbers, first + count
        return numbers, first

    def forget(self, *tensors: Tensor) -> None:
        """Read these tensors anew from here on; without any, all."""
        if not tensors:
            self._earlier.clear()
        for x in tensors:
            layout = self._layouts.get((x.shape, x.dtype, x.device, self.batch)) or self._layout(x)
            self._earlier.pop((x.data_ptr(), layout.rows), None)
            self._earlier.pop(id(x), None)

    def finish(self) -> list[Fingerprint]:
        """Return all fingerprints; they are computed where the tensors lie, and copied at once."""
        readings = self._readings
        digits: list[str] = [""] * len(readings)  # 16 of the tensor's hash, and 16 of each member's
        largest = [reading.largest for reading in readings]
        # 1. What kernels wrote: each buffer is copied once.
        buffers = {id(reading.numbers): reading.numbers for reading in readings if reading.first >= 0}
        arrays = {key: numbers.cpu().numpy() for key, numbers in buffers.items()}
        texts = {key: array.astype(">i8").tobytes().hex() for key, array in arrays.items()}
        for i, (layout, numbers, first, _) in enumerate(readings):
            if first >= 0:
                text = texts[id(numbers)][16 * first : 16 * (first + 2 + layout.members)]
                digits[i] = text[:16] + text[32:]
                if layout.dtype in _MASKS:
                    largest[i] = layout.dtype, int(arrays[id(numbers)][first + 1])
        # 2. Hashes of sums, those of all tensors at once; the sums of a member are an equal share of its tensor's.
        summed = [i for i, reading in enumerate(readings) if reading.first < 0]
        if summed:
            sums, members = [readings[i].numbers for i in summed], [readings[i].layout.members for i in summed]
            if len({x.device for x in sums}) > 1:
                sums = [x.cpu() for x in sums]
            lengths = [len(x) for x in sums]
            mixed = _splitmix64(torch.cat(sums))
            shares = [length // n for length, n in zip(lengths, members, strict=True) for _ in range(n)]
            whole, parts, start = _hash64(mixed, lengths), _hash64(mixed, shares), 0
            for place, (i, n) in enumerate(zip(summed, members, strict=True)):
                digits[i] = whole[16 * place : 16 * (place + 1)] + parts[16 * start : 16 * (start + n)]
                start += n
        return [
            Fingerprint(
                text[:16],
                tuple([text[at : at + 16] for at in range(16, len(text), 16)] if len(text) > 32 else ()),
                amax,
            )
            for text, amax in zip(digits, _magnitudes(largest), strict=True)
        ]


def has_bits(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a tensor whose elements have one order in memory: not sparse, distributed, fake or None."""
    return is_dense(x) or (
        isinstance(x, Tensor)
        and x.layout == torch.strided
        and not x.is_quantized
        and is_readable(x)
        and not is_traceable_wrapper_subclass(x)
    )


def _sum_runs(x: Tensor) -> tuple[Tensor, Largest]:
    """Return the weighted sums of a tensor's runs, int64, on its device, and what tells its largest magnitude."""
    if x.dtype == torch.float32 and x.is_contiguous() and x.numel() and not x.is_neg():  # the usual one, sooner
        words = x.view(torch.int32).view(-1, _row_width(x.shape, 4))
    else:
        # 1. Lay the elements out in row-major order, complex ones as pairs.
        elements = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        elements = elements.resolve_neg().contiguous()
        size, width = elements.element_size(), _row_width(elements.shape, elements.element_size())
        flat = elements.view(-1) if elements.dim() else elements.view(1)
        # 2. View them as words: of 32 bits where rows are whole words, which begin at a multiple of 4 bytes.
        if size < 4 and width * size % 4 == 0:
            aligned = flat.storage_offset() * size % 4 == 0
            flat = (flat.view(_WORDS[size]) if aligned else flat.clone()).view(torch.int32)
        else:
            flat = flat.view(_WORDS[size])
        rows = elements.numel() // width if width else 0
        if not rows:
            return torch.zeros(0, dtype=torch.int64, device=x.device), None
        words = flat.view(rows, -1)
    multipliers, masks = _multipliers(x.device), _MASKS.get(x.dtype)
    # 3. On the CPU one kernel sums and finds the largest magnitude of float32, bfloat16 and float16.
    if x.is_cpu and masks is not None:
        both = masks if words.dtype == torch.int32 else (masks[0], 0)  # an odd row of 16 bits is not read in pairs
        sums, bits = load_engine("cpu").weighted_sums(words, multipliers, both)
        return sums.view(-1), (x.dtype, bits)
    sums = load_engine("cpu").weighted_sums(words, multipliers)[0] if x.is_cpu else weighted_sums(words, multipliers)
    # 4. Of other floats torch finds it; it has no such function of 8 bits, and casts cost more than hashes.
    if not x.is_floating_point() or x.element_size() == 1 or "x2" in str(x.dtype):
        return sums.view(-1), None
    low, high = torch.aminmax(x)
    return sums.view(-1), (low, high)


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


@lru_cache(maxsize=4096)
def _row_width(shape: tuple[int, ...], size: int) -> int:
    """Return how many elements are a row: all of a vector, else so many of the last dimensions."""
    width = 1
    for extent in reversed(shape if len(shape) < 2 else shape[1:]):
        width *= extent
        if len(shape) > 1 and width * size >= 4 * _SHORTEST:
            break
    return width


@lru_cache(maxsize=16)
def _multipliers(device: torch.device, count: int = _RUN) -> Tensor:
    """Return the first numbers of splitmix64, made odd; int64, as all arithmetic modulo 2**64 is here."""
    return (_splitmix64(torch.arange(1, count + 1) * _GOLDEN) | 1).to(device)


def _splitmix64(z: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, which is one to one, in place."""
    for shift, factor in _MIX:
        upper = z >> shift
        upper &= (1 << 64 - shift) - 1  # int64 shifts its sign in
        z ^= upper
        z *= factor
    return z


def _hash64(mixed: Tensor, lengths: list[int]) -> str:
    """Return 16 digits for each group of so many numbers: their sum, each times the multiplier of its place there."""
    if not len(mixed):
        return "0" * 16 * len(lengths)
    count, device = torch.tensor(lengths), mixed.device
    ends = count.cumsum(0).to(device)
    starts, places = ends - count.to(device), torch.arange(len(mixed), device=device)
    places -= torch.repeat_interleave(starts, count.to(device), output_size=len(mixed))
    # As many multipliers as the longest group has numbers, rounded up to a power of two, so that few are cached.
    products = _multipliers(device, 1 << max(10, (max(lengths) - 1).bit_length())).index_select(0, places)
    products *= mixed
    sums = torch.nn.functional.pad(products.cumsum(0), (1, 0))  # modulo 2**64 differences of running sums are exact
    return (sums[ends] - sums[starts]).cpu().numpy().astype(">i8").tobytes().hex()


def _magnitudes(largest: list[Largest]) -> list[float | None]:
    """Return the largest magnitudes, copied once for each dtype and device."""
    groups: dict[Any, list[int]] = {}
    for i, pair in enumerate(largest):
        if pair is not None:
            first = pair[0]
            groups.setdefault(first if isinstance(first, torch.dtype) else (first.dtype, first.device), []).append(i)
    amaxes: list[float | None] = [None] * len(largest)
    for group, places in groups.items():
        if isinstance(group, torch.dtype):  # bits
            words = torch.tensor([largest[i][1] for i in places], dtype=_WORDS[group.itemsize])  # type: ignore[index]
            numbers = words.view(group).double()
        else:  # least and greatest elements, in turn
            pairs = torch.stack([x for i in places for x in largest[i] or ()])  # type: ignore[misc]
            numbers = pairs.cpu().double().view(-1, 2).abs().amax(1)
        for i, number in zip(places, numbers.tolist(), strict=True):
            amaxes[i] = number
    return amaxes
