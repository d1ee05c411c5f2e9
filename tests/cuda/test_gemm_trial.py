"""Fast paths are tried before they serve: what is tried, what is remembered, and planted errors that are found."""

import itertools
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fmtsim import Datapath, GemmPlan, get_unit
from fmtsim.cuda.gemm import sample as gemm_sample
from fmtsim.cuda.gemm import single as gemm_single
from fmtsim.cuda.gemm import trial as gemm_trial
from fmtsim.cuda.runtime import program as runtime
from fmtsim.errors import DeviceError, KernelWarning
from tests.cuda.emulator import COMPILER
from tests.cuda.emulator import emulated as pretend
from tests.cuda.gemms import DOOR
from tests.cuda.trials import FP8, HALF, PASSED, Path, flip, job_of, product
from tests.support.bits import assert_same_bits
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
def trials(monkeypatch):
    """Try fast paths of a pretended device without fp64 tensor cores, on small operands."""
    if COMPILER is None:
        pytest.skip("kernels run on the host only where there is a C++ compiler (g++)")
    monkeypatch.setattr(gemm_sample, "SHAPES", SMALL)
    with pretend((12, 0), trials=True):
        yield
        monkeypatch.undo()  # or what a test replaced in here would outlive it


@pytest.fixture
def path(trials, monkeypatch):
    fake = Path()
    monkeypatch.setattr(DOOR, "_FAST", (fake,))
    return fake


# What decides a class.


@pytest.mark.parametrize("path", DOOR._FAST, ids=lambda path: path.__name__[11:])
def test_programs_are_what_a_path_launches(path):
    found = 0
    for capability in ((8, 0), (9, 0), (12, 0)):
        with pretend(capability):
            for spec, c in itertools.product(specs(), (False, True)):
                job = job_of(spec, c=c)
                if path.supports(job):
                    found += 1
                    assert set(path.programs(job)) == launched(path, job)
                    assert set(path.programs(job)) == launched(path, job)  # no module keeps a kernel that it launches
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


def launched(path, job) -> set:
    """Return the files and macros of the kernels that a path asks for, without running them."""
    asked = set()

    def kernel(file, name, index, defines=()):
        asked.add((file, defines))
        return lambda *arguments, **options: None

    marks = torch.zeros(1, 1, dtype=torch.uint8)
    with mock.patch.object(runtime, "kernel", kernel):
        path.run(job, torch.zeros(len(job.order.parts), *job.out.shape), marks)
    return asked


def test_classes(path):
    spec, other = gemm_spec(HALF, "bf16"), gemm_spec(replace(HALF, fraction_bits=24), "bf16")

    def name(job):
        return gemm_trial._class_of(path, job, path.programs(job))

    one = name(job_of(spec))
    assert one == name(job_of(spec, (80, 9, 400))) == name(job_of(gemm_spec(HALF, "bf16", plan=GemmPlan(k_tile=32))))
    job = job_of(spec)
    wide = job_of(gemm_spec(HALF, "bf16", plan=GemmPlan(promote_every=32)))
    different = [
        replace(job, a=job.a.float()), replace(job, b=job.b.t().contiguous().t()), job_of(spec, c=True), wide,
        replace(job, a=torch.zeros(5, 41, dtype=torch.bfloat16)[:, 1:]), job_of(other), job_of(gemm_spec(HALF, "fp16")),
        job_of(gemm_spec(HALF, "bf16", plan=GemmPlan(k_tile=16, split=2))), job_of(spec, (5, 6, 8)),
    ]  # fmt: skip
    assert len({one, *map(name, different)}) == 1 + len(different)


# Trials.


def test_a_path_is_tried_once(path, monkeypatch):
    spec = gemm_spec(HALF, "bf16")
    expected = product(spec)
    assert path.ran == 1 + len(SMALL)
    assert_same_bits(product(spec), expected)
    assert (path.ran, path.asked) == (2 + len(SMALL), 1 + len(SMALL))  # nothing is asked again
    product(spec, (9, 3, 96))
    assert path.ran == 3 + len(SMALL) and path.asked > 1 + len(SMALL)
    product(spec, c=True)
    assert path.ran == 4 + 2 * len(SMALL)


@pytest.mark.parametrize("error", ERRORS)
def test_wrong_bits_warn_and_are_not_used(path, monkeypatch, error):
    spec = gemm_spec(HALF, "bf16")
    monkeypatch.setattr(DOOR, "_FAST", ())
    expected = product(spec)
    monkeypatch.setattr(DOOR, "_FAST", (path,))
    path.spoil = error
    with pytest.warns(KernelWarning, match="take the general path, which is slower") as caught:
        assert_same_bits(product(spec), expected)
    message = str(caught[0].message)
    assert "fake.cu -DBLOCK=16 -DKEPT=23; sm_120, NVRTC" in message and " of 515 results have other bits" in message
    ran = path.ran
    assert_same_bits(product(spec), expected)  # no second warning: warnings are errors
    product(spec, (9, 3, 96))
    assert path.ran == ran
    path.spoil = None
    product(spec, c=True)  # another class, which passes
    assert path.ran == ran + len(SMALL) + 1


def test_a_warning_that_is_an_error_leaves_the_path_unused(path):
    path.spoil = flip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KernelWarning, match="does not give the bits"):
            product(gemm_spec(HALF, "bf16"))
    ran = path.ran
    product(gemm_spec(HALF, "bf16"))
    assert path.ran == ran


def test_the_next_path_is_taken(path, monkeypatch):
    wrong, right = Path(flip), Path(name="right")
    monkeypatch.setattr(DOOR, "_FAST", (wrong, right))
    with pytest.warns(KernelWarning):
        product(gemm_spec(HALF, "bf16"))
    assert wrong.ran == len(SMALL) and right.ran == len(SMALL) + 1


