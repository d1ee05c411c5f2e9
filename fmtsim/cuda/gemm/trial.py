"""Fast paths are tried before they are trusted: a compiler's mistake must not become a user's wrong bits.

The first time that a fast path would serve a class of products, it multiplies the operands of gemm_sample.py, and its
bits are compared with those of the general path. A class is what its kernels are specialised by, unit, formats, dtypes,
what lies where in memory, and the features of a plan; not the shape. What has passed is remembered, on disk too, until
a kernel, the engine around it, the compiler, the driver or the device changes. A path that fails warns and is not used.
"""

import hashlib
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fmtsim.cuda.gemm import general as gemm_general
from fmtsim.cuda.gemm import sample as gemm_sample
from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Programs
from fmtsim.errors import DeviceError, KernelWarning
from fmtsim.spec.plan import GemmPlan

_MOST = 4096  # choices that are remembered at once
_UNKNOWN: Any = object()
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.int32: torch.int32}

_chosen: dict[tuple[Any, ...], ModuleType | None] = {}
_verdicts: dict[tuple[int, str], bool] = {}


def chosen(paths: tuple[ModuleType, ...], job: Job) -> ModuleType | None:
    """Return the first path that takes a product and has proven itself, or None.

    A path decides by the definition, the device, and where operands lie modulo 16 bytes, so the choice is remembered.

    Raises:
        DeviceError: A path would have to be tried while a CUDA graph is captured.
    """
    operands = job.a, job.b, job.c, job.scale_a, job.scale_b
    facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in operands]
    key = paths, runtime.device_index(job.a), job.spec, job.random is None, *facts
    path = _chosen.get(key, _UNKNOWN)
    if path is _UNKNOWN:
        path = next((path for path in paths if path.supports(job) and is_proven(path, job)), None)
        if len(_chosen) >= _MOST:
            _chosen.clear()
        _chosen[key] = path
    return path


def is_proven(path: ModuleType, job: Job) -> bool:
    """Say whether a path gives the general path's bits on products like one; try it where that is not known.

    A trial waits for the device. Where bits differ, a KernelWarning says so, once for a class and device; a path that
    leaves every result of a trial to the general one is not used either.
    """
    index, programs = runtime.device_index(job.a), path.programs(job)
    name = _class_of(path, job, programs)
    verdict = _verdicts.get((index, name))
    if verdict is not None:
        return verdict
    passed = _passed(index)
    if passed is None or name not in _lines(passed):
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                f"{programs[0][0]} has not been tried on cuda:{index} for products of this kind yet, and a CUDA graph "
                "that is being captured cannot wait for that; run the product once before the capture (see "
                "fmtsim.cuda.warmup)"
            )
        wrong, compared = _compared(path, job, programs)
        if wrong or not compared:
            _verdicts[index, name] = False
            if wrong:  # a path that left all tiles would leave those of a call too
                warnings.warn(_complaint(index, programs, wrong, compared), KernelWarning, stacklevel=2)
            return False
        _remember(passed, name)
    _verdicts[index, name] = True
    return True


def _class_of(path: ModuleType, job: Job, programs: Programs) -> str:
    """Return a digest of all that may decide how a path's kernels run a product, but shape and data."""
    plan, order = job.spec.plan, job.order
    lies = [(x.dtype, *(stride == 1 for stride in x.stride()), _alignment(x)) for x in (job.a, job.b)]
    given = [x is not None for x in (job.c, job.scale_a, job.scale_b, job.random)]
    features = (
        job.promotes, plan.scaled_promotion, plan.successive_scales, order.contiguous, order.even, len(order.parts) > 1,
    )  # fmt: skip
    text = path.__name__, programs, replace(job.spec, plan=GemmPlan()).to_json(), lies, given, features
    return hashlib.sha256(repr(text).encode()).hexdigest()


def _alignment(x: Tensor) -> bool:
    """Say whether rows, or columns, begin at multiples of 16 bytes."""
    return not (x.data_ptr() | max(x.stride()) * x.element_size()) % 16


def _compared(path: ModuleType, job: Job, programs: Programs) -> tuple[int, int]:
    """Return how many results of a path have wrong bits, and how many were compared."""
    counts = []
    for place in range(len(gemm_sample.SHAPES)):
        trial = _like(path, job, programs, place)
        if trial is None:
            continue
        m, n = trial.out.shape
        parts = 1 if gemm_general.ignores_order(trial.spec) else len(trial.order.parts)
        fast, exact = (torch.full((parts, m, n), 7, dtype=trial.dtype, device=trial.out.device) for _ in range(2))
        marks = torch.zeros(-(-m // TILE), -(-n // TILE), dtype=torch.uint8, device=trial.out.device)
        path.run(trial, fast, marks)
        gemm_general.run(trial, exact, None)
        kept = (marks == 0).repeat_interleave(TILE, 0)[:m].repeat_interleave(TILE, 1)[:, :n]
        wrong = (fast.view(_BITS[trial.dtype]) != exact.view(_BITS[trial.dtype])) & kept
        counts.append(torch.stack([wrong.sum(), kept.sum() * parts]))
    wrong_bits, compared = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    return wrong_bits, compared


def _like(path: ModuleType, job: Job, programs: Programs, place: int) -> Job | None:
    """Return a product that reaches the same kernels as another, with its K where the usual one does not."""
    usual = gemm_sample.SHAPES[place][2]
    for k in (usual, job.shape[2]):
        trial = gemm_sample.sample(job, place, k)
        if path.supports(trial) and path.programs(trial) == programs:
            return trial
    return None


def _complaint(index: int, programs: Programs, wrong: int, compared: int) -> str:
    kernels = ", ".join(" ".join([file, *(f"-D{key}={value}" for key, value in macros)]) for file, macros in programs)
    return (
        f"a fast path does not give the bits of the general path on cuda:{index} ({wrong} of {compared} results "
        f"have other bits), so products of this kind take the general path, which is slower. Kernels: {kernels}; "
        f"{runtime.architecture(index)}, {_versions()}. Another version of nvidia-cuda-nvrtc may compile them rightly; "
        "please report this message."
    )


# What has passed, on disk: a file for each environment, a line for each class.


@cache
def _passed(index: int) -> Path | None:
    """Return the file with the classes that have passed on devices like one, None where none can be written."""
    folder = runtime.cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(_environment(index).encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), *sorted(runtime.KERNELS.rglob("*.cu*"))):
        digest.update(file.read_bytes())
    return folder / "trials" / digest.hexdigest()


def _environment(index: int) -> str:
    return f"{torch.cuda.get_device_name(index)} {runtime.architecture(index)} {_versions()}"


@cache
def _versions() -> str:
    """Return the versions of compiler and driver."""
    from cuda.bindings import driver, nvrtc

    compiler = ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:])
    return f"NVRTC {compiler}, driver {driver.cuDriverGetVersion()[1]}"


def _lines(file: Path) -> set[str]:
    try:
        return set(file.read_text().split())
    except OSError:
        return set()


def _remember(file: Path | None, name: str) -> None:
    """Add a class to those that have passed; a folder that cannot be written costs a trial in every process."""
    if file is None:
        return
    try:
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as lines:
            lines.write(f"{name}\n")
    except OSError:
        pass
