# SPDX-License-Identifier: Apache-2.0
"""scaled_mm and explain_mm: kinds of scales, what they are told of, and what they refuse."""

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

import fmtsim
from fmtsim import GemmPlan, get_format, get_unit
from fmtsim.formats import packing
from fmtsim.formats.packing import unswizzled
from fmtsim.spec.gemm_spec import GemmSpec
from tests.support.bits import assert_same_bits
from tests.support.gemm_oracle import finished, sums
from tests.support.operands import e4m3_pair, normal
from tests.support.refusals import refused

WGMMA = "hopper.wgmma"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.tensor(1.0)


def spec(unit=WGMMA, plan=None, a="e4m3", b="e4m3", scale=None):
    path = get_unit(unit).mode(a, b, scale=scale)
    return GemmSpec(datapath=path, plan=plan or GemmPlan(), a=get_format(a), b=get_format(b))


def positive(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.3


# Kinds of scales.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("rule", ["scale", "row_column", "column_row"])
def test_tensor_and_row_scales(dtype, rule):
    a, b = e4m3_pair()
    plan = GemmPlan(epilogue=rule, promote_every=128)
    bias = None if dtype == torch.float32 else normal(10, seed=3).to(torch.float16 if dtype == E4M3 else dtype)
    reduced = sums(a, b, spec(plan=plan))
    for scales in ((torch.tensor(0.7), torch.tensor([[1.3]])), (positive(6, 1), positive(1, 10, seed=2))):
        got = fmtsim.scaled_mm(a, b.t(), *scales, bias, torch.tensor(2.0), dtype, True, target=WGMMA, plan=plan)
        assert_same_bits(got, finished(reduced, dtype, rule, *scales, bias, torch.tensor(2.0)))
        recipe = "TensorWise" if scales[0].numel() == 1 else "RowWise"
        named = fmtsim.scaled_mm(
            a, b.t(), *scales, bias, torch.tensor(2.0), dtype, target=WGMMA, plan=plan,
            scale_recipes=(recipe, [getattr(ScalingType, recipe)]),
        )  # fmt: skip
        assert_same_bits(named, got)


def test_default_outputs_are_those_of_torchs_two_functions():
    a, b = e4m3_pair()
    assert fmtsim.scaled_mm(a, b.t(), ONE, ONE, target=WGMMA).dtype == E4M3
    recipes = {"scale_recipes": ScalingType.TensorWise}
    assert fmtsim.scaled_mm(a, b.t(), ONE, ONE, target=WGMMA, **recipes).dtype == torch.bfloat16


def blocks(rows, k, recipe, seed):
    return positive(rows if recipe == "BlockWise1x128" else -(-rows // 128), -(-k // 128), seed=seed)


@pytest.mark.parametrize("recipes", [(1, 128), (1, 1), (128, 1)])
@pytest.mark.parametrize("k", [384, 336])
def test_blocks_of_128(recipes, k):
    a, b = e4m3_pair(144, 160, k)
    a, b = a[:, :k], b[:, :k]
    names = tuple("BlockWise1x128" if recipe == 1 else "BlockWise128x128" for recipe in recipes)
    scale_a, scale_b = blocks(144, k, names[0], 1), blocks(160, k, names[1], 2)
    full = [
        s if name == "BlockWise1x128" else s.repeat_interleave(128, 0)[:rows]
        for s, name, rows in ((scale_a, names[0], 144), (scale_b, names[1], 160))
    ]
    few, some = slice(120, 144, 9), slice(100, 160, 18)
    plan = GemmPlan(promote_every=128, scaled_promotion=True, successive_scales=recipes == (1, 1))
    expected = sums(a[few], b[some], spec(plan=plan), scale_a=full[0][few], scale_b=full[1][some])
    options = {"out_dtype": torch.float32, "target": WGMMA}
    got = fmtsim.scaled_mm(a, b.t(), scale_a, scale_b.t(), **options)  # as torch._scaled_mm takes them
    assert_same_bits(got[few, some], expected)
    options |= {"scale_recipes": (names[0], getattr(ScalingType, names[1]))}
    assert_same_bits(fmtsim.scaled_mm(a, b.t(), scale_a, scale_b, **options), got)
    assert_same_bits(fmtsim.scaled_mm(a, b.t(), scale_a, scale_b.t(), **options), got)
    padded = [s if name == "BlockWise1x128" else torch.nn.functional.pad(s.t(), (0, 0, 0, 4 - s.shape[1]), value=9.0)
              for s, name in ((scale_a, names[0]), (scale_b, names[1]))]  # fmt: skip
    assert_same_bits(fmtsim.scaled_mm(a, b.t(), *padded, **options), got)


@pytest.mark.parametrize(
    "chosen", [{"target": WGMMA}, {"target": "h200", "strict": True}, {"target": "chain"}], ids=str
)
def test_the_kind_of_the_other_operands_blocks_decides_how_scales_are_multiplied(chosen):
    a, b = e4m3_pair(128, 256, 512)
    scale_a, scale_b = positive(128, 4), positive(2, 4, seed=2)
    options = {"out_dtype": torch.float32, **chosen}
    one, both = (
        fmtsim.scaled_mm(a, b.t(), scale_a, s.t(), **options) for s in (scale_b, scale_b.repeat_interleave(128, 0))
    )
    assert not torch.equal(one, both)
    torch.testing.assert_close(one, both, rtol=1e-5, atol=1e-3)  # the same sums, rounded at other places


def test_square_scales_have_the_order_of_the_function_that_is_meant():
    a, b = e4m3_pair(256, 256, 256)
    one, two = positive(2, 2), positive(256, 2, seed=2)
    options = {"out_dtype": torch.bfloat16, "target": WGMMA, "plan": GemmPlan(promote_every=128, scaled_promotion=True)}
    expected = fmtsim.scaled_mm(a, b.t(), two, one.repeat_interleave(128, 0).t(), **options)
    assert_same_bits(fmtsim.scaled_mm(a, b.t(), two, one.t(), **options), expected)
    recipes = {"scale_recipes": ("BlockWise1x128", "BlockWise128x128")}
    assert_same_bits(fmtsim.scaled_mm(a, b.t(), two, one.t(), **options, **recipes), expected)
    expected = fmtsim.scaled_mm(b, a.t(), one.repeat_interleave(128, 0), two.t(), **options)
    assert_same_bits(fmtsim.scaled_mm(b, a.t(), one, two.t(), **options), expected)
    recipes = {"scale_recipes": ("BlockWise128x128", "BlockWise1x128")}
    assert_same_bits(fmtsim.scaled_mm(b, a.t(), one.t(), two, **options, **recipes), expected)


def swizzled(codes):
    """Put codes [rows, blocks] into cuBLAS's order, one element at a time."""
    rows, count = codes.shape
    tall, broad = -(-rows // 128), -(-count // 4)
    flat = torch.full((tall * broad * 512,), 77, dtype=torch.uint8)
    for r in range(rows):
        for c in range(count):
            tile = (r // 128) * broad + c // 4
            flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = codes[r, c]
    return flat


@pytest.mark.parametrize(("rows", "count"), [(3, 2), (128, 4), (130, 5), (300, 9)])
def test_swizzled_scales(rows, count):
    codes = torch.randint(0, 256, (rows, count), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert torch.equal(unswizzled(swizzled(codes), rows, count), codes)
    made = packing.swizzled(codes.int() + 1)  # zeros are its padding
    assert torch.equal(made[made > 0] - 1, swizzled(codes)[made > 0].int()) and made.count_nonzero() == codes.numel()


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4"])
def test_scales_inside_a_unit(kind):
    generator = torch.Generator().manual_seed(1)
    group, scale, dtype = (16, "ue4m3", E4M3) if kind == "nvfp4" else (32, "e8m0", torch.float8_e8m0fnu)
    unit = {"mxfp8": "mxf8f6f4", "mxfp4": "mxf4", "nvfp4": "nvf4"}[kind]
    k, name = 96, "e4m3" if kind == "mxfp8" else "e2m1"
    if kind == "mxfp8":
        a, b = (normal(n, k, seed=n).to(E4M3) for n in (5, 9))
        left, right = a, b.t()
    else:
        a, b = (torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8) for n in (5, 9))
        packed = [(x[:, ::2] | x[:, 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2) for x in (a, b)]
        a, b = fmtsim.decode(a, "e2m1"), fmtsim.decode(b, "e2m1")
        left, right = packed[0], packed[1].t()
    span = (0, 127) if kind == "nvfp4" else (110, 140)
    marks = [torch.randint(*span, (n, k // group), generator=generator).to(torch.uint8) for n in (5, 9)]
    values = [fmtsim.decode(x, scale) for x in marks]
    definition = spec(f"blackwell.tcgen05.{unit}", a=name, b=name, scale=scale)
    reduced = sums(a, b, definition, scale_a=values[0], scale_b=values[1])
    options = {"target": f"blackwell.tcgen05.{unit}", "out_dtype": torch.bfloat16}
    ordered = [swizzled(x).view(dtype) for x in marks]
    got = fmtsim.scaled_mm(left, right, *ordered, **options)
    assert_same_bits(got, finished(reduced, torch.bfloat16))
    plain = {"swizzles": ("NO_SWIZZLE", SwizzleType.NO_SWIZZLE)}
    assert_same_bits(fmtsim.scaled_mm(left, right, *(x.view(dtype) for x in marks), **options, **plain), got)
    recipe = "BlockWise1x16" if kind == "nvfp4" else "BlockWise1x32"
    swizzle = SwizzleType.SWIZZLE_32_4_4
    named = {"scale_recipes": recipe, "swizzles": (swizzle, [swizzle])}
    assert_same_bits(fmtsim.scaled_mm(left, right, *ordered, **options, **named), got)
    if kind == "nvfp4":
        both = [recipe, "TensorWise"]
        named |= {"scale_recipes": both}
        whole = torch.tensor(0.37), torch.tensor([1.9])
        got = fmtsim.scaled_mm(left, right, [ordered[0], whole[0]], [ordered[1], whole[1]], **options, **named)
        assert_same_bits(got, finished(reduced, torch.bfloat16, "scale", *whole))


def test_empty_products(notebook):
    a, b = e4m3_pair(16, 32, 32)
    for options in ({"target": WGMMA}, {"target": "x"}):
        options |= {"out_dtype": torch.bfloat16}
        assert_same_bits(fmtsim.scaled_mm(a[:, :0], b[:, :0].t(), ONE, ONE, **options), torch.zeros(16, 32).bfloat16())
        assert fmtsim.scaled_mm(a[:0], b.t(), ONE, ONE, **options).shape == (0, 32)
        assert fmtsim.scaled_mm(a, b[:0].t(), ONE, ONE, **options).shape == (16, 0)


def test_calls_say_what_a_library_sees(notebook):
    a, b = e4m3_pair(128, 128, 256)
    fmtsim.scaled_mm(a, b.t(), ONE, ONE, out_dtype=torch.float32, target="x", strict=True)
    call = notebook.calls[-1]
    assert (call.operation, call.m, call.n, call.k, call.a, call.b) == ("scaled_mm", 128, 128, 256, "e4m3", "e4m3")
    assert (call.out, call.fast_accum, call.scaling, call.bias) == (torch.float32, False, "tensor", False)
    assert (call.a_layout, call.b_layout, notebook.strict) == ("row", "row", True)
    fmtsim.scaled_mm(a.t().contiguous().t(), b.t().contiguous(), positive(128, 1), positive(1, 128),
                     normal(128).bfloat16(), None, torch.bfloat16, True, target="x")  # fmt: skip
    call = notebook.calls[-1]
    assert (call.out, call.fast_accum, call.scaling, call.bias) == (torch.bfloat16, True, "row", True)
    assert (call.a_layout, call.b_layout) == ("column", "column")
    notebook.plan = GemmPlan(promote_every=128, scaled_promotion=True)
    fmtsim.scaled_mm(a, b.t(), positive(128, 2), positive(2, 1), out_dtype=torch.bfloat16, target="x")
    assert notebook.calls[-1].scaling == "block_128"
    fmtsim.scaled_mm(a, b.t(), positive(128, 2), positive(2, 128), out_dtype=torch.bfloat16, target="x")
    assert notebook.calls[-1].scaling == "row_block_128"


# Explanations.


def test_explanations(notebook):
    notebook.plan = GemmPlan(k_tile=64, split=3, source="<here>")
    notebook.basis = "recorded"
    a = torch.zeros(64, 1000, dtype=torch.bfloat16)
    told = fmtsim.explain_mm(a, a.mT, target="notebook", out_dtype=torch.float32)
    assert (told.machine, told.unit, told.basis, told.call.k) == ("notebook", WGMMA, "recorded", 1000)
    assert told.verified
    assert "call      mm: [64, 1000] bf16 x [1000, 64] bf16 -> float32" in str(told)
    assert "16 tiles of 64 in 3 parts (runs of 6 tiles), each one chain from +0, k in order; " in str(told)
    assert "recorded bits of this call: <here>" in repr(told) and "call: &lt;here&gt;" in told._repr_html_()
    x = a.to(E4M3)
    notebook.plan, notebook.basis = GemmPlan(promote_every=128, source="a test"), "guess"
    told = fmtsim.explain_mm(x, x.mT, target="notebook")
    assert told.call.operation == "scaled_mm" and told.basis == "guess" and not told.verified
    for text in ("a fresh chain every 128 products", "times the product of both scales, rounded to float8_e4m3fn",
                 "saturating", "a guess: a test"):  # fmt: skip
        assert text in str(told)
    told = fmtsim.explain_mm(a.float(), a.mT.float(), target=WGMMA, allow="tf32")
    assert "float32 rounded to TF32, to nearest even" in str(told)
    told = fmtsim.explain_mm(a.to(torch.int8), a.mT.to(torch.int8), target="int8")
    assert "of no consequence" in str(told) and told.call.out == torch.int32
    told = fmtsim.explain_mm(a[None], a.mT[None], target=fmtsim.Datapath(block=4), plan=GemmPlan(instruction_k=2))
    assert told.unit is None and told.call.operation == "bmm"
    assert "own datapath: blocks of 4" in str(told) and "blocks of at most 2" in str(told)
    assert "the caller's plan" in str(told)
    refused("explain_mm needs target=: a GPU with its library", fmtsim.explain_mm, a, a.mT)
    refused("a has 2 dimensions, b 3; pass two matrices", fmtsim.explain_mm, a, a.mT[None], target=WGMMA)


def test_scales_of_rows_are_no_blocks_where_shapes_coincide():
    """One block of 128 along K has the shapes of row-wise scales, which torch tries first."""
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randn(32, 64, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
    sa, sb = torch.rand(32, 1, generator=g) + 0.5, torch.rand(1, 32, generator=g) + 0.5
    by_shape, by_name = (
        fmtsim.scaled_mm(a, b.t(), sa, sb, out_dtype=torch.float32, target="hopper.wgmma", **names)
        for names in ({}, {"scale_recipes": "RowWise"})
    )
    assert torch.equal(by_shape, by_name)
