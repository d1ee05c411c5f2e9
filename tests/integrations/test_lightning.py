# SPDX-License-Identifier: Apache-2.0
"""FmtsimCallback in the Trainer of Lightning: bits of a run without it, resuming, logs, and what ends a run."""

import importlib
import math

import pytest
import torch
from torch.utils.data import DataLoader

import fmtsim
from fmtsim.integrations import lightning as integration
from fmtsim.integrations.lightning import FmtsimCallback
from fmtsim.recipes.recipe import Rule
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from tests.support.followed import ROWS, Writer, llama, remembered, same
from tests.support.refusals import refused

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install lightning")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Task(lightning.LightningModule):
    """A language model; ``at`` has what is called before a batch of that number."""

    def __init__(self, recipe="te_delayed", at=None):
        super().__init__()
        self.model, self.at = llama(recipe), at or {}
        self.save_hyperparameters("recipe")

    def training_step(self, batch, index):
        self.at.get(index, lambda: None)()
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Logged(lightning.loggers.logger.Logger):
    """Remember what is logged."""

    name, version = "logged", 0

    def __init__(self):
        super().__init__()
        self.rows, self.experiment = [], Writer()

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_, **__):
        pass


def trainer(folder, callback=None, package=lightning, save=None, **options):
    """Return a Trainer; ``save``: a checkpoint each so many steps, ``step=10.ckpt``."""
    callbacks = [callback] if callback else []
    if save is not None:
        callbacks.append(
            lightning.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save, save_top_k=-1)
        )
    usual = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": save is not None,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    return package.Trainer(callbacks=callbacks, **{**usual, **options})


def train(folder, task=None, callback=None, checkpoint=None, validation=None, **options):
    """Return the Trainer after a run over batches of two, 20 an epoch."""
    found, task = trainer(folder, callback, **options), task or Task()
    found.fit(task, DataLoader(ROWS, batch_size=2), validation, ckpt_path=checkpoint)
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resumed_run_ends_with_the_bits_of_one_without_a_stop(tmp_path, precision):
    options = {"accumulate_grad_batches": 2, "precision": precision}
    plain, whole, again = (Task() for _ in range(3))
    train(tmp_path, plain, max_epochs=2, **options)
    callback = FmtsimCallback(every=6, report=tmp_path / "run.html")
    run = train(tmp_path, whole, callback, save=10, max_steps=20, max_epochs=2, **options)
    record = callback.record
    assert same(whole.model, plain.model) and record.step == run.global_step == 20
    assert list(record.seen.history) == [1, 7, 13, 19] and len(record.losses) == 20
    first = FmtsimCallback(every=6, report=tmp_path / "first.html")
    folder = tmp_path / "first"
    train(folder, callback=first, save=10, max_steps=10, max_epochs=2, **options)
    other = FmtsimCallback(every=6, report=tmp_path / "again.html")
    train(tmp_path, again, other, folder / "step=10.ckpt", max_steps=20, max_epochs=2, **options)
    assert same(again.model, plain.model) and remembered(again.model) == remembered(plain.model)
    assert other.record.losses == record.losses and other.record.seen.to_dict() == record.seen.to_dict()
    pages = [(tmp_path / f"{name}.html").read_text("utf-8") for name in ("run", "first", "again")]
    assert all("te_delayed" in page and "had not ended" not in page for page in pages)


def test_scales_come_from_the_state_in_the_checkpoint(tmp_path):
    path = tmp_path / "step=2.ckpt"
    train(tmp_path, callback=FmtsimCallback(), save=2, max_steps=2)
    checkpoint = torch.load(path, weights_only=True)
    for fields in checkpoint["fmtsim"]["recipe_states"][0]["layers"]["lm_head"].values():
        fields["calls"].fill_(30)
    torch.save(checkpoint, path)
    task = Task()
    train(tmp_path, task, FmtsimCallback(), path, max_steps=3)
    layers = fmtsim.state(task.model)["layers"]
    assert {int(fields["calls"]) for fields in layers["lm_head"].values()} == {31}


