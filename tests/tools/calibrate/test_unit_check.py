# SPDX-License-Identifier: Apache-2.0
"""A card is held to its unit: equal bits, a wrong bit, refused calls, other orders; evidence is read and run again."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fmtsim.cuda.torch_calls import NativeCall, NativeScales, torch_call
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.cli.main import BAD_INPUT
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, DeviceError
from tests.support.refusals import refused
from tests.support.targets import mm
from tools.calibrate import __main__ as calibration
from tools.calibrate import unit_calls as calls
from tools.calibrate.__main__ import main
from tools.calibrate.evidence import load_evidence
from tools.calibrate.unit_calls import digest, draw, emulate, kinds_of, orders
from tools.calibrate.unit_check import TorchCard, _driver, _known_order, check_unit, emulate_again

BLACKWELL = ["bf16", "fp16", "fp16, sums in fp16", "tf32", "int8", "fp8, tensor scales", "fp8, tensor scales, fast",
             "fp8, row scales", "fp8, row scales, fast", "mxfp8", "mxfp4", "nvfp4", "nvfp4, tensor scales"]  # fmt: skip


def test_the_version_of_the_driver(monkeypatch):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    monkeypatch.setattr("pathlib.Path.read_text", lambda path, **how: line)
    assert _driver() == "580.159.04"
    monkeypatch.setattr("pathlib.Path.read_text", lambda path, **how: "no version here")
    assert _driver() == "unknown"

    def missing(path, **how):
        raise FileNotFoundError(path)

    monkeypatch.setattr("pathlib.Path.read_text", missing)
    assert _driver() == "unknown"


class Card:
    """Stand in for a GPU: fmtsim itself multiplies, in an order of the test's choice, and may err or refuse."""

    driver, cublaslt, target = "580.1", "cuBLASLt 13.1.0", None

    def __init__(self, unit, capability, name="NVIDIA B200", plan=lambda call: GemmPlan(), wrong=(), refused=()):
        self.unit, self.capability, self.name, self.plan = unit, capability, name, plan
        self.wrong, self.refused, self.asked = wrong, refused, []
        self.owners = {kind.name: owner.name for kind, owner in kinds_of(unit)}

    def multiply(self, call, operands):
        kind = next((k for k, _ in kinds_of(self.unit) if call in list(k.calls())
                     and k.tensor_scales == (operands.tensor_a is not None)), None)  # fmt: skip
        if kind is None or kind.name in self.refused:
            raise DeviceError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")
        y = emulate(call, operands, self.owners[kind.name], self.plan(call)).clone()
        if kind.name in self.wrong and call.k == 320 and y.dtype == torch.float32:
            y.view(torch.int32)[7, 3] ^= 1
        self.asked.append((kind.name, call, operands))
        return y, "a function"


def blackwell(**how):
    return Card("blackwell.tcgen05", (10, 0), **how)


@pytest.fixture
def few(monkeypatch):
    """Take four sizes, not the large ones."""
    monkeypatch.setattr(calls, "SIZES", ((48, 32, 64), (17, 16, 192), (100, 80, 320), (64, 48, 1024)))


def table(monkeypatch, tmp_path, card, *words):
    monkeypatch.setattr(calibration, "TorchCard", lambda device: card)
    monkeypatch.chdir(tmp_path)
    return main([*words])


