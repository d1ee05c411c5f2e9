# SPDX-License-Identifier: Apache-2.0
"""FmtsimRun in loops written with Accelerate: bits of a loop without it, resuming, logs, and what ends a run."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

import fmtsim
from fmtsim.integrations.accelerate import FmtsimRun
from fmtsim.recipes.recipe import Rule, Steps
from fmtsim.support.errors import ArgumentError, DataError
from tests.support.followed import ROWS, Writer, llama, remembered, same
from tests.support.refusals import refused

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
pytestmark = [pytest.mark.usefixtures("one_thread", "fresh"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def fresh():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A loop by hand over batches of two, with its run."""

    def __init__(self, model=None, follow=True, accumulate=1, scaler=None, mixed_precision="no", **options):
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=mixed_precision
        )
        self.accelerator.scaler = scaler
        model = llama() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(ROWS, batch_size=2)
        )
        self.run = FmtsimRun(self.accelerator, self.model, **options) if follow else None

    def train(self, batches, after=lambda: None):
        for batch in batches:
            with self.run.accumulate() if self.run else self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            after()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_resumed_run_ends_with_the_bits_of_one_without_a_stop(tmp_path, mixed_precision):
    plain = Loop(follow=False, accumulate=2, mixed_precision=mixed_precision)
    plain.train(plain.loader)
    whole = Loop(accumulate=2, every=3, report=tmp_path / "run.html", mixed_precision=mixed_precision)
    save = lambda: whole.accelerator.save_state(tmp_path / "state")  # noqa: E731
    with whole.run as run:
        whole.train(whole.loader, lambda: run.step == 4 and whole.accelerator.sync_gradients and save())
        assert "had not ended" in (tmp_path / "run.html").read_text("utf-8")
    assert same(whole.model, plain.model) and run.step == 10 and list(run.record.seen.history) == [1, 4, 7, 10]
    again = Loop(accumulate=2, every=3, report=tmp_path / "again.html", mixed_precision=mixed_precision)
    again.accelerator.load_state(tmp_path / "state")
    with again.run as other:
        assert other.step == 4
        again.train(again.accelerator.skip_first_batches(again.loader, 8))
    assert same(again.model, plain.model) and remembered(again.model) == remembered(plain.model)
    assert other.record.losses == run.record.losses and other.record.seen.to_dict() == run.record.seen.to_dict()
    pages = [(tmp_path / name).read_text("utf-8") for name in ("run.html", "again.html")]
    assert all("te_delayed" in page and "had not ended" not in page for page in pages)


def test_a_state_that_is_loaded_inside_a_run_is_where_it_goes_on(tmp_path):
    whole = Loop(every=3)
    with whole.run as run:
        whole.train(whole.loader, lambda: run.step == 4 and whole.accelerator.save_state(tmp_path / "state"))
    again = Loop(every=3)
    with again.run as other:
        again.train(list(again.loader)[:7])
        again.accelerator.load_state(tmp_path / "state")
        assert other.step == 4 and other.record.losses == run.record.losses[:4]
        again.train(again.accelerator.skip_first_batches(again.loader, 4))
    assert same(again.model, whole.model) and remembered(again.model) == remembered(whole.model)
    assert other.record.losses == run.record.losses and other.record.seen.to_dict() == run.record.seen.to_dict()


