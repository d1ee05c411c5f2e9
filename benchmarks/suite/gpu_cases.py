# SPDX-License-Identifier: Apache-2.0
"""What ``python -m benchmarks.suite gpu`` measures: rows, each a goal, and the cases that have to reach it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.suite import gemm
from fmtsim.formats.registry import get_format
from fmtsim.spec.datapath import Datapath

Kind = Literal["quantize", "encode", "product", "layer", "call"]
FALLING = ("layer", "call")  # smaller is better
UNITS: dict[Kind, str] = {
    "quantize": "of a copy", "encode": "of a copy", "product": "TMAC/s", "layer": "of bf16", "call": "us",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold a goal of the engine on an H200 and what it is about."""

    name: str  # the work
    # ``"quantize"`` and ``"encode"``: the share of the speed of a copy of the same bytes. ``"product"``: 1e12 products
    # a second. ``"layer"``: time over that of the plain bfloat16 layer. ``"call"``: microseconds of the host. The last
    # two are better when smaller.
    kind: Kind
    # what every case should reach (at most, where smaller is better); None where nothing is promised
    least: float | None = None
    stretch: float | None = None  # the stretch target
    elsewhere: str = ""  # the best that is known of other software on such a GPU

    @property
    def falls(self) -> bool:
        """Whether smaller is better."""
        return self.kind in FALLING

    def reaches(self, value: float, goal: float | None) -> bool | None:
        """Return True if a value reaches its goal; None without a goal."""
        if goal is None:
            return None
        return value <= goal if self.falls else value >= goal


def _row(name: str, kind: Kind, goal: tuple[float, float] | None = None, elsewhere: str = "") -> Row:
    least, stretch = goal or (None, None)
    return Row(name=name, kind=kind, least=least, stretch=stretch, elsewhere=elsewhere)


