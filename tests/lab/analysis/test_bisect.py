# SPDX-License-Identifier: Apache-2.0
"""bisect names what was planted: in forward and backward, in products, casts, weights and code between modules."""

import copy
import dataclasses
import itertools
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.gemm.layers import layer as layers
from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS
from fmtsim.lab.analysis.bisect import Bisection, _with_values, bisect
from fmtsim.lab.analysis.bisect_compiled import FusedDifference
from fmtsim.lab.analysis.trace import CALL, Trace
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError
from tests.support.models import Block
from tests.support.refusals import refused

UNIT = "hopper.wgmma"


def plain():
    torch.manual_seed(0)
    return nn.Sequential(Block(64), Block(64), nn.Linear(64, 32)).bfloat16()


def emulated(**options):
    return fmtsim.convert(plain(), **({"format": "e4m3", "target": UNIT} | options))


def stochastic():
    config = fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic", target=UNIT)
    return fmtsim.convert(plain(), recipe=config)


BATCH = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def loss(y):
    return y.float().square().mean()


def changed(model, layer, product, **machine):
    """Give one product of a layer another machine."""

    def change(_, config):
        return dataclasses.replace(config, **{product: dataclasses.replace(getattr(config, product), **machine)})

    module = model.get_submodule(layer)
    module.emulation = module.emulation.changed(change)
    return model


LAYERS = ("0.up", "0.down", "1.up", "1.down", "2")


def direction(product):
    return "forward" if product == "fprop" else "backward"


@pytest.fixture(scope="module")
def traces():
    """Traces of runs without anything planted."""
    made = {"plain": plain(), "emulated": emulated(), "stochastic": stochastic()}
    torch.manual_seed(0)  # each trace leaves torch's generator as it was
    return {name: fmtsim.trace(model, BATCH, loss) for name, model in made.items()}


def named(found, name):
    """The operation is the planted one, and its inputs agree."""
    assert found.kind == "operation" and str(found.a) == str(found.b) == name
    inputs = [[(x.name, x.hash) for x in one.inputs] for one in (found.a, found.b)]
    assert inputs[0] == inputs[1] and found.a.outputs != found.b.outputs
    assert 0 < found.different <= found.compared and not found.equal


def check(found, name):
    """Likewise, and the values are two that differ."""
    named(found, name)
    assert found.comparison is not None and found.comparison.mismatches and not found.note


TRIES = list(itertools.product(LAYERS, PRODUCTS))


@pytest.mark.parametrize(("layer", "product"), TRIES)
def test_another_accumulator(traces, layer, product):
    other = changed(emulated(), layer, product, target="ada.mma")
    found = fmtsim.bisect(traces["emulated"], fmtsim.trace(other, BATCH, loss))
    named(found, f"{layer} {direction(product)}: {product}")
    units = [dict(one.facts)["unit"].split(":")[0] for one in (found.a, found.b)]
    assert units == [UNIT, "ada.mma"]
    assert "unit, a           hopper.wgmma: " in str(found) and "unit, b           ada.mma: " in str(found)


