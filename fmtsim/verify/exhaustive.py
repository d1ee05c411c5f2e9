"""All 2**32 float32 inputs, against conversions that others wrote: ml_dtypes and numpy."""

import math
from collections.abc import Callable

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.ops import CastSpec, code_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.verify.outcome import Engine, Outcome, Tally, covers

FORMATS = ("e4m3", "e5m2", "bf16", "fp16", "e2m1")
INPUTS = 1 << 32
CHUNK = 1 << 22

_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16", "fp16": "float16", "e2m1": "float4_e2m1fn"}


def all_inputs(
    fmt: FloatFormat, engines: dict[str, Engine], advance: Callable[[float], None], *, stride: int = 1
) -> Outcome:
    """Round every float32 to nearest even, under both overflow rules, and compare values and codes.

    Args:
        fmt: One of ``FORMATS``.
        engines: The engines to check; each is compared with the other library, and so with each other.
        advance: Called with the share done.
        stride: Check every stride-th chunk of 4 million consecutive inputs only.
    """
    tally = Tally("exhaustive", fmt.name)
    for start in range(0, INPUTS, CHUNK * stride):
        # int64 counts to 2**32; the low half of each number is the input's bits.
        x = torch.arange(start, start + CHUNK).to(torch.int32).view(torch.float32)
        ieee = foreign_codes(x, fmt)
        for overflow in ("saturate", "ieee"):
            codes = ieee if overflow == "ieee" else saturated(ieee, x, fmt)
            _compare(tally, engines, x, codes, CastSpec(format=fmt, rounding=Rounding(), overflow=overflow))
        advance(min((start + CHUNK * stride) / INPUTS, 1.0))
    return tally.outcome()


def foreign_codes(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the codes that ml_dtypes or numpy gives to float32 numbers, NaN made canonical.

    Where the format has no NaN those libraries give a code of their own; the rule here is the largest value.
    """
    import ml_dtypes
    import numpy

    name = _DTYPES[fmt.name]
    dtype = numpy.dtype(getattr(ml_dtypes, name, None) or name)
    with numpy.errstate(all="ignore"):
        raw = x.numpy().astype(dtype)
    codes = torch.from_numpy(raw.view(f"uint{8 * dtype.itemsize}").astype("int64")) & ((1 << fmt.bits) - 1)
    replacement = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return torch.where(x.isnan(), replacement, codes)


def saturated(codes: torch.Tensor, x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Replace what overflow made of numbers, infinities and NaN of a format without Inf, by the largest value."""
    lost = ((codes & fmt.magnitude_mask) > fmt.max_code) & ~x.isnan()
    sign = torch.where(x.signbit(), fmt.sign_mask, 0)
    return torch.where(lost, sign | fmt.max_code, codes)


def _compare(tally: Tally, engines: dict[str, Engine], x: torch.Tensor, codes: torch.Tensor, spec: CastSpec) -> None:
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    values = _values(fmt)[codes]
    for name, engine in engines.items():
        if covers(engine, "quantize", spec, x.dtype, x.dtype):
            out = torch.empty_like(x)
            engine.quantize(x, spec, None, out)
            tally.compare(out, values, x, f"{name}.quantize, {spec.overflow}")
        if covers(engine, "encode", spec, x.dtype):
            got = engine.encode(x, spec, None).codes
            tally.compare(got, codes.to(code_dtype(fmt.bits)), x, f"{name}.encode, {spec.overflow}")


def _values(fmt: FloatFormat) -> torch.Tensor:
    """Return the value of every code in float32, NaN canonical."""
    values = [fmt.value(code) for code in range(1 << fmt.bits)]
    return torch.tensor([math.nan if math.isnan(value) else value for value in values], dtype=torch.float32)
