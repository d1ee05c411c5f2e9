# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels against ``torch.Tensor.copy_`` of the same tensor in the same run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from benchmarks.suite.timing import Action, Timed, clock_of, in_turns
from fmtsim.casts.quantize import encode, quantize
from fmtsim.lab.training.run import bounded_threads
from fmtsim.rounding.modes import RoundingName

SIDE = 4096  # 4096 x 4096 = 16M float32 elements, 64 MB: far beyond any cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one cast and the least share of a copy's speed that it should reach on one thread."""

    name: str
    format: str
    target: float
    rounding: RoundingName = "nearest_even"
    verb: Literal["quantize", "encode", "decode"] = "quantize"

    def action(self, x: torch.Tensor, out: torch.Tensor) -> Action:
        """Return what quantises into a reused buffer, or encodes or decodes into a new tensor."""
        generator = 0 if self.rounding == "stochastic" else None
        if self.verb == "decode":
            return encode(x, self.format).decode
        if self.verb == "encode":
            return partial(encode, x, self.format, rounding=self.rounding, generator=generator)
        return partial(quantize, x, self.format, rounding=self.rounding, generator=generator, out=out)


_NEAREST = ("e4m3", "e5m2", "e4m3fnuz", "e3m4", "e3m2", "e2m3", "e2m1", "e5m6", "e3m3", "e8m0", "fp16", "bf16", "tf32")
_STOCHASTIC = ("e4m3", "e5m2", "e2m1", "bf16", "fp16")
_CODEBOOKS = ("nf4", "bnb_dynamic8")
_ENCODED = {"e4m3": 0.25, "e5m2": 0.25, "int8": 0.25, "bnb_dynamic8": 0.15, "bf16": 0.10, "e2m1": 0.10, "nf4": 0.08}
_GGUF = {"q4_0": 0.25, "q8_0": 0.20, "q4_k": 0.20, "q6_k": 0.20, "hif4": 0.05}  # of 32 or 256 elements, packed
_ENCODED |= _GGUF | {"mxfp8_e4m3": 0.15, "int8_channel": 0.25, "int4_g128": 0.08, "mxfp4": 0.08, "nvfp4": 0.05}

CASES: tuple[Case, ...] = (
    *(Case(name=f"{name} nearest", format=name, target=0.80) for name in _NEAREST),
    Case(name="e4m3 toward zero", format="e4m3", target=0.25, rounding="toward_zero"),
    *(Case(name=f"{name} stochastic", format=name, target=0.25, rounding="stochastic") for name in _STOCHASTIC),
    Case(name="mxfp4", format="mxfp4", target=0.60), Case(name="mxfp6", format="mxfp6_e3m2", target=0.60),
    Case(name="mxfp8", format="mxfp8_e4m3", target=0.60),
    Case(name="mxfp4 stochastic", format="mxfp4", target=0.25, rounding="stochastic"),
    Case(name="nvfp4", format="nvfp4", target=0.40), Case(name="int8 per channel", format="int8_channel", target=0.40),
    Case(name="int4 group 128", format="int4_g128", target=0.40),
    *(Case(name=f"{name} nearest", format=name, target=0.20) for name in _CODEBOOKS),
    *(Case(name=f"encode {name}", format=name, target=goal, verb="encode") for name, goal in _ENCODED.items()),
    *(Case(name=f"decode {name}", format=name, target=0.20, verb="decode") for name in _GGUF),
    Case(name="encode e4m3 stochastic", format="e4m3", target=0.15, rounding="stochastic", verb="encode"),
    Case(name="encode mxfp4 stochastic", format="mxfp4", target=0.05, rounding="stochastic", verb="encode"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Timed):
    """Hold the median seconds of one case and of the copies between its runs, for each number of threads."""

    case: Case
    elements: int

    @property
    def met(self) -> bool:
        """Whether the fewest threads measured reach the target."""
        return self.ratio() >= self.case.target

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        fields = asdict(self.case)
        threads = self.by_threads("copy", "elements", self.elements)
        return {"case": fields.pop("name"), **fields, "elements": self.elements, "met": self.met, "threads": threads}


def measure(case: Case, *, side: int = SIDE, threads: Sequence[int] = (1, 2), repeats: int = 9) -> Result:
    """Time a case and a copy in turns, and take the medians.

    Args:
        side: The tensor is float32 ``[side, side]``, normally distributed.
        threads: Thread counts to measure, one after the other.
        repeats: Timed runs of each, after one warm-up that compiles the kernel and touches the pages.
    """
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    seconds, copies = {}, {}
    for count in threads:
        with bounded_threads(count):
            turns = (lambda: out.copy_(x), case.action(x, out))
            copies[count], seconds[count] = in_turns(turns, repeats, count, clock_of(count))
    return Result(case=case, elements=x.numel(), seconds=seconds, base_seconds=copies)
