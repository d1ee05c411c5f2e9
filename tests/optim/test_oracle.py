"""Steps of every scheme, bit for bit against an oracle that shares no code."""

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cpu.optim import steps
from fmtsim.optim import rules
from tests.support import optim_oracle as oracle
from tests.support.bits import same_bits
from tests.support.optim_samples import gradients, parameter, run

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
NAMES = sorted(set(fmtsim.optim.list_schemes()) - {"lns_madam"})


def difference(ours, wanted):
    """Return how many elements differ after each step."""
    pairs = zip(ours, np.array(wanted, np.float32), strict=True)
    return [int((a.view(np.int32) != b.view(np.int32)).sum()) for a, b in pairs]


@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_the_oracle(name):
    shape = (8, 640) if name not in ("coat", "bf16_sr", "int8_weights") else (3, 300)
    p, grads = parameter(shape), gradients(shape, 4)
    wanted = oracle.adamw(name, p, grads, **HYPER, decay=0.1, seed=7)
    ours, _, _ = run(fmtsim.optim.AdamW, p, grads, **HYPER, weight_decay=0.1, state=name, seed=7)
    assert difference(ours, wanted) == [0] * 4


def test_scales_of_int8_weights_are_inverted_from_a_least_one():
    p, grads = parameter((3, 300)), gradients((3, 300), 3)
    p[1] = p[1] * np.float32(1e-11)
    p[2] = 0
    for g in grads:
        g[1:] = 0
    wanted = oracle.adamw("int8_weights", p, grads, **HYPER, decay=0.1, seed=7)
    ours, _, _ = run(fmtsim.optim.AdamW, p, grads, **HYPER, weight_decay=0.1, state="int8_weights", seed=7)
    assert difference(ours, wanted) == [0] * 3 and 0 < abs(ours[0].reshape(3, 300)[1]).max() < 1e-9


@pytest.mark.parametrize("name", ["deepseek_v3", "ao_4bit", "coat"])
def test_a_planted_error_is_seen(name, monkeypatch):
    """Roots that are one unit in the last place too large do not pass."""
    monkeypatch.setattr(steps, "RULES", ())
    up = torch.tensor(torch.inf)
    exact = rules.square_root
    monkeypatch.setattr(rules, "square_root", lambda x: torch.nextafter(exact(x), up))
    shape = (8, 640) if name != "coat" else (3, 300)
    p, grads = parameter(shape), gradients(shape, 2)
    wanted = oracle.adamw(name, p, grads, **HYPER, decay=0.1)
    ours, _, _ = run(fmtsim.optim.AdamW, p, grads, **HYPER, weight_decay=0.1, state=name)
    assert not same_bits(ours[-1], wanted[-1])


def test_small_tensors_keep_float32_moments():
    p, grads = parameter((64, 63)), gradients((64, 63), 3)
    wanted, _, _ = run(fmtsim.optim.AdamW, p, grads, state="fp32", lr=1e-3)
    ours, optimizer, q = run(fmtsim.optim.AdamW, p, grads, state="ao_8bit", lr=1e-3)
    assert all(map(same_bits, ours, wanted))
    assert optimizer.state[q]["first"].dtype.is_floating_point
