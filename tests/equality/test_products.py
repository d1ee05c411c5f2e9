# SPDX-License-Identifier: Apache-2.0
"""Products of every engine against the oracle: units, plans, formats, layouts, random words."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import fmtsim.torch_engine
from fmtsim import GemmPlan
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import PairwiseDatapath
from tests.support import cuda_gemm, gemm_engine
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import (
    HALF,
    INF,
    NAMES,
    NAN,
    ODD_ACCUMULATORS,
    RANDOM_BITS,
    addend,
    check,
    check_drawn,
    check_mode,
    gemm_spec,
    modes,
    operand,
    other_products,
    paths,
    product,
    products,
    setting,
)

SLOW = pytest.mark.slow


@pytest.fixture
def engine(request, monkeypatch):
    """Put another engine in the place of the CPU's: torch operations, or CUDA kernels, emulated or on a GPU.

    The CUDA engine comes with its general path alone, or with its fast paths before it.
    """
    if request.param == "cpu":
        return
    if request.param == "torch":
        monkeypatch.setattr(gemm_engine, "gemm", fmtsim.torch_engine.gemm)
        monkeypatch.setattr(gemm_engine, "supports_gemm", lambda spec, a, b: True)
        return
    where, path = request.param.split()
    device = request.getfixturevalue("emulated_device" if where == "host" else "gpu_device")
    cuda_gemm.install(monkeypatch, device, fast=path == "fast")


def each(cpu: tuple = (), general: tuple = (), fast: tuple | None = None):
    """Run a test with each engine; the arguments are marks."""
    marks = {"cpu": cpu, "torch": cpu, "host general": general, "gpu general": general}
    marks |= {} if fast is None else {"host fast": fast, "gpu fast": fast}
    return pytest.mark.parametrize("engine", [pytest.param(k, marks=m) for k, m in marks.items()], indirect=True)


def drawn(strategy, count: int) -> None:
    """Check products that hypothesis draws."""
    silent = list(HealthCheck)

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=silent, database=None)
    @given(strategy)
    def run(case):
        check_drawn(case)

    run()


@each(general=SLOW, fast=SLOW)
@pytest.mark.parametrize("mode", modes())
def test_units_of_the_catalogue(mode, engine):
    check_mode(mode)


@each(general=SLOW, fast=SLOW)
def test_any_product(engine):
    drawn(products(), 120)


@each(general=SLOW)
def test_accumulators_that_lack_something(engine):
    drawn(products(ODD_ACCUMULATORS), 40)


@SLOW
@each(fast=())
def test_many_products(request, engine):
    drawn(products(), 3000 if request.node.callspec.params["engine"] == "cpu" else 600)


@each(general=SLOW)
@pytest.mark.parametrize("kind", NAMES)
def test_any_other_product(kind, engine):
    drawn(other_products(kind), 30)


@SLOW
@pytest.mark.parametrize("kind", NAMES)
def test_many_other_products(kind):
    drawn(other_products(kind), 1000)


@each()
@paths
def test_no_products_rows_or_columns(path, engine):
    a, b, spec, scale_a, scale_b = setting(path, 2, 3, 1)
    zeros = product(a[:, :0], b[:, :0], spec)
    assert_same_bits(zeros, torch.zeros(2, 3, dtype=zeros.dtype))
    given = addend(spec, 2, 3, "normal", 3)
    assert_same_bits(product(a[:, :0], b[:, :0], spec, c=given), given)
    assert product(a[:0], b, spec, scale_a=scale_a, scale_b=scale_b).shape == (0, 3)
    assert product(a, b[:0], spec, scale_a=scale_a, scale_b=scale_b).shape == (2, 0)


@each()
@paths
def test_strides(path, engine):
    a, b, spec, scale_a, scale_b = setting(path, 6, 70, 24)
    expected = product(a, b, spec, scale_a=scale_a, scale_b=scale_b)
    padded = torch.stack([a, a]).transpose(0, 1)[:, 1]  # rows far apart
    for x, y in ((a.t().contiguous().t(), b), (a, b.t().contiguous().t()), (padded, b.repeat(1, 2)[:, :24]),
                 (torch.stack([a, a], 2)[..., 0], torch.stack([b, b], 2)[..., 1])):  # fmt: skip
        assert_same_bits(product(x, y, spec, scale_a=scale_a, scale_b=scale_b), expected)


@each()
@pytest.mark.parametrize("drawn_bits", RANDOM_BITS, ids=str)
@pytest.mark.parametrize("fraction_bits", [25, None])
def test_random_words_are_the_oracles(drawn_bits, fraction_bits, engine):
    unit = replace(HALF, fraction_bits=fraction_bits, accumulator="bf16",
                   rounding=Rounding(mode="stochastic", **drawn_bits))  # fmt: skip
    plan = GemmPlan(k_tile=16, split=2, reduce="pairwise")
    spec = gemm_spec(unit, "bf16", plan=plan)
    a, b = operand("bf16", 3, 40, "normal", 1), operand("bf16", 67, 40, "normal", 2)
    if not gemm_engine.supports_gemm(spec, a, b):
        assert "variant" in drawn_bits  # only these are left to torch operations
        return
    check(a, b, spec, random=RandomKey(1 << 40, (1 << 63) + 5))


@each()
def test_pairs_flush_and_round_at_every_step(engine):
    spec = gemm_spec(PairwiseDatapath(block=4), "fp32")
    low, ulp = 2.0**-126, 2.0**-23
    rows = [[low, -low, low, -low], [low / 2] * 4, [-low, low * (1 + ulp), 0, 0], [3 * low, -2 * low, 0, 0]]
    rows += [[1, ulp, -1, ulp / 2], [-0.0] * 4, [INF, -INF, 0, 0], [2.0**127, 2.0**127, -(2.0**127), NAN]]
    a = torch.tensor(rows)
    b = torch.tensor([[1.0] * 4, [0.5] * 4, [-1.0, 1.0, -1.0, 1.0], [1 + ulp] * 4, [2.0] * 4, [0.0] * 4])
    for k in (1, 2, 3, 4):
        check(a[:, :k], b[:, :k], spec)
        for c in (0.0, -0.0, low, -low / 2, 1.0, INF, NAN):
            check(a[:, :k], b[:, :k], spec, c=torch.full((len(a), len(b)), c))
