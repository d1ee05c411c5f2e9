# SPDX-License-Identifier: Apache-2.0
"""FmtsimCallback in the Trainer of Hugging Face: bits of a run without it, resuming, logs, and what ends a run."""

import math
import re
from pathlib import Path

import pytest
import torch

import fmtsim
from fmtsim.integrations import transformers as integration
from fmtsim.integrations.transformers import FmtsimCallback
from fmtsim.recipes.recipe import Rule
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from tests.support.followed import ROWS, Writer, llama, remembered, same
from tests.support.refusals import refused

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # the Trainer warns of everything
]
STEPS = 20


def trainer(folder, model=None, every=5, report=None, rows=ROWS, follow=True, how=None, **more):
    options = {"save_strategy": "no", "logging_steps": 5, **more}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, num_train_epochs=1, learning_rate=1e-3, report_to="none",
        use_cpu=True, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    found = transformers.Trainer(
        llama() if model is None else model, arguments, train_dataset=rows, eval_dataset=rows[:4]
    )
    found.remove_callback(transformers.PrinterCallback)
    if not follow:
        return found
    callback = FmtsimCallback(found, every=every, report=report, **(how or {}))
    found.add_callback(callback)
    return found, callback.record


def test_a_resumed_run_ends_with_the_bits_of_one_without_a_stop(tmp_path):
    plain = trainer(tmp_path, follow=False)
    plain.train()
    run, whole = trainer(tmp_path, save_strategy="steps", save_steps=8, report=tmp_path / "run.html")
    run.train()
    assert same(run.model, plain.model) and len(whole.losses) == STEPS
    assert list(whole.seen.history) == [1, 6, 11, 16] and whole.seen.steps == STEPS
    again, record = trainer(tmp_path, report=tmp_path / "again.html")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert same(again.model, plain.model) and remembered(again.model) == remembered(plain.model)
    assert record.losses == whole.losses and record.seen.to_dict() == whole.seen.to_dict()
    pages = [(tmp_path / name).read_text("utf-8") for name in ("run.html", "again.html")]
    assert all("te_delayed" in page and "had not ended" not in page for page in pages)


