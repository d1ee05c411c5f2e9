# SPDX-License-Identifier: Apache-2.0
"""Whole systems in ``fmtsim train``: optimizer states, levels, and gradients of several ranks."""

import argparse
import dataclasses
import json

import pytest
import torch

import fmtsim
from fmtsim.distributed import get_reduction, simulate
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.lab.cli.arguments.models import declare_train
from fmtsim.lab.cli.main import main
from fmtsim.lab.cli.training_commands import _config
from fmtsim.lab.training import learner
from fmtsim.lab.training.artifacts import make_check_record
from fmtsim.lab.training.corpus import sample
from fmtsim.lab.training.decoders import GPT
from fmtsim.lab.training.learner import BETAS, CLIP, MADAM_RATE, WEIGHT_DECAY, Learner, schedule
from fmtsim.lab.training.lockstep import build_side, run_lockstep
from fmtsim.lab.training.run import compare_schemes, train
from fmtsim.lab.training.schemes import Scheme
from fmtsim.recipes import OptimizerConfig, get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.support.progress import Progress
from tests.support.bits import same_bits
from tests.support.refusals import refused
from tests.support.trainings import tiny, training

SMALL = ["--steps", "3", "--batch-size", "4", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2"]
MODEL = tiny(32)
RATE = 1e-2


def scheme(name, **changes):
    return Scheme(format="fp32", recipe=get_recipe(name), **changes)


def config(simulated, **changes):
    return training(simulated, MODEL, **{"batch_size": 4, "lr": RATE, **changes})


def by_hand(corpus, recipe, optimizers, ranks=1, reduction=None, steps=3):
    """Return the losses of a loop that shares nothing with the package's but model, batches and schedule."""
    model = fmtsim.convert(GPT(MODEL, 0), recipe=recipe, generator=torch.Generator().manual_seed(0),
                           filter_fn=GPT.without_head)  # fmt: skip
    chosen, losses, mu = optimizers(model), [], None
    batches = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        x, y = sample(corpus.train, 4, 16, batches, "cpu")
        parts, gradients = [], []
        for rank in range(ranks):
            mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
            loss = model(x[mine], y[mine])
            factor = 1.0 if recipe.loss_scale is None else recipe.loss_scale.initial  # a power of two
            scaled = torch.autograd.grad(loss * factor, list(model.parameters()))
            gradients.append([g / factor for g in scaled])
            parts.append(loss.detach())
        if reduction is not None:
            result = simulate([list(g) for g in gradients], reduction, mu=mu, call=step - 1)
            auto = get_reduction(reduction).auto
            if auto is not None:
                before = torch.tensor(auto.initial) if mu is None else mu
                mu = auto.next(before, result.counts[0].saturated, result.counts[0].elements)
        for p, g in zip(model.parameters(), gradients[0] if reduction is None else result.values, strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer, peak in chosen:
            optimizer.param_groups[0]["lr"] = peak * schedule(step, steps)
            optimizer.step()
        losses.append(float(torch.stack(parts).mean()))
    return losses, [p.detach().clone() for p in model.parameters()]


def adamw(state):
    def make(model):
        how = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}
        return [(fmtsim.optim.AdamW(model.parameters(), **how, state=state, seed=0), RATE)]

    return make


def madam(model):
    rest, first = ([p for p in model.parameters() if (p.dim() == 1) is vector] for vector in (True, False))
    how = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}
    return [(fmtsim.optim.Madam(first), MADAM_RATE * RATE), (torch.optim.AdamW(rest, **how), RATE)]


