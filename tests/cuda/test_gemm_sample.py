"""Operands on which kernels are tried: they are values of their formats, reach far, and lie as those of the call."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan, get_format, get_unit, quantize
from fmtsim.cuda.gemm import sample as gemm_sample
from fmtsim.spec.cast import RandomKey
from tests.cuda.trials import FP8, HALF, job_of
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import gemm_spec, operand


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "bf16", "fp16", "tf32", "e4m3fnuz", "fp32", "int8"])
def test_operands_are_values_of_their_format(name):
    fmt, dtype = get_format(name), operand(name, 1, 1, "normal", 1).dtype
    unit = get_unit("int8").mode("int8", "int8") if name == "int8" else HALF
    job = job_of(gemm_spec(unit, name))
    for place, (m, n, k, *_) in enumerate(gemm_sample.SHAPES):
        trial = gemm_sample.sample(job, place, k)
        assert (trial.shape, trial.a.dtype, trial.b.dtype) == ((m, n, k), dtype, dtype)
        for x in (trial.a, trial.b):
            x = x.float()
            finite = torch.where(x.isfinite(), x, 0.0)
            assert_same_bits(quantize(finite, fmt, overflow="saturate"), finite)
            assert (finite > 0).any() and (finite < 0).any() and (finite == 0).any()
            assert fmt.has_nan or x.isfinite().all()
        if name != "int8":
            assert not trial.a.float()[5].any() and trial.a.float().isfinite().all()
            pairs = trial.a.double()[1::4, :32] * trial.b.double()[1, :32]
            sums = pairs.view(-1, 2, 8, 2).sum(-1)
            assert not sums[..., :7].nan_to_num(0.0).any() and sums[..., 7].any()
        if name in ("bf16", "fp16", "e5m2") and place == 1:
            assert trial.b.isnan().any() and trial.b.isinf().any() and trial.b[3:].float().abs().max() > 2.0**15
    again = gemm_sample.sample(job, 0, 64)
    assert_same_bits(again.a.float(), gemm_sample.sample(job, 0, 64).a.float())


def test_operands_reach_all_exponents_of_narrow_formats():
    for name in ("e4m3", "e5m2", "fp16"):
        fmt = get_format(name)
        x = gemm_sample.sample(job_of(gemm_spec(HALF, name)), 1, 597).b.float()
        found = set(torch.frexp(x[x.isfinite() & (x != 0)]).exponent.sub(1).tolist())
        assert found == set(range(fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent + 1))


def test_operands_lie_as_those_of_the_call():
    x = torch.zeros(64, 80, dtype=torch.bfloat16)
    for like in (x, x[:, 1:], x[1:, :78], x.t(), x[:, ::2], x[:1].expand(9, 80), x.t()[3:, 5:], x[:, :1]):
        value = torch.arange(6.0).view(2, 3)
        found = gemm_sample._laid_out(value, like)
        assert_same_bits(found.float(), value)
        assert found.dtype == like.dtype and (found.data_ptr() - like.data_ptr()) % 16 == 0
        inner = like.stride().index(min(like.stride()))
        assert like.stride(inner) == 0 or found.stride(inner) == like.stride(inner)
        assert (found.stride(1 - inner) - like.stride(1 - inner)) % 8 == 0


def test_what_is_not_given_is_not_made():
    plan = GemmPlan(promote_every=16, scaled_promotion=True)
    for spec in (
        gemm_spec(get_unit("blackwell.tcgen05.nvf4").mode("e2m1", "e2m1"), "e2m1"),
        gemm_spec(FP8, "e4m3", plan=plan),
    ):
        job = job_of(spec, c=True)
        trial = gemm_sample.sample(replace(job, scale_b=None, random=RandomKey(5, 6)), 0, 64)
        assert trial.scale_a.shape == (256, 4) and trial.scale_a.isfinite().all() and trial.scale_b is None
        assert trial.c.shape == trial.out.shape == (256, 256) and trial.random is not None
        bare = gemm_sample.sample(replace(job, c=None, scale_a=None), 0, 64)
        assert bare.c is None and bare.scale_a is None and bare.random is None and bare.scale_b is not None
