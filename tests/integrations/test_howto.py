# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/howto/trainers.md run as a reader has them: with a config, data, a model and a loader."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.followed import ROWS, llama

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "trainers.md"


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    transformers, lightning, accelerate = (
        pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")
        for name in ("transformers", "lightning.pytorch", "accelerate")
    )
    monkeypatch.chdir(tmp_path)
    with_hugging_face, with_lightning, with_accelerate, batch = re.findall(
        r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama(None)

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True)
    names = {"config": llama(None).config, "arguments": arguments, "data": ROWS, "task": Task()}
    names |= {
        "model": llama(None),
        "loader": DataLoader(ROWS[:8], batch_size=2),
        "batch": {k: v[None] for k, v in ROWS[0].items()},
    }
    exec(with_hugging_face, dict(names))
    exec(with_lightning, dict(names))
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    exec(with_accelerate, names)
    exec(batch, names)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert {page.name for page in tmp_path.glob("*.html")} == {"llama.html", "lightning.html", "loop.html"}
    assert capsys.readouterr().out.count("underflow %") == 4
