# SPDX-License-Identifier: Apache-2.0
"""Compile, cache, load and launch kernels: ``kernel(file, name, index, defines)`` returns one."""

from fmtsim.cuda.runtime.launch import Kernel
from fmtsim.cuda.runtime.program import (
    KERNELS,
    Defines,
    Program,
    Programs,
    architecture,
    available,
    cache_folder,
    capability,
    compiled,
    device_index,
    finished,
    index_of,
    kernel,
    multiprocessors,
    serves,
    shared_limit,
    source_of,
    warmup,
    why_unavailable,
)

__all__ = [
    "KERNELS", "Defines", "Kernel", "Program", "Programs", "architecture", "available", "cache_folder",
    "capability", "compiled", "device_index", "finished", "index_of", "kernel", "multiprocessors", "serves",
    "shared_limit", "source_of", "warmup", "why_unavailable",
]  # fmt: skip
