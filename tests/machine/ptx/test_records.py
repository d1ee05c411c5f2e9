# SPDX-License-Identifier: Apache-2.0
"""Kernels that were recorded on an H100, launched here: every bit, by source alone.

The cases (``tools.kernels``) draw their operands from seeds; the records hold what a GPU wrote. By default some of each
kind run; all of them with ``-m slow``.
"""

import copy
import ctypes
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.machine.ptx.instructions import TABLE
from fmtsim.machine.ptx.kernel_program import _adapted, storage
from fmtsim.machine.ptx.values import Tracer, bits

records = pytest.importorskip("tools.kernels.record", reason="the cases are in tools/, which a wheel does not have")
FOLDER = Path(__file__).parents[1] / "data"
# What an H100 ran and launch refuses by name
REFUSED = {
    "cuda_integer_intrinsics": "vabsdiff4", "cuda_doubles": "mul.rp.f64", "inline_assembly": "vadd4",
}  # fmt: skip
DEFAULT = {  # of kernels: one of each kind
    "triton": [
        "matmul_gelu_bf16",
        "matmul_tf32x3",
        "matmul_fp16_acc_mma",
        "matmul_int8_mma",
        "fp8_block_scaled",
        "w4a16_mma",
        "persistent",
        "tma_bf16_64x64x64",
        "tma_device",
        "tma_reduce",
        "tma_specialized_64_w4",
        "dot_scaled_mxfp8_mxfp4",
        "flash_d64_causal",
        "layernorm_welford",
        "adamw",
        "argmax_argmin",
        "sort",
        "histogram",
        "atomics_int",
        "atomics_f64",
        "cast_f32_e5m2_rtz",
        "functions_two_3",
        "functions_2",
        "control_flow",
    ],
    "cuda": [
        "cuda_shuffle_sums",
        "cuda_fast_math_1",
        "cuda_half2_arithmetic",
        "cuda_use_fast_math",
        "cuda_rounding",
        "cuda_inline_mma",
        "cuda_libm_1",
    ],
    "unit": ["unit_wgmma_n64_f32_e4m3_e4m3_s64_wild", "unit_wgmma_n16_f32_tf32_tf32_s128_registers", "unit_brx_idx"],
}


def _cases(group):
    module = pytest.importorskip(f"tools.kernels.{group}_cases", reason="Triton is not installed", exc_type=ImportError)
    return {case.name: case for case in module.cases()}


def _copied(argument):
    if isinstance(argument, torch.Tensor):
        return argument.clone()
    if isinstance(getattr(argument, "base", None), torch.Tensor):  # a tensor descriptor
        result = copy.copy(argument)
        result.base = argument.base.clone()
        return result
    return argument


def _launched(case, record):
    """Launch a case on the CPU; return what differs from the record."""
    before = case.make_arguments()
    after = [_copied(argument) for argument in before]
    if case.kind == "triton":
        done = fmtsim.launch(case.kernel, case.grid, *after, **case.constexprs, **case.options)
    else:
        source = case.kernel if case.kind == "ptx" else record.ptx(case.name)
        options = {"block": case.options.get("block", 128 if case.kind == "ptx" else None)}
        done = fmtsim.launch(
            source, case.grid, *after, entry=case.entry or None, shared=case.options.get("shared", 0), **options
        )
    return record.differences(case.name, before, after), done


def _parameters():
    for group, file in (("triton", "triton"), ("cuda", "cuda"), ("unit", "cuda")):
        record = records.Records(FOLDER / f"h100_{file}.zip")
        prefix = {"cuda": "cuda_", "unit": "unit_", "triton": ""}[group]
        for name in record.names:
            other = group == "triton" or name.startswith(prefix)
            if other and "error" not in record.facts(name):
                marks = [] if name in DEFAULT[group] else [pytest.mark.slow]
                yield pytest.param(group, file, name, marks=marks, id=name)


