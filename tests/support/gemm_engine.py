# SPDX-License-Identifier: Apache-2.0
"""Products of the CPU engine, or one put in its place, against the oracle: operands, units, plans, any product."""

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import strategies as st

import fmtsim
from fmtsim import GemmPlan, get_format, get_unit, list_units
from fmtsim.cpu.gemm.engine import gemm, supports_gemm
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.lab.verify.probe_operands import spread
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import (
    TERM_ROUNDINGS,
    Datapath,
    FmaDatapath,
    IntegerDatapath,
    PairwiseDatapath,
    TwoStageDatapath,
    sum_dtype,
)
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits, bits
from tests.support.gemm_oracle import sums

DTYPES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp64": torch.float64, "int8": torch.int8, "int8_full": torch.int8,
}  # fmt: skip
KINDS = ("normal", "narrow", "wide", "tiny", "huge", "sparse", "special", "codes")
E8M13 = FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13)
RANDOM_BITS = (
    {}, {"random_bits": 1}, {"random_bits": 8}, {"random_bits": 13}, {"random_bits": 5, "variant": "b"},
    {"random_bits": 3, "variant": "c"},
)  # fmt: skip
ACCUMULATORS = ("fp32", "fp32", "fp32", E8M13, E8M13, "fp16", "bf16", "fp64")
ODD_ACCUMULATORS = (
    "e4m3", "e5m2", "e2m1", "e4m3fnuz",
    FloatFormat(name="top", exponent_bits=5, mantissa_bits=4, nan="top", infinities=False),
    FloatFormat(name="without_nan", exponent_bits=5, mantissa_bits=4, nan="none", infinities=False),
    FloatFormat(name="flush", exponent_bits=5, mantissa_bits=4, has_subnormals=False),
    FloatFormat(name="flush32", exponent_bits=8, mantissa_bits=23, has_subnormals=False),
    FloatFormat(name="flush42", exponent_bits=11, mantissa_bits=30, has_subnormals=False),
    FloatFormat(name="powers", exponent_bits=5, mantissa_bits=0, nan="top"),
    FloatFormat(name="wide", exponent_bits=10, mantissa_bits=52, nan="top", infinities=False),
    FloatFormat(name="saturating32", exponent_bits=8, mantissa_bits=23, overflow="saturate"),
    FloatFormat(name="saturating16", exponent_bits=5, mantissa_bits=10, overflow="saturate"),
    FloatFormat(name="saturating52", exponent_bits=11, mantissa_bits=52, overflow="saturate"),
)  # fmt: skip
SPECIALS = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=torch.float64)
INF, NAN = torch.inf, torch.nan
_LARGEST_SCALE = 2.0**127
HALF = Datapath(block=16, fraction_bits=25, min_exponent=-133)
EIGHT = Datapath(block=32, fraction_bits=13, accumulator=E8M13)
UNITS = {  # for each kernel: unit, format, kind
    "floor32": (EIGHT, "e4m3", "normal"),
    "floor64": (HALF, "bf16", "normal"),
    "wide": (replace(HALF, rounding="nearest_away"), "bf16", "narrow"),
    "grouped": (get_unit("blackwell.tcgen05.nvf4").mode("e2m1", "e2m1"), "e2m1", "normal"),
    "precise": (replace(HALF, fraction_bits=None, block=4), "bf16", "normal"),
    "chains": (get_unit("fp32_fma").mode("bf16", "bf16"), "bf16", "normal"),
    "two_stage": (get_unit("cdna3.mfma").mode("bf16", "bf16"), "bf16", "normal"),
    "pairwise": (get_unit("cdna2.mfma").mode("bf16", "bf16"), "bf16", "normal"),
    "integers": (IntegerDatapath(saturate=True), "int8", "huge"),
}
paths = pytest.mark.parametrize("path", UNITS)
FMA32 = get_unit("fp32_fma").mode("fp32", "fp32")
FMA64 = get_unit("fp64_fma").mode("fp64", "fp64")
NAMES = {
    "chains": ("e4m3", "e5m2", "bf16", "fp16", "tf32", "fp32", "e4m3fnuz"),
    "doubles": ("fp64", "fp64", "fp32", "bf16"),
    "two_stage": ("fp16", "bf16", "tf32", "fp32", "e4m3fnuz", "e5m2fnuz"),
    "pairwise": ("fp16", "bf16", "fp32", "e5m2fnuz", "fp64"),
    "integers": ("int8",),
}


def f32(*rows) -> torch.Tensor:
    """Return rows of numbers as a float32 matrix."""
    return torch.tensor(rows, dtype=torch.float32)


def gemm_spec(datapath, a: str, b: str | None = None, plan: GemmPlan | None = None) -> GemmSpec:
    return GemmSpec(datapath=datapath, plan=plan or GemmPlan(), a=get_format(a), b=get_format(b or a))


