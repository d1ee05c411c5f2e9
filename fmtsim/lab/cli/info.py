# SPDX-License-Identifier: Apache-2.0
"""``fmtsim info``: what this installation is made of and what it can run."""

import argparse
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fmtsim
from fmtsim.lab.cli.output import answer, format_table, version_of, versions_of

if TYPE_CHECKING:
    import torch

CORE = ("torch", "numpy", "ml-dtypes", "numba", "llvmlite")
EXTRAS = ("safetensors", "rich", "matplotlib", "cuda-core")


def run(arguments: argparse.Namespace) -> int:
    """Print versions, devices, engines and threads."""
    record = collect()
    answer(arguments, record, lambda: _text(record))
    return 0


def _text(record: dict[str, Any]) -> str:
    devices = [(device["name"], device["description"]) for device in record["devices"]]
    served = [(device["name"], device["engine"], device["cost"]) for device in record["devices"]]
    engines = [(e["name"], "yes" if e["available"] else "no", e["reason"]) for e in record["engines"]]
    tables = (
        (("package", "version"), record["versions"].items()),
        (("device", "description"), devices),
        (("engine", "available", "what it runs on, or why it is missing"), engines),
        (("device", "engine", "what it costs"), served),
    )
    parts = [format_table(header, rows, left=(0, 1, 2)) + "\n" for header, rows in tables]
    folder = record["kernel_cache"] or "none: kernels are compiled anew in every process"
    parts += [f"threads of the cpu engine   {record['threads']}", f"folder of compiled kernels  {folder}"]
    return "\n".join(parts)


def collect() -> dict[str, Any]:
    """Return everything that ``fmtsim info`` shows, as plain JSON types."""
    from fmtsim.casts.ops import load_engine

    engines = [
        {"name": "torch_engine", "available": True, "reason": "tensors on any device; the fallback of the others"},
        _cpu_engine(),
        _cuda_engine(),
    ]
    folder = load_engine("cpu").cache_folder() if engines[1]["available"] else None
    return {
        "versions": {
            "fmtsim": version_of("fmtsim"),
            "python": platform.python_version(),
            **versions_of((*CORE, *EXTRAS)),
        },
        "platform": platform.platform(),
        "devices": _devices(),
        "engines": engines,
        "threads": fmtsim.get_num_threads(),
        "kernel_cache": str(folder) if folder else None,
    }


def _devices() -> list[dict[str, str]]:
    import torch

    devices = [("cpu", f"{processor_name()}, {os.cpu_count()} logical cores")]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        kind = f"compute capability {properties.major}.{properties.minor}"
        kind = kind if torch.version.hip is None else f"ROCm {torch.version.hip}"
        memory = properties.total_memory / 2**30
        devices.append((f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, {kind}"))
    devices += [(f"xpu:{index}", torch.xpu.get_device_name(index)) for index in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        devices.append(("mps", f"{processor_name()}, Metal"))
    return [{"name": name, "description": about, **_service(torch.device(name), about)} for name, about in devices]


def _service(device: "torch.device", about: str) -> dict[str, str]:
    """Return which engine serves a device and what that costs, as far as it was measured (docs/performance.md)."""
    from fmtsim.casts.ops import load_engine
    from fmtsim.support.float64 import has_float64

    if device.type == "cpu" and _cpu_engine()["available"]:
        cost = "kernels: on one core of a Xeon, casts at 0.3 to 0.97 of a copy's speed, encoding at 0.1 to 0.5"
        return {"engine": "cpu", "cost": cost}
    if device.type == "cuda" and load_engine("cuda").why_unavailable(device) is None:
        cost = "kernels: on an H200, casts at 0.59 to 0.99 of a copy's speed, encoding at 0.39 to 1.02"
        return {"engine": "cuda", "cost": cost if "H200" in about else f"{cost}; not measured on this GPU"}
    cost = "one operation after another"
    if load_engine("torch_engine").compiles_casts(device.type):
        cost = f"casts to floating-point and integer formats compiled by torch.compile, all else {cost}"
    if not has_float64(device):
        cost += ", float64 in integers"
    return {"engine": "torch_engine", "cost": f"torch operations: {cost}; not measured here"}


def processor_name() -> str:
    """Return the processor's model name, or the machine type where the system does not say."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_engine() -> dict[str, Any]:
    try:
        import numba  # noqa: F401  # the one way to know that it loads: its shared libraries may not
    except Exception as error:  # numba raises plain exceptions for a numpy it does not know
        return {"name": "cpu", "available": False, "reason": f"numba cannot be imported: {error}"}
    return {"name": "cpu", "available": True, "reason": "tensors on the CPU, by numba kernels"}


def _cuda_engine() -> dict[str, Any]:
    from fmtsim.engines import cuda

    reason = cuda.why_unavailable()
    return {"name": "cuda", "available": reason is None, "reason": reason or "tensors on CUDA devices, by CUDA kernels"}
