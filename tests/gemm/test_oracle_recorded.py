"""The oracle of matrix products against recorded hardware: dot products of eight GPUs, probes and calls of an H200."""

import json
import random
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy
import pytest

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.oracle import epilogue_oracle, gemm_oracle
from fmtsim.rounding.oracle import round_value
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from tests.support.recorded import GOLDEN, VECTORS, needs_golden, needs_vectors

FP16, FP32 = get_format("fp16"), get_format("fp32")
E8M13 = FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13)
STORED = {  # format: the numpy type of its codes
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "fp16": numpy.float16, "bf16": ml_dtypes.bfloat16,
    "tf32": numpy.float32, "fp32": numpy.float32, "int8": numpy.int8, "int32": numpy.int32,
}  # fmt: skip
NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "fp16": 0x7FFF, "bf16": 0x7FFF, "fp32": 0x7FFFFFFF}

# Units, from the same published facts as the catalogue, typed a second time.


def _unit(block: int, fraction_bits: int, accumulate: str, clamps: tuple[int | None, int | None]) -> Datapath:
    """Return a unit that rounds to float32 toward zero or to binary16 to nearest, each with its clamp."""
    if accumulate == "fp16":
        return Datapath(
            block=block, fraction_bits=fraction_bits, rounding="nearest_even", accumulator=FP16, min_exponent=clamps[1]
        )  # type: ignore[arg-type]
    return Datapath(block=block, fraction_bits=fraction_bits, min_exponent=clamps[0])


def _fp8_unit(block: int, accumulate: str) -> Datapath:
    unit = _unit(block, 13, accumulate, (None, None))
    return unit if accumulate == "fp16" else replace(unit, accumulator=E8M13)


HOPPER_CLAMPS, AMPERE_CLAMPS = (-133, -21), (-132, -20)
AMPERE = ("A100", "A2", "L40S", "Ada")


def recorded_unit(gpu: str, operand: str, accumulate: str) -> Datapath:
    """Return the unit behind one set of recorded dot products."""
    if gpu == "V100":
        return _unit(4, 23, accumulate, (None, -19))
    if operand in ("e4m3", "e5m2"):
        if gpu in AMPERE:
            return _fp8_unit(16, accumulate)
        if gpu != "B200" and accumulate == "fp32":
            return _fp8_unit(32, accumulate)  # wgmma
        return replace(_unit(16, 25, accumulate, HOPPER_CLAMPS), paired=True, operand=FP16, promote_every=32)
    if gpu in AMPERE:
        return _unit(4 if operand == "tf32" else 8, 24, accumulate, AMPERE_CLAMPS)
    return _unit(8 if operand == "tf32" else 16, 25, accumulate, HOPPER_CLAMPS)


def values(codes: numpy.ndarray, fmt: str) -> list:
    """Return the values of codes as nested lists of Python numbers."""
    return codes.view(STORED[fmt]).astype(numpy.int64 if fmt.startswith("int") else numpy.float64).tolist()


def code(value: float, fmt: str) -> int:
    """Return the bits of a value that lies on a format, NaN as the one of docs/matmul.md."""
    if value != value:
        return NAN[fmt]
    stored = numpy.array(value, dtype=STORED[fmt])
    return int(stored.view(f"u{stored.itemsize}"))


def dots(unit: Datapath, operand: str, out: str, a: list, b: list, c: list[float]) -> list[int]:
    """Return the bits of one dot product a row."""
    fmt = get_format(operand)
    assert isinstance(fmt, FloatFormat)
    spec = GemmSpec(datapath=unit, plan=GemmPlan(), a=fmt, b=fmt)
    return [code(gemm_oracle([x], [y], spec, c=[[z]])[0][0], out) for x, y, z in zip(a, b, c, strict=True)]


def mismatches(got: list[int], recorded: numpy.ndarray) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(got, recorded.tolist(), strict=True)) if x != y]


# Dot products.

VECTOR_SETS = sorted(p.stem[4:] for p in VECTORS.glob("mtc_*.npz"))


