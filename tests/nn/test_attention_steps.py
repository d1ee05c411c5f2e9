# SPDX-License-Identifier: Apache-2.0
"""SageAttention 2 and 3, FlashAttention-4's 2^x and MXFP8: the sources' own operands, slow attention, exact 2^x."""

import dataclasses
import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fmtsim
from fmtsim.nn.flash import CallKeys, _fma, exp2, from_tiles, quantised, to_tiles, without_means
from fmtsim.nn.sdpa import quantised_attention
from fmtsim.recipes import AttentionConfig, get_recipe
from tests.support.bits import assert_same_bits
from tests.support.operands import normal, wide
from tests.support.refusals import refused

SAGE_2, SAGE_3, FA4, MXFP8 = (get_recipe(n).attention for n in ("sage2", "sage3", "fa4", "mxfp8_attention"))
# The first 16 digits of SHA-256 of what thu-ml/SageAttention d1a57a5 makes of ``numbers`` on a CPU (Triton 3.9.0,
# TRITON_INTERPRET=1): per_thread_int8(q, k, k.mean(2, keepdim=True), BLKQ=64, WARPQ=16, BLKK=128, WARPK=128), codes and
# float32 scales; q and k of sageattn3's preprocess_qkv(q, k, v, per_block_mean=False), as float32.
SOURCE = {
    "q int8": "214c0edd43351922", "q scales": "98873f0005a2a169", "k int8": "9d0614e0b5f0ed4b",
    "k scales": "993cb50f1e6860e0", "sage3 q": "2fe7d6fdd2954287", "sage3 k": "8258b1592d333c7c",
}  # fmt: skip
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def numbers(rows, a, b):
    values = [[((i * i * a + j * b + i * j * 37) % 2003 - 1001) / 211 for j in range(64)] for i in range(rows)]
    return torch.tensor(values).to(torch.bfloat16)[None]


def digest(t):
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def heads(name, x, config):
    return quantised(name, x, getattr(config, name), True, CallKeys(None).draws, (), getattr(config, f"{name}_tile"))


def test_operands_are_those_of_the_sources_code():
    q, k = numbers(128, 7919, 131), numbers(256, 6007, 211) + 2
    q_2, k_2, means, delta = without_means(SAGE_2, q.float(), k.float(), torch.bfloat16)
    assert means is None and delta is None
    made = {}
    for name, x, first, step in (("q", q_2, 16, (8, 1)), ("k", k_2, 128, (8, 2))):
        operand = heads(name, x, SAGE_2)
        made[f"{name} int8"] = operand.elements.to(torch.int8)
        scales = operand.scale[0, :, 0].reshape(-1, first)[:, : step[0]]  # by thread: rows 0 to 7, in pairs for k
        made[f"{name} scales"] = scales[:, :: step[1]].flatten()
    q_3, k_3, _, delta = without_means(SAGE_3, q.float(), k.float(), torch.bfloat16)
    made |= {"sage3 q": q_3, "sage3 k": k_3}
    assert {name: digest(t) for name, t in made.items()} == SOURCE
    exact = q.double().mean(1, keepdim=True).to(torch.bfloat16).double() @ k_3.double().mT
    assert_same_bits(delta[:, :1], delta[:, 127:])
    assert (delta[:, :1] - exact).abs().max() <= exact.abs().max() * 2**-8


def test_tiles_are_the_rows_of_threads():
    x = torch.arange(300.0)[None, :, None]
    rows = to_tiles(x, (128, 8, 2))[0, :, 0]
    assert rows[:32].tolist() == [8 * j + r for j in range(16) for r in (0, 1)]  # the first thread's of a warp
    assert rows[32:36].tolist() == [2, 3, 10, 11] and len(rows) == 384 and rows[-32:].count_nonzero() == 10
    assert_same_bits(from_tiles(to_tiles(x, (128, 8, 2)), (128, 8, 2), 300), x)
    assert to_tiles(x, (16, 8, 1))[0, :4, 0].tolist() == [0, 8, 1, 9]


def int8(x, rows):
    """Return rows of one scale as INT8 has them."""
    s = x[rows].abs().amax() / 127 + 1e-7
    return (x[rows] / s + torch.where(x[rows] >= 0, 0.5, -0.5)).trunc() * s


