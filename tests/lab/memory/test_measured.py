# SPDX-License-Identifier: Apache-2.0
"""Estimates against what torch, transformers and fmtsim really keep."""

import json
import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import fmtsim
from benchmarks import step_memory
from benchmarks.activation_memory import bytes_kept
from fmtsim import lab
from fmtsim.lab.memory import ModelSize, StoredFormats, bits_per_element, model_size
from fmtsim.lab.memory.states import weights_of
from fmtsim.lab.training.decoders import GPT, Block, GPTConfig, LlamaBlock
from fmtsim.ptq import QuantisedCache
from tests.support.operands import normal

WIDTH, HEADS, TOKENS, BATCH = 64, 4, 48, 8


def size(gated=False, blocks=1, vocabulary=1, **more):
    inner = 2 * WIDTH if gated else 4 * WIDTH
    return ModelSize(name="small", blocks=blocks, hidden=WIDTH, intermediate=inner, heads=HEADS, kv_heads=HEADS,
                     head_dim=WIDTH // HEADS, vocabulary=vocabulary, gated=gated, **more)  # fmt: skip


def estimate(recipe=None, **more):
    return lab.training_memory(size(), recipe, tokens=TOKENS, **more)["activations"]


def measured(recipe=None, dtype=torch.bfloat16, wrap=lambda block: block):
    """Return the bytes that autograd keeps of a block, codes counted as codes."""
    torch.manual_seed(0)
    block = Block(WIDTH, HEADS).to(dtype)
    if recipe is not None:
        fmtsim.convert(block, recipe=recipe)
    return bytes_kept(wrap(block), normal(1, TOKENS, WIDTH).to(dtype).requires_grad_())[1]


def statistics(norms, bytes_each):
    """Return the bytes of means and roots of norms, and of attention's sums, which no estimate counts."""
    return TOKENS * (2 * norms * bytes_each + 4 * HEADS)


def test_a_plain_block_keeps_what_is_estimated():
    assert measured() == estimate() + statistics(2, 2)
    assert measured(dtype=torch.float32) == estimate(formats=StoredFormats(activations="fp32")) + statistics(2, 4)


def test_codes_of_a_recipe():
    assert measured("te_current") == estimate("te_current") + statistics(2, 2)
    assert measured("te_current") < measured()


def test_coat_keeps_what_is_estimated():
    assert measured("coat") == estimate("coat") + statistics(0, 2)


def test_checkpointing():
    class Again(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=True)

    assert measured(wrap=Again) == estimate(checkpointing="full") == 2 * TOKENS * WIDTH


def test_a_gated_block():
    """Under a recipe that keeps inputs of norms itself: the CPU's own RMSNorm is several operations in float32."""
    block = LlamaBlock(GPTConfig(context=TOKENS, width=WIDTH, heads=HEADS))
    inner = block.mlp.up_proj.out_features
    found = lab.training_memory(
        ModelSize(name="llama", blocks=1, hidden=WIDTH, intermediate=inner, heads=HEADS, kv_heads=HEADS,
                  head_dim=WIDTH // HEADS, vocabulary=1), "coat", tokens=TOKENS,
    )["activations"]  # fmt: skip
    fmtsim.convert(block.bfloat16(), recipe="coat")
    kept = bytes_kept(block, normal(1, TOKENS, WIDTH).bfloat16().requires_grad_())[1]
    assert kept == found + statistics(0, 2)


def allocated(loss):
    """Return the bytes that a forward pass leaves, and the most that are there in the backward pass behind it."""
    loss().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        value = loss()
        with record_function("behind"):
            value.backward()
    events = seen.profiler.kineto_results.events()
    (behind,) = (event.start_ns() for event in events if event.name() == "behind")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    forward, backward = ([n for at, n in changes if (at > behind) == later] for later in (False, True))
    return sum(forward), max(accumulate(backward, initial=sum(forward)))


def own_loss(vocabulary):
    """Return a step of a GPT in bfloat16, its loss too."""
    model = GPT(GPTConfig(context=TOKENS, width=WIDTH, heads=HEADS, vocabulary=vocabulary), 0).bfloat16()
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return lambda: model(tokens, tokens)


def transformers_loss(vocabulary):
    """Return a step of a Llama of transformers in bfloat16, whose loss is in float32."""
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | {"vocab_size": vocabulary, "intermediate_size": WIDTH}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return lambda: model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize(("loss", "format"), [(own_loss, "bf16"), (transformers_loss, "fp32")])
def test_what_the_loss_keeps_and_what_its_gradients_take(loss, format):
    """Two vocabularies differ by what depends on them alone; both are large, so that the loss has the peak."""
    vocabularies = (4096, 8192)
    (behind, peak), (more, higher) = (allocated(loss(vocabulary)) for vocabulary in vocabularies)
    one, two = (
        lab.training_memory(size(vocabulary=vocabulary), batch=BATCH, tokens=TOKENS, formats=StoredFormats(loss=format))
        for vocabulary in vocabularies
    )
    assert more - behind == two["head and loss"] - one["head and loss"]
    gradients = two["gradients of the logits"] - one["gradients of the logits"]
    assert higher - peak == more - behind + gradients


def test_estimates_in_the_documentation_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.setattr(step_memory, "measured", lambda *_: (0, 0, 0))
    rows = {(size, again): cells for size, again, *cells in step_memory.rows(32000)}
    page = (Path(__file__).parents[3] / "docs/howto/memory.md").read_text()
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"[|] [0-9]+ x ", line)]
    assert len(table) == 5
    for size, again, *cells in table:
        assert [cell.split()[1] for cell in cells] == [cell.split()[1] for cell in rows[size, again]]


