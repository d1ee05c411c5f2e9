# SPDX-License-Identifier: Apache-2.0
"""The reduction in one process, against an oracle that passes messages, and its records and errors."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.distributed import REDUCTIONS, AutoFactor, Reduction, get_reduction, simulate, whole_tensors
from fmtsim.distributed.arithmetic import from_bytes, require_mu, require_row_blocks, to_bytes
from fmtsim.distributed.gather import HALO, require_whole
from fmtsim.distributed.simulated_reduce import tree as sum_as_tree
from fmtsim.formats.scaling import History, Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.support.errors import DtypeError, FmtsimError
from tests.distributed import reduction_oracle as oracle
from tests.support.bits import assert_same_bits, same_bits
from tests.support.reductions import gradients
from tests.support.refusals import refused

E4M3 = fmtsim.get_format("e4m3")


def factor_of(name, ranks, mu=0.3):
    return {"pre": 1 / ranks, "post": 1.0, "sqrt": ranks**-0.5, "auto": np.float32(mu)}[name]


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("factor", ["pre", "post", "sqrt", "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_oracle_gives_the_same_bits(ranks, factor, algorithm):
    auto, mu = (AutoFactor(), 0.3) if factor == "auto" else (None, None)
    reduction = Reduction(format=E4M3, factor=factor, auto=auto, algorithm=algorithm)
    xs = gradients(ranks, 41, ranks)
    expected, sums = oracle.reduce([x.numpy() for x in xs], factor_of(factor, ranks), algorithm)
    found = simulate(xs, reduction, mu=mu)
    assert_same_bits(found.values[0], expected)
    counts = found.counts[0]
    assert int(counts.elements) == 41 and int(counts.saturated) == int((np.abs(sums) == 448).sum())
    total = simulate(xs, dataclasses.replace(reduction, average=False), mu=mu).values[0]
    n = np.float32(ranks)
    amax = max(float(x.abs().max()) for x in xs)
    e = oracle.power_below(np.float32(448) / np.float32(amax)) * np.float32(factor_of(factor, ranks))
    assert same_bits(total, sums * (np.float32(1) / e)) and n == ranks


@pytest.mark.parametrize("factor", ["pre", "post"])
@pytest.mark.parametrize("times", [1e-40, 1e-36, 1e36])
def test_gradients_at_the_ends_of_float32(times, factor):
    xs = [x * times for x in gradients(3, 60, 8, spread=0.5)]
    reduction = Reduction(format=E4M3, factor=factor)
    expected, _ = oracle.reduce([x.numpy() for x in xs], factor_of(factor, 3), "ring")
    assert any(expected != 0) and same_bits(simulate(xs, reduction).values[0], expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_hop_of_all_pairs_of_codes_is_the_sum_rounded_once(name):
    """Rounding to float32, or to half precision, in between changes nothing."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = fmtsim.decode(codes, name)
    values = values[values.isfinite()]
    a, b = (m.reshape(-1) for m in torch.meshgrid(values, values, indexing="ij"))
    once = fmtsim.quantize(a.double() + b.double(), name, out_dtype=torch.float32, overflow="saturate")
    for dtype in (torch.float32, torch.float16):
        assert_same_bits(fmtsim.quantize((a.to(dtype) + b.to(dtype)).float(), name, overflow="saturate"), once)
    narrow = (a.bfloat16() + b.bfloat16()).float()  # the planted error: too few bits
    assert same_bits(fmtsim.quantize(narrow, name, overflow="saturate"), once) == (name == "e5m2")


def test_tensors_have_scales_of_their_own_and_keep_shape_and_dtype():
    small, large = gradients(3, 24, 1), [1e5 * x for x in gradients(3, 30, 2)]
    together = simulate([[a.reshape(4, 6), b] for a, b in zip(small, large, strict=True)], tree())
    apart = [simulate(small, tree()).values[0], simulate(large, tree()).values[0]]
    assert together.values[0].shape == (4, 6)
    assert same_bits(together.values[0].reshape(-1), apart[0]) and same_bits(together.values[1], apart[1])
    half = simulate([x.bfloat16() for x in small], tree()).values[0]
    exact = simulate([x.bfloat16().float() for x in small], tree()).values[0]
    assert half.dtype == torch.bfloat16 and torch.equal(half, exact.bfloat16())
    assert simulate([torch.empty(0)] * 2, "msamp").values[0].shape == (0,)
    assert simulate([torch.zeros(3)] * 2, "fp8lm").values[0].tolist() == [0.0] * 3


def tree():
    return dataclasses.replace(get_reduction("fp8lm_post"), algorithm="tree")


