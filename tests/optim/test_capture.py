# SPDX-License-Identifier: Apache-2.0
"""Optimizers that count their steps on the device: the bits of those that do not, and steps in CUDA graphs."""

import copy
import functools
import struct

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cuda import runtime
from fmtsim.cuda.optim.fused_steps import kernels_of, launches
from fmtsim.optim import SGD, Adam, AdamW, Lion, Madam, rules, stepping
from fmtsim.spec.optimizer import Numbers
from fmtsim.support.errors import DeviceError
from tests.optim.optim_samples import SHAPES, gradients, parameter, train, value_bits
from tests.support.refusals import refused

nesterov = functools.partial(SGD, nesterov=True)
CASES = (
    ("bnb8", AdamW, torch.float32), ("fp8lm", Adam, torch.float32), ("coat_fixed", AdamW, torch.float32),
    ("bf16_sr", AdamW, torch.bfloat16), ("int8_weights", Lion, torch.float32), ("lns_madam", Madam, torch.float32),
    ("fp32", nesterov, torch.float32),
)  # fmt: skip


def same(a, b):
    return a[1] == b[1] and all(map(torch.equal, a[0], b[0]))


@pytest.fixture
def capturing(monkeypatch):
    """Pretend that a graph is captured, once asked."""

    def begin():
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)

    return begin


def without_counts(optimizer_class, *arguments, **options):
    """Train and leave out the counts of steps, which the host has elsewhere."""
    bits, bad = train(optimizer_class, *arguments, **options)
    return [x for x in bits if x.dtype is not torch.int64], bad


@pytest.mark.parametrize(("scheme", "cls", "dtype"), CASES)
def test_counts_on_the_device_change_no_bit(scheme, cls, dtype, on_cuda, monkeypatch):
    """Three steps, two of them by the short way of the CUDA engine; gradients that are not finite among them."""
    wanted = without_counts(cls, scheme, 3, True, dtype)
    monkeypatch.setattr(stepping, "run", lambda *given: pytest.fail("torch did the step"))
    assert same(without_counts(cls, scheme, 3, True, dtype, capturable=True), wanted)


@pytest.mark.parametrize("scheme", ["bnb8", "fp8lm", "lns_madam"])
def test_counts_of_a_cpu_in_tensors(scheme):
    cls = Madam if scheme == "lns_madam" else AdamW
    assert same(without_counts(cls, scheme, capturable=True), without_counts(cls, scheme))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learning_rates_in_tensors(dtype, on_cuda):
    """A scheduler writes into the tensor, and the next step has what it wrote."""

    def run(rate, **options):
        p = torch.nn.Parameter(torch.from_numpy(parameter((5000,))))
        optimizer = AdamW([p], lr=rate, state="bnb8", **options)
        for step, g in enumerate(gradients((5000,), 3)):
            p.grad = torch.from_numpy(g)
            group = optimizer.param_groups[0]
            now = float(torch.tensor(0.1 / (step + 1), dtype=dtype))
            if isinstance(rate, torch.Tensor):
                rate.fill_(now)
            else:
                group["lr"] = now
            optimizer.step()
        return value_bits(p.detach())

    wanted = run(0.1)
    assert torch.equal(run(torch.tensor(0.1, dtype=dtype)), wanted)
    assert torch.equal(run(torch.tensor(0.1, dtype=dtype), capturable=True), wanted)


HYPER = {"lr": 3e-4, "weight_decay": 0.1}
PLAIN = [
    11585,
    27154,
    43818,
    165676,
]  # where squares of double precision alone give other scalars to a beta of 0.999999
STEPS = [*range(1, 300), *range(300, 20_000, 97), *PLAIN, 10**5, 10**6 + 1, 2**31, 2**40]


