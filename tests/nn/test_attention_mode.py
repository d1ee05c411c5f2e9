"""Quantised attention in models that call torch's function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmtsim.errors import ArgumentError
from fmtsim.nn.attention_mode import QuantisedAttention, convert_attention, revert_attention
from fmtsim.nn.sdpa import flash_attention_3, quantised_attention
from tests.support.models import gpt
from tests.support.operands import normal

CONFIG = flash_attention_3(unit=None)


def batch():
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_the_mode_replaces_one_function():
    q, k, v = (normal(1, 2, 16, 32, seed=i) for i in range(3))
    with QuantisedAttention(CONFIG, generator=5):
        y = F.scaled_dot_product_attention(q, k, value=v, is_causal=True)
        z = F.softmax(q, -1)
    assert torch.equal(y, quantised_attention(q, k, v, is_causal=True, config=CONFIG, generator=5))
    assert torch.equal(z, F.softmax(q, -1))
    assert not torch.equal(y, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_model_and_back():
    model = gpt()
    plain, keys = model(*batch()).item(), list(model.state_dict())
    assert convert_attention(model, CONFIG, generator=1) is model
    changed = model(*batch())
    assert changed.item() != plain
    assert changed.item() == pytest.approx(plain, abs=0.02)
    changed.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert list(model.state_dict()) == keys
    assert revert_attention(model)(*batch()).item() == plain
    assert not model.blocks[0].attention._forward_hooks and not model.blocks[0].attention._forward_pre_hooks


def test_checkpointing_runs_the_same_attention_again():
    """The recomputed forward has the same signs, so gradients are those without checkpointing."""
    inputs, targets = batch()

    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    plain = convert_attention(gpt(), CONFIG)
    other = copy.deepcopy(gpt())
    other.blocks = nn.ModuleList(Checkpointed(block) for block in other.blocks)
    convert_attention(other, CONFIG)
    for model in (plain, other):
        torch.manual_seed(3)
        model(inputs, targets).backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_error_inside_leaves_no_mode_behind():
    class Broken(nn.Module):
        def forward(self, x):
            F.scaled_dot_product_attention(x, x, x)
            raise RuntimeError("broken")

    model = convert_attention(Broken(), CONFIG, filter_fn=lambda module, name: True, generator=0)
    x = normal(1, 8, 16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            model(x)
    q = quantised_attention(x, x, x, config=CONFIG, generator=0)
    assert not torch.equal(F.scaled_dot_product_attention(x, x, x), q)


def test_errors():
    with pytest.raises(ArgumentError, match=r"found no attention in Linear; pass filter_fn= to name the modules"):
        convert_attention(nn.Linear(4, 4), CONFIG)
    model = convert_attention(gpt(), CONFIG)
    with pytest.raises(ArgumentError, match=r"attention of 'blocks.0.attention' is converted already; call revert"):
        convert_attention(model, CONFIG)
    with pytest.raises(ArgumentError, match=r"GPT has no converted attention; call convert_attention first"):
        revert_attention(gpt())
