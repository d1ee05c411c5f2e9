# SPDX-License-Identifier: Apache-2.0
"""The memory-efficient kernel, held to fractions and scalar loops in float32; test_machine.py holds it to an H200."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy import float32
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmtsim.machine import attention_efficient, library
from fmtsim.machine.arrays import apply
from fmtsim.machine.simulate import simulate
from fmtsim.machine.unknown import Nondeterministic, UnknownOrder
from tests.machine.cases import numbers

ZERO = float32(0)


def exponent(x: Fraction) -> int:
    """Return floor(log2 |x|)."""
    e = x.numerator.bit_length() - x.denominator.bit_length() if x > 0 else exponent(-x)
    return e if abs(x) >= Fraction(2) ** e else e - 1


def toward_zero(x: Fraction, unit: Fraction) -> Fraction:
    """Return x truncated to a multiple of a unit."""
    return math.trunc(x / unit) * unit


def instruction(a: list[Fraction], b: list[Fraction], c: Fraction) -> Fraction:
    """Return c plus 8 products of TF32 numbers: terms are truncated below 25 fraction bits, and so is the sum."""
    operand = lambda x: max(exponent(x), -126)  # noqa: E731
    terms = [(x * y, operand(x) + operand(y)) for x, y in zip(a, b, strict=True) if x * y] + (
        [(c, operand(c))] if c else []
    )
    if not terms:
        return Fraction(0)
    largest = max(-133, *(e for _, e in terms))
    total = sum(toward_zero(x, Fraction(2) ** (largest - 25)) for x, _ in terms)
    return toward_zero(total, Fraction(2) ** (max(exponent(total), -126) - 23)) if total else Fraction(0)


def tf32(x: float) -> tuple[Fraction, Fraction]:
    """Return the truncated number, and the rest to nearest, ties away from zero, in TF32's 11 bits."""
    x = Fraction(float(x))
    if not x:
        return x, x
    big = toward_zero(x, Fraction(2) ** (max(exponent(x), -126) - 10))
    rest = x - big
    if not rest:
        return big, rest
    unit = Fraction(2) ** (max(exponent(rest), -126) - 10)
    return big, math.copysign(1, rest) * Fraction(math.floor(abs(rest) / unit + Fraction(1, 2))) * unit


