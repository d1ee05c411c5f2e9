# SPDX-License-Identifier: Apache-2.0
"""Quantised attention against a slow one written out head by head and block by block, and against torch's."""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F

import fmtsim
from fmtsim.formats.registry import get_format
from fmtsim.nn.sdpa import flash_attention_3, quantised_attention
from fmtsim.recipes import AttentionConfig
from fmtsim.scaling.hadamard_matrix import random_signs
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import FmtsimError
from tests.support.recipe_oracle import rotate
from tests.support.refusals import refused

EXACT = AttentionConfig(columns=64)


def tensors(*shapes, seed=0, dtype=torch.float32):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=source).to(dtype) for shape in shapes]


def to_codes(x, scale):
    """Return E4M3 values of ``x * (448 / amax)``: torch's own cast, clamped."""
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()


def slow_attention(q, k, v, *, seed, unit, causal=False, block=128, offset=8):
    """Run one head of FlashAttention-3 in FP8, in the order its paper gives, with loops over blocks."""
    d = q.shape[-1]
    mask = random_signs(d, RandomKey(seed, 0))
    signs = torch.tensor([-1.0 if mask >> j & 1 else 1.0 for j in range(d)])
    q, k = (rotate(t, d, signs) for t in (q, k))
    codes, scales = {}, {}
    for name, t in (("q", q), ("k", k), ("v", v)):
        parts = list(t.split(block))
        factors = [torch.tensor(448.0) / part.abs().amax() for part in parts]
        codes[name] = [to_codes(part, factor) for part, factor in zip(parts, factors, strict=True)]
        scales[name] = [1 / factor for factor in factors]
    out = []
    for i, (qi, qs) in enumerate(zip(codes["q"], scales["q"], strict=True)):
        m, total, acc = torch.full((len(qi), 1), -math.inf), torch.zeros(len(qi), 1), torch.zeros(len(qi), v.shape[-1])
        for j in reversed(range(len(codes["k"]))):
            s = product(qi, codes["k"][j], unit) * scales["k"][j] * qs
            t = s * (d**-0.5 * 1.4426950408889634)
            if causal:
                rows = torch.arange(len(qi))[:, None] + i * block
                t = torch.where(rows >= torch.arange(t.shape[1]) + j * block, t, -math.inf)
            new = torch.maximum(m, t.amax(1, keepdim=True))
            base = torch.where(new.isinf(), 0.0, new)
            p = torch.exp2(t - (base - offset))
            total = total * torch.exp2(m - base) + p.sum(1, keepdim=True)
            pv = product(p.clamp(max=448).to(torch.float8_e4m3fn).float(), codes["v"][j].T.contiguous(), unit)
            acc = acc * torch.exp2(m - base) + pv * scales["v"][j]
            m = new
        out.append(acc / total)
    return torch.cat(out)


def product(a, b, unit):
    if unit is None:
        return a @ b.T
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return fmtsim.mm(a, b.T, target=unit, out_dtype=torch.float32)


@pytest.mark.parametrize("unit", [None, "hopper.wgmma"])
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_slow_one(unit, causal):
    q, k, v = tensors((2, 256, 32), (2, 256, 32), (2, 256, 32), seed=1)
    q[0, 3, 5], k[1, 200, 7], v[1, 100] = 40.0, -50.0, 9.0
    y = quantised_attention(q, k, v, is_causal=causal, config=flash_attention_3(target=unit), generator=7)
    key = RandomKey(*fmtsim_key(7))
    for head in range(2):
        expected = slow_attention(q[head], k[head], v[head], seed=key.seed, unit=unit, causal=causal)
        if unit is not None:  # every product has the unit's bits, whatever the shape
            torch.testing.assert_close(y[head], expected, rtol=2e-6, atol=2e-6)
            continue
        near = torch.isclose(y[head], expected, rtol=2e-6, atol=2e-6).float().mean()
        assert near > 0.98  # float32 sums of another shape may move a weight to the code beside it
        torch.testing.assert_close(y[head], expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rows", [96, 160])
def test_blocks_do_not_reach_from_head_to_head(rows):
    """Blocks of 128 queries do not divide the rows: each head begins a block of its own."""
    q, k, v = (t * torch.tensor([1.0, 64.0])[:, None, None] for t in tensors(*[(2, rows, 32)] * 3, seed=2))
    config = flash_attention_3(rotate=False)
    both = quantised_attention(q, k, v, config=config)
    alone = [quantised_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], config=config)[0] for i in range(2)]
    assert torch.equal(both, torch.stack(alone))


def fmtsim_key(seed):
    from fmtsim.casts.arguments import random_keys

    return random_keys(True, seed, None, torch.device("cpu")).tolist()


def test_a_row_that_sees_nothing_is_zero_and_nan_stays_in_its_row():
    q, k, v = tensors((1, 4, 16), (1, 130, 16), (1, 130, 8))
    keep = torch.ones(4, 130, dtype=torch.bool)
    keep[1] = False
    keep[2, 64:] = False
    y = quantised_attention(q, k, v, attn_mask=keep, config=EXACT)
    assert y[0, 1].count_nonzero() == 0
    assert bool(y.isfinite().all())
    q[0, 3, 0] = math.nan
    y = quantised_attention(q, k, v, attn_mask=keep, config=EXACT)
    assert bool(y[0, 3].isnan().all()) and bool(y[0, :3].isfinite().all())


