# SPDX-License-Identifier: Apache-2.0
"""Settings under which the same training gives the same bits again on a GPU."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# One of the two settings that torch accepts as deterministic, and on Hopper the workspace that it takes by default:
# the library's choices stay what they are without it.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Let torch take deterministic algorithms alone, attention its plain one, and no TF32; then restore all of it.

    On the CPU nothing is changed. The settings belong to the process: other threads see them too.

    Args:
        device: Where the training runs.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    name, value = WORKSPACE
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, precision = memory.fill_uninitialized_memory, torch.backends.cuda.matmul.fp32_precision
    unset = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # nothing here reads what it did not write
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if unset:
            os.environ.pop(name, None)