def dot(a: np.ndarray, b: np.ndarray, acc: float32 = ZERO, residue_first: bool = False) -> float32:
    """Return a b + acc as a thread of the kernel adds it."""
    residue = len(a) % 32
    lengths = [residue] * (residue > 0) + [32] * (len(a) // 32)
    waiting, start = Fraction(0), 0
    for length in lengths if residue_first else sorted(lengths, reverse=True):
        for step in range(4):
            low, high = min(step * 8, length), min(step * 8 + 8, length)
            pairs = [(tf32(a[start + i]), tf32(b[start + i])) for i in range(low, high)]
            for n, m in ((1, 0), (0, 1), (0, 0)):
                waiting = instruction([Fraction(x[n]) for x, _ in pairs], [Fraction(y[m]) for _, y in pairs], waiting)
            if step == 0:
                acc, waiting = acc + float32(float(waiting)), Fraction(0)
        start += length
    return acc + float32(float(waiting))


def data(seed: int, *shape: int, kind: str = "normal") -> np.ndarray:
    return numbers(seed, shape, kind, torch.float32).numpy()


@pytest.mark.parametrize(("k", "kind"), [(64, "normal"), (41, "wide"), (7, "cancelling"), (40, "subnormal")])
@pytest.mark.parametrize("residue_first", [False, True])
def test_a_product_is_three_of_tf32(k, kind, residue_first):
    a, b = data(1, 1, 3, k, kind=kind), data(2, 1, 4, k)
    y = attention_efficient.product(a, b, residue_first=residue_first)[0]
    expected = [[dot(row, column, residue_first=residue_first) for column in b[0]] for row in a[0]]
    assert y.view(np.int32).tolist() == np.array(expected, np.float32).view(np.int32).tolist()


def test_other_orders_of_a_product_are_seen(monkeypatch):
    a, b = data(1, 1, 64, 200, kind="wide"), data(2, 1, 64, 200)
    right = attention_efficient.product(a, b)
    changed = {
        "residue first": lambda: attention_efficient.product(a, b, residue_first=True),
        "the other small part first": lambda: attention_efficient.product(b, a).swapaxes(1, 2),
        "one register": lambda: (
            monkeypatch.setattr(attention_efficient, "_K_TILE", 1024),
            attention_efficient.product(a, b),
        )[1],
    }
    for what, other in changed.items():
        assert (right != other()).any(), what


def test_tiles_are_added_as_the_kernel_adds_them():
    head, queries, keys = 36, 2, 70
    some = range(0, head, 7)  # columns of the output
    q, k, v = (torch.from_numpy(data(seed, 1, 1, n, head)) for seed, n in ((1, queries), (2, keys), (3, keys)))
    y, logsumexp = attention_efficient.forward(q, k, v, None, 0.0, False, 0.3)
    log2e = float32(math.log2(math.e))
    for row in range(queries):
        largest, total, acc = float32(-np.inf), float32(0), np.zeros(len(some), np.float32)
        for start in (0, 64):
            stop = min(start + 64, keys)
            x = np.array(
                [dot(q[0, 0, row].numpy(), k[0, 0, j].numpy(), residue_first=True) for j in range(start, stop)]
            )
            x = x * float32(0.3) * log2e
            new = max(largest, x.max())
            factor = apply(library.exp2, np.array([largest - new]))[0] if largest < new else float32(1)
            p, total, largest = apply(library.exp2, x - new), total * factor, new
            for warp in range(2):
                quad = [float32(0)] * 4
                for j in range(32 * warp, min(32 * warp + 32, len(p))):
                    quad[j % 8 // 2] += p[j]
                total += (quad[0] + quad[1]) + (quad[2] + quad[3])
            acc = np.array([dot(p, v[0, 0, start:stop, d].numpy(), acc[i] * factor) for i, d in enumerate(some)])
        assert (acc * (float32(1) / total) == y[0, 0, row, some].numpy()).all()
        assert largest / log2e + apply(library.log, np.array([total]))[0] == logsumexp[0, 0, row].item()


def attend(causal: bool = False, **changed: int) -> simulate:
    sizes = {"heads": 2, "key_heads": 2, "length": 40, "d": 32} | changed
    length, d = sizes["length"], sizes["d"]
    q, k, v = (
        torch.from_numpy(data(seed, 1, length, sizes[n], d)).transpose(1, 2).requires_grad_()
        for seed, n in ((1, "heads"), (2, "key_heads"), (3, "key_heads"))
    )
    with simulate(target="h200") as run:
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=sizes["heads"] != sizes["key_heads"]
        )
        y.sum().backward()
    exact = functional.scaled_dot_product_attention(
        *(x.detach().double() for x in (q, k, v)), is_causal=causal, enable_gqa=sizes["heads"] != sizes["key_heads"]
    )
    assert torch.allclose(y.double(), exact, atol=1e-5)
    return run


def test_grouped_heads_and_ragged_ones_take_the_math_path():
    grouped, others = attend(key_heads=1, causal=True), (attend(key_heads=1), attend(d=30, causal=True))
    for run in (grouped, *others):
        assert run.exact["_safe_softmax"] == 2 and run.exact["bmm"] == 8  # the backward pass makes the first pass again
        assert not run.nondeterministic
    assert not grouped.guess and [run.guess.total() for run in others] == [2, 2]
    assert attend().exact["bmm"] == 0
    assert attend(heads=4, key_heads=2, length=2).exact["bmm"] == 8  # as many queries as heads of keys


def test_gradients_by_locks_are_named():
    assert not attend().nondeterministic and not attend(length=100, causal=True).nondeterministic
    assert not attend(length=100).nondeterministic
    # fewer blocks of queries than of keys; keys beyond what was seen to repeat
    for run in (
        attend(length=100, d=128),
        attend(length=100, d=128, causal=True),
        attend(length=600, d=8, causal=True),
    ):
        assert run.nondeterministic.total() == 1 and "lock" in run.summary


def test_gradients_by_locks_hold_one_possible_result():
    q, k, v, g = (torch.from_numpy(data(seed, 1, 2, 100, 80)) for seed in range(4))
    y, logsumexp = attention_efficient.forward(q, k, v, None, 0.0, False, None)
    with pytest.raises(Nondeterministic) as raised:
        attention_efficient.backward(g, q, k, v, y, logsumexp, None, 0.0, False, None)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(functional.scaled_dot_product_attention(*inputs), inputs, g.double())
    for gradient, expected in zip(raised.value.args[1], exact, strict=True):
        assert torch.allclose(gradient.double(), expected, atol=1e-5)


def test_what_is_not_known_is_refused():
    q = torch.zeros(1, 1, 4, 32)
    for arguments in ((q, q, q, torch.zeros(4, 4).half(), 0.0), (q, q, q, None, 0.5), (q, q, q[..., :16], None, 0.0)):
        with pytest.raises(UnknownOrder):
            attention_efficient.forward(*arguments, False, None)


def biased(mask: torch.Tensor, **options: float) -> simulate:
    q = numbers(1, (1, 2, 24, 32), "normal", mask.dtype).requires_grad_()
    with simulate(target="h200", strict=not options) as run:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, **options).backward(q.detach())
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_that_takes_a_gradient_goes_to_the_kernel_unless_it_is_strided(dtype):
    mask = numbers(2, (24, 24, 2), "normal", dtype).permute(2, 0, 1)[None].requires_grad_()
    assert biased(mask).exact["bmm"] > 0  # the math path, as on the GPU
    run = biased(mask.contiguous())
    assert run.exact["_scaled_dot_product_efficient_attention_backward"] == 1 and run.exact["bmm"] == 0
    (reason,) = biased(mask.contiguous(), enable_gqa=True).unknown
    assert "attention with a mask that takes a gradient" in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_masked_whole_is_zeros_and_takes_no_gradient(dtype):
    q, visible = numbers(1, (1, 1, 8, 32), "normal", dtype).requires_grad_(), torch.ones(8, 8, dtype=torch.bool)
    visible[3] = False
    with simulate(target="h200", strict=True), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        y = functional.scaled_dot_product_attention(q, q.detach(), q.detach(), attn_mask=visible)
        y.backward(q.detach())
    assert not y[0, 0, 3].any() and not q.grad[0, 0, 3].any() and y[0, 0, 2].all() and q.grad[0, 0, 2].any()


@pytest.mark.parametrize("head", [8, 24, 64, 72, 88, 104, 128, 136, 160])
def test_rows_of_gradients_and_outputs_are_added_by_two_or_four_threads(head):
    """Products of 16 bits are exact in float32, and float64 has room for each sum: one rounding an addition."""
    threads = 4 if 64 < head <= 128 else 2
    g, output = (numbers(seed, (2, 3, 5, head), "normal", torch.bfloat16) for seed in (1, 2))
    found = attention_efficient._delta(g, output, head)
    assert found.shape == (6, 5, 1) and found.dtype == np.float32
    for a, b, total in zip(g.view(30, head).double(), output.view(30, head).double(), found.reshape(-1), strict=True):
        sums = [ZERO] * threads
        for i, product in enumerate((a * b).tolist()):
            sums[i // 8 % threads] = float32(float(sums[i // 8 % threads]) + product)
        first = sums[0] + sums[1]
        assert total == (first if threads == 2 else first + (sums[2] + sums[3]))
