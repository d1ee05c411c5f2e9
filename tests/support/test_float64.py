# SPDX-License-Identifier: Apache-2.0
"""Float64 in integers against the machine's own, and what a device without float64 is asked and told."""

import math
from types import SimpleNamespace

import pytest
import torch

import fmtsim
from fmtsim.support.errors import DtypeError
from fmtsim.support.float64 import Float64, arithmetic, capable, float64, floor_log2, from_bits, has_float64
from fmtsim.torch_engine.reals import narrow
from tests.support.bits import assert_same_bits
from tests.support.refusals import refused
from tests.support.without_float64 import Float64Used, WithoutFloat64

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 6000
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 1.5, 2.5, 5e-324, -5e-324, 2.0**-1022,
           2.0**-1022 - 5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 2.0**52, 2.0**53 - 1)  # fmt: skip
CASTS = (torch.float32, torch.bfloat16, torch.float16)


def numbers(seed: int) -> torch.Tensor:
    """Return float64 numbers of all kinds: any bits, subnormal ones, fixed points whose sums cancel, special ones."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (COUNT,), generator=generator)

    kinds = [
        drawn(-(1 << 63), (1 << 63) - 1).view(torch.float64),
        (drawn(0, 1 << 52) >> drawn(0, 52)).view(torch.float64),
    ]
    kinds += [drawn(-(1 << 53), 1 << 53).double() * 2.0**-30, drawn(-9, 10).double() / 2]
    kinds += [torch.tensor(SPECIAL, dtype=torch.float64)[drawn(0, len(SPECIAL))]]
    return torch.stack(kinds).gather(0, drawn(0, len(kinds))[None])[0]


def check(got: torch.Tensor | Float64, expected: torch.Tensor) -> None:
    """Compare bits; a NaN is a NaN."""
    got = got.bits.view(torch.float64) if isinstance(got, Float64) else got
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert_same_bits(torch.where(nan, 0, got), torch.where(nan, 0, expected))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_has_the_bits_of_the_machine(name):
    x, y = numbers(1), numbers(2)
    near = x * (1 + 2.0**-51 * torch.arange(COUNT).remainder(7).sub(3))  # differences cancel
    for first, second in ((x, y), (x, near)):
        check(getattr(torch, name)(Float64(first.view(torch.int64)), Float64(second.view(torch.int64))),
              getattr(torch, name)(first, second))  # fmt: skip


def test_roots_are_rounded_once():
    """torch's own are not, on a CPU."""
    x = numbers(3).abs()
    exact = torch.tensor([math.sqrt(v) for v in x.tolist()], dtype=torch.float64)
    check(Float64(x.view(torch.int64)).sqrt(), exact)
    check(Float64((-x).view(torch.int64)).sqrt(), torch.where(x == 0, -x, math.nan))


@pytest.mark.parametrize("name", ["trunc", "floor", "ceil", "round", "abs", "neg", "sign", "isnan", "isfinite", "isinf",
                                  "signbit"])  # fmt: skip
def test_functions_of_one_number(name):
    x = numbers(4)
    result, expected = getattr(torch, name)(Float64(x.view(torch.int64))), getattr(torch, name)(x)
    check(result, expected) if expected.is_floating_point() else assert_same_bits(result, expected)


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum", "copysign"])
def test_functions_of_two_numbers(name):
    x, y = numbers(5), numbers(6)
    y = torch.where(torch.arange(COUNT) % 5 == 0, x, y)
    result = getattr(torch, name)(Float64(x.view(torch.int64)), Float64(y.view(torch.int64)))
    expected = getattr(torch, name)(x, y)
    if name in ("maximum", "minimum"):  # of two zeros either
        result, expected = result + 0.0, expected + 0.0
    check(result, expected) if expected.is_floating_point() else assert_same_bits(result, expected)


