# SPDX-License-Identifier: Apache-2.0
"""Self-tests of fast paths at first use: what is tested, what is remembered, and planted errors that are found."""

import itertools
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fmtsim import Datapath, GemmPlan, get_unit
from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import self_test
from fmtsim.cuda.gemm.engine import FP64_FMA
from fmtsim.cuda.gemm.job import Plan
from fmtsim.support.errors import DeviceError, KernelWarning
from tests.cuda.emulator import COMPILER
from tests.cuda.emulator import emulated as pretend
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import DISPATCH, FP8, HALF, PASSED, Path, dispatched, flip, made_job
from tests.support.gemm_engine import gemm_spec

SMALL = ((20, 24, 48, (2,), (1,)), (7, 5, 40, (9,), (200,)))


def negate_zeros(job, sums, marks):
    sums[:] = torch.where(sums == 0, -sums, sums)


def leave_unwritten(job, sums, marks):
    sums[0, 0, 0] = 7


def forget_specials(job, sums, marks):
    sums[:] = torch.where(sums.isnan(), 0.0, sums)


ERRORS = [flip, negate_zeros, leave_unwritten, forget_specials]


@pytest.fixture
def self_tests(monkeypatch):
    """Test fast paths of a pretended device without fp64 tensor cores, on small operands."""
    if COMPILER is None:
        pytest.skip("kernels run on the host only where there is a C++ compiler (g++)")
    monkeypatch.setattr(self_test, "SHAPES", SMALL)
    with pretend((12, 0), self_tests=True):
        yield
        monkeypatch.undo()  # or what a test replaced in here would outlive it


@pytest.fixture
def path(self_tests, monkeypatch):
    fake = Path()
    monkeypatch.setattr(DISPATCH, "FAST", (fake,))
    return fake


# What decides a class.


@pytest.mark.parametrize("path", DISPATCH.FAST, ids=lambda path: path.name)
def test_programs_are_what_a_path_launches(path):
    found = 0
    for capability in ((8, 0), (9, 0), (12, 0)):
        with pretend(capability):
            for spec, c in itertools.product(specs(), (False, True)):
                job = made_job(spec, c=c)
                if (plan := path.plan(job)) is not None:
                    found += 1
                    assert set(plan.programs) == launched(path, job, plan)
                    assert set(plan.programs) == launched(path, job, plan)  # no module keeps a kernel that it launches
    assert found


def specs():
    plans = GemmPlan(), GemmPlan(promote_every=32), GemmPlan(promote_every=16, scaled_promotion=True)
    for unit, names in (
        ("hopper.wgmma", ("e4m3", "bf16", "tf32")), ("blackwell.tcgen05", ("e5m2", "fp16")), ("exact", ("bf16",)),
        ("blackwell.tcgen05.nvf4", ("e2m1",)), ("blackwell.tcgen05.mxf8f6f4", ("e4m3",)), ("fp32_fma", ("bf16",)),
    ):  # fmt: skip
        for name, plan in itertools.product(names, plans):
            yield gemm_spec(get_unit(unit).mode(name, name, "fp32"), name, plan=plan)
    for block in (1, 8):
        path = Datapath(block=block, fraction_bits=None, rounding="nearest_even", accumulator="bf16")
        yield gemm_spec(path, "e4m3")
        if block > 1:
            yield gemm_spec(replace(path, fraction_bits=20), "e4m3")


def launched(path, job, plan) -> set:
    """Return the files and macros of the kernels that a path asks for, without running them."""
    asked = set()

    def kernel(file, name, index, defines=()):
        asked.add((file, name, defines))
        return lambda *arguments, **options: None

    marks = torch.zeros(1, 1, dtype=torch.uint8)
    with mock.patch.object(runtime, "kernel", kernel):
        path.run(job, plan, torch.zeros(len(job.order.parts), *job.out.shape), marks)
    return asked


# Self-tests.


