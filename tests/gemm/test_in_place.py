# SPDX-License-Identifier: Apache-2.0
"""Parts that are added to the output as they arrive: what a plan may say, engines against the oracle, and verbs."""

import pytest
import torch

import fmtsim
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.targets.kernel import Kernel, Rule
from fmtsim.gemm.targets.target import Target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.call import Operands
from fmtsim.spec.gemm_spec import GemmSpec, gemm_spec_from_json
from fmtsim.spec.plan import GemmPlan
from tests.support.bits import assert_same_bits
from tests.support.gemm_oracle import finished, sums
from tests.support.refusals import refused
from tests.support.targets import linear, mm, resolve

BF16 = get_format("bf16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
PLANS = (
    GemmPlan(k_tile=16, split=4, partial="bf16", reduce="in_place"),
    GemmPlan(k_tile=16, part_k=24, split=4, residue_first=True, partial="fp16", reduce="in_place"),
    GemmPlan(k_tile=8, split=3, owner="interleaved", promote_every=16, reduce="in_place"),
    GemmPlan(partial="bf16", reduce="in_place"),
)


def operands(fmt, m=3, n=66, k=45, seed=1):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, k, generator=generator).to(DTYPES[fmt]) for rows in (m, n))
    return a, b, torch.randn(n, generator=generator)


def test_a_difference_is_seen():
    a, b, bias = operands("bf16")
    spec = GemmSpec(datapath=get_unit("hopper.wgmma").mode("bf16", "bf16"), plan=PLANS[0], a=BF16, b=BF16)
    serial = GemmSpec(datapath=spec.datapath, plan=GemmPlan(k_tile=16, split=4), a=BF16, b=BF16)
    expected = sums(a, b, spec)
    refused("differ", assert_same_bits, run_gemm(Operands(a, b), serial), expected, error=AssertionError)
    refused(
        "differ", assert_same_bits, run_gemm(Operands(a, b, c=bias.expand(3, 66)), spec), expected, error=AssertionError
    )
    assert_same_bits(run_gemm(Operands(a, b), gemm_spec_from_json(spec.to_json())), expected)


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_a_linear_layer_begins_with_its_bias(fmt):
    x, w, bias = operands(fmt)
    bias = bias.to(x.dtype)
    plan = GemmPlan(k_tile=32, split=3, reduce="in_place", partial=None if fmt == "fp32" else fmt)
    unit, name = get_unit("hopper.wgmma" if fmt == "bf16" else "fp32_fma"), get_format(fmt)
    spec = GemmSpec(datapath=unit.mode(fmt, fmt), plan=plan, a=name, b=name)
    y = fmtsim.linear(x, w, bias, target=unit, plan=plan)
    assert_same_bits(y, finished(sums(x, w, spec, c=bias.float().expand(3, 66)), x.dtype))
    serial = GemmPlan(k_tile=32, split=3)
    assert not torch.equal(y, fmtsim.linear(x, w, bias, target=unit, plan=serial))  # the bias comes last
    assert_same_bits(fmtsim.linear(x, w, None, target=unit, plan=plan), finished(sums(x, w, spec), x.dtype))
    empty = fmtsim.linear(x[:, :0], w[:, :0], bias, target=unit, plan=plan)
    assert_same_bits(empty, bias.expand(3, 66).contiguous())


def test_a_large_layer_is_done_in_pieces():
    x, w, bias = operands("bf16", m=300, n=40, k=64)
    plan, unit = GemmPlan(k_tile=32, split=2, reduce="in_place", partial="bf16"), "hopper.wgmma"
    whole = fmtsim.linear(x, w, bias.bfloat16(), target=unit, plan=plan)
    some = fmtsim.linear(x[200:203], w, bias.bfloat16(), target=unit, plan=plan)
    assert_same_bits(whole[200:203], some)


def test_the_gradient_of_the_bias_is_that_of_any_layer():
    x, w, bias = operands("bf16", n=8)
    bias = bias.bfloat16().requires_grad_()
    plan = GemmPlan(k_tile=32, split=3, reduce="in_place", partial="bf16")
    fmtsim.linear(x, w, bias, target="hopper.wgmma", plan=plan).float().sum().backward()
    assert torch.equal(bias.grad, torch.full((8,), 3, dtype=torch.bfloat16))


def test_explanation():
    x, w, _ = operands("bf16")
    rows = dict(fmtsim.explain_mm(x, w.t(), target="hopper.wgmma", plan=PLANS[0]).rows)
    assert rows["order"].endswith("parts are added to the output in place, rounded to bf16 after every addition")
    rows = dict(fmtsim.explain_mm(x, w.t(), target="hopper.wgmma", plan=PLANS[2]).rows)
    assert rows["order"].endswith("parts are added to the output in place")


# What a plan file says of it, and of units of its own.


def test_kernels_in_place():
    kernel = Kernel.from_dict({"k_tile": 64, "slices": True, "align": 8, "partial": "out", "reduce": "in_place"})
    plan = kernel.split_plan(linear(64, 65, 640), 3)
    assert (plan.split, plan.partial, plan.reduce) == (3, BF16, "in_place")
    whole = kernel.split_plan(linear(64, 65, 640), 1)
    assert (whole.split, whole.partial, whole.reduce) == (1, None, "serial")
    assert kernel.split_plan(mm(64, 65, 640), 3).partial is None  # float32 results
    assert Kernel.from_dict(kernel.to_dict()) == kernel
    strided = Kernel(plan=GemmPlan(k_tile=4, owner="interleaved", reduce="pairwise"))
    plan = strided.split_plan(mm(1, 64, 640), 8)
    assert (plan.k_tile, plan.split, plan.owner, plan.reduce) == (4, 8, "interleaved", "pairwise")


def with_rule(**fields):
    record = fmtsim.get_target("h200").to_dict()
    rule = {"when": {"a": "tf32", "n": 1}, "kernel": "any", "basis": "rule", "reason": "a test", "split": 1}
    return Target.from_dict({**record, "rules": [rule | fields, *record["rules"]]})


def test_a_rule_may_name_a_unit_of_its_own():
    target = with_rule(unit="fp32_fma", operands="fp32")
    found = target.resolve(mm(64, 1, 128, "tf32"))
    assert (found.unit, found.a.name, found.datapath) == ("fp32_fma", "fp32", get_unit("fp32_fma").mode("fp32", "fp32"))
    assert resolve(mm(64, 64, 128, "tf32")).b.name == "tf32"
    assert target.to_dict()["rules"][0]["operands"] == "fp32" and "unit" not in target.to_dict()["rules"][1]
    a, b, _ = operands("fp32", m=64, n=1)
    y = fmtsim.mm(a, b.t(), target=target, allow="tf32")
    assert_same_bits(y, fmtsim.mm(a, b.t(), target="fp32_fma"))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(y, fmtsim.mm(a, b.t(), target="hopper.wgmma", allow="tf32"))
    compiled = torch.compile(lambda x: fmtsim.mm(x, b.t(), target=target, allow="tf32"), backend="eager")
    assert_same_bits(compiled(a), y)


def test_rules_with_units_that_make_no_sense():
    for fields, message in (
        ({"operands": "fp32"}, "operands='fp32' are those of a unit; name it with unit="),
        ({"unit": "fp32_fmx"}, "fp32_fmx"),
        ({"unit": "fp32_fma", "operands": "int8"}, "operands='int8' is not a floating-point format"),
    ):
        refused(message, with_rule, **fields)
    assert Rule(when={}, kernel="any", split=1, basis="rule", reason="").unit is None
