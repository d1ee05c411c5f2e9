# SPDX-License-Identifier: Apache-2.0
"""Other software beside the CUDA engine, where it is installed: the same work on the same operands, in the same run."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.gemm.products.matmul import mm
from fmtsim.lab.bench.gpu_cases import FP8_FAST, FP8_SLOW, NEAREST, Row
from fmtsim.lab.bench.timing import in_turns_on_device
from fmtsim.spec.plan import GemmPlan

_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Hold what other software reached at the work of a row.

    Args:
        row: The work.
        software: What ran, with its version.
        value: As the row counts.
        ours: What fmtsim reached in turns with it.
        differing: Results that differ from fmtsim's in a bit.
    """

    row: Row
    software: str
    value: float
    ours: float
    differing: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self) | {"row": self.row.name}


def measured(repeats: int, elements: int, side: int) -> Iterator[Other | str]:
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
                lambda: mm(a, w.t(), unit="hopper.wgmma", plan=plan, out_dtype=torch.float32),  # noqa: B023
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
    """Return the seconds and the result of both."""
    results = theirs(), ours()
    seconds = in_turns_on_device((theirs, ours), repeats)
    return (seconds[0], results[0]), (seconds[1], results[1])


def _differing(x: Tensor, y: Tensor) -> int:
    return int((x.view(torch.int32) != y.view(torch.int32)).sum())
