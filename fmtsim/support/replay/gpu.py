# SPDX-License-Identifier: Apache-2.0
"""What of torch's GPUs every call asks: torch's own C functions, where it has them."""

from collections.abc import Callable

import torch

current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def captures(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured: what it makes is not there before it runs, and must not be kept."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
