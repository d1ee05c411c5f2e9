# SPDX-License-Identifier: Apache-2.0
"""The operator fmtsim::gemm: torch's rules, the choice of engine, batches, operands as verbs read them, refusals."""

import pytest
import torch

import fmtsim
from fmtsim import Datapath, GemmPlan, RandomKey, get_format
from fmtsim.casts.quantize import decode
from fmtsim.gemm.products import operands as operands_module
from fmtsim.gemm.products import operator
from fmtsim.gemm.products.matmul import mm
from fmtsim.gemm.products.operands import read_operand, stays_packed
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.spec.call import Operands
from fmtsim.spec.datapath import IntegerDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from tests.support.bits import assert_same_bits
from tests.support.gemm_oracle import finished, sums
from tests.support.operands import normal, wide
from tests.support.refusals import refused

WIDE = Datapath(block=None, fraction_bits=None, rounding="nearest_even", accumulator="fp64")
STOCHASTIC = Datapath(accumulator="bf16", rounding="stochastic")
SCALED = Datapath(block=32, scale="e8m0", scale_block=32)


def spec(datapath=None, plan=None, a="bf16", b="bf16"):
    return GemmSpec(
        datapath=Datapath() if datapath is None else datapath, plan=plan or GemmPlan(), a=get_format(a), b=get_format(b)
    )


def operands(m=5, n=6, k=40, dtype=torch.bfloat16):
    return wide(m, k, seed=1).to(dtype), wide(n, k, seed=2).to(dtype)


def tensors(a, b, **others):
    """Return operands as the operator takes them."""
    return list(Operands(a, b, **others)[:9])


KEY = torch.tensor([3, 4])
CASES = {
    "plain": lambda a, b: (tensors(a, b), spec().to_json()),
    "finished": lambda a, b: (
        tensors(a, b, row=torch.rand(5, 1), column=torch.rand(1, 6), bias=normal(6).bfloat16()),
        spec(plan=GemmPlan(epilogue="row_column")).to_json(), torch.bfloat16,
    ),
    "fp8 out": lambda a, b: (
        tensors(a, b, row=torch.tensor(0.5), column=torch.tensor(2.0), result_scale=torch.tensor(3.0)),
        spec().to_json(), torch.float8_e4m3fn,
    ),
    "addend": lambda a, b: (tensors(a, b, c=normal(5, 6)), spec().to_json()),
    "float64": lambda a, b: (tensors(a, b), spec(WIDE).to_json()),
    "scales": lambda a, b: (tensors(a, b, scale_a=torch.ones(5, 2), scale_b=torch.ones(6, 2)), spec(SCALED).to_json()),
    "stochastic": lambda a, b: (tensors(a, b), spec(STOCHASTIC).to_json(), None, KEY),
    "transposed": lambda a, b: (
        tensors(a.mT.contiguous().mT, b[:, ::2].repeat_interleave(2, 1)), spec().to_json()
    ),
    "to TF32": lambda a, b: (
        tensors(a.float(), b.float()), spec(a="tf32", b="tf32").to_json(), None, None, False, True
    ),
    "batch": lambda a, b: (tensors(a.expand(3, 5, 40), b.expand(3, 6, 40)), spec().to_json(), torch.bfloat16),
    "empty": lambda a, b: (tensors(a[:0], b), spec().to_json()),
    "no products": lambda a, b: (tensors(a[:, :0], b[:, :0]), spec().to_json()),
    "integers": lambda a, b: (
        tensors(a.to(torch.int8), b.to(torch.int8)), spec(IntegerDatapath(), a="int8", b="int8").to_json()
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operator_keeps_torchs_rules(case):
    torch.library.opcheck(torch.ops.fmtsim.gemm.default, CASES[case](*operands()))


def test_addends_scales_and_integers_reach_the_engine():
    a, b = operands()
    c = normal(5, 6)
    assert_same_bits(run_gemm(Operands(a, b, c=c), spec()), sums(a, b, spec(), c=c))
    scale_a, scale_b = torch.exp2(normal(5, 2).round()), torch.exp2(normal(6, 2).round())
    got = run_gemm(Operands(a, b, scale_a=scale_a, scale_b=scale_b), spec(SCALED))
    assert_same_bits(got, sums(a, b, spec(SCALED), scale_a=scale_a, scale_b=scale_b))
    promoted = spec(plan=GemmPlan(promote_every=32, scaled_promotion=True))
    got = run_gemm(Operands(a, b, scale_a=scale_a * 0.7, scale_b=scale_b), promoted)
    assert_same_bits(got, sums(a, b, promoted, scale_a=scale_a * 0.7, scale_b=scale_b))
    integers = spec(IntegerDatapath(), a="int8", b="int8")
    x, y = (
        torch.randint(-128, 128, (4, 33), generator=torch.Generator().manual_seed(i)).to(torch.int8) for i in (1, 2)
    )
    assert_same_bits(run_gemm(Operands(x, y), integers), sums(x, y, integers, torch.int32))


def test_random_words():
    a, b = operands()
    got = run_gemm(Operands(a, b), spec(STOCHASTIC), random=RandomKey(3, 4))
    assert_same_bits(got, sums(a, b, spec(STOCHASTIC), random=RandomKey(3, 4)))
    assert_same_bits(got, run_gemm(Operands(a, b), spec(STOCHASTIC), random=KEY))
    assert_same_bits(run_gemm(Operands(a, b), spec(STOCHASTIC), random=RandomKey((1 << 64) - 1, 1 << 63)),
         run_gemm(Operands(a, b), spec(STOCHASTIC), random=torch.tensor([-1, -(1 << 63)])))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2], ids=str)