@pytest.mark.parametrize("beta", [0.999, 0.95, 0.999999, 0.0])
@pytest.mark.parametrize(
    ("rule", "scheme"),
    [("adamw", "bnb8"), ("adamw", "coat_fixed"), ("adam", "fp32"), ("lion", "bnb8"), ("sgd", "fp32"),
     ("madam(base=2, round_update=True)", "lns_madam")],
)  # fmt: skip
def test_scalars_of_the_device_are_those_of_the_host(rule, scheme, beta, emulated):
    """Powers are worked out by squaring, in pairs of numbers; what both give to float32 is the same."""
    scheme = fmtsim.optim.get_scheme(scheme)
    known = {"adamw": rules.ADAMW, "adam": rules.ADAM, "lion": rules.LION, "sgd": rules.SGD}
    host = known.get(rule) or fmtsim.optim.rules.madam(2, True)
    own = {"sgd": {"momentum": beta}, "madam(base=2, round_update=True)": {"beta": beta, "bound": 10.0}}
    group = HYPER | own.get(rule, {"betas": (0.9, beta), "eps": 1e-8})
    given = rules.hyperparameters(group, torch.device("cpu"))
    kernel = runtime.kernel("optimizer_scalars.cu", "scalars", 0, kernels_of(rule, scheme).scalars(rule, scheme))
    unused = {"sgd": ("rest1", "beta2", "rest2"), "madam(base=2, round_update=True)": ("beta1", "rest1")}
    used = set(Numbers._fields) - set(unused.get(rule, ()))
    for first in range(0, len(STEPS), 30):
        counts = [torch.tensor(step - 1) for step in STEPS[first : first + 30]]
        (part,) = launches([(*[0] * 10, count.data_ptr(), 0, 0, 1, 1) for count in counts])
        out = torch.zeros((30, 16), dtype=torch.float32)
        packed = struct.pack("<6dQ2i", *given, 0, 0, 0)
        kernel(1, 32, part.table.tobytes(), np.int32(part.entries), packed, np.int32(22), out)
        for count, found in zip(counts, out, strict=False):
            wanted = host.numbers(group, int(count), scheme)._asdict()
            got = dict(zip(Numbers._fields, found.tolist(), strict=False))
            assert {n: got[n] for n in used} == {n: wanted[n] for n in used}, int(count)
            assert int(found[12:14].view(torch.int64)) == int(count) << 22 and got["correction"] * found[11] > 0.99


@pytest.mark.parametrize(
    ("lr", "stays"),
    [(torch.tensor(0.5), True), (torch.tensor(0.5, dtype=torch.float64), True), (0.5, False),
     (torch.tensor(0.5, dtype=torch.float16), False), (torch.tensor(0.5, device="meta"), False)],
)  # fmt: skip
def test_learning_rates_that_a_step_reads_are_those_on_its_device(lr, stays):
    """Kernels read float32 and float64; other learning rates become numbers before a step is recorded."""
    group = {"lr": lr, "betas": (0.25, 0.75), "eps": 1e-6, "weight_decay": 0.125}
    if isinstance(lr, torch.Tensor) and lr.is_meta:
        assert rules.hyperparameters(group, torch.device("meta")).lr is lr
        return
    found = rules.hyperparameters(group, torch.device("cpu"))
    assert found.lr is lr if stays else (type(found.lr), found.lr) == (float, 0.5)
    assert found[1:] == (0.25, 0.75, 1e-6, 0.125, float("inf"))
    cpu, plain = torch.device("cpu"), {"lr": 1.0, "weight_decay": 0.5}
    assert rules.hyperparameters(plain | {"momentum": 0.25}, cpu)[1:] == (0.25, 0.0, 0.0, 0.5, float("inf"))
    assert rules.hyperparameters(plain | {"beta": 0.25, "bound": 9.0}, cpu)[1:] == (0.0, 0.25, 0.0, 0.5, 9.0)