@cache
def _vectors(name: str) -> dict[str, numpy.ndarray]:
    with numpy.load(VECTORS / f"mtc_{name}.npz") as archive:
        return {key: archive[key] for key in ("a", "b", "c", "d")}


def replay(name: str, rows: slice, unit: Datapath | None = None) -> list[int]:
    """Return the places where a set of recorded dot products differs from the oracle."""
    gpu, operand, out = name.split("_")
    operand = operand.lower()
    data = {key: array[rows] for key, array in _vectors(name).items()}
    a, b = data["a"], data["b"]
    if operand == "tf32":  # instructions ignore the low 13 bits of their operands
        a, b = a & ~numpy.uint32(0x1FFF), b & ~numpy.uint32(0x1FFF)
    c = values(data["c"], "fp32")
    if unit is None:
        unit = recorded_unit(gpu, operand, out)
    if unit.block == 32:
        c = [0.0] * len(c)  # wgmma was recorded without an addend
    if out == "fp16":
        c = [round_value(x, FP16) for x in c]
    return mismatches(dots(unit, operand, out, values(a, operand), values(b, operand), c), data["d"])


@needs_vectors
@pytest.mark.parametrize("name", VECTOR_SETS)
def test_first_dot_products(name):
    assert replay(name, slice(40)) == []


@needs_vectors
@pytest.mark.slow
@pytest.mark.parametrize("name", VECTOR_SETS)
def test_all_dot_products(name):
    assert len(_vectors(name)["d"]) == 5000
    assert replay(name, slice(None)) == []


@needs_vectors
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("A100_fp16_fp32", {"fraction_bits": 23}),
        ("H200_bf16_fp32", {"fraction_bits": 24}),
        ("H200_bf16_fp32", {"block": 8}),
        ("H200_bf16_fp32", {"rounding": "nearest_even"}),
        ("H200_bf16_fp32", {"term_rounding": "down"}),
        ("H100_E4M3_fp32", {"fraction_bits": 14}),
        ("H200_E4M3_fp16", {"paired": False}),
        ("H200_E4M3_fp16", {"promote_every": None}),
        ("V100_fp16_fp16", {"block": 2}),
    ],
)
def test_a_wrong_unit_is_seen(name, wrong):
    unit = replace(recorded_unit(name.split("_")[0], *(s.lower() for s in name.split("_")[1:])), **wrong)
    assert replay(name, slice(200), unit) != []


# Probes of the clamp and of special values.

PROBES = {  # file: clamp that the H200 confirmed
    "minexp_bf16_fp32": -133,
    "minexp_fp16_fp16": -21,
    "minexp_tf32_fp32": -133,
    "special_bf16_fp32": -133,
}


def probe(name: str, clamp: int) -> list[int]:
    """Return the places where a probe differs from what the H200 confirmed."""
    _, operand, out = name.split("_")
    with numpy.load(GOLDEN / f"probe_{name}.npz") as archive:
        data = {key: archive[key] for key in ("a", "b", "c", f"expect_Hopper_clamp{PROBES[name]}")}
    a, b, c, expected = data.values()
    unit = replace(recorded_unit("H200", operand, out), min_exponent=clamp)
    return mismatches(dots(unit, operand, out, values(a, operand), values(b, operand), values(c, out)), expected)


@needs_golden
@pytest.mark.parametrize("name", PROBES)
def test_probes(name):
    assert probe(name, PROBES[name]) == []


@needs_golden
@pytest.mark.parametrize("name", [name for name in PROBES if name.startswith("minexp")])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_wrong_clamp_is_seen(name, off):
    assert probe(name, PROBES[name] + off) != []


# Calls of a library.