def test_a_step_is_one_of_the_optimizer_and_what_lies_outside_is_not_counted(monkeypatch):
    told, seen = [], []
    monkeypatch.setattr("fmtsim.integrations.run_record.set_step", lambda model, step: told.append(step))
    loop = Loop(accumulate=3, every=2)
    with loop.run as run:

        def evaluate():
            seen.append(run.step)
            loop.model(**{key: row[None] for key, row in ROWS[0].items()}).loss.backward()
            loop.model.zero_grad()

        loop.train(loop.loader, evaluate)
    assert told == list(range(7)) and seen == [i // 3 for i in range(1, 20)] + [7] and len(run.record.losses) == 7
    assert list(run.record.seen.history) == [1, 3, 5, 7]
    elements = [layers["lm_head"]["g_d"].elements for layers in run.record.seen.history.values()]
    assert elements == [3 * 2 * 8 * 256] * 3 + [2 * 2 * 8 * 256]  # of the last batches there are two


def test_losses_are_means_over_batches():
    losses = []
    loop = Loop(accumulate=3)
    inner = loop.accelerator.backward
    loop.accelerator.backward = lambda loss, **more: (losses.append(float(loss)), inner(loss, **more))
    with loop.run as run:
        loop.train(loop.loader)
    parts = [losses[first : first + 3] for first in range(0, 20, 3)]
    assert run.record.losses == [sum(part) / len(part) for part in parts]


def test_trackers_get_numbers_and_histograms():
    loop, logged, writer = Loop(every=10, histograms="layer"), [], Writer()
    tracker = type("Tracker", (), {"name": "tensorboard", "tracker": writer})()
    tracker.log = lambda values, step: logged.append((step, values))
    loop.accelerator.trackers = [tracker]
    with loop.run as run:
        loop.train(loop.loader)
    assert [step for step, _ in logged] == [1, 11] == list(run.record.seen.history)
    worst = min(s.sqnr_db for layer in run.record.seen.history[11].values() for s in layer.values())
    assert logged[1][1]["fmtsim_worst_sqnr_db"] == worst
    assert {"fmtsim_exponents/lm_head/g_d", "fmtsim_exponents/model.layers.0.mlp.up_proj/x_f"} <= {
        name for name, step in writer.histograms if step == 11
    }


def test_scaled_gradients_are_said_to_be(tmp_path):
    """A GradScaler as with fp16, which Accelerate has on GPUs alone."""
    loops = [
        Loop(scaler=scaler, every=20, format="bf16", model=llama(None), report=tmp_path / "run.html")
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0))
    ]
    logged = []
    loops[1].accelerator.log = lambda values, step: logged.append(values)
    for loop in loops:
        with loop.run:
            loop.train(loop.loader)
    plain, scaled = (loop.run.record.seen.history[1]["lm_head"]["g_d"].amax for loop in loops)
    assert scaled == 1024.0 * plain and logged[0]["fmtsim_loss_scale"] == 1024.0
    assert [loop.run.record.losses[0] for loop in loops][0] == loops[1].run.record.losses[0]
    assert "Gradients are those of the loss times 1024, as the GradScaler" in (tmp_path / "run.html").read_text("utf-8")


def test_a_model_that_is_not_converted_is_observed_as_it_is(tmp_path):
    plain = Loop(llama(None), follow=False)
    plain.train(plain.loader)
    loop = Loop(llama(None), every=7, recipe="te_mxfp8", rules=[Rule(name="lm_head")], report=tmp_path / "run.html")
    with loop.run as run:
        loop.train(loop.loader, lambda: run.step == 10 and loop.accelerator.save_state(tmp_path / "state"))
    assert same(loop.model, plain.model)
    assert {s.format for layer in run.record.seen.layers.values() for s in layer.values()} == {"mxfp8_e4m3_rceil"}
    assert run.record.seen.layers and "lm_head" not in run.record.seen.layers
    assert "cast beside it for te_mxfp8+rules" in (tmp_path / "run.html").read_text("utf-8")
    for options, now in (
        ({}, "a converted model"),
        ({"recipe": "te_current"}, "one observed for 'te_current'"),
        ({"recipe": "te_mxfp8"}, "one observed for 'te_mxfp8'"),
    ):
        other = Loop(llama() if not options else llama(None), **options)
        other.accelerator.load_state(tmp_path / "state", strict=False)
        refused(rf"is of one observed for 'te_mxfp8\+rules', this run is of {now}; go on as", other.run.__enter__)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_run_leaves_a_report(tmp_path, error):
    loop = Loop(every=3, report=tmp_path / "run.html")

    def stop(*_):
        if loop.run.step == 6:  # an observed step
            raise error("enough")

    hook = loop.model.lm_head.register_forward_pre_hook(stop)
    with pytest.raises(error, match="enough"), loop.run as run:
        loop.train(loop.loader)
    page = (tmp_path / "run.html").read_text("utf-8")
    assert f"Interrupted after step 6 by {error.__name__}" in page and list(run.record.seen.history) == [1, 4]
    hook.remove()
    with fmtsim.observe(loop.model):  # it is no longer observed
        pass
    assert loop.accelerator.backward.__name__ == "backward"


