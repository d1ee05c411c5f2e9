# SPDX-License-Identifier: Apache-2.0
"""Matrix products through the public verbs, against torch's float32 product of the same shape in the same run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.suite.timing import Timed, clock_of, in_turns
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.interop import torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.matmul import bmm, int_mm, mm
from fmtsim.gemm.products.scaled_mm import scaled_mm
from fmtsim.lab.training.run import bounded_threads
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan

SHAPE = (512, 512, 2048)
BATCH = 256
_BURST = 32  # float32 products at most between two runs of a case
Shape = tuple[int, int, int]
Scaling = Literal["none", "mx", "nvfp4", "block_128"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one product and what it should reach on one thread."""

    name: str  # what the table shows
    operands: str  # format of both operands
    unit: str | Arithmetic  # a unit by name, or a datapath
    plan: GemmPlan | None = None  # plan, accumulate, out_dtype: arguments of the verb
    accumulate: str | None = None
    out_dtype: torch.dtype | None = torch.float32
    seed: int | None = None  # of stochastic rounding
    scaling: Scaling = "none"  # scales of ``scaled_mm``; ``"none"`` calls ``mm``
    columns_apart: bool = False  # b is row-major, so that neighbours along K lie apart
    target: float | None = None  # least share of the speed of torch's float32 product; None where nothing is promised
    stretch: float | None = None  # the stretch target
    plain: str | None = None  # name of the case without what this one adds, whose cost is then at most ``extra`` more
    extra: float | None = None  # that cost as a share of the plain case
    shrink: int = 1  # each side of the shape is divided by this, for what takes long
    # of small products [side, side] by [side, side], ``BATCH`` of which are one ``bmm``; None is one product
    side: int | None = None

    @property
    def products(self) -> int:
        """How many products one run has."""
        return 1 if self.side is None else BATCH

    def shape(self, shape: Shape) -> Shape:
        """Return M, N and K of this case where most cases have ``shape``; whole blocks of 64 where it shrinks."""
        if self.side is not None:
            return self.side, self.side, self.side
        if self.shrink == 1:
            return shape
        m, n, k = (max(64, side // self.shrink // 64 * 64) for side in shape)
        return m, n, k


_HOPPER, _FP8, _WIDE, _USER = "hopper.wgmma", (0.35, 0.70), (0.25, 0.45), (0.10, None)
_NARROW = (0.15, 0.30)
_SLOW, _SPLIT = GemmPlan(promote_every=128), GemmPlan(k_tile=128, split=4)


def _case(name: str, operands: str, unit: str | Arithmetic, goal: tuple = (None, None), **fields: Any) -> Case:
    return Case(name=name, operands=operands, unit=unit, target=goal[0], stretch=goal[1], **fields)


def _user(name: str, operands: str = "bf16", seed: int | None = None, **fields: Any) -> Case:
    return _case(f"user-made: {name}", operands, Datapath(**fields), _USER, seed=seed)


CASES: tuple[Case, ...] = (
    _case("fp8 Hopper", "e4m3", _HOPPER, _FP8), _case("fp8 Blackwell", "e4m3", "blackwell.tcgen05", _WIDE),
    _case("bf16 Hopper", "bf16", _HOPPER, _WIDE),
    _case("bf16 Hopper, row-major b", "bf16", _HOPPER, _WIDE, columns_apart=True),
    _case("bf16 Hopper, bf16 out", "bf16", _HOPPER, _WIDE, out_dtype=torch.bfloat16),
    _case("bf16 Hopper, batch, side 16", "bf16", _HOPPER, side=16),
    _case("bf16 Hopper, batch, side 64", "bf16", _HOPPER, side=64), _case("fp16 Hopper", "fp16", _HOPPER, _WIDE),
    _case("tf32 Hopper", "tf32", _HOPPER, _NARROW),
    _case("nvf4", "e2m1", "blackwell.tcgen05.nvf4", _NARROW, scaling="nvfp4"),
    _case("mxf8f6f4", "e4m3", "blackwell.tcgen05.mxf8f6f4", _NARROW, scaling="mx"),
    _case("fp16 Hopper, fp16 sums", "fp16", _HOPPER, accumulate="fp16", out_dtype=torch.float16),
    _case("fp16 Ampere", "fp16", "ampere.mma"), _case("fp16 Volta", "fp16", "volta.mma"),
    _case("fp8 Ada", "e4m3", "ada.mma"), _case("bf16 MI300", "bf16", "cdna3.mfma", shrink=2),
    _user("terms to nearest", term_rounding="nearest_even", rounding="nearest_even"),
    _user("bf16 sums to nearest", accumulator=get_format("bf16"), rounding="nearest_even"),
    _user("fp8, e6m9 sums", "e4m3", block=32, fraction_bits=11, accumulator=get_format("e6m9")),
    _user("bf16 sums, stochastic", seed=0, accumulator=get_format("bf16"), rounding="stochastic"),
    _user("blocks of 64", block=64, fraction_bits=20), _user("promotion every 64", promote_every=64),
    _case("exact", "bf16", "exact", shrink=4), _case("fp32_fma", "fp32", "fp32_fma"),
    _case("int8", "int8", "int8", out_dtype=torch.int32),
    _case("fp8 Hopper, promoted every 128", "e4m3", _HOPPER, plan=_SLOW, plain="fp8 Hopper", extra=0.10),
    _case("fp8 Hopper, split K in 4", "e4m3", _HOPPER, plan=_SPLIT, plain="fp8 Hopper", extra=0.10),
    _case("bf16 Hopper, promoted every 128", "bf16", _HOPPER, plan=_SLOW, plain="bf16 Hopper", extra=0.10),
    _case("bf16 Hopper, split K in 4", "bf16", _HOPPER, plan=_SPLIT, plain="bf16 Hopper", extra=0.10),
    _case("fp8 Hopper, 1x128 scales", "e4m3", _HOPPER, scaling="block_128", plain="fp8 Hopper"),
)  # fmt: skip


def case_named(name: str) -> Case:
    """Return the case of a name in the table."""
    return next(case for case in CASES if case.name == name)


def product_of(case: Case, shape: Shape, *, device: str = "cpu") -> Callable[[], Tensor]:
    """Return the call of a case, with normally distributed operands of ``shape`` that lie ready in their dtypes."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a, w = (_matrix(case.products * rows, k, case.operands, generator).to(device) for rows in (m, n))
    b = w.t().contiguous() if case.columns_apart else w.t()
    if case.operands == "int8":
        return lambda: int_mm(a, b, target=case.unit)
    options: dict[str, Any] = {
        "target": case.unit, "plan": case.plan, "accumulate": case.accumulate, "generator": case.seed,
    }  # fmt: skip
    if case.side is not None:
        return lambda: bmm(a.view(-1, m, k), w.view(-1, n, k).mT, out_dtype=case.out_dtype, **options)
    if case.scaling == "none":
        tf32 = case.operands == "tf32"
        return lambda: mm(a, b, out_dtype=case.out_dtype, allow="tf32" if tf32 else None, **options)
    scale_a, scale_b = (_scales(rows, k, case.scaling, generator).to(device) for rows in (m, n))
    recipe = {"mx": "BlockWise1x32", "nvfp4": "BlockWise1x16", "block_128": "BlockWise1x128"}[case.scaling]
    swizzle = None if case.scaling == "block_128" else "NO_SWIZZLE"
    options |= {"scale_recipes": recipe, "swizzles": swizzle}
    return lambda: scaled_mm(a, b, scale_a, scale_b, out_dtype=case.out_dtype, **options)


def sgemm_of(shape: Shape, products: int = 1) -> Callable[[], Tensor]:
    """Return torch's float32 product of that shape, or as many in a batch."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randn(products * rows, k, generator=generator) for rows in (m, n))
    if products > 1:
        return lambda: torch.bmm(a.view(-1, m, k), w.view(-1, n, k).mT)
    return lambda: torch.mm(a, w.t())


def _matrix(rows: int, columns: int, name: str, generator: torch.Generator) -> Tensor:
    """Return numbers of a format in the dtype that verbs take; made without fmtsim, whose first call is timed too."""
    if name == "int8":
        return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    if name == "e2m1":  # two in a byte
        packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        return packed.view(torch.float4_e2m1fn_x2)
    x = torch.randn(rows, columns, generator=generator)
    if name == "tf32":
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    return x.to(torch_dtype(fmt))


def _scales(rows: int, k: int, scaling: Scaling, generator: torch.Generator) -> Tensor:
    if scaling == "block_128":
        return torch.rand(rows, -(-k // 128), generator=generator) + 0.5
    low, high, dtype, every = {
        "mx": (123, 132, torch.float8_e8m0fnu, 32),  # 2^-4 ... 2^4
        "nvfp4": (40, 73, torch.float8_e4m3fn, 16),  # 2^-2 ... 4
    }[scaling]
    size = (rows, -(-k // every))
    return torch.randint(low, high, size, generator=generator, dtype=torch.uint8).view(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Timed):
    """Hold the median seconds of a case, of torch's float32 products and of plain cases in turns, by threads."""

    case: Case
    shape: Shape
    plain_seconds: dict[int, float]

    @property
    def extra(self) -> float | None:
        """Return what the case costs beyond its plain case, as a share of that, with the fewest threads measured."""
        first = self.fewest
        return self.seconds[first] / self.plain_seconds[first] - 1 if self.plain_seconds else None

    @property
    def met(self) -> bool | None:
        """Whether the fewest threads measured reach the target, or keep the limit of extra cost; None without one."""
        if self.case.extra is not None and self.extra is not None:
            return self.extra <= self.case.extra
        return None if self.case.target is None else self.ratio() >= self.case.target

    @property
    def stretched(self) -> bool | None:
        """Whether the stretch target is reached; None without one."""
        return None if self.case.stretch is None else self.ratio() >= self.case.stretch

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        case = self.case
        return {
            "case": case.name, "operands": case.operands, "shape": list(self.shape), "target": case.target,
            "stretch": case.stretch, "met": self.met, "stretch_met": self.stretched, "plain": case.plain,
            "extra_cost": self.extra, "extra_limit": case.extra,
            "threads": self.by_threads("sgemm", "products", case.products * math.prod(self.shape)),
        }  # fmt: skip


def measure(case: Case, *, shape: Shape = SHAPE, threads: Sequence[int] = (1, 2), repeats: int = 9) -> Result:
    """Time a case, torch's float32 product and the plain case, if it has one, in turns, and take the medians.

    The float32 product is repeated until it takes about as long as the case: what else runs on the machine interrupts
    both equally often.

    Args:
        shape: M, N and K.
        threads: Thread counts to measure, one after the other.
        repeats: Timed runs of each, after one that compiles the kernel and touches the pages.
    """
    shape = case.shape(shape)
    sgemm, product = sgemm_of(shape, case.products), product_of(case, shape)
    others = [] if case.plain is None else [product_of(case_named(case.plain), shape)]
    seconds, sgemm_seconds, plain_seconds = {}, {}, {}
    for count in threads:
        with bounded_threads(count):
            once = in_turns((sgemm, product), 1, count)
            burst = min(max(round(once[1] / once[0]), 1), _BURST)
            taken = in_turns((_times(sgemm, burst), product, *others), repeats, count, clock_of(count))
        sgemm_seconds[count], seconds[count] = taken[0] / burst, taken[1]
        if others:
            plain_seconds[count] = taken[2]
    return Result(case=case, shape=shape, seconds=seconds, base_seconds=sgemm_seconds, plain_seconds=plain_seconds)


def _times(action: Callable[[], Any], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            action()

    return run
