"""The short way to a cast has the bits of the long one, and steps aside where it must."""

import pytest
import torch

import fmtsim
from fmtsim.cuda import casts, short
from fmtsim.ops import CastSpec, RandomKey
from fmtsim.rounding.modes import Rounding
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


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize(("name", "overflow"), [("e4m3", "saturate"), ("int8", "saturate"), ("e5m2", "ieee")])
def test_bits_are_those_of_the_long_way(dtypes, name, overflow, device, monkeypatch):
    dtype, out_dtype = (getattr(torch, text) for text in dtypes)
    for count in (1, 3, 64, 2049):
        x, spec = numbers(count, dtype, device), spec_of(name, overflow=overflow)
        results = [torch.full((count,), 7, dtype=out_dtype, device=device) for _ in range(2)]
        assert short.quantize_short(x, spec, results[0])
        with monkeypatch.context() as patch:
            patch.setattr(casts, "quantize_short", lambda *arguments: False)
            casts.quantize(x, spec, None, results[1])
        words = torch.int16 if out_dtype.itemsize == 2 else torch.int32
        assert torch.equal(results[0].view(words), results[1].view(words))


def test_it_steps_aside(device):
    x = numbers(64, torch.float32, device)
    out = torch.empty_like(x)
    assert short.quantize_short(x, spec_of("e4m3"), out)
    assert not short.quantize_short(x[:0], spec_of("e4m3"), out[:0])
    assert not short.quantize_short(x[1:], spec_of("e4m3"), out[1:])  # no vector begins there
    assert not short.quantize_short(x[::2], spec_of("e4m3"), out[:32])
    assert not short.quantize_short(x.double(), spec_of("e4m3"), out.double())
    assert not short.quantize_short(x, spec_of("e4m3", "stochastic"), out)
    for name in ("mxfp8_e4m3", "logfmt8", "nf4"):
        assert not short.quantize_short(x, spec_of(name), out)


def test_the_engine_takes_it_without_random_words_alone(device, monkeypatch):
    taken = []
    monkeypatch.setattr(casts, "quantize_short", lambda *arguments: taken.append(arguments) or False)
    x = numbers(64, torch.float32, device)
    casts.quantize(x, spec_of("e4m3"), None, torch.empty_like(x))
    casts.quantize(x, spec_of("e4m3", "stochastic"), RandomKey(1, 2), torch.empty_like(x))
    assert len(taken) == 1
