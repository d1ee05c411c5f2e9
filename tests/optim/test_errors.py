# SPDX-License-Identifier: Apache-2.0
"""What is refused, in which words, and what NaN and Inf in gradients do."""

import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fmtsim
from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.scaling import Scaling
from fmtsim.optim import SGD, AdamW, Lion, Madam, Scheme, StateFormat, codec, get_scheme
from fmtsim.optim.catalogue import scaled_state
from fmtsim.spec.optimizer import STATE_RULES
from fmtsim.support.errors import ArgumentError, DtypeError
from tests.support.refusals import refused

E4M3 = fmtsim.get_format("e4m3")


def weight(*shape):
    return torch.nn.Parameter(torch.ones(*(shape or (4, 4))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW([weight()], state="bnb9"), r"state='bnb9' is unknown; did you mean 'bnb8'.*choose one of fp32"),
        *((lambda params=params: AdamW(params), f"params={params!r} are not parameters; pass model.parameters")
          for params in (5, "w", b"w")),
        (lambda: AdamW([weight()], lr=-1), "lr=-1 is not allowed; choose a number of 0 or more"),
        (lambda: AdamW([weight()], lr=math.nan), "lr=nan is not allowed"),
        (lambda: AdamW([weight()], lr=torch.ones(2)), "lr=tensor.* is not allowed"),
        (lambda: AdamW([weight()], lr=torch.tensor(-1.0)), "lr=-1.0 is not allowed"),
        (lambda: AdamW([weight()], capturable=1), "capturable=1"),
        (lambda: AdamW([weight()], betas=(0.9, 1.0)), r"betas\[1\]=1.0 is not allowed; choose a number in \[0, 1\)"),
        (lambda: AdamW([weight()], betas=0.9), "betas=0.9 is not allowed; choose two numbers"),
        (lambda: Lion([weight()], weight_decay=-0.1), "weight_decay=-0.1 is not allowed"),
        (lambda: SGD([weight()], momentum=1.5), "momentum=1.5 is not allowed"),
        (lambda: Madam([weight()], base=10), "base=10 is not allowed; choose 2 or 'e'"),
        (lambda: Madam([weight()], weight_decay=0.1), "weight_decay=0.1 needs base='e'"),
        (lambda: Madam([weight()], base="e"), "base='e' with 'lns_madam': weights kept as logarithms .* choose base=2"),
        (lambda: AdamW([weight()], seed=-1), "seed=-1 is not allowed"),
        (lambda: AdamW([{"params": [weight()], "state": "bnb8"}]), "a group .* has no state= of its own; make a"),
        (lambda: SGD([{"params": [weight()], "seed": 1}]), "a group of parameters has no seed= of its own"),
        *((lambda block=block: scaled_state(E4M3, "amax", block), r"is not one of a state; choose \(1, 2\) or longer,")
          for block in ((1, 1), (2, 2), (None, 4), (2, None))),
        *((lambda scaling=scaling: StateFormat(format=E4M3, scaling=scaling), r"is not a rule of states; .*\(amax, inv")
          for scaling in (Scaling(), Scaling(arithmetic="divide"), Scaling(zero_point=True))),
        (lambda: StateFormat(scaling=STATE_RULES["amax"]), "need a format; float32 takes neither"),
        (lambda: StateFormat(format=fmtsim.get_format("fp32")), "32 bits is not packed; choose a format of 16 bits"),
        (lambda: scaled_state(fmtsim.get_format("bnb_fp4"), "amax"), "bnb_fp4 is not in order"),
        (lambda: StateFormat(format=fmtsim.get_format("nf4"), rounding=fmtsim.Rounding(mode="up")), "round to nearest"),
        (lambda: StateFormat(format=E4M3, least_of="lanes"), r"least_of='lanes' with expand=False, block=\(No"),
        (lambda: StateFormat(format=E4M3, expand=True), r"expand=True with scaling=\[None\] does not exist; choose"),
        (lambda: Scheme(name="x", nonfinite="stop"), "nonfinite='stop' is not allowed; choose 'propagate', 'zero',"),
        (lambda: Scheme(name="x", decay="never"), "decay='never' is not allowed; choose 'before', 'after'"),
    ],
)  # fmt: skip
def test_what_is_not_allowed(make, message):
    refused(message, make)


# The numbers that each hyperparameter may be: its least, the next below that, and where it ends (None: nowhere).
BOUNDS = [(kind, name, end) for kind, names in (
    (AdamW, {"lr": None, "eps": None, "weight_decay": None, "betas": 1.0}),
    (Lion, {"lr": None, "weight_decay": None, "betas": 1.0}),
    (SGD, {"lr": None, "weight_decay": None, "momentum": 1.0}),
    (Madam, {"lr": None, "bound": None, "beta": 1.0}),
) for name, end in names.items()]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "end"), BOUNDS, ids=lambda given: getattr(given, "__name__", str(given)))
def test_hyperparameters_end_where_they_should(kind, name, end):
    """From 0, which is taken, up to the end, which is not; and neither Inf, NaN nor a word."""
    inside, outside = [0, 0.0, 0.5], [-5e-324, -1, -math.inf, math.inf, math.nan, "1", None, end]
    inside += [1, 1e30] if end is None else [math.nextafter(end, 0)]
    pairs = [lambda value: value] if name != "betas" else [lambda value: (value, 0.5), lambda value: (0.5, value)]
    for place, given in enumerate(pairs):
        said = f"betas[{place}]" if name == "betas" else name
        for value in inside:
            assert kind([weight()], **{name: given(value)}).param_groups[0][name] == given(value)
        for value in outside:
            with pytest.raises(ArgumentError, match=re.escape(f"{said}={value!r} is not allowed; choose a number")):
                kind([weight()], **{name: given(value)})


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.9, 0.9), 0.9, "ab", None])
def test_betas_are_two(betas):
    refused("betas", AdamW, [weight()], betas=betas)