def trained(simulated, corpus, **changes):
    """Return the losses and weights of the package's loop."""
    found = {}
    original = Learner.step

    def step(self, *, taken):
        original(self, taken=taken)
        found["weights"] = [p.detach().clone() for p in self.model.parameters()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", step)
        run = train(simulated, config(simulated, **changes), corpus, Progress())
    return run, found["weights"]


@pytest.mark.parametrize(
    ("simulated", "wanted"),
    [
        (scheme("coat"), adamw("coat")),
        (scheme("deepseek_v3"), adamw("deepseek_v3")),
        (scheme("intel_2t"), adamw("intel_2t")),
        (scheme("te_current", optimizer=OptimizerConfig(state="bf16_sr")), adamw("bf16_sr")),
        (scheme("lns_madam"), madam),
    ],
    ids=["coat", "deepseek_v3", "intel_2t", "bf16_sr", "lns_madam"],
)
def test_states_are_those_of_a_loop_by_hand(corpus, simulated, wanted):
    run, weights = trained(simulated, corpus)
    losses, expected = by_hand(corpus, simulated.recipe, wanted)
    assert run.losses == losses and all(map(same_bits, weights, expected))
    other, _ = by_hand(corpus, simulated.recipe, adamw("fp32"))  # what another optimizer would give
    assert other[:2] == losses[:1] + other[1:2] and other[2] != losses[2]
    assert run.optimizer == str(simulated.states) and run.ranks == 1 and run.reduction == ""


@pytest.mark.parametrize(("reduction", "ranks"), [("fp8lm", 2), ("msamp", 4), ("fp8lm_pre", 2)])
def test_gradients_are_reduced_as_by_hand(corpus, reduction, ranks):
    simulated = scheme("te_current", reduction=reduction)
    run, weights = trained(simulated, corpus, ranks=ranks)
    losses, expected = by_hand(corpus, simulated.recipe, adamw_torch, ranks, reduction)
    assert run.losses == losses and all(map(same_bits, weights, expected))
    assert run.reduction.startswith(f"{reduction} over {ranks} ranks (ring of e4m3, factor ")
    whole, _ = by_hand(corpus, simulated.recipe, adamw_torch, ranks, "fp32")
    assert whole[0] == losses[0] and whole[2] != losses[2]


def unit_variance(model):
    """What ``by_hand`` steps, a group an optimizer; each step decays weights as much as the ordinary model's."""
    groups = fmtsim.nn.mu_parameter_groups(model, 32 * RATE)
    return [
        (torch.optim.AdamW(group["params"], betas=BETAS, weight_decay=WEIGHT_DECAY * (RATE / group["lr"])), group["lr"])
        for group in groups
    ]


@pytest.mark.parametrize("name", ["mu_s", "unit_scaling"])
def test_models_of_unit_variance_have_rates_of_their_own(corpus, name):
    run, weights = trained(scheme(name), corpus)
    losses, expected = by_hand(corpus, get_recipe(name), unit_variance)
    assert run.losses == losses and all(map(same_bits, weights, expected))
    assert run.optimizer == "AdamW(state='fp32'), rates of mu_parameter_groups"
    madam = scheme(name, optimizer=OptimizerConfig(rule="madam", state="fp32"))  # factors need no other rates
    assert Learner(GPT(MODEL, 0), madam, config(madam)).optimizer == "Madam(state='fp32')"
    states = trained(scheme(name, optimizer=OptimizerConfig(state="coat")), corpus)[0]
    assert states.losses[0] == losses[0] and states.losses[2] != losses[2] and states.state_bytes < 7


@pytest.mark.parametrize("name", ["mu_s", pytest.param("unit_scaling", marks=pytest.mark.slow)])
def test_models_of_unit_variance_learn_as_fast(corpus, name):
    """At the rates of ordinary models 40 steps leave the loss near its beginning."""
    baseline, simulated = compare_schemes(config(scheme(name), steps=40), corpus, Progress())
    assert simulated.final_loss < baseline.final_loss + 0.5 < baseline.losses[0] - 1.5


def adamw_torch(model):
    return [(torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY), RATE)]


