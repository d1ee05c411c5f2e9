# SPDX-License-Identifier: Apache-2.0
"""Replaying recorded products: files of every layout, planted errors, and the recordings beside the tree."""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch

import fmtsim.torch_engine
from fmtsim.spec.call import GemmCall
from fmtsim.support.errors import DataError
from tests.support.operands import normal
from tests.support.refusals import refused
from tools.calibrate import replay as gemm
from tools.calibrate.__main__ import main
from tools.calibrate.recordings import Call, find_recordings, read_calls, read_dots
from tools.calibrate.replay import SQUARE, _cheapest, gemm_tasks, plan_basis

UNSIGNED = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32}
ROWS = SQUARE + 5


def codes(x):
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(signed).numpy().view(UNSIGNED[x.element_size()])


def numbers(*shape, dtype, seed):
    return normal(*shape, seed=seed).to(dtype)


def write_dots(folder, name, unit, dtype, accumulate, k, *, with_c=True):
    """Write a recording whose results come from one call of mma for each row."""
    a, b = numbers(ROWS, k, dtype=dtype, seed=1), numbers(ROWS, k, dtype=dtype, seed=2)
    c = numbers(ROWS, dtype=torch.float32, seed=3)
    if dtype == torch.float32:
        a, b = (fmtsim.quantize(x, "tf32", out_dtype=torch.float32) for x in (a, b))
    addend = c.to(torch.float16 if accumulate == "fp16" else torch.float32)
    rows = [
        fmtsim.mma(a[i : i + 1], b[i : i + 1], addend[i].reshape(1, 1) if with_c else None, target=unit,
                   accumulate=accumulate)
        for i in range(ROWS)
    ]  # fmt: skip
    meta = json.dumps({"k": k})
    numpy.savez(folder / name, a=codes(a), b=codes(b), c=codes(c), d=codes(torch.cat(rows).flatten()), meta=meta)


def write_calls(folder, name="h200_small"):
    """Write a recording of one call of each verb, its results from the verbs themselves."""
    arrays, meta = {}, []

    def add(call, a, b, out, **more):
        index = f"{len(meta):03d}"
        facts = {key: value for key, value in more.items() if not isinstance(value, torch.Tensor)}
        for key, x in (("a", a), ("b", b), ("out", out), *more.items()):
            if isinstance(x, torch.Tensor):
                arrays[f"{index}.{key}"] = codes(x)
                facts[key if key in ("a", "b", "out") else f"{key}_dtype"] = str(x.dtype).removeprefix("torch.")
        meta.append({"call": call, "kind": "normal", **facts})

    def data(m, n, k, dtype):
        return numbers(m, k, dtype=dtype, seed=4), numbers(n, k, dtype=dtype, seed=5)

    a, b = data(64, 64, 64, torch.bfloat16)
    wide = fmtsim.mm(a, b.t(), out_dtype=torch.float32, target="h200")
    add("mm", a, b, wide, a_layout="row", b_layout="row")
    add("mm", a, b, wide, a_layout="col", b_layout="row")  # one chain in either layout
    bias = numbers(64, dtype=torch.bfloat16, seed=6)
    add("linear", a, b, fmtsim.linear(a, b, bias, target="h200"), bias=bias)
    x, y = data(64, 96, 512, torch.float8_e4m3fn)
    one = torch.tensor(1.5)
    for fast in (True, False):
        out = fmtsim.scaled_mm(x, y.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast, target="h200")
        add("scaled_mm", x, y, out, scale_a=one, scale_b=one, use_fast_accum=fast)
    f, g = data(128, 128, 128, torch.float32)
    add("mm", f, g, fmtsim.mm(f, g.t(), allow="tf32", target="h200"), tf32=True)
    i, j = (torch.randint(-128, 128, (32, 64), generator=torch.Generator().manual_seed(7)).to(torch.int8) for _ in "ab")
    add("int_mm", i, j, fmtsim.int_mm(i, j.t(), target="h200"))
    numpy.savez(folder / f"{name}.npz", meta=numpy.array(json.dumps(meta)), **arrays)