@pytest.mark.parametrize(("seed", "good"), [(0, True), (2**63 - 1, True), (-1, False), (2**63, False), (1.0, False)])
def test_seeds_have_63_bits(seed, good):
    if good:
        assert AdamW([weight()], seed=seed).seed == seed
    else:
        refused(re.escape(f"seed={seed!r} is not allowed; choose 0 to 2**63 - 1"), AdamW, [weight()], seed=seed)


def test_dtypes():
    with pytest.raises(DtypeError, match=r"torch\.complex64 is not taken; choose float32, bfloat16 or float16"):
        AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    optimizer = AdamW([weight()])
    with pytest.raises(DtypeError, match=r"torch\.float64 is not taken"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


def test_a_bad_gradient_stops_the_step_before_anything_changes():
    first, table = weight(), torch.nn.Embedding(8, 4, sparse=True)
    optimizer = AdamW([first, *table.parameters()])
    first.grad = torch.ones_like(first)
    table(torch.tensor([1])).sum().backward()
    refused(r"gradient of parameter 1 is sparse .*; use dense gradients", optimizer.step)
    assert torch.equal(first.detach(), torch.ones(4, 4)) and not optimizer.state


def test_a_fake_gradient():
    p = weight()
    p.grad = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones_like(p))
    with pytest.raises(ArgumentError, match="parameter 0 or its gradient is fake, or traced by vmap; step with real"):
        AdamW([p]).step()


def replace_data(p, data):
    p.grad = None  # which torch holds to the dtype
    p.data = data
    p.grad = torch.ones_like(p)


@pytest.mark.parametrize(
    ("state", "change", "message"),
    [
        ("fp32", lambda p, state: replace_data(p, torch.ones(4, 6)), r"0 is \[4, 6\] now, its state is of \[6, 4\]"),
        ("bf16_sr", lambda p, state: replace_data(p, p.detach().float()),
         r"0 is torch\.float32 now, and no longer holds .* 'bf16_sr'"),
        # The state follows when it is loaded anew; "meta" stands for another device.
        ("fp32", lambda p, state: state.update(second=state["second"].to("meta")),
         r"0 is on cpu now, its state on meta; .*load_state_dict"),
    ],
    ids=["shape", "dtype", "device"],
)  # fmt: skip
def test_a_parameter_that_is_not_what_it_was(state, change, message):
    p = torch.nn.Parameter(torch.ones(6, 4, dtype=torch.bfloat16 if state == "bf16_sr" else torch.float32))
    optimizer = AdamW([p], state=state)
    p.grad = torch.ones_like(p)
    optimizer.step()
    change(p, optimizer.state[p])
    before = p.detach().clone()
    refused(f"parameter {message}", optimizer.step)
    assert torch.equal(p.detach(), before) and optimizer.state[p]["step"] == 1


def test_a_gradient_of_another_shape():
    """What a parameter's data becomes is not held to the gradient that is there; a kernel would read past its end."""
    p = weight(6, 4)
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    p.data = torch.ones(60, 4)
    refused(r"the gradient of parameter 0 is \[6, 4\], the parameter \[60, 4\]", optimizer.step)
    assert not optimizer.state


def test_a_step_that_fails_is_not_counted(monkeypatch):
    first, second = weight(), weight()
    optimizer = AdamW([first, second], state="deepseek_v3")
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    encode = codec.encode

    def fail(x, *rest):
        if optimizer.state[first]["step"] == 2:
            raise MemoryError
        return encode(x, *rest)

    monkeypatch.setattr(codec, "encode", fail)
    before = second.detach().clone()
    with pytest.raises(MemoryError):
        optimizer.step()
    assert [optimizer.state[p]["step"] for p in (first, second)] == [2, 1]
    assert torch.equal(second.detach(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["zero", "skip", "propagate"])
def test_gradients_that_are_not_finite(rule, bad):
    """Three rules: that element's moments become zero and it stays, the tensor stays, or arithmetic has its way."""
    p = weight(64, 80)
    bnb = get_scheme("bnb8")
    scheme = Scheme(name=rule, first=bnb.first, second=bnb.second, nonfinite=rule)
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0, state=scheme)
    for value in (1.0, bad):
        p.grad = torch.ones_like(p)
        p.grad[3, 5] = value
        before = p.detach().clone()
        optimizer.step()
    still = p.detach() == before
    assert optimizer.nonfinite_gradients() == 1
    assert int(still.sum()) == {"zero": 1, "skip": p.numel(), "propagate": 0}[rule]
    if rule == "propagate":
        assert bool(p.isnan()[3, 5])
    else:
        assert bool(p.isfinite().all()) and bool(still[3, 5])


def test_rules_of_the_catalogue():
    assert {name: get_scheme(name).nonfinite for name in ("bnb8", "coat", "fp8lm")} == {
        "bnb8": "zero", "coat": "propagate", "fp8lm": "propagate",
    }  # fmt: skip


def test_codebooks_that_kernels_cannot_tell_apart_have_no_fast_path():
    from fmtsim.cpu.optim import optimizer_steps
    from fmtsim.rounding import codebooks

    close = CodebookFormat(name="close", values=tuple(i / 10**6 for i in range(255)) + (1.0,))
    refused("closer than kernels tell apart", codebooks.table_of, close, "even")
    scheme = Scheme(name="x", **dict.fromkeys(("first", "second"), scaled_state(close, "amax", (1, 256))))
    assert not optimizer_steps.supports_optimizer("adamw", scheme)
    p = weight(64, 80)
    p.grad = torch.ones_like(p)
    AdamW([p], state=scheme).step()
