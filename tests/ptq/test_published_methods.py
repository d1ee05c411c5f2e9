# SPDX-License-Identifier: Apache-2.0
"""AWQ, HQQ and rotations: each against its equations in a few lines, and against its source's code where installed."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.ptq import Awq, Clip, Hqq, PtqRecipe, Rotate, weight_grid
from fmtsim.ptq.reshape import attach, rotate, rotation
from fmtsim.ptq.weight_grid import clip, hqq, nearest
from fmtsim.recipes.ptq_catalogue import operand
from fmtsim.support.errors import ArgumentError
from tests.support.operands import normal

pytestmark = pytest.mark.usefixtures("one_thread")
GROUPS = operand("uint4_g32_zp")


def outliers(rows, columns, seed):
    """Return inputs of which every seventh channel is large."""
    x = normal(rows, columns, seed=seed)
    x[:, ::7] *= 12
    return x


def source(name, reason):
    """Return a module of a source's code, or skip."""
    return pytest.importorskip(name, reason=f"{reason} is not installed, or does not import here", exc_type=ImportError)


def zero_pointed(w, size):
    """Round groups as AutoAWQ's equations have it, which are those of an integer zero point."""
    g = w.reshape(-1, size)
    low, high = g.amin(1, keepdim=True).clamp(max=0), g.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(0, 15)
    return (((g / scale).round() + zero).clamp(0, 15) - zero).mul(scale).reshape(w.shape)


def awq_factors(x, w, size, duo):
    """Return the factors of least error, the error measured on the outputs themselves."""
    relative = (w.abs().reshape(-1, size) / (w.abs().reshape(-1, size).amax(1, keepdim=True) + 1e-6)).reshape(w.shape)
    found = []
    for i in range(20):
        r = i / 20
        s = x.abs().mean(0) ** r / ((relative.mean(0) ** (1 - r) + 1e-4) if duo else 1)
        s = s.clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        error = ((x.double() @ (zero_pointed(w * s, size) / s - w).double().mT) ** 2).sum()
        found.append((float(error), s))
    return min(found, key=lambda pair: pair[0])[1]


@pytest.mark.parametrize("duo", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_awq_scales_by_the_exponent_of_least_error(seed, duo):
    x, model = outliers(96, 64, seed), nn.Sequential(nn.Linear(64, 48))
    w = model[0].weight.detach().clone()
    recipe = PtqRecipe(name="awq", w=GROUPS, smooth=Awq(duo=duo))
    fmtsim.ptq(model, recipe, [x[:40], x[40:]], filter_fn=lambda module, name: True)
    s = awq_factors(x, w, 32, duo)
    assert torch.allclose(model[0].ptq_divisor, s, rtol=1e-5, atol=0)  # means in float64 here, in float32 there
    assert torch.equal(model[0].weight, nearest(w * model[0].ptq_divisor, GROUPS))
    assert float(s.max() / s.min()) > 1.4


@pytest.mark.parametrize("seed", range(3))
def test_clipping_has_the_least_error_of_each_group(seed):
    x, w = outliers(80, 80, seed), normal(6, 80, seed=seed + 9) ** 3
    clipped = clip(w, x.double().mT @ x.double(), GROUPS, Clip())
    for row in range(6):
        for start in (0, 32, 64):  # the last group is short
            part, group = slice(start, start + 32), w[row : row + 1, start : start + 32]
            tops = [group.abs().max() * (1 - i / 20) for i in range(10)]
            candidates = [group.clamp(-top, top) for top in tops]
            errors = [
                float(((x[:, part].double() @ (nearest(c, GROUPS) - group).double().mT) ** 2).sum()) for c in candidates
            ]
            best = candidates[min(range(10), key=errors.__getitem__)]
            assert torch.equal(clipped[row : row + 1, part], best)
    assert not torch.equal(clipped, w)


def test_awq_recipe_clips_all_but_queries_and_keys_and_exports_what_it_rounded():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x):
            return self.q_proj(x) + self.v_proj(x)

    torch.manual_seed(0)
    model = Attention()
    model.v_proj.weight.data.pow_(3)
    weights = {name: getattr(model, name).weight.detach().clone() for name in ("q_proj", "v_proj")}
    fmtsim.ptq(model, dataclasses.replace(fmtsim.get_recipe("awq"), w=GROUPS), [outliers(64, 64, 1)])
    plain = {n: torch.equal(getattr(model, n).weight, nearest(w * getattr(model, n).ptq_divisor, GROUPS))
             for n, w in weights.items()}  # fmt: skip
    assert plain == {"q_proj": True, "v_proj": False}
    assert "AWQ, 20 exponents, clipped in steps of 1/20" in str(fmtsim.report(model))


