# SPDX-License-Identifier: Apache-2.0
"""Steps of every scheme and rule, bit for bit against oracles that share no code; AdamW and Adam against torch's."""

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cpu.optim import optimizer_steps
from fmtsim.optim import get_scheme, rules
from fmtsim.optim.codec import encode
from fmtsim.rounding.elementary import exp, ln
from tests.optim import optim_oracle as oracle
from tests.optim.optim_samples import gradients, parameter, run
from tests.support.bits import assert_same_bits, same_bits

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
NAMES = sorted(set(fmtsim.optim.list_schemes()) - {"lns_madam"})


def difference(ours, wanted):
    """Return how many elements differ after each step."""
    pairs = zip(ours, np.array(wanted, np.float32), strict=True)
    return [int((a.view(np.int32) != b.view(np.int32)).sum()) for a, b in pairs]


@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_the_oracle(name):
    shape = (8, 640) if name not in ("coat", "coat_fixed", "bf16_sr", "int8_weights") else (3, 300)
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
    monkeypatch.setattr(optimizer_steps, "RULES", ())
    up = torch.tensor(torch.inf)
    exact = rules.square_root
    monkeypatch.setattr(rules, "square_root", lambda x: torch.nextafter(exact(x), up))
    shape = (8, 640) if name != "coat" else (3, 300)
    p, grads = parameter(shape), gradients(shape, 2)
    wanted = oracle.adamw(name, p, grads, **HYPER, decay=0.1)
    ours, _, _ = run(fmtsim.optim.AdamW, p, grads, **HYPER, weight_decay=0.1, state=name)
    assert not same_bits(ours[-1], wanted[-1])


def test_zeros_hide_small_numbers_from_coats_kernel():
    """Gradients with zeros: a lane that holds one drops the least magnitudes behind it."""
    p, grads = parameter((3, 300)), gradients((3, 300), 3)
    for g, part in zip(grads, (0.3, 0.05, 0.9), strict=True):
        g[np.random.default_rng(int(100 * part)).random(g.shape) < part] = 0
    found = {}
    for name in ("coat", "coat_fixed"):
        wanted = oracle.adamw(name, p, grads, **HYPER, decay=0.1)
        found[name], _, _ = run(fmtsim.optim.AdamW, p, grads, **HYPER, weight_decay=0.1, state=name)
        assert difference(found[name], wanted) == [0] * 3
    assert not same_bits(found["coat"][-1], found["coat_fixed"][-1])
    x = torch.full((1, 128), 1.0)
    x[0, 17], x[0, 1] = 1e-3, 0  # lane 1 hides lane 17, which it is compared with first
    powers = [float(encode(x, get_scheme(name).first, {}, None)["power"]) for name in ("coat", "coat_fixed")]
    assert powers == [1.0, 1.625]


def test_small_tensors_keep_float32_moments():
    p, grads = parameter((64, 63)), gradients((64, 63), 3)
    wanted, _, _ = run(fmtsim.optim.AdamW, p, grads, state="fp32", lr=1e-3)
    ours, optimizer, q = run(fmtsim.optim.AdamW, p, grads, state="ao_8bit", lr=1e-3)
    assert all(map(same_bits, ours, wanted))
    assert optimizer.state[q]["first"].dtype.is_floating_point


f32 = np.float32
SHAPE = (7, 150)


def lion(p, grads, lr, b1, b2, decay):
    m = np.zeros_like(p)
    for g in grads:
        direction = np.sign(m * f32(b1) + g * f32(1 - b1))
        m = m * f32(b2) + g * f32(1 - b2)
        p = p * f32(1 - lr * decay) - direction * f32(lr)
    return p


def sgd(p, grads, lr, momentum, decay, nesterov):
    m = np.zeros_like(p)
    for g in grads:
        g = g + p * f32(decay)
        m = m * f32(momentum) + g
        p = p - (g + m * f32(momentum) if nesterov else m) * f32(lr)
    return p


def direction_of(g, v, beta, t, bound):
    with np.errstate(all="ignore"):
        n = g / np.sqrt(v / f32(1 - beta**t))
    return np.clip(np.where(np.isnan(n), f32(0), n), -f32(bound), f32(bound))


def madam_float(p, grads, lr, beta, bound, base, rounded, decay):
    v = np.zeros_like(p)
    limit = f32(3 * np.sqrt(np.mean(p.astype(np.float64) ** 2)))
    for t, g in enumerate(grads, 1):
        v = v * f32(beta) + (g * f32(1 - beta)) * g
        n = direction_of(g, v, beta, t, bound)
        n = np.rint(n) if rounded else n
        x = (n * f32(lr)) * np.sign(p) + f32(lr * decay)
        factors = [exp(float(a) * (-ln(2.0) if base == 2 else -1.0)) for a in x.reshape(-1)]
        p = np.clip(p * np.array(factors, f32).reshape(p.shape), -limit, limit)
    return p


