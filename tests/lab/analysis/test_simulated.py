# SPDX-License-Identifier: Apache-2.0
"""Traces and bisections of models that ``simulate`` computes."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fmtsim
from fmtsim.lab.analysis.audit import _attention_heads, _follow, audit
from fmtsim.lab.analysis.fingerprint import Fingerprints
from fmtsim.lab.analysis.trace import CALL, Trace
from fmtsim.lab.cli.main import main
from fmtsim.support.errors import ArgumentError, DataError
from tests.support.refusals import refused

MODELS = """
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8)).bfloat16()
    return model, torch.randn(64, 64).bfloat16()
"""


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    namespace: dict = {}
    exec(MODELS, namespace)
    with torch.random.fork_rng():
        return namespace["build"]()


def test_recording_changes_and_counts_nothing():
    model, batch = model_and_batch()
    with fmtsim.simulate(strict=True) as plain:
        expected = model(batch)
        expected.sum().backward()
    model.zero_grad()
    with fmtsim.simulate(strict=True) as run, fmtsim.trace(model, tensors=True) as recording:
        y = model(batch)
        y.sum().backward()
    assert y.equal(expected)
    assert run.exact == plain.exact
    trace = recording.trace
    assert trace.device == "simulated h200"
    assert trace.tensors[trace.operations[-1].index]


def test_an_audit_does_not_judge_what_was_drawn():
    """A trace holds no seed: what dropout drew cannot be drawn again, whatever the generator's state is."""
    model = nn.Dropout(0.5)
    with torch.random.fork_rng(), fmtsim.simulate(), fmtsim.trace(model, level="aten", tensors=True) as run:
        torch.manual_seed(1)
        model(torch.ones(8, 8))
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            found = audit(run.trace, target="h200")
        assert not any(layer.different for layer in found.layers)
        assert "native_dropout" in [name for layer in found.layers for name in layer.unchecked]


def test_bisect_names_the_first_operator_that_the_gpu_computes_otherwise():
    model, batch = model_and_batch()
    plain = fmtsim.trace(model, batch, level="aten")
    with fmtsim.simulate(strict=True):
        gpu = fmtsim.trace(model, batch, level="aten")
        again = fmtsim.trace(model, batch, level="aten")
    assert fmtsim.bisect(gpu, again).equal
    found = fmtsim.bisect(gpu, plain)
    assert found.kind == "operation"
    assert found.a.operation in ("aten::addmm", "aten::native_layer_norm")


def test_trace_and_bisect_of_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "--model", "models.py:build", "--simulate", "h200", "--out", "gpu.safetensors"]) == 0
    text = capsys.readouterr().out
    assert "on simulated h200; wrote gpu.safetensors" in text.replace("\n", " ") or "simulated h200" in text
    assert "operators exact" in text
    assert main(["bisect", "gpu.safetensors", "models.py:build", "--simulate", "h200"]) == 0
    capsys.readouterr()
    status = main(["bisect", "gpu.safetensors", "models.py:build", "--json"])
    assert status == 1 and json.loads(capsys.readouterr().out)["kind"] == "operation"
    assert main(["trace", "--model", "models.py:build", "--simulate", "h20"]) == 2
    assert "--simulate 'h20' is unknown; did you mean 'h200'" in capsys.readouterr().err