def e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def e2m1(x):
    """Round to nearest, ties to even codes."""
    distance = (x.abs().clamp(max=6)[..., None].double() - GRID).abs()
    ties = distance + (torch.arange(8) % 2) * 1e-12
    return torch.copysign(GRID[ties.argmin(-1)], x)


def blocks_of(size, cast, x):
    """Cast blocks of so many neighbours, the last one short."""
    return torch.cat([cast(block) for block in x.split(size, -1)], -1)


def nvfp4(x):
    s = e4m3(x.abs().amax(-1, keepdim=True) / 6)
    return e2m1(torch.where(s == 0, 0.0, x * (1 / s))) * s


def two_levels(p):
    s = p.amax(-1, keepdim=True) / 6
    return torch.where(s == 0, 0.0, e2m1(p / s) * e4m3(s))


def mxfp8(x):
    exponent = (x.abs().amax(-1, keepdim=True).double() / 448).log2().ceil().clamp(-127)
    return e4m3((x.double() / exponent.exp2()).float()) * exponent.exp2().float()


def operands(name, q, k, v):
    """Return what one head multiplies, what is added to its scores, and the cast of its weights."""
    delta = torch.zeros(len(q), len(k))
    if name == "sage2":
        k = k - k.mean(0)
        for rows, tiles, at in ((q, range(0, len(q), 16), 1), (k, range(0, len(k), 128), 2)):
            for tile in tiles:
                for thread in range(0, 8, at):
                    own = [
                        r
                        for r in range(tile, min(tile + 16 * 8 ** (at - 1), len(rows)))
                        if (r % 8) // at * at == thread
                    ]
                    if own:
                        rows[own] = int8(rows.clone(), own)
        s = v.abs().amax(0) * (1 / torch.tensor(448.0))
        return q, k, e4m3(v * (448 / v.abs().amax(0))) * (1 / (448 / v.abs().amax(0))) if s.all() else v, delta, e4m3
    if name == "sage3":
        k = k - k.mean(0)
        for first in range(0, len(q), 128):
            group = F.pad(q[first : first + 128], (0, 0, 0, max(0, first + 128 - len(q))))
            mean = group.mean(0)
            delta[first : first + 128] = mean @ k.T
            q[first : first + 128] = (group - mean)[: len(q) - first]
        q, k, v = blocks_of(16, nvfp4, q), blocks_of(16, nvfp4, k), blocks_of(16, nvfp4, v.T).T
        return q, k, v, delta, lambda p: blocks_of(16, two_levels, p)
    q, k, v = blocks_of(32, mxfp8, q), blocks_of(32, mxfp8, k), blocks_of(32, mxfp8, v.T).T
    return q, k, v, delta, lambda p: blocks_of(32, mxfp8, p)


def slow(name, q, k, v, offset, seen):
    """Run one head, block by block of 128 keys, the last one first."""
    q, k, v, delta, cast = operands(name, q.clone(), k.clone(), v)
    m, total, acc = torch.full((len(q), 1), -math.inf), torch.zeros(len(q), 1), torch.zeros(len(q), v.shape[1])
    for first in reversed(range(0, len(k), 128)):
        keys = slice(first, first + 128)
        t = (q @ k[keys].T + delta[:, keys]) * (q.shape[1] ** -0.5 * 1.4426950408889634)
        t = torch.where(seen[:, keys], t, -math.inf)
        new = torch.maximum(m, t.amax(1, keepdim=True))
        base = torch.where(new.isinf(), 0.0, new)
        p, shrink = torch.exp2(t - (base - offset)), torch.exp2(m - base)
        total, acc, m = total * shrink + p.sum(1, keepdim=True), acc * shrink + cast(p) @ v[keys], new
    return acc / total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "config"), [("sage2", SAGE_2), ("sage3", SAGE_3), ("mxfp8", MXFP8)])