def test_a_million_fold_ring_saturates_only_behind():
    ones = [torch.ones(64)] * 1024
    post, pre = simulate(ones, "fp8lm_post"), simulate(ones, "fp8lm_pre")
    assert int(post.counts[0].saturated) == 64 and int(pre.counts[0].saturated) == 0
    assert bool((pre.values[0] <= 1).all())


def test_what_is_counted():
    xs = [torch.tensor([448.0, 2.0**-12, 1.0, math.nan]), torch.tensor([448.0, 0.0, 1.0, math.inf])]
    found = simulate(xs, "fp8lm_post")
    assert [c.to_dict() for c in found.counts] == [
        {"elements": 4, "saturated": 1, "spoiled": 1, "clipped": 0, "flushed": 1, "nonfinite": 1},
        {"elements": 4, "saturated": 1, "spoiled": 1, "clipped": 0, "flushed": 0, "nonfinite": 1},
    ]
    assert found.values[0].tolist()[:3] == [224.0, 0.0, 1.0] and math.isnan(found.values[0][3])
    clipped = simulate(xs, "fp8lm", mu=2.0).counts
    assert [int(c.clipped) for c in clipped] == [1, 1]


def test_each_rule_for_nan_and_inf():
    xs = [torch.tensor([1.0, math.inf, math.nan, 2.0]), torch.tensor([1.0, 1.0, 1.0, 2.0])]
    kept = simulate(xs, dataclasses.replace(get_reduction("msamp"), factor="post")).values[0]
    assert kept.tolist()[:2] == [1.0, 224.0 / 128] and math.isnan(kept[2])  # 448 of Inf, and 1 * 128, saturated
    raising = dataclasses.replace(get_reduction("fp8lm_post"), nonfinite="raise")
    refused(r"NaN or Inf elements \(2 on rank 0\) and nonfinite='raise'; nothing was", simulate, xs, raising)
    assert simulate(xs[1:], raising).values[0].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_stochastic_hops_are_a_function_of_seed_and_call():
    one = Reduction(format=E4M3, factor="pre", rounding=Rounding(mode="stochastic"), seed=3)
    xs = gradients(4, 400, 7)
    first = simulate(xs, one).values[0]
    assert torch.equal(first, simulate(xs, one).values[0])
    assert not torch.equal(first, simulate(xs, one, call=1).values[0])
    assert not torch.equal(first, simulate(xs, dataclasses.replace(one, seed=4)).values[0])


@pytest.mark.parametrize("saturated", [0, 1, 2])
def test_the_controller(saturated):
    rule = AutoFactor(threshold=1e-5, growth_steps=1000)
    mu = rule.next(torch.tensor(0.75), torch.tensor(saturated), torch.tensor(100_000))
    expected = np.float32(0.375) if saturated == 2 else np.float32(0.75) * np.float32(2**0.001)
    assert mu.dtype == torch.float32 and np.float32(mu) == expected


def test_the_controller_doubles_in_its_steps_and_stays_in_bounds():
    rule, mu, none = AutoFactor(growth_steps=100, largest=1.9), torch.tensor(0.5), torch.tensor(0)
    for _ in range(100):
        mu = rule.next(mu, none, torch.tensor(10))
    assert abs(float(mu) - 1.0) < 1e-5
    for _ in range(200):
        mu = rule.next(mu, none, torch.tensor(0))
    assert float(mu) == np.float32(1.9)
    for _ in range(60):
        mu = rule.next(mu, torch.tensor(10), torch.tensor(10))
    assert float(mu) == 2.0**-24


