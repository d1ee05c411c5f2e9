"""fmtsim.ptq: bits of static and dynamic products, every kind of layer, reports, saving, and what goes wrong."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.errors import ArgumentError
from fmtsim.ptq import Calibration, PtqRecipe, QuantisedCache, Smooth, get_ptq_recipe
from fmtsim.ptq.catalogue import operand
from fmtsim.ptq.progress import Bars, Lines, Quiet, make_progress
from fmtsim.recipes import Rule
from fmtsim.scaling.scale import History, Scaling
from tests.ptq.oracle import cast


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).requires_grad_(False)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


ANYWHERE = dataclasses.replace(get_ptq_recipe("int8_smooth"), smooth=Smooth(after="any"), name="anywhere")
DATA = [normal(20, 16, seed=s) for s in (1, 2)]


@pytest.mark.parametrize(("recipe", "kind"), [("e4m3_static", "e4m3"), ("int8_static", "int8"), ("nemotron", "e4m3")])
def test_static_products_have_the_oracle_s_operands(recipe, kind):
    torch.manual_seed(7)
    model = nn.Linear(16, 8, bias=False).requires_grad_(False)
    w = model.weight.numpy().copy()
    fmtsim.ptq(model, recipe, DATA)
    axis = None if recipe == "nemotron" else 1
    q = cast(w, kind, np.abs(w).max(axis, keepdims=True))
    assert same_bits(model.weight, torch.from_numpy(q))
    x = normal(5, 16, seed=3) * 2  # beyond the calibrated range: saturates
    amax = max(float(batch.abs().max()) for batch in DATA)
    quantised = torch.from_numpy(cast(x.numpy(), kind, np.float32(amax)))
    assert quantised.abs().max() < x.abs().max()
    y, off = model(x), quantised @ model.weight.mT
    assert (y - off).norm() < 1e-6 * off.norm()
    wrong = torch.from_numpy(cast(x.numpy(), kind, np.float32(amax * 1.01)))  # a planted error
    assert (y - wrong @ model.weight.mT).norm() > 1e-3 * off.norm()


def test_dynamic_products_follow_the_tensor_at_hand():
    model = nn.Linear(16, 8, bias=False).requires_grad_(False)
    fmtsim.ptq(model, "int8_token", DATA)
    x = normal(5, 16, seed=3) * torch.tensor([1.0, 100, 1e-3, 7, 1])[:, None]
    quantised = torch.from_numpy(cast(x.numpy(), "int8", x.abs().amax(1, keepdim=True).numpy()))
    y = quantised @ model.weight.mT
    assert ((model(x) - y).norm(dim=1) <= 1e-6 * y.norm(dim=1)).all()


def test_a_static_scale_stays():
    model = mlp().requires_grad_(True)
    fmtsim.ptq(model, "int8_static", DATA)
    first = model(DATA[0]).detach()
    model(DATA[0] * 1000).sum().backward()
    assert same_bits(model(DATA[0]).detach(), first)
    assert fmtsim.recipe_state(model)["layers"]["0"]["x_f"]["factor"] == 127 / torch.cat(DATA).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes_keep_them(dtype):
    model, data = mlp().to(dtype), [x.to(dtype) for x in DATA]
    exact = model(data[0])
    for recipe in ("int8_static", "int4_gptq", "mxfp4"):
        quantised = fmtsim.ptq(copy.deepcopy(model), recipe, data)
        y = quantised(data[0])
        assert y.dtype == quantised[0].weight.dtype == dtype
        assert 0 < (y - exact).norm() < (0.4 if "4" in recipe else 0.03) * exact.norm()


def test_a_fixed_scale_is_one_until_calibration_sets_it():
    x = normal(4, 16) * 1000
    model = nn.Linear(16, 8, bias=False).requires_grad_(False)
    y = x.clamp(-448, 448).to(torch.float8_e4m3fn).float() @ model.weight.mT
    fmtsim.convert(model, get_ptq_recipe("e4m3_static").inference)
    assert torch.allclose(model(x), y, rtol=1e-5, atol=1e-3)
    with pytest.raises(fmtsim.FormatError, match=r"fixed=True with immediate=1 is not allowed; choose immediate=0"):
        History(fixed=True, immediate=1)


def test_state_is_restored_into_a_fresh_model():
    model, fresh = mlp(), mlp()
    fmtsim.ptq(model, "e4m3_static", DATA)
    fmtsim.convert(fresh, get_ptq_recipe("e4m3_static").inference)
    fresh.load_state_dict(model.state_dict())
    fmtsim.load_recipe_state(fresh, fmtsim.recipe_state(model))
    x = normal(4, 16, seed=9)
    assert same_bits(fresh(x), model(x))
    assert same_bits(pickle.loads(pickle.dumps(model))(x), model(x))
    assert same_bits(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("recipe", [ANYWHERE, "int4_gptq", "e4m3_token", "nemotron"])
def test_a_saved_model_comes_back_bit_for_bit(recipe, tmp_path):
    model, fresh = mlp(), nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    model[2].bias = fresh[2].bias = None
    chosen = dataclasses.replace(get_ptq_recipe(recipe), bias_correction=True)
    fmtsim.ptq(model, chosen, DATA, filter_fn=lambda module, name: recipe != "nemotron" or name == "2")
    torch.save(fmtsim.ptq_state(model), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt")
    x = normal(4, 16, seed=9)
    assert same_bits(fmtsim.load_ptq(fresh, state)(x), model(x))
    assert list(fresh.state_dict()) == list(model.state_dict())
    small = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 7))
    with pytest.raises(ArgumentError, match=r"(?s)the state does not fit Sequential: .*size mismatch"):
        fmtsim.load_ptq(small, state)
    assert type(small[2]) is nn.Linear and not small[2]._forward_pre_hooks


def test_states_that_are_none():
    model = fmtsim.ptq(mlp(), "int8_static", DATA)
    with pytest.raises(ArgumentError, match=r"load_ptq takes what fmtsim.ptq_state returned, not list"):
        fmtsim.load_ptq(mlp(), [])
    with pytest.raises(ArgumentError, match=r"the model has no layer '0'; build the one that was quantised"):
        fmtsim.load_ptq(nn.Linear(16, 24), fmtsim.ptq_state(model))
    with pytest.raises(ArgumentError, match=r"has no report of ptq"):
        fmtsim.ptq_state(mlp())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(2).mT
        return self.head(self.attention(x, x, x)[0].mean(1))


@pytest.mark.parametrize("recipe", ["int8_static", "e4m3_token", "nvfp4_gptq", "int4_gptq", "int8_mse"])
def test_convolutions_groups_and_attention(recipe):
    torch.manual_seed(1)
    model = Mixed().eval().requires_grad_(False)
    data = [normal(3, 4, 5, 5, seed=s) for s in (4, 5)]
    exact = model(data[0])
    fmtsim.ptq(model, recipe, data)
    report = fmtsim.ptq_report(model)
    names = {row.name for row in report.rows}
    assert names == {"conv", "conv group 1", "attention.in_proj", "attention.out_proj", "head"}
    off = float((model(data[0]) - exact).norm() / exact.norm())
    assert 0 < off < (0.25 if "4_" in recipe else 0.05)
    assert all(row.output_db > 10 for row in report.rows)


def test_attention_called_otherwise_takes_the_widest_scale():
    model = nn.MultiheadAttention(8, 2).requires_grad_(False)
    x, z = normal(6, 2, 8, seed=1), normal(4, 2, 8, seed=2)
    fmtsim.ptq(model, "int8_static", [(x, x, x)])
    exact = model(x, z, z)[0]
    fmtsim.revert(model)
    assert (exact - model(x, z, z)[0]).norm() < 0.05 * exact.norm()


def test_weights_that_two_layers_share_are_rounded_once():
    model = mlp()
    model[2] = nn.Linear(24, 16).requires_grad_(False)
    model.append(nn.ReLU())
    model.append(nn.Linear(16, 24).requires_grad_(False))
    model[4].weight = model[0].weight
    fmtsim.ptq(model, "int4_gptq", [normal(20, 16)])
    assert model[4].weight is model[0].weight
    assert [row.name for row in fmtsim.ptq_report(model).rows] == ["0", "2"]
    with pytest.raises(ArgumentError, match=r"SmoothQuant: 0 and 4 share a weight"):
        fmtsim.ptq(fmtsim.revert(model), ANYWHERE, [normal(20, 16)])


def test_the_report_measures_what_happens():
    model = nn.Linear(16, 8).requires_grad_(False)
    exact = copy.deepcopy(model)
    recipe = PtqRecipe(
        name="p", x=operand("int8", Scaling()), w=operand("int8", Scaling()),
        calibration=Calibration(rule="percentile", percentile=90),
    )  # fmt: skip
    fmtsim.ptq(model, recipe, DATA)
    row = fmtsim.ptq_report(model)["(model)"]
    x = torch.cat(DATA)
    place = -(-90 * x.numel() // 100)
    top = x.abs().flatten().sort().values[place - 1]
    assert row.x_limit == pytest.approx(float(top), rel=1e-6) and row.x_scale == pytest.approx(float(top) / 127)
    assert row.clipped_percent == pytest.approx(100 * float((x.abs() > top).double().mean()))
    y = (exact(x) - exact.bias).double()
    noise = (exact(x) - model(x)).double().square().sum()
    assert row.output_db == pytest.approx(10 * float(torch.log10(y.square().sum() / noise)), abs=0.01)
    assert "1 weights by p" in str(fmtsim.ptq_report(model))
    with pytest.raises(ArgumentError, match=r"no layer 'fc'; it has \(model\)"):
        fmtsim.ptq_report(model)["fc"]
    with pytest.raises(ArgumentError, match=r"Linear has no report of ptq"):
        fmtsim.ptq_report(exact)


def test_bias_correction_removes_the_mean_error():
    recipe = PtqRecipe(name="b", x=operand("int4", Scaling()), w=operand("int4", Scaling()), calibration=Calibration(),
                       bias_correction=True)  # fmt: skip
    for bias in (True, False):
        exact = nn.Linear(16, 8, bias=bias).requires_grad_(False)
        model, x = copy.deepcopy(exact), torch.cat(DATA) + 1
        fmtsim.ptq(model, recipe, [x])
        assert (model(x) - exact(x)).mean(0).abs().max() < 1e-6
    plain = PtqRecipe(name="b", x=recipe.x, w=recipe.w, calibration=Calibration())
    fmtsim.ptq(exact, plain, [x])
    assert (model(x) - exact(x)).mean(0).abs().max() > 1e-3


def test_batch_norm_is_measured_anew():
    torch.manual_seed(1)
    model, data = Mixed().eval().requires_grad_(False), [normal(3, 4, 5, 5, seed=s) for s in (4, 5)]
    fmtsim.ptq(model, PtqRecipe(name="n", w=operand("int4", Scaling()), batch_norm=True), data)
    with torch.no_grad():
        y = [model.conv(x) for x in data]
    assert torch.allclose(model.norm.running_mean, torch.stack([t.mean((0, 2, 3)) for t in y]).mean(0), atol=1e-6)
    assert model.norm.momentum == 0.1 and not model.norm.training


BAD = [
    ("nonsense", DATA, r"recipe='nonsense' is unknown to ptq"),
    ("int8_statik", DATA, r"did you mean int8_static"),
    ("int8_static", [], r"calibration data is empty; pass at least one batch"),
    ("int8_static", [torch.empty(0, 16)], r"a tensor without elements in a batch"),
    ("int8_static", DATA[0], r"calibration data is one tensor \(20, 16\); pass an iterable of batches"),
    ("int8_static", 3, r"calibration data is int; pass an iterable of batches"),
    (
        "int8_smooth",
        [normal(4, 15)],
        r"calibration batch 0 \(torch.float32 \(4, 15\)\) does not run through Sequential",
    ),
    ("int8_static", [DATA[0], DATA[0] * float("nan")], r"layer '0'|calibration batch 1 .* NaN or Inf"),
    ("int4_gptq", [{"x": DATA[0]}], r"calibration batch 0 \(x: torch.float32 \(20, 16\)\) does not run"),
]


@pytest.mark.parametrize(("recipe", "data", "message"), BAD)
def test_bad_input_leaves_the_model_as_it_was(recipe, data, message):
    model = mlp().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=message):
        fmtsim.ptq(model, recipe, data)
    assert type(model[0]) is nn.Linear and model.training and not model[0]._forward_pre_hooks
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], t) for name, t in before.items())


def test_labels_and_arrays_get_a_hint():
    labelled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA[0], torch.arange(20)), batch_size=4)
    with pytest.raises(ArgumentError, match=r"several arguments: \[x for x, label in data\] leaves labels out"):
        fmtsim.ptq(mlp(), "int8_static", labelled)
    model = fmtsim.ptq(mlp(), "int8_static", (x for x, label in labelled))
    assert len(fmtsim.ptq_report(model).rows) == 2
    with pytest.raises(
        ArgumentError, match=r"\(ndarray\) does not run .*; a batch is a tensor, a tuple of arguments or"
    ):
        fmtsim.ptq(mlp(), "int8_static", [DATA[0].numpy()])

    class Fussy(nn.Linear):
        def forward(self, x):
            raise KeyError("mask")

    with pytest.raises(ArgumentError, match=r"does not run through Sequential: 'mask'"):
        fmtsim.ptq(nn.Sequential(nn.Linear(16, 4), Fussy(4, 4)), "int8_static", DATA)


def broken(where):
    model = mlp()
    if where == "nan":
        model[2].weight.data[3, 4] = torch.nan
    elif where == "lazy":
        model = nn.Sequential(nn.Linear(16, 4), nn.LazyLinear(4))
    elif where == "inside":
        model[2] = torch.compile(model[2], backend="eager")
    elif where == "in place":
        model.compile(backend="eager")
    return {"meta": lambda: model.to("meta"), "compiled": lambda: torch.compile(model, backend="eager"),
            "dict": lambda: {}}.get(where, lambda: model)()  # fmt: skip


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nan", r"parameter '2.weight' holds NaN or Inf; load sound weights first"),
        ("lazy", r"parameter '1.weight' has no shape yet; run one batch through the model first"),
        ("meta", r"parameter '0.weight' is on the meta device; load the trained weights first"),
        ("compiled", r"the model is compiled, which hides its layers; quantise it first, then torch.compile it"),
        ("in place", r"the model is compiled"),
        ("inside", r"module '2' is compiled"),
        ("dict", r"ptq takes a torch.nn.Module, not dict"),
    ],
)
def test_models_that_are_not_ready(where, message):
    for use in (lambda m: fmtsim.ptq(m, "int8_static", DATA), lambda m: fmtsim.search(m, DATA, bits=6)):
        with pytest.raises(ArgumentError, match=message):
            use(broken(where))


def test_the_report_says_what_stayed_and_what_came_along():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(20, 16), nn.Embedding(9, 16)
            self.up, self.back = nn.Linear(16, 16), nn.ConvTranspose1d(16, 16, 1)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, i):
            x = self.words(i) + self.places(torch.arange(len(i)))
            return self.head(self.back(self.up(x).mT).mT)

    model = Tied().requires_grad_(False)
    fmtsim.ptq(model, PtqRecipe(name="w", w=operand("int8", Scaling()), rules=(Rule(name="up"),)), [torch.arange(9)])
    report = fmtsim.ptq_report(model)
    assert [row.name for row in report.rows] == ["head"] and report.tied == (("words", "head"),)
    assert dict(report.left) == {
        "places": "no emulated form of Embedding",
        "up": "the recipe leaves it in high precision",
        "back": "no emulated form of ConvTranspose1d",
    }
    text = str(report)
    assert "left in high precision: places (no emulated form of Embedding)" in text
    assert "words shares the weight of head, which is quantised" in text
    assert "<td style='text-align:left'>head</td>" in report._repr_html_()
    attention = fmtsim.ptq(nn.MultiheadAttention(8, 2), "int8_token", [(normal(3, 2, 8),) * 3])
    assert fmtsim.ptq_report(attention).left == ()


def test_the_report_draws_layers(tmp_path):
    pytest.importorskip("matplotlib")
    reports = [fmtsim.ptq_report(fmtsim.ptq(mlp(), name, DATA)) for name in ("int8_static", "e4m3_static")]
    figure = reports[0].plot(tmp_path / "layers.png", other=reports[1])
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0", "2"]
    lengths = [[bar.get_width() for bar in group] for group in panel.containers]
    assert lengths == [[row.output_db for row in report.rows] for report in reports]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    silent = fmtsim.ptq_report(fmtsim.ptq(mlp(), "int8_static", [torch.zeros(4, 16)]))
    assert "no signal" in [text.get_text() for text in silent.plot().axes[0].texts]
    other = fmtsim.ptq_report(fmtsim.ptq(nn.Linear(16, 8), "int8_static", DATA))
    with pytest.raises(ArgumentError, match=r"reports of the same layers; quantise copies of one model"):
        reports[0].plot(other=other)


def test_a_layer_that_calibration_never_ran_is_named():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x, other=False):
            return self.idle(x) if other else self.used(x)

    with pytest.raises(ArgumentError, match=r"calibration never ran 'idle'; pass calibration data that reaches it"):
        fmtsim.ptq(Branch(), "int8_static", DATA)
    model = fmtsim.ptq(Branch(), "int8_static", DATA, filter_fn=lambda module, name: name == "used")
    assert type(model.idle) is nn.Linear
    rule = Rule(name="idle")
    fmtsim.ptq(Branch(), PtqRecipe(name="r", w=operand("int8", Scaling()), rules=(rule,)), DATA)


def test_nothing_to_quantise():
    with pytest.raises(ArgumentError, match=r"convert found nothing to convert in ReLU"):
        fmtsim.ptq(nn.ReLU(), "int8_static", DATA)
    with pytest.raises(ArgumentError, match=r"fits no layer of the model"):
        fmtsim.ptq(mlp(), PtqRecipe(name="r", w=operand("int8", Scaling()), rules=(Rule(name="absent"),)), DATA)
    with pytest.raises(ArgumentError, match=r"ptq takes a torch.nn.Module, not int"):
        fmtsim.ptq(3, "int8_static", DATA)


def test_progress_lines(capsys):
    fmtsim.ptq(mlp(), ANYWHERE, DATA, progress=True)
    shown = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["ptq: channels 2/2", "ptq: calibration 2/2", "ptq: weights 2/2", "ptq: measurement 2/2"]
    fmtsim.ptq(mlp(), "int8_static", DATA)
    assert capsys.readouterr().err == ""


def test_smooth_keeps_the_function_and_helps_an_outlier():
    model, x = mlp(), torch.cat(DATA)
    x[:, 3] *= 60
    exact, plain = model(x), copy.deepcopy(model)
    fmtsim.ptq(model, ANYWHERE, [x])
    fmtsim.ptq(plain, "int8_static", [x])
    off, off_plain = (float((m(x) - exact).norm() / exact.norm()) for m in (model, plain))
    assert off < off_plain / 2
    assert torch.equal(model[0].weight, fmtsim.revert(model)[0].weight)
    assert float((model(x) - exact).norm() / exact.norm()) < 0.02  # hook and weights belong together
    high = mlp()
    fmtsim.ptq(high, PtqRecipe(name="h", w=operand("fp32"), smooth=Smooth(alpha=0.7, after="any")), [x])
    assert torch.allclose(high(x), exact, rtol=1e-4, atol=1e-5)


def test_only_layers_behind_a_normalisation_are_smoothed():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4)
    )
    fmtsim.ptq(model.requires_grad_(False), "int8_smooth", DATA)
    rows = fmtsim.ptq_report(model).rows
    assert [row.name for row in rows if "SmoothQuant" in row.methods] == ["3"]
    assert [name for name, m in model.named_modules() if hasattr(m, "ptq_divisor")] == ["3"]


def test_a_cache_is_the_same_token_by_token():
    k, v = normal(2, 3, 7, 32, seed=1), normal(2, 3, 7, 16, seed=2) * 3
    for fmt, kind in (("int8_channel", "int8"), ("mxfp4", None), ("e4m3", "e4m3")):
        scales = {"key_scale": 0.01, "value_scale": 0.02} if fmt == "e4m3" else {}
        whole, steps = QuantisedCache(fmt, **scales), QuantisedCache(fmt, **scales)
        whole.append(k, v)
        for i in range(7):
            steps.append(k[..., i : i + 1, :], v[..., i : i + 1, :])
        assert len(steps) == 7 and same_bits(whole.keys(), steps.keys()) and same_bits(whole.values(), steps.values())
        assert (whole.keys() - k).abs().max() < 0.1 * k.abs().max() * (4 if fmt == "mxfp4" else 1)
        if kind == "e4m3":
            top = np.float32(448)
            q = cast(k.numpy() / np.float32(0.01), "e4m3", top) * np.float32(0.01)
            assert same_bits(whole.keys(), torch.from_numpy(q))
            assert whole.nbytes == k.numel() + v.numel()
    with pytest.raises(ArgumentError, match=r"nvfp4 shares scales among tokens"):
        QuantisedCache("nvfp4")
    with pytest.raises(ArgumentError, match=r"the cache is empty"):
        QuantisedCache("e4m3").keys()
    with pytest.raises(ArgumentError, match=r"are not of the same tokens"):
        whole.append(k, v[..., :3, :])
    with pytest.raises(ArgumentError, match=r"keys .* do not continue"):
        whole.append(k[:1], v[:1])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bars_on_a_terminal():
    pytest.importorskip("rich")
    stream = Terminal()
    with make_progress(None, stream) as show:
        assert type(show) is Bars
        show.stage("weights", 3)
        show.step(3)
    assert "weights" in stream.getvalue() and "3/3" in stream.getvalue()
    assert type(make_progress(False, stream)) is Quiet and type(make_progress(None, io.StringIO())) is Quiet
    assert type(make_progress(True, io.StringIO())) is Lines