def test_a_card_with_equal_bits(few, monkeypatch, tmp_path, capsys):
    card = blackwell()
    assert table(monkeypatch, tmp_path, card, "--check", "blackwell.tcgen05") == 0
    text = capsys.readouterr().out
    count = sum(m * n for m, n, _ in calls.SIZES)
    assert f"13 kinds, 100 calls, {25 * count:,} numbers compared, 0 differ\nwritten: fmtsim-evidence.json" in text
    assert "blackwell.tcgen05 on NVIDIA B200, driver 580.1, torch " in text and "not run" not in text
    found = load_evidence(tmp_path / "fmtsim-evidence.json")
    assert found.proves and [kind.name for kind in found.kinds] == BLACKWELL and found.capability == (10, 0)
    assert {kind.name: kind.unit for kind in found.kinds}["mxfp4"] == "blackwell.tcgen05.mxf4"
    with ThreadPoolExecutor(2) as pool:
        assert emulate_again(found) == emulate_again(found, pool) == [0] * 13
    assert main(["--evidence", "fmtsim-evidence.json"]) == 0
    again = capsys.readouterr().out
    assert again.startswith("blackwell.tcgen05 on NVIDIA B200") and "every call has the GPU's bits" in again
    assert main(["--evidence", "fmtsim-evidence.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls_that_differ_here"] == [0] * 13


def test_a_wrong_bit_is_found(few, monkeypatch, tmp_path, capsys):
    card = blackwell(wrong=("mxfp8",))
    assert table(monkeypatch, tmp_path, card, "--check", "blackwell.tcgen05", "--out", "mine.json") == 1
    text = capsys.readouterr().out
    assert ", 2 differ\nwritten: mine.json" in text
    assert "scaled_mm 100x80x320 e4m3 e5m2 fp32, wide data: [7, 3]: actual 0x" in text
    assert main(["--evidence", "mine.json"]) == 1
    assert "emulated here: 2 calls differ" in capsys.readouterr().out


def test_a_card_that_refuses_was_not_run(few, monkeypatch, tmp_path, capsys):
    card = blackwell(refused=("nvfp4, tensor scales", "int8"))
    assert table(monkeypatch, tmp_path, card, "--check", "blackwell.tcgen05") == 1
    text = capsys.readouterr().out
    assert "11 kinds, " in text and ", 0 differ; 2 kinds were not run\n" in text
    line = next(line for line in text.splitlines() if line.startswith("nvfp4, tensor scales"))
    assert (
        line.split()[-1] == "CUBLAS_STATUS_NOT_SUPPORTED" and " -        -           -  not run; scaled_mm 48x" in line
    )
    found = load_evidence(tmp_path / "fmtsim-evidence.json")
    assert not found.proves and found.kinds[-1].calls == () and list(emulate_again(found))[-1] is None


@pytest.mark.parametrize("unit", ["ampere.mma", "blackwell.tcgen05"])
def test_another_unit_is_told_apart_whatever_the_order(unit, monkeypatch):
    """Hopper sums FP8 products in fewer bits than Blackwell, and 16-bit products in more than Ampere."""
    monkeypatch.setattr(calls, "SIZES", ((48, 32, 64), (17, 16, 64), (33, 48, 128)))
    card = Card(unit, (9, 0), "NVIDIA H200")
    names = set(card.owners) & {kind.name for kind, _ in kinds_of("hopper.wgmma")}
    found = {kind.name: kind for kind in check_unit("hopper.wgmma", card).kinds if kind.name in names}
    differing = {name for name, kind in found.items() if kind.mismatches}
    if unit == "ampere.mma":
        assert differing == {"bf16", "fp16", "fp16, sums in fp16", "tf32"}
    else:
        assert differing == {name for name in names if name.startswith("fp8")}


def test_orders_of_a_library_are_found(few):
    def plan(call):
        promoted = 128 if call.operation == "scaled_mm" and call.scaling in ("tensor", "row") else None
        epilogue = "row_column" if call.scaling == "row" else "scale"
        split = 4 if call.k == 1024 else 1
        return GemmPlan(k_tile=128, split=split, promote_every=promoted, epilogue=epilogue)

    found = check_unit("blackwell.tcgen05", blackwell(plan=plan))
    assert found.proves
    assert {call.plan.split for call in found.kinds[3].calls if call.k == 1024} == {4}
    assert {call.plan.promote_every for call in found.kinds[6].calls if call.k == 320} == {128}


def test_an_order_that_is_known_is_tried_first():
    unit, card = get_unit("hopper.wgmma"), Card("hopper.wgmma", (9, 0))
    card.target = "h200"
    call = mm(64, 64, 1024)
    assert _known_order(call, unit, card) == get_target("h200").resolve(call).plan
    card.target = None
    assert _known_order(call, unit, card) is None


def test_kinds_reach_their_units():
    assert [kind.name for kind, _ in kinds_of("blackwell.tcgen05")] == BLACKWELL
    assert [kind.name for kind, _ in kinds_of("hopper.wgmma")] == BLACKWELL[:9]
    assert [kind.name for kind, _ in kinds_of("blackwell.tcgen05.nvf4")] == BLACKWELL[-2:]
    sizes = {(call.m, call.n, call.k) for kind, _ in kinds_of("blackwell.tcgen05") for call in kind.calls()}
    assert len(sizes) == 7 and all(n % 16 == k % 32 == 0 and m > 16 for m, n, k in sizes)


@pytest.mark.parametrize("data", ["wide", "special"])
def test_data_show_roundings_and_special_values(data):
    for kind, owner in kinds_of("blackwell.tcgen05"):
        call = list(kind.calls())[3]
        operands = draw(call, data, 3, kind.tensor_scales)
        y = emulate(call, operands, owner.name, GemmPlan()).float()
        assert digest(*operands) == digest(*draw(call, data, 3, kind.tensor_scales))
        assert digest(*operands) != digest(*draw(call, data, 4, kind.tensor_scales))
        assert bool(y.isnan().any()) == (data == "special" and kind.name != "int8")
        if kind.operation == "mm" and data == "wide":
            other = next(p for p in orders(call, None) if p.split > 1)
            assert digest(emulate(call, operands, owner.name, other)) != digest(
                emulate(call, operands, owner.name, GemmPlan())
            )


@pytest.mark.parametrize("bits", [-1, 1])
def test_a_bit_more_or_less_is_seen_in_every_kind(bits):
    for kind, owner in kinds_of("blackwell.tcgen05"):
        path = owner.mode(*kind.pairs[0], kind.accumulate)
        if kind.accumulate == "int32":
            continue
        other, call = dataclasses.replace(path, fraction_bits=path.fraction_bits + bits), list(kind.calls())[4]
        operands = draw(call, "wide", 4, kind.tensor_scales)
        mine, theirs = (emulate(call, operands, unit, GemmPlan()) for unit in (owner.name, other))
        assert (mine != theirs).any(), kind.name


def test_the_older_function_takes_swizzled_scales_too():
    a = torch.zeros(128, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(128, 2)
    how = {"function": "scaled_mm", "out_dtype": torch.float32, "scaling": "mx"}
    older = torch_call(NativeCall(older=True, **how), a, a.mT, None, NativeScales(codes, codes))
    newer = torch_call(NativeCall(**how), a, a.mT, None, NativeScales(codes, codes))
    assert (older.name, newer.name) == ("torch._scaled_mm", "torch.nn.functional.scaled_mm")
    assert older.arguments[2].dtype == torch.float8_e8m0fnu
    assert digest(older.arguments[2]) == digest(newer.arguments[2][0])
    one = torch.ones(())
    whole = torch_call(NativeCall(older=True, **how), a, a.mT, None, NativeScales(codes, codes, one, one))
    assert whole.name == "torch.nn.functional.scaled_mm"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check", "hopper.wgma"], "--check 'hopper.wgma' is unknown; did you mean 'hopper.wgmma'"),
        (["--check", "hopper.wgmma"],
         "unit hopper.wgmma is not one of NVIDIA B200, compute capability 10.0; its units are called blackwell.*"),
        (["--check", "blackwell.tcgen05", "--evidence", __file__], "--check and --evidence are different jobs"),
        (["--check", "blackwell.tcgen05", "--out", "e.txt"], "--out e.txt does not end in .json as an evidence file"),
        (["--evidence", "none.json"], "--evidence none.json: there is no file none.json; pass a file that is there"),
    ],
)  # fmt: skip
def test_bad_words(words, said, monkeypatch, tmp_path, capsys):
    assert table(monkeypatch, tmp_path, blackwell(), *words) == BAD_INPUT
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--check", "blackwell.tcgen05"]) == BAD_INPUT
    assert "calibrate asks an NVIDIA GPU, and torch sees none here" in capsys.readouterr().err


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "SIZES", ((48, 32, 64),))
        found = check_unit("blackwell.tcgen05.nvf4", Card("blackwell.tcgen05.nvf4", (10, 3), "NVIDIA B300"))
    return json.loads(json.dumps(calibration.recipe_to_dict(found)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(unit="blackwell.tcgen06"), "evidence: unknown unit 'blackwell.tcgen06'"),
        (lambda r: r.update(capability=[9, 0]), "evidence: unit blackwell.tcgen05.nvf4 is not one of NVIDIA B300"),
        (lambda r: r.update(kinds=[]), "evidence: kinds are empty"),
        (lambda r: r.update(date="today"), "evidence: date='today' is not a date; write YYYY-MM-DD"),
        (lambda r: r.update(cards=2), "evidence: an Evidence has no field 'cards'"),
        (lambda r: r.pop("driver"), "evidence: an Evidence needs 'driver'"),
        (lambda r: r["kinds"][0].update(calls=[]), r"evidence.kinds\[0\]: kind 'nvfp4' has neither calls nor a note"),
        (lambda r: r["kinds"][0].update(name=3), r"evidence.kinds\[0\]: KindEvidence name=3 is not allowed"),
        (lambda r: r["kinds"][0]["calls"][0].update(a="e4m3"), r"calls\[0\]: unit blackwell.* does not take e4m3"),
        (lambda r: r["kinds"][0]["calls"][0].update(out="int4"), r"kinds\[0\]: calls\[0\]: out='int4' is not a format"),
        (lambda r: r["kinds"][0]["calls"][0].update(native="0" * 64), r"calls\[0\]: mismatches=0 of 1536 contradict "),
        (lambda r: r["kinds"][0]["calls"][0].update(native="x"), r"calls\[0\]: native='x' is not a SHA-256"),
        (lambda r: r["kinds"][0]["calls"][0].update(outputs=1), r"calls\[0\]: outputs=1 do not fit m=48, n=32, k=64"),
        (lambda r: r["kinds"][0]["calls"][0].update(m="48"), r"calls\[0\]: CallEvidence m='48' is not allowed"),
        (lambda r: r["kinds"][0]["calls"][0].update(data="usual"), r"calls\[0\]: CallEvidence data='usual' is not "),
    ],
)  # fmt: skip
def test_evidence_that_is_none(record, change, said, tmp_path):
    path = tmp_path / "e.json"
    path.write_text(json.dumps(record))
    assert load_evidence(path).proves
    changed = json.loads(json.dumps(record))
    change(changed)
    path.write_text(json.dumps(changed))
    refused(rf"e\.json: .*{said}", load_evidence, path)


