# SPDX-License-Identifier: Apache-2.0
"""What recipes exchange beside linear layers: attention and gated layers, on whole models, there and back."""

import dataclasses
import io

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.nn import convert, convert_attention, convert_swiglu, flash_attention_3, report, revert, set_step
from fmtsim.recipes import Recipe, Replacement, get_recipe
from fmtsim.recipes.serialization import load_recipe, recipe_to_dict, save_recipe
from fmtsim.support.errors import ArgumentError
from tests.support.models import GatedMLP, gated, gpt, hugging_face, snapshot
from tests.support.operands import normal
from tests.support.refusals import refused

FA3 = Recipe(name="fa", attention=flash_attention_3(target=None))
BOTH = dataclasses.replace(get_recipe("te_current"), name="both", attention=FA3.attention)
SMOOTH = Recipe(name="smooth", replace=(Replacement(kind="swiglu", by="SmoothSwiGLU"),))
TOKENS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def loss(model):
    return model(TOKENS[:, :-1], TOKENS[:, 1:])


@pytest.mark.parametrize("recipe", [FA3, BOTH], ids=["attention", "both"])
def test_attention_of_a_recipe_and_back(recipe):
    model = gpt()
    model.blocks[0].attention.register_forward_hook(lambda *_: None)
    model.blocks[1].attention.requires_grad_(False)
    before, plain = snapshot(model), loss(model)
    convert(model, recipe=recipe, generator=1)
    changed = loss(model)
    changed.backward()
    assert changed.item() != plain.item() and changed.item() == pytest.approx(plain.item(), abs=0.05)
    linear = loss(convert(gpt(), recipe=dataclasses.replace(recipe, attention=None))) if recipe.linear else plain
    assert changed.item() != linear.item()  # it is the attention that differs
    set_step(model, 3)
    assert fmtsim.state(model) == {"recipe": recipe.name, "layers": {}}
    model.zero_grad()
    assert revert(model) is model
    assert snapshot(model) == before and torch.equal(loss(model), plain)


def test_the_attention_is_quantised_attention():
    """A recipe's attention has the bits of convert_attention, and filter_fn chooses."""
    one, two = convert(gpt(), recipe=FA3, generator=3), convert_attention(gpt(), FA3.attention, generator=3)
    assert torch.equal(loss(one), loss(two))
    first = convert(gpt(), recipe=FA3, generator=3, filter_fn=lambda m, name: "blocks.1" not in name)
    second = convert_attention(gpt(), FA3.attention, generator=3, filter_fn=lambda m, n: n == "blocks.0.attention")
    assert torch.equal(loss(first), loss(second)) and not torch.equal(loss(first), loss(one))


def test_report_shows_attention_and_replacements():
    model = convert(gpt(), recipe=BOTH, filter_fn=lambda m, name: "blocks.1" not in name)
    rows = {row.name: row for row in report(model).rows}
    assert rows["blocks.0.attention"].converted and rows["blocks.0.attention"].type == "Attention"
    assert rows["blocks.0.attention"].detail == f"attention: {FA3.attention}"
    assert not rows["blocks.1.attention"].converted and rows["blocks.1.attention"].detail == "filter_fn leaves it out"
    assert rows["blocks.0.attention.qkv"].converted and "attention" not in rows["blocks.0.attention.qkv"].detail
    revert(model)
    assert "blocks.0.attention" not in {row.name for row in report(model).rows}
    rows = {row.name: row for row in report(convert(gated(), recipe="intel_2t")).rows}
    assert rows["0"].detail == "Smooth-SwiGLU, a scale a token" and rows["0"].type == "GatedMLP"
    assert report(convert(gpt(), recipe="amp_fp16")).summary.endswith(
        "; left to the training loop: torch.autocast in float16 and scaling of the loss (times 65536, x2 after 2000 "
        "clean steps, x0.5 after an overflow)"
    )
    line = report(convert(gpt(), recipe="intel_2t")).summary
    assert line.endswith(
        "; replace[0] of recipe 'intel_2t' (swiglu becomes SmoothSwiGLU, a scale a token, where there is one) found "
        "none in this model; left to the training loop: optimizer states (fmtsim.optim.AdamW(state='intel_2t'))"
    )


