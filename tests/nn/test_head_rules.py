"""Embedding and head under recipes: what the rule of the head finds, and that embeddings are never converted."""

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.nn.modules import EmulatedModule
from fmtsim.recipes import get_recipe, list_recipes


class Tower(nn.Module):
    def __init__(self, tied=False, head=True):
        super().__init__()
        self.embedding = nn.Embedding(32, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
        if head:
            self.head = nn.Linear(128, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, EmulatedModule)]


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_stays_in_high_precision(tied):
    model = fmtsim.convert(Tower(tied), "mu_s")
    assert converted(model) == [f"blocks.{i}.0" for i in range(4)]
    assert "the recipe leaves it in high precision" in str(fmtsim.report(model))
    assert not tied or model.head.weight is model.embedding.weight


def test_a_model_without_head_keeps_its_last_block():
    """The last linear layer is no head where it belongs to a block."""
    assert converted(fmtsim.convert(Tower(head=False), "mu_s")) == [f"blocks.{i}.0" for i in range(4)]


@pytest.mark.parametrize("name", [name for name in list_recipes() if get_recipe(name).linear is not None])
def test_no_recipe_touches_an_embedding(name):
    model = Tower()
    before = model.embedding.weight.detach().clone()
    fmtsim.convert(model, name, generator=0, total_steps=10)
    assert type(model.embedding) is nn.Embedding
    assert torch.equal(model.embedding.weight, before)