@pytest.mark.parametrize(("bits", "size", "norm"), [(4, 64, 0.7), (4, 32, 1.0), (8, 64, 0.7), (2, 16, 0.5)])
def test_hqq_follows_its_equations(bits, size, norm):
    fmt = dataclasses.replace(
        fmtsim.get_format("uint4_g64_zp"), name="groups", element=fmtsim.get_format(f"uint{bits}"),
        scaling=dataclasses.replace(fmtsim.get_format("uint4_g64_zp").scaling, block=(1, size)),
    )  # fmt: skip
    w = normal(24, 128, seed=bits)
    g = w.reshape(-1, size)
    scale = (2**bits - 1) / (g.amax(1, keepdim=True) - g.amin(1, keepdim=True))
    zero, errors = -g.amin(1, keepdim=True) * scale, [float("inf")]
    for _ in range(20):
        q = (g * scale + zero).round().clamp(0, 2**bits - 1)
        e = g - (q - zero) / scale
        errors.append(float(e.abs().mean()))
        shrunk = e.sign() * (e.abs() - e.abs() ** (norm - 1) / 10).clamp(min=0)
        zero = (q - (g - shrunk) * scale).mean(1, keepdim=True)
        if errors[-1] >= errors[-2]:
            break
    expected = ((g * scale + zero).round().clamp(0, 2**bits - 1) - zero) / scale
    assert torch.allclose(hqq(w, operand(fmt), Hqq(norm=norm)).reshape(g.shape), expected, rtol=1e-5, atol=1e-6)
    assert len(errors) > 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("bits", "size"), [(4, 64), (4, 32), (8, 64), (2, 64), (3, 64)])
def test_hqq_has_the_bits_of_its_package(bits, size):
    package = source("hqq.core.quantize", "hqq")
    fmt = dataclasses.replace(
        fmtsim.get_format("uint4_g64_zp"), name="groups", element=fmtsim.get_format(f"uint{bits}"),
        scaling=dataclasses.replace(fmtsim.get_format("uint4_g64_zp").scaling, block=(1, size)),
    )  # fmt: skip
    for seed in range(8):
        w = normal(64, 256, seed=seed) ** (1 + seed % 3)
        codes, meta = package.Quantizer.quantize(w, nbits=bits, group_size=size, axis=1, bitpack=False, device="cpu")
        values = ((codes.reshape(-1, size) - meta["zero"]) * meta["scale"]).reshape(w.shape)
        assert torch.equal(hqq(w, operand(fmt), Hqq()), values)


class Apart(nn.Linear):
    """Return copies as a state: on a CPU the source otherwise puts back weights that it has scaled in place."""

    def state_dict(self, *args, **kwargs):
        return {name: t.clone() for name, t in super().state_dict(*args, **kwargs).items()}


@pytest.mark.filterwarnings("ignore")
def test_awq_has_the_factors_and_the_clips_of_its_package(monkeypatch):
    quantizer = source("awq.quantize.quantizer", "autoawq").AwqQuantizer.__new__(
        source("awq.quantize.quantizer", "autoawq").AwqQuantizer
    )
    quantizer.__dict__.update(
        w_bit=4,
        group_size=32,
        zero_point=True,
        duo_scaling=True,
        max_chunk_memory=1 << 30,
        n_parallel_calib_samples=None,
    )
    for seed in range(8):
        x, layer = outliers(96, 64, seed), Apart(64, 64, bias=False)
        w = layer.weight.detach().clone()
        assert torch.equal(quantizer.pseudo_quantize_tensor(w)[0], zero_pointed(w, 32))
        _, _, theirs = quantizer._search_best_scale(nn.Sequential(layer, nn.Identity()), layer, [layer], x)
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        model[0].weight.data.copy_(w)
        fmtsim.ptq(model, PtqRecipe(name="awq", w=GROUPS, smooth=Awq()), [x], filter_fn=lambda module, name: True)
        assert torch.allclose(model[0].ptq_divisor, theirs, rtol=1e-5, atol=0)
        tops = quantizer._compute_best_clip(w, x)  # [rows, groups, 1]
        with monkeypatch.context() as context:  # a clipped element is a tie of its grid: rounded as the package does
            context.setattr(weight_grid, "nearest", lambda w, _: quantizer.pseudo_quantize_tensor(w)[0])
            ours = clip(w, x.double().mT @ x.double(), GROUPS, Clip())
        limit = tops.squeeze(-1).repeat_interleave(32, 1)
        assert torch.equal(ours, w.clamp(-limit, limit))


def llama(dtype=torch.float32, **sizes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": 48, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 8,
           "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True,
           "mlp_bias": True} | sizes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(torch.rand_like(p))
    return model


