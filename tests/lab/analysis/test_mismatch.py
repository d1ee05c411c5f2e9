# SPDX-License-Identifier: Apache-2.0
"""Trainer against rollout: which products differ, what is estimated, and what both engines give in emulation."""

import json
import re
from dataclasses import fields, replace

import numpy
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.products.resolver import resolve, seen_calls
from fmtsim.gemm.targets.doubts import without_doubts
from fmtsim.gemm.targets.target import Target
from fmtsim.lab.analysis import mismatch
from fmtsim.lab.analysis.mismatch import explain_mismatch
from fmtsim.lab.cli.main import BAD_INPUT, main
from tests.support.refusals import refused
from tests.support.targets import hopper

SHAPE = (256, 1024, False)
TOKENS = {"trainer_tokens": 64, "prefill": 32}


def library(name, *splits):
    """A library that cuts K by M: pairs of the largest M and its number of parts; above, nothing is known."""
    kernels = {"tile64": {"k_tile": 64}, "rounded": {"k_tile": 64, "partial": "bf16"}}
    lowest, rules = 1, []
    for most, kernel, split in splits:
        when = {"operation": ["linear", "mm"], "m": {"min": lowest, "max": most}}
        rules.append({"when": when, "kernel": kernel, "split": split, "basis": "recorded", "reason": "a test"})
        lowest = most + 1
    return hopper(name, kernels, rules)


ONE = library("one", (99, "tile64", 1))
# 2 parts for M = 8 alone, four rounded ones for 9
CHANGES = library("changes", (7, "tile64", 1), (8, "tile64", 2), (9, "rounded", 4), (99, "tile64", 1))


class Decoder(nn.Module):
    """Residual blocks of two layers each, that need no attention; layers in Conv1D's layout where asked."""

    def __init__(self, blocks=2, width=128, words=48):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(3)
    return Decoder()


