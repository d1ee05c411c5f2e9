# SPDX-License-Identifier: Apache-2.0
"""Which GPU is the one that a target describes, and what is said where it is another, or set otherwise.

The GPU is made up: a device that says it is an H200.
"""

import pytest
import torch

import fmtsim
from fmtsim.engines import cuda
from fmtsim.engines.cuda import native as gpu
from fmtsim.gemm.products import native
from fmtsim.support.errors import NativeWarning

H200 = "NVIDIA H200 (132 multiprocessors), torch 2.11.0+cu130, cuBLASLt 13.1.0"


@pytest.mark.parametrize(
    ("library", "families", "reason"),
    [
        (H200, {"hopper"}, None),
        ("NVIDIA H200, cuBLASLt 13", {"hopper", "fp32_fma"}, None),
        ("NVIDIA H200 (114 or 132 multiprocessors), cuBLASLt 13", set(), None),
        ("NVIDIA H20 (132 multiprocessors), cuBLASLt 13", {"hopper"}, "is a NVIDIA H200, the target a NVIDIA H20"),
        ("NVIDIA B200, cuBLAS", {"blackwell"}, "the device is a NVIDIA H200, the target a NVIDIA B200"),
        ("NVIDIA H200 (78 multiprocessors)", {"hopper"}, "the device has 132 multiprocessors, the target 78"),
        (H200, {"blackwell"}, "compute capability 9.0, the target 10.x"),
        ("no library: every sum is one chain", set(), "which is not an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_gpus_are_told_apart(hopper, library, families, reason):
    found = gpu.other_gpu(library, frozenset(families), 0)
    assert found is None if reason is None else reason in found


def test_a_gpu_of_rocm_is_no_target(hopper):
    hopper.setattr(torch.version, "hip", "6.4")
    reason = "torch is built for ROCm, and the target is an NVIDIA GPU"
    assert gpu.other_gpu(H200, frozenset({"hopper"}), 0) == reason == native.why_not_native("h200", "cuda:0")


def test_the_plans_that_come_with_fmtsim(hopper):
    assert {name for name in fmtsim.list_targets() if native.is_native(name)} == {"h200"}
    assert "the target a NVIDIA A100" in native.why_not_native("a100", "cuda:0")


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", True),  # what torch takes on Hopper without it
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", False),
        ("NVIDIA_TF32_OVERRIDE", "0", False),
        ("CUBLASLT_WORKSPACE_SIZE", "4096", False),
    ],
)
def test_settings_that_change_the_librarys_choices(hopper, name, value, fine):
    assert gpu.other_settings(0) is None
    hopper.setenv(name, value)
    found = gpu.other_settings(0)
    assert found is None if fine else found.startswith(f"{name}={value} is set")


def test_other_settings_of_torch(hopper):
    hopper.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
    assert "torch.cuda.tunable chooses kernels of its own" in gpu.other_settings(0)
    hopper.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    hopper.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 16, raising=False)
    assert "16 multiprocessors are kept from FP8 products" in gpu.other_settings(0)


@pytest.mark.parametrize(
    ("torch_version", "blas", "said"),
    [
        ("2.11.0+cu130", "13.1.0", []),
        ("2.12.1+cu130", "13.1.0", ["torch 2.12.1+cu130 instead of 2.11.0+cu130"]),
        ("2.11.0+cu130", "13.2.4", ["cuBLASLt 13.2.4 instead of 13.1.0"]),
        ("2.11.0+cu130", None, []),
    ],
)
def test_versions_are_compared(monkeypatch, torch_version, blas, said):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(gpu, "cublaslt_version", lambda: blas)
    assert gpu.other_versions(H200) == said
    assert gpu.other_versions("NVIDIA H100, cuBLASLt 13") == []


def test_other_versions_warn_once(monkeypatch):
    monkeypatch.setattr(cuda, "other_versions", lambda library: ["torch 3 instead of 2"])
    native._warn_of_versions.cache_clear()
    with pytest.warns(NativeWarning, match="target h200 was recorded with other versions than are here: torch 3 inst"):
        native._warn_of_versions("h200", H200)
    native._warn_of_versions("h200", H200)
    native._warn_of_versions.cache_clear()