def test_gated_layers_of_a_recipe_are_smooth_before_their_products_are_rounded():
    x, smooth = normal(16, 32, seed=1), convert(gated(), recipe=SMOOTH)
    assert ["forward" in vars(m) for m in smooth] == [True, False, True] and isinstance(smooth[0], GatedMLP)
    torch.testing.assert_close(smooth(x), gated()(x), rtol=1e-5, atol=1e-6)
    apart = dataclasses.replace(get_recipe("intel_2t"), replace=())
    for model, other in (
        (smooth, convert_swiglu(gated())),
        (convert(gated(), recipe="intel_2t", generator=0), convert(convert_swiglu(gated()), apart, generator=0)),
    ):
        assert torch.equal(model(x), other(x))


def test_what_was_converted_alone_stays_after_revert():
    model = convert(convert_attention(gpt(), FA3.attention), recipe="te_current")
    revert(model)
    assert fmtsim.nn.revert_attention(model) is model
    gates = revert(convert(convert_swiglu(gated()), recipe="intel_2t"))
    assert "forward" in vars(gates[0]) and "forward" not in vars(fmtsim.nn.revert_swiglu(gates)[0])


def test_a_class_that_changed_after_convert_stays():
    """Such as FSDP2's, which is put around the layer's own."""
    plain, model, x = gated(), convert(gated(), recipe="intel_2t"), normal(16, 32, seed=1)
    model[2].__class__ = type("Mine", (type(model[2]),), {})
    assert torch.equal(model(x), convert(gated(), recipe="intel_2t")(x))
    assert type(revert(model)[2]).__name__ == "Mine" and torch.equal(model(x), plain(x))


def test_a_file_says_all_of_it(tmp_path):
    recipe = dataclasses.replace(BOTH, replace=(Replacement(kind="swiglu", by="SmoothSwiGLU", per="channel"),))
    save_recipe(recipe, tmp_path / "mine.json")
    assert load_recipe(tmp_path / "mine.json") == recipe
    assert recipe_to_dict(recipe)["replace"] == [{"kind": "swiglu", "by": "SmoothSwiGLU", "per": "channel"}]
    assert "modules: swiglu becomes SmoothSwiGLU, a scale a channel" in str(recipe)


