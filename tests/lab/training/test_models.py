# SPDX-License-Identifier: Apache-2.0
"""Models of ``fmtsim train``: the Llama, and models that a function in a file returns."""

import dataclasses
import math

import pytest
import torch

from fmtsim.lab.cli.main import main
from fmtsim.lab.training.artifacts import settings
from fmtsim.lab.training.decoders import GPTConfig, LanguageModel, Llama
from fmtsim.lab.training.lockstep import build_side, run_lockstep
from fmtsim.lab.training.run import compare_schemes, rehearse, train
from fmtsim.lab.training.schemes import Scheme
from fmtsim.lab.training.training_models import build_model
from fmtsim.recipes import get_recipe, list_recipes
from fmtsim.support.errors import ArgumentError
from fmtsim.support.progress import Progress
from tests.support.trainings import tiny, training

SMALL = ["--steps", "2", "--batch-size", "2", "--context", "16", "--width", "32", "--layers", "2", "--heads", "2"]
MODEL = tiny(32, 2)
FILE = """
import torch
from torch import nn
from torch.nn import functional as F

class Output:
    def __init__(self, **named):
        self.__dict__.update(named)

class Model(nn.Module):
    def __init__(self, width, vocabulary=256):
        super().__init__()
        self.embed, self.up = nn.Embedding(vocabulary, width), nn.Linear(width, 64)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(64, vocabulary)
    def logits(self, tokens):
        return self.head(self.drop(F.relu(self.up(self.embed(tokens)))))

class Logits(Model):
    def forward(self, tokens, mask=None):
        assert mask is None
        return self.logits(tokens)

class Named(Model):
    def forward(self, tokens):
        return Output(logits=self.logits(tokens))

class Loss(Model):
    def forward(self, tokens, answers):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), answers.flatten())

class Pair(Model):
    def forward(self, tokens, targets=None):
        logits = self.logits(tokens)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Flat(Model):
    def forward(self, tokens):
        return self.logits(tokens).flatten(0, 1)

class Many(Model):
    def forward(self, tokens, targets):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), reduction="none")

def logits(width): return Logits(width)
def named(width, **rest): return Named(width, rest["vocabulary"])
def loss(width): return Loss(width)
def pair(width): return Pair(width)
def flat(width): return Flat(width)
def many(width): return Many(width)
def few(width): return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 100))
def short(width): return nn.Sequential(nn.Embedding(100, width), nn.Linear(width, 256))
class Raises(Model):
    def forward(self, tokens):
        return self.logits(tokens)[0, 5, 7, 9]
def raises(width): return Raises(width)
def wrong(): return 5
def empty(): return nn.Flatten()
def broken(): raise KeyError("weights")
value = 5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return path


def config(architecture, recipe="te_current", model=MODEL, **changes):
    return training(Scheme(format="fp32", recipe=get_recipe(recipe)), model, architecture=architecture, **changes)


def test_the_llama_is_one():
    """Causal, of positions that count, and equal to its definition on one head."""
    model, state = Llama(MODEL, 0), torch.get_rng_state()
    assert torch.equal(Llama(MODEL, 0).embedding.weight, model.embedding.weight)
    assert torch.equal(state, torch.get_rng_state()) and model.blocks[0].mlp.up_proj.out_features == 96
    found = []
    model.norm.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    late, swapped = tokens.clone(), tokens.clone()
    late[0, 10] ^= 1
    swapped[0, :2] = tokens[0, :2].flip(0)
    losses = [float(model(x, tokens ^ 3).detach()) for x in (tokens, late, swapped)]
    same = (found[0] == found[1]).all(-1).tolist()
    assert same == [True] * 10 + [False] * 6 and not torch.equal(found[0][5], found[2][5])
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)


def test_rotations_keep_scores_of_equal_distances():
    attention = Llama(MODEL, 0).blocks[0].self_attn
    q, k = (torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(i)).expand(1, 1, 16, 16) for i in (0, 1))
    scores = (attention._rotated(q) @ attention._rotated(k).transpose(-1, -2))[0, 0]
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert torch.allclose(scores[0, 0], (q[0, 0, 0] * k[0, 0, 0]).sum(), atol=1e-5) and scores.std() > 0.1
    with pytest.raises(ArgumentError, match="--model llama turns pairs of features, and heads of 3 are odd; choose"):
        Llama(GPTConfig(width=6, heads=2), 0)


def test_the_llama_learns_under_smooth_swiglu(corpus):
    """intel_2t smooths its gated layers, and its loss is near float32's."""
    setting = config("llama", "intel_2t", steps=25)
    baseline, simulated = compare_schemes(setting, corpus, Progress())
    assert simulated.report.summary.endswith("; 2 gated layers became Smooth-SwiGLU, a scale a token")
    assert baseline.final_loss < 4 and simulated.final_loss == pytest.approx(baseline.final_loss, abs=0.15)
    assert simulated.optimizer == "AdamW(state='intel_2t')"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fa3", "quartet2", "te_nvfp4", "mxfp4") else pytest.mark.slow)
        for name in list_recipes(kind="training")
    ],
)
def test_every_recipe_takes_the_llama(name):
    rehearse(config("llama", name, tiny(128, 4), batch_size=8))