SPLITS = {  # (operand, M, N, K, fast or fp16 accumulation): the order of sums; all others are one chain
    ("float8_e4m3fn", 64, 64, 16384, True): GemmPlan(k_tile=128, split=6),
    ("float8_e4m3fn", 16, 256, 8192, True): GemmPlan(k_tile=128, split=3),
    ("bfloat16", 48, 48, 8192, False): GemmPlan(k_tile=64, split=6),
    ("bfloat16", 64, 64, 4096, False): GemmPlan(k_tile=64, split=3),
    ("float16", 64, 64, 4096, False): GemmPlan(k_tile=64, split=3),
    ("bfloat16", 100, 60, 300, False): GemmPlan(k_tile=128, residue_first=True),
    ("float16", 100, 60, 300, False): GemmPlan(k_tile=128, residue_first=True),
    ("float16", 33, 65, 129, False): GemmPlan(k_tile=64, residue_first=True),
    ("bfloat16", 33, 65, 129, False): GemmPlan(k_tile=16, split=9, instruction_k=8),
    ("float16", 64, 64, 16, True): GemmPlan(k_tile=8, split=2, partial=FP16, round_trip=True),
    ("float16", 64, 64, 256, True): GemmPlan(k_tile=64, split=4, partial=FP16, round_trip=True),
    ("float16", 128, 96, 1024, True): GemmPlan(k_tile=64, split=16, partial=FP16, round_trip=True),
    ("float32", 64, 64, 64, False): GemmPlan(k_tile=32, split=2),
    ("float32", 128, 96, 512, False): GemmPlan(k_tile=32, split=8),
}
UNEXPLAINED = [("tf32", 7)]  # 160 x 128 x 680: split in a way that no plan was found for
FORMATS = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32",
    "int8": "int8", "int32": "int32",
}  # fmt: skip


def call_spec(call: dict) -> GemmSpec:
    """Return unit and plan of one recorded call."""
    a, b = (FORMATS[call[key]] for key in ("a", "b"))
    if call["call"] == "int_mm":
        return GemmSpec(datapath=IntegerDatapath(), plan=GemmPlan(), a=get_format(a), b=get_format(b))  # type: ignore[arg-type]
    fast = call.get("use_fast_accum", False) or call.get("fp16_accumulation", False)
    plan = SPLITS.get((call["a"], call["M"], call["N"], call["K"], fast), GemmPlan())
    if call["call"] == "scaled_mm":
        unit = _fp8_unit(32, "fp32")
        plan = plan if fast else replace(plan, promote_every=128)
    else:
        a, b = ("tf32", "tf32") if call.get("tf32") else (a, b)
        unit = _unit(8 if a == "tf32" else 16, 25, "fp16" if fast else "fp32", HOPPER_CLAMPS)
    return GemmSpec(datapath=unit, plan=plan, a=get_format(a), b=get_format(b))  # type: ignore[arg-type]


@cache
def golden(name: str) -> list[tuple[dict, dict[str, numpy.ndarray]]]:
    """Return the calls of one recording with their arrays."""
    if not GOLDEN.is_dir():
        return []
    with numpy.load(GOLDEN / f"h200_{name}.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    calls = json.loads(str(arrays.pop("meta")))
    return [
        (call, {key[4:]: array for key, array in arrays.items() if key.startswith(f"{i:03d}.")})
        for i, call in enumerate(calls)
    ]


def call_outputs(
    call: dict, data: dict, places: list[tuple[int, int]], spec: GemmSpec, rule: str = "scale"
) -> list[int]:
    """Return the bits that the oracle gives for some outputs (m, n) of a call."""
    a, b = FORMATS[call["a"]], FORMATS[call["b"]]
    out = FORMATS[call["out"]]
    got = []
    for m, n in places:
        rows = [values(data[key][i : i + 1], fmt) for key, i, fmt in (("a", m, a), ("b", n, b))]
        if call.get("tf32"):
            rows = [[[round_value(x, spec.a) for x in row] for row in matrix] for matrix in rows]
        y = gemm_oracle(*rows, spec)[0][0]
        got.append(code(y if out == "int32" else finished(y, call, data, m, n, rule), out))
    return got


def finished(y: float, call: dict, data: dict, m: int, n: int, rule: str) -> float:
    """Return the sum of output (m, n) after the call's epilogue."""
    scales = bias = None
    if "scale_a" in data:
        row, column = values(data["scale_a"].reshape(-1), "fp32"), values(data["scale_b"].reshape(-1), "fp32")
        scales = (row[m % len(row)], column[n % len(column)])
    if "bias" in data:
        bias = values(data["bias"], FORMATS[call.get("bias_dtype", call["out"])])[n]
    out = get_format(FORMATS[call["out"]])
    return epilogue_oracle(y, out, rule=rule, scales=scales, bias=bias)  # type: ignore[arg-type]


def sample(call: dict, outputs: int, seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(call["M"]), draw.randrange(call["N"])) for _ in range(outputs)]


