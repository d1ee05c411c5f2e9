"""Trials of every unit of the catalogue, and trials on a real device."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fmtsim.cuda
from fmtsim import get_unit, list_units
from fmtsim.cuda.gemm import sample as gemm_sample
from fmtsim.cuda.gemm import trial as gemm_trial
from fmtsim.cuda.runtime import program as runtime
from fmtsim.errors import DeviceError, KernelWarning
from tests.cuda.emulator import COMPILER
from tests.cuda.emulator import emulated as pretend
from tests.cuda.gemms import DOOR
from tests.cuda.trials import COMPARED, HALF, PASSED, Path, flip, job_of, made, product
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import gemm_spec

gpu = pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Remember nothing of what has passed, but machine code."""
    runtime.program_cache()
    monkeypatch.setattr(gemm_trial, "_chosen", {})
    monkeypatch.setattr(gemm_trial, "_verdicts", {})
    monkeypatch.setattr(runtime, "cache_folder", lambda: tmp_path)
    PASSED.cache_clear()
    yield tmp_path / "trials"
    PASSED.cache_clear()


def catalogue(device):
    """Return a product of every mode of every unit that kernels take, with and without an addend."""
    jobs = []
    for unit in list_units():
        for mode in get_unit(unit).modes:
            names = mode.inputs or ("bf16", "fp16")
            for c in (False, True):
                jobs.append(job_of(gemm_spec(mode.datapath, names[0], names[-1]), device=device, c=c))
    return [job for job in jobs if DOOR.supports_gemm(job.spec, job.a, job.b)]


def tried(jobs, monkeypatch) -> list[tuple[str, str, bool, int]]:
    """Return of every trial that products need: path, definition, whether there is an addend, how many results err."""
    found = []

    def compared(path, job, programs):
        wrong, count = COMPARED(path, job, programs)
        found.append((path.__name__, job.spec.to_json(), job.c is not None, wrong))
        assert count > 10000, found[-1]
        return wrong, count

    monkeypatch.setattr(gemm_trial, "_compared", compared)
    for job in jobs:
        DOOR._fast_path(job)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fmtsim.errors.KernelWarning")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_units_of_the_catalogue_pass_on_the_host(capability, monkeypatch):
    monkeypatch.setattr(gemm_sample, "SHAPES", ((130, 140, 96, (2, 12), (1, 30)), (9, 130, 75, (4,), (200, 2))))
    with pretend(capability, trials=True):
        found = tried(catalogue("cpu"), monkeypatch)
    assert len(found) > 20 and not [entry for entry in found if entry[-1]]


@gpu
@pytest.mark.filterwarnings("ignore::fmtsim.errors.KernelWarning")
def test_units_of_the_catalogue_pass(fresh, monkeypatch):
    jobs = catalogue("cuda")
    paths = [(job, path) for job in jobs for path in DOOR._FAST if path.supports(job)]
    programs = {(file, runtime.architecture(0), macros) for job, path in paths for file, macros in path.programs(job)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda program: runtime.compiled(*program), programs))
    found = tried(jobs, monkeypatch)
    assert not [entry for entry in found if entry[-1]]
    assert len(found) > 20
    (file,) = fresh.iterdir()
    assert len(file.read_text().split()) == len(found)


@gpu
def test_wrong_bits_warn_on_a_device(fresh, monkeypatch):
    path = Path(flip)
    monkeypatch.setattr(DOOR, "_FAST", ())
    expected = product(gemm_spec(HALF, "bf16"), device="cuda")
    monkeypatch.setattr(DOOR, "_FAST", (path,))
    with pytest.warns(KernelWarning, match=r"fake.cu -DBLOCK=16 -DKEPT=23; sm_\d+, NVRTC \d+\.\d+, driver \d+\."):
        assert_same_bits(product(gemm_spec(HALF, "bf16"), device="cuda"), expected)
    assert not fresh.exists()


@gpu
def test_graphs_capture_what_has_passed_alone(fresh):
    spec = gemm_spec(get_unit("hopper.wgmma").mode("bf16", "bf16"), "bf16")
    operands, out = made(spec, (200, 130, 160), device="cuda", c=True)
    DOOR.gemm(*operands, spec, None, out)
    expected = out.clone()
    gemm_trial._chosen.clear()  # the file remembers
    gemm_trial._verdicts.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        DOOR.gemm(*operands, spec, None, out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out.cpu(), expected.cpu())
    (file,) = fresh.iterdir()
    file.unlink()
    gemm_trial._chosen.clear()
    gemm_trial._verdicts.clear()
    with pytest.raises(DeviceError, match="has not been tried on cuda:0"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # an empty graph would warn
        DOOR.gemm(*operands, spec, None, out)
