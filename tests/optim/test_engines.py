# SPDX-License-Identifier: Apache-2.0
"""Fused kernels against torch operations: equal bits of parameters, codes, scales and counts."""

import functools
import pickle

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cpu.optim import optimizer_steps as cpu_steps
from fmtsim.cuda.optim import fused_steps as cuda_steps
from fmtsim.optim import StateFormat, stepping
from fmtsim.optim.catalogue import scaled_state
from fmtsim.rounding import codebooks
from tests.optim.optim_samples import SHAPES, gradients, parameter, train, value_bits

nesterov = functools.partial(fmtsim.optim.SGD, nesterov=True)
freely = functools.partial(fmtsim.optim.Madam, round_update=False)
CUDA = (
    ("bnb8", fmtsim.optim.AdamW, torch.float32),
    ("ao_8bit", fmtsim.optim.Adam, torch.float32),
    ("ao_4bit", fmtsim.optim.AdamW, torch.float16),
    ("coat_fixed", fmtsim.optim.AdamW, torch.float32),
    ("fp8lm", fmtsim.optim.AdamW, torch.float32),
    ("bf16_sr", fmtsim.optim.AdamW, torch.bfloat16),
    ("int8_weights", fmtsim.optim.AdamW, torch.float32),
    ("lns_madam", fmtsim.optim.Madam, torch.float32),
    ("bnb8", fmtsim.optim.Lion, torch.float32),
    ("fp8lm", fmtsim.optim.SGD, torch.float32),
    ("coat_fixed", nesterov, torch.float32),
    *(
        pytest.param(*case, marks=pytest.mark.slow)  # other compilations
        for case in (
            ("int8_weights", fmtsim.optim.Lion, torch.bfloat16),
            ("int8_weights", nesterov, torch.float16),
            ("lns_madam", freely, torch.bfloat16),
            ("coat_fixed", fmtsim.optim.Lion, torch.float32),
            ("ao_4bit", fmtsim.optim.SGD, torch.float32),
            ("fp32", fmtsim.optim.Lion, torch.float32),
            ("intel_2t", fmtsim.optim.Lion, torch.float32),
        )  # fmt: skip
    ),
    *(
        pytest.param(scheme, fmtsim.optim.AdamW, dtype, marks=pytest.mark.slow)
        for scheme, dtype in (
            ("fp32", torch.float16),
            ("intel_2t", torch.float32),
            ("coat_plain", torch.bfloat16),
            ("bnb8_2048", torch.float32),
            ("bf16_sr", torch.float32),
            ("deepseek_v3", torch.bfloat16),
            ("fp8lm_v8", torch.float16),
            ("fp8lm_w8", torch.bfloat16),
            ("ao_fp8", torch.float32),
        )  # fmt: skip
    ),
)
OURS = (
    ("fp32", fmtsim.optim.Adam), ("bnb8", fmtsim.optim.AdamW), ("bnb8_2048", fmtsim.optim.AdamW),
    ("ao_8bit", fmtsim.optim.Adam), ("bnb8", fmtsim.optim.Lion), ("fp32", fmtsim.optim.Lion),
    ("ao_8bit", fmtsim.optim.SGD), ("fp32", nesterov), ("lns_madam", fmtsim.optim.Madam), ("lns_madam", freely),
    ("int8_weights", fmtsim.optim.AdamW), ("int8_weights", fmtsim.optim.Lion),
)  # fmt: skip


def equal(a, b):
    return a[1] == b[1] and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


@pytest.mark.parametrize(("scheme", "cls"), OURS)
@pytest.mark.parametrize("bad", [False, True])
def test_the_cpu_kernel_has_the_bits_of_torch(scheme, cls, bad, only_torch, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stepping, "run", lambda *given: pytest.fail("torch did the step"))
        fused = train(cls, scheme, bad=bad)
    only_torch()
    assert equal(fused, train(cls, scheme, bad=bad))
    assert (fused[1] > 0) == bad


@pytest.mark.parametrize(("scheme", "cls", "dtype"), CUDA)
@pytest.mark.parametrize("bad", [False, True])
def test_the_cuda_kernel_has_the_bits_of_torch(scheme, cls, dtype, bad, on_cuda, only_torch, monkeypatch):
    starts = []
    launch = cuda_steps.launch
    monkeypatch.setattr(cuda_steps, "launch", lambda *given: (starts.append(1), launch(*given)))
    fused = train(cls, scheme, bad=bad, dtype=dtype)
    assert len(starts) == 3
    only_torch()
    assert equal(fused, train(cls, scheme, bad=bad, dtype=dtype))


