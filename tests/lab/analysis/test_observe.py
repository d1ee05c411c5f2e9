# SPDX-License-Identifier: Apache-2.0
"""observe: every layer and operand of a step, exactly once, and nothing outside the with."""

import json
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.lab.analysis.losses import list_losses
from fmtsim.lab.analysis.measure import LOWEST_EXPONENT
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.analysis.page.page import observation_data
from fmtsim.lab.analysis.stats import OperandStats
from fmtsim.nn import convert, revert
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from tests.support.refusals import refused


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    return convert(net, recipe=fmtsim.linear_config(x="e2m1", w="e2m1", g="e5m2"))


def test_a_step_is_counted_by_layer_and_operand(model):
    x = torch.randn(5, 6)
    with observe(model) as stats:
        model(x).sum().backward()
    assert set(stats.layers) == {"0", "2"}
    # The input needs no gradient, so the first layer computes no dgrad.
    assert list(stats["0"]) == ["x_f", "w_f", "g_w", "x_w"]
    assert list(stats["2"]) == ["x_f", "w_f", "g_d", "w_d", "g_w", "x_w"]
    with pytest.raises(KeyError, match="no layer 'o' was observed; .layers has all"):
        stats["o"]
    assert stats["0"]["x_f"].elements == 30 and stats["0"]["x_f"].amax == float(x.abs().max())
    small = (model[0].weight != 0) & (model[0].weight.abs() <= 0.25)
    assert stats["0"]["w_f"].underflow_percent == pytest.approx(100 * float(small.float().mean()))
    assert stats["2"]["g_w"].format == "e5m2"


def test_steps_add_up_and_nothing_is_counted_outside(model):
    x = torch.randn(5, 6)
    with observe(model) as stats:
        model(x)
        late = model(x)
    model(x)
    late.sum().backward()
    assert stats["0"]["x_f"].elements == 60
    assert "g_w" not in stats["0"]
    assert all(m.emulation.observer is None for m in (model[0], model[2]))


def test_operands_have_one_order_whatever_was_cast_first():
    """A GPU casts the gradient for both its products from one read, before the weight of the first."""
    order = ["x_f", "w_f", "g_d", "w_d", "g_w", "x_w", "q", "k", "v", "p", "dv.a", "dv.b", "dk.a", "another"]
    stats, seen = Observation(), OperandStats().add(torch.ones(2), torch.ones(2), get_format("e4m3"))
    for layer, names in {"one": ["g_w", "x_f", "x_w"], "all": order[::-1]}.items():
        for name in names:
            stats.count(1, layer, name, seen)
    assert list(stats["one"]) == ["x_f", "g_w", "x_w"] and list(stats["all"]) == order
    assert [(loss.layer, loss.operand) for loss in list_losses(stats.layers)][:4] == [
        ("one", "x_f"), ("one", "g_w"), ("one", "x_w"), ("all", "x_f")
    ]  # fmt: skip
    assert list(stats.history[1]["all"]) == list(stats.to_dict()["layers"]["all"]) == order
    assert observation_data(stats)["operands"] == order


def test_history_has_every_second_step_by_itself(model):
    x = torch.randn(5, 6)
    with observe(model, every=2) as stats:
        for factor in (1.0, 7.0, 3.0, 9.0, 5.0):
            model(factor * x).sum().backward()
            assert (model[0].emulation.observer is None) == (factor in (7.0, 9.0))
    assert (stats.steps, stats.every, list(stats.history)) == (5, 2, [1, 3, 5])
    assert [step["0"]["x_f"].amax for step in stats.history.values()] == [float((f * x).abs().max()) for f in (1, 3, 5)]
    assert stats["0"]["x_f"].elements == 90 and stats.history[3]["0"]["x_f"].elements == 30
    with observe(model) as alone:
        model(3.0 * x).sum().backward()
    assert stats.history[3] == alone.history[1]