def test_attention_against_the_slow_one(name, config, causal):
    q, k, v = (normal(2, 200, 40, seed=i) * s + o for i, s, o in ((1, 2, 0.5), (2, 1, 3), (3, 1, 0)))
    k[1, 150, 3], v[0, 7, 5] = 30, -20
    y = quantised_attention(q, k, v, is_causal=causal, config=config)
    seen = torch.ones(200, 200, dtype=torch.bool).tril() if causal else torch.ones(200, 200, dtype=torch.bool)
    for head in range(2):
        expected = slow(name, q[head], k[head], v[head], config.offset, seen)
        near = torch.isclose(y[head], expected, rtol=1e-5, atol=1e-5).float().mean()
        assert near > 0.9  # float32 sums of another shape move a weight or an element to the code beside it
        assert (y[head] - expected).norm() / expected.norm() < 5e-3
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert 1e-4 < (y - plain).norm() / plain.norm() < {"sage2": 0.1, "sage3": 0.5, "mxfp8": 0.2}[name]


def test_weights_sum_to_one_where_their_own_sum_divides():
    q, k = (normal(1, 200, 40, seed=i) * 2 for i in range(2))
    ones = torch.ones(1, 200, 32)  # exact in MXFP8: a row of the result is the sum of its weights
    for rounded_sum in (False, True):
        y = quantised_attention(q, k, ones, config=dataclasses.replace(MXFP8, rounded_sum=rounded_sum))
        assert ((y - 1).abs().max() < 1e-5) == rounded_sum


@pytest.mark.parametrize("change", [{"smooth_k": False}, {"q_tile": None}, {"k_tile": (64, 8, 2)}, {"offset": 8}])
def test_every_step_of_sage_attention_2_shows(change):
    q, k, v = (normal(1, 160, 32, seed=i) + 2 for i in range(3))
    changed = dataclasses.replace(SAGE_2, **change)
    assert not torch.equal(*(quantised_attention(q, k, v, config=c) for c in (SAGE_2, changed)))