def extremes(scheme):
    """Return states after gradients of all sizes: numbers too small for a scale, sums that overflow, Inf at last."""
    parameters = [
        torch.nn.Parameter(torch.from_numpy(parameter(shape, i)))
        for i, shape in enumerate([(4097,), (4095,), (3,), (1,), (2, 2)])
    ]
    optimizer = fmtsim.optim.AdamW(parameters, state=scheme, weight_decay=0.1)
    found = []
    for size in (0.0, 1e-3, 0.0, 1e-20, 1e-30, 1e-41, 1e18, 1e-3, 1e25, 1e-3, torch.inf, 1e-3):
        for i, p in enumerate(parameters):
            p.grad = torch.from_numpy(parameter(tuple(p.shape), 9 + i)) * size
        optimizer.step()
        found += [value_bits(t) for p in parameters for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        found += [value_bits(p.detach()) for p in parameters]
    return found, optimizer.nonfinite_gradients()


def own(first, second, **more):
    return fmtsim.optim.Scheme(name="own", first=first, second=second, **more)


CODES = {name: fmtsim.get_format(name) for name in ("e4m3", "e3m4", "e5m2", "bf16", "fp16")}
DRAWN = fmtsim.Rounding(mode="stochastic", random_bits=8)
OWN = {
    "codebooks of 4 bits, half a byte at the end": own(
        scaled_state(fmtsim.get_format("dynamic4"), "amax", (1, 512), keep_sign=True),
        scaled_state(fmtsim.get_format("linear4_unsigned"), "amax", (1, 512), least=1e-9),
        nonfinite="zero",
    ),
    "blocks, a rule for each state": own(
        scaled_state(CODES["e4m3"], "inverse", (1, 1024)),
        scaled_state(CODES["bf16"], "reciprocal", (1, 1024)),
        weights=scaled_state(CODES["fp16"], "power_of_two", (1, 1024)),
        nonfinite="zero",
    ),
    "tensors, some states without a scale": own(
        StateFormat(),
        scaled_state(CODES["e5m2"], "power_of_two", least=1e-7),
        weights=StateFormat(format=CODES["bf16"], rounding=DRAWN),
    ),
    "integers, a scale a row": own(
        StateFormat(format=CODES["bf16"]),
        StateFormat(),
        weights=scaled_state(fmtsim.get_format("int8"), "amax", (1, None), least=1e-7, rounding=fmtsim.Rounding()),
        nonfinite="zero",
    ),
    "integers, one scale": own(
        StateFormat(),
        StateFormat(),
        weights=scaled_state(fmtsim.get_format("int8_full"), "reciprocal", rounding=DRAWN),
    ),
    "small tensors in float32": own(
        scaled_state(CODES["e3m4"], "amax", (1, 2048)), StateFormat(format=CODES["fp16"]), minimum=4096
    ),
}


@pytest.mark.parametrize(
    "scheme",
    ["fp8lm", "coat_fixed", *OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in ("intel_2t", "coat_plain"))],
)
def test_numbers_of_all_sizes_have_the_bits_of_torch(scheme, on_cuda, only_torch, monkeypatch):
    step = stepping.run
    monkeypatch.setattr(stepping, "run", lambda *given: pytest.fail("torch did the step"))
    fused = extremes(OWN.get(scheme, scheme))
    monkeypatch.setattr(stepping, "run", step)
    only_torch()
    assert equal(fused, extremes(OWN.get(scheme, scheme)))


def test_the_largest_numbers_are_those_of_their_own_tensor(on_cuda, only_torch):
    """A block of threads goes from a large tensor to a small one, whose moments are float32, with what it found."""
    scheme = own(
        scaled_state(CODES["e4m3"], "reciprocal"),
        scaled_state(CODES["fp16"], "power_of_two"),
        minimum=4096,
    )

    def run():
        ps = [torch.nn.Parameter(torch.ones(size)) for size in (20_000, 3_000, 20_000, 5, 9_000)]
        optimizer = fmtsim.optim.AdamW(ps, state=scheme)
        for i, p in enumerate(ps):
            p.grad = torch.from_numpy(parameter((p.numel(),), i))
            p.grad[2048 * 6 : 2048 * 7] *= 100  # a chunk whose block has one of the small tensor after it
        optimizer.step()
        return [value_bits(t) for p in ps for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]

    fused = run()
    only_torch()
    assert all(map(torch.equal, fused, run()))