def test_a_backward_pass_belongs_to_the_step_of_its_forward(model):
    x = torch.randn(5, 6)
    with observe(model) as stats:
        model[2](torch.randn(3, 8))  # before any call of the model: the first step's
        losses = [model(f * x).sum() for f in (1.0, 2.0)]
        (losses[0] + 4.0 * losses[1]).backward()
    assert [step["2"]["g_w"].amax for step in stats.history.values()] == [1.0, 4.0]
    assert [step["2"]["x_f"].elements for step in stats.history.values()] == [40 + 24, 40]


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "all"])
def test_every_is_a_number_of_steps(model, every):
    said = r"observe takes a torch.nn.Module or a tensor, not list; pass the model itself, or observe\(torch.as_tensor"
    refused(said, observe, [1.0], "e4m3")
    refused("is not a number of steps; pass 1 to observe all, 10 for every tenth", observe, model, every=every)


def test_observing_changes_no_result(model):
    x = torch.randn(5, 6)
    plain = model(x)
    with observe(model):
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("columns", [None, 32])
def test_elements_are_counted_as_their_format_sees_them(columns):
    """Under a scale rule x / scale is what saturates, and has the exponents that a format's window is drawn for."""
    block = (None if columns is None else 1, columns)
    quantizer = Quantizer(format=get_format("e4m3"), scaling=Scaling(block=block))
    net = convert(nn.Linear(64, 8, bias=False), recipe=LinearConfig(fprop=Gemm(a=quantizer)))
    x = 1e-9 * torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    x[3, 5] = 1e-6
    with observe(net) as stats, torch.no_grad():
        net(x)
    blocks = x.double().reshape((1, -1) if columns is None else (-1, columns))
    scaled = blocks * (448 / blocks.abs().amax(1, keepdim=True))
    seen = stats[""]["x_f"]
    found = {i + LOWEST_EXPONENT: n for i, n in enumerate(seen.scaled_exponents.tolist()) if n}
    assert found == Counter((torch.frexp(scaled)[1] - 1).flatten().tolist())
    assert seen.saturated == 0 and max(found) == 8 and seen.exponents.sum() == x.numel()
    assert not torch.equal(seen.exponents, seen.scaled_exponents)


def test_the_table_and_the_record(model):
    with torch.no_grad():
        model[2].weight.fill_(1e-4)
    with observe(model) as stats:
        model(torch.randn(5, 6)).sum().backward()
    lines = [line.split() for line in str(stats).splitlines()]
    assert lines[0] == ["layer", "operand", "format", "underflow", "%", "saturation", "%", "SQNR", "dB", "amax"]
    assert ["2", "w_f", "e2m1", "100.00", "0.000", "0.0", "0.0001"] in lines
    assert ["2", "g_w", "e5m2", "0.00", "0.000", "lossless", "1"] in lines
    assert stats._repr_html_().count("<tr>") == len(lines) - 1 and repr(stats) == str(stats)
    assert str(observe(model)) == "nothing is observed yet; call the model inside `with observe(model) as stats:`"
    record = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert (record["steps"], record["every"]) == (1, 1)
    w, g = record["layers"]["2"]["w_f"], record["layers"]["2"]["g_w"]
    assert w["underflow_percent"] == 100.0 and g["sqnr_db"] is None
    assert w["exponents"] == w["scaled_exponents"] == {str(math.floor(math.log2(1e-4))): 32}
    assert w["window"] == [0.5, 6.0]
    figures = ("elements", "underflow_percent", "saturation_percent", "sqnr_db", "amax", "nonfinite")
    assert record["history"]["1"]["2"]["w_f"] == {name: w[name] for name in figures}


def test_parts_of_attention_are_layers():
    attention = convert(nn.MultiheadAttention(8, 2), format="e4m3")
    with observe(attention) as stats:
        x = torch.randn(3, 8)
        attention(x, x, x)
    assert list(stats.layers) == ["in_proj", "out_proj"]


