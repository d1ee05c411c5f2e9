"""The CUDA engine against copies and native products of the same run: casts, exact products, a linear layer, calls."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fmtsim.bench import gemm
from fmtsim.bench.timing import in_turns_on_device
from fmtsim.gemm.config import linear_config
from fmtsim.gemm.emulated import EmulatedGEMM
from fmtsim.quantize import encode, quantize

ELEMENTS = 1 << 28  # 1 GiB of float32: far beyond the second-level cache
SIDE = 4096  # of exact products
TOKENS, WIDTH = 8192, 4096  # of the linear layer
_SMALL, _CALLS = 256, 2000

Goal = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one piece of work and what it should reach.

    Args:
        name: What the table shows.
        kind: ``"quantize"`` and ``"encode"``: the share of the speed of a copy of the same bytes. ``"product"``: 1e12
            products a second. ``"layer"``: time over that of the plain bfloat16 layer. ``"call"``: microseconds of
            the host. The last two are better when smaller.
        format: Format of a cast or of the layer's operands; name of the case of ``fmtsim bench gemm`` of a product.
        goal: What it should reach at least (at most), and the stretch target; None where nothing is promised.
        dtype: Of a cast's input.
        rounding: Of a cast.
    """

    name: str
    kind: Literal["quantize", "encode", "product", "layer", "call"]
    format: str
    goal: Goal = (None, None)
    dtype: torch.dtype = torch.float32
    rounding: str = "nearest_even"

    @property
    def falls(self) -> bool:
        """Whether smaller is better."""
        return self.kind in ("layer", "call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold what was measured: the value that the goal speaks of, and the median seconds behind it."""

    case: Case
    value: float
    seconds: float
    details: dict[str, float] = field(default_factory=dict)

    def reaches(self, goal: float | None) -> bool | None:
        """Say whether the value reaches a goal; None without one."""
        if goal is None:
            return None
        return self.value <= goal if self.case.falls else self.value >= goal

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        least, stretch = self.case.goal
        return {
            "case": self.case.name, "kind": self.case.kind, "value": self.value, "target": least, "stretch": stretch,
            "met": self.reaches(least), "stretch_met": self.reaches(stretch), "seconds": self.seconds, **self.details,
        }  # fmt: skip


_NEAREST, _RANDOM, _BLOCKS, _TWO_LEVEL, _CODES = (0.95, 0.99), (0.90, 0.95), (0.90, 0.97), (0.58, 0.64), (0.85, 0.95)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SCALAR = ("e4m3", "e5m2", "e3m4", "e2m1", "fp16", "e4m3fnuz", "e8m0", "int8", "int4", "nf4", "lns8")
_SCALED = ("mxfp8_e4m3", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")


def _casts() -> Iterator[Case]:
    for label, dtype in _DTYPES.items():
        for name in _SCALAR:
            yield Case(name=f"{name} {label}", kind="quantize", format=name, goal=_NEAREST, dtype=dtype)
        for name in ("e4m3", "e2m1", "e5m2", "bf16"):
            if name != "bf16" or dtype == torch.float32:
                text = f"{name} stochastic {label}"
                yield Case(name=text, kind="quantize", format=name, goal=_RANDOM, dtype=dtype, rounding="stochastic")
        for name in _SCALED:
            yield Case(name=f"{name} {label}", kind="quantize", format=name, goal=_BLOCKS, dtype=dtype)
        yield Case(
            name=f"mxfp4 stochastic {label}", kind="quantize", format="mxfp4", dtype=dtype, rounding="stochastic"
        )
        yield Case(name=f"nvfp4 {label}", kind="quantize", format="nvfp4", goal=_TWO_LEVEL, dtype=dtype)
        for name in ("e4m3", "e2m1", "e3m2", "mxfp8_e4m3", "mxfp4", "nvfp4"):
            goal = (None, None) if name == "nvfp4" else _CODES
            yield Case(name=f"encode {name} {label}", kind="encode", format=name, goal=goal, dtype=dtype)


_PRODUCTS: dict[str, Goal] = {
    "fp8 Hopper": (16, 27),
    "fp8 Hopper, promoted every 128": (15, 27),
    "bf16 Hopper": (10, 20),
    "fp16 Hopper": (10, 20),
    "fp8 Blackwell": (12, 25),
    "nvf4": (12, 25),
    "mxf8f6f4": (12, 25),
    "tf32 Hopper": (5, 12),
    "user-made: blocks of 64": (5, 12),
    "user-made: promotion every 64": (5, 12),
    "user-made: terms to nearest": (None, None),
    "user-made: bf16 sums to nearest": (5, 12),
    "user-made: fp8, e6m9 sums": (5, 12),
    "user-made: bf16 sums, stochastic": (None, None),
    "fp16 Hopper, fp16 sums": (None, None),
    "fp16 Ampere": (None, None),
    "fp16 Volta": (None, None),
    "fp8 Ada": (None, None),
    "fp8 Hopper, split K in 4": (None, None),
    "bf16 Hopper, promoted every 128": (None, None),
    "fp8 Hopper, 1x128 scales": (None, None),
    "fp32_fma": (None, None),
    "int8": (None, None),
}

CASES: tuple[Case, ...] = (
    *_casts(),
    *(Case(name=f"exact {name}", kind="product", format=name, goal=goal) for name, goal in _PRODUCTS.items()),
    Case(name="linear layer mxfp4", kind="layer", format="mxfp4", goal=(1.5, 1.25)),
    Case(name="linear layer nvfp4", kind="layer", format="nvfp4", goal=(1.5, 1.25)),
    Case(name="one quantize of 256 elements", kind="call", format="e4m3", goal=(15, 8)),
)


def measure(case: Case, *, repeats: int = 21, elements: int = ELEMENTS, side: int = SIDE) -> Result:
    """Measure one case on the current CUDA device.

    Args:
        case: What to run.
        repeats: Timed runs, after one that compiles; medians are taken.
        elements: Elements of a cast's input, a multiple of 4096.
        side: M, N and K of a product.
    """
    if case.kind in ("quantize", "encode"):
        return _measure_cast(case, repeats, elements)
    if case.kind == "product":
        return _measure_product(case, repeats, side)
    return _measure_layer(case, repeats) if case.kind == "layer" else _measure_call(case)


def _measure_cast(case: Case, repeats: int, elements: int) -> Result:
    """Take turns with a copy of the input; an encoding is held against the copy's time for the bytes it moves."""
    x = torch.randn(elements // 4096, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    x = x.to(case.dtype)
    out = torch.empty_like(x)
    options: dict[str, Any] = {"rounding": case.rounding, "generator": 0 if case.rounding == "stochastic" else None}
    moved = 1.0
    if case.kind == "encode":
        moved = (x.nbytes + encode(x, case.format, **options).nbytes) / (2 * x.nbytes)

    def run() -> object:
        if case.kind == "encode":
            return encode(x, case.format, **options)
        return quantize(x, case.format, out=out, **options)

    copy, seconds = in_turns_on_device((lambda: out.copy_(x), run), repeats)
    details = {"copy_seconds": copy, "copy_bytes_per_second": 2 * x.nbytes / copy}
    return Result(case=case, value=copy * moved / seconds, seconds=seconds, details=details)


def _measure_product(case: Case, repeats: int, side: int) -> Result:
    product = gemm.product_of(gemm.case_named(case.format), (side, side, side), device="cuda")
    x = torch.randn(side, side, device="cuda").bfloat16()
    native, seconds = in_turns_on_device((lambda: x @ x, product), min(repeats, 7))
    products = float(side) ** 3
    details = {"native_bf16": products / native / 1e12}
    return Result(case=case, value=products / seconds / 1e12, seconds=seconds, details=details)


def _measure_layer(case: Case, repeats: int) -> Result:
    """Take turns with the same layer without quantisers: forward and backward of [8192, 4096] by [4096, 4096]."""
    x = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(WIDTH, WIDTH, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16()
    config = linear_config(x=case.format, w=case.format, g=case.format)

    def run(layer: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(layer(), (x, w), grad)

    plain, quantised = (
        run(lambda: torch.nn.functional.linear(x, w)),
        run(lambda: EmulatedGEMM.apply(x, w, None, config)),
    )
    base, seconds = in_turns_on_device((plain, quantised), repeats)
    return Result(case=case, value=seconds / base, seconds=seconds, details={"plain_seconds": base})


def _measure_call(case: Case) -> Result:
    """Time calls by the host's clock while the device keeps up: the kernel is shorter than the call."""
    x = torch.randn(_SMALL, device="cuda")
    actions = {"seconds": lambda: quantize(x, case.format), "torch_seconds": lambda: x + 1}
    taken = {name: statistics.median(_host_times(action)) for name, action in actions.items()}
    seconds = taken.pop("seconds")
    return Result(case=case, value=1e6 * seconds, seconds=seconds, details=taken)


def _host_times(action: Callable[[], Any]) -> list[float]:
    rounds = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            action()
        rounds.append((time.perf_counter() - start) / _CALLS)
    return rounds[1:]