def check_call(name: str, index: int, outputs: int) -> None:
    call, data = golden(name)[index]
    places = sample(call, outputs, seed=index)
    rule = "column_row" if call["kind"] == "rowwise" else "scale"
    got = call_outputs(call, data, places, call_spec(call), rule)
    recorded = numpy.array([data["out"][place] for place in places])
    wrong = mismatches(got, recorded)
    assert wrong == [], [(places[i], hex(got[i]), hex(recorded[i])) for i in wrong]


CALLS = [(name, i) for name in ("fp8", "f16", "tf32") for i in range(len(golden(name))) if (name, i) not in UNEXPLAINED]


@needs_golden
@pytest.mark.parametrize(("name", "index"), CALLS)
def test_a_few_outputs_of_recorded_calls(name, index):
    check_call(name, index, 3)


@needs_golden
@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), CALLS)
def test_more_outputs_of_recorded_calls(name, index):
    check_call(name, index, 24)


@needs_golden
def test_special_values_of_recorded_calls():
    """Rows 1 to 4 of these operands hold NaN, Inf and zeros, and columns of the same numbers."""
    kinds = {"NaN": 0, "zero": 0}
    for name, index in CALLS:
        call, data = golden(name)[index]
        if call["kind"] != "special":
            continue
        places = [(m, n) for m in range(6) for n in range(6)]
        got = call_outputs(call, data, places, call_spec(call))
        assert mismatches(got, numpy.array([data["out"][place] for place in places])) == []
        kinds["NaN"] += got.count(NAN[FORMATS[call["out"]]])
        kinds["zero"] += got.count(0)
    assert kinds["NaN"] > 100 and kinds["zero"] > 20


@needs_golden
def test_the_scale_of_the_column_comes_first():
    """The one recorded output among 28,672 that tells the orders of row-wise scales apart: bfloat16(62, 35)."""
    call, data = golden("fp8")[37]
    place, recorded = [(62, 35)], data["out"][62:63, 35]
    spec = call_spec(call)
    assert mismatches(call_outputs(call, data, place, spec, "column_row"), recorded) == []
    assert mismatches(call_outputs(call, data, place, spec, "row_column"), recorded) == [0]
    assert mismatches(call_outputs(call, data, place, spec, "scale"), recorded) == [0]


@needs_golden
@pytest.mark.parametrize(
    ("name", "index", "wrong"),
    [
        ("fp8", 32, {"split": 5}),
        ("fp8", 32, {"k_tile": 64, "split": 7}),
        ("fp8", 34, {"promote_every": 64}),
        ("fp8", 34, {"promote_every": None}),
        ("f16", 28, {"owner": "interleaved"}),
        ("f16", 28, {"split": 2}),
        ("f16", 28, {"reduce": "pairwise"}),
        ("f16", 28, {"partial": get_format("bf16")}),
        ("f16", 30, {"residue_first": False}),
        ("f16", 31, {"instruction_k": None}),
        ("f16", 62, {"partial": None, "round_trip": False}),
        ("tf32", 5, {"split": 4}),
    ],
)
def test_a_wrong_order_is_seen(name, index, wrong):
    call, data = golden(name)[index]
    spec = call_spec(call)
    spec = replace(spec, plan=replace(spec.plan, **wrong))

    def differs(place):
        return mismatches(call_outputs(call, data, [place], spec), numpy.array([data["out"][place]])) != []

    assert any(map(differs, sample(call, 6, seed=index)))  # the first one ends the search
