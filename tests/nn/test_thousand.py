"""A model of a thousand modules: no bit of a weight changes, it comes back exactly (time: benchmarks/recipes.py)."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from fmtsim.nn import convert, flash_attention_3, report, revert
from fmtsim.recipes import get_recipe
from fmtsim.training.gpt import Block
from tests.support.bits import all_same_bits
from tests.support.models import snapshot

BOTH = dataclasses.replace(get_recipe("te_current"), name="both", attention=flash_attention_3())


def model(seed):
    """125 blocks of eight modules each, and a little around them: 1003 modules, 501 linear layers."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"blocks": nn.ModuleList(Block(16, 2) for _ in range(125)), "head": nn.Linear(16, 16, bias=False)}
    )


@pytest.fixture(scope="module")
def big():
    return model(0)


def same_state(module, weights):
    state = module.state_dict()
    return list(state) == list(weights) and all_same_bits(state.values(), weights.values())


@pytest.mark.parametrize(
    "recipe", ["te_mxfp8", "te_nvfp4", "te_delayed", "nvfp4_switch", BOTH], ids=lambda r: getattr(r, "name", r)
)
def test_a_thousand_modules(recipe, big):
    assert sum(1 for _ in big.modules()) == 1003
    big.blocks[3].up.register_forward_hook(lambda *_: None)
    big.blocks[4].eval().requires_grad_(False)
    weights, before = copy.deepcopy(big.state_dict()), snapshot(big)
    with torch.no_grad():
        plain = big.blocks[7](torch.ones(1, 16, 16))
    convert(big, recipe=recipe, total_steps=10)
    assert len(report(big).converted) > 400
    with torch.no_grad():
        assert not torch.equal(big.blocks[7](torch.ones(1, 16, 16)), plain)
    assert same_state(big, weights)
    other = model(1)
    other.load_state_dict(big.state_dict(), strict=True)
    assert same_state(other, weights)
    big.load_state_dict(other.state_dict(), strict=True)
    revert(big)
    assert snapshot(big) == before and same_state(big, weights)


def test_the_comparison_sees_a_flag_a_hook_and_an_object(big):
    before = snapshot(big)
    handle = big.blocks[0].down.register_forward_hook(lambda *_: None)
    assert snapshot(big) != before
    handle.remove()
    assert snapshot(big) == before
    eps = big.blocks[0].norm1.eps
    big.blocks[0].norm1.eps = 2 * eps
    assert snapshot(big) != before
    big.blocks[0].norm1.eps = eps
    assert snapshot(big) == before
