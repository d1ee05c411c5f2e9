# SPDX-License-Identifier: Apache-2.0
"""Converted models in Accelerate, in Trainers of Hugging Face and Lightning, in PEFT and FSDP2: a plain loop's bits."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import fmtsim
from fmtsim.nn import convert
from fmtsim.nn.modules import EmulatedModule
from tests.support.bits import all_same_bits
from tests.support.followed import lightning_task, llama, same
from tests.support.models import hugging_face

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of the packages: the Trainers warn of everything
]
STEPS = 5
TOKENS = torch.randint(0, 256, (4 * STEPS - 2, 16), generator=torch.Generator().manual_seed(0))  # the last batch has 2
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


def package(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)


def plain_loop(model, every=1, epochs=1):
    """Train by hand, with a step after each few batches."""
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for i, batch in enumerate(DataLoader(ROWS, batch_size=4), start=1):
            (model(**batch).loss / every).backward()
            if i % every == 0 or i == STEPS:
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("recipe", ["te_delayed", "te_current"])
def test_accelerate(recipe, tmp_path):
    package("transformers")
    accelerate = package("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama(recipe)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), DataLoader(ROWS, batch_size=4))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, plain_loop(llama(recipe), every=2))
    accelerator.save_state(tmp_path / "state")
    saved, remembered = {key: t.clone() for key, t in model.state_dict().items()}, str(fmtsim.state(model))
    model(**{key: row[None] for key, row in ROWS[0].items()}).loss.backward()  # scales move
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(t, saved[key]) for key, t in model.state_dict().items())
    assert str(fmtsim.state(model)) == remembered
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def trainer(model, folder, **more):
    transformers = package("transformers")
    package("accelerate")
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-3, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=0.0, report_to="none", use_cpu=True, disable_tqdm=True, save_steps=3,
        save_strategy="steps", logging_strategy="no", optim="adamw_torch", **more,
    )  # fmt: skip
    found = transformers.Trainer(model, arguments, train_dataset=ROWS)
    found._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(ROWS)
    return found


@pytest.mark.parametrize("recipe", ["te_delayed", "te_current"])
def test_the_trainer_of_hugging_face(recipe, tmp_path):
    """The last batch is partial; a run that goes on from its checkpoint ends with the bits of one without a stop."""
    run = trainer(llama(recipe), str(tmp_path))
    run.train()
    assert run.state.global_step == STEPS
    again = llama(recipe)
    trainer(again, str(tmp_path)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(run.model, again) and same(again, plain_loop(llama(recipe)))


def test_save_pretrained_keeps_scales_and_from_pretrained_takes_the_weights(tmp_path):
    transformers = package("transformers")
    safetensors = importlib.import_module("safetensors.torch")
    model = plain_loop(llama())
    model.save_pretrained(tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in plain.state_dict().items())
    again = convert(plain, recipe="te_delayed")
    again.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), strict=True)
    assert same(model, again) and str(fmtsim.state(again)) == str(fmtsim.state(model))


def test_lightning():
    package("transformers")
    lightning = package("lightning")

    task = lightning_task(lightning, weight_decay=0.0)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_steps=STEPS, accelerator="cpu", devices=1, **quiet).fit(task, DataLoader(ROWS, batch_size=4))
    assert same(task.model, plain_loop(llama()))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["te_delayed", "te_nvfp4_all"])
def test_fsdp2(recipe, mesh):
    package("transformers")
    plain, model = llama(recipe), llama(recipe)
    torch.manual_seed(0)  # of te_nvfp4's stochastic rounding
    expected = plain_loop(plain).state_dict()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(0)
    state = plain_loop(fully_shard(model, mesh=mesh)).state_dict()
    whole = {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in state.items()}
    assert list(whole) == list(expected) and all_same_bits(list(whole.values()), list(expected.values()))


@pytest.mark.parametrize(("recipe", "operand"), [("te_mxfp8", "x_w"), ("halo2_fp6", "g_w")])
def test_peft_trains_adapters_alone(recipe, operand):
    package("transformers")
    peft = package("peft")
    torch.manual_seed(0)
    adapted = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = convert(peft.get_peft_model(hugging_face("llama", layers=1), adapted), recipe=recipe).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with fmtsim.observe(model) as seen:
        plain_loop(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and moved == {name for name in before if "lora_" in name}
    layers = {name for name, module in model.named_modules() if isinstance(module, EmulatedModule)}
    learns = {name for name in layers if "lora_" in name}
    assert learns and all((operand in seen[name]) == (name in learns) and "x_f" in seen[name] for name in layers)


def test_the_lines_of_the_readme(tmp_path, monkeypatch):
    transformers = package("transformers")
    package("accelerate")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(import fmtsim, transformers\n.*?)```", readme, re.DOTALL)
    assert len([line for line in lines.splitlines() if line]) == 5
    hugging_face("llama", layers=1).save_pretrained(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    arguments = transformers.TrainingArguments(
        output_dir="out", max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True
    )
    names = {"name": str(tmp_path / "llama"), "arguments": arguments, "data": ROWS}
    exec(compile(lines, "README.md", "exec"), names)
    assert (tmp_path / "report.html").exists()
