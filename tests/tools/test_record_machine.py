# SPDX-License-Identifier: Apache-2.0
"""Operators that one device calls and another does not, from two traces."""

import dataclasses
from pathlib import Path

import pytest
import torch

import fmtsim
from tools.record_machine import device_forks, main


def test_forks_by_device_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    cpu = fmtsim.trace(model, torch.ones(2, 4), level="aten")
    silu = next(one for one in cpu.operations if "silu" in one.operation)
    others = tuple(dataclasses.replace(silu, operation=f"aten::{name}") for name in ("sigmoid", "mul"))
    at = cpu.operations.index(silu)
    gpu = dataclasses.replace(cpu, operations=(*cpu.operations[:at], *others, *cpu.operations[at + 1 :]))
    assert list(device_forks(gpu, cpu)) == [
        "gpu  1 forward: aten::sigmoid float32[2, 4]\ngpu  1 forward: aten::mul float32[2, 4]\n"
        "cpu  1 forward: aten::silu float32[2, 4]"
    ]
    gpu.save(tmp_path / "gpu.safetensors")
    cpu.save(tmp_path / "cpu.safetensors")
    files = [str(tmp_path / f"{name}.safetensors") for name in ("gpu", "cpu")]
    assert main([files[0], "--log", files[1]]) == 1 and "aten::sigmoid" in capsys.readouterr().out
    assert main([files[1], "--log", files[1]]) == 0 and "both call the same" in capsys.readouterr().out