def test_numbers_of_tensors_and_of_python_take_part():
    x = numbers(7)
    y, whole = Float64(x.view(torch.int64)), torch.arange(COUNT) - 2000
    for got, expected in (
        (y + 1.5, x + 1.5), (1.5 - y, 1.5 - x), (3.0 / y, 3.0 / x), (whole * y, whole * x),
        (whole.float() + y, whole + x),
        (torch.where(whole > 0, y, 0.0), torch.where(whole > 0, x, 0.0)), (y.clamp(-2.0, 2.0), x.clamp(-2.0, 2.0)),
        (y[None].expand(3, COUNT).sum(0), (x + x) + x + 0.0), (y.new_full((2,), 0.1), x.new_full((2,), 0.1)),
    ):  # fmt: skip
        check(got, expected)
    finite = x[x.isfinite()].view(-1)[:2000].view(40, 50)
    check(Float64(finite.view(torch.int64)).amax(1), finite.amax(1))
    refused(
        "^float64 numbers in integers have no erf; move the tensor to the CPU$", torch.erf, y, error=NotImplementedError
    )


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_other_dtypes_are_widened_exactly_and_rounded_to_once(dtype):
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    x = (torch.arange(-(1 << 15), 1 << 15) * (1 if dtype.itemsize == 2 else 65537)).to(bits).view(dtype)
    wide = arithmetic.widen(x)
    check(Float64(wide), x.double())
    assert_same_bits(arithmetic.narrow(wide, dtype)[~x.isnan()], x[~x.isnan()])
    y = numbers(8)
    middle = wide[:-1].view(torch.float64) / 2 + wide[1:].view(torch.float64) / 2
    for number in (y, middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(-math.inf))):
        assert_same_bits(arithmetic.narrow(number.view(torch.int64), dtype), narrow(number, dtype))


def test_integers_become_numbers_and_numbers_integers():
    whole = torch.cat([torch.arange(-300, 300), (1 << torch.arange(54)) - 1, -(1 << torch.arange(54))])
    assert_same_bits(arithmetic.widen(whole).view(torch.float64), whole.double())
    x = numbers(9)
    x = x[x.abs() < 2.0**53]
    assert torch.equal(Float64(x.view(torch.int64)).to(torch.int64), x.to(torch.int64))


def test_leading_bits():
    for dtype, top in ((torch.int32, 31), (torch.int64, 62)):
        n = torch.tensor([(1 << k) + d for k in range(1, top) for d in (-1, 0, 1)], dtype=dtype)
        assert floor_log2(n).tolist() == [v.bit_length() - 1 for v in n.tolist()] and floor_log2(n).dtype == dtype


def test_which_device_has_float64(monkeypatch):
    assert has_float64(torch.device("cpu")) and not has_float64(torch.device("mps"))
    for has in (True, False):
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device, has=has: SimpleNamespace(has_fp64=has))
        assert has_float64(torch.device("xpu", 0)) is has
    assert (
        float64(torch.ones(2)).dtype == torch.float64
        and type(from_bits(torch.ones(2, dtype=torch.int64))) is torch.Tensor
    )
    elsewhere = SimpleNamespace(device=torch.device("mps"), cpu=lambda: "moved")
    assert capable(torch.ones(2)).is_cpu and capable(elsewhere) == "moved"
    with WithoutFloat64():
        assert not has_float64(torch.device("cpu"))
        assert isinstance(float64(torch.ones(2)), Float64) and isinstance(from_bits(torch.ones(2).long()), Float64)


@pytest.mark.parametrize("plant", [
    lambda x: x.double(), lambda x: torch.zeros(3, dtype=torch.float64),
    lambda x: torch.tensor([0.1], dtype=torch.float64),
    lambda x: x.view(torch.int64).view(torch.float64), lambda x: torch.where(x > 0, torch.tensor(1.0).double(), x),
    lambda x: fmtsim.quantize(x.double(), "e4m3"),
])  # fmt: skip
def test_the_stand_in_sees_float64(plant):
    with WithoutFloat64(), pytest.raises(Float64Used):
        plant(torch.ones(4))


def test_results_in_float64_are_refused_where_there_is_none():
    x, instead = torch.ones(2, 16), "pass out_dtype=torch.float32 where the format fits, or move the tensor to the CPU"
    with WithoutFloat64():
        codes, wide = torch.ones(3, dtype=torch.uint8), {"out_dtype": torch.float64}
        for call in (lambda: fmtsim.quantize(x, "e4m3", **wide), lambda: fmtsim.quantize(x, "fp64"),
                     lambda: fmtsim.decode(codes, "e4m3", **wide)):  # fmt: skip
            refused(f"^the result is float64, which cpu does not have; {instead}$", call, error=DtypeError)
        message = "^the result is float64, which cpu does not have; choose a unit and an output in float32, or move the"
        with pytest.raises(DtypeError, match=message):
            fmtsim.mm(x, x.t(), target="exact", accumulate="fp64", out_dtype=torch.float64)
