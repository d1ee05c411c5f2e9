# SPDX-License-Identifier: Apache-2.0
"""Activations that are kept in FP8 for the backward pass, against codes and gradients that the test computes itself."""

import copy
import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fmtsim
from fmtsim.recipes import Recipe, SavedActivations, get_recipe
from fmtsim.recipes.serialization import recipe_from_dict, recipe_to_dict
from fmtsim.support.errors import ArgumentError, FmtsimError
from tests.support.models import NormedMLP, gpt, hugging_face
from tests.support.operands import normal, wide_with_specials
from tests.support.refusals import refused

SAVING = Recipe(name="saving", activations=SavedActivations())
UNSEEN = Recipe(name="unseen", activations=SavedActivations(flows=False))


def rounded(x, block=16):
    """Return what x is kept as: groups of elements in E4M3 by numpy and ml_dtypes, their scales in bfloat16."""
    values, size = x.detach().float().numpy(), x.shape[-1]
    padded = np.pad(values, [(0, 0)] * (x.dim() - 1) + [(0, -size % block)])
    groups = padded.reshape(*x.shape[:-1], -1, block)
    with np.errstate(invalid="ignore"):
        scale = (np.abs(groups).max(-1, keepdims=True) + np.float32(1e-10)) / np.float32(448)
        codes = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        kept = codes * scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    return torch.from_numpy(kept.reshape(*x.shape[:-1], -1)[..., :size].copy())


class Kept(torch.autograd.Function):
    """Put what is kept of x in its place; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return rounded(x)

    @staticmethod
    def backward(ctx, g):
        return g.to(ctx.dtype)


def written(model, x):
    """Run a NormedMLP on what is saved of its activations."""
    save, h = Kept.apply, model.norm(Kept.apply(x))
    gate, up = model.mlp.gate_proj(h), model.mlp.up_proj(h)
    return x + model.mlp.down_proj(save(F.silu(save(gate))) * save(up))


def block(norm=nn.RMSNorm, dtype=torch.float32):
    torch.manual_seed(0)
    return NormedMLP(norm).to(dtype)


def results(model, run=None, dtype=torch.float32):
    x = normal(4, 8, 32, seed=1, dtype=dtype).requires_grad_()
    model.zero_grad()
    y = (model if run is None else run)(x)
    y.backward(normal(4, 8, 32, seed=2, dtype=dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("size", [16, 40, 7])
def test_codes_are_those_of_the_definition(size):
    for seed, x in enumerate((wide_with_specials(64, size), normal(8, 64, size) * 1e-4, torch.zeros(2, size))):
        for t in (x, x.bfloat16()):
            codes, scales = SavedActivations().encode(t)
            assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, t.shape, (*t.shape[:-1], -(-size // 16)))
            ours, oracle = SavedActivations().decode(codes, scales), rounded(t)
            assert torch.equal(ours.isnan(), oracle.isnan()) and torch.equal(ours.nan_to_num(), oracle.nan_to_num()), (
                seed
            )


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_values_and_gradients_are_those_of_what_is_kept(norm):
    plain = block(norm)
    expected = results(plain, lambda x: written(plain, x))
    ours = fmtsim.convert(block(norm), SAVING)
    assert all(map(torch.equal, results(ours), expected))
    assert not torch.equal(results(plain)[0], expected[0])
    assert fmtsim.report(ours).rows[0].detail.endswith("1 norm, silu, gated products")
    x = normal(4, 32)
    assert torch.equal(ours.eval()(x), plain.eval()(x))  # nothing is saved, as in the source
    linear = fmtsim.convert(block(norm), dataclasses.replace(get_recipe("coat"), activations=None))
    assert torch.equal(fmtsim.convert(block(norm), "coat").eval()(x), linear.eval()(x))


def test_bfloat16_computes_in_float32():
    """Operators decode to float32 and round their result to the model's dtype."""
    model = fmtsim.convert(block(dtype=torch.bfloat16), SAVING)
    plain = block(dtype=torch.bfloat16)
    wide = copy.deepcopy(plain.norm).float()
    x = normal(4, 8, 32, seed=1, dtype=torch.bfloat16)
    h = wide(rounded(x)).bfloat16()
    gate, up = plain.mlp.gate_proj(h), plain.mlp.up_proj(h)
    z = (rounded(F.silu(rounded(gate)).bfloat16()) * rounded(up)).bfloat16()
    assert torch.equal(model(x), x + plain.mlp.down_proj(z))
    assert all(g.dtype == torch.bfloat16 for g in results(model, dtype=torch.bfloat16))