def test_digests_that_were_made_up_are_found(record, tmp_path):
    path = tmp_path / "e.json"
    changed = json.loads(json.dumps(record))
    changed["kinds"][0]["calls"][1] |= {"native": "0" * 64, "emulated": "0" * 64}
    path.write_text(json.dumps(changed))
    assert list(emulate_again(load_evidence(path))) == [1, 0]
    changed["kinds"][0]["calls"][1]["seed"] = 5
    path.write_text(json.dumps(changed))
    with pytest.raises(
        ArgumentError, match=r"nvfp4, scaled_mm 48x32x64 e2m1 e2m1 float32 row row: torch .* draws other"
    ):
        list(emulate_again(load_evidence(path)))


def test_a_real_card_falls_back_and_says_what_refused(monkeypatch):
    """TorchCard with its tensors on the CPU, whose torch multiplies integers and has no MX."""
    card = TorchCard.__new__(TorchCard)
    card.device = torch.device("cpu")
    kinds = {kind.name: next(kind.calls()) for kind, _ in kinds_of("blackwell.tcgen05")}
    integers = draw(kinds["int8"], "wide", 0)
    y, name = card.multiply(kinds["int8"], integers)
    assert name == "torch._int_mm" and torch.equal(y, emulate(kinds["int8"], integers, "blackwell.tcgen05", GemmPlan()))
    small = draw(kinds["mxfp8"], "wide", 0)
    with pytest.raises(DeviceError, match=r"^torch.nn.functional.scaled_mm refused \[128, 64\] .*[^t]$") as caught:
        card.multiply(kinds["mxfp8"], small)
    assert "native=False" not in str(caught.value)
    asked = []

    def older(*arguments, **options):
        asked.append((arguments, options))
        return torch.ones(128, 128)

    monkeypatch.setattr(torch, "_scaled_mm", older)
    y, name = card.multiply(kinds["mxfp8"], small)
    assert name == "torch._scaled_mm" and y.sum() == 128 * 128 and len(asked) == 1
    scale = asked[0][0][2]
    assert scale.dtype == torch.float8_e8m0fnu and scale.numel() == 128 * 4  # a tile, of two blocks and padding
    with pytest.raises(DeviceError, match=r"^torch.nn.functional.scaled_mm refused"):
        card.multiply(kinds["nvfp4, tensor scales"], draw(kinds["nvfp4, tensor scales"], "wide", 0, True))