def test_gpt_says_that_it_has_no_gated_layers(corpus):
    run = train(config("gpt", "intel_2t").simulated, config("gpt", "intel_2t"), corpus, Progress())
    assert "(swiglu becomes SmoothSwiGLU, a scale a token, where there is one) found none in this model" in (
        run.report.summary
    )


@pytest.mark.parametrize("name", ["logits", "named", "loss", "pair"])
def test_a_model_from_a_file(file, corpus, name):
    """All four ways of giving a loss are one; dropout draws the same numbers in both runs and in another process."""
    setting = config(f"{file}:{name}")
    state = torch.get_rng_state()
    baseline, simulated = compare_schemes(setting, corpus, Progress())
    assert torch.equal(state, torch.get_rng_state())
    with torch.random.fork_rng():
        torch.manual_seed(99)
        again, _ = compare_schemes(setting, corpus, Progress())
    assert again.losses == baseline.losses != simulated.losses and again.validation == baseline.validation
    other, _ = compare_schemes(config(f"{file}:logits"), corpus, Progress())
    assert other.losses == baseline.losses
    assert {row.name for row in simulated.report.converted} == {"model.up", "model.head"}
    model = build_model(setting).model
    torch.manual_seed(0)
    assert not torch.equal(model.head.weight, type(model)(32).head.weight[:1].expand(256, 64))


def test_ranks_states_and_checks_of_a_model_from_a_file(file, corpus):
    simulated = Scheme(format="fp32", recipe=get_recipe("coat"), reduction="msamp")
    setting = dataclasses.replace(config(f"{file}:loss"), simulated=simulated, ranks=None)
    run = train(simulated, setting, corpus, Progress())
    assert run.label == "coat, AdamW(state='coat'), gradients reduced by msamp" and run.ranks == 2
    sides = tuple(build_side(label, setting) for label in ("native", "emulated"))
    assert run_lockstep(sides, setting, corpus, Progress()).losses == run.losses
    assert all(not isinstance(side.model, LanguageModel) for side in sides)
    assert len(settings(setting, corpus)["config"]["architecture_sha256"]) == 64


def test_an_edited_file_is_another_training(file, corpus):
    before = settings(config(f"{file}:loss"), corpus)
    file.write_text(FILE + "\n")
    assert settings(config(f"{file}:loss"), corpus) != before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpd", "--model gpd is unknown; did you mean 'gpt'?; choose gpt or llama, or FILE.py:function or pack"),
        ("FILE", "is unknown; choose gpt or llama, or FILE.py:function"),
        ("absent.py:model", "--model absent.py:model: there is no file absent.py; pass FILE.py:function"),
        ("FILE:modle", "has no function 'modle'; write one that returns a module"),
        ("FILE:value", "has no function 'value'; write one that returns a module"),
        ("FILE:wrong", "returned 5; return a torch.nn.Module"),
        ("FILE:empty", "returned a Flatten without parameters to train"),
        ("FILE:broken", "FILE:broken (line 58): KeyError: 'weights'"),
        ("FILE:few", "its logits are of 100 tokens, and bytes are 256; take the argument vocabulary"),
        ("FILE:short", "FILE:short: IndexError: index out of range in self"),
        ("FILE:raises", "FILE:raises (line 54): IndexError: too many indices for tensor of dimension 3"),
        ("FILE:flat", "its forward returned a tensor [32, 256] for inputs [2, 16]; return logits [batch, time, voc"),
        ("FILE:many", "its forward(inputs, targets) returned a tensor [32]; return the mean loss, a tensor without"),
    ],
)
def test_what_is_no_model_is_told(file, text, tmp_path, capsys, name, said):
    words = ["--model", name.replace("FILE", str(file)), "--data", str(text), "--out", str(tmp_path / "out")]
    assert main(["train", *SMALL, *words, "--quiet"]) == 2
    assert said.replace("FILE:", f"{file}:") in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_file_that_is_no_python_is_told(tmp_path, text, capsys):
    (tmp_path / "bad.py").write_text("def model(:\n")
    words = ["--model", f"{tmp_path}/bad.py:model", "--data", str(text), "--out", str(tmp_path / "out")]
    assert main(["train", *SMALL, *words, "--quiet"]) == 2
    assert "bad.py:model: SyntaxError: invalid syntax" in capsys.readouterr().err
