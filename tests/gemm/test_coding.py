# SPDX-License-Identifier: Apache-2.0
"""Operands of units: values and scales have every bit of encode, and what no unit takes is refused."""

import dataclasses
import itertools

import pytest
import torch

import fmtsim
from fmtsim.casts.quantize import decode, encode
from fmtsim.formats.block import scaled, with_block
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.compile import operand_layout
from fmtsim.gemm.layers.config import element_format, quantizer_scale_kind
from fmtsim.gemm.layers.quantize_operand import holder, quantize_operand
from fmtsim.gemm.products.operand_scales import product_kind
from fmtsim.recipes import get_recipe
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import FormatError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal, wide

ROWS, K = 128, 256


def real(name, block, arithmetic="reciprocal"):
    fmt = scaled(get_format(name), block)
    return dataclasses.replace(fmt, scaling=dataclasses.replace(fmt.scaling, arithmetic=arithmetic))


FORMATS = {
    "e4m3 tensor": real("e4m3", (None, None)), "e5m2 tensor encode": real("e5m2", (None, None), "encode"),
    "e4m3 row": real("e4m3", (1, None)), "e2m1 row encode": real("e2m1", (1, None), "encode"),
    "e5m2 row divide": real("e5m2", (1, None), "divide"), "e4m3 tiles": real("e4m3", (1, 128)),
    "e4m3 squares": real("e4m3", (128, 128)), "e3m2 row floor": scaled(get_format("e3m2"), (1, None), "floor"),
    "mxfp8": get_format("mxfp8_e4m3"), "mxfp6": get_format("mxfp6_e2m3"),
    "mxfp4 even": with_block(get_format("mxfp4"), None, "even"),
    "mxfp8 e5m2 rceil": with_block(get_format("mxfp8_e5m2"), None, "rceil"),
    "mxfp4 ceil": with_block(get_format("mxfp4"), None, "ceil"), "nvfp4": get_format("nvfp4"),
    "nvfp4 squares": get_format("nvfp4_16x16"),
}  # fmt: skip


def data(kind, dtype=torch.float32):
    """Return [ROWS, K]: normal, over many binades, at the top or at the bottom of float32, or with special numbers."""
    x = normal(ROWS, K, seed=1)
    if kind == "wide":
        x = wide(ROWS, K, seed=2, low=-140, high=120)
    elif kind == "huge":
        x = (x.double() * 2.0**127).clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).float()
    elif kind == "tiny":
        x = (x.double() * 2.0**-140).float()
    elif kind in ("special", "zeros"):
        x[3], x[:, 5], x[64:], x[7, 9] = 0.0, -0.0, 0.0, -0.0
    if kind == "special":
        x[1, 2], x[2, 100], x[10, 30] = torch.inf, -torch.inf, torch.nan
    return x.to(dtype)


def kind(fmt):
    return quantizer_scale_kind(Quantizer(format=fmt))


def coded(x, quantizer, dim=-1, seed=None):
    keys = Keys() if seed is None else Keys(RandomKey(seed))
    return quantize_operand(x, quantizer, keys, dim=dim)


def check(x, fmt, dim=-1, rounding="nearest_even", overflow=None, seed=None):
    """Fail unless an operand has the codes and scales of encode."""
    mode = Rounding(mode=rounding)
    found = coded(x, Quantizer(format=fmt, rounding=mode, overflow=overflow), dim, seed)
    wanted = encode(x, fmt, rounding=mode, overflow=overflow, dim=dim, generator=seed, pad=True).parts()
    held = found.elements if dim == -1 else found.elements.mT
    again = {"rounding": Rounding(), "overflow": "ieee", "dim": -1, "generator": None, "pad": True}
    assert_same_bits(encode(held.float(), fmt.element, **again).parts().codes, wanted.codes)
    assert_same_bits(found.scale, wanted.scales)
    if fmt.tensor_scale:
        assert_same_bits(found.tensor_scale, wanted.tensor_scale)
    assert element_format(found.quantizer.format) == fmt.element and held.shape == x.shape


@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "tiny", "zeros", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_are_those_of_encode(name, kind):
    for dim in (0, -1):
        check(data(kind), FORMATS[name], dim)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", ["e4m3 tensor", "e2m1 row encode", "mxfp8", "nvfp4"])