def madam_codes(p, grads, lr, beta, bound, gamma=2048, top=(1 << 15) - 1):
    """Weights as signs and integers: 2 ** (k / gamma) * scale."""
    values = np.array([2.0 ** (k / gamma) for k in range(top + 1)])  # the libm's, which rounds to these float32 values
    scale = f32(3 * np.sqrt(np.mean(p.astype(np.float64) ** 2)) / f32(values[-1]))
    negative = np.signbit(p)
    y = np.abs(p / scale).astype(np.float64)
    middles = 2.0 ** ((np.arange(top) + 0.5) / gamma)
    k = np.searchsorted(middles, y)
    v, out = np.zeros_like(p), []
    for t, g in enumerate(grads, 1):
        v = v * f32(beta) + (g * f32(1 - beta)) * g
        n = np.rint(direction_of(g, v, beta, t, bound))
        falls = np.rint((n * f32(lr * gamma)) * np.where(negative, f32(-1), f32(1))).astype(int)
        k = np.clip(k - falls, 0, top)
        out.append((np.where(negative, -1, 1) * values[k]).astype(f32) * scale)
    return out, k


def ours(cls, p, grads, **options):
    return run(cls, p, grads, state="fp32", **options)[0][-1]


def test_lion():
    p, grads = parameter(SHAPE), gradients(SHAPE, 4)
    wanted = lion(p, grads, 1e-3, 0.9, 0.99, 0.1)
    assert_same_bits(ours(fmtsim.optim.Lion, p, grads, lr=1e-3, weight_decay=0.1), wanted.reshape(-1))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov):
    p, grads = parameter(SHAPE), gradients(SHAPE, 4)
    wanted = sgd(p, grads, 1e-2, 0.9, 0.1, nesterov)
    found = ours(fmtsim.optim.SGD, p, grads, lr=1e-2, weight_decay=0.1, nesterov=nesterov)
    assert_same_bits(found, wanted.reshape(-1))


@pytest.mark.parametrize(("base", "rounded", "decay"), [(2, True, 0.0), (2, False, 0.0), ("e", True, 0.1)])
def test_madam_on_floats(base, rounded, decay):
    p, grads = parameter(SHAPE), gradients(SHAPE, 4)
    p.reshape(-1)[10] = 0.0
    wanted = madam_float(p, grads, 1 / 64, 0.99, 10, base, rounded, decay).reshape(-1)
    options = {"lr": 1 / 64, "beta": 0.99, "base": base, "round_update": rounded, "weight_decay": decay}
    found = ours(fmtsim.optim.Madam, p, grads, **options)
    assert_same_bits(found, wanted)
    assert found[10] == 0 and np.array_equal(np.sign(found), np.sign(p.reshape(-1)))


def test_madam_on_codes_moves_them_by_integers():
    p, grads = parameter(SHAPE), gradients(SHAPE, 4)
    wanted, k = madam_codes(p, grads, 1 / 128, 0.99, 10)
    found, optimizer, q = run(fmtsim.optim.Madam, p, grads, lr=1 / 128, beta=0.99)
    assert all(same_bits(a, b.reshape(-1)) for a, b in zip(found, wanted, strict=True))
    codes = optimizer.state[q]["weights"].numpy().astype(int) & 0x7FFF
    assert np.array_equal(codes, k.reshape(-1))


@pytest.mark.parametrize(("scheme", "tolerance"), [("fp32", 2e-5), ("bnb8", 1e-2), ("coat", 1e-2), ("fp8lm", 5e-2)])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_one_step_is_close_to_torch(name, scheme, tolerance):
    """The first step of Adam is lr in size whatever the state; what remains is the rounding of weights."""
    p, g = parameter((64, 80)), np.random.default_rng(3).standard_normal((64, 80)).astype(f32)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    theirs = torch.nn.Parameter(torch.from_numpy(p.copy()))
    theirs.grad = torch.from_numpy(g)
    getattr(torch.optim, name)([theirs], **options).step()
    found = run(getattr(fmtsim.optim, name), p, [g], state=scheme, **options)[0][0]
    moved = theirs.detach().numpy().reshape(-1) - p.reshape(-1)
    assert np.abs(found - p.reshape(-1) - moved).max() <= tolerance * np.abs(moved).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_rounded_once(dtype):
    p, g = parameter((64, 80)), gradients((64, 80), 1)[0]
    narrow = torch.nn.Parameter(torch.from_numpy(p).to(dtype))
    narrow.grad = torch.from_numpy(g).to(dtype)
    start, grad = narrow.detach().float().numpy(), narrow.grad.float().numpy()
    fmtsim.optim.AdamW([narrow], state="bnb8").step()
    wide = run(fmtsim.optim.AdamW, start, [grad], state="bnb8")[0][0]
    assert torch.equal(narrow.detach().view(-1), torch.from_numpy(wide).to(dtype))