def test_high_precision_layers_are_lossless():
    from fmtsim.gemm.layers.config import LinearConfig

    layer = convert(nn.Linear(4, 4), recipe=LinearConfig())
    with observe(layer) as stats:
        layer(torch.randn(2, 4))
    assert stats[""]["x_f"].sqnr_db == math.inf and "(model)" in str(stats)


def test_a_product_on_a_unit_has_a_row_with_the_bits_that_each_loss_costs():
    torch.manual_seed(0)
    unit = fmtsim.Datapath(block=16, fraction_bits=14, accumulator="e8m5", rounding="stochastic")
    net, x = nn.Linear(64, 32, bias=False).bfloat16(), torch.randn(16, 64).bfloat16()
    convert(net, format="bf16", target=unit, generator=3)
    before = torch.get_rng_state()
    with observe(net) as seen:
        y = net(x)
    assert torch.equal(before, torch.get_rng_state())
    revert(net)
    assert torch.equal(convert(net, format="bf16", target=unit, generator=3)(x), y)
    # the slow way: products by themselves against float64, one loss taken away after another
    exact = x.double() @ net.weight.detach().double().T
    wide = fmtsim.mm(x, net.weight.detach().T, target=replace(unit, accumulator=get_format("fp64")), generator=0)
    noise, wider = ((product.double() - exact).square().sum().item() for product in (y.detach(), wide))
    row = seen[""]["fprop"]
    assert row.noise == pytest.approx(noise) and row.format.startswith("on blocks of 16; F=14")
    assert row.bits_lost["accumulator"] == pytest.approx(0.5 * math.log2(noise / wider)) and noise > 4 * wider
    assert abs(row.bits_lost["output"]) < 0.2 > abs(row.bits_lost["alignment"])
    assert "bits lost in" in str(seen) and Observation.of_state(seen.state_dict())[""]["fprop"].without == row.without
    assert set(row.to_dict()["bits_lost"]) == {"alignment", "accumulator", "output"}
    assert "bits_lost" not in seen[""]["x_f"].to_dict()
    # few bits below the largest exponent: alignment, and nothing in an output of float32
    net = convert(nn.Linear(64, 8, bias=False), format="bf16", target=fmtsim.Datapath(block=16, fraction_bits=3))
    with observe(net) as seen:
        net(x.float())
    lost = seen[""]["fprop"].bits_lost
    assert set(lost) == {"alignment", "accumulator"} and lost["alignment"] > 8 and abs(lost["accumulator"]) < 0.1


@pytest.mark.parametrize("saturate", [False, True])
def test_results_that_an_integer_accumulator_changed_count_as_saturated(saturate):
    torch.manual_seed(0)
    unit = fmtsim.IntegerDatapath(accumulator_bits=16, saturate=saturate)
    net, x = nn.Linear(96, 32, bias=False), torch.randn(32, 96)
    convert(net, format="int8", target=unit)
    with observe(net) as seen:
        net(x)
    row = seen[""]["fprop"]
    x_int, w_int = (
        fmtsim.encode(t, "int8_tensor_amax").codes.view(torch.int8).long() for t in (x, net.weight.detach())
    )
    partial = torch.stack([x_int[:, k : k + 32] @ w_int[:, k : k + 32].T for k in (0, 32, 64)]).cumsum(0)
    partial = partial if saturate else partial[-1:]  # a sum that wraps on the way comes back
    assert row.saturated == (partial != partial.clamp(-(1 << 15), (1 << 15) - 1)).any(0).sum() > 100
    after = "saturate every 32 products" if saturate else "wrap"
    assert row.format == f"on int16 accumulators that {after}" and set(row.bits_lost) == {"accumulator"}