@pytest.fixture
def dots(tmp_path):
    write_dots(tmp_path, "mtc_V100_fp16_fp32.npz", "volta.mma", torch.float16, "fp32", 4)
    write_dots(tmp_path, "mtc_A2_bf16_fp32.npz", "ampere.mma", torch.bfloat16, "fp32", 8)
    write_dots(tmp_path, "mtc_L40S_tf32_fp32.npz", "ada.mma", torch.float32, "fp32", 4)
    write_dots(tmp_path, "mtc_H200_E5M2_fp16.npz", "hopper.mma", torch.float8_e5m2, "fp16", 32)
    write_dots(tmp_path, "mtc_H100_E4M3_fp32.npz", "hopper.wgmma", torch.float8_e4m3fn, "fp32", 32, with_c=False)
    numpy.savez(tmp_path / "unrelated.npz", x=numpy.arange(3))
    return tmp_path


def replay(folder, limit=None):
    return {task.name: task.run(lambda share: None) for task in gemm_tasks([folder], limit)}


def flip(path, key, index=0):
    """Flip the lowest bit of one stored code."""
    with numpy.load(path) as file:
        arrays = dict(file)
    arrays[key] = arrays[key].copy()
    arrays[key].reshape(-1)[index] ^= 1
    numpy.savez(path, **arrays)


def test_dot_products_of_every_layout(dots):
    found = replay(dots)
    assert {name: r.machine for name, r in found.items()} == {
        "mtc_V100_fp16_fp32": "V100, volta.mma", "mtc_A2_bf16_fp32": "A2, ampere.mma",
        "mtc_L40S_tf32_fp32": "L40S, ada.mma", "mtc_H200_E5M2_fp16": "H200, hopper.mma",
        "mtc_H100_E4M3_fp32": "H100, hopper.wgmma",
    }  # fmt: skip
    assert all((r.cases, r.outputs, r.mismatches, r.first) == (ROWS, ROWS, 0, "") for r in found.values())
    limited = replay(dots, limit=7)
    assert all((r.cases, r.outputs, r.skipped) == (7, 7, ROWS - 7) for r in limited.values())


@pytest.mark.parametrize("index", [0, SQUARE - 1, SQUARE, ROWS - 1])
def test_a_planted_error_in_a_dot_product_is_caught(dots, index):
    flip(dots / "mtc_H200_E5M2_fp16.npz", "d", index)
    found = replay(dots)
    wrong = found.pop("mtc_H200_E5M2_fp16")
    assert wrong.mismatches == 1 and all(r.mismatches == 0 for r in found.values())
    assert wrong.first.startswith(f"[{index}]: actual 0x") and ", expected 0x" in wrong.first


def test_a_planted_error_in_an_operand_is_caught(dots):
    path = dots / "mtc_V100_fp16_fp32.npz"
    with numpy.load(path) as file:
        arrays = dict(file)
    arrays["a"] = arrays["a"] ^ 0x8000  # other signs
    numpy.savez(path, **arrays)
    assert replay(dots)["mtc_V100_fp16_fp32"].mismatches > ROWS // 2


def test_wgmma_with_fp8_ignores_c(dots):
    (recording,) = (r for r in find_recordings(dots) if r.name == "mtc_H100_E4M3_fp32")
    assert read_dots(recording).c is None
    flip(dots / "mtc_H100_E4M3_fp32.npz", "c")
    assert replay(dots)["mtc_H100_E4M3_fp32"].mismatches == 0


def test_library_calls_of_every_verb(tmp_path):
    write_calls(tmp_path)
    found = replay(tmp_path)
    assert {name: (r.machine, r.cases, r.mismatches, r.first) for name, r in found.items()} == {
        f"h200_small: {group}": ("h200", cases, 0, "")
        for group, cases in (
            ("mm bfloat16 x bfloat16", 2), ("linear bfloat16 x bfloat16", 1), ("scaled_mm e4m3 x e4m3", 2),
            ("mm tf32", 1), ("int_mm int8 x int8", 1),
        )
    }  # fmt: skip
    assert all(sum(count for _, count in r.plans) == r.cases for r in found.values())
    cheap = replay(tmp_path, limit=1)
    assert all(r.cases == 1 for r in cheap.values())
    assert cheap["h200_small: scaled_mm e4m3 x e4m3"].skipped == 1
    (column,) = (call for call in read_calls(find_recordings(tmp_path)[0]) if call.a.stride() == (1, 64))
    assert plan_basis(column, "h200") in ("recorded", "reported", "rule", "guess")


