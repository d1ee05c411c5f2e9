"""Layers under recipes on a card: operands by fused kernels, keys that are counted there; on the host and on a GPU."""

import pytest
import torch
from torch import nn

from fmtsim.cuda.cast import scaled
from fmtsim.gemm.layers.keys import SIGNS, Layer, stream_of
from fmtsim.gemm.layers.linear import run_layer
from fmtsim.gemm.layers.operand import quantize_operand
from fmtsim.recipes import get_recipe
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from tests.support.emulated_gpu import take_for_host
from tests.support.operands import bfloat16s

SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd


def step(layer, x, w, g):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = run_layer(x, w, None, layer)
    return (y.detach(), *torch.autograd.grad(y, (x, w), g))


def values(x, config, name, turned, draws):
    """The operand's values by torch operations alone, in float32."""
    quantizer = config.operands[name]
    made = quantize_operand(x.cpu().mT if turned else x.cpu(), quantizer, draws)
    return made.values(torch.float32)


def seeded(seed, name, config, count=0):
    index = list(config.operands).index(name)
    keys = (RandomKey(stream_of(seed, i), count) for i in (index, 12 + index, SIGNS + (name not in ("x_f", "w_f"))))
    return Keys(*keys)


@pytest.mark.parametrize("name", ["te_nvfp4", pytest.param("quartet", marks=SLOW)])
def test_compiled_layers_count_their_keys_on_the_card(name, on_card):
    """Every pass has its own keys, made of the layer's seed and the pass's number; products are those of the values."""
    config = get_recipe(name).linear
    layer = Layer(config, torch.Generator().manual_seed(9))
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((128, 128), (256, 128), (128, 256))))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: run_layer(*t, None, layer), fullgraph=True, backend="aot_eager")

    def run():
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(compiled(*leaves), leaves, g)

    passes = [run() for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in zip(passes[1], passes[2], strict=True))
    count = int(layer.counter(x.device))
    assert count == 3  # backward passes: nothing is drawn forwards
    if name == "te_nvfp4":
        g_d = values(g, config, "g_d", False, seeded(layer.seed, "g_d", config, count))
        w_f = values(w, config, "w_f", False, Keys())
        torch.testing.assert_close(passes[2][0].float().cpu(), g_d @ w_f, rtol=1e-2, atol=1e-1)  # rounded to bfloat16
        other = values(g, config, "g_d", False, seeded(layer.seed, "g_d", config, count - 1)) @ w_f
        assert not torch.allclose(passes[2][0].float().cpu(), other, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(
    "name", ["te_delayed", pytest.param("te_current", marks=SLOW), pytest.param("te_block", marks=SLOW)]
)
def test_kernels_serve_layers_and_remember(name, on_card):
    """Three steps have the numbers of layers without kernels, to the order of float32 sums; delayed scales move."""
    config = get_recipe(name).linear
    x, w, g = (bfloat16s(*size, seed=i) for i, size in enumerate(((128, 256), (128, 256), (128, 128))))

    def memory(device):
        quantizers = {key: q for key, q in config.operands.items() if q.scaling is not None and q.scaling.history}
        return {key: DelayedScale(q).to(device) for key, q in quantizers.items()}

    layers = Layer(config, None, memory(on_card)), Layer(config, None, memory("cpu"))
    for i in range(3):
        found = step(layers[0], *(t.to(on_card) * 2**i for t in (x, w, g)))
        with pytest.MonkeyPatch.context() as patch:
            take_for_host(patch)
            wanted = step(layers[1], *(t * 2**i for t in (x, w, g)))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.cpu().float(), b.float(), rtol=2**-7, atol=float(b.abs().max()) * 2**-8)
    for key, remembered in layers[0].state.items():
        assert torch.equal(remembered.amaxes.cpu(), layers[1].state[key].amaxes)
        assert int(remembered.calls) == 3


def test_a_converted_model_learns_its_scales_on_the_card(on_card):
    import fmtsim

    model = fmtsim.convert(nn.Sequential(nn.Linear(128, 128, bias=False)).to(on_card).bfloat16(), recipe="te_delayed")
    model(bfloat16s(128, 128, device=on_card)).float().sum().backward()
    state = fmtsim.recipe_state(model)["layers"]["0"]
    assert all(int(memory["calls"]) == 1 and float(memory["amaxes"][0]) > 0 for memory in state.values())


def gradients(run, model, x):
    model.zero_grad(set_to_none=True)
    run(x).float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["te_nvfp4_all", "quartet", "quartet2", "intel_2t"])
def test_replayed_graphs_draw_anew_gpu(name):
    """Gradients of replays of one CUDA graph lie as far apart as those of eager steps, and no two are equal."""
    import fmtsim

    if not fmtsim.cuda.available():
        pytest.skip("needs a GPU")

    def model():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
        return fmtsim.convert(made, recipe=name, generator=1, total_steps=100)

    def distances(steps):
        return [float((a - b).norm() / b.norm()) for i, a in enumerate(steps) for b in steps[:i]]

    x, eager, traced_model = bfloat16s(128, 256, device="cuda"), model(), model()
    torch._dynamo.reset()
    compiled = torch.compile(traced_model, mode="reduce-overhead")
    wanted = distances([gradients(eager, eager, x) for _ in range(4)])
    found = distances([gradients(compiled, traced_model, x) for _ in range(8)][-4:])  # the first ones record the graph
    assert min(found) > 0
    assert sum(found) == pytest.approx(sum(wanted), rel=0.1)  # six distances, which scatter by about 2 %


def test_kernels_cast_twice(on_card, monkeypatch):
    """DeepSeek-V3's inputs behind attention, kept in E5M6 and cast again: two launches, the same bits."""
    quantizer = get_recipe("deepseek_v3").rules[0].use.wgrad.b
    x = bfloat16s(128, 256, seed=5)
    calls, real = [], scaled.cast_scaled
    monkeypatch.setattr(scaled, "cast_scaled", lambda *given: calls.append(given) or real(*given))
    made = quantize_operand(x.to(on_card).mT, quantizer, Keys(), folded=True)
    assert len(calls) == 2 and made.scale is None and calls[1][0].dtype == torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        take_for_host(patch)
        wanted = quantize_operand(x.mT, quantizer, Keys())
    assert torch.equal(made.values(torch.float32).cpu(), wanted.values(torch.float32))
    assert made.quantizer is quantizer and len(calls) == 2
