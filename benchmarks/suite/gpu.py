# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine, and other software where it is installed, against copies and native products of the same run."""

import contextlib
import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import gemm
from benchmarks.suite.gpu_cases import CASES, FP8_FAST, FP8_SLOW, NEAREST, Case, Row
from benchmarks.suite.timing import in_turns_on_device
from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.gemm.layers.config import linear_config
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.gemm.products.matmul import mm
from fmtsim.lab.verify.workers import default_workers
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DeviceError
from fmtsim.support.executors import open_tasks

__all__ = ["CASES", "Case", "Result", "compile_ahead", "measure", "worst"]

DEVICE = "cuda"
ELEMENTS = 1 << 28  # 1 GiB of float32: far beyond the second-level cache
FEW = 1 << 20  # as many reach the same kernels
SIDE = 4096  # of exact products
TOKENS, WIDTH = 8192, 4096  # of the linear layer
_SMALL, _CALLS = 256, 2000
_AHEAD = 10_000_000  # cycles in which the host queues a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold what was measured: the value that the goal speaks of, and the median seconds behind it."""

    case: Case
    value: float
    seconds: float
    details: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        row = self.case.row
        return {
            "row": row.name, "case": self.case.name, "kind": row.kind, "value": self.value, "target": row.least,
            "stretch": row.stretch, "met": row.reaches(self.value, row.least),
            "stretch_met": row.reaches(self.value, row.stretch), "seconds": self.seconds, **self.details,
        }  # fmt: skip


def worst(results: Sequence[Result]) -> dict[Row, Result]:
    """Return the result of each row that is farthest from its goal, which is what the row has reached."""
    farthest_of: dict[Row, Result] = {}
    for result in results:
        row = result.case.row
        farthest = max if row.falls else min
        farthest_of[row] = farthest(farthest_of.get(row, result), result, key=lambda each: each.value)
    return farthest_of


def compile_ahead(cases: Sequence[Case]) -> None:
    """Let processes run every case once on few elements, so that its kernels lie on disk when it is measured."""
    workers = min(default_workers(torch.device(DEVICE, torch.cuda.current_device())), len(cases))
    if workers < 2:
        return
    with (
        contextlib.suppress(DeviceError),  # what is not compiled here, the measurement compiles
        open_tasks(None, workers=workers) as tasks,
    ):
        list(tasks.each_done(_compile, sorted(map(CASES.index, cases), reverse=True)))  # products take longest


def _compile(state: None, index: int) -> None:
    with contextlib.suppress(Exception):  # the measurement will say what is wrong
        action_of(CASES[index], FEW, SIDE)()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure(case: Case, *, repeats: int = 21, elements: int = ELEMENTS, side: int = SIDE) -> Result:
    """Measure one case on the current CUDA device.

    Args:
        repeats: Timed runs, after one that compiles; medians are taken.
        elements: Elements of a cast's input, a multiple of 4096.
        side: M, N and K of a product.
    """
    match case.row.kind:
        case "product":
            return _measure_product(case, repeats, side)
        case "layer":
            return _measure_layer(case, repeats)
        case "call":
            return _measure_call(case)
    return _measure_cast(case, repeats, elements)


def action_of(case: Case, elements: int, side: int) -> Callable[[], Any]:
    """Return what a case runs; the layer's own shape is the only one it has."""
    if case.product is not None:
        return gemm.product_of(case.product, (side, side, side), device=DEVICE)
    if case.row.kind == "call":
        return _call_of(case)
    return _layer_of(case)[1] if case.row.kind == "layer" else _cast_of(case, _numbers(case.dtype, elements))


