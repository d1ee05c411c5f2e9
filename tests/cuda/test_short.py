"""The short way to a cast has the bits of the long one, and steps aside where it must."""

import dataclasses
import math

import pytest
import torch

import fmtsim
from fmtsim import ops
from fmtsim.cuda.cast import casts
from fmtsim.cuda.cast.casts import quantize_contiguous
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.cuda import emulator

pytestmark = pytest.mark.skipif(
    emulator.COMPILER is None and not fmtsim.cuda.available(), reason="needs a C++ compiler or a GPU"
)


def spec_of(name, mode="nearest_even", overflow="saturate"):
    return CastSpec(format=fmtsim.get_format(name), rounding=Rounding(mode=mode), overflow=overflow)


def numbers(count, dtype, device):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 100
    x[::7] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")]).repeat(count)[: len(x[::7])]
    return x.to(dtype).to(device)


def both_ways(x, spec, random, out_dtype, monkeypatch):
    """Return the bits of the short and of the long way."""
    results = [torch.full(x.shape, 7, dtype=out_dtype, device=x.device) for _ in range(2)]
    assert quantize_contiguous(x, spec, results[0], random)
    with monkeypatch.context() as patch:
        patch.setattr(casts, "quantize_contiguous", lambda *arguments: False)
        casts.quantize(x, spec, random, results[1])
    return [result.view(torch.int16 if out_dtype.itemsize == 2 else torch.int32) for result in results]


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize(
    ("name", "overflow", "mode"),
    [
        ("e4m3", "saturate", "nearest_even"), ("int8", "saturate", "nearest_even"), ("e5m2", "ieee", "nearest_even"),
        ("e4m3", "saturate", "stochastic"),
    ],
)  # fmt: skip
def test_bits_are_those_of_the_long_way(dtypes, name, overflow, mode, device, monkeypatch):
    dtype, out_dtype = (getattr(torch, text) for text in dtypes)
    random = RandomKey(1, 2) if mode == "stochastic" else None
    for count in (1, 3, 64, 2049):
        x, spec = numbers(count, dtype, device), spec_of(name, mode, overflow)
        assert torch.equal(*both_ways(x, spec, random, out_dtype, monkeypatch))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize(
    ("name", "mode"), [("mxfp8_e4m3", "nearest_even"), ("nvfp4", "nearest_even"), ("mxfp4", "stochastic")]
)
def test_bits_of_blocks_are_those_of_the_long_way(dtypes, name, mode, device, monkeypatch):
    dtype, out_dtype = (getattr(torch, text) for text in dtypes)
    if name == "nvfp4":
        out_dtype = torch.float32
    random = RandomKey(1, 2) if mode == "stochastic" else None
    for shape in ((32,), (3, 64), (2, 5, 96)):
        x = numbers(math.prod(shape), dtype, device).view(shape)
        assert torch.equal(*both_ways(x, spec_of(name, mode), random, out_dtype, monkeypatch))


def test_a_cast_as_text_is_the_same_cast(device):
    x, spec = numbers(64, torch.float32, device), spec_of("e4m3")
    out, other = torch.empty_like(x), torch.empty_like(x)
    assert quantize_contiguous(x, spec, out) and quantize_contiguous(x, spec.to_json(), other)
    assert torch.equal(out.view(torch.int32), other.view(torch.int32))


def test_it_steps_aside(device):
    x = numbers(64, torch.float32, device)
    out = torch.empty_like(x)
    assert quantize_contiguous(x, spec_of("e4m3"), out)
    assert not quantize_contiguous(x[:0], spec_of("e4m3"), out[:0])
    assert not quantize_contiguous(x[1:], spec_of("e4m3"), out[1:])  # no vector begins there
    assert not quantize_contiguous(x[::2], spec_of("e4m3"), out[:32])
    assert not quantize_contiguous(x.double(), spec_of("e4m3"), out.double())
    assert not quantize_contiguous(x, spec_of("e4m3", "stochastic"), out)  # words of users, not of a key
    assert not quantize_contiguous(x, spec_of("fp16"), out.bfloat16())  # would be rounded twice
    for name in ("e4m3_tensor", "logfmt8", "nf4", "e4m3_128x128"):
        assert not quantize_contiguous(x, spec_of(name), out), name
    assert not quantize_contiguous(x[:16], spec_of("mxfp4"), out[:16])  # a block that is not whole
    assert not quantize_contiguous(x, dataclasses.replace(spec_of("mxfp4"), dim=-2), out)


def test_formats_that_forbid_nan_take_the_way_that_looks_for_it(device):
    fmt = dataclasses.replace(fmtsim.get_format("int8"), name="strict8", nan_policy="error")
    x = torch.randn(64, device=device)
    assert not quantize_contiguous(x, CastSpec(format=fmt, rounding=Rounding(), overflow="saturate"), x)


def test_the_engine_takes_it_but_for_given_random_words(device, monkeypatch):
    taken = []
    monkeypatch.setattr(casts, "quantize_contiguous", lambda *arguments: taken.append(arguments) or False)
    x = numbers(64, torch.float32, device)
    for mode, random in (
        ("nearest_even", None),
        ("stochastic", RandomKey(1, 2)),
        ("stochastic", x.to(torch.int64) * 0),
    ):
        casts.quantize(x, spec_of("e4m3", mode), random, torch.empty_like(x))
    assert len(taken) == 2


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_the_verb_takes_it(monkeypatch):
    x = numbers(64, torch.float32, "cuda")
    wanted = fmtsim.quantize(x.cpu(), "e4m3").view(torch.int32)
    monkeypatch.setattr(ops, "engine_for", None)  # the long way
    assert torch.equal(fmtsim.quantize(x, "e4m3").cpu().view(torch.int32), wanted)
    assert torch.equal(fmtsim.quantize(x, "e4m3", out=torch.empty_like(x)).cpu().view(torch.int32), wanted)
    gradient = x.clone().requires_grad_()
    fmtsim.quantize(gradient, "mxfp4").backward(torch.ones_like(x))
    assert torch.equal(gradient.grad, torch.ones_like(x))