POST = get_reduction("fp8lm_post")
ONES, DOUBLES = torch.ones(3), torch.ones(3).double()
TILE = fmtsim.formats.block.scaled(E4M3, (128, 128))
REFUSED = [
    *((lambda change=change: dataclasses.replace(POST, **change), message) for change, message in (
        ({"factor": "prae"}, "Reduction factor='prae' is not allowed; choose 'pre', 'post', 'sqrt', 'auto'"),
        ({"format": fmtsim.get_format("mxfp4")}, "format='mxfp4' is not allowed; choose the record of a signed"),
        ({"format": fmtsim.get_format("fp64")}, "format='fp64' is not allowed; choose a format whose values"),
        ({"format": fmtsim.get_format("int8")}, "int8 has no NaN to propagate; choose nonfinite='saturate' or 'raise'"),
        ({"factor": "auto"}, "auto=None with factor='auto' is not allowed; choose factor='auto' and auto=AutoFactor"),
        ({"scaling": Scaling(arithmetic="divide")}, "a reduction takes no arithmetic='divide'; choose 'recip"),
        ({"scaling": Scaling(block=(1, 32))}, "takes no block=(1, 32); choose (None, None)"),
        ({"scaling": Scaling(history=History())}, "a reduction takes no history="),
        ({"seed": -1}, "Reduction seed=-1 is not allowed; choose 0 to 2**63 - 1"),
    )),
    *((lambda fields=fields: AutoFactor(**fields), message) for fields, message in (
        ({"backoff": 0.0}, "AutoFactor backoff=0.0 is not allowed; choose a finite number above 0"),
        ({"threshold": 1.0}, "AutoFactor threshold=1.0 is not allowed; choose a part from 0, below 1"),
        ({"growth_steps": 0}, "AutoFactor growth_steps=0 is not allowed; choose a whole number from 1"),
        ({"initial": 2.0**30}, "AutoFactor initial=1073741824.0 is not allowed; choose one in the bounds"),
    )),
    *((lambda mu=mu: simulate([ONES], "fp8lm", mu=mu), f"mu={mu!r} is not a factor; pass a finite number above 0")
      for mu in (0, 0.0, -1, -math.inf, math.inf, math.nan, "1", [1.0], torch.ones(2),
                 *map(torch.tensor, (0.0, -1.0, math.inf, math.nan, [0.5, 0.5])))),
    *((lambda call=call: simulate([ONES], "msamp", call=call),
       f"call={call} is not allowed; choose a whole number from 0 to 21474836") for call in (-1, 1 << 31, 0.5)),
    (lambda: simulate([ONES], "msamp", mu=2.0), "mu=2.0 belongs to factor='auto', not 'sqrt'; leave it out"),
    (lambda: get_reduction("fp8ml"), "unknown reduction 'fp8ml'; did you mean 'fp8lm'"),
    (lambda: simulate([ONES, torch.ones(4)], "msamp"),
     "ranks disagree: rank 0 reduces [((3,), torch.float32, 'cpu')], rank 1"),
    (lambda: simulate(None, "fp8lm_pre"), "ranks is NoneType; pass a list with the tensor, or tensors, of each rank"),
    (lambda: simulate(torch.tensor(3.0), "bf16"), "ranks is a tensor without dimensions; pass a list"),
    (lambda: simulate([], "msamp"), "0 ranks are not supported; choose 1 to 65535"),
    (lambda: whole_tensors([3], 0), "0 ranks are not supported; choose 1 to 65535"),
    (lambda: simulate([[]], "msamp"), "there are no tensors to reduce"),
    (lambda: simulate([ONES.to_sparse()], "msamp"), "tensor 0 has layout torch.sparse_coo; pass a dense tensor"),
    (lambda: require_row_blocks(TILE), "has blocks of 128 rows, but rows are sent apart; choose a format with bl"),
    (lambda: require_whole(fmtsim.get_format("mxfp4"), HALO),
     "mxfp4 has scales of its own; pass scaling=None, or an element format"),
    (lambda: require_whole(E4M3, Scaling(block=(1, 32))),
     "a gathered tensor takes no block=(1, 32); choose (None, None), such as Scaling()"),
]  # fmt: skip
WRONG_DTYPES = [
    ([None], "the argument is a NoneType; pass a tensor, or a list of tensors"),
    ([ONES.long()], "tensor 0 is torch.int64; reduce float16, bfloat16, float32 or float64"),
    ([[ONES, DOUBLES]], "tensor 1 is torch.float64 on cpu, tensor 0 torch.float32 on cpu"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(call, message):
    refused(re.escape(message), call)


@pytest.mark.parametrize(("ranks", "message"), WRONG_DTYPES)
def test_dtypes_that_are_not_reduced(ranks, message):
    refused(re.escape(message), simulate, ranks, "msamp", error=DtypeError)


def test_what_is_near_a_refusal_is_taken():
    for mu in (1, 0.5, 1e30, torch.tensor(0.5), torch.tensor([2.0])):
        simulate([ONES], "fp8lm", mu=mu)
    require_row_blocks(fmtsim.get_format("logfmt8"))


@pytest.mark.parametrize(
    ("record", "name", "good", "wrong"),
    [
        (AutoFactor, "threshold", [0, 0.0, 0.999], [-1e-9, 1, 1.5]),
        (AutoFactor, "growth_steps", [1, 7], [0, -1, 1.0, True]),
        (AutoFactor, "growth", [1, 0.5, 1e-30, 1e30], [0, -1.0, math.inf, math.nan, "2"]),
        (AutoFactor, "initial", [2.0**-24, 2.0**24, 3], [2.0**-25, 2.0**25, 0, math.nan]),
        (AutoFactor, "least", [1.0, 1e-9], [1.1, 0, math.inf]),
        (AutoFactor, "largest", [1.0, 1e9], [0.9, 0, math.inf]),
        (get_reduction("msamp"), "seed", [0, (1 << 63) - 1], [-1, 1 << 63, 1.0, True]),
        (get_reduction("msamp"), "overflow", [None, "saturate", "ieee"], ["wrap", 1]),
        (get_reduction("msamp"), "algorithm", ["ring", "tree"], ["star"]),
        (get_reduction("msamp"), "nonfinite", ["propagate", "saturate", "raise"], ["zero"]),
        (get_reduction("msamp"), "rounding", [Rounding(mode="up")], ["up", None]),
        (get_reduction("msamp"), "scaling", [None, Scaling(), Scaling(statistic="one")],
         [Scaling(statistic="std"), Scaling(block=(1, 16)), "amax",
          Scaling(candidates=(1.0, 1.5)), Scaling(input_scale=True), Scaling(scale=fmtsim.get_format("e8m0"))]),
    ],
)  # fmt: skip
def test_fields_end_where_they_should(record, name, good, wrong):
    make = record if record is AutoFactor else functools.partial(dataclasses.replace, record)
    for value in good:
        assert getattr(make(**{name: value}), name) == value
    for value in wrong:
        refused("is not allowed; (choose|pass)|has|needs|with|takes no", make, error=FmtsimError, **{name: value})


@pytest.mark.parametrize("name", ["bf16", "fp32", "e4m3", "e2m1", "int6", "int8"])
def test_codes_travel_without_a_look_at_them(name, monkeypatch):
    """A look would wait for the device."""

    def look(codes):
        raise AssertionError("codes are looked at")

    fmt = fmtsim.get_format(name)
    spec, values = CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow), gradients(1, 37, 1)[0]
    expected = fmtsim.quantize(values, fmt)
    monkeypatch.setattr(torch.Tensor, "aminmax", look)
    wire = to_bytes(values, spec)
    assert wire.dtype == torch.uint8 and wire.shape == (-(-37 * fmt.bits // 8),)
    assert_same_bits(from_bytes(wire, spec, 37), expected)


def test_names_and_text():
    assert fmtsim.distributed.simulate is simulate
    for name, reduction in REDUCTIONS.items():
        assert f"| `{name}` | " in (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
        assert get_reduction(name) is reduction and reduction.source and hash(reduction) is not None
    assert str(get_reduction("msamp")).startswith("ring of e4m3, factor sqrt, scale amax of the tensor")


def test_whole_tensors_are_dealt_out_evenly():
    sizes = [torch.randint(1, 1000, (), generator=torch.Generator().manual_seed(i)).item() for i in range(40)]
    owner = whole_tensors(sizes, 4)
    loads = [sum(size for size, rank in zip(sizes, owner, strict=True) if rank == r) for r in range(4)]
    assert sorted(set(owner)) == [0, 1, 2, 3] and max(loads) - min(loads) < max(sizes)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8])
def test_a_stochastic_tree_rounds_each_sum_as_its_receiver_at_its_step(ranks):
    """An oracle of its own: lists of Python numbers; each sum has the rank, the step and the place it draws by."""
    notes = []

    class Doubling:  # stands for rounding: the result tells how often each cast was rounded
        draws = True

        def round_each(self, y, receivers, step, start):
            notes.extend((rank, step, start, *row) for rank, row in zip(receivers, y.tolist(), strict=True))
            return 2 * y

    q = [[10.0**rank, rank + 1.0] for rank in range(ranks)]
    sums = {rank: list(row) for rank, row in enumerate(q)}
    expected, step = [], 0
    while len(sums) > 1:
        step += 1
        waiting, sums = list(sums.items()), {}
        for place in range(0, len(waiting), 2):
            rank, row = waiting[place]
            if place + 1 < len(waiting):
                row = [a + b for a, b in zip(row, waiting[place + 1][1], strict=True)]
                expected.append((rank, step, 7, *row))
                row = [2 * number for number in row]
            sums[rank] = row
    assert sum_as_tree(torch.tensor(q), Doubling(), 7).tolist() == sums[0] and notes == expected


@pytest.mark.parametrize("mu", [2.0**-149, 0.5, 1, 3.4028234663852886e38])
def test_factors_up_to_float32s_ends_are_taken(mu):
    assert torch.equal(require_mu(get_reduction("fp8lm"), mu, torch.device("cpu")), torch.tensor(float(mu)))
    for other in (2.0**-151, 3.5e38, 0, -1, -0.5, math.inf, math.nan, "1"):
        refused("is not a factor; pass a finite number above 0", require_mu, get_reduction("fp8lm"), other,
                torch.device("cpu"))  # fmt: skip