def test_a_path_is_tested_once(path, monkeypatch):
    spec = gemm_spec(HALF, "bf16")
    expected = dispatched(spec)
    assert path.ran == 1 + len(SMALL)
    assert_same_bits(dispatched(spec), expected)
    assert (path.ran, path.asked) == (2 + len(SMALL), 1 + len(SMALL))  # nothing is asked again
    dispatched(spec, (9, 3, 96))
    assert path.ran == 3 + len(SMALL) and path.asked > 1 + len(SMALL)
    dispatched(spec, c=True)
    assert path.ran == 4 + 2 * len(SMALL)


@pytest.mark.parametrize("error", ERRORS)
def test_wrong_bits_warn_and_are_not_used(path, monkeypatch, error):
    spec = gemm_spec(HALF, "bf16")
    monkeypatch.setattr(DISPATCH, "FAST", ())
    expected = dispatched(spec)
    monkeypatch.setattr(DISPATCH, "FAST", (path,))
    path.spoil = error
    with pytest.warns(KernelWarning, match="take the general path, which is slower") as caught:
        assert_same_bits(dispatched(spec), expected)
    message = str(caught[0].message)
    assert "fake.cu -DBLOCK=16 -DKEPT=23; sm_120, NVRTC" in message and " of 515 results have other bits" in message
    ran = path.ran
    assert_same_bits(dispatched(spec), expected)  # no second warning: warnings are errors
    dispatched(spec, (9, 3, 96))
    assert path.ran == ran
    path.spoil = None
    dispatched(spec, c=True)  # another class, which passes
    assert path.ran == ran + len(SMALL) + 1


def test_a_warning_that_is_an_error_leaves_the_path_unused(path):
    path.spoil = flip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KernelWarning, match="does not give the bits"):
            dispatched(gemm_spec(HALF, "bf16"))
    ran = path.ran
    dispatched(gemm_spec(HALF, "bf16"))
    assert path.ran == ran


def test_the_next_path_is_taken(path, monkeypatch):
    wrong, right = Path(flip), Path(name="right")
    monkeypatch.setattr(DISPATCH, "FAST", (wrong, right))
    with pytest.warns(KernelWarning):
        dispatched(gemm_spec(HALF, "bf16"))
    assert wrong.ran == len(SMALL) and right.ran == len(SMALL) + 1


def test_a_path_that_leaves_everything_is_not_used(path):
    path.spoil = lambda job, sums, marks: marks.fill_(1)
    for _ in range(2):  # no warning: nothing is wrong
        dispatched(gemm_spec(HALF, "bf16"))
    assert path.ran == len(SMALL)


def test_marked_tiles_are_not_compared(path):
    def spoil(job, sums, marks):
        if sums.isnan().any():
            marks.fill_(1)
            sums.fill_(3.0)

    path.spoil = spoil
    dispatched(gemm_spec(HALF, "bf16"))
    assert path.ran == len(SMALL) + 1


def test_wrong_macros_are_found(self_tests, monkeypatch):
    """A real kernel, compiled for a unit that keeps a bit less."""
    spec = gemm_spec(FP8, "e4m3")
    expected = dispatched(spec)
    defines = FP64_FMA._product_macros

    def wrong(*arguments):
        return tuple((key, "12" if key == "ACC_MANTISSA" else value) for key, value in defines(*arguments))

    monkeypatch.setattr(FP64_FMA, "_product_macros", wrong)
    self_test._chosen.clear()
    with pytest.warns(KernelWarning, match=r"aligned_fp64_fma.cu .*-DACC_MANTISSA=12"):
        assert_same_bits(dispatched(spec), expected)


