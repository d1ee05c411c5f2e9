# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama, its data and loops, for tests of callbacks."""

import torch

import fmtsim
from fmtsim.nn import convert
from tests.support.bits import all_same_bits
from tests.support.models import hugging_face

TOKENS = torch.randint(0, 256, (40, 8), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


def llama(recipe="te_delayed"):
    """Return a converted model, or with None a plain one."""
    model = hugging_face("llama", layers=1).train()
    return model if recipe is None else convert(model, recipe=recipe)


def same(one, other):
    """Return True if two models have the same weights and remember the same."""
    pairs = [dict(model.state_dict()) for model in (one, other)]
    return list(pairs[0]) == list(pairs[1]) and all_same_bits(*(list(state.values()) for state in pairs))


def remembered(model):
    """Return what a model's recipe remembers, as text."""
    with torch._tensor_str.printoptions(profile="full"):
        return str(fmtsim.state(model))


def lightning_task(package, weight_decay=0.01):
    """Return a LightningModule of ``lightning``, or of ``lightning.pytorch``, with a model to train."""

    class Task(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=weight_decay)

    return Task()


class Writer:
    """What a SummaryWriter of TensorBoard has for histograms."""

    def __init__(self):
        self.histograms = []

    def add_histogram_raw(
        self, tag, min, max, num, sum, sum_squares, bucket_limits, bucket_counts, global_step=None, walltime=None
    ):
        assert len(bucket_limits) == len(bucket_counts)
        self.histograms.append((tag, global_step))