def test_a_forward_pass_that_sees_nothing():
    """Values are the plain ones, gradients those at what is kept."""
    ours, plain = fmtsim.convert(block(), UNSEEN), block()
    found, expected = results(ours), results(plain)
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])
    layer, x, g = fmtsim.convert(nn.Sequential(nn.GELU()), UNSEEN), normal(4, 40), normal(4, 40, seed=1)
    kept, x = rounded(x).requires_grad_(), x.requires_grad_()
    layer(x).backward(g)
    F.gelu(kept).backward(g)
    assert torch.equal(x.grad, kept.grad)


def bytes_kept(model, x):
    """Return the bytes of different storages that autograd keeps, those of Parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t  # which keeps the address from being used anew
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    return sum(t.untyped_storage().nbytes() for t in kept.values()), y


def test_what_autograd_keeps_shrinks():
    x = normal(64, 32).requires_grad_()
    layer = fmtsim.convert(nn.Sequential(nn.SiLU(), nn.GELU()), SAVING)
    assert bytes_kept(layer, x)[0] == 2 * (64 * 32 + 64 * 2 * 2)  # a byte an element, two a group of 16
    plain, _ = bytes_kept(block(), x)
    ours, _ = bytes_kept(fmtsim.convert(block(), SAVING), x)
    rows, groups = 64 * 32, 64 * 2 * 2  # norm; gate, silu of gate and up are twice as wide
    linears = 4 * (64 * 32 + 64 * 64)
    assert ours == rows + groups + 3 * 2 * (rows + groups) + linears and ours < plain / 1.7


def test_filters_and_records():
    with pytest.raises(ArgumentError, match="convert found nothing to convert in Sequential"):
        fmtsim.convert(nn.Sequential(block()), SAVING, filter_fn=lambda module, name: False)
    model = fmtsim.convert(block(), "coat", filter_fn=lambda module, name: name != "norm")
    details = {row.name: row.detail for row in fmtsim.report(model).rows}
    assert details["norm"] == "filter_fn leaves it out" and "0 norms" in details["(model)"]
    model = fmtsim.convert(gpt(), "coat")
    said = fmtsim.report(model)
    assert "; inputs of norms, activation functions and gated products kept in e4m3 in groups of 16" in said.summary
    details = {row.name: row.detail for row in said.rows}
    assert details["blocks.0.norm1"] == "input kept in e4m3 in groups of 16, scales in bf16"
    recipe = dataclasses.replace(SAVING, activations=SavedActivations(block=32, flows=False))
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert str(recipe.activations).endswith("kept in e4m3 in groups of 32, scales in bf16, unseen by the forward pass")
    for wrong in ({"block": 0}, {"eps": 0.0}):
        refused(rf"SavedActivations {next(iter(wrong))}=0.* is not above 0", SavedActivations, **wrong)
    with pytest.raises(ArgumentError, match="Recipe activations='e4m3' is not a SavedActivations or None; pass SavedA"):
        Recipe(name="x", activations="e4m3")
    x = normal(4, 16).requires_grad_()
    y = fmtsim.convert(nn.Sequential(nn.GELU()), SAVING)(x)
    (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(FmtsimError, match="activations saved in low precision cannot be differentiated twice"):
        y.sum().backward()


def test_llama_of_hugging_face():
    model = fmtsim.convert(hugging_face("llama"), "coat").train()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    details = {row.name: row.detail for row in fmtsim.report(model).rows}
    assert details["(model)"].endswith("5 norms, silu, gated products")
    assert all(p.grad is not None for p in model.parameters())