@pytest.mark.parametrize(("group", "file", "name"), list(_parameters()))
def test_a_recorded_kernel_has_every_bit(group, file, name):
    case, record = _cases(group)[name], records.Records(FOLDER / f"h100_{file}.zip")
    refused = REFUSED.get(name) or ("mma.sync" if "_s4" in name or "_u4" in name or "_b1" in name else "")
    if refused:
        with pytest.raises(fmtsim.FmtsimError, match=refused):
            _launched(case, record)
        return
    differences, done = _launched(case, record)
    assert not differences
    assert done.exact or record.facts(name)["twice"] is False or done.reasons


def test_a_record_sees_a_wrong_bit():
    record = records.Records(FOLDER / "h100_triton.zip")
    case = _cases("triton")["adamw"]
    before = case.make_arguments()
    after = [_copied(argument) for argument in before]
    fmtsim.launch(case.kernel, case.grid, *after, **case.constexprs, **case.options)
    changed = record.facts("adamw")["changed"][0]["tensor"]
    tensor = [argument for argument in after if isinstance(argument, torch.Tensor)][changed]
    tensor.view(torch.int16).view(-1)[-1] ^= 1  # the last place of the last element
    assert record.differences("adamw", before, after)


@pytest.mark.parametrize(("part", "parts"), [
    (0, 30), *(pytest.param(part, 10, marks=pytest.mark.slow) for part in range(10)),
])  # fmt: skip
def test_recorded_instructions_have_every_bit(part, parts, monkeypatch):
    module = importlib.import_module("tools.kernels.instruction_cases")
    monkeypatch.setattr(
        "fmtsim.machine.ptx.launching.disassembled", lambda *_, **__: None
    )  # one instruction: nothing is fused
    record = records.Records(FOLDER / "h100_instructions.zip")
    wrong, refused, run = {}, [], 0
    for case in module.cases()[part::parts]:
        if case.name not in record.names or "error" in record.facts(case.name):
            continue
        try:
            differences, _ = _launched(case, record)
        except fmtsim.FmtsimError as error:
            assert "is not an instruction that fmtsim runs" in str(error), case.name
            refused.append(case.name)
            continue
        run += 1
        if differences:
            wrong[case.name] = differences
    assert not wrong and run > 700 // parts and len(refused) < 120 // parts, (run, refused)


def _range_cases():
    module = importlib.import_module("tools.kernels.instruction_cases")
    return [
        instruction
        for instruction, _ in module.RANGES
        if instruction in TABLE and len(TABLE[instruction].operands) == 1
    ]


@pytest.mark.slow
@pytest.mark.parametrize("instruction", _range_cases())
def test_instructions_of_one_operand_over_chunks_of_all_operands(instruction):
    """Compare the sums of results over chunks of 2^24 operands; eight of 256, or all with ``-m exhaustive``."""
    module = importlib.import_module("tools.kernels.instruction_cases")
    known = module.known(records.Records(FOLDER / "h100_ranges.zip"))[instruction]
    row, count = TABLE[instruction], 1 << 16
    kinds = [storage(kind) for kind in (row.results[0], row.operands[0])]
    tracer = Tracer()
    semantics = _adapted(row.semantics, kinds, (row.results[0], row.operands[0]), (False,), 1)
    tracer.request("row", semantics, kinds[:1], kinds[1:])
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(tracer.address("row"))
    size = bits(kinds[0]) // 8
    buffer = np.zeros(count * (size + 4), np.uint8)
    results, operands = buffer[: count * size].view(f"u{size}"), buffer[count * size :].view(np.uint32)
    places = np.zeros(32, np.int64)
    places[8:10] = 0, count * size
    for chunk in (0x00, 0x38, 0x3F, 0x47, 0x7F, 0x80, 0xBF, 0xFF):
        total = 0
        for start in range(chunk << 24, (chunk + 1) << 24, count):
            operands[:] = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
            function(buffer.ctypes.data, places.ctypes.data, 0, count)
            total += module.range_sum(operands, results)
        assert total % 2**64 == int(known[chunk]), hex(chunk)
