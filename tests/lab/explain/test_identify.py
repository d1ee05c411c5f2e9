# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.identify``: the accumulation behind recorded results and plain loops, and results that nothing gave."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import fmtsim
from fmtsim.formats.interop import torch_dtype
from fmtsim.lab.cli.main import main
from fmtsim.lab.explain.candidates import Observed, candidates
from fmtsim.lab.explain.samples import deciding, part_of
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order
from fmtsim.support.errors import ArgumentError, DtypeError
from tests.support.operands import normal
from tests.support.recorded import GOLDEN, needs_golden
from tests.support.refusals import refused
from tests.support.settled import settled
from tools.calibrate.recordings import find_recordings, read_calls

DATA = Path(__file__).parents[2] / "gemm" / "data" / "h200"


def operands(m, n, k, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (k, n)))


def calls(folder):
    return [call for file in find_recordings(folder) if file.kind == "calls" for call in read_calls(file)]


def names_h200(call):
    """Return True if what h200's library chooses is among the explanations of a recorded call."""
    result = fmtsim.identify(
        call.a, call.b.t(), call.out, bias=call.bias, scale_a=call.scale_a, scale_b=call.scale_b, target="h200"
    )
    assert result.compared == call.out.numel()
    return any(book.startswith("h200 (") for one in result.explanations for book in one.books)


def test_recorded_calls_are_named():
    """Every thirteenth call of those in the project; all recorded calls are the next test's."""
    some = calls(DATA)[::13]
    assert [call.label for call in some if not names_h200(call)] == []
    assert len(some) == 5


@pytest.mark.slow
@needs_golden
def test_all_recorded_calls_are_named():
    every = calls(GOLDEN)
    assert [call.label for call in every if not names_h200(call)] == []
    assert len(every) == 117


def test_settled_calls_are_named():
    for meta, tensors in settled():
        if "scaling" in meta or tensors["a"].shape[1] > 4096:
            continue
        scales = {name: tensors.get(name) for name in ("bias", "scale_a", "scale_b")}
        result = fmtsim.identify(tensors["a"], tensors["b"].t(), tensors["out"], **scales, target="h200")
        assert any(book.startswith("h200 (") for one in result.explanations for book in one.books), meta


OWNERS = {"runs": "contiguous", "interleaved": "interleaved"}


def adds_as(explanation, plan):
    """Return True if an explanation adds in a plan's order, whatever it calls it."""
    return same_order(explanation.call.k, explanation.spec.datapath, explanation.plan, plan)


def fma_chain(a, b):
    """Return a b in float32, one fused multiply-add after another: products of bfloat16 are exact in float64."""
    y = numpy.zeros((a.shape[0], b.shape[1]), numpy.float32)
    for k in range(a.shape[1]):
        y = (y.astype(numpy.float64) + numpy.outer(a[:, k], b[k])).astype(numpy.float32)
    return y