def test_groups_of_rows_change_nothing(monkeypatch, dtype):
    """Large products are summed and rounded in groups of at least 64 rows."""
    a, b = wide(130, 24, seed=1).bfloat16(), wide(6, 24, seed=2).bfloat16()
    rows, columns, c = torch.rand(130, 1), torch.rand(1, 6), normal(130, 6)
    bias = normal(6).bfloat16()
    arguments = (tensors(a, b, c=c, row=rows, column=columns, bias=bias), spec().to_json(), dtype)
    whole = torch.ops.fmtsim.gemm(*arguments)
    assert_same_bits(whole, finished(run_gemm(Operands(a, b, c=c), spec()), dtype, "scale", rows, columns, bias))
    monkeypatch.setattr(operator, "_SUMS", 1)
    assert_same_bits(torch.ops.fmtsim.gemm(*arguments), whole)


@pytest.mark.parametrize(
    ("fmt", "value"),
    [("e4m3", 0.3), ("e4m3", 480.0), ("e2m1", torch.inf), ("e2m1", torch.nan), ("e4m3fnuz", torch.inf)],
)
def test_values_that_a_format_lacks_are_refused(fmt, value):
    a, b = torch.ones(3, 8), torch.ones(2, 8)
    definition = spec(a=fmt, b="fp32")
    assert run_gemm(Operands(a, b), definition)[0, 0] == 8
    a[1, 5] = value
    refused(
        rf"a holds {value:g}, which is not a value of {fmt}; round it first with", run_gemm, Operands(a, b), definition
    )
    refused(r"b holds .* or leave formats= out", run_gemm, Operands(b, a), spec(a="fp32", b=fmt))


def test_values_that_a_format_has_are_not():
    a = torch.tensor([[0.0, -0.0, torch.inf, torch.nan, 57344.0, 2.0**-16, -1.25, 1.0]])
    assert run_gemm(Operands(a, a), spec(a="e5m2", b="e5m2")).isnan().all()
    tiny = torch.tensor([[2.0**-9, 448.0, torch.nan, 0.0]], dtype=torch.bfloat16)
    assert run_gemm(Operands(tiny, tiny), spec(a="e4m3", b="e4m3")).isnan().all()


@pytest.mark.parametrize("unit", ["blackwell.tcgen05.nvf4", "blackwell.tcgen05.mxf8f6f4"])
def test_a_unit_with_scales_takes_ones_where_a_call_has_none(unit):
    a = torch.tensor([[0.5, -6.0, 3.0, 1.5] * 20])
    y = fmtsim.mm(a, a.t(), target=unit, formats="e2m1")
    assert y.item() == 20 * (0.25 + 36 + 9 + 2.25)


BYTES = torch.arange(256, dtype=torch.uint8)
E2M1, TF32, E3M4 = get_format("e2m1"), get_format("tf32"), get_format("e3m4")