@pytest.mark.parametrize("late", [0, 1 << 13])
@pytest.mark.parametrize("mixed", [False, True])
def test_groups_and_dtypes_side_by_side(mixed, late, on_cuda, only_torch):
    """Groups have scalars of their own, dtypes kernels of their own; random words follow a parameter's place."""

    def run():
        dtypes = (torch.bfloat16, torch.float32 if mixed else torch.bfloat16)
        ps = [torch.nn.Parameter(torch.from_numpy(parameter((2500,), i)).to(dtypes[i % 2])) for i in range(4)]
        optimizer = fmtsim.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.1}], state="bf16_sr", seed=7)
        for step in range(3):
            for i, p in enumerate(ps):
                p.grad = torch.from_numpy(parameter((2500,), 10 * step + i)).to(p.dtype)
                if step == 1:
                    optimizer.state[p]["step"] += late  # whose random words lie beyond the first 2^32
            optimizer.step()
        return [value_bits(p.detach()) for p in ps], bool(optimizer._batches)

    fused, short = run()
    assert short != mixed
    only_torch()
    wanted, _ = run()
    assert all(map(torch.equal, fused, wanted))
    assert not torch.equal(fused[0], fused[2])


@pytest.mark.parametrize("change", ["nothing", "gradient", "state", "states", "pointer", "step"])
def test_the_fast_step_is_left_where_something_changed(change, on_cuda, only_torch):
    """The second step takes the fast path, unless a parameter or its state is not what it was."""

    def run():
        parameters = [torch.nn.Parameter(torch.from_numpy(parameter(shape, i))) for i, shape in enumerate(SHAPES)]
        optimizer = fmtsim.optim.AdamW(parameters, state="bnb8")
        long = []
        optimizer._full_step = lambda: (long.append(1), type(optimizer)._full_step(optimizer))
        for step in range(3):
            for p in parameters:
                p.grad = torch.full_like(p, 0.1 + step)
            if step == 1 and change == "gradient":
                parameters[2].grad = None
            if step == 1 and change == "state":
                state = optimizer.state[parameters[0]]
                state["first"] = state["first"].clone()
            if step == 1 and change == "states":
                optimizer.state.clear()
            if step == 1 and change == "pointer":
                parameters[1].data = parameters[1].detach().clone()
            if step == 1 and change == "step":
                optimizer.state[parameters[1]]["step"] = 7
            optimizer.step()
        return [value_bits(p.detach()) for p in parameters], len(long)

    fused, long = run()
    assert long == {"nothing": 1, "gradient": 3, "state": 2, "states": 2, "pointer": 1, "step": 3}[change]
    only_torch()
    wanted, long = run()
    assert long == 3
    assert all(map(torch.equal, fused, wanted))


@pytest.mark.parametrize("scheme", ["fp8lm", "coat_fixed"])
def test_the_update_of_the_cpu_has_the_bits_of_torch(scheme):
    """Schemes without a kernel of their own: decoded and encoded by torch, updated in between."""
    for bad in (False, True):
        fused = train(fmtsim.optim.AdamW, scheme, bad=bad)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_steps, "RULES", {})
            assert equal(fused, train(fmtsim.optim.AdamW, scheme, bad=bad))


@pytest.mark.parametrize(
    ("scheme", "cls"),
    [("coat_fixed", "AdamW"), ("ao_4bit", "AdamW"), ("ao_4bit", "Lion"), ("fp32", "Madam"), ("deepseek_v3", "Adam")],
)
def test_parts_of_a_step_have_the_bits_of_the_whole(scheme, cls, monkeypatch):
    whole = train(getattr(fmtsim.optim, cls), scheme, weight_decay=0.0, eps=None)
    parts = []
    step = stepping._run
    monkeypatch.setattr(stepping, "_run", lambda one, *rest: (parts.append(one.parameter.numel()), step(one, *rest)))
    monkeypatch.setattr(stepping, "PART", {False: 1024, True: 1024})
    assert equal(whole, train(getattr(fmtsim.optim, cls), scheme, weight_decay=0.0, eps=None))
    assert max(parts) == 1024


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda, again", "torch"])
def test_autograd_notices_the_step(device, request, monkeypatch):
    """A backward through numbers that a step has overwritten is refused."""
    if device.startswith("cuda"):
        request.getfixturevalue("on_cuda")
    if device == "torch":
        request.getfixturevalue("only_torch")()
    p = torch.nn.Parameter(torch.from_numpy(parameter((5000,))))
    optimizer = fmtsim.optim.AdamW([p], state="bnb8")
    p.grad = torch.ones_like(p)
    if device == "cuda, again":
        optimizer.step()
        assert optimizer._batches
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_take_the_kernels_too(monkeypatch):
    p = torch.nn.Parameter(torch.from_numpy(parameter((5000,))))
    optimizer = pickle.loads(pickle.dumps(fmtsim.optim.AdamW([p], state="bnb8")))
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    monkeypatch.setattr(stepping, "run", lambda *given: pytest.fail("torch did the step"))
    optimizer.step()


