"""A small trained GPT, quantised: logits, a quantised cache, and what the memory tables rest on."""

import copy

import pytest
import torch
import torch.nn.functional as F

import fmtsim
from fmtsim.errors import ArgumentError
from fmtsim.nn import quantised_attention
from fmtsim.ptq import QuantisedCache
from fmtsim.ptq.catalogue import quantised_cache
from fmtsim.ptq.memory import SCHEMES, bits_per_element, cache_gigabytes, devices, weight_gigabytes
from fmtsim.training.gpt import GPT, GPTConfig
from tests.support.operands import normal


def tokens(seed):
    """Return text of a little grammar: every byte is the one before plus its row's step."""
    source = torch.Generator().manual_seed(seed)
    first, step = (torch.randint(0, 32, (8, 1), generator=source) for _ in range(2))
    return (first + (step % 5) * torch.arange(17)) % 32


def batch(seed):
    t = tokens(seed)
    return t[:, :-1], t[:, 1:]


@pytest.fixture(scope="module")
def gpt():
    model = GPT(GPTConfig(context=16, width=32, layers=2, heads=2, vocabulary=32), seed=0)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(60):
        adam.zero_grad()
        model(*batch(i)).backward()
        adam.step()
    return model.requires_grad_(False)


def logits(model, seed):
    kept = []
    hook = model.norm.register_forward_hook(lambda module, args, output: kept.append(output))
    model(*batch(seed))
    hook.remove()
    return F.linear(kept[0], model.embedding.weight)


def divergence(exact, found):
    return float(
        F.kl_div(F.log_softmax(found, -1), F.log_softmax(exact, -1), reduction="none", log_target=True).sum(-1).mean()
    )


def test_logits_of_fp8_stay_close(gpt):
    exact, data, found = logits(gpt, 999), [batch(i) for i in (100, 101)], {}
    for name in ("nemotron", "nemotron_kv8", "int8_token", "minifloat_e3m2", "minifloat_e2m1"):
        found[name] = divergence(exact, logits(fmtsim.ptq(copy.deepcopy(gpt), name, data), 999))
    assert 0 < found["int8_token"] < found["nemotron"] < found["minifloat_e3m2"] < found["minifloat_e2m1"]
    assert found["nemotron"] < 0.02 and found["nemotron_kv8"] < 0.03 and found["nemotron_kv8"] != found["nemotron"]


def test_a_cache_is_what_attention_sees():
    q, k, v = (normal(2, 3, 9, 16, seed=i) for i in range(3))
    cache = QuantisedCache("e4m3_channel")
    cache.append(k, v)
    y = quantised_attention(q, k, v, is_causal=True, config=quantised_cache("e4m3"))
    kept = F.scaled_dot_product_attention(q, cache.keys(), cache.values(), is_causal=True)
    assert torch.allclose(y, kept, atol=1e-5)
    assert not torch.allclose(y, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-3)
    swapped = F.scaled_dot_product_attention(q, cache.keys(), cache.keys(), is_causal=True)  # a planted error
    assert not torch.allclose(y, swapped, atol=1e-3)


def test_memory_is_what_packed_tensors_take():
    x = normal(64, 256)
    for name in ("e4m3", "mxfp8_e4m3", "mxfp4", "int4_g32", "mxfp6_e2m3"):
        assert fmtsim.encode(x, name).nbytes == bits_per_element(name) * x.numel() / 8
    assert fmtsim.encode(x, "nvfp4").nbytes - 4 == bits_per_element("nvfp4") * x.numel() / 8  # and one scale of all
    assert fmtsim.encode(x, "int8_channel").nbytes == bits_per_element("int8_channel", 256) * x.numel() / 8
    cache = QuantisedCache("int8_channel")
    cache.append(*torch.zeros(2, 5, 3, 7, 64))
    size = cache_gigabytes("int8_channel", layers=1, heads=3, features=64, tokens=7, sequences=5)
    assert cache.nbytes == round(size * 1e9)
    assert weight_gigabytes(340e9, "bf16") == 680 and weight_gigabytes(340e9, "e4m3") == 340
    assert SCHEMES["mixed"].total == 16 and SCHEMES["fp8_lm"].total == 6 and devices(641, 80) == 9
    with pytest.raises(ArgumentError, match=r"logfmt8 has no scale a block to count"):
        bits_per_element("logfmt8")
