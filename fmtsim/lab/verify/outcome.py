# SPDX-License-Identifier: Apache-2.0
"""Checks as tasks, their outcomes, and the engines of this machine or of a device that they compare."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import fmtsim
from fmtsim.casts import ops
from fmtsim.casts.ops import load_engine
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.display import count_of
from fmtsim.formats.element import OVERFLOWS, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT_DTYPES, result_dtype
from fmtsim.lab.analysis.compare import compare
from fmtsim.rounding.modes import MODES, Mode, Rounding
from fmtsim.rounding.oracle import encode_value
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey
from fmtsim.spec.engine import Casts
from fmtsim.support.errors import ArgumentError, DataError, DeviceError
from fmtsim.support.table import Record

Found = TypeVar("Found")
Advance = Callable[[float], None]
"""Called with the share of a check that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Record):
    """Say how many results of one check on one format were compared, how many differed, and where first."""

    check: str
    format: str
    cases: int
    mismatches: int
    first: str = ""
    seconds: float = field(default=0.0, compare=False)


class Task(NamedTuple):
    """Name one check; ``run`` does it, tells its argument the share that is done, and returns what it found."""

    name: str
    run: Callable[[Advance], Any]


def task_of(name: str, check: Callable[[Advance], Found], failed: Callable[[str], Found]) -> Task:
    """Return a task that takes its own time, and for which an error of the check is a mismatch.

    Args:
        name: What a progress bar shows.
        check: The check; a DataError of it ends the command.
        failed: What is found where the check raises another error, from a text that names it: the others are still
            worth running.
    """

    def run(advance: Advance) -> Found:
        start = time.perf_counter()
        try:
            result = check(advance)
        except DataError:
            raise
        except Exception as error:
            result = failed(f"raised {type(error).__name__}: {error}")
        advance(1.0)
        return replace(result, seconds=time.perf_counter() - start)  # type: ignore[type-var]  # a dataclass

    return Task(name, run)