def fp4_values(packed):
    """Return the numbers of bytes [..., n] in order, by the catalogue: the even one in the low nibble."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return decode(codes, "e2m1", out_dtype=torch.float32)


@pytest.mark.parametrize("shape", [(1, 256), (256, 1), (2, 8, 16)])
def test_every_byte_of_fp4_keeps_its_two_numbers(shape):
    packed = BYTES.reshape(shape)
    found = read_operand(packed.view(torch.float4_e2m1fn_x2), E2M1)
    assert found.dtype == torch.float8_e4m3fn
    assert_same_bits(found.float(), fp4_values(packed))


def test_fp4_with_strides_and_without_elements():
    packed = BYTES.reshape(16, 16)
    found = read_operand(packed[::3, 2:9].view(torch.float4_e2m1fn_x2), E2M1)
    assert_same_bits(found.float(), fp4_values(packed[::3, 2:9]))
    assert read_operand(packed[:0].view(torch.float4_e2m1fn_x2), E2M1).shape == (0, 32)
    assert read_operand(packed[:, :0].view(torch.float4_e2m1fn_x2), E2M1).shape == (16, 0)


def tf32_product(a, fmt):
    spec = GemmSpec(datapath=Datapath(), plan=GemmPlan(), a=fmt, b=fmt)
    return run_gemm(Operands(a, torch.ones(1, a.shape[1], dtype=a.dtype)), spec)


@pytest.mark.parametrize("place", [(0, 0), (3, 70), (6, 99)])
@pytest.mark.parametrize(
    ("fmt", "dtype", "wrong"), [(TF32, torch.float32, 1 + 2.0**-11), (E3M4, torch.bfloat16, 1024.0)]
)
def test_a_value_that_the_format_lacks_is_found_in_every_piece(fmt, dtype, wrong, place, monkeypatch):
    monkeypatch.setattr(operator, "_VALUES", 150)  # rows of 100: one in a piece
    a = torch.full((7, 100), -0.0, dtype=dtype)
    a[2, 5] = torch.nan
    assert tf32_product(a, fmt).shape == (7, 1)
    a[place] = wrong
    refused(f"a holds {wrong:g}, which is not a value of {fmt.name}", tf32_product, a, fmt)


@pytest.mark.parametrize("rows", [7, 1 << 20])
def test_a_gpu_is_asked_once_for_both_operands(rows, monkeypatch):
    """Here a CPU stands in for it; ``rows``: numbers of a piece."""
    monkeypatch.setattr(operator, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(operator, "_ON_GPUS", 100 * rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    a = torch.full((9, 100), 1.0)
    searched = []
    real = operator._require_each
    monkeypatch.setattr(operator, "_require_each", lambda *given: searched.append(given[0]) or real(*given))
    assert tf32_product(a, TF32).shape == (9, 1)
    assert searched == []
    a[4, 3] = torch.nan  # which no comparison finds equal
    assert tf32_product(a, TF32)[4].isnan().all() and searched == ["a", "b"]
    a[8, 99] = 1 + 2.0**-11
    refused("a holds 1.00049, which is not a value of tf32", tf32_product, a, TF32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tf32_product(a, TF32)  # values are not looked at while a graph is captured


def test_numbers_that_a_verb_rounded_are_not_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(operator, "_require_values", lambda *operands: looked.append(operands))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    mm(x, x.mT, target="hopper.wgmma", allow="tf32")
    mm(torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), target="exact", formats="e2m3")
    assert looked == []
    mm(x.bfloat16(), x.mT.bfloat16(), target="hopper.wgmma")
    mm(x, torch.zeros(4, 2, dtype=torch.uint8), target="exact", formats=(None, "e2m3"))
    assert len(looked) == 2


def test_a_compiled_product_of_fp4_has_the_bits_of_a_plain_one():
    a, b = (BYTES[:128].reshape(4, 32) ^ mask for mask in (0, 170))

    def multiply(a, b):
        return mm(a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2).t(), target="blackwell.tcgen05")

    torch._dynamo.reset()
    assert_same_bits(torch.compile(multiply, backend="eager", fullgraph=True)(a, b), multiply(a, b))


@pytest.mark.parametrize("plan", [None, GemmPlan(k_tile=16, split=2, reduce="in_place")])
def test_operands_rounded_to_tf32_in_slices_give_the_same_bits(monkeypatch, plan):
    x, w, c = normal(130, 40, seed=1), normal(150, 40, seed=2), normal(130, 150, seed=3)
    x[1, 2], x[128, 3], w[149, 0] = torch.inf, 3.4028e38, torch.nan  # the second becomes Inf
    asked = spec(plan=plan, a="tf32", b="tf32")
    expected = run_gemm(Operands(*(fmtsim.quantize(t, "tf32", overflow="ieee") for t in (x, w)), c=c), asked)
    monkeypatch.setattr(operands_module, "_SLICE_ELEMENTS", 64 * 40)
    assert_same_bits(run_gemm(Operands(x, w, c=c), asked, to_tf32=True), expected)


@pytest.mark.parametrize("packed", ["both", "one"])
def test_packed_operands_unpacked_in_slices_give_the_same_bits(monkeypatch, packed):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(0, 256, (rows, 20), generator=generator, dtype=torch.uint8) for rows in (130, 150))
    a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    asked, unpacked = spec(a="e2m1", b="e2m1"), [read_operand(x, E2M1) for x in (a, b)]
    monkeypatch.setattr(operands_module, "_SLICE_ELEMENTS", 64 * 40)
    expected = run_gemm(Operands(*unpacked), asked)
    assert_same_bits(run_gemm(Operands(a, b if packed == "both" else unpacked[1]), asked), expected)
    assert stays_packed(a) and not stays_packed(a[None]) and not stays_packed(unpacked[0])
