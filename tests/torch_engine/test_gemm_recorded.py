"""The torch engine's products against recorded hardware: dot products of many GPUs, whole calls of an H200."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.torch_engine import gemm
from fmtsim.torch_engine.carry import NEAREST
from fmtsim.torch_engine.floats import convert
from fmtsim.torch_engine.gemm_operands import Rows, exact
from fmtsim.torch_engine.gemm_round import round_value
from fmtsim.torch_engine.gemm_sums import Summation, unit_of
from fmtsim.torch_engine.reals import narrow
from fmtsim.torch_engine.storage import LAYOUTS

SHARED = Path(__file__).parents[3] / "shared"
needs_vectors = pytest.mark.skipif(not (SHARED / "vectors").is_dir(), reason="no recorded vectors beside the project")
needs_golden = pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason="no recorded calls beside the project")

FP16, FP32, TF32 = get_format("fp16"), get_format("fp32"), get_format("tf32")
NEAREST_EVEN = Rounding(mode="nearest_even")
E8M13 = FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13)
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
}
NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "fp16", "bfloat16": "bf16"}


pytestmark = pytest.mark.usefixtures("one_thread")


def tensor(codes: numpy.ndarray, dtype: torch.dtype) -> torch.Tensor:
    signed = {1: numpy.uint8, 2: numpy.int16, 4: numpy.int32}[codes.dtype.itemsize]
    return torch.from_numpy(codes.view(signed).copy()).view(dtype)


def fp8_pair(accumulator: FloatFormat) -> Datapath:
    """Return mma.sync of FP8 on Hopper and B200: two steps of the 16-bit unit, the addend last."""
    unit = Datapath(block=16, accumulator=accumulator, operand=FP16, paired=True, promote_every=32)
    return unit if accumulator == FP32 else replace(unit, rounding=NEAREST_EVEN, min_exponent=-21)


def vector_unit(gpu: str, operand: str, out: str) -> Datapath:
    accumulator = FP16 if out == "fp16" else FP32
    hopper = gpu in ("H100", "H200", "B200")
    if operand in ("E4M3", "E5M2"):
        if gpu in ("H100", "H200") and out == "fp32":
            return Datapath(block=32, fraction_bits=13, accumulator=E8M13)
        if hopper:
            return fp8_pair(accumulator)
        unit = Datapath(block=16, fraction_bits=13, accumulator=E8M13)
    else:
        block = {"V100": 4}.get(gpu, 16 if hopper else 8)
        bits = 23 if gpu == "V100" else 25 if hopper else 24
        unit = Datapath(block=block // 2 if operand == "tf32" else block, fraction_bits=bits)
    return replace(unit, accumulator=FP16, rounding=NEAREST_EVEN) if out == "fp16" else unit


def dot_products(file: Path, unit: Datapath) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the engine's and the recorded bits of a file's dot products."""
    data = numpy.load(file)
    _, gpu, operand, out = file.stem.split("_")
    fmt, dtype = get_format(operand.lower()), DTYPES[operand.lower()]
    a, b = (tensor(data[side], dtype).t() for side in "ab")
    if operand == "tf32":  # the unit ignores the low bits of the word
        a, b = ((x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
    c = exact(tensor(data["c"], torch.float32))
    c = round_value(c, FP16) if out == "fp16" else c
    if gpu in ("H100", "H200") and out == "fp32" and operand in ("E4M3", "E5M2"):
        c = torch.zeros_like(c)
    spec = GemmSpec(datapath=unit, plan=GemmPlan(), a=fmt, b=fmt)
    sums = Summation(spec, unit_of(spec, a.shape[0]), a.shape[0])(Rows(a, b), c, lambda block: None)
    result = narrow(sums, torch.float16 if out == "fp16" else torch.float32)
    return result.view(torch.int16 if out == "fp16" else torch.int32), tensor(data["d"], result.dtype).view(
        torch.int16 if out == "fp16" else torch.int32
    )


FILES = sorted((SHARED / "vectors").glob("mtc_*.npz")) if (SHARED / "vectors").is_dir() else []


@needs_vectors
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_dot_products_of_other_gpus(file):
    got, recorded = dot_products(file, vector_unit(*file.stem.split("_")[1:]))
    assert len(got) == 5000
    assert torch.equal(got, recorded)


@needs_vectors
def test_a_wrong_unit_is_seen():
    file = SHARED / "vectors" / "mtc_H200_bf16_fp32.npz"
    for wrong in (Datapath(fraction_bits=24), Datapath(block=8), Datapath(rounding=NEAREST_EVEN)):
        got, recorded = dot_products(file, wrong)
        assert not torch.equal(got, recorded)


@needs_golden
@pytest.mark.parametrize("operand, out, bound", [("bf16", "fp32", -133), ("tf32", "fp32", -133), ("fp16", "fp16", -21)])
def test_the_lower_bound_of_the_alignment(operand, out, bound):
    """The probes hold what each bound predicts; the H200 gave the results of these bounds, but for one of tf32."""
    data = numpy.load(SHARED / "golden" / f"probe_minexp_{operand}_{out}.npz")
    dtype = torch.float16 if out == "fp16" else torch.float32
    unit = Datapath(block=data["a"].shape[1], min_exponent=bound)
    if out == "fp16":
        unit = replace(unit, accumulator=FP16, rounding=NEAREST_EVEN)
    a, b = (tensor(data[side], DTYPES[operand]).t() for side in "ab")
    spec = GemmSpec(datapath=unit, plan=GemmPlan(), a=get_format(operand), b=get_format(operand))
    summation = Summation(spec, unit_of(spec, len(a)), len(a))
    got = narrow(summation(Rows(a, b, finite=False), exact(tensor(data["c"], dtype)), lambda block: None), dtype)
    keys = [key for key in data.files if key.startswith("expect_Hopper")]
    equal = {key: torch.equal(exact(got), exact(tensor(data[key], dtype))) for key in keys}
    assert [key for key in keys if equal[key]] == [f"expect_Hopper_clamp{bound}"], equal


def golden_calls(name: str) -> list[tuple[dict, dict[str, numpy.ndarray]]]:
    path = SHARED / "golden" / f"h200_{name}.npz"
    if not path.is_file():
        return []
    data = numpy.load(path)
    calls = json.loads(str(data["meta"]))
    keys = ("a", "b", "out", "scale_a", "scale_b", "bias")
    return [(c, {k: data[f"{i:03d}.{k}"] for k in keys if f"{i:03d}.{k}" in data.files}) for i, c in enumerate(calls)]


def call_plan(call: dict) -> GemmPlan:
    """Return the order that was found for a recorded call."""
    shape = (call["M"], call["N"], call["K"])
    if call["call"] == "scaled_mm":
        splits = {(64, 64, 16384): 6, (16, 256, 8192): 3}
        split = splits.get(shape, 1) if call["use_fast_accum"] else 1
        every = None if call["use_fast_accum"] else 128
        return GemmPlan(k_tile=128, split=split, promote_every=every)
    if shape == (160, 128, 680):
        return GemmPlan(k_tile=32, part_k=68, split=10, residue_first=True)
    if call.get("tf32"):
        return GemmPlan(k_tile=32, split={(64, 64, 64): 2, (128, 96, 512): 8}.get(shape, 1))
    if call.get("fp16_accumulation"):
        if shape[2] == 16:
            return GemmPlan(k_tile=8, split=2, partial=FP16, round_trip=True)
        return GemmPlan(k_tile=64, split=shape[2] // 64, partial=FP16, round_trip=True)
    if shape == (100, 60, 300):
        return GemmPlan(k_tile=128, residue_first=True)
    if shape == (33, 65, 129):
        if call["a"] == "float16":
            return GemmPlan(k_tile=64, residue_first=True)
        return GemmPlan(k_tile=16, split=9, instruction_k=8)
    return GemmPlan(k_tile=64, split={(64, 64, 4096): 3, (48, 48, 8192): 6}.get(shape, 1))


def call_unit(call: dict) -> Datapath | IntegerDatapath:
    if call["call"] == "scaled_mm":
        return Datapath(block=32, fraction_bits=13, accumulator=E8M13)
    if call["call"] == "int_mm":
        return IntegerDatapath()
    if call.get("fp16_accumulation"):
        return Datapath(accumulator=FP16, rounding=NEAREST_EVEN, min_exponent=-21)
    return Datapath(block=8 if call.get("tf32") else 16, min_exponent=-133)


def operand_of(call: dict, side: str, codes: numpy.ndarray) -> tuple[torch.Tensor, FloatFormat]:
    if call["call"] == "int_mm":
        return torch.from_numpy(codes.view(numpy.int8).copy()), get_format("int8_full")
    name = "tf32" if call.get("tf32") else NAMES[call[side]]
    x = tensor(codes, DTYPES[name])
    return (narrow(round_value(exact(x), TF32), torch.float32) if name == "tf32" else x), get_format(name)


def finished(y: torch.Tensor, call: dict, data: dict[str, numpy.ndarray]) -> torch.Tensor:
    """Apply the epilogue of the call, in float32, and return the bits of its output."""
    if "scale_a" in data:
        sa, sb = (torch.from_numpy(data[f"scale_{s}"].view(numpy.float32).copy()) for s in "ab")
        y = y * (sa * sb) if sa.numel() == 1 else (y * sb.view(1, -1)) * sa.view(-1, 1)
        y = torch.where(y == 0, 0.0, y)
    if "bias" in data:
        y = y + tensor(data["bias"], getattr(torch, call["bias_dtype"])).float()
    out = getattr(torch, call["out"])
    if out == torch.float8_e4m3fn:
        return convert(y.view(torch.int32), LAYOUTS[torch.float32], get_format("e4m3"), NEAREST, "saturate") & 0xFF
    return y.to(out).view({2: torch.int16, 4: torch.int32}[out.itemsize])


def run_call(call: dict, data: dict[str, numpy.ndarray], plan: GemmPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the engine's and the recorded bits of a call; every NaN counts as the same."""
    (a, fa), (b, fb) = operand_of(call, "a", data["a"]), operand_of(call, "b", data["b"])
    spec = GemmSpec(datapath=call_unit(call), plan=plan, a=fa, b=fb)
    out = torch.empty(call["M"], call["N"], dtype=torch.int32 if call["call"] == "int_mm" else torch.float32)
    gemm(a, b, None, None, None, spec, None, out)
    recorded = torch.from_numpy(data["out"].view(f"i{data['out'].dtype.itemsize}").copy())
    if call["call"] == "int_mm":
        return out, recorded
    bits = finished(out, call, data)
    if call["out"] == "float8_e4m3fn":
        recorded = recorded.to(torch.int32) & 0xFF
        return torch.where((bits & 0x7F) == 0x7F, 0x7F, bits), recorded
    nan = torch.isnan(bits.view(getattr(torch, call["out"])))
    return torch.where(nan, 0x7FFFFFFF if call["out"] == "float32" else 0x7FFF, bits).to(recorded.dtype), recorded


QUICK = 24e6  # products of a call that the default run takes


def _marked() -> list:
    marked = []
    for name in ("fp8", "f16", "tf32"):
        for i, (call, _) in enumerate(golden_calls(name)):
            size = call["M"] * call["N"] * call["K"]
            marked.append(pytest.param(name, i, marks=pytest.mark.slow if size > QUICK else ()))
    return marked


@needs_golden
@pytest.mark.parametrize("name, index", _marked())
def test_whole_calls_of_an_h200(name, index):
    call, data = golden_calls(name)[index]
    got, recorded = run_call(call, data, call_plan(call))
    assert torch.equal(got, recorded), (call, int((got != recorded).sum()))