def test_plain_loops_are_named():
    """Chains of float32, whole and in two and three parts that are added in order: arithmetic of numpy alone."""
    a, b = operands(12, 10, 96)
    x, w = a.double().numpy(), b.double().numpy()
    for parts, owner in ((1, "runs"), (2, "runs"), (3, "runs"), (2, "interleaved")):
        shares = [range(s * 96 // parts, (s + 1) * 96 // parts) for s in range(parts)]
        if owner == "interleaved":
            shares = [[k for k in range(96) if k // 32 % 2 == s] for s in range(2)]
        y = fma_chain(x[:, shares[0]], w[shares[0]])
        for share in shares[1:]:
            y = y + fma_chain(x[:, share], w[share])
        result = fmtsim.identify(a, b, torch.from_numpy(y))
        plan = GemmPlan(k_tile=96 // parts if owner == "runs" else 32, split=parts, owner=OWNERS[owner])
        assert [adds_as(one, plan) for one in result.explanations if "fp32_fma" in one.units] == [True]


@pytest.mark.parametrize(
    ("unit", "dtype", "out", "plan"),
    [
        ("hopper.wgmma", torch.bfloat16, torch.float32, GemmPlan(k_tile=32, split=4, owner="interleaved")),
        ("hopper.wgmma", torch.bfloat16, torch.float32, GemmPlan(k_tile=64, split=4, reduce="pairwise")),
        ("ampere.mma", torch.float16, torch.float32, GemmPlan(promote_every=64)),
        ("ampere.mma", torch.float16, torch.float16, GemmPlan(k_tile=32, split=3, partial="fp16")),
        ("hopper.wgmma", torch.float8_e4m3fn, torch.float32, GemmPlan(promote_every=64)),
        ("fp32_fma", torch.float32, torch.float32, GemmPlan(k_tile=32, lanes=32, lane_reduce="tree")),
    ],
)  # fmt: skip
def test_a_plan_is_named_and_gives_the_bits(unit, dtype, out, plan):
    a, b = operands(48, 40, 256, dtype)
    y = fmtsim.mm(a, b, target=unit, plan=plan, out_dtype=out)
    result = fmtsim.identify(a, b, y, target=None if plan.owner == "interleaved" else unit)
    assert any(unit in one.units and adds_as(one, plan) for one in result.explanations)
    for one in result.explanations:
        assert fmtsim.compare(fmtsim.mm(a, b, **one.options), y).equal


@pytest.mark.parametrize(
    ("dtype", "plan"),
    [
        (torch.bfloat16, GemmPlan(k_tile=64, split=4, partial="bf16")),
        (torch.float16, GemmPlan(k_tile=32, split=8, owner="interleaved", partial="fp16")),
        (torch.float8_e4m3fn, GemmPlan(k_tile=128, split=4, partial="fp16")),
    ],
)
def test_parts_that_are_rounded_are_found_on_any_unit(dtype, plan):
    """Orders are tried on one unit first: fewer explanations than all there are."""
    a, b = operands(64, 64, 512, dtype)
    y = fmtsim.mm(a, b, target="hopper.wgmma", plan=plan, out_dtype=torch_dtype(plan.partial))
    result = fmtsim.identify(a, b, y)
    assert any("hopper.wgmma" in one.units and one.plan.partial and adds_as(one, plan) for one in result.explanations)
    assert result.tried < 0.85 * len(candidates(result.product))


TRITON = numpy.load(Path(__file__).with_name("data") / "h200_triton.npz")
RUNS_OF_512, EVERY_4TH = GemmPlan(k_tile=64, split=2), GemmPlan(k_tile=64, split=4, owner="interleaved")


@pytest.mark.parametrize(
    ("name", "dtype", "out", "unit", "plan", "tf32"),
    [
        ("bf16_s4_interleaved", torch.bfloat16, torch.bfloat16, "hopper.wgmma", EVERY_4TH, ""),
        ("f32_s4_interleaved", torch.bfloat16, torch.float32, "hopper.wgmma", EVERY_4TH, ""),
        ("f32_s2_runs", torch.bfloat16, torch.float32, "hopper.wgmma", RUNS_OF_512, ""),
        ("f32_s1", torch.bfloat16, torch.float32, "hopper.wgmma", GemmPlan(), ""),
        ("tf32_s4", torch.float32, torch.float32, "hopper.wgmma", replace(EVERY_4TH, k_tile=32), "toward_zero"),
        ("ieee_s1", torch.float32, torch.float32, "fp32_fma", GemmPlan(), ""),
        ("e4m3_s1", torch.float8_e4m3fn, torch.float32, "hopper.wgmma", GemmPlan(), ""),
        ("cublas_fp32", torch.float32, torch.float32, "fp32_fma", GemmPlan(k_tile=64, split=16), ""),
    ],
)
def test_kernels_of_triton_on_an_h200_are_named(name, dtype, out, unit, plan, tf32):
    """Kernels with and without split K (Triton 3.6, torch 2.11), the first 32 rows and columns of [128, 128] results.

    The kernels are those of docs/howto/identify.md, and torch.mm in float32.
    """
    a, b = operands(128, 128, 1024, torch.float32)
    digest = hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()
    assert digest == "dce02e02da56c18c29a262a316bf45fbfe564688cdb52f255f223aefdadfa3d5"
    a, b, y = a[:32].to(dtype), b[:, :32].to(dtype), torch.from_numpy(TRITON[name]).view(out)
    target = "h200" if name == "cublas_fp32" else unit
    result = fmtsim.identify(a, b, y, target=target)
    found = [one for one in result.explanations if unit in one.units and adds_as(one, plan) and one.tf32 == tf32]
    assert found and len(result.explanations) < (400 if out == torch.bfloat16 else 3)
    if name == "bf16_s4_interleaved":
        probe = result.probe()
        refined = result.refine(*probe, torch.from_numpy(TRITON[f"{name}_probe"]).view(out))
        assert [adds_as(one, plan) for one in refined.explanations] == [True]


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "nearest_away"])
def test_how_float32_became_tf32_is_named(rounding):
    a, b = operands(16, 16, 64, torch.float32)
    for middle in (a[0], b[:, 0]):  # of two values of TF32
        middle.view(torch.int32).bitwise_and_(~0x1FFF).bitwise_or_(0x1000)
    x, w = (fmtsim.quantize(t, "tf32", rounding=rounding, out_dtype=torch.float32) for t in (a, b))
    result = fmtsim.identify(a, b, fmtsim.mm(x, w, target="ampere.mma", allow="tf32"))
    assert [one.tf32 for one in result.explanations] == [rounding]
    assert f"operands to TF32 {rounding.replace('_', ' ')}" in result._repr_html_()


def test_scales_and_bias_are_named():
    a, b = operands(32, 24, 128, torch.float8_e4m3fn)
    alpha, one = torch.tensor(0.3), torch.tensor(1.0)
    y = fmtsim.scaled_mm(a, b, alpha, one, out_dtype=torch.float32, target="hopper.wgmma")
    assert not fmtsim.identify(a, b, y, target="hopper.wgmma").groups
    assert fmtsim.identify(a, b, y, scale_a=alpha, scale_b=one, target="hopper.wgmma").groups
    x, w = operands(64, 48, 64)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = fmtsim.linear(x, w.t().contiguous(), bias, target="h200", plan=GemmPlan(bias_after_rounding=True))
    found = fmtsim.identify(x, w.t().contiguous().t(), y, bias=bias).explanations
    assert found and all(one.plan.bias_after_rounding for one in found)


def test_a_result_that_went_through_16_bits_is_named():
    a, b = operands(64, 64, 256)
    y = fmtsim.mm(a, b, target="hopper.wgmma").float()
    assert {one.through for one in fmtsim.identify(a, b, y, target="hopper.wgmma").explanations} == {torch.bfloat16}


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_one_bit_leaves_no_explanation(out):
    a, b = operands(40, 56, 128)
    y = fmtsim.mm(a, b, target="hopper.wgmma", out_dtype=out)
    y.view({4: torch.int32, 2: torch.int16}[out.itemsize])[17, 30] ^= 1
    result = fmtsim.identify(a, b, y)
    assert result.groups == () and result.plans == ()
    assert (result.nearest.mismatches, result.nearest.compared) == (1, 40 * 56)
    assert result.nearest.first.index == (17, 30)
    assert abs(result.nearest.first.actual_code - result.nearest.first.expected_code) == 1
    assert "first difference at [17, 30]: actual 0x" in str(result) and "few results differ" in str(result)


def test_what_is_not_a_product_is_told_what_to_try():
    a, b = operands(16, 16, 64)
    y = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    result = fmtsim.identify(a, b, y)
    assert result.nearest.mismatches > 200
    for word in ("to try: bias=", "scale_a=", "thorough=True", "atomics", "stream-K"):
        assert word in str(result)


@pytest.mark.parametrize("value", [math.nan, 0.0, math.inf])
def test_a_result_of_one_value_is_told_as_such(value):
    a, b = operands(16, 16, 64)
    y = torch.full((16, 16), value)
    text = str(fmtsim.identify(a, b, y)).replace("\n", " ")
    assert f"every result is {value}, which no explanation gives: it was not written" in text and "atomics" not in text
    y[3, 4] = 1.0
    assert "atomics" in str(fmtsim.identify(a, b, y))


def test_operands_that_say_nothing_are_named_and_a_probe_says_more():
    a, b = operands(16, 16, 256)
    run = lambda x, w: fmtsim.mm(x, w, target="hopper.wgmma", plan=GemmPlan(k_tile=64, split=2))  # noqa: E731
    result = fmtsim.identify(a, b, run(a, b), target="hopper.wgmma")
    assert len(result.explanations) > 64 and "these operands say little" in str(result)
    lines = str(result).split("\n")  # the warning first, and few rows
    assert max(map(len, lines)) <= 100 and lines[4].startswith("these operands say little") and len(lines) < 40
    x, w = result.probe()
    assert (x.shape, w.shape, x.dtype, w.stride()) == (a.shape, b.shape, a.dtype, b.stride())
    refined = result.refine(x, w, run(x, w))
    assert refined.explanations and all(adds_as(one, GemmPlan(k_tile=64, split=2)) for one in refined.explanations)
    refused(r"M, N, K = \(8, 16, 256\), the first ones \(16, 16, 256\)", result.refine, x[:8], w, run(x[:8], w))


def test_groups_are_those_that_the_probe_tells_apart():
    a, b = operands(4, 8, 64)
    y = fmtsim.mm(a, b, target="hopper.wgmma")
    result = fmtsim.identify(a, b, y, target="h200")
    x, w = result.probe()
    bits = [{fmtsim.mm(x, w, **one.options).view(torch.int16).numpy().tobytes() for one in g} for g in result.groups]
    assert all(len(outputs) == 1 for outputs in bits)


@pytest.mark.parametrize("size", [(3, 5, 1), (4, 4, 32)])
def test_zeros_and_single_products_fit_everything(size):
    m, n, k = size
    a, b = (torch.zeros(m, k).bfloat16(), torch.zeros(k, n).bfloat16()) if k > 1 else operands(m, n, k)
    result = fmtsim.identify(a, b, fmtsim.mm(a, b, target="hopper.wgmma", out_dtype=torch.float32))
    families = {unit.split(".")[0] for one in result.explanations for unit in one.units}
    assert {"ampere", "hopper", "exact", "fp32_fma"} <= families


def test_results_that_are_not_finite_count_by_their_bits():
    a, b = operands(8, 8, 64)
    a[1, 3], a[2, 5] = torch.inf, torch.nan
    y = fmtsim.mm(a, b, target="hopper.wgmma", out_dtype=torch.float32)
    assert "hopper.wgmma" in fmtsim.identify(a, b, y).explanations[0].units
    y[2] = torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32)
    assert fmtsim.identify(a, b, y).nearest.first.hex[0] == "0x7FC00000"


def test_integers_have_no_order():
    a, b = (torch.full(size, 3, dtype=torch.int8) for size in ((4, 32), (32, 4)))
    y = fmtsim.int_mm(a, b)
    result = fmtsim.identify(a, b, y)
    assert "int8" in result.explanations[0].units
    refused(r"no probe for int8 x int8, whose sums are exact in every order", result.probe)
    assert fmtsim.identify(a, b, y + 1).nearest.mismatches == 16


A, B = torch.zeros(4, 8).bfloat16(), torch.zeros(8, 4).bfloat16()
Y = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((A, B, Y[:3]), {}, ArgumentError, r"y has shape \(3, 4\); the product of these a and b is \[4, 4\]"),
        ((A, B[:5], Y), {}, ArgumentError, r"K is 8 and 5"),
        ((A[:0], B, Y[:0]), {}, ArgumentError, r"M=0, N=4, K=8: nothing is multiplied"),
        ((A, B, Y.long()), {}, DtypeError, r"y has dtype torch.int64; pass the result as the kernel wrote it"),
        ((A, B, Y), {"target": "h20"}, ArgumentError, r"unknown target 'h20'; did you mean 'h200'"),
        ((A, B, Y), {"bias": torch.ones(3)}, ArgumentError, r"bias has 3 elements; y has 4 columns"),
        ((A, B, Y), {"bias": torch.ones(4, dtype=torch.uint8).view(torch.float8_e5m2)}, DtypeError,
         r"bias has dtype torch.float8_e5m2; pass it as the kernel added it: 16 bits, float32 or float64"),
        ((A, B, Y), {"scale_a": torch.tensor(2.0)}, ArgumentError, r"scale_a and scale_b belong together"),
        ((A, B, Y), {"scale_a": torch.tensor(2.0), "scale_b": 1.0}, DtypeError, r"scale_b is float, not a tensor"),
        ((A, B, Y.to("meta")), {}, ArgumentError, r"y has no numbers .it is fake, or on .* meta.; pass the"),
        ((FakeTensorMode().from_tensor(A), B, Y), {}, ArgumentError, r"a has no numbers .it is fake"),
        ((A.char(), B.char(), Y), {}, ArgumentError, r"no unit multiplies torch.int8 x torch.int8 to torch.float32"),
    ],
)  # fmt: skip
def test_refusals(arguments, keywords, error, message):
    refused(message, fmtsim.identify, *arguments, **keywords, error=error)


