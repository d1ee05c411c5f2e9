# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of states, and the elementary functions that expand groups."""

import math

import pytest
import torch

import fmtsim
from fmtsim.cpu.cast import logarithmic as cpu_elementary
from fmtsim.optim import StateFormat, codec
from fmtsim.rounding import elementary
from fmtsim.torch_engine import reals as torch_elementary

NATIVE = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", NATIVE)
def test_codes_are_those_of_casts_of_torch(name):
    """Every value of the format (of wide ones every eleventh, and the smallest), the middles between them and their
    neighbours, beyond the range, NaN and -0.
    """
    fmt = fmtsim.get_format(name)
    codes = torch.arange(fmt.max_code + 1, dtype=torch.int32)
    if fmt.bits > 8:
        codes = torch.cat([codes[:2048], codes[2048::11], codes[-3:]])
    values = codec.element_values(codes if fmt.bits > 8 else codes.to(torch.uint8), fmt)
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    inf = torch.tensor(torch.inf)
    x = torch.cat([values, middles, torch.nextafter(middles, inf), torch.nextafter(middles, -inf)])
    x = torch.cat([x, torch.tensor([fmt.max * 1.01, 1e38, torch.inf, torch.nan, 1e-45, 1e-30])])
    x = torch.cat([x, -x])
    cast = x.clamp(-float(fmt.max), float(fmt.max)).to(NATIVE[name])  # torch's own does not saturate
    wanted = cast.view(torch.uint8 if fmt.bits == 8 else torch.int16).masked_fill(x != x, fmt.nan_code).to(torch.int32)
    found = codec.unpacked(codec.encode(x, StateFormat(format=fmt), {}, None)["codes"], fmt, x.numel())
    assert torch.equal(found[: codes.numel()].to(torch.int32), codes)
    assert torch.equal(found.to(torch.int32), wanted & (1 << fmt.bits) - 1)
    assert torch.equal(codec.element_values(found, fmt).nan_to_num(7.0), cast.float().nan_to_num(7.0))


def test_powers_of_two_never_leave_the_range():
    amax = torch.tensor([448.0, 449.0, 447.0, 224.0, 1e-45, 3.4e38, 2.0**-126, 1.75, 1.7500001])
    scale = codec.power_of_two(amax, 448.0)
    scaled = amax.double() * scale.double()
    assert bool((scaled <= 448).all())
    inside = (scale < 2.0**126) & (scale > 2.0**-126)
    assert bool((2 * scaled[inside] > 448).all())
    assert scale[:4].tolist() == [1.0, 0.5, 1.0, 2.0]


def test_zeros_encode_to_zeros():
    for name in fmtsim.optim.list_schemes():
        scheme = fmtsim.optim.get_scheme(name)
        for fmt in (scheme.first, scheme.second):
            if fmt.least == 0:
                zero = torch.zeros(300)
                assert torch.equal(codec.decode(codec.encode(zero, fmt, {}, None), fmt, (300,)), zero)


def test_elementary_functions_of_the_cpu_have_the_bits_of_the_reference():
    source = torch.Generator().manual_seed(2)
    positive = 10 ** (torch.rand(3000, generator=source, dtype=torch.float64) * 80 - 42)
    exponents = torch.randn(3000, generator=source, dtype=torch.float64) * 300
    ends = torch.tensor([0.0, -0.0, 709.782712893384, 709.79, -745.1332191019411, -745.14, torch.inf, -torch.inf])
    exponents = torch.cat([exponents, ends.double(), torch.tensor([torch.nan], dtype=torch.float64)])
    for engine in (cpu_elementary, torch_elementary):
        found = engine.ln(positive), engine.exp(exponents)
        wanted = [elementary.ln(x) for x in positive.tolist()], [elementary.exp(x) for x in exponents.tolist()]
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.view(torch.int64)[:-1], torch.tensor(b, dtype=torch.float64).view(torch.int64)[:-1])
    assert bool(found[1][-1].isnan())


def test_the_logarithm_of_a_power_keeps_nan_and_inf_and_is_finite_at_zero():
    x = torch.tensor([0.0, -0.0, 1.0, math.inf, math.nan, 0.5, 2.0, 2.0**-149, 3.0e38])
    y = codec._ln(x)
    assert y.dtype == torch.float64 and y[:4].tolist() == [0, 0, 0, math.inf] and math.isnan(y[4])
    assert y[5:].tolist() == [elementary.ln(number) for number in x[5:].tolist()]