def test_saved_counts_go_where_the_optimizer_has_them():
    def optimizer(capturable):
        p = torch.nn.Parameter(torch.ones(64, 80))
        made = AdamW([p], state="bnb8", capturable=capturable)
        p.grad = torch.ones_like(p)
        return made, p

    there, p = optimizer(True)
    here, q = optimizer(False)
    for _ in range(2):
        there.step()
        here.step()
    assert int(there.state[p]["step"]) == 2 and here.state[q]["step"] == 2
    saved = copy.deepcopy(there.state_dict())
    fresh, r = optimizer(False)
    r.data.copy_(p.data)
    fresh.load_state_dict(saved)  # as torch has it, groups say what they were saved with
    assert fresh.param_groups[0]["capturable"] and int(fresh.state[r]["step"]) == 2
    assert fresh.state[r]["step"].data_ptr() != there.state[p]["step"].data_ptr()
    fresh.param_groups[0]["capturable"] = False
    fresh.step()
    here.step()
    assert fresh.state[r]["step"] == 3 and torch.equal(r, q)
    old = here.state_dict()
    for group in old["param_groups"]:
        del group["capturable"]  # as before there were such
    there.load_state_dict(old)
    assert isinstance(there.state[p]["step"], torch.Tensor) and int(there.state[p]["step"]) == 3


def test_what_a_graph_cannot_capture(on_cuda, capturing):
    def made(scheme="bnb8", **options):
        p = torch.nn.Parameter(torch.ones(64, 80))
        p.grad = torch.ones_like(p)
        return AdamW([p], state=scheme, **options), p

    skipping = fmtsim.optim.Scheme(name="mine", nonfinite="skip")
    host, p = made()
    first, q = made(capturable=True)
    unknown, r = made(skipping, capturable=True)
    unknown.step()
    before = r.detach().clone()
    capturing()
    refused("cannot capture a step: steps are counted on the host.* capturable=True", host.step, error=DeviceError)
    refused("cannot capture a step: what a first step makes.* before the capture", first.step, error=DeviceError)
    refused("no kernel of adamw takes parameter 0 under 'mine'.* after each replay", unknown.step, error=DeviceError)
    assert (p == 1).all() and (q == 1).all() and torch.equal(r, before) and not first.state[q]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("scheme", "cls", "dtype"), CASES)
def test_replays_have_the_bits_of_steps(scheme, cls, dtype):
    """A step in a graph, whose learning rate and gradients change between replays."""

    def begin(**options):
        ps = [torch.nn.Parameter(torch.from_numpy(parameter(s, i)).to("cuda", dtype)) for i, s in enumerate(SHAPES)]
        for p in ps:
            p.grad = torch.zeros_like(p)
        rate = torch.tensor(1 / 128, device="cuda") if options else 1 / 128
        return cls(ps, lr=rate, state=scheme, seed=5, **options), ps, rate

    grads = [gradients((8960,), 6, 50 + i) for i in range(len(SHAPES))]

    def fill(ps, step):
        for p, g in zip(ps, grads, strict=True):
            p.grad.copy_(torch.from_numpy(g[step][: p.numel()].reshape(p.shape)))

    eager, wanted, _ = begin()
    live, found, rate = begin(capturable=True)
    fill(found, 0)
    live.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        live.step()
    for step in range(6):
        eager.param_groups[0]["lr"] = 1 / 128 if step == 0 else 2.0 ** -(7 + step % 3)
        fill(wanted, step)
        eager.step()
        if step:
            rate.fill_(2.0 ** -(7 + step % 3))
            fill(found, step)
            graph.replay()
    assert [int(live.state[p]["step"]) for p in found] == [6] * len(found)
    for p, q in zip(wanted, found, strict=True):
        assert torch.equal(value_bits(p.detach()), value_bits(q.detach()))
        for name, kept in eager.state[p].items():
            if isinstance(kept, torch.Tensor):
                assert torch.equal(value_bits(kept), value_bits(live.state[q][name])), name
    assert eager.nonfinite_gradients() == live.nonfinite_gradients()
