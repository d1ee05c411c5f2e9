# SPDX-License-Identifier: Apache-2.0
"""Casts for training: both axes from one read, values without the tensor's scale, last steps of products."""

import math
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import cpu
from fmtsim.cuda.cast import block_casts, scaled_operands
from fmtsim.cuda.gemm import scaled_product
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scaled_cast import cast
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import multiplied
from fmtsim.spec.quantizer import ClipMask, Quantizer
from tests.support.bits import INTEGERS, assert_same_bits, same_bits
from tests.support.casts import cast_spec, slow_but
from tests.support.operands import numbers

SLOW = pytest.mark.slow

KEYS = (RandomKey(5, 1), RandomKey(6, 2))
E4M3 = fmtsim.get_format("e4m3")
NANS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def along(spec, dim):
    return cast_spec(spec.format, spec.rounding, dim, spec.overflow)


def quantised(x, spec, dim, random, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    cpu.quantize(x, along(spec, dim), random, out)
    return out


@pytest.mark.parametrize(
    ("name", "dtype", "mode", "shape"),
    slow_but(
        2, ("mxfp4", torch.bfloat16, "nearest_even", (96, 128)), ("nf4_g64", torch.float32, "nearest_even", (20, 12)),
        ("nvfp4", torch.float32, "nearest_even", (48, 160)), ("mxfp8_e4m3", torch.bfloat16, "stochastic", (64, 96)),
        ("mxint8", torch.float16, "nearest_even", (64, 96)), ("mxfp4", torch.bfloat16, "nearest_even", (30, 70)),
    ),
)  # fmt: skip
def test_both_axes_have_the_bits_of_two_casts(name, dtype, mode, shape, device):
    spec, keys = cast_spec(name, mode), KEYS if mode == "stochastic" else (None, None)
    x = numbers(shape, dtype)
    rows, columns = (quantised(x, spec, dim, key, torch.bfloat16) for dim, key in zip((-1, -2), keys, strict=True))
    both = block_casts.quantize_both_dims(x.to(device), along(spec, -2), keys, without_tensor_scale=False)
    served = name != "nf4_g64" and shape != (30, 70) and (name, dtype) != ("nvfp4", torch.float32)
    assert (both is not None) == served
    if both is not None:
        assert same_bits(both[0], rows) and same_bits(both[1], columns)
        assert both[2] is None


@pytest.mark.parametrize("power", [None, "ceil"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((130, 256), torch.bfloat16), ((5, 136), torch.float32), pytest.param((256, 8), torch.float16, marks=SLOW)],
)
def test_both_axes_under_a_scale_rule(power, shape, dtype, device):
    quantizer = Quantizer(format=E4M3, scaling=Scaling(block=(1, 128), eps=1e-4, power_of_two=power))
    x = numbers(shape, dtype)
    assert scaled_operands.covers_both(x.to(device), quantizer)
    for fold in {False, power is not None}:
        made = scaled_operands.cast_both(x.to(device), quantizer, fold)
        for one, matrix in zip(made, (x, x.mT), strict=True):
            wanted = scaled_operands.cast_scaled(matrix.mT.to(device).mT, quantizer, fold=fold)
            assert one.elements.stride() == matrix.stride() and one.block == wanted.block
            assert_same_bits(one.elements.float(), wanted.elements.float())
            assert (one.scale is None) == fold
            if not fold:
                assert_same_bits(one.scale, wanted.scale)


def test_rules_that_are_cast_along_both_axes(device):
    rule = Scaling(block=(1, 128), power_of_two="ceil")
    quantizer = Quantizer(format=E4M3, scaling=rule)
    x = torch.zeros(130, 64, dtype=torch.bfloat16, device=device)
    assert scaled_operands.covers_both(x, quantizer) and not scaled_operands.covers_both(x[:, :60], quantizer)
    assert not scaled_operands.covers_both(x.mT, quantizer) and not scaled_operands.covers_both(x[None], quantizer)
    for changes in ({"rounding": Rounding(mode="stochastic")}, {"gradient": ClipMask()}):
        assert not scaled_operands.covers_both(x, replace(quantizer, **changes))
    for changes in ({"block": (1, 64)}, {"block": (None, 128)}, {"block": (128, 128)}, {"multiplier": 1.5}):
        other = replace(quantizer, scaling=replace(rule, **changes))
        assert not scaled_operands.covers_both(x, other)


@pytest.mark.parametrize("rounding", [Rounding(), pytest.param(Rounding(mode="stochastic"), marks=SLOW)])
def test_elements_that_are_cast_again_with_their_scales(rounding, device):
    quantizer = Quantizer(format=E4M3, rounding=rounding, scaling=Scaling(block=(1, 128), arithmetic="reciprocal"))
    x, factor = numbers((130, 256), torch.bfloat16), torch.rand(130, 2) + 0.1
    factor[3], factor[4, 1] = 2.0**-140, 1e38
    there, numbers_there = x.to(device).mT, factor.to(device)
    assert scaled_operands.covers(there, quantizer, numbers_there)
    keys = (KEYS[0] if rounding.mode == "stochastic" else None, None)
    made = scaled_operands.cast_scaled(there, quantizer, keys, factor=numbers_there)
    wanted = cast(multiplied(x, factor).mT, E4M3, quantizer.scaling, rounding, "saturate", keys)
    assert_same_bits(made.elements.float(), wanted.elements)
    assert_same_bits(made.scale, wanted.scales.scale)
    for refused in (numbers_there[:, :1], numbers_there.mT.contiguous().mT):
        assert not scaled_operands.covers(there, quantizer, refused)
    assert not scaled_operands.covers(x.to(device).float().mT, quantizer, numbers_there)
    assert not scaled_operands.covers(x.to(device), quantizer, numbers_there)


@pytest.mark.parametrize("shape", [(32, 64), (10, 37)])
def test_values_without_the_scale_of_the_tensor(shape, device):
    spec = cast_spec("nvfp4")
    assert block_casts.holds_without_tensor_scale(spec)
    assert not block_casts.holds_without_tensor_scale(cast_spec("mxfp4"))
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(shape, dtype, special=False)
        values, scale = block_casts.quantize_without_tensor_scale(x.to(device), spec, None)
        assert values.dtype == torch.bfloat16
        found = (values.double() * scale.double()).float()  # exact, then rounded once
        assert_same_bits(found, quantised(x, spec, -1, None, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_rows_and_columns(dtype, device):
    """Columns first, then rows, then the bias; NaN becomes the canonical one."""
    generator = torch.Generator().manual_seed(3)
    for m, n in ((5, 16), (1, 4), (9, 1028)):
        y = torch.randn(m, n, generator=generator) * torch.exp2(torch.arange(float(m)) * 9 - 20)[:, None]
        y[0, 0], y[0, 1], y[0, 2], y[0, 3] = math.nan, math.inf, 1e38, -0.0
        bias = torch.randn(n, generator=generator)
        many = [torch.randn(size, 1, generator=generator) for size in (n, m)]
        ones = [torch.randn(1, 1, generator=generator) for _ in range(2)]
        for columns, rows, added in (
            (many[0], many[1], bias), (many[0], ones[1], None), (ones[0], None, bias), (None, many[1], None),
            (None, None, bias),
        ):  # fmt: skip
            wanted = y if columns is None else y * columns.mT
            wanted = wanted if rows is None else wanted * rows
            wanted = wanted if added is None else wanted + added
            given = (None if t is None else t.to(device) for t in (columns, rows, added))
            found = scaled_product.finish_sums(y.to(device), *given, dtype)
            bits = wanted.to(dtype).view(INTEGERS[dtype.itemsize])
            assert_same_bits(found.view(bits.dtype), bits.masked_fill(wanted.isnan(), NANS[dtype]))


def test_sums_that_are_finished_elsewhere(emulated):
    for y in (
        torch.zeros(2, 6),
        torch.zeros(4, 8).mT,
        torch.zeros(2, 4).double(),
        torch.zeros(0, 4),
        torch.zeros(9)[1:].view(2, 4),
    ):
        assert scaled_product.finish_sums(y, None, None, None, torch.float32) is None
    assert scaled_product.finish_sums(torch.zeros(2, 4), None, None, None, torch.float64) is None


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_a_linear_layer_multiplies_on_bfloat16_units():
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x, w, g = (
            torch.randn(size, device="cuda", generator=generator).to(dtype) for size in ((96, 160), (64, 160), (96, 64))
        )
        for name in ("mxfp4", "nvfp4", "mxfp8", "e4m3"):
            config = fmtsim.linear_config(x=name, w=name, g=name)
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            y = fmtsim.EmulatedGEMM.apply(*leaves, None, config)
            dx, dw = torch.autograd.grad(y, leaves, g)
            q = {
                (t, dim): fmtsim.quantize(t, name, dim=dim, pad=True, out_dtype=torch.float32).double()
                for t in (x, w, g)
                for dim in (-1, 0)
            }
            for found, wanted in ((y, q[x, -1] @ q[w, -1].t()), (dx, q[g, -1] @ q[w, 0]), (dw, q[g, 0].t() @ q[x, 0])):
                # float32 sums of the unit, one rounding to the dtype
                scale = wanted.abs().max()
                assert found.dtype == dtype
                unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
                assert (found.double() - wanted).abs().max() <= scale * unit