@pytest.fixture(scope="module")
def batch():
    return torch.randint(0, 48, (4, 24), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def found(decoder, batch):
    return explain_mismatch(decoder, batch, trainer=ONE, rollout=CHANGES, decode=[1, 8, 9], **TOKENS)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_reach_outputs_that_the_model_writes_into(batch, bias):
    """A layer's output may be a view, which loses its hooks when it is written into."""

    class Written(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            torch.manual_seed(5)
            self.embedding, self.up = nn.Embedding(48, 128), nn.Linear(128, 512, bias=bias)
            self.down, self.act = nn.Linear(512, 48), nn.ReLU(inplace=in_place)

        def forward(self, input_ids):
            return self.down(self.act(self.up(self.embedding(input_ids))))

    def rounding(model):
        answer = explain_mismatch(model, batch, trainer=ONE, rollout=CHANGES, decode=[8], **TOKENS)
        return [x.rounding for x in answer.products]

    in_place = rounding(Written(True))
    assert in_place == rounding(Written(False)) and all(x > 0 for x in in_place)


def test_a_planted_order_is_named_and_nothing_else():
    found = explain_mismatch([SHAPE], trainer=ONE, rollout=CHANGES, decode=range(1, 13), **TOKENS)
    assert [(str(x.rollout), x.same) for x in found.products] == [
        ("M=1..7", True), ("M=8", False), ("M=9", False), ("M=10..32", True)]  # fmt: skip
    assert [(x.rows, x.same) for x in found.counts] == [
        ((1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 32), True), ((8,), False), ((9,), False)]  # fmt: skip
    assert found.same is False and all(x.rms is x.estimate is None for x in found.counts)
    lines = str(found).splitlines()
    assert "hopper.wgmma, split 2, tile 64, recorded" in lines[3] and lines[3].endswith("parts 1 -> 2")
    assert "1-7,10-12,32  yes" in lines[8]
    assert lines[-2:] == [
        "trainer one (M=64), rollout changes: 1 products, 1 differ at some M",
        "pass a module and a batch for the difference of log-probabilities, estimated and measured"]  # fmt: skip


def test_what_is_not_known_is_not_said():
    known = {"trainer": ONE, "rollout": ONE, "trainer_tokens": 64}
    assert explain_mismatch([SHAPE], **known, prefill=32, decode=[1]).same is True
    guess = explain_mismatch([SHAPE], **known, prefill=200, decode=[1])
    assert [x.same for x in guess.counts] == [True, None] and guess.same is None
    assert "0 products" not in str(guess) and str(guess).splitlines()[-2].endswith("1 products, 1 are not known")
    # one call of one library has one order, known or not; of two libraries it need not
    same = explain_mismatch([SHAPE], trainer=ONE, rollout=ONE, trainer_tokens=200, prefill=200, decode=[200])
    other = explain_mismatch([SHAPE], trainer=ONE, rollout=CHANGES, trainer_tokens=200, prefill=200, decode=[200])
    assert same.same is True and other.same is None


def test_engines_with_equal_orders_differ_in_no_bit(found):
    equal = next(x for x in found.counts if x.same)
    assert equal.rows == (1, 32)
    assert (equal.estimate, equal.rounding, equal.rms, equal.largest, equal.kl, equal.different) == (0, 0, 0, 0, 0, 0)


def test_what_differs_is_measured(found, decoder, batch):
    """The logits behind the measured numbers are those of layers that call the whole product of the stated M."""
    two, rounded = (next(x for x in found.counts if x.rows == (m,)) for m in (8, 9))
    assert (two.same, rounded.same) == (False, False) and two.logits == 4 * 24 * 48
    assert 0 < two.different < rounded.different and 0 < two.rms <= two.largest and two.kl > 0
    logits = [by_hand(decoder, batch, target, m) for target, m in ((ONE, 64), (CHANGES, 9))]
    assert (logits[0].view(torch.int16) != logits[1].view(torch.int16)).sum() == rounded.different
    p, q = (x.double().log_softmax(-1) for x in logits)
    assert (p - q).abs().max().item() == rounded.largest
    text = torch.arange(48) == batch[:, 1:, None]
    assert (p - q)[:, :-1][text].square().mean().sqrt().item() == pytest.approx(rounded.rms)
    assert nn.functional.kl_div(p, q, reduction="sum", log_target=True).item() / 96 == pytest.approx(rounded.kl)


def by_hand(decoder, batch, target, rows):
    """Return logits by products of ``rows`` rows each, filled up with zeros, that torch's layers call one by one."""

    class Emulated(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is not nn.functional.linear:
                return func(*args, **(kwargs or {}))
            x, w, bias = args
            parts = x.flatten(0, -2).split(rows)
            filled = [nn.functional.pad(part, (0, 0, 0, rows - len(part))) for part in parts]
            y = [fmtsim.linear(part, w, bias, target=target)[: len(p)] for part, p in zip(filled, parts, strict=True)]
            return torch.cat(y).unflatten(0, x.shape[:-1])

    model = Decoder().bfloat16()
    model.load_state_dict(decoder.bfloat16().state_dict())
    decoder.float()
    with torch.no_grad(), Emulated():
        return model(batch)


def test_tokens_that_do_not_count_are_left_out(decoder, batch):
    """A text whose last half is masked has the figures of its first half: no layer mixes positions."""
    masked = {"input_ids": batch, "labels": batch.masked_fill(torch.arange(24) >= 12, -100)}
    half, whole = (
        explain_mismatch(decoder, x, trainer=ONE, rollout=CHANGES, decode=[9], **TOKENS).counts[0]
        for x in (batch[:, :12], masked)
    )
    assert half.rms > 0 and whole.rms == pytest.approx(half.rms) and whole.logits == 2 * half.logits
    assert whole.estimate == pytest.approx(half.estimate, rel=0.2)


def test_the_estimate_is_of_the_size_of_what_is_measured(found):
    """Partial sums that are rounded differ everywhere, so that first order has to hold within a factor of two."""
    rounded = next(x for x in found.counts if x.rows == (9,))
    assert 0.5 < rounded.estimate / rounded.rms < 2
    assert 0.25 < rounded.rounding / rounded.rms < 2  # a scale, which products alone make
    products = [x for x in found.products if str(x.rollout) == "M=9"]
    assert len(products) == 3 and min(x.estimate for x in products) > 0
    assert sum(x.estimate**2 for x in products) == pytest.approx(rounded.estimate**2)
    two = next(x for x in found.counts if x.rows == (8,))
    assert 0 < two.estimate < two.rounding  # a few elements that fall to the other side


def test_the_gradient_is_that_of_the_log_probabilities(decoder, batch, monkeypatch):
    """Noise that is put into one layer's output moves log-probabilities as far as its estimate says."""
    linear, generator = mismatch.linear, torch.Generator().manual_seed(6)

    def noisy(x, w, bias, *, target, native):
        y = linear(x, w, bias, target=target, native=native).double()
        return y + (target.rows == 8) * 1e-3 * torch.randn(y.shape, generator=generator)

    monkeypatch.setattr(mismatch, "linear", noisy)
    found = explain_mismatch(decoder, batch, trainer=ONE, rollout=CHANGES, decode=[8], **TOKENS)
    (head,) = (x for x in found.products if x.layer == "head" and x.same is False)
    p = decoder(batch).detach().double()
    moved = p + 1e-3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    delta = (moved.log_softmax(-1) - p.log_softmax(-1))[:, :-1][torch.arange(48) == batch[:, 1:, None]]
    assert head.estimate == pytest.approx(delta.square().mean().sqrt().item(), rel=0.25)


def test_converted_copies_call_what_the_table_says(decoder, batch):
    """The emulated runs resolve the linear layers' calls to the specs of the table, and nothing else."""
    with seen_calls() as calls:
        found = explain_mismatch(decoder, batch, trainer=ONE, rollout=CHANGES, decode=[8], prefill=8, trainer_tokens=64)
    seen = {(x.plan.split, x.plan.partial, call.n, call.k) for call, x in calls.items() if call.m == 96}
    table = {(y.found.plan.split, y.found.plan.partial, y.call.n, y.call.k)
             for x in found.products for y in (x.trainer, x.rollout)}  # fmt: skip
    assert seen == table and len(table) == 6


def test_a_target_of_another_class_chooses_for_itself(decoder, batch):
    class AlwaysFour(Target):
        def resolve(self, call, *, strict=False):
            spec = Target.resolve(self, call, strict=strict)
            return replace(spec, plan=replace(spec.plan, k_tile=32, split=4, partial="bf16"))

    four = AlwaysFour(**{field.name: getattr(ONE, field.name) for field in fields(Target)})
    found = explain_mismatch(decoder, batch, trainer=ONE, rollout=four, decode=[1], **TOKENS)
    assert found.same is False and len(found.counts) == 1 and found.counts[0].different > 0
    assert explain_mismatch(decoder, batch, trainer=four, rollout=four, decode=[1], **TOKENS).counts[0].different == 0


def test_layers_of_gpt2():
    """Conv1D has its weight the other way round."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 128, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model, ids = transformers.GPT2LMHeadModel(config), torch.arange(16).view(2, 8)
    with seen_calls() as calls:
        found = explain_mismatch(
            model, {"input_ids": ids}, trainer=ONE, rollout=CHANGES, trainer_tokens=16, prefill=9, decode=[9]
        )
    layouts = {(call.n, call.k, call.b_layout) for call in calls if call.m == 16}
    assert {(x.trainer.call.n, x.trainer.call.k, x.trainer.call.b_layout) for x in found.products} == layouts
    assert [layout for *_, layout in sorted(layouts)] == ["row", "column", "column", "column", "column"]
    assert found.same is False and found.counts[0].rms > 0 and min(x.estimate for x in found.products) > 0
    assert 0.3 < found.counts[0].estimate / found.counts[0].rms < 3


def test_shipped_targets():
    shipped = explain_mismatch("gpt2", trainer="h200", rollout="h100", decode=[1, 64])
    assert (shipped.trainer, shipped.rollout) == ("h200", "h100")
    with without_doubts():
        for x in shipped.products:
            for band in (x.trainer, x.rollout):
                assert resolve(band.call) == band.found
    assert {x.same for x in explain_mismatch("gpt2", trainer="h200", rollout="h200", decode=[16]).products} == {
        True, False}  # fmt: skip


def test_what_is_shown(found):
    record = json.loads(json.dumps(found.to_dict()))
    assert (record["trainer"], record["rollout"], record["same"]) == ("one", "changes", False)
    assert record["counts"][0]["rows"] == [1, 32] and record["counts"][1]["different"] > 0
    assert record["products"][1]["rollout"]["parts"] == 2 and record["products"][1]["trainer"]["basis"] == "recorded"
    assert record["products"][0]["layer"] == "blocks.0-1.1" and record["products"][0]["same"] is True
    assert repr(found) == str(found) and found._repr_html_().count("<table>") == 2
    headings = "rollout's M same bits estimate rounding rms largest kl different logits"
    assert headings in re.sub(" +", " ", str(found))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer": "h201"}, "unknown target 'h201'; did you mean"),
        ({"rollout": "hopper.wgmma"}, "is a Unit alone, which has no library; choose one of"),
        ({"model": nn.ReLU()}, "explain_mismatch found no linear layer in ReLU; pass a model with nn.Linear layers"),
        ({"model": "gpt3"}, "unknown model 'gpt3'; did you mean 'gpt2'"),
        ({"trainer_tokens": "many"}, "explain_mismatch got trainer_tokens='many'; pass numbers of rows from 1 to"),
        ({"prefill": 0}, "explain_mismatch got prefill=0; pass numbers of rows"),
        ({"decode": [1, 2.5]}, "explain_mismatch got decode=2.5; pass numbers of rows"),
        ({"decode": []}, "explain_mismatch got decode=[]; pass numbers of rows"),
        ({"decode": None}, "explain_mismatch got decode=None; pass numbers of rows"),
        ({"decode": numpy.array(2)}, "explain_mismatch got decode=array(2); pass numbers of rows"),
        ({"dtype": numpy.ones(3)}, "dtypes array([1., 1., 1.]) is not possible; choose from"),
        ({"dtype": None}, "dtypes None is not possible; choose from"),
        ({"dtype": "fp4"}, "dtypes 'fp4' is not possible; choose from"),
        ({"batch": torch.zeros(1, 4).long()}, "explain_mismatch takes a torch.nn.Module, not str; pass the model"),
        ({"model": Decoder(), "batch": torch.zeros(1, 4)}, "batch 0 has torch.float32 (1, 4) for token numbers"),
        ({"model": Decoder(), "batch": torch.zeros(4, 1).long()}, "the batch has no token to predict; pass rows of 2"),
        ({"model": Decoder(), "batch": torch.zeros(1, 4).long(), "dtype": "fp8_fast"},
         "explain_mismatch got dtype='fp8_fast' with a batch; choose bf16 or fp16, or no batch"),
        ({"model": nn.Linear(4, 4), "batch": torch.zeros(1, 4).long()}, "does not run through Linear"),
    ],
)  # fmt: skip
def test_what_is_refused(changed, message):
    refused(re.escape(message), explain_mismatch, **{"model": "gpt2", "trainer": "h200", "rollout": "h200", **changed})


def test_a_converted_model_is_refused(decoder):
    converted = fmtsim.convert(Decoder(), format="bf16", target="h200")
    refused("got a converted model; pass it as it was before convert", explain_mismatch, converted, trainer=ONE,
            rollout=ONE)  # fmt: skip


MODEL = """
import torch

def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(48, 128), torch.nn.Linear(128, 48))
    return model, [torch.arange(16).view(2, 8)]
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps(ONE.to_dict()))
    (tmp_path / "changes.json").write_text(json.dumps(CHANGES.to_dict()))
    (tmp_path / "model.py").write_text(MODEL)
    sides = ["--trainer", "one.json", "--rollout", "changes.json", "--trainer-tokens", "64", "--prefill", "32"]
    words = ["mismatch", *sides, "--decode", "9", "--model"]
    assert main([*words, "gpt2"]) == 0
    assert "5 products, 5 differ at some M" in capsys.readouterr().out
    assert main([*words, "model.py:small", "--measure", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [x["same"] for x in record["counts"]] == [False, True] and record["counts"][0]["rms"] > 0
    assert record["counts"][1]["different"] == 0
    assert main([*words, "model.py:small"]) == 0
    assert "pass a module and a batch" in capsys.readouterr().out
    assert main([*words, "gpt2", "--measure"]) == BAD_INPUT
    assert "--measure runs a model, and --model gpt2 names shapes alone" in capsys.readouterr().err