def test_weights_gradients_and_states_of_a_real_model():
    model = GPT(GPTConfig(context=32, width=WIDTH, layers=2, heads=HEADS, vocabulary=256), 0)
    found = lab.training_memory(
        size(blocks=2, vocabulary=256, positions=32, tied=True, biases=("qkv", "out", "mlp", "norm")),
        optimizer="bnb8", formats=StoredFormats(weights="fp32"),
    )  # fmt: skip
    optimizer = fmtsim.optim.AdamW(model.parameters(), state="bnb8")
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    kept = fmtsim.optim.memory(optimizer).measured
    assert (found["weights"], found["gradients"]) == (kept["parameters"], kept["gradients"])
    # A packed projection has fewer and longer vectors than three: the real one's bias is one of 192.
    assert (found["first moment"], found["second moment"]) == (kept["first"], kept["second"])


def test_packed_tensors_take_what_is_estimated():
    x = normal(64, 256)
    for name in ("e4m3", "mxfp8_e4m3", "mxfp4", "int4_g32", "mxfp6_e2m3"):
        assert fmtsim.encode(x, name).nbytes == bits_per_element(name) * x.numel() / 8
    assert fmtsim.encode(x, "nvfp4").nbytes - 4 == bits_per_element("nvfp4") * x.numel() / 8  # and one scale of all
    assert fmtsim.encode(x, "int8_channel").nbytes == bits_per_element("int8_channel", 256) * x.numel() / 8
    cache = QuantisedCache("int8_channel")
    cache.append(*torch.zeros(2, 5, HEADS, 7, WIDTH // HEADS))
    assert cache.nbytes == lab.serving_memory(size(), kv_format="int8_channel", context=7, requests=5)["KV cache"]


GROUPED = {"num_key_value_heads": 2}
CONFIGS = {
    "LlamaConfig": GROUPED, "MistralConfig": GROUPED, "Qwen2Config": GROUPED | {"tie_word_embeddings": True},
    "GemmaConfig": GROUPED | {"head_dim": 16}, "Phi3Config": GROUPED, "Starcoder2Config": GROUPED,
    "MixtralConfig": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "GPT2Config": {}, "BloomConfig": {},
    "GPTNeoXConfig": {}, "GPTJConfig": {}, "OPTConfig": {"word_embed_proj_dim": 64}, "FalconConfig": {},
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global"], 2]]},
}  # fmt: skip
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "pad_token_id": 0}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_hugging_face(name, tmp_path):
    """A model of transformers has as many parameters as its config.json says, and so has the file's dict."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**SIZES | CONFIGS[name])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters())
    found = model_size(tmp_path / "config.json")
    extra = {"BloomConfig": 2 * 64}.get(name, 0)  # the norm of the embedding
    # Blocks with parallel branches have one norm less than is counted.
    less = {"FalconConfig": 2 * 2 * 64, "GPTJConfig": 2 * 2 * 64}.get(name, 0)
    assert sum(weight.elements for weight in weights_of(found)) == expected - extra + less
    assert found == model_size(json.loads((tmp_path / "config.json").read_text()))
    assert found.blocks == 2 and model_size(config).attention == found.attention