def test_the_command_reads_files_and_goes_on_with_a_probe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a, b = operands(16, 16, 256)
    run = lambda x, w: fmtsim.mm(x, w, target="hopper.wgmma", plan=GemmPlan(k_tile=64, split=2))  # noqa: E731
    numpy.save("a.npy", a.view(torch.int16).numpy().view(numpy.uint16))
    torch.save(b, "b.pt")
    save_file({"y": run(a, b), "other": a}, "y.safetensors")
    files = ("a.npy", "b.pt", "y.safetensors:y", "--dtype", "bfloat16", "--target", "hopper.wgmma")
    assert main(["identify", *files, "--probe", "probe.pt"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "these operands say little" in out and "--probe probe.pt writes some; run the kernel on them, and add " in out
    )
    assert "more in --json" in out and "result." not in out
    probe = torch.load("probe.pt", weights_only=True)
    torch.save(run(probe["a"], probe["b"]), "y2.pt")
    assert main(["identify", *files, "--refine", "probe.pt:a", "probe.pt:b", "y2.pt"]) == 0
    assert "in 2 parts" in capsys.readouterr().out
    torch.save(run(a, b) + 1, "wrong.pt")
    assert (
        main(["identify", "a.npy", "b.pt", "wrong.pt", "--dtype", "bfloat16", "--target", "hopper.wgmma", "--json"])
        == 1
    )
    assert main(["identify", *files[:2], "wrong.pt", *files[3:]]) == 1
    assert "to try: --scale-a and --scale-b if" in (
        out := capsys.readouterr().out.replace("--bias if the kernel adds one; ", "")
    )
    assert "--thorough for unusual cuts" in out
    for words, message in (
        (("a.npy", "b.pt", "y2.pt"), "a.npy holds uint16, codes of some dtype; pass --dtype or --out-dtype"),
        (("probe.pt", "b.pt", "y2.pt"), "probe.pt has 2 tensors, a, b; pick one with probe.pt:NAME"),
        (("b.pt", "b.pt", "b.pt", "--scale-a", "y2.pt"), "--scale-a and --scale-b belong together; pass both"),
        (("b.pt", "b.pt", "y2.pt", "--dtype", "float32"), "b.pt holds 2 bytes an element, which are not float32"),
    ):
        assert main(["identify", *words]) == 2
        assert message in capsys.readouterr().err


def test_negated_views_are_their_numbers():
    """torch negates such a tensor when it is read; its bits in memory are the other sign's."""
    results = [fmtsim.identify(A, B, y) for y in (-Y, torch._neg_view(Y))]
    assert results[0].to_dict() == results[1].to_dict()


def test_the_first_columns_are_those_that_decide_in_the_first_rows():
    a, b = normal(40, 32, seed=1).bfloat16(), normal(200, 32, seed=2).bfloat16()
    product = Observed(a, b, (a.float() @ b.float().mT).bfloat16())
    rows, columns = deciding(product)
    assert sorted(rows.tolist()) == list(range(40)) and sorted(columns.tolist()) == list(range(200))
    exact = a.double() @ b.double().mT
    step = 2.0 ** (exact.abs().log2().floor() - 7)
    beside = ((exact.abs() / step) % 1 - 0.5).abs() * step / b.double().norm(dim=1)
    for row in rows[:4]:
        assert set(beside[row].topk(16, largest=False).indices.tolist()) <= set(columns[:64].tolist())
    small, places = part_of(product, (rows, columns), 10)
    assert small.sizes == (5, 2, 32) and torch.equal(places[0], rows[:5])
    assert part_of(product, (rows, columns), 8000)[0] is product
