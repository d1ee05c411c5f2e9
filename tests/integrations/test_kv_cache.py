# SPDX-License-Identifier: Apache-2.0
"""KVCache: what generate() caches, in FP8, INT8, INT4 and NVFP4, beside transformers' own FP8 layer and formulas."""

import pytest
import torch

import fmtsim
from fmtsim.integrations.transformers import KVCache
from fmtsim.ptq import QuantisedCache
from fmtsim.ptq.cache import CACHES
from fmtsim.support.errors import ArgumentError
from tests.ptq.cache_oracle import oracle
from tests.support.operands import normal
from tests.support.refusals import refused

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
FORMATS = ("e4m3", "e4m3_channel", "int8_channel", "int4_channel", "nvfp4", "mxfp8", ("e4m3", "int4_channel"))


def model(**sizes):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, **{"sliding_window": None} | sizes,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def decoded(net, cache, ids):
    """Return the logits of a prompt of four tokens and then of single ones."""
    with torch.no_grad():
        parts = [ids[:, :4], *ids[:, 4:].split(1, 1)]
        return torch.cat([net(part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_every_token_is_rounded_once(formats):
    from transformers import DynamicCache

    net, ids = model(), torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    pair = (formats, formats) if isinstance(formats, str) else formats
    exact, cache = DynamicCache(), KVCache(*pair)
    plain, logits = decoded(net, exact, ids), decoded(net, cache, ids)
    first, rounded = exact.layers[0], cache.layers[0]  # what the first layer caches depends on no cache
    k, v = QuantisedCache(*pair).rounded(first.keys, first.values)
    assert torch.equal(rounded.keys, k) and torch.equal(rounded.values, v)
    assert not torch.equal(k, first.keys) and not torch.equal(v, first.values)
    assert not torch.equal(logits[:, 0], plain[:, 0])  # the prompt's attention reads rounded values, too


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_it(beams):
    net, ids = model(sliding_window=4), torch.tensor([[1, 2, 3, 4, 5, 6]])
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    wide = net.generate(ids, past_key_values=KVCache("fp32", config=net.config), **options)
    assert torch.equal(wide, net.generate(ids, **options))
    cache = KVCache("int4_channel", config=net.config)
    assert net.generate(ids, past_key_values=cache, **options).shape == wide.shape
    kept = [layer for layer in cache.layers if layer.keys.numel()]
    again = [QuantisedCache("int4_channel").rounded(layer.keys, layer.values)[0] for layer in kept]
    assert len(kept) == 2 and all(layer.keys.shape[-2] == 3 for layer in kept)  # the window less the token to come
    assert all(((a - layer.keys).abs() <= 1e-6 * a.abs()).all() for a, layer in zip(again, kept, strict=True))


def test_fp8_has_the_bits_of_transformers_own_layer():
    from transformers.cache_utils import Fp8QuantizedLayer

    layer, k, v = Fp8QuantizedLayer(), normal(2, 3, 17, 32, seed=1), normal(2, 3, 17, 32, seed=2)
    layer.lazy_initialization(k, v)
    scales = [float(layer._quantized_keys[1]), float(layer._quantized_values[1])]
    ours = QuantisedCache("e4m3", key_scale=scales[0], value_scale=scales[1]).rounded(k, v)
    assert torch.equal(ours[0], layer._dequantize(layer._quantized_keys))
    assert torch.equal(ours[1], layer._dequantize(layer._quantized_values))


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_formats_with_scales_follow_their_formulas(scale):
    x = normal(2, 3, 5, 32, seed=3)
    for name, top in (("int8_channel", 127.0), ("int4_channel", 7.0)):
        s = x.abs().amax(-1, keepdim=True) / top
        assert torch.equal(QuantisedCache(name).rounded(x, x)[0], (x / s).round() * s)
    blocks = (x / scale).unflatten(-1, (2, 16))
    s = fmtsim.quantize(blocks.abs().amax(-1, keepdim=True) * torch.tensor(1 / 6), "e4m3")
    codes = fmtsim.quantize(blocks * (1 / s), "e2m1", overflow="saturate")
    ours = QuantisedCache("nvfp4", key_scale=scale).rounded(x, x)
    assert torch.equal(ours[0], (codes * s).flatten(-2) * scale)
    assert (scale == 1) == torch.equal(ours[0], ours[1])


def test_scales_a_layer():
    cache = KVCache("e4m3", key_scale=[1.0, 0.5], value_scale=2.0)
    k = normal(1, 1, 4, 16, seed=1)
    for i, scale in enumerate((1.0, 0.5)):
        keys, values = cache.update(k, k, i)
        assert torch.equal(keys, fmtsim.quantize(k / scale, "e4m3") * scale)
        assert torch.equal(values, fmtsim.quantize(k / 2, "e4m3") * 2)
    refused("layer 2 has no scale among 2; pass one a layer", cache.update, k, k, 2)
    with pytest.raises(ArgumentError, match="2 scales of keys and 3 of values; pass one each a layer"):
        KVCache("e4m3", key_scale=[1.0, 1.0], value_scale=[1.0] * 3)
    for fmt, scale in (("int8_channel", 2.0), ("e4m3", 0.0), ("nvfp4", float("inf"))):
        refused("a scale of .* for .*; pass a number above 0, or one a head, and none", KVCache, fmt, key_scale=scale)


@pytest.mark.parametrize("name", CACHES)
def test_generate_with_a_named_cache_is_that_of_rounded_keys_and_values(name):
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    class Rounded(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            return super().update(oracle(name, 0, keys), oracle(name, 1, values), *args, **kwargs)

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **sizes)  # grouped queries
    net, ids = LlamaForCausalLM(config).eval(), torch.randint(1, 64, (2, 9))
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ours, expected, plain = (
        net.generate(ids, past_key_values=cache, **options) for cache in (KVCache(name), Rounded(), DynamicCache())
    )
    assert torch.equal(ours.sequences, expected.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(expected.logits))
    off = torch.stack(ours.logits)[0] - torch.stack(plain.logits)[0]
    assert 0 < off.norm() / torch.stack(plain.logits)[0].norm() < 0.5  # the prompt's logits, before tokens may differ


def test_scales_a_layer_and_head_and_layers_that_are_skipped():
    k, scales = normal(1, 2, 4, 16, seed=6), torch.tensor([[1.0, 0.5], [2.0, 0.25], [1.0, 1.0]])
    cache = KVCache("e4m3", key_scale=scales, value_scale=[[1.0, 0.5]], skip_layers=(2,))
    for layer in range(2):
        keys, values = cache.update(k, k, layer)
        s = scales[layer, :, None, None]
        assert torch.equal(keys, fmtsim.quantize(k / s, "e4m3") * s)
        assert torch.equal(values, fmtsim.quantize(k / scales[0, :, None, None], "e4m3") * scales[0, :, None, None])
    assert torch.equal(cache.update(k, k, 2)[0], k)
    refused("2 scales for 4 heads of keys", cache.update, k.repeat(1, 2, 1, 1), k, 0)
