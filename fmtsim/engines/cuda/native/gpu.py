# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU, its library and its settings are those that a target was recorded on."""

import ctypes
import os
import re
from functools import cache

import torch

# Variables that give cuBLAS another workspace, another arithmetic or another choice of kernels.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "NVIDIA_TF32_OVERRIDE",
    "DISABLE_ADDMM_CUDA_LT",
)
# What torch takes for CUBLAS_WORKSPACE_CONFIG where it is not set, by major compute capability: 32 MiB on Hopper.
_SAME_WORKSPACE = {9: (":4096:8",)}
# Major compute capabilities of the families after which units are named.
_MAJORS = {"volta": 7, "turing": 7, "ampere": 8, "ada": 8, "hopper": 9, "blackwell": 10, "rtx_blackwell": 12}
_LIBRARY = re.compile(r"(?P<gpu>NVIDIA [^(,]+?)\s*(\((?P<sizes>[^)]*) multiprocessors\))?(,|$)")


def other_gpu(library: str, families: frozenset[str], index: int) -> str | None:
    """Return why a device is not the GPU of a target, None where it is.

    Args:
        library: ``Target.library``: the GPU's name first, its multiprocessors in brackets, then versions.
        families: Names of GPU families that the target's units belong to.
        index: Number of the device.
    """
    if torch.version.hip is not None:
        return "torch is built for ROCm, and the target is an NVIDIA GPU"
    found = _LIBRARY.match(library)
    if found is None:
        return f"its library is {library!r}, which is not an NVIDIA GPU"
    name, wanted = torch.cuda.get_device_name(index), found["gpu"]
    if re.match(rf"{re.escape(wanted)}(?![0-9A-Za-z])", name) is None:
        return f"the device is a {name}, the target a {wanted}"
    majors = {_MAJORS[family] for family in families if family in _MAJORS}
    major, minor = torch.cuda.get_device_capability(index)
    if majors and major not in majors:
        return f"the device has compute capability {major}.{minor}, the target {min(majors)}.x"
    count = torch.cuda.get_device_properties(index).multi_processor_count
    if found["sizes"] is not None and count not in map(int, re.findall(r"\d+", found["sizes"])):
        return f"the device has {count} multiprocessors, the target {found['sizes']}"
    return None


def other_settings(index: int) -> str | None:
    """Return which setting of the process gives cuBLAS other choices than a target's records, None where none does."""
    for name in _VARIABLES:
        value = os.environ.get(name)
        if value is None:
            continue
        major = torch.cuda.get_device_capability(index)[0]
        if name != "CUBLAS_WORKSPACE_CONFIG" or value not in _SAME_WORKSPACE.get(major, ()):
            return f"{name}={value} is set, with which cuBLAS may choose other kernels; unset it before Python starts"
    if torch.cuda.tunable.is_enabled():
        return "torch.cuda.tunable chooses kernels of its own; torch.cuda.tunable.enable(False) ends that"
    carveout = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)()
    if carveout is not None:
        return f"{carveout} multiprocessors are kept from FP8 products (torch's sm_carveout); set it back to None"
    return None


def other_versions(library: str) -> list[str]:
    """Return which versions differ from those in a target's ``library``: ``"torch 2.12.0 instead of 2.11.0"``, ..."""
    here = {"torch": torch.__version__, "cuBLASLt": cublaslt_version()}
    different = []
    for name, version in here.items():
        recorded = re.search(rf"{name} (\S+?)(,|$)", library)
        if recorded is not None and version is not None and not _same(version, recorded[1]):
            different.append(f"{name} {version} instead of {recorded[1]}")
    return different


def _same(here: str, recorded: str) -> bool:
    """Compare as many parts of a version as were recorded."""
    return here == recorded or here.startswith(f"{recorded}.") or here.startswith(f"{recorded}+")


@cache
def cublaslt() -> ctypes.CDLL | None:
    """Return the cuBLASLt that torch loads; None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@cache
def cublaslt_version() -> str | None:
    """Return the version of the cuBLASLt that torch loads, ``"13.1.0"``; None where it cannot be asked."""
    library = cublaslt()
    try:
        if library is None:
            return None
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        number = int(library.cublasLtGetVersion())
    except AttributeError:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