def test_training_of_the_command_line(tmp_path, capsys):
    sizes = {"steps": 1, "layers": 1, "width": 32, "heads": 1, "context": 16, "batch-size": 2, "checkpoint-every": 0}
    words = ["--quiet", *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    (tmp_path / "text").write_text("a text of some length, to be read again and again. " * 200)
    words = ["train", *words, "--data", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    assert main([*words, "--simulate", "h200"]) == 0
    told = capsys.readouterr().out
    assert "operators exact" in told and "where bits were lost in 1 observed step" in told
    assert main([*words, "--simulate", "h200", "--check", "native"]) == 2
    assert "--simulate computes on the CPU; leave --check and --device out" in capsys.readouterr().err


def test_assert_same_bits_of_tensors():
    x = torch.tensor([1.0, 0.0, float("nan")])
    fmtsim.testing.assert_same_bits(x, x.clone())
    with pytest.raises(
        AssertionError, match=r"the tensors' bits differ(.|\n)*\[1\]: actual 0x00000000 = 0.0, expected 0x8"
    ):
        fmtsim.testing.assert_same_bits(x, torch.tensor([1.0, -0.0, float("nan")]))
    other = x.clone()
    other.view(torch.int32)[2] += 1  # another NaN
    refused("different           1", fmtsim.testing.assert_same_bits, x, other, error=AssertionError)


def recorded(batch: torch.Tensor, target: str = "h200") -> Trace:
    model, _ = model_and_batch()
    with fmtsim.simulate(target=target):
        return fmtsim.trace(model, batch, level="aten", tensors=True)


def test_an_audit_of_what_simulate_computed_agrees(tmp_path):
    trace = recorded(model_and_batch()[1])
    trace.save(tmp_path / "t.safetensors")
    result = audit(Trace.load(tmp_path / "t.safetensors"), rows=8)
    assert result.equal and result.target == "h200"
    assert "torch 2.11.0+cu130, whose bits were recorded" in str(result)  # this host's torch is another
    versions = (("torch", "2.11.0+cu130"),)
    assert "whose bits were recorded" not in str(dataclasses.replace(result, versions=versions))
    assert {layer.layer for layer in result.layers if layer.operators} >= {"0", "1", "2", "3"}
    assert sum(layer.operators for layer in result.layers) >= 10


def test_an_executor_audits_the_same():
    trace = recorded(model_and_batch()[1])
    one = next(one for one in trace.operations if one.operation == "aten::addmm")
    trace.tensors[one.index][one.outputs[0].name].view(torch.int16)[3:] ^= 1
    here = audit(trace, rows=2, seed=5)
    with ThreadPoolExecutor(2) as pool:
        assert audit(trace, rows=2, seed=5, executor=pool) == here and not here.equal


def test_an_audit_draws_rows_by_seed_and_operator():
    trace = recorded(model_and_batch()[1])
    one = next(one for one in trace.operations if one.operation == "aten::addmm")
    place = trace.operations.index(one)
    y = trace.tensors[one.index][one.outputs[0].name]
    y.view(torch.int16)[::2] ^= 1
    prints = Fingerprints()  # only a row that is drawn shows the error
    prints.batch = trace.batch
    at, _ = prints.add(y)
    bits = dataclasses.replace(one.outputs[0], hash=prints.finish()[at].hash)
    operations = list(trace.operations)
    operations[place] = dataclasses.replace(one, outputs=(bits,))
    forged = dataclasses.replace(trace, operations=tuple(operations))
    forged.tensors.update(trace.tensors)
    alone = dataclasses.replace(forged, operations=(operations[place],))
    alone.tensors.update(trace.tensors)
    counts = [
        [sum(x.different for x in audit(t, rows=1, seed=seed).layers) for t in (forged, alone)] for seed in range(12)
    ]
    assert all(whole == part for whole, part in counts) and len({whole > 0 for whole, _ in counts}) == 2
    assert audit(forged, rows=1).broken[0].endswith(f"its argument 0 is not what operation {one.index} wrote")


def test_an_audit_sees_one_bit():
    trace = recorded(model_and_batch()[1])
    for name in ("aten::addmm", "aten::native_layer_norm", "aten::gelu", "aten::mm"):
        one = next(one for one in trace.operations if one.operation == name)
        x = trace.tensors[one.index][one.outputs[0].name].view(torch.int16)
        x.view(-1)[5] ^= 1
        result = audit(trace)
        x.view(-1)[5] ^= 1
        (bad,) = (layer for layer in result.layers if layer.different)
        assert (bad.layer, bad.direction, bad.first) == (one.layer, one.direction, name[6:])


def test_an_audit_takes_tensors_without_elements():
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((x, x[:, :0].tanh()), 1).tanh()

    with fmtsim.simulate():
        trace = fmtsim.trace(Empty(), torch.ones(4, 8, requires_grad=True), level="aten", tensors=True)
    result = audit(trace)
    assert result.equal and sum(layer.operators for layer in result.layers) >= 3


def test_an_audit_sees_what_this_cpu_computed():
    model, batch = model_and_batch()
    plain = fmtsim.trace(model, batch, level="aten", tensors=True)
    result = audit(plain, target="h200", rows=64)
    assert not result.equal and any(layer.first for layer in result.layers)


def test_an_audit_sees_rows_of_another_batch(tmp_path, capsys):
    # 32 rows have K = 3072 in two parts, 256 rows in one chain
    torch.manual_seed(0)
    layer = nn.Linear(3072, 768, bias=False).bfloat16()
    x = torch.randn(256, 3072).bfloat16()
    with fmtsim.simulate(), torch.no_grad():
        with fmtsim.trace(layer, level="aten", tensors=True) as whole:
            layer(x)
        with fmtsim.trace(layer, level="aten", tensors=True) as part:
            layer(x[:32])
    trace, other = whole.trace, part.trace
    (one,) = (one for one in trace.operations if one.operation == "aten::mm")
    assert audit(trace, rows=256).equal and audit(trace, rows=8).equal and audit(other).equal
    y = trace.tensors[one.index]["output"]
    y[:32] = other.tensors[one.index]["output"]
    prints = Fingerprints()  # a forger writes a hash that fits
    prints.batch = trace.batch
    place, _ = prints.add(y)
    bits = dataclasses.replace(one.outputs[0], hash=prints.finish()[place].hash)
    operations = [dataclasses.replace(o, outputs=(bits,)) if o is one else o for o in trace.operations]
    forged = dataclasses.replace(trace, operations=tuple(operations))
    forged.tensors.update(trace.tensors)
    assert not audit(forged, rows=256).equal
    forged.save(tmp_path / "forged.safetensors")
    assert main(["audit", str(tmp_path / "forged.safetensors"), "--rows", "256", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False
    assert main(["audit", str(tmp_path / "none.safetensors")]) == 2


def gpu_call(operation: str, args: list, kwargs: dict, outputs: list) -> tuple[str, list, dict, list]:
    """Return the host's operator of attention as a GPU's trace has it."""
    kwargs = dict(kwargs)
    mask = kwargs.pop("attn_mask", None)
    if "backward" not in operation:
        q, k, v, dropout, causal = args if len(args) == 5 else (*args, 0.0, False)
        rest = [q, k, v, mask, True, dropout, causal, False]
        return "_scaled_dot_product_cudnn_attention", rest, kwargs, [outputs[0], outputs[1][..., None]]
    g, q, k, v, output, logsumexp, dropout, causal = args
    nothing = torch.empty(0)
    rest = [g, q, k, v, output, logsumexp[..., None], nothing, nothing, mask, nothing, nothing, 64, 64, dropout, causal]
    return "_scaled_dot_product_cudnn_attention_backward", rest, kwargs, outputs


@pytest.mark.parametrize(
    ("cudnn", "masked"),
    [(False, False), (True, True), *(pytest.param(c, not c, marks=pytest.mark.slow) for c in (0, 1))],
)
def test_heads_of_attention(cudnn, masked):
    q, k, v = (torch.randn(2, heads, 64, 32).bfloat16().requires_grad_() for heads in (4, 2, 2))
    mask = torch.randn(2, 1, 64, 64).bfloat16() if masked else None
    calls = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            if "_scaled_dot_product_" in str(func):
                calls.append((func.overloadpacket.__name__, list(args), kwargs or {}, list(y)))
            return y

    with fmtsim.simulate(strict=True), Log():
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, scale=0.3, enable_gqa=True)
        y.backward(torch.ones_like(y))
    assert len(calls) == 2
    for call in calls:
        name, args, kwargs, outputs = gpu_call(*call) if cudnn else call
        generator = torch.Generator().manual_seed(0)
        parts = list(_attention_heads("_backward" in name, args, kwargs, outputs, generator))
        assert len(parts) == 2  # of four pairs of batch and head of keys, each with two heads of queries
        for arguments, options, results in parts:
            with fmtsim.simulate(strict=True) as run:
                part = getattr(torch.ops.aten, name)(*arguments, **options)
            assert run.exact[name] == 1
            assert len(results) == len(outputs) and all(a.equal(b) for a, b in zip(part, results, strict=False))


def test_an_audit_refuses_what_it_cannot_read():
    model, batch = model_and_batch()
    with pytest.raises(ArgumentError, match="holds no operators' arguments; record it with fmtsim trace --level aten"):
        audit(fmtsim.trace(model, batch))
    plain = fmtsim.trace(model, batch, level="aten", tensors=True)
    refused("the trace is of 'cpu', which is no target; pass target='h200' or 'h100'", audit, plain)
    refused("rows=0 is not possible; choose 1 or more", audit, plain, rows=0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda call: "", "JSONDecodeError"), (lambda call: call.replace("argument 0", "argument 9"), "KeyError"),
        (lambda call: '{"overload": "", "args": [], "kwargs": {}}', "IndexError"),
    ],
)  # fmt: skip
def test_an_audit_names_the_operator_whose_call_is_damaged(damage, said):
    with fmtsim.simulate():
        trace = fmtsim.trace(nn.Linear(8, 8), torch.ones(4, 8), level="aten", tensors=True)
    place, one = next((i, one) for i, one in enumerate(trace.operations) if one.operation == "aten::addmm")
    facts = tuple((heading, damage(text) if heading == CALL else text) for heading, text in one.facts)
    operations = list(trace.operations)
    operations[place] = dataclasses.replace(one, facts=facts)
    damaged = dataclasses.replace(trace, operations=tuple(operations))
    damaged.tensors.update(trace.tensors)
    with pytest.raises(DataError, match=rf"operation {one.index} of the trace, aten::addmm, .*\({said}.*; trace again"):
        audit(damaged, target="h200")


class Memory(nn.Module):
    """Operators in place, views, a cache that is written by parts, batch_norm's statistics, shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(20, 16), nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.register_buffer("cache", torch.zeros(2, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number to differentiate."""
        h = self.table(x)
        self.cache[:, :4] = h.detach()[:, :4]
        self.cache[:, 4:].add_(1)
        y = torch.relu_(self.up(h + self.cache.mT.mT))
        q, k = self.norm(y.mT).mT.chunk(2, -1)
        y = torch.cat([q * k, k.flip(-1)], -1)
        return (y[..., :16] @ self.table.weight.t()).square().mean() + y.expand(3, *y.shape).sum()


def steps() -> Trace:
    with torch.random.fork_rng(), fmtsim.simulate():
        torch.manual_seed(0)
        model, x = Memory(), torch.arange(16).view(2, 8)
        with fmtsim.trace(model, level="aten", tensors=True) as run:
            for optimizer in (torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD(model.parameters())):
                for _ in range(2):
                    model(x).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return run.trace


def changed(trace: Trace, operations: list, tensors: dict | None = None, numbered: bool = False) -> Trace:
    """Return a trace of other operations; ``numbered`` gives these their places as indices."""
    places = {one.index: place if numbered else one.index for place, one in enumerate(operations)}
    operations = [dataclasses.replace(one, index=places[one.index]) for one in operations]
    other = dataclasses.replace(trace, operations=tuple(operations))
    other.tensors.update({places[i]: x for i, x in (tensors or trace.tensors).items() if i in places})
    return other


def test_an_audit_follows_memory_through_operators_in_place_and_views(tmp_path):
    trace = steps()
    trace.save(tmp_path / "steps.safetensors")
    for _ in range(2):  # what it computes anew leaves the trace as it was
        result = audit(trace, target="h200")
        assert result.equal and result.links > 300 and "tensors that operators read were written" in str(result)
    assert audit(Trace.load(tmp_path / "steps.safetensors"), target="h200") == result


@pytest.mark.parametrize("numbered", [False, True])
def test_an_audit_names_an_operator_that_is_missing_or_exchanged(numbered):
    trace = steps()
    every = list(trace.operations)
    called = [place for place, one in enumerate(every) if CALL in dict(one.facts)]
    for place in called[3::23]:
        cut = _follow(changed(trace, every[:place] + every[place + 1 :], numbered=numbered))[1]
        assert "recorded operations are in the trace" in cut[0]
        if not numbered:
            assert (
                cut[1].startswith(f"operation {place + 1}, ") and f"operation {place} does not stand before" in cut[1]
            )
        other = called[called.index(place) + 1]
        swapped = every.copy()
        swapped[place], swapped[other] = every[other], every[place]
        broken = _follow(changed(trace, swapped, numbered=numbered))[1]
        assert broken and (
            numbered or broken[0].startswith(f"operation {other}, {every[other]}: operation {other - 1} d")
        )
    assert "recorded operations are in the trace" in _follow(changed(trace, every[:-9]))[1][0]  # cut at the end


def test_an_audit_names_an_input_that_is_another_tensor():
    trace = recorded(model_and_batch()[1])
    one = next(one for one in trace.operations if one.operation == "aten::gelu")
    (bits,), y = one.inputs, trace.tensors[one.index]["argument 0"]
    other = y.flip(0)
    prints = Fingerprints()
    prints.batch = trace.batch
    at, _ = prints.add(other)
    hashed = dataclasses.replace(one, inputs=(dataclasses.replace(bits, hash=prints.finish()[at].hash),))
    tensors = trace.tensors | {one.index: trace.tensors[one.index] | {"argument 0": other}}
    operations = [hashed if x is one else x for x in trace.operations]
    found = audit(changed(trace, list(trace.operations), tensors))  # with the hash of what was read
    assert [x.first for x in found.layers if x.different] == ["gelu"] and not found.equal
    found = audit(changed(trace, operations, tensors))
    writer = next(x.index for x in trace.operations if x.operation == "aten::native_layer_norm")
    assert found.broken[0] == f"operation {one.index}, {one}: its argument 0 is not what operation {writer} wrote"


def test_an_audit_compares_versions():
    trace = recorded(model_and_batch()[1])
    versions = {"fmtsim": "0.0.1", "torch": "2.11.0+cu130", "cuda": "12.8", "cudnn": "91900"}
    other = dataclasses.replace(trace, versions=tuple(versions.items()), device="NVIDIA H100 80GB HBM3")
    other.tensors.update(trace.tensors)
    text = str(audit(other, target="h200"))
    assert "NVIDIA H100 80GB HBM3 is not h200, whose bits were recorded" in text
    assert f"fmtsim 0.0.1 may record operators otherwise than fmtsim {fmtsim.__version__}, which audits" in text
    assert "cuda 12.8 may order sums otherwise than cuda 13.0" in text and "cudnn 91900 may" not in text
