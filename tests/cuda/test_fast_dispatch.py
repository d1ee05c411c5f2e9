# SPDX-License-Identifier: Apache-2.0
"""Fast dispatch of casts gives the bits of the other kernels, and steps aside where it must."""

import dataclasses
import itertools

import pytest
import torch

import fmtsim
from fmtsim.casts import ops
from fmtsim.cuda.cast import casts
from fmtsim.cuda.cast.casts import quantize_contiguous
from fmtsim.spec.cast import RandomKey
from tests.cuda import emulator
from tests.support.bits import assert_same_bits
from tests.support.casts import cast_spec
from tests.support.operands import wide_with_specials

pytestmark = pytest.mark.skipif(
    emulator.COMPILER is None and not fmtsim.cuda.available(), reason="needs a C++ compiler or a GPU"
)
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
ELEMENTS = [cast_spec("e4m3"), cast_spec("int8"), cast_spec("e5m2", overflow="ieee"), cast_spec("e4m3", "stochastic")]
BLOCKS = [cast_spec("mxfp8_e4m3"), cast_spec("nvfp4"), cast_spec("mxfp4", "stochastic")]
ELEMENT_DTYPES = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT16)]
BLOCK_DTYPES = [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)]


@pytest.mark.parametrize(
    ("spec", "dtypes", "shapes"),
    [
        *((*case, ((1,), (3,), (64,), (2049,))) for case in itertools.product(ELEMENTS, ELEMENT_DTYPES)),
        *((*case, ((32,), (3, 64), (2, 5, 96))) for case in itertools.product(BLOCKS, BLOCK_DTYPES)),
    ],
)
def test_bits_are_those_without_it(spec, dtypes, shapes, device, monkeypatch):
    dtype, out_dtype = dtypes if spec.format.name != "nvfp4" else (dtypes[0], FLOAT32)
    random = RandomKey(1, 2) if spec.rounding.mode == "stochastic" else None
    for shape in shapes:
        x = (wide_with_specials(*shape, seed=sum(shape), dtype=dtype) * 100).to(device)
        x.view(-1)[:5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])[: x.numel()]
        found, expected = (torch.full(shape, 7, dtype=out_dtype, device=device) for _ in range(2))
        assert quantize_contiguous(x, spec, found, random)
        with monkeypatch.context() as patch:
            patch.setattr(casts, "quantize_contiguous", lambda *arguments: False)
            casts.quantize(x, spec, random, expected)
        assert_same_bits(found, expected, x, what=f"{spec} {shape}")


def test_an_equal_cast_is_the_same_cast(device):
    x, spec = torch.randn(64, device=device), cast_spec("e4m3")
    out, other = torch.empty_like(x), torch.empty_like(x)
    assert quantize_contiguous(x, spec, out) and quantize_contiguous(x, dataclasses.replace(spec), other)
    assert_same_bits(out, other)


def test_it_steps_aside(device):
    x, e4m3 = torch.randn(64, device=device), cast_spec("e4m3")
    out = torch.empty_like(x)
    assert quantize_contiguous(x, e4m3, out)
    assert not quantize_contiguous(x[:0], e4m3, out[:0])
    assert not quantize_contiguous(x[1:], e4m3, out[1:])  # no vector begins there
    assert not quantize_contiguous(x[::2], e4m3, out[:32])
    assert not quantize_contiguous(x.double(), e4m3, out.double())
    assert not quantize_contiguous(x, cast_spec("e4m3", "stochastic"), out)  # words of users, not of a key
    assert not quantize_contiguous(x, cast_spec("fp16", overflow="saturate"), out.bfloat16())  # would be rounded twice
    for name in ("e4m3_tensor", "logfmt8", "nf4", "e4m3_128x128"):
        assert not quantize_contiguous(x, cast_spec(name, overflow="saturate"), out), name
    assert not quantize_contiguous(x[:16], cast_spec("mxfp4"), out[:16])  # a block that is not whole
    assert not quantize_contiguous(x, cast_spec("mxfp4", dim=-2), out)
    strict = dataclasses.replace(fmtsim.get_format("int8"), name="strict8", nan_policy="error")
    assert not quantize_contiguous(x, cast_spec(strict), x)  # NaN has to be looked for


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_the_verb_takes_it(monkeypatch):
    x = wide_with_specials(192, seed=1).cuda()
    expected = fmtsim.quantize(x.cpu(), "e4m3")
    monkeypatch.setattr(ops, "engine_for", None)  # the other kernels
    assert_same_bits(fmtsim.quantize(x, "e4m3"), expected)
    assert_same_bits(fmtsim.quantize(x, "e4m3", out=torch.empty_like(x)), expected)
    gradient = x.clone().requires_grad_()
    fmtsim.quantize(gradient, "mxfp4").backward(torch.ones_like(x))
    assert torch.equal(gradient.grad, torch.ones_like(x))
