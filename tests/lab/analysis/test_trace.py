# SPDX-License-Identifier: Apache-2.0
"""Traces: every operation once, hashes of every bit, no bit changed, files that say what is wrong with them."""

import contextlib
import copy
import gc
import json
import math

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.cpu import weighted_sums
from fmtsim.formats.tensor_file import read_tensors, write_tensors
from fmtsim.gemm.layers.config import Gemm
from fmtsim.lab.analysis import fingerprint
from fmtsim.lab.analysis.fingerprint import Fingerprints
from fmtsim.lab.analysis.trace import Trace, read_call, stored_call
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, DataError
from tests.support.bits import assert_same_bits
from tests.support.models import Block
from tests.support.refusals import refused

CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool)


def printed(x, batch=0):
    prints = Fingerprints()
    prints.batch = batch
    prints.add(x)
    return prints.finish()[0]


def numbers(dtype, *shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50
    return x > 0 if dtype == torch.bool else x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (4, 3, 65), (2, 70001), (1, 70000)], ids=str)
def test_every_bit_counts(dtype, shape):
    x = numbers(dtype, *shape)
    found = {printed(x).hash}
    places = {0, x.numel() // 2, x.numel() - 1}
    bits = (0,) if dtype == torch.bool else (0, 8 * x.element_size() - 1)
    for place in places:
        for bit in bits:
            other = x.clone()
            codes = other.view(-1).view(CODES[x.element_size()])
            codes[place] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63)).to(codes.dtype)
            found.add(printed(other).hash)
    assert len(found) == 1 + len(places) * len(bits)


def test_signs_of_all_zeros_and_nan_payloads_count():
    zeros = torch.zeros(64, 256)
    nan = torch.tensor([[0x7FC00000, 0x7FC00001]], dtype=torch.int32).view(torch.float32)
    hashes = [printed(x).hash for x in (zeros, -zeros, zeros.bfloat16(), -zeros.bfloat16(), nan, nan.flip(1))]
    assert len(set(hashes)) == 5 and hashes[0] == hashes[2] == "0" * 16  # the shape and dtype stand beside the hash


def test_strides_do_not_count_and_order_does():
    x = numbers(torch.float32, 6, 300)
    assert printed(x) == printed(x.t().contiguous().t())
    assert printed(x).hash != printed(x.flip(0)).hash != printed(x.flip(1)).hash


def test_members_of_a_batch_have_the_hash_that_they_have_alone():
    x = numbers(torch.bfloat16, 4, 3, 33)
    parts = printed(x, 4).parts
    assert parts == tuple(printed(member).hash for member in x.split(1))
    assert printed(x[:2], 2).parts == parts[:2] and printed(x[:3], 2).parts == ()
    rows = numbers(torch.float32, 8, 512)
    assert printed(rows, 2).parts == printed(rows.view(2, 4, 512), 2).parts  # rows are long enough here