def test_a_step_is_one_of_the_optimizer_and_validation_is_none(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fmtsim.integrations.run_record.set_step", lambda model, step: told.append(step))
    callback, logger = FmtsimCallback(every=2), Logged()
    validation = DataLoader(ROWS[:4], batch_size=2)
    train(
        tmp_path, Task(), callback, validation=validation, accumulate_grad_batches=3, val_check_interval=2,
        logger=logger, log_every_n_steps=1,
    )  # fmt: skip
    record = callback.record
    assert set(told) == set(range(7)) and told == sorted(told) and len(record.losses) == 7
    assert list(record.seen.history) == [1, 3, 5, 7]
    elements = [layers["lm_head"]["g_d"].elements for layers in record.seen.history.values()]
    assert elements == [3 * 2 * 8 * 256] * 3 + [2 * 2 * 8 * 256]  # validated in their middle; two batches are left
    forward = [layers["lm_head"]["x_f"].elements for layers in record.seen.history.values()]
    assert forward == [3 * 2 * 8 * 64] * 3 + [2 * 2 * 8 * 64]


def test_loggers_get_numbers_and_histograms(tmp_path):
    losses = []

    class Told(Task):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            losses.append(float(loss))
            self.log("loss", loss)
            return loss

    callback, loggers = FmtsimCallback(every=10), [Logged(), Logged()]
    train(tmp_path, Told(), callback, logger=loggers, log_every_n_steps=1)
    for logger in loggers:
        rows = [(step, row) for step, row in logger.rows if "fmtsim_nonfinite" in row]
        assert [step for step, _ in rows] == [0, 10]
        assert [step for step, row in logger.rows if "loss" in row] == list(range(20))
        last = callback.record.seen.history[11]
        assert rows[1][1]["fmtsim_worst_sqnr_db"] == min(s.sqnr_db for layer in last.values() for s in layer.values())
        assert logger.experiment.histograms[:3] == [(f"fmtsim_exponents/{name}", 0) for name in ("x_f", "w_f", "g_d")]
    assert callback.record.losses == losses


def test_losses_are_means_over_batches(tmp_path):
    losses = []

    class Told(Task):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            losses.append(float(loss.detach() / 3 * 3))  # which Lightning divides
            return loss

    callback = FmtsimCallback()
    train(tmp_path, Told(), callback, accumulate_grad_batches=3)
    parts = [losses[first : first + 3] for first in range(0, 20, 3)]
    assert callback.record.losses == [sum(part) / len(part) for part in parts]


def test_a_model_that_is_not_converted_is_observed_as_it_is(tmp_path):
    plain, task, callback = (
        Task(None),
        Task(None),
        FmtsimCallback(every=9, format="mxfp8_e4m3", rules=[Rule(name="lm_head")], report=tmp_path / "run.html"),
    )
    train(tmp_path, plain)
    train(tmp_path, task, callback)
    assert same(task.model, plain.model) and list(callback.record.seen.history) == [1, 10, 19]
    assert {s.format for layer in callback.record.seen.layers.values() for s in layer.values()} == {"mxfp8_e4m3"}
    page = (tmp_path / "run.html").read_text("utf-8")
    assert (
        "lm_head" not in callback.record.seen.layers
        and "cast beside it for mxfp8_e4m3+rules" in page
        and "te_delayed" not in page
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_run_leaves_a_report(tmp_path, error):
    def stop():
        raise error("enough")

    task, callback = Task(at={6: stop}), FmtsimCallback(every=3, report=tmp_path / "run.html")  # an observed step
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        train(tmp_path, task, callback)
    page = (tmp_path / "run.html").read_text("utf-8")
    assert f"Interrupted after step 6 by {error.__name__}" in page and list(callback.record.seen.history) == [1, 4]
    with fmtsim.observe(task.model):  # it is no longer observed
        pass


def test_a_loss_that_is_nan_is_told_at_once(tmp_path):
    told = []
    task = Task()
    task.at = {
        3: lambda: task.model.lm_head.weight.data.fill_(math.nan),
        4: lambda: told.append("became nan at step 4" in (tmp_path / "run.html").read_text("utf-8")),
    }
    callback = FmtsimCallback(every=1, report=tmp_path / "run.html")
    train(tmp_path, task, callback, max_steps=6)
    assert told == [True] and list(map(math.isnan, callback.record.losses)) == [False] * 3 + [True] * 3
    assert list(callback.record.seen.history) == [1, 2, 3]


def test_manual_optimization_counts_batches_and_may_return_no_loss(tmp_path):
    class Manual(Task):
        automatic_optimization = False

        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                self.manual_backward(self.model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            half = list(self.parameters())
            return [torch.optim.SGD(part, lr=1e-3) for part in (half[::2], half[1::2])]

    callback = FmtsimCallback(every=10, report=tmp_path / "run.html")
    run = train(tmp_path, Manual(), callback)
    assert run.global_step == 40 and callback.record.step == 20 and callback.record.losses == []
    assert list(callback.record.seen.history) == [1, 11] and (tmp_path / "run.html").exists()


def test_pytorch_lightning_serves_as_well(tmp_path):
    package = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    other = type("Other", (package.LightningModule,), {k: v for k, v in vars(Task).items() if k != "__init__"})
    task, callback = other(), FmtsimCallback(every=10)
    task.model, task.at = llama(), {}
    train(tmp_path, task, callback, package=package)
    assert list(callback.record.seen.history) == [1, 11] and len(callback.record.losses) == 20


def test_misuse_is_refused(tmp_path):
    callback = FmtsimCallback()
    train(tmp_path, Task("te_current"), callback, save=1, max_steps=1)
    path = tmp_path / "step=1.ckpt"
    with pytest.raises(ArgumentError, match=r"follows another Trainer; make one for each, FmtsimCallback\(\)"):
        train(tmp_path, Task("te_current"), callback)
    with pytest.raises(ArgumentError, match="is of recipe 'te_current', the model runs 'te_mxfp8'"):
        train(tmp_path, Task("te_mxfp8"), FmtsimCallback(), path, max_steps=3)
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | {"fmtsim": {"observation": {"steps": 1}}}, tmp_path / "other.ckpt")
    with pytest.raises(DataError, match="the checkpoint holds something else than the state of a run"):
        train(tmp_path, Task("te_current"), FmtsimCallback(), tmp_path / "other.ckpt", max_steps=3)
    checkpoint.pop("fmtsim")
    torch.save(checkpoint, tmp_path / "without.ckpt")
    later = FmtsimCallback(report=tmp_path / "run.html")
    train(tmp_path, Task("te_current"), later, tmp_path / "without.ckpt", max_steps=3)
    assert len(later.record.losses) == 2 and "Steps 1 to 1 ran without the callback" in (
        tmp_path / "run.html"
    ).read_text("utf-8")
    with pytest.raises(ArgumentError, match="no converted layer in Task; hand the trainer fmtsim.convert"):
        train(tmp_path, Task(None), FmtsimCallback())
    refused("every=0 is not a number of steps", FmtsimCallback, every=0)


def test_either_name_of_lightning_serves_and_without_it_the_extra_is_named(monkeypatch):
    present = importlib.import_module

    def absent(*names):
        def find(name):
            if name in names:
                raise ImportError(name)
            return present(name)

        monkeypatch.setattr(integration.importlib, "import_module", find)
        return integration._callback()

    assert absent("pytorch_lightning") is lightning.Callback
    assert absent("lightning.pytorch").__module__.startswith("pytorch_lightning")
    monkeypatch.setattr(integration, "Callback", absent("lightning.pytorch", "pytorch_lightning"))
    refused(r'needs lightning; pip install "fmtsim\[lightning\]"', FmtsimCallback, error=FmtsimError)
