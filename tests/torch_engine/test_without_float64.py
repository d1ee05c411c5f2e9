# SPDX-License-Identifier: Apache-2.0
"""A device without float64 and without kernels computes the same bits: casts, blocks, products, layers, optimizers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fmtsim
from fmtsim import RandomKey, list_units, torch_engine
from fmtsim.gemm.layers.product import multiply
from fmtsim.spec.datapath import sum_dtype
from fmtsim.spec.operand import Operand
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import addend, gemm_spec, operand, unit_scales
from tests.support.operands import wide_with_specials
from tests.support.without_float64 import Float64Used, WithoutFloat64, without_kernels

pytestmark = pytest.mark.usefixtures("one_thread")
ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "e8m0", "fp16", "bf16", "tf32", "int8")
BLOCKS = (
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
    "int8_channel",
    "uint8_channel_zp",
    "e4m3_tensor",
    pytest.param("logfmt8", marks=pytest.mark.slow),
)
OTHERS = ("int4", "e4m3fnuz", "nf4", "lns8_g8")
UNITS = [
    pytest.param(
        mode,
        id=f"{name}-{(mode.inputs or ('any',))[0]}-{mode.accumulate}-{mode.scale}",
        marks=() if name.startswith(("hopper", "blackwell.tcgen05", "cdna2.mfma.bf16")) else pytest.mark.slow,
    )
    for name in list_units()
    for mode in fmtsim.get_unit(name).modes
    if "fp64" not in (mode.accumulate, *(mode.inputs or ()))
]


@pytest.fixture
def check(monkeypatch) -> Callable[[Callable[[], Any]], None]:
    """Compare what a function returns here with what it returns on the stand-in."""

    def run(function: Callable[[], Any]) -> None:
        expected = tree_leaves(function())
        without_kernels(monkeypatch)
        with WithoutFloat64():
            found = tree_leaves(function())
        monkeypatch.undo()
        assert len(found) == len(expected) > 0
        for got, right in zip(found, expected, strict=True):
            assert_same_bits(got, right)

    return run


@pytest.mark.parametrize("name", (*ELEMENTS, *BLOCKS, *OTHERS))
def test_casts(name, check):
    x = wide_with_specials(3, 128, seed=5)
    words = torch.randint(1 << 32, x.shape, generator=torch.Generator().manual_seed(1))

    def results():
        found = []
        drawn = ({"generator": RandomKey(3, 4)}, {"random_words": words})
        for t, *options in ((x, {}, *({"rounding": "stochastic", **how} for how in drawn)), (x.to(torch.bfloat16), {})):
            for how in options:
                encoded = fmtsim.encode(t, name, **how)
                found += [fmtsim.quantize(t, name, **how), encoded.codes, encoded.decode()]
        found.append(encoded.decode(out_dtype=torch.bfloat16))
        return found

    check(results)


@pytest.mark.parametrize("mode", UNITS)
def test_products_of_units(mode):
    a, b = (mode.inputs or ("bf16",))[0], (mode.inputs or ("fp16",))[-1]
    spec, k = gemm_spec(mode.datapath, a, b), (mode.datapath.block or 16) + 3
    x, y = operand(a, 8, k, "special", 1), operand(b, 9, k, "normal", 2)
    scales = [unit_scales(spec, rows, k, "normal", 3) for rows in (8, 9)]
    c = addend(spec, 8, 9, "normal", 4)
    expected, found = (torch.empty(8, 9, dtype=sum_dtype(spec.datapath)) for _ in "ab")
    torch_engine.gemm(x, y, c, *scales, spec, RandomKey(1, 2), expected)
    with WithoutFloat64():
        torch_engine.gemm(x, y, c, *scales, spec, RandomKey(1, 2), found)
    assert_same_bits(found, expected)


def test_products_of_a_target(check):
    generator = torch.Generator().manual_seed(2)
    a, b, bias = (torch.randn(*shape, generator=generator) for shape in ((16, 48), (32, 48), (32,)))
    narrow = [fmtsim.quantize(t, "e4m3").to(torch.float8_e4m3fn) for t in (a, b)]
    whole = [fmtsim.quantize(t * 40, "int8").to(torch.int8) for t in (torch.cat([a, a]), b)]
    scale = torch.tensor(0.37)

    def results():
        halves = [t.to(torch.bfloat16) for t in (a, b, bias)]
        found = [fmtsim.mm(halves[0], halves[1].t(), target="h200"), fmtsim.linear(*halves, target="h200")]
        found += [
            fmtsim.mm(a.half(), b.half().t(), target="h200"),
            fmtsim.int_mm(whole[0], whole[1].t(), target="h200"),
        ]
        for dtype, fast in ((torch.bfloat16, False), (torch.float32, True), (torch.float8_e4m3fn, False)):
            options = {"out_dtype": dtype, "use_fast_accum": fast, "target": "h200"}
            found.append(fmtsim.scaled_mm(narrow[0], narrow[1].t(), scale, scale, **options))
        return found

    check(results)


@pytest.mark.parametrize(
    "recipe", ["te_current", "ao_rowwise", "deepseek_v3", "te_nvfp4_all", "switchback", "quartet", "bitnet"]
)
def test_layers(recipe, check):
    """Scales of every kind, Hadamard transforms, random words, and integers that are multiplied without a unit."""

    def results():
        torch.manual_seed(0)
        layer = fmtsim.convert(torch.nn.Sequential(torch.nn.Linear(128, 128)), recipe=recipe)
        x = torch.randn(128, 128, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    check(results)


@pytest.mark.parametrize("name", ["int8", "uint8", "int24_half"])
def test_integers_are_multiplied_without_a_unit(name, check):
    """Digits of 8 bits: all that a format has, and sums beyond float32."""
    quantizer = fmtsim.Quantizer(format=fmtsim.get_format(name))
    a, b = (torch.rand(rows, 1500, generator=torch.Generator().manual_seed(rows)) for rows in (5, 6))

    def results():
        top = float(quantizer.format.max)
        operands = [Operand(fmtsim.quantize(x * top, name), quantizer) for x in (a, b)]
        return [multiply(*operands, None, dtype) for dtype in (torch.float32, torch.bfloat16)]

    check(results)


@pytest.mark.parametrize("state", ["bnb8", pytest.param("coat", marks=pytest.mark.slow)])
def test_optimizers(state, check):
    def results():
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(16, 256, generator=generator))
        optimizer = fmtsim.optim.AdamW([p], state=state)
        for _ in range(2):
            p.grad = torch.randn(16, 256, generator=generator)
            optimizer.step()
        return [p.detach(), *(t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, torch.Tensor))]

    check(results)


def test_the_comparison_sees_other_bits_and_float64(check):
    calls = []

    def other():
        calls.append(None)
        return [torch.full((2,), float(len(calls)))]

    with pytest.raises(AssertionError, match="2 of 2 differ"):
        check(other)
    with pytest.raises(Float64Used, match="takes float64"):
        check(lambda: [torch.ones(2).to(torch.float64).float()])