@pytest.mark.parametrize(
    ("function", "dtype", "out", "options", "scale", "expected"),
    [
        ("mm", torch.bfloat16, torch.bfloat16, {}, None, {"a": "bf16"}),
        ("linear", torch.bfloat16, torch.float32, {}, None, {"a": "bf16", "bias": True}),
        ("mm", torch.float32, torch.float32, {}, None, {"a": "fp32"}),
        ("mm", torch.float32, torch.float32, {"tf32": True}, None, {"a": "tf32"}),
        ("mm", torch.float16, torch.float16, {"fp16_accumulation": True}, None, {"a": "fp16", "accumulate": "fp16"}),
        ("int_mm", torch.int8, torch.int32, {}, None, {"a": "int8", "accumulate": "int32"}),
        ("scaled_mm", torch.float8_e4m3fn, torch.bfloat16, {"use_fast_accum": False}, torch.ones(()),
         {"a": "e4m3", "scaling": "tensor", "fast_accum": False}),
        ("scaled_mm", torch.float8_e4m3fn, torch.bfloat16, {"use_fast_accum": True}, torch.ones(8, 1),
         {"a": "e4m3", "scaling": "row"}),
    ],
)  # fmt: skip
def test_what_a_target_is_asked_of_a_recorded_call(monkeypatch, function, dtype, out, options, scale, expected):
    a, b, bias = torch.zeros(8, 32).to(dtype), torch.zeros(16, 32).to(dtype), torch.zeros(16)
    call = Call(function=function, a=a, b=b, out=torch.zeros(8, 16, dtype=out), scale_a=scale, scale_b=scale,
                bias=bias if function == "linear" else None, options=options, label="")  # fmt: skip
    target = SimpleNamespace(find=lambda asked: SimpleNamespace(basis=asked))
    monkeypatch.setattr(gemm, "get_target", lambda name: target)
    asked = GemmCall(operation=function, m=8, n=16, k=32, out=out, b=expected["a"], b_layout="row", **expected)
    assert plan_basis(call, "h200") == asked


@pytest.mark.parametrize(("index", "columns"), list(enumerate((64, 64, 64, 96, 96, 128, 32))))
def test_a_planted_error_in_a_call_is_caught(tmp_path, index, columns):
    write_calls(tmp_path)
    flip(tmp_path / "h200_small.npz", f"{index:03d}.out", 70)
    wrong = [r for r in replay(tmp_path).values() if r.mismatches]
    assert [r.mismatches for r in wrong] == [1]
    assert wrong[0].first.startswith(f"call {index:03d}, ")
    assert f"[{70 // columns}, {70 % columns}]: actual 0x" in wrong[0].first


@pytest.mark.parametrize(("basis", "in_guesses"), [("guess", 1), ("rule", 0), ("recorded", 0)])
def test_differences_of_guessed_orders_are_counted_apart(tmp_path, monkeypatch, basis, in_guesses):
    write_calls(tmp_path)
    flip(tmp_path / "h200_small.npz", "000.out", 70)
    monkeypatch.setattr(gemm, "plan_basis", lambda call, target: basis)
    (wrong,) = (r for r in replay(tmp_path).values() if r.mismatches)
    assert (wrong.mismatches, wrong.in_guesses) == (1, in_guesses)


def test_a_set_that_raises_has_failed(tmp_path):
    write_calls(tmp_path, "abacus_small")
    assert {r.mismatches for r in replay(tmp_path).values()} == {1}
    assert all("replaying raised ArgumentError" in r.first for r in replay(tmp_path).values())