@pytest.mark.parametrize("dtype", (torch.int8, torch.int16, torch.int32))
def test_the_kernel_and_torch_sum_alike(dtype):
    words = torch.randint(-128, 128, (7, 150), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for factors in (torch.arange(64) * 0x123456789ABCDEF, torch.tensor([-1, 1 << 62])):
        assert torch.equal(weighted_sums(words, factors)[0], fingerprint.weighted_sums(words, factors))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("shape", [(), (3, 7), (4, 66), (5, 50001)], ids=str)
def test_the_largest_magnitude_is_counted_with_the_hash(dtype, shape):
    x = numbers(dtype, *shape)
    fmtsim.set_num_threads(3)
    try:
        for value in (None, -250.0, -math.inf, math.nan):
            for place in () if value is None else (0, x.numel() - 1):
                other = x.clone()
                other.view(-1)[place] = value
                amax = printed(other).amax
                assert amax == abs(value) or (math.isnan(value) and math.isnan(amax))
            assert printed(x).amax == float(x.abs().max())
    finally:
        fmtsim.set_num_threads(None)
    assert printed(x.new_zeros(0, 3)).amax is None and printed(x.view(-1) > 0).amax is None


def test_the_hash_is_defined():
    """Files are compared across machines and versions of this package."""
    assert printed(torch.arange(6.0).view(2, 3)).hash == "90bcd05ec9c7d7df"


def test_a_tensor_is_read_once_until_it_changes():
    prints, x = Fingerprints(), torch.ones(4, 512)
    places = [prints.add(each)[0] for each in (x, x.view(2, 2, 512), x.view(512, 4))]
    assert places == [0, 0, 1]
    x[0, 0] = 2
    assert prints.add(x)[0] == 2
    prints.forget()
    assert prints.add(x)[0] == 3


def model(**options):
    torch.manual_seed(0)
    made = nn.Sequential(Block(32), Block(32), nn.Linear(32, 16)).bfloat16()
    return fmtsim.convert(made, **options) if options else made


BATCH = numbers(torch.bfloat16, 4, 8, 32) / 50


def loss(y):
    return y.float().square().mean()


def test_a_trace_is_there_behind_the_with_and_shows_what_was_there_then():
    layer = nn.Linear(4, 4)
    with fmtsim.trace(layer) as run:
        run.loss = layer(torch.ones(2, 4)).sum()
        run.loss.backward()
        assert not gc.isenabled()
        with pytest.raises(AttributeError, match="once its `with` is left"):
            _ = run.trace
    assert gc.isenabled()
    loss, grad = run.loss.item(), layer.weight.grad.clone()
    with torch.no_grad():
        run.loss.mul_(2)
        layer.weight.grad.mul_(2)
    assert float.fromhex(run.trace.loss) == loss and run.trace is run.trace
    prints = Fingerprints()
    prints.add(grad)
    assert run.trace.gradients[0].hash == prints.finish()[0].hash


def test_a_trace_names_the_model_as_it_ran_whatever_becomes_of_it():
    layer = nn.Sequential(nn.Linear(4, 2, bias=False))
    with fmtsim.trace(layer) as run:
        layer(torch.ones(2, 4)).sum().backward()
    layer.to("meta", torch.bfloat16).append(nn.Linear(2, 2))
    assert run.trace.parameters == (("0.weight", "2x4", "float32"),) and run.trace.device == "cpu"


@pytest.mark.parametrize("level", ("modules", "aten"))
@pytest.mark.parametrize("options", ({}, {"format": "e4m3", "target": "hopper.wgmma"}), ids=("plain", "converted"))
def test_tracing_changes_no_bit(level, options):
    plain, traced = model(**options), model(**options)
    with fmtsim.trace(traced, level=level) as run:
        loss(traced(BATCH)).backward()
    loss(plain(BATCH)).backward()
    for p, q in zip(plain.parameters(), traced.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in traced.modules())
    hashes = {x.name: x.hash for x in run.trace.gradients}
    assert hashes == {name: printed(p.grad).hash for name, p in plain.named_parameters()}


def test_operations_stand_in_their_order():
    found = fmtsim.trace(model(format="e4m3", target="hopper.wgmma"), BATCH, loss)
    first = [(one.layer, one.operation) for one in found.operations[:9]]
    up, down = ([(f"0.{layer}", name) for name in ("x_f", "w_f", "fprop", "Linear")] for layer in ("up", "down"))
    assert first == [("0.norm", "LayerNorm"), *up, ("0.act", "GELU"), *down[:3]]
    backward = [one for one in found.operations if one.layer == "1.down" and one.direction == "backward"]
    names = [
        "g_d", "w_d", "dgrad", "g_w", "x_w", "wgrad", "gradient of weight", "gradient of bias", "gradient of input",
    ]  # fmt: skip
    assert sorted(one.operation for one in backward) == sorted(names)
    facts = dict(next(one for one in backward if one.operation == "wgrad").facts)
    assert facts["call"] == "scaled_mm: [32, 32] e4m3 x [32, 64] e4m3 -> bfloat16"
    assert facts["unit"].startswith("hopper.wgmma: ")
    assert found.batch == 4 and float.fromhex(found.loss) == loss(model(format="e4m3", target="hopper.wgmma")(BATCH))


def test_operands_of_quantised_attention_stand_between_modules_and_observe_sees_them_too():
    e4m3 = Quantizer(format=fmtsim.get_format("e4m3"))
    config = AttentionConfig(q=e4m3, k=e4m3, v=e4m3, p=e4m3, dv=Gemm(a=Quantizer(source="forward"), b=e4m3))
    made, x = fmtsim.nn.convert_attention(nn.MultiheadAttention(32, 2, batch_first=True), config), torch.randn(2, 8, 32)
    with fmtsim.trace(made) as run, fmtsim.observe(made) as stats:
        y = made(x, x, x, need_weights=False)[0]
        y.sum().backward(retain_graph=True)
    y.sum().backward()  # outside the with
    found = [(one.layer, one.direction, one.operation) for one in run.trace.operations if one.operation in stats[""]]
    assert found == [("", "forward", name) for name in "qkvp"] + [("", "backward", "dv.b")]
    assert stats[""]["dv.b"].elements == x.numel()
    facts = [dict(one.facts) for one in run.trace.operations if one.operation == "p"]
    assert facts == [{"quantizer": "e4m3"}]


def test_a_trace_leaves_the_model_and_the_generators_alone():
    made = model(recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = fmtsim.trace(made, BATCH, loss), fmtsim.trace(made, BATCH, loss)
    assert first == second and torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in made.parameters())
    keys = [text for one in first.operations for name, text in one.facts if name == "random key"]
    assert len(set(keys)) == len(keys) > 6  # each operand draws its own


def test_two_steps_in_one_trace_with_a_shared_layer():
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    made[1] = made[0]
    x = torch.ones(2, 8)
    with fmtsim.trace(made) as run:
        for _ in range(2):
            made(x).sum().backward()
    calls = [one.call for one in run.trace.operations if one.operation == "Linear"]
    assert calls == [0, 1, 2, 3] and len({(o.layer, o.operation, o.call) for o in run.trace.operations}) == len(
        run.trace.operations
    )


class Zoo(nn.Module):
    """Modules with sparse gradients, statistics, dropout, writes in place, several outputs, no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(16, 8, sparse=True), nn.BatchNorm1d(8)
        self.drop, self.relu, self.same = nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Identity()
        self.rnn, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.head.weight.requires_grad_(False)

    def forward(self, tokens, scale=None):
        x = self.same(self.table(tokens))
        x = self.relu(self.drop(self.norm(x.mT).mT))
        x, (state, _) = self.rnn(x)
        y, weights = self.attention(x, x, x)
        return {"y": self.head(y), "more": [state, weights], "none": None}


@pytest.mark.parametrize("level", ("modules", "aten"))
def test_modules_of_many_kinds(level):
    tokens = torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(0))
    plain, traced = Zoo(), Zoo()
    grads = []
    for made in (plain, traced):
        torch.manual_seed(1)
        run = fmtsim.trace(made, level=level)
        with run if made is traced else contextlib.nullcontext():
            y = made(tokens)
            (y["y"].sum() + y["more"][0].square().sum()).backward()
        grads.append([p.grad for p in made.parameters()])
    for p, q in zip(*grads, strict=True):
        assert (p is None) == (q is None)
        if p is not None:
            assert torch.equal(p.to_dense(), q.to_dense())
    layers = {one.layer for one in run.trace.operations if one.direction == "forward"}
    assert layers == {"", "table", "norm", "drop", "relu", "same", "rnn", "attention", "head"}
    made = Zoo()
    assert fmtsim.bisect((made, tokens), (made, tokens)).equal
    with torch.no_grad(), fmtsim.trace(made) as run:
        made(tokens)
    assert {one.direction for one in run.trace.operations} == {"forward"}


def test_views_have_their_own_shapes():
    made = nn.Sequential(nn.Linear(512, 512), nn.Unflatten(1, (2, 256)), nn.Flatten(0, 1), nn.Linear(256, 8))
    found = fmtsim.trace(made, torch.ones(4, 512), level="aten")
    forward = {one.operation: one for one in found.operations if one.direction == "forward" and one.layer}
    shapes = {name: (one.inputs[0].shape, one.outputs[0].shape) for name, one in forward.items()}
    assert shapes["Unflatten"] == ((4, 512), (4, 2, 256)) and shapes["Flatten"] == ((4, 2, 256), (8, 256))
    assert forward["Flatten"].inputs[0].hash == forward["Flatten"].outputs[0].hash  # which is read once


def test_operands_of_products_are_named_by_their_roles():
    layer, x = nn.Linear(32, 16).bfloat16(), torch.ones(16, 32, dtype=torch.bfloat16)
    for options, scales in (
        ({"format": "mxfp8_e4m3", "target": "blackwell.tcgen05.mxf8f6f4"}, ["scale_a", "scale_b"]),
        ({"format": "e4m3_tensor_amax", "target": "h200"}, ["row", "column"]),
    ):
        found = fmtsim.trace(fmtsim.convert(copy.deepcopy(layer), **options), x, level="aten")
        products = [one for one in found.operations if one.operation == "fmtsim::gemm"]
        names = [[bits.name for bits in one.inputs if bits.name != "bias"] for one in products]
        assert names == [["a", "b", *scales]] * 2 and "plan" in dict(products[0].facts)


def test_gradients_are_those_at_the_end():
    """Of a weight that is used twice, and of one that had a gradient before."""
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    made[1].weight = made[0].weight
    x = torch.linspace(-1, 1, 16).view(2, 8)
    for _ in range(2):
        with fmtsim.trace(made) as run:
            made(x).sum().backward()
        hashes = {x.name: x.hash for x in run.trace.gradients}
        assert hashes == {name: printed(p.grad).hash for name, p in made.named_parameters()}


def test_every_output_has_one_gradient_in_every_pass():
    """In a second pass through the same graph gradients come in again, twice as large: they replace the first."""
    made = nn.LSTM(8, 8, batch_first=True)
    with fmtsim.trace(nn.Sequential(made)) as run:
        y, (state, _) = made(torch.ones(2, 3, 8))
        for factor in (1.0, 2.0):
            (factor * (y.sum() + state.sum())).backward(retain_graph=True)
    came = [[(x.name, x.amax) for x in one.inputs] for one in run.trace.operations if one.direction == "backward"]
    once, twice = ([("gradient of output 0", size), ("gradient of output 1 0", size)] for size in (1.0, 2.0))
    assert came == [once] * 4 + [twice] * 4  # of its four parameters


def test_kept_tensors_and_files(tmp_path):
    found = fmtsim.trace(model(format="e4m3", target="hopper.wgmma"), BATCH, loss, tensors=[1, "2"])
    assert set(found.tensors) == {1, *(one.index for one in found.operations if one.layer == "2")}
    path = tmp_path / "a.safetensors"
    found.save(path)
    read = Trace.load(path)
    assert read == found and str(read) == str(found)
    for index, each in found.tensors.items():
        for name, x in each.items():
            assert_same_bits(read.tensors[index][name], x)
            (bits,) = (out for out in found.operations[index].outputs if out.name == name)
            assert printed(x, found.batch).hash == bits.hash
    everything = fmtsim.trace(nn.Linear(4, 2), torch.ones(1, 4), tensors=True)
    assert set(everything.tensors) == set(range(len(everything.operations)))


def test_files_that_are_no_traces(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {}, {"other": "1"})
    refused("a.safetensors is not a trace; write one with fmtsim trace", Trace.load, path, error=DataError)
    fmtsim.trace(nn.Linear(4, 2), torch.ones(1, 4)).save(path)
    _, metadata = read_tensors(path)
    content = json.loads(metadata["fmtsim_trace"])
    content["trace"]["version"] = 7
    write_tensors(path, {}, {"fmtsim_trace": json.dumps(content)})
    refused("has version 7 of traces, and this fmtsim reads version 1; trace again", Trace.load, path, error=DataError)
    for text in ("{", "[]", '{"trace": {}, "dtypes": 3}', '{"trace": {"version": 1, "operations": [3]}, "dtypes": {}}'):
        write_tensors(path, {}, {"fmtsim_trace": text})
        refused("is a damaged trace", Trace.load, path, error=DataError)


def test_the_first_nan_is_named():
    made = model()
    assert fmtsim.trace(made, BATCH, loss).first_nonfinite() is None
    with torch.no_grad():
        made[1].up.weight[3] = 0  # one product, so that no order of sums makes a NaN of two Infs
        made[1].up.weight[3, 0] = 3e38
    found = fmtsim.trace(made, 1e3 * BATCH, loss)
    assert str(found.first_nonfinite()) == "1.up forward: Linear"
    assert str(found).endswith("; the first Inf is made by 1.up forward: Linear")
    made = model()
    found = fmtsim.trace(made, BATCH, lambda y: (y.float() - y.detach().float()).square().sum().sqrt())
    assert str(found).endswith("; the first NaN is read by 2 backward: gradient of bias")


def test_what_is_refused():
    made = nn.Linear(4, 2)
    with pytest.raises(ArgumentError, match="the model, OptimizedModule, is compiled, and compiled code shows no oper"):
        fmtsim.trace(torch.compile(made, backend="eager"), torch.ones(1, 4))
    inner = nn.Sequential(copy.deepcopy(made))
    inner[0].compile(backend="eager")
    with pytest.raises(ArgumentError, match="layer '0' is compiled, .*trace the model that was given to torch.compile"):
        fmtsim.trace(inner, torch.ones(1, 4))
    refused("level='op' is unknown; choose 'modules' or 'aten'", fmtsim.trace, made, torch.ones(1, 4), level="op")
    with pytest.raises(ArgumentError, match="tensors='0' is not allowed; pass True, or a list of operations' indices"):
        fmtsim.trace(made, torch.ones(1, 4), tensors="0")
    refused("loss=3 is not a function of the model's output", fmtsim.trace, made, torch.ones(1, 4), 3)
    refused(r"trace got loss without a batch; pass trace\(model, batch, loss\), or set", fmtsim.trace, made, loss=loss)
    refused("trace takes a torch.nn.Module|trace got", fmtsim.trace, 3, torch.ones(1, 4))


def test_an_error_inside_leaves_no_hook():
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 2))
    with pytest.raises(RuntimeError, match="shapes"), fmtsim.trace(made) as run:
        made(torch.ones(1, 4))
    assert [one.operation for one in run.trace.operations] == ["Linear"]
    assert not any(module._forward_hooks for module in made.modules())


def test_the_hash_of_long_rows_is_defined():
    """Rows of more words than a sum takes: sums end where 65536 words do, and where rows do."""
    x = torch.arange(300_001, dtype=torch.int32)
    assert printed(x).hash == printed(x.view(1, -1)).hash == "f3472ddfeba316c4"
    assert printed(torch.arange(210_000, dtype=torch.int32).view(3, 70_000)).hash == "006732432c384ee8"


def test_a_stored_call_comes_back_with_its_strides():
    turned, spread, one = numbers(torch.float32, 3, 7).mT, numbers(torch.float32, 3).expand(2, 3), torch.tensor(2.0)
    tensors, facts = stored_call(torch.ops.aten.cat.default, ([turned, spread, one], -1), {"dtype": torch.int8})
    ((_, text),) = facts()
    overload, (read, dim), others = read_call(text, {name: x.contiguous() for name, x in tensors.items()})
    assert (overload, dim, others) == ("default", -1, {"dtype": torch.int8}) and read[0].stride() == (1, 7)
    for before, after in zip((turned, spread, one), read, strict=True):
        assert_same_bits(after, before)
