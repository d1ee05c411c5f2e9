# SPDX-License-Identifier: Apache-2.0
"""Products of another library than cuBLAS: results of a persistent Triton kernel, and SGLang's choice of kernels."""

import itertools
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis import batch_invariance
from tests.support.bits import bits
from tests.support.targets import fp8, linear, mm
from tests.support.triton_calls import ROUNDING, calls, digest, operands

BF16 = mm(64, 4096, 14336, "bf16", out=torch.bfloat16)
EVERY = calls()
SHORT = 1100  # products of a sum in a test that runs by default


def multiplied(call, target):
    a, b, bias = operands(call)
    return fmtsim.linear(a, b.t(), bias, target=target) if call.bias else fmtsim.mm(a, b, target=target)


@pytest.mark.parametrize("length", ["short", pytest.param("long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["bf16", "fp16", "tf32"])
def test_the_product_has_the_recorded_bits(what, length):
    """float32 operands are truncated to TF32, with ties and NaN as everywhere."""
    chosen = [x for x in EVERY if (x.unit, x.what, x.k < SHORT) == ("wgmma", what, length == "short")]
    assert len(chosen) > 15
    assert [call for call in chosen if digest(multiplied(call, "h100.triton_persistent")) != call.digest] == []


@pytest.mark.parametrize(("what", "fmt"), [("bf16", None), ("fp16", None), ("tf32", "tf32")])
def test_mma_sync_adds_in_the_same_order(what, fmt):
    """The order that is taken for an A100, whose own unit has other blocks."""
    for call in [x for x in EVERY if (x.unit, x.what) == ("mma", what) and x.k < SHORT and not x.bias]:
        a, b, _ = operands(call)
        y = fmtsim.mma(a, b.t(), target="hopper.mma") if fmt else fmtsim.mm(a, b, target="hopper.mma")
        assert digest(y) == call.digest, call
    assert get_target("a100.triton_persistent").find(BF16).basis == "guess"


def test_without_tf32_products_are_fused_multiply_adds():
    """With TRITON_F32_DEFAULT=ieee; the compiler fuses a bias with a single product."""
    for call in [x for x in EVERY if x.what == "ieee" and x.k < SHORT]:
        a, b, bias = operands(call)
        y = fmtsim.mm(a, b, target="fp32_fma") if bias is None else fmtsim.linear(a, b.t(), bias, target="fp32_fma")
        assert (digest(y) == call.digest) is not (call.k == 1 and call.bias), call


@pytest.mark.parametrize("what", ["bf16", "fp16", "tf32"])
def test_another_order_or_rounding_is_seen(what):
    """In all results that consist of rounding errors: two parts, blocks of 8, new sums; float32 rounded to TF32."""
    chosen = [x for x in EVERY if (x.unit, x.what, x.numbers) == ("wgmma", what, ROUNDING) and x.k < SHORT][:4]
    planted = [{"k_tile": 64, "split": 2}, {"instruction_k": 4 if what == "tf32" else 8}, {"promote_every": 64}]
    for call, fields in itertools.product(chosen, planted):
        a, b, _ = operands(call)
        plan = fmtsim.GemmPlan(**fields)
        if what == "tf32":
            assert digest(fmtsim.mm(a, b, target="hopper.wgmma", allow="tf32")) != call.digest
            a, b = ((x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
            assert digest(fmtsim.mm(a, b, target="hopper.wgmma", formats="tf32")) == call.digest
        assert digest(fmtsim.mm(a, b, target="hopper.wgmma", allow="tf32", plan=plan)) != call.digest
    assert len(chosen) == 4


def test_a_row_has_the_same_bits_in_every_batch():
    layers = [(4096, 14336, False), (64, 4096, False), (4096, 4096, True)]
    for target in ("h100.triton_persistent", "h200.sglang"):
        report = batch_invariance(layers, target, range(1, 600), dtypes=["bf16"], passes=["forward"])
        assert [product.invariant for product in report.products] == [True, True, True]
    usual = batch_invariance(layers, "h100", range(1, 600), dtypes=["bf16"], passes=["forward"])
    assert not all(product.invariant for product in usual.products)


def test_what_the_library_computes_and_what_is_left_to_cublas():
    persistent, cublas = get_target("h200.triton_persistent"), get_target("h200")
    assert (persistent.find(BF16).plan.split, cublas.find(BF16).plan.split) == (1, 3)
    for call in (replace(BF16, out=torch.float32), replace(BF16, operation="bmm", batch=4), fp8(64, 64, 4096)):
        assert persistent.find(call)._replace(rule=None) == cublas.find(call)._replace(rule=None)
    for call in (mm(64, 64, 64, "tf32"), mm(64, 64, 64, "fp16", out=torch.float16, accumulate="fp16")):
        found = persistent.find(call)
        assert (found.basis, "looks at no switch" in found.plan.source) == ("guess", True)
    plans = [get_target(f"{gpu}.triton_persistent").find(BF16).plan for gpu in ("h100", "h200")]
    assert replace(plans[0], source="") == replace(plans[1], source="") == fmtsim.GemmPlan()
    float32 = persistent.resolve(mm(64, 64, 64, "fp32"))
    assert (float32.unit, float32.a.name, float32.basis) == ("hopper.wgmma", "tf32", "rule")


def test_sglang_takes_deep_gemm_where_k_is_contiguous():
    target = get_target("h100.sglang")
    layer = replace(linear(64, 4096, 4096, "bf16"), out=torch.bfloat16)
    cases = [
        (layer, "reported", True), (replace(layer, bias=False), "reported", False),
        (replace(layer, b_layout="column"), "rule", False), (replace(layer, n=8), "rule", False),
        (replace(linear(64, 64, 64, "fp16"), out=torch.float16), "rule", False),
    ]  # fmt: skip
    for call, basis, after in cases:
        found = target.find(call)
        assert (found.basis, found.plan.bias_after_rounding, found.plan.split) == (basis, after, 1)
    assert target.find(replace(BF16, operation="bmm", batch=4)).plan.source.startswith("The loop of matmul_persistent")
    a, w, bias = (
        torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16() for size in ((5, 64), (32, 64), 32)
    )
    rounded = fmtsim.mm(a, w.t(), target="chain") + bias
    assert torch.equal(fmtsim.linear(a, w, bias, target=target), rounded)
    assert not torch.equal(fmtsim.linear(a, w, bias, target="h100.triton_persistent"), rounded)


def test_explanations_name_what_happens_to_float32():
    a, b = torch.randn(3, 64), torch.randn(64, 16)
    text = str(fmtsim.explain_mm(a, b, target="h100.triton_persistent"))
    assert "operands  float32, whose low 13 bits the unit ignores" in text and "One sum, k in order" in text
    y = fmtsim.mm(a, b, target="h100.triton_persistent")
    assert torch.equal(bits(y), bits(fmtsim.mma(a, b.t(), target="hopper.wgmma")))


@pytest.mark.slow
def test_float32_is_truncated_in_graphs_as_well():
    a, b = torch.randn(3, 64), torch.randn(64, 16)
    compiled = torch.compile(fmtsim.mm, backend="eager")(a, b, target="h100.triton_persistent")
    assert torch.equal(bits(compiled), bits(fmtsim.mma(a, b.t(), target="hopper.wgmma")))