@pytest.mark.parametrize(("layer", "product"), TRIES)
def test_another_split_of_k(traces, layer, product):
    k = {"fprop": 128 if layer.endswith("down") else 64, "wgrad": 64, "dgrad": 32 if layer == "2" else 64}[product]
    other = changed(emulated(), layer, product, plan=GemmPlan(split=2, k_tile=k // 4, source="planted"))
    found = fmtsim.bisect(traces["emulated"], fmtsim.trace(other, BATCH, loss))
    named(found, f"{layer} {direction(product)}: {product}")
    assert " in 2 parts " in dict(found.b.facts)["order"] and " parts " not in dict(found.a.facts)["order"]


@pytest.mark.parametrize("product", PRODUCTS)
def test_runs_show_the_values(product):
    other = changed(emulated(), "0.down", product, target="ada.mma")
    check(fmtsim.bisect(emulated(), other, BATCH, loss), f"0.down {direction(product)}: {product}")


@pytest.mark.parametrize("place", range(20))
def test_the_last_bit_of_one_weight(traces, place):
    generator = torch.Generator().manual_seed(place)
    kind, other = ("plain", plain()) if place % 2 else ("emulated", emulated())
    names = [name for name, p in other.named_parameters() if p.dim() == 2]
    name = names[int(torch.randint(len(names), (), generator=generator))]
    codes = other.get_parameter(name).data.view(-1).view(torch.int16)
    codes[int(torch.randint(len(codes), (), generator=generator))] ^= 1
    found = fmtsim.bisect(traces[kind], fmtsim.trace(other, BATCH, loss))
    assert found.kind == "parameter" and f"{found.a.layer}.{found.tensor}" == name
    assert "weight: the runs began with another parameter" in str(found)


def test_runs_show_the_weight():
    for first, other in ((plain(), plain()), (emulated(), emulated())):
        other[1].up.weight.data.view(torch.int16)[3, 4] ^= 1
        found = fmtsim.bisect((first, BATCH, loss), (other, BATCH, loss))
        assert (found.comparison.mismatches, found.comparison.max_ulp) == (1, 1)
        assert found.comparison.first.index == (3, 4)


@pytest.mark.parametrize("place", range(20))
def test_one_kernel_that_rounds_otherwise(monkeypatch, traces, place):
    """Stochastic rounding with equal keys: one of the 30 operands of a step loses the last bit of one element."""
    real, calls, planted = layers.quantize_operand, itertools.count(), 30 * place // 20

    def cast(*args, **options):
        made = real(*args, **options)
        if next(calls) != planted:
            return made
        codes = made.elements.clone()
        codes.view(torch.uint8)[place % 7, place] ^= 1
        return made._replace(elements=codes)

    monkeypatch.setattr(layers, "quantize_operand", cast)
    operands = [one for one in traces["stochastic"].operations if one.operation in OPERANDS]
    made = stochastic()
    torch.manual_seed(0)
    other = fmtsim.trace(made, BATCH, loss)
    found = fmtsim.bisect(traces["stochastic"], other)
    named(found, str(operands[planted]))
    assert found.tensor == "output" and len(operands) == 30
    keys = [[text for fact, text in one.facts if fact == "random key"] for one in (found.a, found.b)]
    assert keys[0] == keys[1] and len(keys[0]) == ("stochastic" in dict(found.a.facts)["quantizer"])


@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpointing(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for block in self[:2]:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self[2](x)

    x = BATCH.clone().requires_grad_()
    found = fmtsim.bisect((emulated(), x, loss), (Checkpointed(*emulated()), x, loss))
    assert found.equal and found.alone[0] <= 2 and found.alone[1] >= 10 and found.compared > 80
    planted = Checkpointed(*changed(emulated(), "1.up", "wgrad", target="ada.mma"))
    check(fmtsim.bisect((emulated(), x, loss), (planted, x, loss)), "1.up backward: wgrad")


def test_random_keys_that_differ_are_said(traces):
    made = stochastic()
    torch.manual_seed(1)
    found = fmtsim.bisect(traces["stochastic"], fmtsim.trace(made, BATCH, loss))
    named(found, "0.up forward: x_f")
    assert "output: its inputs are equal, its random key is not" in str(found)


def test_the_arguments_that_a_trace_stores_are_not_told():
    other = plain()
    other[1].factor = 1.01
    found = fmtsim.bisect(*(fmtsim.trace(model, BATCH, loss, level="aten", tensors=True) for model in (plain(), other)))
    assert str(found.a) == "1 forward: aten::mul" and CALL in dict(found.a.facts)
    assert CALL not in str(found) and "overload" not in str(found)


def test_code_between_modules(traces):
    other = plain()
    other[1].factor = 1.01
    check(fmtsim.bisect((plain(), BATCH, loss), (other, BATCH, loss)), "1 forward: aten::mul")
    found = fmtsim.bisect(traces["plain"], fmtsim.trace(other, BATCH, loss))
    assert str(found.a) == "1 forward: Block" and not found.inside_modules
    assert "its inputs are equal, its output is not, in code of its own" in str(found)
    assert "last equal        1.down forward: Linear" in str(found)


def test_another_class_of_a_module(traces):
    other = plain()
    other[0].act = nn.ReLU()
    found = fmtsim.bisect(traces["plain"], fmtsim.trace(other, BATCH, loss))
    assert (str(found.a), str(found.b)) == ("0.act forward: GELU", "0.act forward: ReLU")
    assert found.kind == "operation" and "in b              0.act forward: ReLU" in str(found)


def test_another_loss(traces):
    found = fmtsim.bisect(traces["plain"], fmtsim.trace(plain(), BATCH, lambda y: 1.5 * loss(y)))
    assert found.kind == "code" and found.tensor == "gradient of output" and found.a.direction == "backward"
    assert "gradient of output: made by code outside of these operations, before this one" in str(found)
    assert found.losses[1] == pytest.approx(1.5 * found.losses[0])


def test_another_recipe_and_an_unconverted_model():
    found = fmtsim.bisect((emulated(), BATCH, loss), (emulated(format="e5m2"), BATCH, loss))
    check_name = "0.up forward: x_f"
    assert str(found.a) == check_name and found.kind == "operation"
    assert re.search(r"quantizer, a +e4m3_tensor_amax\n", str(found)) and re.search(
        r"quantizer, b +e5m2_tensor_amax\n", str(found)
    )
    found = fmtsim.bisect((plain(), BATCH, loss), (emulated(), BATCH, loss))
    check(found, "0.up forward: Linear")
    assert found.alone[0] == 0 < found.alone[1] and " in b alone" in str(found)


def test_equal_runs_and_what_is_planted_in_the_batch():
    found = fmtsim.bisect((emulated(), BATCH, loss), (emulated(), BATCH, loss))
    assert found.equal and found.different == 0 and found.losses[0] == found.losses[1]
    assert str(found).startswith("result    no bit differs\ncompared  81 operations are in both runs")
    found = fmtsim.bisect((plain(), BATCH, loss), (plain(), -BATCH, loss))
    assert found.kind == "input" and "the runs were given other inputs" in str(found)


def test_batches_of_different_size_compare_the_members_that_both_have():
    runs = (plain(), BATCH, loss), (plain(), BATCH[:1], loss)
    found = fmtsim.bisect(*runs)
    assert found.equal and found.losses is None and found.compared == 12
    two = fmtsim.bisect((plain(), BATCH[:2], loss), (plain(), BATCH, loss))
    assert two.equal
    found = fmtsim.bisect((emulated(), BATCH[:1], loss), (emulated(), BATCH, loss))  # a scale of the whole tensor
    assert found.a.operation == "x_f" and found.tensor == "output, scale"
    rows = emulated(format="mxfp8_e4m3", target=None)
    found = fmtsim.bisect((rows, BATCH[:1], loss), (copy.deepcopy(rows), BATCH, loss))
    assert found.equal  # scales of blocks along the rows
    other = BATCH.clone()
    other[0, 3, 5] += 1
    found = fmtsim.bisect((plain(), BATCH[:1], loss), (plain(), other, loss))
    assert found.kind == "input" and not found.equal
    other = BATCH.clone()
    other[1:] += 1
    assert fmtsim.bisect((plain(), BATCH[:1], loss), (plain(), other, loss)).equal


def test_a_later_member_of_a_batch_that_differs_is_seen():
    other = BATCH.clone()
    other[1, 2, 3] += 1
    assert fmtsim.bisect((plain(), BATCH[:2], loss), (plain(), other, loss)).kind == "input"
    assert fmtsim.bisect((plain(), BATCH[:1], loss), (plain(), other, loss)).equal


class Odd(nn.Module):
    """Hand a child zeros of a dtype, and rows that do not belong to the batch's members."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.zeros, self.rows, self.dtype = nn.Identity(), nn.Identity(), dtype

    def forward(self, x):
        self.zeros(torch.zeros(4, 4, dtype=self.dtype))
        self.rows(torch.full((len(x) * (6 // len(x)), 4), float(len(x))))
        return x


def test_dtypes_count_and_rows_of_no_member_do_not():
    x = torch.ones(4, 4)
    found = fmtsim.bisect(fmtsim.trace(Odd(), x), fmtsim.trace(Odd(torch.float64), x))
    assert found.a.layer == "zeros" and not found.equal
    assert fmtsim.bisect((Odd(), x[:2]), (Odd(), x)).equal


def test_saved_traces(tmp_path):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    models = emulated(), changed(emulated(), "1.up", "wgrad", target="ada.mma")
    for path, model in zip(paths, models, strict=True):
        fmtsim.trace(model, BATCH, loss).save(path)
    found = fmtsim.bisect(*map(str, paths))
    assert str(found.a) == "1.up backward: wgrad" and found.comparison is None
    texts = (f"trace {run} again with tensors=[{found.a.index}] to see the values" for run in "ab")
    assert found.note == "; ".join(texts)
    for path, model in zip(paths, models, strict=True):
        fmtsim.trace(model, BATCH, loss, tensors=[found.a.index]).save(path)
    live = fmtsim.bisect(*((model, BATCH, loss) for model in models))
    check(fmtsim.bisect(*paths), "1.up backward: wgrad")
    assert fmtsim.bisect(*paths).comparison == live.comparison
    assert live.gradients == (1, len(list(plain().parameters()))) and live.worst[0] == "1.up.weight"
    assert live.to_dict()["a"]["layer"] == "1.up" and live._repr_html_().startswith("<table>")


def test_a_run_that_does_not_repeat_itself():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            Counts.calls += 1
            return super().forward(x) + Counts.calls

    model = Counts(4, 2)
    found = fmtsim.bisect((model, torch.ones(1, 4)), (model, torch.ones(1, 4)))
    assert str(found.a) == "(model) forward: Counts"
    assert found.note.startswith("a run gives other bits when it is repeated")


def test_runs_that_have_nothing_to_do_with_each_other():
    first = fmtsim.trace(plain(), BATCH, loss)
    with pytest.raises(
        ArgumentError, match="run_a has 2.weight 32x64 bfloat16 and run_b 2.weight 31x64 bfloat16; pass"
    ):
        fmtsim.bisect(first, (nn.Sequential(*list(plain())[:2], nn.Linear(64, 31)).bfloat16(), BATCH))
    with pytest.raises(
        ArgumentError, match="run_a has 2.weight 32x64 bfloat16 and run_b no further parameter; pass runs"
    ):
        fmtsim.bisect(first, (plain()[:2], BATCH))
    with pytest.raises(ArgumentError, match="run_a has 0.norm.weight 64 bfloat16 and run_b 0.norm.weight 64 float32"):
        fmtsim.bisect(first, (plain().float(), BATCH.float()))
    with pytest.raises(
        ArgumentError, match="inputs differ in shape: input of 0.norm forward: LayerNorm is 4x16x64 in run_a"
    ):
        fmtsim.bisect(first, (plain(), BATCH[:, :8], loss))
    with pytest.raises(ArgumentError, match="run_a was traced at level 'modules', run_b at 'aten'; trace both at one"):
        fmtsim.bisect(first, fmtsim.trace(plain(), BATCH, loss, level="aten"))
    longer = nn.Sequential(*plain(), nn.Identity())
    with pytest.raises(
        ArgumentError, match="different models: 3 forward: Identity is in run_b alone; pass runs of one"
    ):
        fmtsim.bisect(first, (longer, BATCH, loss))
    with pytest.raises(
        ArgumentError, match="different models: 3 forward: Identity is in run_a alone; pass runs of one"
    ):
        fmtsim.bisect((longer, BATCH, loss), first)
    refused(r"run_b is a model without a batch; call bisect\(model_a, model_b, batch\)", fmtsim.bisect, first, plain())
    refused(r"run_b=3 is not a run; pass a Trace, the path of one, \(model, batch\)", fmtsim.bisect, first, 3)


def test_assert_same_bits():
    fmtsim.testing.assert_same_bits(emulated(), emulated(), BATCH, loss)
    with pytest.raises(
        AssertionError, match="the models' bits differ\nfirst difference  1.down forward: fprop, operation"
    ):
        fmtsim.testing.assert_same_bits(
            emulated(), changed(emulated(), "1.down", "fprop", target="ada.mma"), BATCH, loss
        )


def test_the_level_of_operators_finds_products_too():
    runs = [fmtsim.trace(emulated(target=unit), BATCH, loss, level="aten") for unit in (UNIT, "ada.mma")]
    found = fmtsim.bisect(*runs)
    assert str(found.a) == "0.up forward: fmtsim::gemm" and isinstance(runs[0], Trace)
    assert "blocks of 16, " in dict(found.b.facts)["datapath"]


def test_values_of_other_dtypes_are_told_and_not_compared():
    found = Bisection(**dict.fromkeys((field.name for field in dataclasses.fields(Bisection) if field.init), None))
    told = _with_values(found, [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])
    assert told.note == "a has torch.float32, b torch.bfloat16" and told.comparison is None
    assert _with_values(found, [torch.ones(2), torch.zeros(3)]).comparison.mismatches == 2


class Chain(nn.Module):
    """Three roundings in bfloat16, of which fused code keeps the last alone."""

    def forward(self, x):
        y = torch.relu(x) * 1.7
        z = y * 0.3
        return {"z": z.tanh(), "y": -y}


class Softmax(nn.Module):
    """Compiled code has another exp."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return torch.softmax(self.dropout(x), -1)


def test_compiled_code_of_many_models_of_a_class_is_bisected():
    torch._dynamo.reset()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(5):  # three compilations each: beyond the 8 of torch._dynamo.config.recompile_limit
        model = Softmax()
        found = bisect(model, torch.compile(model), x)
        assert found.faithful and not found.random and (found.equal or found.rows)


def test_compiled_dropout_is_bisected_with_the_numbers_of_eager_code():
    torch._dynamo.reset()
    model, x = Softmax(0.5), torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = bisect(model, torch.compile(model), x)
    assert found.random and "draws other random numbers" in str(found) and "other code" not in str(found)
    assert not [row for row in found.rows if "rand" in row.operation or "gt" in row.operation]


class Counter(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.softmax(x * self.calls, -1)


def test_compiled_models_keep_their_buffers_in_a_bisection():
    torch._dynamo.reset()
    model, x = Counter(), torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = bisect(model, torch.compile(model), x)
    assert model.calls == 0 and found.faithful and not found.equal and found.rows


def test_results_of_an_operation_that_has_several_are_named_by_it():
    torch._dynamo.reset()
    model, x = nn.LayerNorm(64), torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = bisect(model, torch.compile(model), x)
    assert any("var_mean" in row.operation for row in found.rows) and "built-in" not in str(found)


def test_compiled_code_is_bisected_by_the_operations_of_its_graph():
    torch._dynamo.reset()
    model, x = Chain(), torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = bisect(model, torch.compile(model), x)
    # by hand: a product of the unrounded product
    y = torch.relu(x).float() * 1.7
    (row,) = [row for row in found.rows if row.rounding and row.operation.endswith("mul.Tensor")]
    assert row.different == int(((y * 0.3).bfloat16() != y.bfloat16() * 0.3).sum()) > 0
    assert (row.code, row.dtype, row.elements) == ("z = y * 0.3", "bfloat16", 64) and found.faithful
    assert not found.equal and "are not rounded" in str(found) and f"{row.different:,} of 64" in str(found)
    assert not [row for row in found.rows if row.code == "y = torch.relu(x) * 1.7"]
    relu = nn.ReLU()
    assert bisect(torch.compile(relu), relu, x).equal


class Erfs(nn.Module):
    def forward(self, x, y):
        return torch.erf(torch.erf(x) + y)


def test_compiled_operations_are_held_to_eager_ones_of_the_inputs_that_they_got():
    torch._dynamo.reset()
    generator, model = torch.Generator().manual_seed(0), Erfs()
    x, y = torch.randn(4096, generator=generator), torch.randn(4096, generator=generator)
    found = bisect(model, torch.compile(model), (x, y))
    # both functions are another one: the second has one input that differs, too
    names = [row.operation for row in found.rows]
    assert found.equal or names == ["erf: aten.erf.default", "erf_1: aten.erf.default"]


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x)


def test_nan_of_other_bits_are_named_in_compiled_code():
    torch._dynamo.reset()
    model = Root()
    found = bisect(model, torch.compile(model), -torch.ones(64))  # code for one element and for vectors differ in sign
    assert found.nan == found.different and all(row.nan == row.different for row in found.rows)
    assert found.equal or f"{found.nan} are NaN in both" in str(found)
    row = FusedDifference("sqrt", "", "float32", 34, 64, 32, False)
    assert row.why.endswith("another one; 32 are NaN in both")
    assert row._replace(nan=34).why == "both are NaN, with other bits" and "NaN" not in row._replace(nan=0).why


def test_a_compiled_model_is_bisected_beside_the_model_that_was_compiled():
    torch._dynamo.reset()
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    other = copy.deepcopy(model)
    for pair in ((model, torch.compile(other)), (torch.compile(other), model)):
        with pytest.raises(
            ArgumentError, match="given another Linear than the model beside it, with equal weights; com"
        ):
            bisect(*pair, x)
    nn.init.zeros_(other.bias)
    with pytest.raises(ArgumentError, match="with other weights: bias differs; compile that very model"):
        bisect(model, torch.compile(other), x)
    with pytest.raises(ArgumentError, match="with other weights: bias differs"):
        bisect(model, torch.compile(nn.Linear(8, 8, bias=False)), x)
    with pytest.raises(ArgumentError, match=r"fmtsim.bisect\(model, torch.compile\(model\), batch\) names"):
        bisect(torch.compile(model), torch.compile(model), x)