BAD = {
    "mtc_H200_e4m3.npz": (b"", "is not named mtc_<GPU>_<format>_<accumulator>.npz"),
    "mtc_H200_fp16_fp32.npz": (b"no zip", "cannot read"),
    "probe_x.npz": (b"no zip", "cannot read"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_named(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    refused(message, replay, tmp_path, error=DataError)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mtc_V100_fp16_fp32.npz", {"a": numpy.zeros((3, 4), numpy.uint16)}, "a, b, c, d have shapes"),
        *(
            ("mtc_V100_fp16_fp32.npz", {key: numpy.zeros(shape, kind) for key in keys}, "a, b, c, d have shapes")
            for keys, shape, kind in (
                ("b", (ROWS, 5), numpy.uint16),
                ("ab", (ROWS,), numpy.uint16),
                ("ab", (ROWS, 2, 2), numpy.uint16),
                ("d", (3,), numpy.uint32),
                ("c", (3,), numpy.uint32),
                ("cd", (ROWS, 1), numpy.uint32),
            )
        ),
        ("mtc_V100_fp16_fp32.npz", {"a": numpy.zeros((3, 4), numpy.uint32)}, "are stored as uint32"),
        ("mtc_V100_fp16_fp32.npz", {"a": numpy.zeros((ROWS, 4), numpy.float16)}, "are stored as float16"),
        ("mtc_V100_fp16_fp16.npz", {}, "codes of torch.float16 are stored as uint32; expected 2 bytes each"),
        ("mtc_V100_fp16_fp32.npz", {"d": None}, "cannot read .*mtc_V100"),
        ("mtc_K80_fp16_fp32.npz", {}, "no unit is known for fp16 on K80; GPUs are V100, A100"),
    ],
)
def test_wrong_contents_are_named(tmp_path, name, change, message):
    write_dots(tmp_path, "mtc_V100_fp16_fp32.npz", "volta.mma", torch.float16, "fp32", 4)
    with numpy.load(tmp_path / "mtc_V100_fp16_fp32.npz") as file:
        arrays = {**dict(file), **change}
    (tmp_path / "mtc_V100_fp16_fp32.npz").unlink()
    numpy.savez(tmp_path / name, **{key: value for key, value in arrays.items() if value is not None})
    refused(message, replay, tmp_path, error=DataError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"call": "conv"}, "h200_small.npz: no verb replays call 000, 'conv'; known are mm, linear, int_mm"),
        ({"call": "scaled_mm"},
         "no verb replays call 000, 'scaled_mm'; known are mm, linear, int_mm and, with scales,"),
        ({"call": None}, "no verb replays call 000, None"),
    ],
)  # fmt: skip
def test_calls_that_no_verb_replays_are_named(tmp_path, change, message):
    write_calls(tmp_path)
    with numpy.load(tmp_path / "h200_small.npz") as file:
        arrays = dict(file)
    first, *rest = json.loads(str(arrays["meta"]))
    numpy.savez(
        tmp_path / "h200_small.npz", **{**arrays, "meta": numpy.array(json.dumps([{**first, **change}, *rest]))}
    )
    refused(message, gemm_tasks, [tmp_path], error=DataError)


def test_what_numpy_says_of_a_damaged_file_names_it(tmp_path, monkeypatch):
    (tmp_path / "probe_x.npz").write_bytes(b"x")

    def damaged(path, allow_pickle):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(numpy, "load", damaged)
    refused(r"cannot read .*probe_x.npz: .* Invalid argument; record it again", gemm_tasks, [tmp_path], error=DataError)


def test_folders_and_limits(tmp_path):
    refused("nowhere is not a folder; pass one that holds", gemm_tasks, [tmp_path / "nowhere"], error=DataError)
    refused("holds no recording; expected mtc_", gemm_tasks, [tmp_path], error=DataError)
    refused("limit=0 is not possible; choose 1 or more", gemm_tasks, [tmp_path], 0)


def test_the_command(dots, capsys):
    assert main(["--recordings", str(dots), "--limit", "9"]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith("mtc_A2"))
    assert line.split()[:9] == ["mtc_A2_bf16_fp32", "A2,", "ampere.mma", "9", "of", "37", "9", "0", "-"]
    assert text.splitlines()[-1].startswith("5 sets, 45 outputs; ") and text.endswith("all bits agree\n")
    flip(dots / "mtc_A2_bf16_fp32.npz", "d")
    assert main(["--recordings", str(dots)]) == 1
    text = capsys.readouterr().out
    assert "mtc_A2_bf16_fp32: 1 of 37 differ; [0]: actual 0x" in text and "MISMATCHES" in text
    assert main(["--recordings", str(dots), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["outputs"], record["mismatches"], len(record["sets"])) == (5 * ROWS, 1, 5)


def test_the_cheapest_calls_come_first():
    def call(rows, columns, k):
        a, b = torch.zeros(rows, k), torch.zeros(columns, k)
        return Call(function="mm", a=a, b=b, out=torch.zeros(rows, columns), scale_a=None, scale_b=None, bias=None,
                    options={}, label="")  # fmt: skip

    calls = [call(8, 4, 100), call(2, 3, 5), call(4, 4, 2), call(1, 1, 1)]
    assert _cheapest(calls, None) is calls
    for limit, kept in ((1, [3]), (2, [1, 3]), (7, [1, 3]), (8, [1, 2, 3]), (23, [1, 2, 3]), (24, [0, 1, 2, 3])):
        assert [calls.index(one) for one in _cheapest(calls, limit)] == kept, limit
