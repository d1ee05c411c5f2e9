# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's architectures train under a recipe: eager, with activation checkpointing, and compiled."""

import dataclasses
import warnings

import pytest
import torch

import fmtsim
from fmtsim.nn import convert, report
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.raw_matmuls import ParameterProduct
from fmtsim.recipes import Rule, get_recipe
from fmtsim.support.errors import CoverageWarning
from tests.support.architectures import ARCHITECTURES, RECIPE, architecture
from tests.support.bits import all_same_bits

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),  # sums have the same order in compiled code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages, and of torch's own tracer
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS = 3  # a loss that falls, of weights that were updated twice
COMPILED = ("GPT-2", "ViT")
# Decoders, adapters, scans, and encoders with decoders, which take a compiler long; encoders as ViT; and experts, whose
# grouped products tests/nn/test_raw_matmuls.py compiles.
COMPILED_ALIKE = ("T5", "Llama", "Llama with LoRA", "Mamba", "Qwen3", "Gemma", "BERT", "CLIP", "Whisper", "Mixtral",
                  "Qwen3-MoE", "DeepSeek-V3")  # fmt: skip
# In eager mode: decoders as GPT-2 and "Llama with LoRA", encoders as ViT and CLIP, experts as Mixtral and GPT-OSS.
ALIKE = ("Llama", "Qwen3", "Gemma", "Phi-3", "OPT", "GPT-NeoX", "Falcon", "BERT", "ModernBERT", "Qwen3-MoE", "OLMoE")
BROKEN = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3")  # graphs break at grouped products
# What torch itself sums in another order when it compiles the unconverted model.
OTHER_ORDER = {"CLIP": ("logit_scale",), "Mamba": ("",)}


def converted(name, layers=2):
    model, batch = architecture(name, layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        return convert(model.train(), recipe=RECIPE), batch


def loss_of(out):
    return (out.logits if hasattr(out, "logits") else out.logits_per_image).float().square().mean()


def train(model, batch, call=None, steps=STEPS):
    """Return the loss of each step and the gradients of the first by name."""
    torch.manual_seed(1)  # of dropout
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    losses, gradients = [], {}
    for _ in range(steps):
        loss = loss_of((model if call is None else call)(**batch))
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.detach())
    return losses, gradients


def without_gradient(model):
    """Return the names of converted layers with a weight that learns and got no gradient."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, EmulatedModule):
            own = [module.weight] if isinstance(module, ParameterProduct) else module.parameters(recurse=False)
            found |= {name for p in own if p.requires_grad and (p.grad is None or not p.grad.any())}
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in ARCHITECTURES]
)
def test_architectures_train_and_checkpointing_changes_no_bit(name):
    model, batch = converted(name)
    losses, gradients = train(model, batch)
    assert all(bool(loss.isfinite()) for loss in losses) and losses[-1] < losses[0]
    assert not without_gradient(model)
    again, batch = converted(name)
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs = []
    for module in again.modules():
        module.register_forward_hook(lambda *_: runs.append(torch._C._current_graph_task_id() != -1))
    other, others = train(again, batch)
    assert any(runs) and not all(runs)  # layers were run again in backward passes
    assert all_same_bits([*losses, *gradients.values()], [*other, *others.values()]) and list(gradients) == list(others)


@pytest.mark.parametrize("name", [*COMPILED, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED_ALIKE)])
def test_compiled_architectures_have_the_losses_of_eager(name):
    torch._dynamo.reset()
    eager, batch = converted(name, layers=1)
    losses, gradients = train(eager, batch)
    model, batch = converted(name, layers=1)
    other, others = train(model, batch, torch.compile(model, backend="aot_eager", fullgraph=name not in BROKEN))
    assert all_same_bits(losses[:1], other[:1])
    assert list(gradients) == list(others)
    for key, grad in gradients.items():
        if key.startswith(OTHER_ORDER.get(name, ())):
            torch.testing.assert_close(grad, others[key], rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(grad, others[key]), key
    assert name in OTHER_ORDER or all_same_bits(losses, other)


@pytest.mark.parametrize(
    ("name", "recipe"), [("ViT", "te_nvfp4_all"), ("ViT", "quartet"), ("Mixtral", "te_nvfp4_all"), ("Mixtral", "mxfp4")]
)
def test_tokens_come_in_any_number(name, recipe):
    """Images of 17 tokens, and experts that get some: rotations over tokens are padded."""
    model, batch = architecture(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        convert(model, recipe=dataclasses.replace(get_recipe(recipe), rules=(Rule(head=True),)))
    losses, _ = train(model, {key: t[:1] for key, t in batch.items()}, steps=2)
    assert all(bool(loss.isfinite()) for loss in losses) and not without_gradient(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_inductor_trains_architectures(name):
    """Sums around the products run in an order of the compiler's own."""
    torch._dynamo.reset()
    eager, batch = converted(name, layers=1)
    model, _ = converted(name, layers=1)
    losses, _ = train(eager, batch)
    other, _ = train(model, batch, torch.compile(model))
    torch.testing.assert_close(losses, other, rtol=1e-3, atol=0)
    assert not without_gradient(model)


def test_deepseek_v3_as_its_recipe_says():
    """Latent attention and experts are converted, head and gating stay, and every multiply-add is counted."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    width, latent, head, tokens, active = 256, 128, 64, 128, 2
    sizes = {"hidden_size": width, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": latent, "kv_lora_rank": latent,
             "qk_rope_head_dim": head, "qk_nope_head_dim": head, "v_head_dim": head, "n_routed_experts": 4,
             "n_group": 2, "topk_group": 1, "num_experts_per_tok": active, "n_shared_experts": 1,
             "first_k_dense_replace": 1,
             "vocab_size": 64}  # fmt: skip
    torch.manual_seed(0)
    model = convert(DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)).bfloat16(), recipe="deepseek_v3")
    batch = {"input_ids": torch.randint(0, 64, (1, tokens))}
    left = {weight.layer for weight in report(model, batch).coverage.raw}
    assert left == {"lm_head", "model.layers.1.mlp.gate"}
    products = model.model.layers[1].mlp.experts.fmtsim_products
    assert {name: type(each) for name, each in products.items()} == dict.fromkeys(
        ("gate_up_proj", "down_proj"), ParameterProduct
    )

    queries = width * latent + latent * 2 * 2 * head  # down, and up to two heads of two parts
    keys = width * (latent + head) + latent * 2 * (head + head)
    attention = queries + keys + 2 * head * width
    experts = (active + 1) * 3 * width * 128
    found = report(model, batch).coverage
    assert found.simulated == tokens * (2 * attention + 3 * width * 512 + experts)
    assert found.total - found.simulated == tokens * (width * 64 + width * 4)

    fmtsim.revert(model)
    convert(model, recipe="deepseek_v3", target="recipe")
    layer = model.model.layers[1].mlp.shared_experts
    assert "a fresh chain every 128 products" in str(fmtsim.explain_mm(layer.up_proj, tokens).fprop)
    assert "e5m6" in str(report(model)) and report(model, batch).coverage.share == 1
    loss_of(model(**batch)).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