def test_scales_come_from_the_file_beside_the_checkpoint(tmp_path):
    """As with PEFT, whose own files have none of the scales of base layers."""
    run, _ = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    run.train()
    path = tmp_path / "checkpoint-2" / "fmtsim_state.pt"
    state = torch.load(path, weights_only=True)
    remembered = [fields for operands in state["recipe_states"][0]["layers"].values() for fields in operands.values()]
    for fields in remembered:
        fields["calls"].fill_(30)
    torch.save(state, path)
    again, _ = trainer(tmp_path, max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    layers = fmtsim.state(again.model)["layers"].values()
    assert remembered and {int(fields["calls"]) for one in layers for fields in one.values()} == {31}


def test_the_trainer_logs_what_was_observed_and_its_own_losses(tmp_path):
    run, record = trainer(tmp_path, logging_steps=4)
    run.train()
    log = run.state.log_history
    assert [row["step"] for row in log if "loss" in row] == [4, 8, 12, 16, 20]  # also where both log, in step 16
    found = {row["step"]: row for row in log if "fmtsim_worst_sqnr_db" in row}
    assert list(found) == [1, 6, 11, 16]
    seen = record.seen.history[6]
    worst = min(s.sqnr_db for operands in seen.values() for s in operands.values())
    assert found[6]["fmtsim_worst_sqnr_db"] == worst
    assert found[6]["fmtsim_worst_underflow_percent"] == max(
        s.underflow_percent for operands in seen.values() for s in operands.values()
    )
    own = [sum(record.losses[end - 4 : end]) / 4 for end in (4, 8, 12, 16, 20)]
    assert own == pytest.approx([row["loss"] for row in log if "loss" in row], rel=1e-5)  # summed in float32


def test_a_callback_is_handed_to_the_trainer(tmp_path):
    """It follows as one that was given the Trainer, and the log has names of layers."""
    plain = trainer(tmp_path, follow=False)
    plain.train()
    callback = FmtsimCallback(every=2, report=tmp_path / "run.html")
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, learning_rate=1e-3, report_to="none",
        use_cpu=True, disable_tqdm=True, seed=0, save_strategy="no", logging_steps=5,
    )  # fmt: skip

    class Own(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    run = Own(llama(), arguments, train_dataset=ROWS, callbacks=[callback])
    run.train()
    assert same(run.model, plain.model) and callback.record.losses and (tmp_path / "run.html").exists()
    rows = [row for row in run.state.log_history if "fmtsim_worst_sqnr" in row]
    assert [row["step"] for row in rows] == list(callback.record.seen.history) == list(range(1, STEPS + 1, 2))
    for row in rows:
        layer, operand = row["fmtsim_worst_sqnr"].split()
        assert callback.record.seen.history[row["step"]][layer][operand].sqnr_db == row["fmtsim_worst_sqnr_db"]
        share, place = row["fmtsim_worst_underflow_percent"], row.get("fmtsim_worst_underflow")
        assert (place is None) == (share == 0)  # where nothing underflows no layer is the worst
        layers = callback.record.seen.history[row["step"]]
        assert place is None or layers[place.split()[0]][place.split()[1]].underflow_percent == share
    assert any("fmtsim_worst_underflow" in row for row in rows)


def test_a_callback_that_does_not_know_its_trainer_says_how(tmp_path):
    run = trainer(tmp_path, follow=False)
    run.add_callback(FmtsimCallback(every=2))
    refused(r"does not know; pass callbacks=\[FmtsimCallback\(\)\] to the Trainer, or call trainer.add_", run.train)


def test_trackers_of_the_trainer_get_histograms(tmp_path):
    run, _ = trainer(tmp_path, every=10, how={"histograms": "layer"})
    writer = Writer()
    run.add_callback(type("TensorBoardCallback", (transformers.TrainerCallback,), {"tb_writer": writer})())
    run.train()
    assert {step for _, step in writer.histograms} == {1, 11}
    assert ("fmtsim_exponents/lm_head/g_d", 11) in writer.histograms


def test_a_model_that_is_not_converted_is_observed_as_it_is(tmp_path):
    plain = trainer(tmp_path, llama(None), follow=False)
    plain.train()
    run, record = trainer(tmp_path, llama(None), every=9, report=tmp_path / "run.html", how={"recipe": "te_current"})
    run.train()
    assert same(run.model, plain.model) and "lm_head" in record.seen.layers and list(record.seen.history) == [1, 10, 19]
    page = (tmp_path / "run.html").read_text("utf-8")
    assert "cast beside it for te_current" in page and "of weight multiply-adds simulated" in page
    ruled, record = trainer(
        tmp_path, llama(None), every=9, how={"recipe": "te_current", "rules": [Rule(name="lm_head")]}
    )
    ruled.train()
    assert record.seen.layers and "lm_head" not in record.seen.layers


def test_a_step_is_one_of_the_optimizer(tmp_path):
    run, record = trainer(
        tmp_path, every=2, gradient_accumulation_steps=4, eval_strategy="steps", eval_steps=1, logging_steps=1
    )
    run.train()
    assert record.losses == pytest.approx([row["loss"] for row in run.state.log_history if "loss" in row], rel=1e-5)
    assert list(record.seen.history) == [1, 3, 5] and record.seen.steps == len(record.losses) == 5
    rows = {s["x_f"].elements for layers in record.seen.history.values() for s in layers.values()}
    assert {n // 64 for n in rows} <= {4 * 2 * 8, 2 * 4 * 2 * 8}  # width 64 or 128: four batches of 2 x 8 tokens


def test_a_schedule_is_told_each_step(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fmtsim.integrations.run_record.set_step", lambda model, step: told.append(step))
    run, _ = trainer(tmp_path, gradient_accumulation_steps=5)
    run.train()
    assert told == [0, 1, 2, 3]


def test_a_loss_that_is_nan_is_told_at_once(tmp_path):
    """The Trainer's own log leaves it out."""
    run, record = trainer(tmp_path, every=1, report=tmp_path / "run.html", max_steps=6)
    inner = run.training_step

    def spoilt(model, *args):
        if run.state.global_step == 3:
            with torch.no_grad():
                model.lm_head.weight.fill_(math.nan)
        return inner(model, *args)

    run.training_step, write, written = spoilt, record.write, []
    record.write = lambda *args: (written.append(len(record.losses)), write(*args))
    run.train()
    assert list(map(math.isnan, record.losses)) == [False] * 3 + [True] * 3 and written == [4, 6]
    assert list(record.seen.history) == [1, 2, 3] and "became nan at step 4" in (tmp_path / "run.html").read_text(
        "utf-8"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_run_leaves_a_report(tmp_path, error):
    run, record = trainer(tmp_path, every=3, report=tmp_path / "run.html")

    def stop(*_):
        if run.state.global_step == 6:  # an observed step
            raise error("enough")

    hook = run.model.lm_head.register_forward_pre_hook(stop)
    refused("enough", run.train, error=error)
    page = (tmp_path / "run.html").read_text("utf-8")
    assert f"Interrupted after step 6 by {error.__name__}" in page and list(record.seen.history) == [1, 4]
    hook.remove()
    with fmtsim.observe(run.model):  # it is no longer observed
        pass


class Writes:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_of_another_recipe_or_a_damaged_file_is_refused(tmp_path):
    run, _ = trainer(tmp_path, llama("te_current"), save_strategy="steps", save_steps=2, max_steps=2)
    run.train()
    with pytest.raises(ArgumentError, match="the state is of recipe 'te_current', the model runs 'te_mxfp8'"):
        trainer(tmp_path, llama("te_mxfp8"), max_steps=4)[0].train(resume_from_checkpoint=True)
    path = tmp_path / "checkpoint-2" / "fmtsim_state.pt"
    for content in (b"", b"junk", path.read_bytes()[:-100]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(f"{path} cannot be read: ")):
            trainer(tmp_path, llama("te_current"), max_steps=4)[0].train(resume_from_checkpoint=True)
    torch.save([1], path)
    with pytest.raises(DataError, match="it holds something else than the state of a run; go on from"):
        trainer(tmp_path, llama("te_current"), max_steps=4)[0].train(resume_from_checkpoint=True)
    torch.save(Writes(tmp_path / "ran"), path)
    with pytest.raises(DataError, match="cannot be read: Weights only load failed"):
        trainer(tmp_path, llama("te_current"), max_steps=4)[0].train(resume_from_checkpoint=True)
    assert not (tmp_path / "ran").exists()  # what a file says is not run
    path.unlink()
    again, record = trainer(tmp_path, llama("te_current"), max_steps=4, report=tmp_path / "run.html")
    again.train(resume_from_checkpoint=True)
    assert len(record.losses) == 2 and "Steps 1 to 2 ran without the callback" in (tmp_path / "run.html").read_text()


def test_nonsense_is_refused(tmp_path):
    plain = trainer(tmp_path, follow=False)
    refused("got LlamaForCausalLM as trainer; pass callbacks=", FmtsimCallback, plain.model)
    refused("every=0 is not a number of steps; pass 1 to observe all", FmtsimCallback, plain, every=0)
    refused("report=7 is not a path", FmtsimCallback, plain, report=7)
    refused("there is no folder", FmtsimCallback, plain, report=tmp_path / "absent" / "run.html")
    plain.train = plain.train  # nothing above wrapped it
    FmtsimCallback(plain)
    refused(r"was made, but not added; call trainer.add_callback\(callback\)", plain.train)
    other = trainer(tmp_path, follow=False)
    other.add_callback(trainer(tmp_path)[0].callback_handler.callbacks[-1])
    refused(r"made for another Trainer; make one for each, FmtsimCallback\(trainer\)", other.train)
    run, _ = trainer(tmp_path, llama(None))
    refused("no converted layer in LlamaForCausalLM; hand the trainer fmtsim.convert", run.train)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(integration, "TrainerCallback", object)
    with pytest.raises(FmtsimError, match=r'needs transformers and accelerate; pip install "fmtsim\[transformers\]"'):
        FmtsimCallback(None)