class Tally:
    """Count comparisons of bits and remember the first that differ."""

    def __init__(self, check: str, format: str) -> None:
        self._check, self._format = check, format
        self._cases = self._mismatches = 0
        self._first = ""

    def compare(self, got: torch.Tensor, right: torch.Tensor, inputs: torch.Tensor, what: str) -> None:
        """Compare two tensors bit for bit; ``inputs`` has the same shape and names the numbers they came from."""
        self._cases += right.numel()
        if got.shape != right.shape or got.dtype != right.dtype:
            self._mismatches += max(right.numel(), 1)
            kinds = f"{got.dtype} {tuple(got.shape)}, expected {right.dtype} {tuple(right.shape)}"
            self._first = self._first or f"{what}: {kinds}"
            return
        if torch.equal(bits_of(got), bits_of(right)):
            return
        diff = compare(got.reshape(-1), right.reshape(-1))
        self._mismatches += diff.mismatches
        if not self._first and diff.first is not None:
            (index,) = diff.first.index
            input_text = f" of {inputs.reshape(-1)[index].item()!r}" if inputs.shape == right.shape else ""
            actual, expected = (f"{x!r} ({code})" for x, code in zip(diff.first.values, diff.first.hex, strict=True))
            self._first = f"{what}: element {index}{input_text} is {actual}, expected {expected}"

    def outcome(self) -> Outcome:
        """Return what was counted so far."""
        return Outcome(
            check=self._check, format=self._format, cases=self._cases, mismatches=self._mismatches, first=self._first
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


def engines(device: torch.device | None = None) -> dict[str, Casts]:
    """Return the engines that run on this machine's CPU (the numba engine only where numba loads), and a device's."""
    by_name: dict[str, Casts] = {"torch_engine": load_engine("torch_engine")}
    with contextlib.suppress(ImportError):
        by_name["cpu"] = load_engine("cpu")
    if device is not None:
        by_name[str(device)] = OnDevice(device)
    return by_name


def covers(engine: Casts, verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Return True if an engine covers a cast; engines without ``supports`` cover all."""
    supports = getattr(engine, "supports", None)
    return supports is None or bool(supports(verb, spec, *tensors))


class PlantedError:
    """Wrap an engine so that the lowest bit of one result of each call is wrong: a check must see it."""

    def __init__(self, engine: Casts) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def quantize(self, x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
        """Quantise, then flip a bit of the last element."""
        self._engine.quantize(x, spec, random, out)
        _flip(out)

    def encode(self, x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Encode, then flip a bit of the last code."""
        parts = self._engine.encode(x, spec, random)
        _flip(parts.codes)
        return parts

    def decode(self, parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
        """Decode, then flip a bit of the last element."""
        self._engine.decode(parts, spec, out)
        _flip(out)


def _flip(tensor: torch.Tensor) -> None:
    if tensor.numel():
        bits = bits_of(tensor).reshape(-1)
        bits[-1] ^= 1
        tensor.copy_((bits.view(tensor.dtype) if tensor.dtype.is_floating_point else bits).reshape(tensor.shape))


Choose = Callable[..., Any]


def device_of(name: str) -> torch.device:
    """Return the device of a name such as ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ArgumentError: The name is not one of a CUDA device.
        DeviceError: The CUDA engine does not run there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda":
        raise ArgumentError(f"--device {name} is not a CUDA device; choose cuda or cuda:1, or leave it out for the CPU")
    import fmtsim.cuda

    reason = fmtsim.cuda.why_unavailable(device)
    if reason is not None:
        raise DeviceError(f"nothing can be checked on {name}: {reason}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def described(device: torch.device) -> str:
    """Return one line about a device, its software and the day, as the head of a record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    today = datetime.now(UTC).date().isoformat()
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, fmtsim {fmtsim.__version__}, {today}"


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with the strides that it has."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


class OnDevice:
    """An engine of casts that takes tensors of the CPU and computes on a device, as a user's call there does."""

    def __init__(self, device: torch.device, choose: Choose = ops.engine_for) -> None:
        self._device, self._choose = device, choose

    def quantize(self, x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> None:
        """Write the values that x rounds to into out."""
        there, result = moved(x, self._device), moved(out, self._device)
        self._choose("quantize", spec, there, result).quantize(there, spec, self._drawn(random), result)
        out.copy_(result)

    def encode(self, x: Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Return codes and scales."""
        there = moved(x, self._device)
        parts = self._choose("encode", spec, there).encode(there, spec, self._drawn(random))
        return EncodedParts(*(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]

    def decode(self, parts: EncodedParts, spec: CastSpec, out: Tensor) -> None:
        """Write the values of codes into out."""
        result = moved(out, self._device)
        there = EncodedParts(*(None if part is None else moved(part, self._device) for part in parts))  # type: ignore[arg-type]
        self._choose("decode", spec, result).decode(there, spec, result)
        out.copy_(result)

    def _drawn(self, random: Random) -> Random:
        return moved(random, self._device) if isinstance(random, Tensor) else random


SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@lru_cache(maxsize=64)
def finite_values(fmt: ElementFormat) -> tuple[float, ...]:
    """Return the distinct finite values of a format of at most 16 bits, in order."""
    values = (fmt.value(code) for code in range(count_of(fmt)))
    return tuple(sorted({value for value in values if math.isfinite(value)}))


def boundaries(fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return values, ties and places beyond the ends with both neighbours in the dtype, and special values.

    Args:
        fmt: An element format of at most 16 bits.
        dtype: float32 or float64; numbers beyond it are left out.

    Returns:
        1-D tensor in which every bit pattern appears once.
    """
    points = torch.tensor(list(_points(fmt)), dtype=torch.float64)
    points = torch.cat([points, -points]).to(dtype)
    up, down = (torch.nextafter(points, torch.full_like(points, end)) for end in (math.inf, -math.inf))
    info = torch.finfo(dtype)
    smallest = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    ends = [info.max, info.tiny, smallest]
    extra = torch.tensor([*SPECIALS, *ends, *(-end for end in ends)], dtype=dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    every = torch.cat([points, up, down, extra])
    every = torch.where(every.isnan(), torch.full_like(every, math.nan), every)
    return every.view(integers).unique().view(dtype)


def _points(fmt: ElementFormat) -> Iterator[float]:
    values = finite_values(fmt)
    yield from values
    for low, high in zip(values, values[1:], strict=False):
        yield (low + high) / 2
    if isinstance(fmt, LogFormat):
        yield from fmt.thresholds
    yield from beyond(fmt, values)


def beyond(fmt: ElementFormat, values: Sequence[float]) -> Iterator[float]:
    """Yield numbers beyond the ends of ascending values: the grid's next value in the mind, the tie before it, more."""
    step = values[-1] - values[-2] if len(values) > 1 else values[-1]
    for steps in (0.5, 1.0, 1.5, 2.0, 3.0):
        yield values[-1] + steps * step
    if isinstance(fmt, IntFormat):
        yield from (values[0] - step / 2, values[0] - step)


def words_for(count: int, bits: int) -> torch.Tensor:
    """Return random integers below ``2**bits`` with a fixed seed, int64."""
    return torch.randint(1 << bits, (count,), generator=torch.Generator().manual_seed(20), dtype=torch.int64)


def rough_matrix(dtype: torch.dtype, columns: int = 150) -> torch.Tensor:
    """Return a matrix whose rows hold ordinary, wide-ranged, tiny, huge, zero, NaN and infinite numbers.

    The columns divide into no usual block, so that the last block of each row is short.
    """
    generator = torch.Generator().manual_seed(21)
    x = torch.randn(9, columns, generator=generator, dtype=torch.float64)
    x[1] *= torch.exp2(torch.randint(-30, 30, (columns,), generator=generator).to(torch.float64))
    x[2] *= 2.0**-140
    x[3] *= 1e38
    x[4] = 0.0
    x[5, 3] = math.nan
    x[6, 5], x[6, columns - 3] = math.inf, -math.inf
    x[7] = torch.round(x[7] * 4) / 2  # ties
    x[8, ::2] = -0.0
    return x.to(dtype)


RANDOM_BITS = 8
SOME_MODES: tuple[Mode, ...] = ("nearest_even", "up", "to_odd", "stochastic")


def against_oracle(fmt: ElementFormat, engines: dict[str, Casts]) -> Outcome:
    """Compare quantize and encode with the oracle on every value, tie and boundary, in float32 and float64."""
    tally = Tally("oracle", fmt.name)
    value_of_code = torch.tensor([fmt.value(code) for code in range(count_of(fmt))], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        x = boundaries(fmt, dtype)
        numbers = x.tolist()
        words = words_for(len(numbers), RANDOM_BITS)
        for spec in casts(fmt, dtype):
            stochastic = spec.rounding.mode == "stochastic"
            drawn = words.tolist() if stochastic else [None] * len(numbers)
            pairs = zip(numbers, drawn, strict=True)
            codes = [encode_value(number, fmt, spec.rounding, spec.overflow, word) for number, word in pairs]
            patterns = torch.tensor(codes)
            parts = EncodedParts(patterns.to(code_dtype(fmt.bits)))
            values = value_of_code[patterns].to(result_dtype(fmt, dtype))
            _compare(tally, engines, x, spec, words if stochastic else None, values, parts)
    return tally.outcome()


def all_codes(fmt: ElementFormat, engines: dict[str, Casts]) -> Outcome:
    """Decode every code, compare it with the record's value, and encode the value back."""
    tally = Tally("codes", fmt.name)
    count = count_of(fmt)
    dtype = result_dtype(fmt, torch.float32)
    codes = torch.arange(count).to(code_dtype(fmt.bits))
    values = torch.tensor([fmt.value(code) for code in range(count)], dtype=dtype)
    back = torch.tensor(
        [encode_value(value, fmt, "nearest_even", _round_trip_overflow(fmt)) for value in values.tolist()]
    ).to(codes.dtype)
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow=_round_trip_overflow(fmt))
    for name, engine in engines.items():
        if covers(engine, "decode", spec, values):
            out = torch.empty(count, dtype=dtype)
            engine.decode(EncodedParts(codes), spec, out)
            tally.compare(out, values, codes, f"{name}.decode")
        if covers(engine, "encode", spec, values):
            tally.compare(engine.encode(values, spec, None).codes, back, codes, f"{name}.encode of its values")
    return tally.outcome()


def _round_trip_overflow(fmt: ElementFormat) -> Overflow:
    """Return the rule under which infinities come back as themselves."""
    return "ieee" if isinstance(fmt, FloatFormat) and fmt.infinities else fmt.default_overflow


def between_engines(fmt: Format, engines: dict[str, Casts]) -> Outcome:
    """Compare the engines with each other on rough data, in every dtype, with ragged blocks and a strided view."""
    tally = Tally("engines", fmt.name)
    reference = engines["torch_engine"]
    others = {name: engine for name, engine in engines.items() if engine is not reference}
    for index, dtype in enumerate(FLOAT_DTYPES):
        x = rough_matrix(dtype)
        view = x.t().contiguous().t() if index % 2 else x
        for spec in casts(fmt, dtype):
            random = RandomKey(7, index) if spec.rounding.mode == "stochastic" else None
            values = torch.empty(x.shape, dtype=result_dtype(fmt, dtype))
            reference.quantize(x, spec, random, values)
            _compare(tally, others, view, spec, random, values, reference.encode(x, spec, random))
    return tally.outcome()


def blocks_against_oracle(fmt: BlockFormat | LogTileFormat, engines: dict[str, Casts]) -> Outcome:
    """Compare codes, scales and values with the scaling oracle on rough data, in float32 and float64."""
    tally = Tally("block oracle", fmt.name)
    for dtype in (torch.float32, torch.float64):
        x = rough_matrix(dtype, columns=36)
        words = words_for(x.numel(), RANDOM_BITS).reshape(x.shape)
        out_dtype = result_dtype(fmt, dtype)
        for spec in casts(fmt, dtype):
            random = words if spec.rounding.mode == "stochastic" else None
            oracle = quantize_matrix(
                x.tolist(), fmt, spec.rounding, spec.overflow, dtype_name(dtype),  # type: ignore[arg-type]
                get_format(out_dtype), None if random is None else words.tolist(),  # type: ignore[arg-type]
            )  # fmt: skip
            values = torch.tensor(oracle.values, dtype=out_dtype)
            offset_dtype = torch.int32 if isinstance(fmt, BlockFormat) else torch.float32
            parts = EncodedParts(
                torch.tensor(oracle.codes).to(code_dtype(fmt.bits)),
                torch.tensor(oracle.scales, dtype=torch.float32),
                None if oracle.tensor_scale is None else torch.tensor(oracle.tensor_scale, dtype=torch.float32),
                None if oracle.offsets is None else torch.tensor(oracle.offsets, dtype=offset_dtype),
            )
            _compare(tally, engines, x, spec, random, values, parts)
    return tally.outcome()


def _compare(
    tally: Tally, engines: dict[str, Casts], x: torch.Tensor, spec: CastSpec, random: Random, values: torch.Tensor,
    parts: EncodedParts,
) -> None:  # fmt: skip
    """Hold quantize and encode of every engine that takes the cast to the values and parts that are right."""
    for name, engine in engines.items():
        what = f"of {x.dtype}, {spec.rounding.mode}, {spec.overflow}"
        if covers(engine, "quantize", spec, x, values):
            out = torch.empty(x.shape, dtype=values.dtype)
            engine.quantize(x, spec, random, out)
            tally.compare(out, values, x, f"{name}.quantize {what}")
        if covers(engine, "encode", spec, x):
            got = engine.encode(x, spec, random)
            what = f"{name}.encode {what}"
            for field, actual, right in zip(EncodedParts._fields, got, parts, strict=True):
                if right is None or actual is None:
                    present = torch.tensor([actual is not None]), torch.tensor([right is not None])
                    tally.compare(*present, present[1], f"{what}, presence of {field}")
                else:
                    tally.compare(actual, right, x, f"{what}, {field}")


def casts(fmt: Format, dtype: torch.dtype) -> Iterator[CastSpec]:
    """Yield the casts to check: in float32 every rounding and overflow rule, elsewhere some of each kind of mode."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    every = dtype == torch.float32
    for mode in MODES if every else SOME_MODES:
        rounding = Rounding(mode=mode, random_bits=RANDOM_BITS if mode == "stochastic" else None)
        for overflow in OVERFLOWS if every and isinstance(element, FloatFormat) else (fmt.default_overflow,):
            yield CastSpec(format=fmt, rounding=rounding, overflow=overflow)
