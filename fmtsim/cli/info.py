"""``fmtsim info``: what this installation is made of and what it can run."""

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.cli.options import add_json
from fmtsim.cli.output import answer, format_table, version_of, versions_of
from fmtsim.ops import load_engine

CORE = ("torch", "numpy", "ml-dtypes", "numba", "llvmlite")
EXTRAS = ("safetensors", "rich", "matplotlib", "cuda-core")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print versions, devices, engines and threads."""
    record = collect()
    answer(arguments, record, lambda: _text(record))
    return 0


def _text(record: dict[str, Any]) -> str:
    devices = [(device["name"], device["description"]) for device in record["devices"]]
    engines = [(e["name"], "yes" if e["available"] else "no", e["reason"]) for e in record["engines"]]
    tables = (
        (("package", "version"), record["versions"].items()),
        (("device", "description"), devices),
        (("engine", "available", "what it runs on, or why it is missing"), engines),
    )
    parts = [format_table(header, rows, left=(0, 1, 2)) + "\n" for header, rows in tables]
    folder = record["kernel_cache"] or "none: kernels are compiled anew in every process"
    parts += [f"threads of the cpu engine   {record['threads']}", f"folder of compiled kernels  {folder}"]
    return "\n".join(parts)


def collect() -> dict[str, Any]:
    """Return everything that ``fmtsim info`` shows, as plain JSON types."""
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
    devices = [{"name": "cpu", "description": f"{processor_name()}, {os.cpu_count()} logical cores"}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"compute capability {properties.major}.{properties.minor}"
        devices.append({"name": f"cuda:{index}", "description": f"{properties.name}, {memory:.0f} GiB, {capability}"})
    return devices


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
    from fmtsim import cuda

    reason = cuda.why_unavailable()
    return {"name": "cuda", "available": reason is None, "reason": reason or "tensors on CUDA devices, by CUDA kernels"}
