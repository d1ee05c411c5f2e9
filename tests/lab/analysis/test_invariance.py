# SPDX-License-Identifier: Apache-2.0
"""For which batch sizes a row's bits change: groups of sizes against the bits of emulated rows."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.products.resolver import resolve
from fmtsim.gemm.targets.doubts import without_doubts
from fmtsim.lab.analysis.invariance import batch_invariance, same_bits
from fmtsim.spec.plan import GemmPlan
from tests.support.refusals import refused
from tests.support.targets import hopper, linear, mm

SIZES = range(1, 15)
SHAPE = (640, 1024, False)


def rule(low, high, kernel, split, **more):
    when = {"operation": ["linear", "mm"], "m": {"min": low, "max": high}}
    return {"when": when, "kernel": kernel, "split": split, "basis": "recorded", "reason": "a test"} | more


@pytest.fixture(scope="module")
def target():
    """A library whose order changes with the batch: 10 and 11 are not known, and some say one order in other words."""
    kernels = {"tile64": {"k_tile": 64}, "tile32": {"k_tile": 32}, "rounded": {"k_tile": 64, "partial": "bf16"}}
    rules = [
        rule(1, 1, "tile64", 1, unit="fp32_fma", operands="fp32"), rule(2, 3, "tile64", 4), rule(4, 5, "tile32", 4),
        rule(6, 7, "tile64", 1), rule(8, 9, "tile64", 4), rule(12, 12, "tile64", 3), rule(13, 13, "rounded", 3),
        rule(14, 14, "tile32", 1),
    ]  # fmt: skip
    return hopper("six", kernels, rules)


@pytest.fixture(scope="module")
def found(target):
    return batch_invariance([SHAPE], target, SIZES)


def first_rows(product, target):
    """Return the bits of the first row by the size of its batch, emulated: sums of products that cancel exactly.

    What is left of them are roundings, which every order has in other places.
    """
    n, k = SHAPE[:2] if product == "forward" else SHAPE[1::-1]
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(rows, k // 2, generator=generator) for rows in (SIZES[-1], n))
    order = torch.randperm(k, generator=generator)
    x, w = (torch.cat(pair, 1)[:, order].bfloat16() for pair in ((x, x), (w, -w)))
    dgrad = w.T.contiguous()  # as a layer has it
    with without_doubts():
        y = {
            m: fmtsim.linear(x[:m], w, target=target)
            if product == "forward"
            else fmtsim.mm(x[:m], dgrad, target=target)
            for m in SIZES
        }
    return {m: found[0].view(torch.int16) for m, found in y.items()}


@pytest.mark.parametrize("number", [0, 1])
def test_bits_of_a_row_differ_between_groups_and_nowhere_else(found, target, number):
    product = found.products[number]
    bits = first_rows(product.product, target)
    compared = {True: 0, False: 0, None: 0}
    for first, second in itertools.combinations(SIZES, 2):
        said = product.same(first, second)
        compared[said] += 1
        assert said is None or torch.equal(bits[first], bits[second]) == said, (first, second)
    assert all(compared.values())


def test_groups(found):
    forward, dgrad = found.products
    assert [(str(band), band.group) for band in forward.bands] == [
        ("M=1", 0), ("M=2..5", 1), ("M=6..7", 2), ("M=8..9", 1), ("M=10..11", None), ("M=12", 3), ("M=13", 4),
        ("M=14", 2)]  # fmt: skip
    # 640 products: four parts are 3 tiles of 64 each, or 5 of 32
    assert [band.group for band in dgrad.bands] == [0, 1, 2, 3, 1, None, 4, 5, 3]
    assert (forward.results, forward.unknown, forward.invariant, found.invariant) == (5, 2, False, False)
    assert [(str(x), x.what) for x in forward.changes] == [
        ("M=2", "unit fp32_fma -> hopper.wgmma, parts 1 -> 4"), ("M=6", "parts 4 -> 1"), ("M=8", "parts 1 -> 4"),
        ("M=10..12", "parts 4 -> 3"), ("M=13", "partial none -> bf16"), ("M=14", "parts 3 -> 1, partial bf16 -> none"),
    ]  # fmt: skip


def test_sizes_that_were_not_asked_are_not_between_two_changes(target):
    product = batch_invariance([SHAPE], target, [9, 2, 6, 6], passes=["forward"]).products[0]
    assert [str(x) for x in product.changes] == ["M=3..6", "M=7..9"]
    assert product.same(2, 9) and not product.same(2, 6)
    refused("batch size 4 was not asked", product.same, 4, 9)


def test_what_is_not_known_is_not_said(target):
    def one(*sizes):
        return batch_invariance([SHAPE], target, sizes, passes=["forward"])

    assert one(2, 3, 8).invariant is True and one(2, 3, 10).invariant is None and one(2, 6, 10).invariant is False
    assert one(2, 10).products[0].same(2, 10) is None and one(10, 11).products[0].same(10, 11) is None
    assert str(one(2, 10)).splitlines() == [
        "layer     product  operands  results  changes  first change  not known",
        "----------------------------------------------------------------------",
        "640x1024  forward  bf16      1        0        not known     1 of 2",
        "1 products, 2 batch sizes from 2 to 10: 1 not known",
    ]


def test_a_planted_difference_is_seen(target):
    """Every field of a plan that changes bits parts two groups; where a plan comes from does not."""
    with without_doubts():
        spec = resolve(replace(linear(2, 640, 1024), target=target))
    call = linear(2, 640, 1024)
    assert same_bits(call, spec, replace(spec, plan=replace(spec.plan, source="elsewhere", verified=False)))
    for change in (
        {"split": 3}, {"promote_every": 128}, {"instruction_k": 8}, {"partial": "bf16"}, {"reduce": "pairwise"},
        {"owner": "interleaved"}, {"k_end": 1023}, {"lanes": 4}, {"bias_after_rounding": True},
    ):  # fmt: skip
        assert not same_bits(call, spec, replace(spec, plan=replace(spec.plan, **change))), change
    after = replace(spec, plan=replace(spec.plan, bias_after_rounding=True))
    assert same_bits(replace(call, bias=False), spec, after)
    columns = replace(spec, plan=replace(spec.plan, epilogue="row_column"))
    assert same_bits(call, spec, columns) and not same_bits(replace(call, scaling="row"), spec, columns)
    assert same_bits(call, spec, replace(spec, plan=GemmPlan(k_tile=256, split=4)))


def test_parts_added_in_place_to_float32_are_added_one_after_another():
    call = mm(64, 48, 1024)
    with without_doubts():
        spec = resolve(replace(call, target="h200"))
    plans = [
        GemmPlan(k_tile=64, split=4, reduce=how, partial=to) for how in ("serial", "in_place") for to in (None, "bf16")
    ]
    serial, rounded, in_place, in_bf16 = (replace(spec, plan=plan) for plan in plans)
    assert same_bits(call, serial, in_place) and not same_bits(replace(call, bias=True), serial, in_place)
    assert not same_bits(call, rounded, in_bf16) and not same_bits(call, in_place, in_bf16)


def test_models_by_name_as_modules_and_converted():
    layers = nn.ModuleList([nn.Linear(64, 32, bias=False) for _ in range(3)])
    model = nn.ModuleDict({"up": layers, "down": nn.Linear(32, 64), "norm": nn.LayerNorm(8)})
    names = [(x.layer, x.product) for x in batch_invariance(model, "h200", [2]).products]
    assert names == [("up.0-2", "forward"), ("up.0-2", "dgrad"), ("down", "forward"), ("down", "dgrad")]
    named = batch_invariance(["gpt2", (8, 8, True)], "h200", [2], passes=["dgrad"]).products
    shapes = "2304x768 + bias, 768x768 + bias, 3072x768 + bias, 768x3072 + bias, 50257x768, 8x8 + bias"
    assert ", ".join(x.layer for x in named) == shapes
    converted = fmtsim.convert(nn.Linear(256, 64).bfloat16(), format="e4m3", target="h200")
    found = batch_invariance(converted, sizes=range(1, 5))
    assert [(x.layer, x.product, x.operands) for x in found.products] == [
        ("(model)", "forward", "e4m3 slow"), ("(model)", "dgrad", "e4m3 slow")]  # fmt: skip
    assert found.invariant


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt3", "h200"), "unknown model 'gpt3'; did you mean 'gpt2'"),
        (("gpt2", "h300"), "unknown target 'h300'"),
        (("gpt2", None), "batch_invariance got target=None for 'gpt2'; pass target= ('h200')"),
        ((7, "h200"), "batch_invariance got model=7; pass a name"),
        (("gpt2", "h200", [0]), "batch_invariance got sizes=0; pass numbers of rows from 1 to"),
        (("gpt2", "h200", []), "batch_invariance got sizes=[]; pass numbers"),
        (([(8, 8, False)], "h200", [1], ["fp8_fast"]), "FP8 takes outputs and inputs that are multiples of 16"),
        (("gpt2", "h200", [1], ["fp4"]), "dtypes 'fp4' is not possible"),
        (("gpt2", "h200", [1], ["bf16"], ["wgrad"]), "whose sums run over the batch"),
        (("gpt2", "h200", [1], ["bf16"], ["fprop"]), "passes='fprop'; choose from forward, dgrad, wgrad"),
    ],
)
def test_what_is_refused(arguments, message):
    named = dict(zip(("model", "target", "sizes", "dtypes", "passes"), arguments, strict=False))
    refused(re.escape(message), batch_invariance, **named)


def test_a_converted_model_names_its_target():
    converted = fmtsim.convert(nn.Linear(256, 64).bfloat16(), format="e4m3", target="h200")
    refused("leave target out: a converted model names its machine", batch_invariance, converted, "h200")


def test_a_product_shows_its_orders(found):
    assert str(found.products[0]).splitlines()[:6] == [
        "640x1024 forward bf16",
        "sizes     result  basis     accumulation order",
        "-" * len(str(found.products[0]).splitlines()[2]),
        "M=1       0       recorded  one chain from +0, k in order",
        "M=2..5    1       recorded  16 tiles of 64 in 4 parts (runs of 4 tiles), each one chain from +0, k in order; "
        "parts are added one after another",
        "M=6..7    2       recorded  one chain from +0, k in order",
    ]
    assert "M=10..11  ?       guess" in str(found.products[0])
    assert found.products[0]._repr_html_().count("<tr>") == 9


def test_what_is_shown(found, tmp_path):
    assert "M=10..12" in str(batch_invariance([SHAPE], found.products[0].bands[0].call.target, [9, 10, 11, 12]))
    assert found._repr_html_().count("<tr>") == 3 and repr(found) == str(found)
    record = json.loads(json.dumps(found.to_dict()))
    assert record["products"][0]["bands"][1] == {
        "first": 2, "last": 5, "sizes": 4, "result": 1, "basis": "recorded", "unit": "hopper.wgmma", "parts": 4,
        "tile": 64, "source": "a test"}  # fmt: skip
    pytest.importorskip("matplotlib")
    figure = found.plot(tmp_path / "bands.png", title="a $ test")
    assert (tmp_path / "bands.png").read_bytes()[:4] == b"\x89PNG"
    panel = figure.axes[0]
    assert len(panel.collections) == sum(len(product.bands) for product in found.products)
    assert [text.get_text() for text in panel.get_yticklabels()] == ["640x1024 forward bf16", "640x1024 dgrad bf16"]