def test_every_rounding(name, rounding):
    seed = 5 if rounding == "stochastic" else None
    for dim, kind in ((0, "normal"), (-1, "wide")):
        check(data(kind), FORMATS[name], dim, rounding, seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
def test_every_dtype_and_overflow(dtype, overflow):
    for name in ("e4m3 tensor", "e5m2 tensor encode", "mxfp8", "nvfp4"):
        check(data("normal", dtype), FORMATS[name], 0, overflow=overflow)


@pytest.mark.parametrize("shape", [(5, 40), (128, 100), (0, 32), (1, 16)])
def test_short_blocks(shape):
    for name in FORMATS:
        check(normal(*shape), FORMATS[name])


def test_layouts_do_not_matter():
    x = data("normal")
    for t in (x.mT.contiguous().mT, x[:, :1].expand(ROWS, K), x[::2]):
        for seed, rounding in ((None, "nearest_even"), (4, "stochastic")):
            check(t, FORMATS["e4m3 row"], 0, rounding, seed=seed)


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "e4m3", "e5m2", "e2m1", "fp64"])
def test_plain_formats_are_values_in_a_dtype_of_engines(name):
    x = data("special") if name != "e2m1" else data("normal")
    found = coded(x, Quantizer(format=get_format(name)), 0)
    wanted = encode(x, name).decode(out_dtype=torch.float64)
    values = found.elements.double().mT
    assert torch.equal(values.isnan(), wanted.isnan())
    assert_same_bits(values.masked_fill(values.isnan(), 0.0), wanted.masked_fill(wanted.isnan(), 0.0))
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtypes |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float8_e4m3fn}
    assert found.elements.dtype == dtypes.get(name, torch.float32) and found.scale is None


def test_float8_holds_every_value_of_narrower_formats():
    for name in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2"):
        fmt = get_format(name)
        values = decode(torch.arange(1 << fmt.bits, dtype=torch.int16), fmt)
        assert_same_bits(values.to(holder(fmt)).float().nan_to_num(7.0), values.nan_to_num(7.0))
        assert holder(fmt).itemsize == 1
    assert [holder(get_format(name)) for name in ("e4m3_ieee", "e3m4", "tf32")] == [torch.float32] * 3


def test_kinds():
    kinds = {name: kind(fmt) for name, fmt in FORMATS.items()}
    assert kinds["e4m3 tensor"] == "tensor" and kinds["e4m3 row"] == kinds["e3m2 row floor"] == "row"
    assert kinds["mxfp8"] == "mx" and kinds["nvfp4"] == kinds["nvfp4 squares"] == "nvfp4"
    assert kinds["e4m3 tiles"] == kinds["e4m3 squares"] == kind(get_format("e4m3_1x128_pow2")) == "block_128"
    pairs = [("none", "none"), ("none", "tensor"), ("row", "tensor"), ("row", "none"), ("mx", "mx")]
    assert [product_kind(*pair) for pair in pairs] == ["none", "tensor", "row", "row", "mx"]


@pytest.mark.parametrize("name", ["uint8", "nf4", "lns8_g8", "logfmt8", "mxint8", "uint8_channel_zp"])
def test_formats_that_no_unit_multiplies(name):
    with pytest.raises(FormatError, match=r"no unit multiplies .*; pass target=Datapath"):
        kind(get_format(name) if name != "int8_row" else scaled(get_format("int8"), (1, None)))


def test_blocks_that_no_unit_multiplies():
    with pytest.raises(FormatError, match=r"no unit multiplies e4m3 in blocks of \(1, 32\) with fp32 scales"):
        kind(scaled(get_format("e4m3"), (1, 32)))
    with pytest.raises(FormatError, match=r"no unit multiplies an operand with mx scales by one with no scales; give"):
        product_kind("mx", "none")


@pytest.mark.parametrize("name", fmtsim.list_recipes(kind="training"))
def test_layouts_follow_from_records(name):
    """What the operator of operands tells a compiler is what there is: tensors, their dtypes and their strides."""
    recipe = get_recipe(name)
    configs = [config for config in (recipe.linear, *(rule.use for rule in recipe.rules)) if config is not None]
    quantizers = [quantizer for config in configs for quantizer in config.operands.values()]
    quantizers += [Quantizer(format=fmt) for fmt in FORMATS.values()] if name == "fp32" else []
    keys = Keys(RandomKey(1), RandomKey(2), RandomKey(3))
    for quantizer, dtype in itertools.product(dict.fromkeys(quantizers), (torch.bfloat16, torch.float32)):
        if quantizer.source == "forward":
            continue
        history = quantizer.scaling is not None and quantizer.scaling.history is not None
        for dim, folded in itertools.product((-1, 0), (False, True)):
            state = DelayedScale(quantizer) if history else None
            made = quantize_operand(normal(128, 256, seed=1).to(dtype), quantizer, keys, state, dim=dim, folded=folded)
            layout = operand_layout(quantizer, dtype, False, dim, folded)
            parts = {field: getattr(made, field) for field in ("elements", "scale", "tensor_scale", "slope", "rest")}
            assert {field: part.dtype for field, part in parts.items() if part is not None} == {
                field: dtype for field, (dtype, _) in layout.items()
            }
            if quantizer.then is None and (quantizer.scaling is None or len(quantizer.scaling.candidates) == 1):
                assert made.elements.is_contiguous() != layout["elements"][1]  # the operator copies the others