def test_rotations_alone_change_nothing():
    """The same signs turn q and k: their products are those of the tensors themselves."""
    q, k, v = tensors((3, 64, 32), (3, 64, 32), (3, 64, 32))
    turned = flash_attention_3(target=None)
    config = dataclasses.replace(
        turned,
        q=dataclasses.replace(turned.q, format=None, scaling=None),
        k=dataclasses.replace(turned.k, format=None, scaling=None),
        v=Quantizer(),
        p=Quantizer(),
    )
    y = quantised_attention(q, k, v, config=config, generator=1)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_the_offset_saves_small_weights():
    """Weights of 2^-12 are zeros in E4M3; 2^8 times as large they are not."""
    q, k = torch.zeros(1, 1, 16), torch.zeros(1, 128, 16)
    q[0, 0, 0], k[0, 0, 0] = 4.0, 12 * math.log(2)  # key 0 weighs 2^12 times as much as the others
    v = torch.ones(1, 128, 8)
    v[0, 0] = 0.0
    exact = F.scaled_dot_product_attention(q, k, v)
    base = AttentionConfig(p=Quantizer(format=get_format("e4m3")))
    lost = quantised_attention(q, k, v, config=base)
    kept = quantised_attention(q, k, v, config=dataclasses.replace(base, offset=8))
    assert lost.abs().max() == 0
    torch.testing.assert_close(kept, exact, rtol=1e-4, atol=0)


def test_autocast():
    """Operands are cast to its dtype, as those of torch's function are; gradients have the tensors' dtype."""
    q, k, v = (t.requires_grad_() for t in tensors((2, 64, 32), (2, 64, 32), (2, 64, 32)))
    half = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = quantised_attention(q, k, v, config=flash_attention_3(target=None), generator=3)
        assert y.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    z = quantised_attention(*half, config=flash_attention_3(target=None), generator=3)
    assert torch.equal(y, z)
    y.sum().backward()
    z.sum().backward()
    assert q.grad.dtype == torch.float32 and torch.equal(q.grad, half[0].grad.float())


def test_random_numbers():
    q, k, v = tensors((2, 64, 32), (2, 64, 32), (2, 64, 32))
    config = flash_attention_3(target=None)
    first = quantised_attention(q, k, v, config=config, generator=3)
    assert torch.equal(first, quantised_attention(q, k, v, config=config, generator=3))
    assert not torch.equal(first, quantised_attention(q, k, v, config=config, generator=4))
    torch.manual_seed(0)
    drawn = quantised_attention(q, k, v, config=config)
    torch.manual_seed(0)
    assert torch.equal(drawn, quantised_attention(q, k, v, config=config))
    before = torch.random.get_rng_state()
    quantised_attention(q, k, v, config=flash_attention_3(target=None, rotate=False))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("rows", "keys", "width"), [(0, 5, 16), (5, 0, 16), (5, 5, 0)])
def test_nothing_to_add_up(rows, keys, width):
    q, k, v = (x.requires_grad_() for x in tensors((2, rows, 16), (2, keys, 16), (2, keys, width)))
    y = quantised_attention(q, k, v, config=flash_attention_3())
    y.sum().backward()
    assert y.shape == (2, rows, width) and not y.any() and q.grad.shape == q.shape and not k.grad.any()


Q = torch.ones(2, 8, 16)
MADE = torch.inference_mode()(lambda: torch.ones(2, 8, 16))()
REFUSED = [
    ({"config": "fa3"}, "config='fa3' is not an AttentionConfig; pass flash_attention_3()"),
    ({"dropout_p": 0.1}, "quantised attention has no dropout, but dropout_p=0.1; pass 0"),
    ({"dropout_p": "x"}, "dropout_p='x' is not allowed; pass a number"),
    ({"scale": "x"}, "scale='x' is not allowed; pass a number or None"),
    ({"enable_gqa": 1}, "enable_gqa=1 is not a flag"),
    ({"query": 7}, "query is int, not a tensor"),
    ({"value": Q.to_sparse()}, "value has layout torch.sparse_coo; pass a dense tensor"),
    ({"key": Q.to("meta")}, "query is on cpu, key on meta; move them to one device"),
    ({"key": Q.half()}, "query, key and value have dtypes torch.float32, torch.float16 and torch.float32; pass one"),
    ({"key": Q[..., :15]}, "query, key and value of shapes (2, 8, 16), (2, 8, 15), (2, 8, 16) do not fit; pass"),
    ({"query": Q[..., :0], "key": Q[..., :0]}, "query, key and value of shapes (2, 8, 0), (2, 8, 0), (2, 8, 16)"),
    ({"key": Q.repeat(3, 1, 1)}, "leading sizes (2,), (6,), (2,) of query, key and value do not broadcast"),
    ({"key": Q.repeat(3, 1, 1), "enable_gqa": True}, "enable_gqa=True with 2 heads of query and 6 of key or value"),
    ({"attn_mask": torch.zeros(8, 7)}, "attn_mask of shape (8, 7) does not broadcast to (2, 8, 8)"),
    ({"attn_mask": torch.zeros(8, 8).int()}, "attn_mask has dtype torch.int32; pass bool"),
    ({"attn_mask": torch.zeros(8, 8), "is_causal": True}, "is_causal=True with attn_mask= says it twice"),
    ({"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "gives attn_mask no gradient; pass attn_mask.detach()"),
    ({"query": Q.clone().requires_grad_(), "key": MADE}, "quantised attention: a tensor was made in inference mode"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(wrong, message):
    given = {"query": Q, "key": Q, "value": Q, "config": flash_attention_3(target=None)} | wrong
    refused(re.escape(message), quantised_attention, error=FmtsimError, **given)
