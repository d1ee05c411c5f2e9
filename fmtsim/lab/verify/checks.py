# SPDX-License-Identifier: Apache-2.0
"""The checks: each compares one format's results bit for bit, on the numbers that tell roundings apart."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.display import count_of
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT_DTYPES, result_dtype
from fmtsim.formats.spec import OVERFLOWS, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.lab.verify.outcome import Outcome, Tally, covers
from fmtsim.rounding.modes import MODES, Mode, Rounding
from fmtsim.rounding.oracle import encode_value
from fmtsim.scaling.oracle import Quantized, quantize_matrix
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey
from fmtsim.spec.engine import Casts

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
            _compare(tally, engines, x, spec, random, values, _parts_of(oracle, fmt))
    return tally.outcome()


def _parts_of(oracle: Quantized, fmt: BlockFormat | LogTileFormat) -> EncodedParts:
    """Return what the scaling oracle found, as engines return it."""
    offset_dtype = torch.int32 if isinstance(fmt, BlockFormat) else torch.float32
    return EncodedParts(
        torch.tensor(oracle.codes).to(code_dtype(fmt.bits)),
        torch.tensor(oracle.scales, dtype=torch.float32),
        None if oracle.tensor_scale is None else torch.tensor(oracle.tensor_scale, dtype=torch.float32),
        None if oracle.offsets is None else torch.tensor(oracle.offsets, dtype=offset_dtype),
    )


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
            _compare_parts(tally, engine.encode(x, spec, random), parts, x, f"{name}.encode {what}")


def _compare_parts(tally: Tally, got: EncodedParts, expected: EncodedParts, x: torch.Tensor, what: str) -> None:
    for field, actual, right in zip(EncodedParts._fields, got, expected, strict=True):
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
