# SPDX-License-Identifier: Apache-2.0
"""What of torch's GPUs every call asks, and numbers that are made once for a device and stay there."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def captures(device: torch.device | None = None) -> bool:
    """Return True while the current stream captures a CUDA graph; False for a device that is no GPU.

    What a captured call computes does not exist before the graph is replayed, so it must not be cached.
    """
    return (device is None or device.type == "cuda") and torch.cuda.is_current_stream_capturing()


def lasting(numbers: float | list[float] | list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers on a device, in memory that no CUDA graph owns.

    torch.compile with CUDA graphs runs what it will capture once before, with the graph's memory, where nothing may
    stay. That is the running thread's alone.
    """

    def make() -> torch.Tensor:
        constant = torch.tensor(numbers, dtype=dtype).to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # others read it on streams of their own
        return constant

    if device.type != "cuda":
        return make()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def constant(value: float, device: torch.device) -> torch.Tensor:
    """Return a number on a device, float32, 0-d, made once."""
    key = value, device
    if key in _constants:
        return _constants[key]
    if captures(device):
        return torch.full((), value, dtype=torch.float32, device=device)
    return _constants.setdefault(key, lasting(value, torch.float32, device))


_constants: dict[tuple[float, torch.device], torch.Tensor] = {}
