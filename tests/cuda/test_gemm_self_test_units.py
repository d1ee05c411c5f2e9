# SPDX-License-Identifier: Apache-2.0
"""Self-tests of every unit of the catalogue, on a real device too, and the operands that they multiply."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import fmtsim.cuda
from fmtsim import GemmPlan, get_format, get_unit, list_units, quantize
from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import self_test
from fmtsim.spec.cast import RandomKey
from fmtsim.support.errors import DeviceError, KernelWarning
from tests.cuda.emulator import COMPILER
from tests.cuda.emulator import emulated as pretend
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import COMPARED, DISPATCH, FP8, HALF, PASSED, Path, dispatched, flip, made, made_job
from tests.support.gemm_engine import gemm_spec, operand

gpu = pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Remember nothing of what has passed; machine code stays."""
    monkeypatch.setattr(self_test, "_chosen", {})
    monkeypatch.setattr(self_test, "_verdicts", {})
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    PASSED.cache_clear()
    yield tmp_path / "self_tests"
    PASSED.cache_clear()


def catalogue(device):
    """Return a product of every mode of every unit that kernels take, with and without an addend."""
    jobs = []
    for unit in list_units():
        for mode in get_unit(unit).modes:
            names = mode.inputs or ("bf16", "fp16")
            for c in (False, True):
                jobs.append(made_job(gemm_spec(mode.datapath, names[0], names[-1]), device=device, c=c))
    return [job for job in jobs if DISPATCH.supports_gemm(job.spec, job.a, job.b)]


def results_of(jobs, monkeypatch) -> list[tuple[str, str, bool, int]]:
    """Return of each self-test that products need: path, definition, whether it has an addend, how many results err."""
    found = []

    def compared(path, job, plan):
        wrong, count = COMPARED(path, job, plan)
        found.append((path.name, job.spec.to_json(), job.c is not None, wrong))
        assert count > 10000, found[-1]
        return wrong, count

    monkeypatch.setattr(self_test, "_compared", compared)
    for job in jobs:
        self_test.chosen(DISPATCH.FAST, job)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.KernelWarning")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_units_of_the_catalogue_pass_on_the_host(capability, monkeypatch):
    monkeypatch.setattr(self_test, "SHAPES", ((130, 140, 96, (2, 12), (1, 30)), (9, 130, 75, (4,), (200, 2))))
    with pretend(capability, self_tests=True):
        found = results_of(catalogue("cpu"), monkeypatch)
    assert len(found) > 20 and not [entry for entry in found if entry[-1]]


@gpu
@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.KernelWarning")
def test_units_of_the_catalogue_pass(fresh, monkeypatch):
    jobs = catalogue("cuda")
    plans = [plan for job in jobs for path in DISPATCH.FAST if (plan := path.plan(job)) is not None]
    programs = {(file, runtime.architecture(0), macros) for plan in plans for file, _, macros in plan.programs}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda program: runtime.compiled(*program), programs))
    found = results_of(jobs, monkeypatch)
    assert not [entry for entry in found if entry[-1]]
    assert len(found) > 20
    (file,) = fresh.iterdir()
    assert len(file.read_text().split()) == len(found)


@gpu
def test_wrong_bits_warn_on_a_device(fresh, monkeypatch):
    path = Path(flip)
    monkeypatch.setattr(DISPATCH, "FAST", ())
    expected = dispatched(gemm_spec(HALF, "bf16"), device="cuda")
    monkeypatch.setattr(DISPATCH, "FAST", (path,))
    with pytest.warns(KernelWarning, match=r"fake.cu -DBLOCK=16 -DKEPT=23; sm_\d+, NVRTC \d+\.\d+, driver \d+\."):
        assert_same_bits(dispatched(gemm_spec(HALF, "bf16"), device="cuda"), expected)
    assert not fresh.exists()


@gpu
def test_graphs_capture_what_has_passed_alone(fresh):
    spec = gemm_spec(get_unit("hopper.wgmma").mode("bf16", "bf16"), "bf16")
    operands, out = made(spec, (200, 130, 160), device="cuda", c=True)
    DISPATCH.gemm(*operands, spec, None, out)
    expected = out.clone()
    self_test._chosen.clear()  # the file remembers
    self_test._verdicts.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        DISPATCH.gemm(*operands, spec, None, out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out.cpu(), expected.cpu())
    (file,) = fresh.iterdir()
    file.unlink()
    self_test._chosen.clear()
    self_test._verdicts.clear()
    with pytest.raises(DeviceError, match="has not been tested on cuda:0"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # an empty graph would warn
        DISPATCH.gemm(*operands, spec, None, out)


# Operands: values of their formats, which reach far, and lie as those of the call.


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "bf16", "fp16", "tf32", "e4m3fnuz", "fp32", "int8"])
def test_operands_are_values_of_their_format(name):
    fmt, dtype = get_format(name), operand(name, 1, 1, "normal", 1).dtype
    unit = get_unit("int8").mode("int8", "int8") if name == "int8" else HALF
    job = made_job(gemm_spec(unit, name))
    for place, (m, n, k, *_) in enumerate(self_test.SHAPES):
        like = self_test.sample(job, place, k)
        assert (like.shape, like.a.dtype, like.b.dtype) == ((m, n, k), dtype, dtype)
        for x in (like.a, like.b):
            x = x.float()
            finite = torch.where(x.isfinite(), x, 0.0)
            assert_same_bits(quantize(finite, fmt, overflow="saturate"), finite)
            assert (finite > 0).any() and (finite < 0).any() and (finite == 0).any()
            assert fmt.has_nan or x.isfinite().all()
        if name != "int8":
            assert not like.a.float()[5].any() and like.a.float().isfinite().all()
            pairs = like.a.double()[1::4, :32] * like.b.double()[1, :32]
            sums = pairs.view(-1, 2, 8, 2).sum(-1)
            assert not sums[..., :7].nan_to_num(0.0).any() and sums[..., 7].any()
        if name in ("bf16", "fp16", "e5m2") and place == 1:
            assert like.b.isnan().any() and like.b.isinf().any() and like.b[3:].float().abs().max() > 2.0**15
    again = self_test.sample(job, 0, 64)
    assert_same_bits(again.a.float(), self_test.sample(job, 0, 64).a.float())


def test_operands_reach_all_exponents_of_narrow_formats():
    for name in ("e4m3", "e5m2", "fp16"):
        fmt = get_format(name)
        x = self_test.sample(made_job(gemm_spec(HALF, name)), 1, 597).b.float()
        found = set(torch.frexp(x[x.isfinite() & (x != 0)]).exponent.sub(1).tolist())
        assert found == set(range(fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent + 1))


def test_what_is_not_given_is_not_made():
    plan = GemmPlan(promote_every=16, scaled_promotion=True)
    for spec in (
        gemm_spec(get_unit("blackwell.tcgen05.nvf4").mode("e2m1", "e2m1"), "e2m1"),
        gemm_spec(FP8, "e4m3", plan=plan),
    ):
        job = made_job(spec, c=True)
        like = self_test.sample(replace(job, scale_b=None, random=RandomKey(5, 6)), 0, 64)
        assert like.scale_a.shape == (256, 4) and like.scale_a.isfinite().all() and like.scale_b is None
        assert like.c.shape == like.out.shape == (256, 256) and like.random is not None
        bare = self_test.sample(replace(job, c=None, scale_a=None), 0, 64)
        assert bare.c is None and bare.scale_a is None and bare.random is None and bare.scale_b is not None