@pytest.mark.parametrize("scheme", ["bnb8", "fp32"])
def test_threads_change_nothing(scheme):
    results = []
    try:
        for count in (1, 3):
            fmtsim.set_num_threads(count)
            p = torch.nn.Parameter(torch.from_numpy(parameter((300_001,))))
            optimizer = fmtsim.optim.AdamW([p], state=scheme)
            p.grad = torch.from_numpy(gradients((300_001,), 1)[0])
            p.grad[::50_000] = torch.inf
            optimizer.step()
            kept = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
            results.append(([value_bits(t.detach()) for t in (p, *kept)], optimizer.nonfinite_gradients()))
    finally:
        fmtsim.set_num_threads(None)
    assert equal(*results)
    assert results[0][1] == 7


@pytest.mark.parametrize("scheme", ["bnb8", "ao_8bit", "ao_4bit"])
@pytest.mark.parametrize("slot", ["first", "second"])
def test_words_of_kernels_find_the_codes_of_a_search(scheme, slot):
    """Around every threshold, over a grid of leading bits, and beyond both ends."""
    fmt = getattr(fmtsim.optim.get_scheme(scheme), slot)
    table, turns = codebooks.table_of(fmt.format, fmt.ties), codebooks.codebook_thresholds(fmt.format, fmt.ties)
    near = np.concatenate([turns, np.nextafter(turns, np.float32(2)), np.nextafter(turns, np.float32(-2))])
    grid = (np.arange(1 << 15, dtype=np.uint32) << 15)[: 0x3F800000 >> 15].view(np.float32)
    y = np.concatenate([near, grid, -grid, np.float32([0, -0.0, 1, -1, 1e-45, -1e-45])]).astype(np.float32)
    y = y[np.abs(y) <= 1]
    word = y.view(np.int32)
    sign = word >> 31
    key = np.maximum((word & 0x7FFFFFFF) >> 16, codebooks.LOWEST_KEY) - codebooks.LOWEST_KEY
    found = table.words[key + (sign & codebooks.BUCKETS)]
    codes = (found >> 17) + (((word ^ sign) & 0xFFFF) >= (found & 0x1FFFF))
    assert np.array_equal(codes, np.searchsorted(turns, y, side="right"))


OPTIMIZERS = [(name, "AdamW") for name in fmtsim.optim.list_schemes() if name != "lns_madam"]
OPTIMIZERS += [
    ("lns_madam", "Madam"), ("bnb8", "Adam"), ("bnb8", "Lion"), ("coat_fixed", "SGD"), ("coat", "SGD"),
    ("fp32", "Madam"),
]  # fmt: skip
CASES = [(*pair, torch.bfloat16 if pair[0] == "bf16_sr" else torch.float32) for pair in OPTIMIZERS]
CASES += [
    (scheme, "AdamW", torch.bfloat16) for scheme in ("fp32", "bnb8", "ao_4bit", "coat_fixed", "fp8lm", "intel_2t")
]
CASES += [(scheme, "Adam", torch.float16) for scheme in ("bnb8", "deepseek_v3")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(("scheme", "cls", "dtype"), CASES)
def test_gpu_steps_have_the_bits_of_the_cpu(scheme, cls, dtype, bad):
    options = {"lr": 1 / 128, "weight_decay": None, "eps": None, "seed": 11}
    there, here = (
        train(getattr(fmtsim.optim, cls), scheme, 4, bad, dtype, device, **options) for device in ("cuda", "cpu")
    )
    different = [i for i, (a, b) in enumerate(zip(there[0], here[0], strict=True)) if not torch.equal(a, b)]
    assert (different, there[1]) == ([], here[1])