def test_means_change_nothing_but_roundings_and_have_the_gradients_of_attention():
    q, k, v = (normal(2, 9, 16, seed=i).requires_grad_() for i in range(3))
    config = AttentionConfig(smooth_k=True, smooth_q=4)
    g = normal(2, 9, 16, seed=4)
    y, plain = quantised_attention(q, k, v, config=config, is_causal=True), None
    grads = torch.autograd.grad(y, (q, k, v), g)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)  # float32 sums of numbers without their means
    for found, expected in zip(grads, torch.autograd.grad(plain, (q, k, v), g), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def exact_exp2(x):
    """Return the polynomial's float32 number by exact fractions."""
    x = max(Fraction(x), Fraction(-127))
    n = math.floor(x)
    coefficients = [np.uint32(w).view(np.float32) for w in (0x3D9DF09D, 0x3E6906A4, 0x3F31F519, 0x3F800000)]
    f = Fraction(float(rounded(x - n))) if x > n else 0
    r = Fraction(float(coefficients[0]))
    for c in coefficients[1:]:
        r = Fraction(float(rounded(r * f + Fraction(float(c)))))
    word = int(np.float32(float(r)).view(np.int32)) + (n << 23)
    return np.int32(word).view(np.float32)


def rounded(x):
    """Round a positive fraction to float32, ties to even."""
    exponent = max(math.floor(math.log2(x)), -126) - 23
    exponent += x >= Fraction(2) ** (exponent + 24)
    whole, rest = divmod(x / Fraction(2) ** exponent, 1)
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    return np.float32(int(whole) * 2.0**exponent)


def test_the_polynomial_is_exact():
    edges = [0.0, -0.0, -1.0, -0.5, 1.5, 100.25, -126.0, -126.5, -126.99999, -127.0, -150.0, np.nextafter(-1, 0)]
    x = torch.tensor([*edges, *(-normal(3000).abs() * 12), *wide(500, low=-24, high=3)], dtype=torch.float32)
    every = (32, 32, 0)
    columns = 32 * -(-len(x) // 32) + 32
    y = exp2(x[None], every, columns)[0]
    assert_same_bits(y, torch.from_numpy(np.array([exact_exp2(float(n)) for n in x])))
    normal_range = x > -126
    error = (y[normal_range].double() / x[normal_range].double().exp2() - 1).abs().max()
    assert 5e-5 < error < 1e-4  # the paper's 8.8e-5
    assert exp2(torch.tensor([[math.nan, -math.inf]]), every, 64).nan_to_num(7).tolist() == [[7, 0]]


def test_fma_rounds_once():
    a = torch.tensor([1 + 2**-23, 1 - 2**-24, 1 + 2**-12, 0.7])
    b = torch.tensor([1 + 2**-23, 1 + 2**-23, 1 + 2**-12, 0.3])
    for c in (1.0, -1.0, 2.0**-30, 2.0**23 + 1, 2.0**24):
        exact = [Fraction(float(i)) * Fraction(float(j)) + Fraction(c) for i, j in zip(a, b, strict=True)]
        expected = [math.copysign(1, n) * float(rounded(abs(n))) if n else 0.0 for n in exact]
        assert _fma(a, b, c).tolist() == expected
    # a sum below the tie of two float32 numbers, which float64 makes the tie
    a, b = torch.tensor([2**-12 * (1 + 2**-23)]), torch.tensor([2**-12 * (1 - 2**-23)])
    assert _fma(a, b, 1 + 2**-23).item() == 1 + 2**-23


@pytest.mark.parametrize(("frequency", "share"), [(10, 24), (16, 16), (32, 8)])
def test_which_columns_take_the_polynomial(frequency, share):
    x = torch.full((1, 128), -0.3)
    y = exp2(x, (frequency, 4, 1), 128)
    taken = (y != torch.exp2(x))[0].nonzero().flatten().tolist()
    # softmax.apply_exp2_convert: fragments of 32, pairs k, k + 1
    expected = [
        32 * j + k + i for j in range(4) for k in range(0, 32, 2) for i in (0, 1)
        if not (k % frequency < frequency - 4 or j >= 3 or j < 1)
    ]  # fmt: skip
    assert taken == expected and len(taken) == share


def test_flash_attention_4_changes_few_weights_a_little():
    q, k, v = (normal(2, 256, 64, seed=i).to(torch.bfloat16) for i in range(3))
    y, without = (quantised_attention(q, k, v, config=c) for c in (FA4, dataclasses.replace(FA4, exp2=None)))
    assert not torch.equal(y, without) and (y.float() - without.float()).abs().max() < 2e-3
    on_unit = quantised_attention(q, k, v, config=FA4.on("b200"))
    torch.testing.assert_close(on_unit, y, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["sage2", "sage3", "fa4", "mxfp8_attention"])
def test_a_llama_runs_with_each(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, attn_implementation="sdpa", **sizes)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(64, (2, 130))
    with torch.no_grad():
        plain = model(ids).logits
        fmtsim.convert(model, recipe=name)
        y = model(ids).logits
    assert 0 < (y - plain).norm() / plain.norm() < 0.2
    model(ids).logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (r"smooth_q=0 is not allowed; pass 1 or more, or None", {"smooth_q": 0}),
        (r"q_tile=\(16, 5, 1\) is no tile; each divides the number before it", {"q_tile": (16, 5, 1)}),
        (r"k_tile=\(128, 8, 0\) is no tile", {"k_tile": (128, 8, 0)}),
        (r"offset=inf is not allowed; pass a finite number", {"offset": math.inf}),
        (r"exp2=\(4, 5, 1\) is not allowed; keep 0 < count <= frequency", {"exp2": (4, 5, 1)}),
    ],
)
def test_fields_that_are_refused(message, fields):
    refused(message, AttentionConfig, **fields)


def test_convert_takes_attention_by_name_or_record():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(32, 32)

        def forward(self, x):
            y = self.project(x)
            return F.scaled_dot_product_attention(y, y, y)

    torch.manual_seed(0)
    x, results = normal(2, 20, 32, seed=1), []
    for recipe, attention in ((None, "sage3"), ("te_current", SAGE_3), ("te_current", None), ("sage3", None)):
        model = Attention()
        model.load_state_dict({"project.weight": torch.eye(32), "project.bias": torch.ones(32)})
        results.append(fmtsim.convert(model, recipe, attention=attention)(x))
    assert torch.equal(results[0], results[3]) and not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])
    refused(r"attention='te_current' is not attention; pass 'fa3'", fmtsim.convert, Attention(), attention="te_current")
    refused(r"attention= goes with a recipe or alone; for layers by format=", fmtsim.convert, Attention(),
            format="e4m3", attention="fa3")  # fmt: skip
