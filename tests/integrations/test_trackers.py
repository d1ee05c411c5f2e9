# SPDX-License-Identifier: Apache-2.0
"""What callbacks send to TensorBoard and W&B, and what becomes of delayed scales of several processes."""

import sys
import types

import pytest
import torch

from fmtsim.integrations import run_record
from fmtsim.integrations.run_record import exponents, figures, send
from fmtsim.lab.analysis.observe import observe
from fmtsim.nn import convert


@pytest.fixture(scope="module")
def part():
    """Return what was seen of one step of two layers, in powers of two and zeros, with a NaN."""
    model = convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)), format="mxfp8_e4m3")
    x = torch.tensor([1.0, 2.0**-3, 0.0, -1.5]).repeat(32, 8)
    with observe(model) as seen:
        model(x).square().mean().backward()
    return seen


def test_histograms_count_exponents_of_an_operand_or_of_each_layers(part):
    whole, layers = exponents(part, "operand"), exponents(part, "layer")
    assert set(whole) == {f"fmtsim_exponents/{name}" for name in part["0"] | part["1"]} and exponents(part, None) == {}
    assert set(layers) == {f"fmtsim_exponents/{n}/{operand}" for n in "01" for operand in part[n]}
    for name, counts in whole.items():
        operand = name.rpartition("/")[2]
        parts = [part[n][operand] for n in "01" if operand in part[n]]
        assert torch.equal(counts, sum(stats.scaled_exponents for stats in parts))
    assert int(layers["fmtsim_exponents/0/x_f"].sum()) == 32 * 24  # zeros have no exponent


class Run:
    """What a run of W&B has."""

    def __init__(self):
        self.logged = []

    def log(self, values, step=None):
        self.logged.append((values, step))


def test_wandb_gets_bins_and_edges_under_the_steps_name(part, monkeypatch):
    module = types.ModuleType("wandb")
    module.Histogram = lambda np_histogram: np_histogram
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(Run, "__module__", "wandb.sdk.wandb_run")
    run, other = Run(), object()
    found = exponents(part, "operand")
    send(found, [None, other, run], 7)
    send(found, [run], 7, "train/global_step")
    send({}, [run], 8)
    assert [step for _, step in run.logged] == [7, None] and run.logged[1][0].pop("train/global_step") == 7
    assert run.logged[0][0] == run.logged[1][0] and set(run.logged[0][0]) == set(found)
    counts, edges = run.logged[0][0]["fmtsim_exponents/x_f"]
    assert len(edges) == len(counts) + 1 and sum(counts) == int(found["fmtsim_exponents/x_f"].sum())
    assert counts[0] and counts[-1]
    module.log = run.log  # the module itself, as Hugging Face's callback has it
    send(found, [module], 9, "train/global_step")
    assert run.logged[2][0]["train/global_step"] == 9


@pytest.mark.filterwarnings("ignore")  # of the package
def test_tensorboard_reads_back_what_was_sent(part, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    found = exponents(part, "operand")
    send(found, [writer], 5)
    writer.close()
    read = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    read.Reload()
    assert set(read.Tags()["histograms"]) == set(found)
    (event,) = read.Histograms("fmtsim_exponents/x_f")
    value, counts = event.histogram_value, found["fmtsim_exponents/x_f"]
    used = counts.nonzero().flatten() - 160
    assert event.step == 5 and value.num == int(counts.sum()) and sum(value.bucket) == value.num
    assert value.min == int(used[0]) and value.max == value.bucket_limit[-1] == int(used[-1]) + 1
    at = {limit - 1: count for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
    assert at == {int(exponent): int(counts[exponent + 160]) for exponent in used}
    middles = [(exponent + 0.5, count) for exponent, count in at.items()]
    assert value.sum == sum(middle * count for middle, count in middles)
    assert value.sum_squares == sum(middle * middle * count for middle, count in middles)


def test_numbers_that_loggers_cannot_take_are_left_out(part):
    assert all(isinstance(value, float) for value in figures(part).values())
    model = convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), format="mxfp8_e4m3")
    torch.nn.init.constant_(model[0].weight, 1.0)
    with observe(model) as lossless:
        model(torch.zeros(32, 32))
    assert set(figures(lossless)) == {
        "fmtsim_worst_underflow_percent", "fmtsim_worst_saturation_percent", "fmtsim_nonfinite"
    }  # fmt: skip


def test_another_number_of_processes_goes_on_with_the_scales_of_the_first(monkeypatch):
    states = [{"recipe": "te_delayed", "layers": {"": rank}} for rank in range(2)]
    assert run_record.of_this_process(states) == (
        states[0],
        "2 processes saved delayed scales; 1 went on, with those of the first",
    )
    assert run_record.of_this_process(states[:1]) == (states[0], "")
    monkeypatch.setattr(run_record, "_ranks", lambda: 2)
    monkeypatch.setattr(run_record.dist, "get_rank", lambda: 1)
    assert run_record.of_this_process(states) == (states[1], "")
    assert run_record.of_this_process(states[:1]) == (states[0], "")
    gather = lambda found, own: found.__setitem__(slice(None), [None, own])  # noqa: E731
    monkeypatch.setattr(run_record.dist, "all_gather_object", gather)
    assert run_record.gathered(states[1]) == [None, states[1]]
    assert run_record.gathered(None) == [None] and run_record.gathered({"layers": {}}) == [{"layers": {}}]


def test_a_state_of_a_run_has_its_keys_and_no_others(monkeypatch):
    monkeypatch.setattr(run_record.Observation, "of_state", lambda state: None)
    state = dict.fromkeys(run_record._KEYS, [None])
    assert run_record.checked_state(state, "the file") == state
    for wrong in (state | {"extra": 1}, state | {"recipe_states": []}, {"losses": []}, [*state]):
        with pytest.raises(run_record.DataError, match="the file holds something else than the state of a run"):
            run_record.checked_state(wrong, "the file")
