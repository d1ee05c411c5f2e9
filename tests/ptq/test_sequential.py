# SPDX-License-Identifier: Apache-2.0
"""Calibration after quantised predecessors, held to what the quantised model itself feeds each layer."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.scaling import Scaling
from fmtsim.ptq import Gptq, PtqRecipe
from fmtsim.ptq.weight_grid import gptq, grid_of
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, CoverageWarning
from tests.support.operands import normal

pytestmark = pytest.mark.usefixtures("one_thread")
GPTQ = dataclasses.replace(fmtsim.get_recipe("int4_gptq"), weights=Gptq(act_order=True))


def llama(layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()  # fmt: skip


def batches(count=2):
    return [{"input_ids": torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(i))} for i in range(count)]


def fed(model, name):
    """Return the sum of x^T x over the batches of what a layer is given, float64, and the largest magnitude."""
    grams, inputs = [], []

    def watch(module, args):
        x = args[0].detach().reshape(-1, args[0].shape[-1])
        inputs.append(x)
        grams.append(x.double().mT @ x.double())

    hook = model.get_submodule(name).register_forward_pre_hook(watch)
    with torch.no_grad():
        for batch in batches():
            model(**batch)
    hook.remove()
    return sum(grams[1:], grams[0]), max(float(x.abs().max()) for x in inputs)


@pytest.mark.parametrize("sequential", [None, "block", "layer"])
def test_each_weight_is_rounded_for_the_inputs_that_its_predecessors_leave(sequential):
    exact = llama()
    quantised = fmtsim.ptq(copy.deepcopy(exact), dataclasses.replace(GPTQ, sequential=sequential), batches())
    layers = [name for name, module in exact.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    assert set(fmtsim.state(quantised)["weights"]) == set(layers)  # of every stage
    equal = []
    for name in layers:
        w, quantizer = exact.get_submodule(name).weight, GPTQ.w
        source = {None: exact, "layer": quantised}.get(sequential)
        if source is None:  # the blocks before are quantised, this block and those after it are not
            source, block = copy.deepcopy(exact), int(name.split(".")[2])
            for i in range(block):
                source.model.layers[i].load_state_dict(quantised.model.layers[i].state_dict())
        gram, _ = fed(source, name)
        q = gptq(w.detach(), gram, grid_of(w.detach(), quantizer), GPTQ.weights).float()
        equal.append(torch.equal(q, quantised.get_submodule(name).weight))
        other, _ = fed(exact if sequential else quantised, name)
        differs = not torch.equal(gptq(w.detach(), other, grid_of(w.detach(), quantizer), GPTQ.weights).float(), q)
        first = ("q_proj", "k_proj", "v_proj")
        assert differs or ("layers.0" in name and (sequential == "block" or name.endswith(first)))
    assert len(equal) == 14 and all(equal)


def test_static_scales_are_those_of_the_inputs_of_the_quantised_model():
    exact = llama()
    recipe = dataclasses.replace(fmtsim.get_recipe("int8_static"), sequential="layer")
    quantised = fmtsim.ptq(copy.deepcopy(exact), recipe, batches())
    rows = [row for row in fmtsim.report(quantised).rows if row.name != "lm_head"]
    assert [row.x_scale for row in rows] == [
        pytest.approx(fed(quantised, row.name)[1] / 127, rel=1e-6) for row in rows
    ]  # the report's scale is the reciprocal of a reciprocal
    alone = fmtsim.report(fmtsim.ptq(exact, "int8_static", batches()))
    assert [row.x_scale != alone[row.name].x_scale for row in rows][-1]


def test_modules_that_share_a_weight_are_one_stage_and_idle_ones_are_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.idle = (nn.Linear(32, 32, bias=False) for _ in range(4))
            self.c.weight = self.a.weight

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    model, recipe = Twice(), dataclasses.replace(GPTQ, sequential="layer")
    for stages in ("layer", "block"):
        with pytest.warns(CoverageWarning, match="calibration never ran idle: weights are rounded to nearest by"):
            reached = fmtsim.ptq(Twice(), dataclasses.replace(GPTQ, sequential=stages), [normal(40, 32, seed=1)])
        assert [row.name for row in fmtsim.report(reached).rows] == ["a", "b", "idle"]
    before = model.b.weight.detach().clone()
    fmtsim.ptq(model, recipe, [normal(40, 32, seed=1)], filter_fn=lambda module, name: name != "idle")
    rows = fmtsim.report(model).rows
    assert [row.name for row in rows] == ["a", "b"] and model.c.weight is model.a.weight
    assert not torch.equal(model.b.weight, before)
    assert "each layer after its quantised predecessors" in str(recipe)


def test_sequential_has_two_values():
    with pytest.raises(ArgumentError, match="PtqRecipe sequential='blocks' is not allowed"):
        PtqRecipe(name="my", sequential="blocks")


@pytest.mark.filterwarnings("ignore")
def test_block_by_block_has_the_codes_of_llm_compressor(tmp_path, monkeypatch):
    """GPTQ in the source's sequential pipeline, its arithmetic in float64 as ours: in float32, ties flip."""
    names = ("llmcompressor.modifiers.quantization", "llmcompressor.modifiers.gptq.gptq_quantize", "datasets")
    modifiers, rounding, datasets = (
        pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError) for name in names
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer, exact = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0"), llama(3)
    exact.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(rounding, "GPTQ_PRECISION", torch.float64)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=True, strategy="channel")
    )
    modifier = modifiers.GPTQModifier(config_groups={"all": scheme}, ignore=["lm_head"], dampening_frac=0.01)
    data = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    oneshot(model=theirs, dataset=data, processor=tokenizer, recipe=modifier, num_calibration_samples=8,
            max_seq_length=32, pipeline="sequential")  # fmt: skip
    stored, equal = theirs.state_dict(), {}
    w = Quantizer(format=fmtsim.get_format("int4_full"), scaling=Scaling(block=(1, None), top=7.5, arithmetic="divide"))
    for sequential in ("block", None):
        recipe = PtqRecipe(name="source", w=w, weights=Gptq(act_order=True), sequential=sequential)
        ours = fmtsim.ptq(copy.deepcopy(exact), recipe, [{"input_ids": ids}])
        scales = {name: stored[f"{name}_scale"] for name, _ in ours.named_parameters() if "proj" in name}
        codes = {name: (ours.get_parameter(name) / scale).round() for name, scale in scales.items()}
        equal[sequential] = [torch.equal(codes[name], (stored[name] / scales[name]).round()) for name in scales]
    assert len(equal["block"]) == 21 and all(equal["block"]) and not any(equal[None][7:])