def test_multihead_attention_inside_torchs_encoder():
    """The in- and out-projections are emulated, the scores quantised, and no fused kernel is taken."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = normal(2, 16, 64)
    before = snapshot(model)
    with torch.no_grad():
        plain = model(x)
        outs = []
        for recipe in (FA3, BOTH, dataclasses.replace(BOTH, attention=None)):
            outs.append(convert(model, recipe=recipe, generator=0)(x))
            revert(model)
        assert snapshot(model) == before and torch.equal(model(x), plain)
    assert len({out[0, 0, 0].item() for out in (plain, *outs)}) == 4
    for out in outs:
        torch.testing.assert_close(out, plain, atol=0.3, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_hugging_face(kind):
    model = hugging_face(kind)
    before, plain = snapshot(model), model(TOKENS)[0]
    convert(model, recipe=dataclasses.replace(BOTH, replace=get_recipe("intel_2t").replace), generator=0)
    names = [row.name for row in report(model).converted if row.detail.startswith("attention")]
    assert len(names) == 2 and all("att" in name for name in names)
    assert sum(row.detail.startswith("Smooth") for row in report(model).rows) == (2 if kind == "llama" else 0)
    out = model(TOKENS, labels=TOKENS)
    out.loss.backward()
    linear = model.get_submodule(names[0])
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in linear.parameters())
    assert not torch.equal(out.logits, plain)
    torch.testing.assert_close(out.logits, plain, atol=0.2, rtol=0)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    hugging_face(kind).load_state_dict(torch.load(file), strict=True)
    model.zero_grad()
    assert snapshot(revert(model)) == before and torch.equal(model(TOKENS)[0], plain)


class Mixer(nn.Module):
    """Named like nothing; its forward names the function."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class OwnAttention(nn.Module):
    """Named like attention, and multiplies by itself."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        return torch.softmax(self.proj(x) @ x.mT, -1) @ x


def test_a_module_that_names_the_function_is_found():
    model, x = nn.Sequential(Mixer()), normal(1, 8, 32)
    plain = model(x)
    assert not torch.equal(convert(model, recipe=FA3)(x), plain) and torch.equal(revert(model)(x), plain)


@pytest.mark.parametrize(
    ("make", "how", "said"),
    [
        (gated, {"recipe": "fa3"},
         r"attention= of recipe 'fa3' finds nothing to replace in Sequential: it looks for modules whose class is "
         r"named like attention .*; convert with dataclasses.replace\(recipe, attention=None\)"),
        (gpt, {"recipe": BOTH, "filter_fn": lambda m, n: isinstance(m, nn.Linear)},
         r"attention= of recipe 'both' finds nothing to replace in GPT \(blocks.0.attention, blocks.1.attention: "
         "filter_fn leaves it out"),
        (gpt, {"recipe": SMOOTH},
         r"replace\[0\] of recipe 'smooth' .* finds nothing to replace in GPT: it looks for modules with linear "
         r"gate_proj, up_proj, down_proj and act_fn=SiLU, or three linear layers .* Replacement\(optional=True\)"),
        (lambda: convert_attention(gpt(), FA3.attention), {"recipe": BOTH},
         r"attention of 'blocks.0.attention' is converted already; call revert_attention\(model\) first"),
    ],
)  # fmt: skip
def test_a_replacement_that_finds_nothing_is_named_and_changes_nothing(make, how, said):
    model = make()
    before = snapshot(model)
    refused(said, convert, model, **how)
    assert snapshot(model) == before


def test_attention_of_another_kind_is_told_before_training():
    hf_model = hugging_face("llama", attn_implementation="eager")
    refused(r"'model.layers.0.self_attn' runs attn_implementation='eager'.*'sdpa'", convert, hf_model, recipe=FA3)


def test_a_module_that_never_calls_the_function_is_told():
    """Nothing stays in high precision in silence."""
    model, x = convert(nn.Sequential(OwnAttention()), recipe=FA3), torch.ones(1, 4, 32)
    refused("layer '0' ran without calling scaled_dot_product_attention, so nothing", model, x)
    module = convert(nn.MultiheadAttention(32, 2, batch_first=True), recipe=FA3)
    refused(r"call nn.MultiheadAttention with need_weights=False", module, x, x, x)
    assert module(x, x, x, need_weights=False)[0].shape == x.shape
    model = convert(nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True), recipe=FA3)
    with pytest.raises(ArgumentError, match="layer '': quantised attention has no dropout, but dropout_p=0.1; pass 0"):
        model(x, x, x, need_weights=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Recipe(name="a", attention="fa3"),
            "Recipe attention='fa3' is not an AttentionConfig or None; pass fl",
        ),
        (lambda: Recipe(name="a", replace=(("swiglu", "SmoothSwiGLU"),)), "is not a tuple of Replacement; write repl"),
        (lambda: Replacement(kind="relu", by="x"), "Replacement kind='relu' is unknown; choose 'swiglu'"),
        (lambda: Replacement(kind="swiglu", by="x"), "Replacement by='x' is unknown; choose 'SmoothSwiGLU'"),
        (
            lambda: Replacement(kind="swiglu", by="SmoothSwiGLU", per="row"),
            "per='row' is not allowed; choose 'token', 'c",
        ),
    ],
)
def test_wrong_records(make, said):
    refused(said, make)


def test_observe_sees_attention():
    model = convert(gpt(), recipe="fa3", generator=0)
    with fmtsim.observe(model) as stats:
        loss(model).backward()
    assert list(stats["blocks.0.attention"]) == [*"qkvp", *"so"]  # FlashAttention-3's unit has rows of its products
    assert stats["blocks.0.attention"]["p"].format == "e4m3" and 15 < stats["blocks.1.attention"]["q"].sqnr_db < 40
    with fmtsim.observe(model), pytest.raises(ArgumentError, match="layer 'blocks.0.attention' is observed already"):
        fmtsim.observe(model).__enter__()