def reals(shape: tuple[int, ...], kind: str, fmt, generator: torch.Generator) -> torch.Tensor:
    """Return float64 numbers of a kind, of which ``tiny`` and ``huge`` lie at the ends of a format's range."""

    def drawn(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    ends = {"narrow": (-8, 8), "normal": (0, 1)}
    if not isinstance(fmt, IntFormat):
        ends |= {"wide": (fmt.min_exponent - 3, fmt.max_exponent), "tiny": (fmt.min_exponent - 4, fmt.min_exponent + 4)}
        ends |= {"huge": (fmt.max_exponent - 4, fmt.max_exponent)}
        if kind in ends:
            return spread(shape, ends[kind], generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if isinstance(fmt, IntFormat):
        return torch.where(drawn(0, 2) > 0, -128, 127).double() if kind == "huge" else drawn(-128, 128).double()
    if kind == "codes":  # any sign, exponent and significand
        return drawn(-(1 << 31), 1 << 31).to(torch.int32).view(torch.float32).double()
    if kind == "special":
        return torch.where(drawn(0, 16) == 0, SPECIALS[drawn(0, 5)], x)
    return x * (drawn(0, 5) == 0)  # sparse


def operand(name: str, rows: int, k: int, kind: str, seed: int) -> torch.Tensor:
    """Return values of a format in the dtype in which the verbs hand them to an engine."""
    fmt, dtype = get_format(name), DTYPES.get(name, torch.float32)
    overflow = "ieee" if fmt.has_nan else "saturate"
    exact = dtype if dtype in (torch.float64, torch.int8) else torch.float32
    return _values((rows, k), kind, seed, fmt, overflow, exact).to(dtype, copy=True)


def addend(spec: GemmSpec, m: int, n: int, kind: str, seed: int) -> torch.Tensor:
    dtype = sum_dtype(spec.datapath)
    if dtype == torch.int32:
        return torch.randint(-(1 << 31), 1 << 31, (m, n), generator=torch.Generator().manual_seed(seed)).to(dtype)
    fmt = getattr(spec.datapath, "accumulator", get_format("fp32"))
    return _values((m, n), kind, seed, fmt, "ieee", dtype).clone()


@lru_cache(maxsize=512)  # units and paths take the same ones
def _values(shape: tuple[int, ...], kind: str, seed: int, fmt, overflow: str, dtype: torch.dtype) -> torch.Tensor:
    x = reals(shape, kind, fmt, torch.Generator().manual_seed(seed))
    return x.to(dtype) if dtype == torch.int8 else fmtsim.quantize(x, fmt, overflow=overflow, out_dtype=dtype)


def unit_scales(spec: GemmSpec, rows: int, k: int, kind: str, seed: int) -> torch.Tensor | None:
    """Return scales of a unit or of a scaled promotion, None where there are none."""
    unit, generator = spec.datapath, torch.Generator().manual_seed(seed)
    if isinstance(unit, Datapath) and unit.scale is not None:
        shape = (rows, -(-k // unit.scale_block))
        x = reals(shape, {"special": "wide"}.get(kind, kind), unit.scale, generator).abs()
        x = fmtsim.quantize(x, unit.scale, overflow="saturate", out_dtype=torch.float32).clamp(max=_LARGEST_SCALE)
        return x.masked_fill(torch.rand(shape, generator=generator) < 0.1, torch.nan) if kind == "special" else x
    if spec.plan.scaled_promotion and spec.plan.promote_every is not None:
        return torch.randn(rows, -(-k // spec.plan.promote_every), generator=generator)
    return None


def product(a, b, spec, c=None, scale_a=None, scale_b=None, random=None) -> torch.Tensor:
    """Return the engine's sums; fail where the engine leaves the product to another."""
    assert supports_gemm(spec, a, b)
    out = torch.full((a.shape[0], b.shape[0]), 7, dtype=sum_dtype(spec.datapath))
    gemm(a, b, c, scale_a, scale_b, spec, random, out)
    return out


def check(a, b, spec, **rest) -> None:
    """Fail unless engine and oracle agree in every bit."""
    options = {name: value for name, value in rest.items() if value is not None}
    found = product(a, b, spec, **options)
    key = (spec, *(_key(x) for x in (a, b)), *((name, _key(x)) for name, x in options.items()))
    if key not in _EXPECTED:
        if len(_EXPECTED) > 512:
            _EXPECTED.clear()
        _EXPECTED[key] = sums(a, b, spec, sum_dtype(spec.datapath), **options)
    assert_same_bits(found, _EXPECTED[key])


_EXPECTED: dict[tuple, torch.Tensor] = {}
"""Sums of the oracle by what it was given: one engine after the other is held to them."""


def _key(x):
    return (x.dtype, x.shape, bits(x.contiguous()).numpy().tobytes()) if isinstance(x, torch.Tensor) else x


def check_kinds(spec: GemmSpec, shape: tuple[int, int, int], kinds: tuple[str, str], seed: int, with_c: bool) -> None:
    """Check operands of two kinds, scales wherever there are some, and an addend if asked for."""
    m, n, k = shape
    a, b = operand(spec.a.name, m, k, kinds[0], seed), operand(spec.b.name, n, k, kinds[1], seed + 1)
    c = addend(spec, m, n, "special" if seed % 2 else "normal", seed + 2) if with_c else None
    scales = [unit_scales(spec, rows, k, kinds[0], seed + 3 + rows) for rows in (m, n)]
    check(a, b, spec, c=c, scale_a=scales[0], scale_b=scales[1], random=RandomKey(seed, 5))


def check_ends_of_int32() -> None:
    """Check integer sums that begin near an end of int32 and pass it, in one chain, in promoted chains, in parts."""
    a = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 85).contiguous()
    b = torch.tensor([[127], [-128], [1], [-1]], dtype=torch.int8).expand(4, 85).contiguous()
    top = (1 << 31) - 1
    for plan in ({}, {"promote_every": 24}, {"k_tile": 20, "split": 3}, {"k_tile": 20, "split": 3, "promote_every": 8}):
        for saturate in (True, False):
            spec = gemm_spec(IntegerDatapath(saturate=saturate), "int8", plan=GemmPlan(**plan))
            for value in (top, top - 127 * 30, -top - 1, -top + 128 * 30):
                check(a, b, spec, c=torch.full((2, 4), value, dtype=torch.int32))


def setting(path: str, m: int, n: int, k: int):
    unit, fmt, kind = UNITS[path]
    spec = gemm_spec(unit, fmt)
    scales = [unit_scales(spec, rows, k, "normal", 8 + rows) for rows in (m, n)]
    return operand(fmt, m, k, kind, 1), operand(fmt, n, k, kind, 2), spec, *scales


def modes() -> list:
    return [
        pytest.param(mode, id=f"{name}-{(mode.inputs or ('any',))[0]}-{mode.accumulate}-{mode.scale}")
        for name in list_units()
        for mode in get_unit(name).modes
    ]


@st.composite
def datapaths(draw, accumulators=ACCUMULATORS) -> Datapath:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    block = pick(1, 2, 4, 8, 16, 16, 32, 32, 12, 40, 100, None)
    mode = draw(st.sampled_from((*["toward_zero"] * 6, *MODES)))
    scaled = pick(False, False, False, True) and block in (16, 32)
    group = pick(1, 1, 2, 4, 8) if scaled else 1
    return Datapath(
        block=block,
        fraction_bits=pick(25, 25, 24, 13, 13, 10, 5, 0, 35, None),
        term_rounding=draw(st.sampled_from((*["toward_zero"] * 5, *TERM_ROUNDINGS))),
        rounding=Rounding(mode=mode, **draw(st.sampled_from(RANDOM_BITS))) if mode == "stochastic" else mode,
        accumulator=pick(*accumulators),
        min_exponent=pick(None, None, -133, -21, -10),
        promote_every=pick(None, None, None, 80, 320) if block != 100 else None,
        paired=block is not None and group == 1 and block in (2, 4, 8, 16, 32, 40) and pick(False, False, False, True),
        operand=pick(None, None, None, "fp16"),
        signed_zero=pick(False, False, False, True),
        group=group,
        scale=pick("e8m0", "ue4m3") if scaled else None,
        scale_block=pick(16, 32) if scaled else 0,
    )  # fmt: skip


@st.composite
def plans(draw, every: int | None, floats: bool = True) -> GemmPlan:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    partial = pick(None, None, "bf16", "fp16") if floats else None
    k_tile = pick(None, 16, 20, 32, 10)
    if k_tile is None:
        promote = pick(None, every or 24)
        scaled = floats and promote is not None and pick(False, True)
        return GemmPlan(promote_every=promote, scaled_promotion=scaled, successive_scales=scaled and pick(False, True))
    owner = pick("contiguous", "even", "interleaved")
    reduce = pick("serial", "pairwise", *(["neighbours", "in_place"] if floats else []))
    return GemmPlan(
        k_tile=k_tile,
        split=pick(1, 2, 3, 5, 7),
        owner=owner,
        part_k=pick(None, None, 30) if owner == "contiguous" else None,
        residue_first=pick(False, False, True),
        instruction_k=pick(None, None, 8),
        promote_every=pick(None, None, every or 24),
        reduce=reduce,
        partial=partial,
        round_trip=partial is not None and reduce != "in_place" and pick(False, True),
    )


@st.composite
def products(draw, accumulators=ACCUMULATORS):
    try:
        unit = draw(datapaths(accumulators))
    except ArgumentError:  # a promotion that cuts windows
        unit = Datapath()
    plan = draw(plans(unit.promote_every))
    names = ("e4m3", "e5m2", "bf16", "fp16", "tf32", "fp32", "e2m1", "e3m2")
    a = draw(st.sampled_from(names))
    b = draw(st.sampled_from((a, a, *names)))
    m, n, k = draw(st.sampled_from([(1, 1, 100), (2, 3, 64), (5, 1, 33), (1, 66, 16), (3, 2, 1), (2, 1, 130)]))
    kinds = tuple(draw(st.sampled_from(KINDS)) for _ in "ab")
    return gemm_spec(unit, a, b, plan), (m, n, k), kinds, draw(st.integers(0, 999)), draw(st.booleans())


@st.composite
def other_units(draw, kind: str):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    if kind == "chains":
        every = pick(None, None, 16)
        return replace(FMA32, promote_every=every, promotion=pick(None, "fp32"))
    if kind == "doubles":
        return replace(FMA64, promote_every=pick(None, None, 16))
    if kind == "two_stage":
        parity, block = pick(False, True), pick(2, 4, 8, 16)
        return TwoStageDatapath(block=block, parity=parity, fraction_bits=pick(24, 24, 10), sum_bits=pick(31, 31, 12))
    if kind == "pairwise":
        fused = FmaDatapath(block=pick(2, 4, 32), parity=pick(False, True))
        return pick(PairwiseDatapath(block=pick(1, 2, 4, 8)), fused)
    bits = pick(32, 32, 24, 16)
    return IntegerDatapath(accumulator_bits=bits, saturate=pick(True, True, False), block=pick(32, 4, 300, 1))


@st.composite
def other_products(draw, kind: str):
    unit = draw(other_units(kind))
    plan = draw(plans(getattr(unit, "promote_every", None), floats=kind != "integers"))
    a, b = (draw(st.sampled_from(NAMES[kind])) for _ in "ab")
    shape = draw(st.sampled_from([(1, 1, 100), (2, 3, 64), (5, 1, 33), (1, 66, 16), (3, 2, 1), (2, 1, 290)]))
    small = kind == "doubles" and plan.partial is not None  # larger sums: see the test of the CPU engine that fails
    kinds = tuple(draw(st.sampled_from(("normal", "narrow", "sparse") if small else KINDS)) for _ in "ab")
    return gemm_spec(unit, a, b, plan), shape, kinds, draw(st.integers(0, 999)), draw(st.booleans())


def left_to_torch(spec) -> bool:
    """Return True for what CUDA kernels leave to torch operations: fused units, saturating sums, sums of neighbours."""
    unit = spec.datapath
    saturates = isinstance(unit, Datapath) and unit.accumulator.default_overflow == "saturate"
    return isinstance(unit, FmaDatapath) or saturates or spec.plan.reduce == "neighbours"


def check_mode(mode) -> None:
    """Check a mode of the catalogue with numbers of every kind, formats in all pairs and blocks that end anywhere."""
    rng = random.Random(str(mode.evidence))
    formats = mode.inputs or ("bf16", "fp32", "fp16")
    block = mode.datapath.block or 16
    for i, kind in enumerate(KINDS):
        a, b = formats[i % len(formats)], formats[(i + i // len(formats)) % len(formats)]
        spec = gemm_spec(mode.datapath, a, b)
        if a == "fp64" or spec.a.mantissa_bits + spec.b.mantissa_bits > 48:
            kind = {"wide": "narrow"}.get(kind, kind)
        k = rng.choice([1, block - 1, block, block + 1, 2 * block + 3]) or 1
        if not supports_gemm(spec, operand(a, 1, k, "normal", 0), operand(b, 1, k, "normal", 0)):
            assert "fp64" in (a, b, mode.accumulate) or left_to_torch(spec)
            continue
        check_kinds(spec, (2, 3, k), (kind, rng.choice([kind, "normal"])), seed=i, with_c=i % 3 == 2)


def check_drawn(case) -> None:
    """Check a product that a strategy drew; what an engine leaves to another has a reason."""
    spec, shape, kinds, seed, with_c = case
    m, n, k = shape
    if not supports_gemm(spec, operand(spec.a.name, m, k, "normal", 0), operand(spec.b.name, n, k, "normal", 0)):
        assert isinstance(spec.datapath, Datapath) or "fp64" in (spec.a.name, spec.b.name) or left_to_torch(spec)
        return
    try:
        check_kinds(spec, shape, kinds, seed, with_c)
    except ArgumentError as error:  # the oracle refuses a group or a chain with two scales
        assert "two scales" in str(error)