def test_the_baseline_reduces_in_float32_over_the_same_ranks(corpus):
    setting = config(scheme("fp8lm"))
    baseline, simulated = compare_schemes(setting, corpus, Progress())
    assert setting.ranks == baseline.ranks == simulated.ranks == 2
    assert baseline.reduction.startswith("fp32 over 2 ranks (ring of fp32")
    assert simulated.reduction.startswith("fp8lm over 2 ranks") and simulated.state_bytes == pytest.approx(5, abs=0.1)
    assert baseline.optimizer == "AdamW(state='fp32')" and baseline.state_bytes == 12
    one = train(setting.baseline, config(Scheme(format="fp32")), corpus, Progress())
    assert one.losses[0] == pytest.approx(baseline.losses[0], rel=1e-6)


def test_parameters_without_a_gradient_on_some_ranks():
    """Where no rank has one there is none, as on a single rank; where some have, the others send zeros."""
    reduction = learner.RankReduction("fp8lm_pre")
    found = reduction.reduce([[torch.ones(2), None, None], [torch.ones(2), None, torch.full((2,), 4.0)]])
    assert found[1] is None and found[0].tolist() == [1, 1] and found[2].tolist() == [2, 2]
    assert reduction.reduce([[None], [None]]) == [None]


def test_stochastic_reductions_draw_anew_at_every_step():
    record = dataclasses.replace(get_reduction("msamp"), rounding=Rounding(mode="stochastic"))
    reduction = learner.RankReduction(record)
    ranks = [[torch.randn(99, generator=torch.Generator().manual_seed(rank))] for rank in range(2)]
    found = [reduction.reduce(ranks)[0] for _ in range(2)]
    assert all(same_bits(g, simulate(ranks, record, call=call).values[0]) for call, g in enumerate(found))
    assert not same_bits(*found)


def test_levels_of_fp8lm(corpus):
    """Higher levels keep fewer bytes; weights that O3 gathers in E4M3 are those that its products quantise anyway."""
    runs = {}
    for name in ("O1", "O2", "O3"):
        simulated = Scheme(format="fp32", recipe=get_recipe("fp8lm").at_level(name))
        runs[name] = train(simulated, config(simulated), corpus, Progress())
        assert runs[name].optimizer == f"AdamW(state={'fp8lm_o1' if name == 'O1' else 'fp8lm'!r})"
    assert [round(run.state_bytes) for run in runs.values()] == [10, 5, 5]
    assert [run.gathered for run in runs.values()] == ["", "", "e4m3"]
    assert runs["O1"].losses != runs["O2"].losses == runs["O3"].losses
    cast = get_recipe("fp8lm").linear.operands["w_f"]
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    once = values(cast, w)
    assert same_bits(values(cast, once), once) and not same_bits(once, w)


def values(quantizer, w):
    """Return what a product sees of a weight, by multiplying it with the identity."""
    config = LinearConfig(fprop=Gemm(b=quantizer))
    return fmtsim.EmulatedGEMM.apply(torch.eye(w.shape[1]), w, None, config).T.contiguous()


def test_madam_leaves_what_no_factor_moves_to_adamw():
    layer = torch.nn.Linear(4, 4)
    assert len(Learner(layer, scheme("lns"), config(scheme("lns"))).optimizers) == 2
    torch.nn.init.zeros_(layer.weight)
    (only,) = Learner(layer, scheme("lns"), config(scheme("lns"))).optimizers
    assert isinstance(only, torch.optim.AdamW) and len(only.param_groups[0]["params"]) == 2


def test_lockstep_leaves_heads_of_unit_variance_to_the_recipe(corpus):
    setting = config(dataclasses.replace(scheme("mu_s"), target="h200"))
    result = run_lockstep((build_side("a", setting), build_side("b", setting)), setting, corpus, Progress())
    assert result.equal and result.losses[0] < 6  # on the machine it would lack its factor, and the loss be 15
    assert make_check_record(setting, corpus, result)["config"]["head"] == "high precision or the recipe's"


