# SPDX-License-Identifier: Apache-2.0
"""What servers get: the share that is coded, one scale for layers that they fuse, and files that were read back."""

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from torch import nn

import fmtsim
from fmtsim.ptq.export import checkpoint_files, compressed_tensors
from fmtsim.ptq.weight_grid import nearest
from fmtsim.support.errors import DataError
from tests.support.bits import assert_same_bits
from tests.support.refusals import refused

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 128, "pad_token_id": 0}  # fmt: skip


def language_model(kind, **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("recipe", ["int4_g32", "int8_token"])
def test_stacked_experts_stay_and_are_named_with_the_share_that_is_coded(recipe, tmp_path):
    sizes = {"num_experts": 3, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
    model = fmtsim.ptq(language_model("Qwen3Moe", **sizes), recipe)
    written, report = fmtsim.export(model, tmp_path / "m", "compressed-tensors"), fmtsim.report(model)
    coded = 4 * 64 * 64
    total = coded + 3 * 3 * 32 * 64 + 3 * 64 + 64 * 128  # experts, a router and a head
    percent = f"{coded * 1000 // total / 10} % of the weights that products read"
    assert written.coverage.share == report.coverage.share == coded / total
    assert report.summary.startswith(f"{recipe}: {percent} quantised; left: ")
    assert f"\n{percent} coded; left: " in str(written) and "mlp.experts.gate_up_proj" in str(written)
    assert f"\n{percent} quantised\n" in str(report)


@pytest.mark.parametrize("recipe", ["nvfp4_static", "nvfp4_gptq", "nvfp4_weights", "nemotron"])
def test_layers_that_servers_fuse_have_one_scale_of_the_tensor(recipe):
    exact = language_model("Llama")
    exact.model.layers[0].mlp.gate_proj.weight.mul_(3)
    models, scales = [], []
    for fused in (False, True):
        chosen = dataclasses.replace(fmtsim.get_recipe(recipe), fused=fused)
        models.append(fmtsim.ptq(copy.deepcopy(exact), chosen, [torch.arange(16).view(1, 16)]))
        key, weights = "scale" if recipe == "nemotron" else "tensor_scale", fmtsim.state(models[-1])["weights"]
        scales.append({name.split(".")[-1]: float(w["scales"][key]) for name, w in weights.items()})
    own, shared = scales
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)):
        assert {shared[name] for name in group} == {max(own[name] for name in group)}
        assert len({own[name] for name in group}) == len(group)
        if recipe != "nvfp4_gptq":  # rounded to nearest, the group is what one matrix of them all is
            names = [name for name, _ in exact.named_modules() if name.split(".")[-1] in group]
            before, after = (torch.cat([m.get_submodule(name).weight for name in names]) for m in (exact, models[1]))
            assert_same_bits(after, nearest(before, fmtsim.get_recipe(recipe).w))


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao", "gguf"])
def test_a_planted_error_is_seen_and_leaves_no_file(layout, tmp_path, monkeypatch):
    model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), "q4_0" if layout == "gguf" else "int4_g32")
    module = {
        "compressed-tensors": compressed_tensors,
        "torchao": checkpoint_files.torchao,
        "gguf": checkpoint_files.gguf,
    }[layout]
    name, store = ("blocks_of", module.blocks_of) if layout == "gguf" else ("tensors_of", module.tensors_of)

    def flip_a_bit(weight, **options):
        first, *others = store(weight, **options)
        codes = first.clone() if layout == "gguf" else next(iter(first.values()))  # ggml's blocks are the weight's own
        codes.view(torch.uint8).view(-1)[-1] ^= weight.layer == "1"
        return (codes if layout == "gguf" else first), *others

    monkeypatch.setattr(module, name, flip_a_bit)
    message = "what was written does not read back as it was meant: 1.weight; the files are gone; please report it"
    refused(message, fmtsim.export, model, tmp_path / "new" / "m.gguf", layout, error=DataError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ignore", "tied"), [([], False), (None, True)])
def test_a_tied_head_that_is_coded_is_no_longer_tied_in_the_config(ignore, tied, tmp_path):
    model = fmtsim.ptq(language_model("Llama", tie_word_embeddings=True), "int4_g32", ignore=ignore)
    fmtsim.export(model, tmp_path, "compressed-tensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied


def test_rows_that_fill_no_blocks_of_ggml_get_what_llama_quantize_takes(tmp_path):
    sizes = (1152, 64, 256, 40, 8)
    for pair in ("q2_k q4_0", "q3_k q4_0", "q4_k q5_0", "q5_k q5_1", "q6_k q8_0", "iq4_xs iq4_nl"):
        recipe, other = pair.split()
        model = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in zip(sizes, sizes[1:], strict=False)))
        exact = copy.deepcopy(model)
        fmtsim.ptq(model, recipe)
        assert [row.w for row in fmtsim.report(model).rows] == [other, other, recipe]
        assert f": 3 (its 40 inputs fill no blocks of {other}; llama-quantize stores F16)" in str(fmtsim.report(model))
        written = fmtsim.export(model, tmp_path / "m.gguf", "gguf")
        assert f"weights of 2 in {other}, 1 in {recipe}, 1 tensors as values" in str(written)
        for i, fmt in enumerate((other, other, recipe)):
            assert_same_bits(model[i].weight, fmtsim.quantize(exact[i].weight, fmt))