def test_results_that_overflow_are_saturated_and_their_accumulator_is_to_blame():
    net = nn.Linear(16, 2, bias=False)
    nn.init.ones_(net.weight)
    convert(net, format="bf16", target=fmtsim.Datapath(block=16, fraction_bits=4, accumulator="fp16"))
    with observe(net) as seen:
        net(torch.tensor([[1.0] * 16, [9000.0] * 16, [math.inf] * 16]))
    row = seen[""]["fprop"]
    assert (row.saturated, row.sqnr_db) == (2, -math.inf)
    assert row.bits_lost == {"alignment": 0.0, "accumulator": math.inf}


def test_products_of_attention_on_a_unit_have_rows():
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(0)
    unit = fmtsim.Datapath(block=4, fraction_bits=4)
    net = fmtsim.nn.convert_attention(Attention(), AttentionConfig().on(unit))
    q, k, v = (torch.randn(2, 3, 40, 16).requires_grad_() for _ in range(3))
    with observe(net) as seen:
        net(q, k, v).square().sum().backward()
    rows = seen[""]
    products = "s", "o", "dv", "dp", "dq", "dk"
    assert [*rows] == [*"qkvp", *products]
    # the slow way: a head's product after another
    exact = q.double() @ k.double().mT
    y = [fmtsim.mm(a, b.T, target=unit).double() for a, b in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)]
    noise = (torch.stack(y).view_as(exact) - exact).square().sum().item()
    assert rows["s"].noise == pytest.approx(noise) and rows["s"].elements == 2 * 3 * 40 * 40
    assert rows["s"].format.startswith("on blocks of 4; F=4") and rows["s"].bits_lost["alignment"] > 2
    assert all(abs(row.bits_lost["accumulator"]) < 0.1 for row in map(rows.get, products))


@pytest.mark.parametrize("recipe", ["te_nvfp4", "te_current"])  # random signs and bits; a gradient from one read
def test_a_simulated_run_is_observed_as_any_other(recipe):
    rows, noise, results, counts = [], [], [], []
    for simulated, observed in ((False, True), (True, True), (True, False)):
        torch.manual_seed(1)
        net = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16(), recipe, generator=3)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        run, seen = (fmtsim.simulate(target="h200") if simulated else nullcontext()), nullcontext()
        with run, observe(net) if observed else seen as seen:
            y = net(x)
            y.float().square().mean().backward()
        if observed:
            rows.append({layer: [*operands] for layer, operands in seen.layers.items()})
            noise.append([seen["0"][name].noise for name in ("x_f", "w_f")])
        results.append([y, *(p.grad for p in net.parameters())])
        counts.append(run.exact if simulated else None)
    assert rows[0] == rows[1] and noise[0] == pytest.approx(noise[1]) and min(noise[0]) > 0
    # the simulation counts the model's operators alone, and looking changes no bit of it
    assert counts[1] == counts[2] and all(map(torch.equal, results[1], results[2]))


def test_nested_and_empty_observations_are_errors(model):
    with observe(model):
        with pytest.raises(ArgumentError, match=r"layer '0' is observed already"), observe(model):
            pass
        assert model[0].emulation.observer is not None
    refused(r"no converted layer in Sequential; call fmtsim.convert first", observe, revert(model))


