# SPDX-License-Identifier: Apache-2.0
"""mma: one instruction, batches, scales inside the unit, and the bits that a unit ignores."""

import pytest
import torch

import fmtsim
from fmtsim import Datapath, GemmPlan, RandomKey, get_format, get_unit
from fmtsim.spec.gemm_spec import GemmSpec
from tests.support.bits import assert_same_bits, bits
from tests.support.gemm_oracle import definition as spec
from tests.support.gemm_oracle import finished, sums
from tests.support.operands import normal, wide

WGMMA = "hopper.wgmma"
STOCHASTIC = Datapath(accumulator="bf16", rounding="stochastic")


def test_mma_is_one_instruction():
    a, b = wide(4, 32, seed=1).to(torch.float8_e4m3fn), wide(8, 32, seed=2).to(torch.float8_e5m2)
    c = wide(4, 8, seed=3)
    assert_same_bits(fmtsim.mma(a, b, target=WGMMA), sums(a, b, spec("e4m3", "e5m2")))
    cut = fmtsim.quantize(
        c, fmtsim.FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13), rounding="toward_zero"
    )
    assert_same_bits(fmtsim.mma(a, b, c, target=WGMMA), sums(a, b, spec("e4m3", "e5m2"), c=cut))
    assert_same_bits(fmtsim.mma(a, b, c, target="hopper.mma"), sums(a, b, spec("e4m3", "e5m2", unit="hopper.mma"), c=c))
    half = c.half()
    definition = spec("e4m3", "e5m2", unit="hopper.mma", accumulate="fp16")
    got = fmtsim.mma(a, b, half, target="hopper.mma")
    assert_same_bits(got, finished(sums(a, b, definition, c=half.float()), torch.float16))
    assert_same_bits(
        fmtsim.mma(a, b, target="hopper.mma", accumulate="fp16"), finished(sums(a, b, definition), torch.float16)
    )


def test_mma_batches():
    a, b = normal(2, 3, 4, 16, seed=1).bfloat16(), normal(2, 3, 5, 16, seed=2).bfloat16()
    c = normal(2, 3, 4, 5, seed=3)
    options = {"target": "blackwell.tcgen05"}
    expected = torch.stack([
        torch.stack([fmtsim.mma(a[i, j], b[i, j], c[i, j], **options) for j in range(3)]) for i in range(2)
    ])  # fmt: skip
    assert_same_bits(fmtsim.mma(a, b, c, **options), expected)
    shared = torch.stack([fmtsim.mma(a[i], b[1, 1], c[0, 0], **options) for i in range(2)])
    assert_same_bits(fmtsim.mma(a, b[1, 1], c[0, 0], **options), shared)
    assert_same_bits(shared[1, 2], fmtsim.mma(a[1, 2], b[1, 1], c[0, 0], **options))
    assert_same_bits(fmtsim.mma(a[1, 2], b, c[0, 0], **options)[0, 1], fmtsim.mma(a[1, 2], b[0, 1], c[0, 0], **options))
    assert fmtsim.mma(a[:0], b[:0], **options).shape == (0, 3, 4, 5)
    drawn = fmtsim.mma(a[0], b[0, 0], target=STOCHASTIC, generator=3)
    for i in range(3):
        assert_same_bits(drawn[i], fmtsim.mma(a[0, i], b[0, 0], target=STOCHASTIC, generator=RandomKey(3, i)))


def test_mma_ignores_the_low_bits_of_tf32():
    a, b = wide(4, 8, seed=1), wide(4, 8, seed=2)
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    expected = sums(*cut, spec("tf32"))
    assert_same_bits(fmtsim.mma(a, b, target=WGMMA), expected)
    assert_same_bits(fmtsim.mma(a, b, target=WGMMA, formats="tf32"), expected)
    assert_same_bits(fmtsim.mma(a, b, target="fp32_fma"), sums(a, b, spec("fp32", unit="fp32_fma")))


@pytest.mark.parametrize(
    ("unit", "scale", "group"), [("mxf8f6f4", "e8m0", 32), ("nvf4", "ue4m3", 16), ("nvf4", "e8m0", 16)]
)
def test_mma_scales(unit, scale, group):
    unit = f"blackwell.tcgen05.{unit}"
    generator = torch.Generator().manual_seed(1)
    codes = [torch.randint(0, 16, (n, 64), generator=generator).to(torch.uint8) for n in (3, 5)]
    span = (110, 140) if scale == "e8m0" else (0, 127)
    marks = [torch.randint(*span, (n, 64 // group), generator=generator).to(torch.uint8) for n in (3, 5)]
    values, scales = [fmtsim.decode(x, "e2m1") for x in codes], [fmtsim.decode(x, scale) for x in marks]
    path = get_unit(unit).mode("e2m1", "e2m1", scale=scale)
    fmt = get_format("e2m1")
    definition = GemmSpec(datapath=path, plan=GemmPlan(), a=fmt, b=fmt)
    expected = sums(*values, definition, scale_a=scales[0], scale_b=scales[1])
    formats = {"formats": "e2m1", "target": unit}
    dtype = torch.float8_e8m0fnu if scale == "e8m0" else torch.float8_e4m3fn
    typed = [x.view(dtype) for x in marks]
    assert_same_bits(fmtsim.mma(*codes, scale_a=typed[0], scale_b=typed[1], **formats), expected)
    one = torch.full_like(marks[1], 127 if scale == "e8m0" else 0x38).view(dtype)
    plain = fmtsim.mma(*codes, scale_a=typed[0], **formats)
    assert_same_bits(plain, fmtsim.mma(*codes, scale_a=typed[0], scale_b=one, **formats))
    if (unit, scale) != ("blackwell.tcgen05.nvf4", "e8m0"):
        assert_same_bits(fmtsim.mma(*codes, scale_a=scales[0], scale_b=marks[1], **formats), expected)
    if scale == "ue4m3":
        signed = (marks[0] | 128).view(dtype)  # the unit ignores the sign
        assert_same_bits(fmtsim.mma(*codes, scale_a=signed, scale_b=typed[1], **formats), expected)
    broken = marks[0].clone()
    broken[1, 0] = 255 if scale == "e8m0" else 127
    got = fmtsim.mma(*codes, scale_a=broken.view(dtype), scale_b=typed[1], **formats)
    assert bits(got)[1].tolist() == [0x7FFFFFFF] * 5 and not got[0].isnan().any()