@pytest.mark.parametrize("name", ["fp8lm", "lns"])
def test_sides_in_lockstep_share_optimizer_and_ranks(corpus, name):
    simulated = scheme(name)
    setting = config(simulated)
    sides = [build_side(label, setting) for label in ("native", "emulated")]
    result = run_lockstep(tuple(sides), setting, corpus, Progress())
    assert result.equal and result.steps == 3
    with pytest.MonkeyPatch.context() as patch:  # one side reduces, or steps, otherwise
        original, made = Learner.__init__, []

        def planted(self, *arguments):
            original(self, *arguments)
            made.append(self)
            if len(made) == 2 and name == "fp8lm":
                self.reduction.mu = torch.tensor(0.5**13)
            elif len(made) == 2:
                self.optimizers[0].param_groups[0]["bound"] = 0.0

        patch.setattr(Learner, "__init__", planted)
        found = run_lockstep(tuple(build_side(label, setting) for label in ("a", "b")), setting, corpus, Progress())
    assert found.mismatch is not None and found.mismatch.kind == ("gradient" if name == "fp8lm" else "weight")


def command(text, tmp_path, *words):
    return main(["train", *SMALL, *words, "--data", str(text), "--out", str(tmp_path / "out"), "--quiet"])


def test_the_command_runs_a_recipes_system(text, tmp_path, capsys):
    assert command(text, tmp_path, "--recipe", "fp8lm", "--level", "o3", "--ranks", "4") == 0
    said = capsys.readouterr().out
    assert "fp8lm O3, AdamW(state='fp8lm'), gradients reduced by fp8lm" in said
    assert "weights and optimizer states: AdamW(state='fp8lm'), 5.0" in said
    assert "(baseline: AdamW(state='fp32'), 12.00 bytes a parameter)" in said
    assert "gradients: fp8lm over 4 ranks (ring of e4m3, factor auto" in said
    assert "(baseline: fp32 over 4 ranks)" in said
    assert "gather weights in e4m3, 2.2" in said
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["config"]["simulated"]["optimizer"] == {"rule": "adamw", "state": "fp8lm"}
    assert record["config"]["ranks"] == record["simulated"]["ranks"] == 4
    assert record["simulated"]["optimizer"] == "AdamW(state='fp8lm')" and record["simulated"]["gathered"] == "e4m3"
    assert "left to the training loop" not in record["simulated"]["summary"]


@pytest.mark.parametrize(
    ("words", "optimizer", "reduction", "ranks"),
    [
        ("--recipe fp8lm", "AdamW(state='fp8lm')", "fp8lm", 2),
        ("--recipe fp8lm --level O1 --ranks 4", "AdamW(state='fp8lm_o1')", "fp8lm", 4),
        ("--recipe fp8lm --reduction fp32", "AdamW(state='fp8lm')", "fp32", 1),
        ("--recipe fp8lm --reduction fp32 --ranks 4", "AdamW(state='fp8lm')", "fp32", 4),
        ("--recipe fp8lm --state fp32 --reduction msamp", "AdamW(state='fp32')", "msamp", 2),
        ("--recipe fp8lm --optimizer madam", "Madam(state='fp8lm')", "fp8lm", 2),
        ("--recipe lns_madam", "Madam(state='lns_madam')", "fp32", 1),
        ("--recipe lns --optimizer adamw --state fp32", "AdamW(state='fp32')", "fp32", 1),
        ("--recipe te_current", "AdamW(state='fp32')", "fp32", 1),
        ("--format bf16 --state bnb8", "AdamW(state='bnb8')", "fp32", 1),
    ],
)
def test_options_go_before_the_recipe(words, optimizer, reduction, ranks):
    parser = argparse.ArgumentParser()
    declare_train(parser)
    found = _config(parser.parse_args([*SMALL, *words.split()]))
    assert (str(found.simulated.states), found.simulated.reduced_by, found.ranks) == (optimizer, reduction, ranks)
    assert found.baseline.states.state == found.baseline.reduced_by == "fp32"


def test_a_recipe_file_with_unknown_names_is_refused():
    recipe = dataclasses.replace(get_recipe("coat"), optimizer=OptimizerConfig(state="x"))
    refused(r"state='x' is unknown \(choose one of fp32", Scheme, format="fp32", recipe=recipe)
