"""Operands of layers on a card: bfloat16 values and outer scales, on the host and on a GPU, compiled too."""

import pytest
import torch

from fmtsim import EmulatedGEMM, get_format, quantize
from fmtsim.gemm.layers import bfloat16
from fmtsim.gemm.layers.config import linear_config
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.quantizer import Quantizer
from tests.support.bits import assert_same_bits
from tests.support.operands import bfloat16s

SHAPE = (96, 64)


@pytest.fixture
def on_card(device, monkeypatch):
    """Take the emulated device for a card."""
    if device.type == "cpu":
        monkeypatch.setattr(bfloat16, "on_card", lambda t: t.dtype != torch.float64)
        monkeypatch.setattr(bfloat16, "served", lambda t: True)
    return device


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4", "e4m3"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_operands_are_those_of_quantize(name, rounding, on_card):
    x, fmt = bfloat16s(*SHAPE, device=on_card), get_format(name)
    quantizer = Quantizer(format=fmt, rounding=Rounding(mode=rounding))
    assert bfloat16.holds(x, quantizer)
    for dim in (-1, 0):
        seed = 5 if rounding == "stochastic" else None
        held = bfloat16.hold(x, quantizer, dim, seed)
        expected = quantize(x, fmt, rounding=rounding, dim=dim, generator=seed, out_dtype=torch.float32)
        assert (held.scale is None) == (name != "nvfp4")
        assert_same_bits(held.quantised, expected)
    both = bfloat16.hold_both(x, quantizer, (5, 5) if rounding == "stochastic" else (None, None))
    if name == "e4m3":
        assert both is None
        return
    for found, dim in zip(both, (-1, 0), strict=True):
        assert_same_bits(found.values, bfloat16.hold(x, quantizer, dim, 5 if rounding == "stochastic" else None).values)


def test_what_bfloat16_does_not_hold(on_card):
    x = bfloat16s(*SHAPE, device=on_card)
    assert not bfloat16.holds(x.double(), Quantizer(format=get_format("e4m3")))
    assert not bfloat16.holds(x.float(), Quantizer())
    assert not bfloat16.holds(x, Quantizer(format=get_format("fp16")))


@pytest.fixture
def products(on_card, monkeypatch):
    """Give the CPU the products with float32 results that a card has."""
    if on_card.type == "cpu":
        mm = torch.mm
        monkeypatch.setattr(
            torch, "mm", lambda x, y, out_dtype=None: mm(x.float(), y.float()) if out_dtype else mm(x, y)
        )
    return on_card


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's tracer takes no frozen record for a constant")
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3"])
@pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd
def test_compiled_layers_have_the_bits_of_eager_ones(name, rounding, products):
    config = linear_config(x=name, w=name, g=name, grad_rounding=rounding)
    x, w, g = (bfloat16s(*size, seed=i, device=products) for i, size in enumerate(((96, 64), (128, 64), (96, 128))))
    leaves = x.requires_grad_(), w.requires_grad_()

    def run(x, w):
        return EmulatedGEMM.apply(x, w, None, config, 7)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if products.type == "cuda" else "aot_eager")
    expected, found = ([y := f(*leaves), *torch.autograd.grad(y, leaves, g)] for f in (run, compiled))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