def test_a_batch_whose_error_is_caught_is_left_out():
    loop = Loop(every=1)
    with loop.run as run:
        with pytest.raises(RuntimeError, match="enough"), run.accumulate():
            raise RuntimeError("enough")
        loop.train(loop.loader)
    assert run.step == 20 and len(run.record.losses) == 20


def test_a_loss_that_is_nan_is_told_at_once(tmp_path):
    loop = Loop(every=1, report=tmp_path / "run.html")
    with loop.run as run:

        def spoil():
            if run.step == 3:
                with torch.no_grad():
                    loop.model.lm_head.weight.fill_(math.nan)
            if run.step == 4:
                assert "became nan at step 4" in (tmp_path / "run.html").read_text("utf-8")

        loop.train(loop.loader, spoil)
    assert list(map(math.isnan, run.record.losses)) == [False] * 3 + [True] * 17
    assert list(run.record.seen.history) == [1, 2, 3]


def test_misuse_is_refused(tmp_path):
    loop = Loop(llama("te_current"), every=100)
    with pytest.raises(ArgumentError, match="FmtsimRun follows this model already; keep the one that was made first"):
        FmtsimRun(loop.accelerator, loop.model)
    with (
        pytest.raises(ArgumentError, match=r"accumulate\(\) is for the inside of `with FmtsimRun"),
        loop.run.accumulate(),
    ):
        pass
    refused("save_state was called before `with FmtsimRun", loop.accelerator.save_state, tmp_path / "early")
    with loop.run as run:
        with pytest.raises(ArgumentError, match="has begun already; end the with that it is in first"), run:
            pass
        with (
            run.accumulate(),
            pytest.raises(ArgumentError, match="inside .*, whose step is not counted yet; call it a"),
        ):
            loop.accelerator.save_state(tmp_path / "inside")
        loop.accelerator.save_state(tmp_path / "state")
    other = Loop(llama("te_mxfp8"))
    other.accelerator.load_state(tmp_path / "state", strict=False)
    with pytest.raises(ArgumentError, match="is of recipe 'te_current', the model runs 'te_mxfp8'"), other.run:
        pass
    with pytest.raises(DataError, match="the checkpoint of FmtsimRun holds something else than the state of a run"):
        other.run.load_state_dict({"step": 3})
    with pytest.raises(ArgumentError, match="FmtsimRun got LlamaForCausalLM as accelerator; pass the accelerate.Accel"):
        FmtsimRun(loop.model, loop.accelerator)
    refused("FmtsimRun got str as model; pass the model that accelerator.prepare", FmtsimRun, loop.accelerator, "model")
    for given, why in (
        ({"recipe": "te_mxfp8", "format": "e4m3"}, "the callback got recipe and format; pass one of them"),
        ({"recipe": "nvfp4_switch"}, "'nvfp4_switch' has a schedule, which a model that is not converted is not obser"),
        ({"rules": [Rule(name="up")]}, "the callback got rules, which are exceptions of recipe= or format=; pass one"),
        ({"format": "e4m3", "rules": [Rule(steps=Steps(last=2))]}, "one of rules= has a schedule, which a model that"),
        ({"format": "e4m3", "rules": ["up"]}, r"rules=\['up'\] is not a list of Rules; write rules="),
        ({"histograms": "all"}, "histograms='all' is not a choice; pass 'operand' for one of each operand over all"),
    ):
        refused(why, Loop, llama(None), **given)
    refused(
        "found no converted layer in LlamaForCausalLM; hand the trainer fmtsim.con", Loop(llama(None)).run.__enter__
    )
    refused(
        "is converted already, and recipe= and format= are for models that are not", Loop(format="e4m3").run.__enter__
    )
    parts = llama(None)
    for part in (parts.model, parts.lm_head):
        fmtsim.convert(part, recipe="te_current")
    refused(r"found 2 parts of LlamaForCausalLM that were .* \(model, lm_head\); convert", Loop(parts).run.__enter__)