def test_kernels_that_only_short_or_long_products_reach_are_tested(path, monkeypatch):
    job = made_job(gemm_spec(HALF, "bf16"), (3, 4, 8))
    assert self_test._like(path, job, path.plan(job), 0)[0].shape == (*SMALL[0][:2], 8)
    assert dispatched(gemm_spec(HALF, "bf16"), (3, 4, 8)).shape == (3, 4) and path.ran == len(SMALL) + 1
    monkeypatch.setattr(
        path, "plan", lambda job: Plan(None, (("fake.cu", "fake", (("LONG", str(job.shape[2] > 1 << 18)),)),))
    )
    job = made_job(gemm_spec(HALF, "bf16"), (3, 4, 1 << 19))
    assert self_test._like(path, job, path.plan(job), 0)[0].shape == (2, 2, 1 << 19)


def test_a_graph_cannot_wait_for_a_self_test(path, monkeypatch):
    spec = gemm_spec(HALF, "bf16")
    dispatched(spec)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatched(spec)
    dispatched(spec, (3, 3, 40))
    with pytest.raises(DeviceError, match=r"fake.cu has not been tested .* run the product once before the capture"):
        dispatched(spec, c=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dispatched(spec, c=True)


# What is remembered on disk.


@pytest.fixture
def disk(path, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    environment = ["a device"]
    monkeypatch.setattr(self_test, "_environment", lambda index: environment[0])
    monkeypatch.setattr(self_test, "_passed", PASSED)

    def anew():
        """Forget everything, as a new process has."""
        self_test._chosen.clear(), self_test._verdicts.clear(), PASSED.cache_clear()
        path.ran = 0

    anew()
    yield anew, environment, tmp_path / "self_tests"
    PASSED.cache_clear()


def test_what_has_passed_is_remembered(disk, path, monkeypatch):
    anew, environment, folder = disk
    spec = gemm_spec(HALF, "bf16")
    dispatched(spec)
    (file,) = folder.iterdir()
    assert len(file.read_text().split()) == 1
    anew()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # what is remembered serves graphs
    dispatched(spec)
    assert path.ran == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dispatched(spec, c=True)
    assert path.ran == 2 + len(SMALL) and len(file.read_text().split()) == 2
    environment[0] = "another"
    anew()
    dispatched(spec)
    assert path.ran == 1 + len(SMALL) and len(list(folder.iterdir())) == 2
    (other,) = set(folder.iterdir()) - {file}
    file.replace(other)  # as if it were of this environment
    anew()
    dispatched(spec)
    assert path.ran == 1 + len(SMALL)


def test_another_kernel_is_tested_again(disk, path, tmp_path, monkeypatch):
    anew, _, folder = disk
    spec, kernels = gemm_spec(HALF, "bf16"), tmp_path / "kernels"
    kernels.mkdir()
    for file in runtime.KERNELS.rglob("*.cu*"):
        (kernels / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(runtime, "KERNELS", kernels)
    dispatched(spec)
    (kernels / "aligned_fp64_mma.cu").write_text("// other\n" + (kernels / "aligned_fp64_mma.cu").read_text())
    anew()
    dispatched(spec)
    assert path.ran == 1 + len(SMALL) and len(list(folder.iterdir())) == 2


def test_what_has_failed_is_tested_and_told_again(disk, path):
    anew, _, folder = disk
    path.spoil = flip
    for _ in range(2):
        with pytest.warns(KernelWarning):
            dispatched(gemm_spec(HALF, "bf16"))
        assert not folder.exists()
        anew()


def test_a_memory_that_cannot_be_trusted_costs_a_self_test(disk, path, tmp_path, monkeypatch):
    anew, _, folder = disk

    def runs_of_a_new_process():
        anew()
        dispatched(gemm_spec(HALF, "bf16"))
        return path.ran

    folder.write_text("in the way")
    assert runs_of_a_new_process() == runs_of_a_new_process() == 1 + len(SMALL)
    folder.unlink()
    assert (runs_of_a_new_process(), runs_of_a_new_process()) == (1 + len(SMALL), 1)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:40] + b"\xff")  # a line that was not written to its end
    assert runs_of_a_new_process() == 1 + len(SMALL)
    monkeypatch.setattr(runtime, "cache_folder", lambda: None)
    assert runs_of_a_new_process() == 1 + len(SMALL)