class Own(nn.Sequential):
    """A module with code of its own, which torch compiles."""

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize("converted", [True, False])
def test_compiled_models_run_eagerly_while_they_are_observed(model, converted):
    what = {} if converted else {"format": "e2m1"}
    model, x = Own(*(model if converted else revert(model))), torch.randn(5, 6)

    def run(net):
        net(x).sum().backward()

    with observe(model, **what) as plain:
        run(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run(compiled)
    for watched in (model, compiled):
        with observe(watched, **what) as stats:
            run(compiled)
        assert stats.to_dict() == plain.to_dict()
    model.compile(backend="eager", fullgraph=True)
    run(model)
    with observe(model, **what) as stats:
        run(model)
        with observe(nn.Linear(3, 3), format="e4m3"):
            pass  # one inside another leaves the outer one's compilers off
        run(model)
    assert stats.steps == 2 and stats.history[2] == plain.history[1]
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_calls_in_which_nothing_is_seen_are_an_error_in_the_end(model):
    model.forward = lambda x: x
    with (
        pytest.raises(ArgumentError, match=r"saw 1 calls of the model and no product in them: it was compiled inside"),
        observe(model),
    ):
        model(torch.ones(2, 6))
    assert model[0].emulation.observer is None


def test_an_error_inside_removes_the_observers(model):
    with pytest.raises(ZeroDivisionError), observe(model):
        1 / 0  # noqa: B018
    assert model[0].emulation.observer is None


def test_a_tensor_and_a_format(tmp_path):
    """Every figure against its definition in float64; a NaN and an infinity enter none of them."""
    x = torch.tensor([1.0, 0.3, 1e-5, -500.0, 0.0, math.nan, math.inf], dtype=torch.float64)
    q = fmtsim.quantize(x, "e4m3")
    seen, a, b = fmtsim.observe(x, "e4m3"), x[:5], q[:5]
    assert (seen.elements, seen.nonzero, seen.underflowed, seen.saturated, seen.nonfinite) == (7, 4, 1, 1, 2)
    assert (seen.underflow_percent, seen.saturation_percent, seen.amax) == (25.0, 20.0, 500.0)
    assert seen.mse == pytest.approx(((a - b) ** 2).mean().item(), rel=1e-14)
    assert seen.sqnr_db == pytest.approx(10 * math.log10((a @ a / ((a - b) @ (a - b))).item()), rel=1e-14)
    assert seen.cosine == pytest.approx(torch.nn.functional.cosine_similarity(a, b, dim=0).item(), rel=1e-14)
    assert "became zero" in str(seen) and "SQNR" in str(seen) and seen.to_dict()["cosine"] == seen.cosine
    seen.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("format", ["nvfp4", "e4m3_tensor_amax", "int8_channel_amax", "mxfp4"])
def test_a_bfloat16_tensor_has_the_error_of_the_scaled_values(format):
    """Not of these rounded to bfloat16."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = fmtsim.quantize(x.float(), format).double()
    assert fmtsim.observe(x, format).mse == pytest.approx(((x.double() - q) ** 2).mean().item(), rel=1e-12)


def test_no_cosine_of_zeros():
    assert math.isnan(fmtsim.observe(torch.zeros(4), "e4m3").cosine) and fmtsim.observe(torch.ones(0), "e4m3").mse != 0


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "uint4_g32_zp", "e4m3_128x128", "e4m3"])
def test_a_tensor_whose_last_block_is_not_whole(format):
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    found, q = observe(x, format), fmtsim.quantize(x, format, pad=True)
    assert found.elements == 300 and found.sqnr_db == pytest.approx(fmtsim.compare(q, x).sqnr_db, rel=1e-12)
    assert found.underflowed == int(((q == 0) & (x != 0)).sum())


@pytest.mark.parametrize("options", [{}, {"format": "e4m3", "every": 2}, {"recipe": "te_current"}])
def test_a_tensor_takes_a_format_alone(options):
    refused(
        "observe of a tensor takes a format and nothing else; call observe", fmtsim.observe, torch.ones(4), **options
    )


def test_elements_of_a_quantiser_saturate_under_its_scales():
    """With twice the format's largest as top, elements beyond 464, which rounds to no value, are counted."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 1000
    seen = observe(x, Quantizer(format="e4m3", scaling=Scaling(block=(1, 32), margin=-1)))
    blocks = x.unflatten(1, (-1, 32))
    scaled = blocks / (blocks.abs().amax(2, keepdim=True) / 896)
    assert seen.saturated == int((scaled.abs() > 464).sum()) > 1000 and "amax of 1x32" in seen.format
    assert observe(x[:, :90], Quantizer(format="e4m3", scaling=Scaling(block=(1, 32)))).saturated == 0