IDS = [{"input_ids": torch.randint(48, (2, 16), generator=torch.Generator().manual_seed(i))} for i in range(2)]


def logits(model):
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in IDS])


@pytest.mark.parametrize("settings", [Rotate(heads=False), Rotate(seed=3), Rotate(online=True)], ids=str)
def test_a_rotation_leaves_the_function_alone(settings):
    model = llama(torch.float64)
    exact, stream = logits(model), []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: stream.append(args[0].detach()))
    assert attach(model, settings)
    rotate(model, settings)
    off = (logits(model) - exact).abs().max() / exact.abs().max()
    assert off < 1e-6  # norms compute in float32, and so does the online transform
    r, original = rotation(48, settings.seed, torch.device("cpu")), []
    plain = llama(torch.float64)
    plain.model.layers[1].register_forward_pre_hook(lambda module, args: original.append(args[0].detach()))
    logits(plain)
    assert torch.allclose(stream[0], original[0] @ r, rtol=0, atol=1e-6)
    assert torch.allclose(r @ r.mT, torch.eye(48, dtype=torch.float64), rtol=0, atol=1e-14)


def test_a_rotated_model_is_saved_and_undone():
    recipe = dataclasses.replace(fmtsim.get_recipe("quarot"), sequential="block")
    model, exact = llama(), llama()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ArgumentError, match="calibration batch 1"):
        fmtsim.ptq(model, recipe, [IDS[0], {"nothing": torch.ones(1)}])
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(logits(model), logits(exact))
    fmtsim.ptq(model, recipe, IDS)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    fresh = fmtsim.load_state(llama(), fmtsim.state(model))
    assert torch.equal(logits(fresh), logits(model)) and not torch.equal(logits(model), logits(exact))


def test_hqq_and_rotations_need_no_data_and_sequences_do():
    recipe = dataclasses.replace(fmtsim.get_recipe("hqq"), w=GROUPS, rotate=Rotate())
    model, with_data = (llama(hidden_size=64, intermediate_size=128, num_attention_heads=8) for _ in range(2))
    fmtsim.ptq(model, recipe)
    assert torch.equal(logits(model), logits(fmtsim.ptq(with_data, recipe, IDS)))
    with pytest.raises(ArgumentError, match="needs calibration_data= for quantised predecessors"):
        fmtsim.ptq(llama(), dataclasses.replace(recipe, sequential="block"))


def test_rotations_help_where_a_channel_is_large():
    exact = llama(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16)
    for block in exact.model.layers:
        block.input_layernorm.weight.data[7] *= 20  # an outlier channel of the inputs of q, k and v
    decibels = {}
    for settings in (None, Rotate()):
        recipe = dataclasses.replace(fmtsim.get_recipe("w4a4_quarot"), w=operand("fp32"), weights=None, rotate=settings)
        report = fmtsim.report(fmtsim.ptq(copy.deepcopy(exact), recipe, IDS))
        decibels[settings] = [row.output_db for row in report.rows if row.name.endswith(("q_proj", "k_proj"))]
    gains = [after - before for before, after in zip(*decibels.values(), strict=True)]
    assert len(gains) == 4 and min(gains) > 3


def test_models_that_cannot_be_rotated_are_refused():
    recipe = PtqRecipe(name="r", w=operand("fp32"), rotate=Rotate())
    with pytest.raises(ArgumentError, match="Rotate: Sequential has no lm_head; pass a decoder that is built as"):
        fmtsim.ptq(nn.Sequential(nn.Linear(8, 8)), recipe, [normal(4, 8)])
    model = llama()
    model.model.layers[0].input_layernorm = nn.LayerNorm(48)
    with pytest.raises(ArgumentError, match="Rotate: LayerNorm subtracts a mean or adds a bias; pass a model with RMS"):
        fmtsim.ptq(model, recipe, IDS)
    model = llama()
    model.model.layers[1].post_feedforward_layernorm = nn.RMSNorm(48)
    with pytest.raises(ArgumentError, match="post_feedforward_layernorm is a norm that no layer behind can absorb"):
        fmtsim.ptq(model, recipe, IDS)
    for settings, text in ((dict(seed=-1), "Rotate seed=-1"),):
        with pytest.raises(ArgumentError, match=text):
            Rotate(**settings)
    with pytest.raises(ArgumentError, match="Hqq norm=0, beta=10.0; choose a norm above 0"):
        Hqq(norm=0)
    with pytest.raises(ArgumentError, match=r"HQQ rounds groups that divide K=8 to unsigned integers with zero points"):
        hqq(normal(2, 8), operand("int4_g32"), Hqq())