def _numbers(dtype: torch.dtype, elements: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(elements // 4096, 4096, device=DEVICE, generator=generator).to(dtype)


def _cast_of(case: Case, x: Tensor) -> Callable[[], Any]:
    options: dict[str, Any] = {"rounding": case.rounding, "generator": 0 if case.rounding == "stochastic" else None}
    if case.row.kind == "encode":
        return lambda: encode(x, case.format, **options)
    out = torch.empty_like(x, dtype=result_dtype(get_format(case.format), x.dtype))
    return lambda: quantize(x, case.format, out=out, **options)


def _measure_cast(case: Case, repeats: int, elements: int) -> Result:
    """Take turns with a copy of the input, whose time is counted for the bytes that the cast reads and writes."""
    x = _numbers(case.dtype, elements)
    run, copied = _cast_of(case, x), torch.empty_like(x)
    written = run().nbytes
    moved = (x.nbytes + written) / (2 * x.nbytes)
    copy, seconds = in_turns_on_device((lambda: copied.copy_(x), run), repeats)
    details = {"copy_seconds": copy, "copy_bytes_per_second": 2 * x.nbytes / copy, "bytes": x.nbytes + written}
    return Result(case=case, value=copy * moved / seconds, seconds=seconds, details=details)


def _measure_product(case: Case, repeats: int, side: int) -> Result:
    product = action_of(case, 0, side)
    x = torch.randn(side, side, device=DEVICE).bfloat16()
    native, seconds = in_turns_on_device((lambda: x @ x, product), min(repeats, 7))
    products = float(side) ** 3
    details = {"native_bf16": products / native / 1e12}
    return Result(case=case, value=products / seconds / 1e12, seconds=seconds, details=details)


def _layer_of(case: Case) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return forward and backward of a linear layer, [8192, 4096] by [4096, 4096], without quantisers and with them."""
    x = torch.randn(TOKENS, WIDTH, device=DEVICE).bfloat16().requires_grad_()
    w = torch.randn(WIDTH, WIDTH, device=DEVICE).bfloat16().requires_grad_()
    grad = torch.randn(TOKENS, WIDTH, device=DEVICE).bfloat16()
    config = linear_config(x=case.format, w=case.format, g=case.format)

    def run(layer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(layer(x, w), (x, w), grad)

    return run(torch.nn.functional.linear), run(lambda x, w: EmulatedGEMM.apply(x, w, None, config))


def _measure_layer(case: Case, repeats: int) -> Result:
    """Time the device; how long the host takes to queue both is in the details."""
    plain, layer = _layer_of(case)
    base, seconds = in_turns_on_device((plain, layer), repeats, ahead=_AHEAD)
    host = [statistics.median(_host_times(action, 20)) for action in (plain, layer)]
    details = {"plain_seconds": base, "plain_host_seconds": host[0], "host_seconds": host[1]}
    return Result(case=case, value=seconds / base, seconds=seconds, details=details)


def _call_of(case: Case) -> Callable[[], Tensor]:
    x = torch.randn(_SMALL, device=DEVICE).to(case.dtype).requires_grad_(case.call == "grad")
    options: dict[str, Any] = {"out": torch.empty_like(x)} if case.call == "out" else {}
    if case.rounding == "stochastic":
        options |= {"rounding": case.rounding, "generator": 0}
    return partial(quantize, x, case.format, **options)


def _measure_call(case: Case) -> Result:
    """Time calls by the host's clock while the device keeps up: the kernel is shorter than the call."""
    x = torch.randn(_SMALL, device=DEVICE)
    seconds = statistics.median(_host_times(_call_of(case)))
    details = {"torch_add_seconds": statistics.median(_host_times(lambda: x + 1))}
    return Result(case=case, value=1e6 * seconds, seconds=seconds, details=details)


def _host_times(action: Callable[[], Any], calls: int = _CALLS) -> Iterator[float]:
    for round_ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        if round_:
            yield (time.perf_counter() - start) / calls


_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Hold what other software reached at the work of a row."""

    row: Row  # the work
    software: str  # what ran, with its version
    value: float  # as the row counts
    ours: float  # what fmtsim reached in turns with it
    differing: int  # results that differ from fmtsim's in a bit

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self) | {"row": self.row.name}


def measure_others(repeats: int, elements: int, side: int) -> Iterator[Other | str]:
    """Yield what is installed here at work, or one line that says why it did not run."""
    for name, measure in (("mmaemu", _mmaemu), ("triton", _compiled)):
        if importlib.util.find_spec(name) is None:
            yield f"{name} is not installed"
            continue
        try:
            yield from measure(repeats, elements if name == "triton" else side)
        except Exception as error:  # software of others fails in ways of its own, and is not what is measured
            yield f"{name} did not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _mmaemu(repeats: int, side: int) -> Iterator[Other]:
    """Run mmaemu's exact product of a Hopper tensor core, which needs no tensor core, on codes of E4M3."""
    mmaemu = importlib.import_module("mmaemu")
    generator = torch.Generator("cuda").manual_seed(0)
    a, w = (torch.randn(side, side, device="cuda", generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    for row, fast in ((FP8_FAST, True), (FP8_SLOW, False)):
        plan = None if fast else GemmPlan(promote_every=128)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its numbers for Hopper are experimental
            theirs, ours = _in_turns(
                lambda: mmaemu.accumulate(a, w, use_fast_accum=fast, splitk=1),  # noqa: B023
                lambda: mm(a, w.t(), target="hopper.wgmma", plan=plan, out_dtype=torch.float32),  # noqa: B023
                min(repeats, 5),
            )
        products = float(side) ** 3 / 1e12
        yield Other(row=row, software=f"mmaemu {mmaemu.__version__}", value=products / theirs[0],
                    ours=products / ours[0], differing=_differing(theirs[1], ours[1]))  # fmt: skip


def _compiled(repeats: int, elements: int) -> Iterator[Other]:
    """Run torch's own conversions to float8 and back, compiled into one kernel."""
    x = torch.randn(elements // 4096, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def convert(x: Tensor) -> Tensor:
        return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)

    compiled = torch.compile(convert)
    theirs, ours = _in_turns(lambda: compiled(x), lambda: quantize(x, "e4m3"), repeats)
    copied = torch.empty_like(x)
    (copy,) = in_turns_on_device((lambda: copied.copy_(x),), repeats)
    software = f"torch {torch.__version__}, compiled e4m3"
    yield Other(row=NEAREST, software=software, value=copy / theirs[0], ours=copy / ours[0],
                differing=_differing(theirs[1], ours[1]))  # fmt: skip


def _in_turns(
    theirs: Callable[[], Tensor], ours: Callable[[], Tensor], repeats: int
) -> tuple[tuple[float, Tensor], tuple[float, Tensor]]:
    results = theirs(), ours()
    seconds = in_turns_on_device((theirs, ours), repeats)
    return (seconds[0], results[0]), (seconds[1], results[1])


def _differing(x: Tensor, y: Tensor) -> int:
    return int((x.view(torch.int32) != y.view(torch.int32)).sum())
