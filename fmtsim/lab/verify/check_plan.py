# SPDX-License-Identifier: Apache-2.0
"""Which checks run on which formats; all 2**32 float32 inputs, against conversions that others wrote."""

from collections.abc import Callable
from functools import cache, partial

import numpy
import torch
from numpy.typing import NDArray

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.lab.verify.outcome import (
    Advance,
    Outcome,
    Tally,
    Task,
    against_oracle,
    all_codes,
    between_engines,
    blocks_against_oracle,
    covers,
    task_of,
)
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.engine import Casts
from fmtsim.support.errors import FormatError

FORMATS = ("e4m3", "e5m2", "bf16", "fp16", "e2m1")
INPUTS = 1 << 32
CHUNK = 1 << 18  # inputs, codes and values of a chunk stay in the cache

_DTYPES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e2m1": "float4_e2m1fn",
}

Codes = NDArray[numpy.unsignedinteger]


def all_inputs(
    fmt: FloatFormat, engines: dict[str, Casts], advance: Callable[[float], None], *, stride: int = 1
) -> Outcome:
    """Round every float32 to nearest even, under both overflow rules, and compare values and codes.

    Args:
        fmt: One of ``FORMATS``.
        engines: The engines to check; each is compared with the other library, and so with each other.
        advance: Called with the share done.
        stride: Check every stride-th chunk of consecutive inputs only.
    """
    tally = Tally("exhaustive", fmt.name)
    for start in range(0, INPUTS, CHUNK * stride):
        x = torch.from_numpy(numpy.arange(start, start + CHUNK, dtype=numpy.uint32).view(numpy.float32))
        ieee = foreign_codes(x, fmt)
        for overflow in ("saturate", "ieee"):
            codes = ieee if overflow == "ieee" else saturated(ieee, x, fmt)
            spec = CastSpec(format=fmt, rounding=Rounding(), overflow=overflow)
            _compare(tally, engines, x, codes, spec, encode=overflow == fmt.default_overflow)
        advance(min((start + CHUNK * stride) / INPUTS, 1.0))
    return tally.outcome()


def foreign_codes(x: torch.Tensor, fmt: FloatFormat) -> Codes:
    """Return the codes that ml_dtypes or numpy gives to float32 numbers, NaN made canonical.

    Where the format has no NaN those libraries give a code of their own; the rule here is the largest value.
    """
    import ml_dtypes

    name = _DTYPES[fmt.name]
    dtype = numpy.dtype(getattr(ml_dtypes, name, None) or name)
    with numpy.errstate(all="ignore"):
        codes = x.numpy().astype(dtype).view(f"uint{8 * dtype.itemsize}")
    codes[numpy.isnan(x.numpy())] = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return codes


def saturated(codes: Codes, x: torch.Tensor, fmt: FloatFormat) -> Codes:
    """Return codes in which what overflow made of numbers and infinities is the largest value."""
    numbers = x.numpy()
    lost = (codes & codes.dtype.type(fmt.magnitude_mask)) > fmt.max_code
    lost &= ~numpy.isnan(numbers)
    if not lost.any():
        return codes
    result = codes.copy()
    result[lost] = numpy.where(numpy.signbit(numbers[lost]), fmt.sign_mask | fmt.max_code, fmt.max_code)
    return result


def _compare(
    tally: Tally, engines: dict[str, Casts], x: torch.Tensor, codes: Codes, spec: CastSpec, *, encode: bool
) -> None:
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    values = torch.from_numpy(_values(fmt)[codes])
    for name, engine in engines.items():
        if covers(engine, "quantize", spec, x, x):
            out = torch.empty_like(x)
            engine.quantize(x, spec, None, out)
            tally.compare(out, values, x, f"{name}.quantize, {spec.overflow}")
        if encode and covers(engine, "encode", spec, x):
            expected = torch.from_numpy(codes.astype(numpy.int64)).to(code_dtype(fmt.bits))
            tally.compare(engine.encode(x, spec, None).codes, expected, x, f"{name}.encode, {spec.overflow}")


@cache
def _values(fmt: FloatFormat) -> NDArray[numpy.float32]:
    """Return the value of every code, NaN canonical."""
    return numpy.array([fmt.value(code) for code in range(1 << fmt.bits)], dtype=numpy.float32)


ORACLE_BITS = 8
CODE_BITS = 16


def default_tasks(engines: dict[str, Casts], names: list[str] | None = None) -> list[Task]:
    """Return the checks of all listed formats, or of the named ones, that together take less than a minute."""
    tasks = []
    for fmt in (get_format(name) for name in names or list_formats()):
        if isinstance(fmt, PackedFormat):  # one engine has them, and their sources are their reference
            continue
        scaled = isinstance(fmt, BlockFormat | LogTileFormat)
        chosen: list[tuple[str, Callable[..., Outcome]]] = []
        if scaled:
            chosen.append(("block oracle", blocks_against_oracle))
        if not scaled and fmt.bits <= ORACLE_BITS:
            chosen.append(("oracle", against_oracle))
        if not scaled and fmt.bits <= CODE_BITS:
            chosen.append(("codes", all_codes))
        if len(engines) > 1:
            chosen.append(("engines", between_engines))
        tasks += [_task(name, fmt, lambda _, fmt=fmt, check=check: check(fmt, engines)) for name, check in chosen]  # type: ignore[misc]
    return tasks


def exhaustive_tasks(engines: dict[str, Casts], names: list[str] | None = None) -> list[Task]:
    """Return the checks over all 2**32 float32 inputs.

    Raises:
        FormatError: A name has no independent implementation to compare with.
    """
    formats = {name: get_format(name) for name in FORMATS}
    chosen = [get_format(name) for name in names] if names else list(formats.values())
    for fmt in chosen:
        if fmt not in formats.values():
            raise FormatError(
                f"{fmt.name} has no exhaustive check; choose {', '.join(formats)}, or leave --exhaustive out"
            )
    return [_task("exhaustive", fmt, partial(all_inputs, fmt, engines)) for fmt in chosen]  # type: ignore[arg-type]


def _task(check: str, fmt: Format, function: Callable[[Advance], Outcome]) -> Task:
    failed = partial(Outcome, check=check, format=fmt.name, cases=1, mismatches=1)
    return task_of(f"{check} {fmt.name}", function, lambda error: failed(first=f"the check {error}"))