def test_a_path_that_leaves_everything_is_not_used(path):
    path.spoil = lambda job, sums, marks: marks.fill_(1)
    for _ in range(2):  # no warning: nothing is wrong
        product(gemm_spec(HALF, "bf16"))
    assert path.ran == len(SMALL)


def test_marked_tiles_are_not_compared(path):
    def spoil(job, sums, marks):
        if sums.isnan().any():
            marks.fill_(1)
            sums.fill_(3.0)

    path.spoil = spoil
    product(gemm_spec(HALF, "bf16"))
    assert path.ran == len(SMALL) + 1


def test_wrong_macros_are_found(trials, monkeypatch):
    """A real kernel, compiled for a unit that keeps a bit less."""
    spec = gemm_spec(FP8, "e4m3")
    expected = product(spec)
    defines = gemm_single._product_defines

    def wrong(*arguments):
        return tuple((key, "(12)" if key == "KEPT" else value) for key, value in defines(*arguments))

    monkeypatch.setattr(gemm_single, "_product_defines", wrong)
    gemm_trial._chosen.clear()
    with pytest.warns(KernelWarning, match=r"single.cu .*-DKEPT=\(12\)"):
        assert_same_bits(product(spec), expected)


def test_kernels_that_only_short_or_long_products_reach_are_tried(path, monkeypatch):
    job = job_of(gemm_spec(HALF, "bf16"), (3, 4, 8))
    assert gemm_trial._like(path, job, path.programs(job), 0).shape == (*SMALL[0][:2], 8)
    assert product(gemm_spec(HALF, "bf16"), (3, 4, 8)).shape == (3, 4) and path.ran == len(SMALL) + 1
    monkeypatch.setattr(path, "programs", lambda job: (("fake.cu", (("LONG", str(job.shape[2] > 1 << 18)),)),))
    job = job_of(gemm_spec(HALF, "bf16"), (3, 4, 1 << 19))
    assert gemm_trial._like(path, job, path.programs(job), 0).shape == (2, 2, 1 << 19)


def test_choices_are_forgotten_in_time(path, monkeypatch):
    monkeypatch.setattr(gemm_trial, "_MOST", 3)
    for m in range(1, 9):
        product(gemm_spec(HALF, "bf16"), (m, 2, 16))
    assert len(gemm_trial._chosen) <= 3 and path.ran == len(SMALL) + 8


def test_a_graph_cannot_wait_for_a_trial(path, monkeypatch):
    spec = gemm_spec(HALF, "bf16")
    product(spec)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    product(spec)
    product(spec, (3, 3, 40))
    with pytest.raises(DeviceError, match=r"fake.cu has not been tried .* run the product once before the capture"):
        product(spec, c=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    product(spec, c=True)


# What is remembered on disk.


@pytest.fixture
def disk(path, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    environment = ["a device"]
    monkeypatch.setattr(gemm_trial, "_environment", lambda index: environment[0])
    monkeypatch.setattr(gemm_trial, "_passed", PASSED)

    def anew():
        """Forget everything, as a new process has."""
        gemm_trial._chosen.clear(), gemm_trial._verdicts.clear(), PASSED.cache_clear()
        path.ran = 0

    anew()
    yield anew, environment, tmp_path / "trials"
    PASSED.cache_clear()


def test_what_has_passed_is_remembered(disk, path, monkeypatch):
    anew, environment, folder = disk
    spec = gemm_spec(HALF, "bf16")
    product(spec)
    (file,) = folder.iterdir()
    assert len(file.read_text().split()) == 1
    anew()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # what is remembered serves graphs
    product(spec)
    assert path.ran == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    product(spec, c=True)
    assert path.ran == 2 + len(SMALL) and len(file.read_text().split()) == 2
    environment[0] = "another"
    anew()
    product(spec)
    assert path.ran == 1 + len(SMALL) and len(list(folder.iterdir())) == 2


def test_another_kernel_is_tried_again(disk, path, tmp_path, monkeypatch):
    anew, _, folder = disk
    spec, kernels = gemm_spec(HALF, "bf16"), tmp_path / "kernels"
    kernels.mkdir()
    for file in runtime.KERNELS.rglob("*.cu*"):
        (kernels / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(runtime, "KERNELS", kernels)
    product(spec)
    (kernels / "floor.cu").write_text("// other\n" + (kernels / "floor.cu").read_text())
    anew()
    product(spec)
    assert path.ran == 1 + len(SMALL) and len(list(folder.iterdir())) == 2


def test_what_has_failed_is_tried_and_told_again(disk, path):
    anew, _, folder = disk
    path.spoil = flip
    for _ in range(2):
        with pytest.warns(KernelWarning):
            product(gemm_spec(HALF, "bf16"))
        assert not folder.exists()
        anew()


def test_a_memory_that_cannot_be_trusted_costs_a_trial(disk, path, tmp_path, monkeypatch):
    anew, _, folder = disk

    def runs_of_a_new_process():
        anew()
        product(gemm_spec(HALF, "bf16"))
        return path.ran

    folder.write_text("in the way")
    assert runs_of_a_new_process() == runs_of_a_new_process() == 1 + len(SMALL)
    folder.unlink()
    assert (runs_of_a_new_process(), runs_of_a_new_process()) == (1 + len(SMALL), 1)
    (file,) = folder.iterdir()
    file.write_text(file.read_text()[:40])  # a line that was not written to its end
    assert runs_of_a_new_process() == 1 + len(SMALL)
    monkeypatch.setattr(runtime, "cache_folder", lambda: None)
    assert runs_of_a_new_process() == 1 + len(SMALL)