NEAREST = _row("quantize to nearest even", "quantize", (0.95, 0.99), "torch compiled e4m3 1.00, microxcaling 0.54")
TABLES = _row("quantize by table (codebooks, logarithmic)", "quantize", (0.95, 0.99))
STOCHASTIC = _row("quantize, stochastic", "quantize", (0.90, 0.95))
SCALED = _row("mxfp8, mxfp6, mxfp4", "quantize", (0.90, 0.97), "torchao compiled 0.99, -, 0.28; microxcaling 0.21")
TWO_LEVEL = _row("nvfp4 (reads its input twice: limit 0.67)", "quantize", (0.58, 0.64), "torchao compiled 0.34")
SCALED_STOCHASTIC = _row("block formats, stochastic", "quantize")
CODES = _row("encode to packed codes", "encode", (0.85, 0.95))
CODES_STOCHASTIC = _row("encode to packed codes, stochastic", "encode", (0.85, 0.95))
CODES_TABLES = _row("encode by table", "encode", (0.85, 0.95))
FP8_FAST = _row("exact Hopper FP8", "product", (16, 27), "mmaemu h4 6.2")
FP8_SLOW = _row("exact Hopper FP8, promoted every 128", "product", (15, 27), "mmaemu h4 3.0")
HALF = _row("exact bf16 and fp16", "product", (10, 20))
BLACKWELL = _row("exact Blackwell fp8, nvf4, mxf8f6f4", "product", (12, 25))
TF32 = _row("exact TF32", "product", (5, 12))
USER = _row("user-made units", "product", (5, 12))
PRODUCTS = _row("other products", "product")
CALL = _row(
    "host time of quantize of 256 elements, no grad", "call", (15, 8), "torch ops 15, cuda-core in a custom op 39"
)
CALLS = _row("host time of other calls, 256 elements", "call")
LAYER = _row("linear layer, forward and backward, over bf16", "layer", (1.5, 1.25), "microxcaling mxfp4 3.2")
LAYERS = _row("linear layer, other formats", "layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one piece of work."""

    name: str  # what the table shows
    row: Row  # the goal that it has to reach
    format: str = ""  # format of a cast or of the layer's operands
    product: gemm.Case | None = None  # the product, where the row is about products
    dtype: torch.dtype = torch.float32  # of a cast's input
    rounding: str = "nearest_even"  # of a cast
    # how the verb is called where its host time is measured: ``"plain"``, ``"out"`` or ``"grad"``
    call: Literal["plain", "out", "grad"] = "plain"


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FORMATS: tuple[tuple[Row, str, tuple[str, ...]], ...] = (
    (NEAREST, "nearest_even", ("e4m3", "e5m2", "e3m4", "e3m2", "e2m3", "e2m1", "e5m6", "e8m0", "fp16", "bf16", "tf32",
                               "e4m3fnuz", "int8", "int4", "uint4")),
    (TABLES, "nearest_even", ("nf4", "bnb_dynamic8", "lns8_g8", "p3109_k8p1ue")),
    (STOCHASTIC, "stochastic", ("e4m3", "e5m2", "e2m1", "int8", "fp16", "bf16")),
    (SCALED, "nearest_even", ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")),
    (TWO_LEVEL, "nearest_even", ("nvfp4",)),
    (SCALED_STOCHASTIC, "stochastic", ("mxfp8_e4m3", "mxfp4", "nvfp4")),
    (CODES, "nearest_even", ("e4m3", "e2m1", "e2m3", "fp16", "int8", "int4", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4")),
    (CODES_STOCHASTIC, "stochastic", ("e4m3", "e2m1", "int8", "mxfp4")),
    (CODES_TABLES, "nearest_even", ("nf4", "bnb_dynamic8")),
)  # fmt: skip


def _casts() -> Iterator[Case]:
    for row, rounding, names in _FORMATS:
        for name in names:
            for label, dtype in _DTYPES.items():
                if dtype == torch.bfloat16 and name in ("bf16", "tf32"):
                    continue  # every bfloat16 number is a value of the format
                verb = "encode " if row.kind == "encode" else ""
                how = " stochastic" if rounding == "stochastic" else ""
                yield Case(name=f"{verb}{name}{how} {label}", row=row, format=name, dtype=dtype, rounding=rounding)


def _user(name: str, operands: str, seed: int | None = None, **fields: object) -> gemm.Case:
    return gemm.Case(name=f"user-made: {name}", operands=operands, unit=Datapath(**fields), seed=seed)  # type: ignore[arg-type]


_E6M9, _BF16, _FP16 = (get_format(name) for name in ("e6m9", "bf16", "fp16"))
_USER_MADE = (
    _user("fp8, L = 64, F = 10", "e4m3", block=64, fraction_bits=10),
    _user("bf16, L = 64, F = 20", "bf16", block=64, fraction_bits=20),
    _user("bf16, promoted every 64", "bf16", promote_every=64),
    _user("bf16, terms to nearest", "bf16", term_rounding="nearest_even", rounding="nearest_even"),
    _user("bf16, bf16 sums to nearest", "bf16", accumulator=_BF16, rounding="nearest_even"),
    _user("fp16, fp16 sums to nearest", "fp16", accumulator=_FP16, rounding="nearest_even"),
    _user("fp8, e6m9 sums", "e4m3", block=32, fraction_bits=11, accumulator=_E6M9),
    _user("bf16, bf16 sums, stochastic", "bf16", 0, accumulator=_BF16, rounding="stochastic"),
)
_CATALOGUE: tuple[tuple[Row, tuple[str, ...]], ...] = (
    (FP8_FAST, ("fp8 Hopper",)),
    (FP8_SLOW, ("fp8 Hopper, promoted every 128",)),
    (HALF, ("bf16 Hopper", "fp16 Hopper")),
    (BLACKWELL, ("fp8 Blackwell", "nvf4", "mxf8f6f4")),
    (TF32, ("tf32 Hopper",)),
    (PRODUCTS, ("fp16 Hopper, fp16 sums", "fp16 Ampere", "fp16 Volta", "fp8 Ada", "fp8 Hopper, split K in 4",
                "bf16 Hopper, promoted every 128", "fp8 Hopper, 1x128 scales", "fp32_fma", "int8")),
)  # fmt: skip


def _products() -> Iterator[Case]:
    for row, names in _CATALOGUE:
        for name in names:
            yield Case(name=f"exact {name}", row=row, product=gemm.case_named(name))
    for product in _USER_MADE:
        yield Case(name=f"exact {product.name}", row=USER, product=product)


def _calls() -> Iterator[Case]:
    yield Case(name="call e4m3", row=CALL, format="e4m3")
    yield Case(name="call e4m3 bfloat16", row=CALL, format="e4m3", dtype=torch.bfloat16)
    yield Case(name="call mxfp8_e4m3", row=CALLS, format="mxfp8_e4m3")
    yield Case(name="call nvfp4", row=CALLS, format="nvfp4")
    yield Case(name="call e4m3 stochastic", row=CALLS, format="e4m3", rounding="stochastic")
    yield Case(name="call e4m3, out=", row=CALLS, format="e4m3", call="out")
    yield Case(name="call e4m3 with a gradient", row=CALLS, format="e4m3", call="grad")


CASES: tuple[Case, ...] = (
    *_calls(),  # first, while the host's memory is in order
    *_casts(),
    *_products(),
    *(Case(name=f"linear layer {name}", row=LAYER, format=name) for name in ("nvfp4", "mxfp4")),
    *(Case(name=f"linear layer {name}", row=LAYERS, format=name) for name in ("mxfp8_e4m3", "mxfp6_e2m3")),
)
