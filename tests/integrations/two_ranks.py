# SPDX-License-Identifier: Apache-2.0
"""What two processes do for test_two_ranks.py: ``python -m torch.distributed.run --nproc-per-node 2 -m ... FOLDER``.

Each trainer runs four steps, saves after the second, and goes on from there in a run of its own. The processes have
other data and delayed scales of their own, which DistributedDataParallel is told to leave apart.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.followed import ROWS, lightning_task, llama, remembered


def accelerate(folder):
    import accelerate

    from fmtsim.integrations.accelerate import FmtsimRun

    def loop(first, name):
        apart = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)
        accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[apart])
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS[:16], batch_size=2))
        run = FmtsimRun(accelerator, wrapped, every=2, report=folder / f"{name}.html")
        if first:
            accelerator.load_state(folder / "state")
        with run:
            for batch in accelerator.skip_first_batches(loader, first):
                with run.accumulate():
                    accelerator.backward(wrapped(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if run.step == 2 and not first:
                    accelerator.save_state(folder / "state")
        return model, run.record

    return loop(0, "whole"), loop(2, "again")


def lightning(folder):
    import lightning.pytorch as package

    from fmtsim.integrations.lightning import FmtsimCallback

    def fit(checkpoint, name):
        task, callback = lightning_task(package), FmtsimCallback(every=2, report=folder / f"{name}.html")
        saved = package.callbacks.ModelCheckpoint(
            folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, enable_version_counter=False
        )
        trainer = package.Trainer(
            max_epochs=2, accelerator="cpu", devices=2, logger=False, callbacks=[callback, saved],
            strategy=package.strategies.DDPStrategy(broadcast_buffers=False, process_group_backend="gloo"),
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        loader = DataLoader(ROWS[:8], batch_size=2, sampler=DistributedSampler(ROWS[:8], shuffle=False))
        trainer.fit(task, loader, ckpt_path=checkpoint)
        return task.model, callback.record

    return fit(None, "whole"), fit(folder / "step=2.ckpt", "again")


def transformers(folder):
    import transformers as package

    from fmtsim.integrations.transformers import FmtsimCallback

    def train(checkpoint, name):
        arguments = package.TrainingArguments(
            str(folder), per_device_train_batch_size=2, num_train_epochs=1, learning_rate=1e-3, report_to="none",
            use_cpu=True, disable_tqdm=True, seed=0, ddp_broadcast_buffers=False, ddp_backend="gloo",
            save_strategy="steps", save_steps=2, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = package.Trainer(llama(), arguments, train_dataset=ROWS[:16])
        trainer.remove_callback(package.PrinterCallback)
        callback = FmtsimCallback(trainer, every=2, report=folder / f"{name}.html")
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model, callback.record

    return train(None, "whole"), train(str(folder / "checkpoint-2"), "again")


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for trainer in (accelerate, lightning, transformers):
        place = folder / trainer.__name__
        place.mkdir(exist_ok=True)
        dist.barrier()
        (whole, record), (again, other) = trainer(place)
        weights = [[p.detach() for p in model.parameters()] for model in (whole, again)]
        found[trainer.__name__] = {
            "weights": all(map(torch.equal, *weights)),
            "remembered": [remembered(whole), remembered(again)],
            "losses": [record.losses, other.losses],
            "history": [list(each.seen.history) for each in (record, other)],
        }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
