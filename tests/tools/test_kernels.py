# SPDX-License-Identifier: Apache-2.0
"""Recorded kernels: operands are the same everywhere, a record is read, and what differs is said."""

import json
import zipfile

import numpy as np
import pytest
import torch

from tools.kernels import __main__ as command
from tools.kernels import cuda_cases, instruction_cases, record, unit_cases
from tools.kernels.cases import digest, integers, normal, patterns, special

CASES = [*cuda_cases.cases(), *unit_cases.cases(), *instruction_cases.cases()]
DIGESTS = [
    "77cfa454f04a2e14",
    "6be65d33f0c46df4",
    "2ff554a90f81e39a",
    "0b7d639d7dbba9fa",
    "808f9053d98c8b63",
    "909ef39d3b4cd88f",
    "2738813ee47f6250",
]


def launch(cubin, case, arguments):
    """Stand for a GPU: write 7 into every third byte of the last tensor."""
    [argument for argument in arguments if isinstance(argument, torch.Tensor)][-1].view(torch.uint8).view(-1)[::3] = 7


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(record, "_launch", launch)
    monkeypatch.setattr(record, "assemble", lambda ptx: b"")
    monkeypatch.setattr(record.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        record, "_on_gpu", lambda items: [i.clone() if isinstance(i, torch.Tensor) else i for i in items]
    )


def test_operands_are_the_same_everywhere():
    drawn = [normal(1, 100), normal(2, 100, dtype=torch.float64), special(3, 300), special(4, 300, torch.float16)]
    drawn += [special(5, 300, torch.bfloat16), patterns(6, 33, dtype=torch.int16), integers(7, 50, low=-9, high=9)]
    assert [digest([tensor]) for tensor in drawn] == DIGESTS
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) > 1000


def test_special_operands_have_every_kind():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        values = special(1, 400, dtype)
        assert len(values) == 400
        assert values.isnan().any() and values.isinf().any() and (values == 0).sum() >= 2
        assert (values.abs() < torch.finfo(dtype).smallest_normal)[values != 0].any() or dtype == torch.float64


def test_records_say_what_differs(tmp_path, without_gpu):
    chosen = [case for case in CASES if case.name in ("ptx_add.rn.f32_f32_f32", "unit_brx_idx", "ptx_cvt.f32.f16_f16")]
    path, packed = tmp_path / "record.zip", tmp_path / "packed.zip"
    assert record.record(path, chosen, 60) == 0
    assert command.main([str(path), "--pack", str(packed)]) == 0
    for records in (record.Records(path), record.Records(packed)):
        assert sorted(records.names) == sorted(case.name for case in chosen)
        for case in chosen:
            before = list(case.make_arguments())
            after = [item.clone() if isinstance(item, torch.Tensor) else item for item in before]
            assert "changed tensors: []" in records.differences(case.name, before, after)[0]
            launch(None, case, after)
            assert records.differences(case.name, before, after) == []
            record.tensors(after)[-1].view(-1)[-1] += 1  # one element, which only digests see
            (line,) = records.differences(case.name, before, after)
            assert "kept elements differ" in line
            before[0] = before[0] + 1
            assert records.differences(case.name, before, after) == ["the operands are not those of the record"]


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path, without_gpu, monkeypatch, capsys):
    chosen = [case for case in CASES if case.name.startswith("ptx_add.rz")]
    monkeypatch.setattr(record, "assemble", lambda ptx: 1 / 0 if "add.rz.ftz.f32" in ptx else b"")
    assert record.record(tmp_path / "record.zip", chosen, 60) == 1
    records = record.Records(tmp_path / "record.zip")
    failed = [name for name in records.names if "error" in records.facts(name)]
    assert failed == ["ptx_add.rz.ftz.f32_f32_f32"]
    assert records.differences(failed[0], [], []) == ["recorded: ZeroDivisionError: division by zero"]
    assert "FAILED ZeroDivisionError" in capsys.readouterr().out


def test_range_sum_is_the_kernel_s():
    operands = np.arange(1000, dtype=np.uint32) * 7919
    results = (operands // 3).astype(np.uint16)
    total = 0
    for operand, result in zip(operands.tolist(), results.tolist(), strict=True):
        word = operand << 32 ^ result
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            word = (word ^ word >> 33) * factor % 2**64
        total += word ^ word >> 33
    assert instruction_cases.range_sum(operands, results) == total % 2**64
    results[500] ^= 1
    assert instruction_cases.range_sum(operands, results) != total % 2**64


def test_sums_of_a_range_are_read(tmp_path):
    path, instruction = tmp_path / "record.zip", instruction_cases.RANGES[0][0]
    label = f"{instruction_cases.name(instruction)}_range"
    sums = np.arange(256, dtype=np.uint64)
    record.write(path, (label, dict(kind="range", instruction=instruction), "", sums.tobytes()))
    assert (instruction_cases.known(record.Records(path))[instruction] == sums).all()
    with zipfile.ZipFile(path) as file:
        assert json.loads(file.read(f"{label}.json"))["instruction"] == "ex2.approx.f32"
