# SPDX-License-Identifier: Apache-2.0
"""Attention in coverage: every multiply-add of it in 28 architectures, and what is computed of weights is told once."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.nn import convert, convert_attention, report, revert
from fmtsim.recipes import flash_attention_3
from fmtsim.support.errors import CoverageWarning
from tests.support.architectures import ARCHITECTURES, MORE, architecture
from tests.support.operands import normal

X = normal(6, 32, seed=0)
DEFAULT = ("Llama", "T5", "Mamba-2")


def pairs(layers, queries, keys, width=16 + 16):
    """Return the multiply-adds of layers of four heads in two sequences; ``width`` is that of a query and a value."""
    return layers * 2 * 4 * queries * keys * width


OTHER = {
    "T5": pairs(6, 32, 32), "BART": pairs(6, 32, 32), "ViT": pairs(2, 17, 17), "Jamba": pairs(1, 32, 32),
    "CLIP": pairs(2, 32, 32) + pairs(2, 17, 17), "DeepSeek-V3": pairs(2, 32, 32, 24 + 16), "Mamba": 0, "Mamba-2": 0,
    "Whisper": pairs(2, 64, 64) + pairs(2, 32, 32) + pairs(2, 32, 64),
}  # fmt: skip
EAGER_ALONE = ("GPT-OSS", "Gemma 2", "Mamba", "Mamba-2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in ARCHITECTURES | MORE
     if name != "Llama with LoRA"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_every_product_of_attention_is_counted(name):
    """By torch's function and written out alike."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    for way in ("sdpa", "eager") if name not in EAGER_ALONE else ("eager",):
        model, batch = architecture(name)
        if "Mamba" not in name:
            model.set_attn_implementation(way)
        coverage = report(model.eval(), batch).coverage
        assert coverage.attention == OTHER.get(name, pairs(2, 32, 32)) and not coverage.attention_simulated
        assert coverage.keys == {"ViT": 17, "Whisper": 64}.get(name, 32 * (coverage.attention > 0))
        assert (coverage.others > 0) == (name in ("CLIP", "Jamba", "Mamba", "Mamba-2"))


class Block(nn.Module):
    """Attend with one head, by torch's function or in code of its own."""

    def __init__(self, *, written):
        super().__init__()
        self.proj, self.written = nn.Linear(32, 96, bias=False), written

    def forward(self, x):
        q, k, v = self.proj(x).chunk(3, -1)
        if self.written:
            return torch.softmax(q @ k.mT / 32**0.5, -1) @ v
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


TOKENS = normal(2, 12, 32, seed=1)
SIMULATED = "te_current: 100 % of weight multiply-adds simulated (forward and backward)"
SHARE = "attention products, 20.0 % of all at 12 tokens,"  # 2 x 12 x 12 x 64 beside 2 x 12 x 32 x 96


@pytest.mark.parametrize("written", [False, True])
def test_the_summary_says_what_becomes_of_attention(written):
    model = convert(Block(written=written), recipe="te_current")
    ways = "Recipe(attention=...) and fmtsim.nn.convert_attention quantise them"
    assert report(model, TOKENS).summary == f"{SIMULATED}; {SHARE} stay in float32 ({ways})"
    with torch.autocast("cpu", torch.bfloat16):
        assert f"{SHARE} stay in bfloat16" in report(model, TOKENS).summary
    assert report(model).summary == f"{SIMULATED}; not counted: attention; estimated from shapes"


def test_quantised_attention_counts_as_simulated():
    model = nn.Sequential(Block(written=False), Block(written=False))
    convert_attention(
        convert(model, recipe="te_current"), flash_attention_3(target=None), filter_fn=lambda m, n: n == "0"
    )
    found = report(model, TOKENS)
    assert (found.coverage.attention_simulated, found.coverage.attention) == (2 * 12 * 12 * 64, 4 * 12 * 12 * 64)
    assert found.summary == f"{SIMULATED}; {SHARE} 50.0 % of them simulated, the others in float32"
    assert report(model[0], TOKENS).summary.endswith(f"; {SHARE} are simulated")


def test_other_products_without_a_weight_are_told():
    class Similar(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y @ y.t() + torch.arange(6.0)[:, None] @ torch.ones(1, 6)  # a sum of one term is no product

    model = convert(nn.Sequential(Similar(32, 32), nn.Linear(6, 6)), recipe="te_current")
    assert "; other products without a weight, 15.3 % of all, stay in float32" in report(model, X).summary


class Computed(nn.Module):
    """Multiply with what is computed of a weight."""

    def __init__(self, how):
        super().__init__()
        self.first, self.p, self.how = nn.Linear(32, 32), nn.Parameter(normal(32, 32, seed=2)), how

    def forward(self, x):
        return torch.einsum("bi,ij->bj", self.first(x), self.how(self.p))


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, (self.weight - self.weight.mean(1, keepdim=True)).t().contiguous().t())


WHY = "its model computes it before the product; emulated are products with a Parameter, its views and casts"


@pytest.mark.parametrize(
    ("model", "name"),
    [(Computed(torch.tanh), "p"), (Computed(lambda p: (p - p.mean()) / p.std()), "p"),
     (Computed(lambda p: 2 * p.float()), "p"), (nn.Sequential(nn.Linear(32, 32), Scaled(32, 32)), "1")],
)  # fmt: skip
def test_weights_that_are_computed_before_use_are_told_once(model, name):
    convert(model, recipe="te_current")
    assert report(model).coverage.share == 1.0  # nothing ran
    message = rf"^50.0 % of the weight multiply-adds of .* {name} 50.0 % \({WHY}\); write such a product with fmtsim.Em"
    with pytest.warns(CoverageWarning, match=message):
        model(X)
    model(X)  # warnings are errors
    for found in (report(model), report(model, X)):
        assert (
            f"50.0 % of weight multiply-adds simulated (forward and backward); left: {name} 50.0 % ({WHY})"
            in found.summary
        )
        (row,) = [row for row in found.rows if not row.converted]
        assert row.detail == f"{'weight' if name == '1' else 'p'}: {WHY}" and "1 of 2 modules" in str(found)
    assert not revert(model)._forward_hooks


@pytest.mark.parametrize(
    "how", [lambda p: p.float(), lambda p: p.t().double().float(), lambda p: p[None].expand(2, 32, 32)[0]]
)
def test_views_and_casts_of_a_weight_are_simulated_without_a_word(how):
    model = convert(Computed(how), recipe="te_current")
    model(X)
    assert report(model, X).coverage.share == 1.0 and not model._forward_hooks


def test_a_table_that_is_added_is_not_told():
    """Positions beside a product in the same code never meet one."""

    class Added(Computed):
        def forward(self, x):
            return F.linear(self.first(x), self.p) + torch.tanh(self.w)[:6]

    model = Added(None)
    model.w = nn.Parameter(normal(32, 32, seed=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, recipe="te_current")(X)
    assert fmtsim.report(model, X).coverage.share == 1.0
