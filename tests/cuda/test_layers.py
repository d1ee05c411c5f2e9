"""Operands of layers on a card: bfloat16 values and outer scales, on the host and on a GPU, compiled too."""

import pytest
import torch

from fmtsim import EmulatedGEMM, get_format, quantize
from fmtsim.gemm.layers.config import linear_config
from fmtsim.gemm.layers.operand import has_both, quantize_both, quantize_operand
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Quantizer
from tests.support.bits import assert_same_bits
from tests.support.operands import bfloat16s

SHAPE = (96, 64)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4", "e4m3"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_operands_are_those_of_quantize(name, rounding, on_card):
    x, fmt = bfloat16s(*SHAPE, device=on_card), get_format(name)
    quantizer = Quantizer(format=fmt, rounding=Rounding(mode=rounding))
    seed = 5 if rounding == "stochastic" else None
    keys = Keys() if seed is None else Keys(RandomKey(seed))
    for dim in (-1, 0):
        made = quantize_operand(x, quantizer, keys, dim=dim, folded=True)
        expected = quantize(x, fmt, rounding=rounding, dim=dim, generator=seed, out_dtype=torch.float32)
        assert made.elements.dtype == torch.bfloat16 and made.scale is None
        assert (made.tensor_scale is None) == (name != "nvfp4")
        assert_same_bits(made.values(torch.float32), expected if dim == -1 else expected.mT)
    assert has_both(x, quantizer) == (name != "e4m3")
    if name != "e4m3":
        for found, dim in zip(quantize_both(x, quantizer, *[keys.elements] * 2), (-1, 0), strict=True):
            assert_same_bits(found.elements, quantize_operand(x, quantizer, keys, dim=dim, folded=True).elements)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [None, "fp16", "e4m3"])
def test_what_bfloat16_does_not_hold_stays_wide(name, dtype, on_card):
    x = bfloat16s(*SHAPE, device=on_card).to(dtype)
    fmt = None if name is None else get_format(name)
    made = quantize_operand(x, Quantizer(format=fmt), folded=True)
    wide = dtype if name is None else torch.promote_types(dtype, torch.float32)
    assert made.elements.dtype == (torch.bfloat16 if name == "e4m3" and dtype != torch.float64 else wide)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's tracer takes no frozen record for a constant")
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3"])
@pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd
def test_compiled_layers_have_the_bits_of_eager_ones(name, rounding, on_card):
    config = linear_config(x=name, w=name, g=name, grad_rounding=rounding)
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((96, 64), (128, 64), (96, 128))))
    leaves = x.requires_grad_(), w.requires_grad_()

    def run(x, w):
        return EmulatedGEMM.apply(x, w, None, config, 7)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if on_card.type == "cuda" else "aot_eager")
    expected, found = ([y := f(*leaves), *torch.autograd.grad(y, leaves, g)] for f in (run, compiled))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
