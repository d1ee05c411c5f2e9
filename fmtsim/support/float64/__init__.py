# SPDX-License-Identifier: Apache-2.0
"""Float64 arithmetic on every device: of torch where a device has the dtype, else in integers, with the same bits.

Apple's GPUs and some of Intel's compute no float64. Code that works on float64 tensors makes them with the functions
below, and gets a tensor or a ``Float64``: operators and torch's functions take both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fmtsim.support.errors import DtypeError
from fmtsim.support.float64.arithmetic import floor_log2, widen
from fmtsim.support.float64.numbers import Float64, pattern

__all__ = ["Float64", "capable", "check_float64", "constants", "float64", "floor_log2", "from_bits", "has_float64"]


def has_float64(device: torch.device) -> bool:
    """Return True if a device computes in float64. Not cached: a dispatch mode may stand in for a device."""
    if device.type in ("mps", "xpu"):
        return device.type == "xpu" and bool(torch.xpu.get_device_properties(device).has_fp64)
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except Exception:  # each backend has its own
        return False
    return True


def capable(x: Tensor) -> Tensor:
    """Return a tensor on a device that has float64: where its own has none, a copy on the CPU."""
    return x if has_float64(x.device) else x.cpu()


def check_float64(device: torch.device, what: str, instead: str) -> None:
    """Refuse results in float64 on a device that computes none."""
    if not has_float64(device):
        raise DtypeError(f"{what} is float64, which {device} does not have; {instead}")


def float64(x: Tensor) -> Tensor:
    """Return float16, bfloat16, float32 or float64 elements, or integers up to ``2**53``, as float64, exactly.

    Where the device has float64 this is torch's own conversion: a process that flushes float32 subnormals makes zeros
    of them.
    """
    if x.dtype == torch.float64 or has_float64(x.device):
        return x.to(torch.float64)
    return Float64(widen(x))  # type: ignore[return-value]  # takes a tensor's place


def from_bits(bits: Tensor) -> Tensor:
    """Return the float64 numbers of int64 bit patterns."""
    return bits.view(torch.float64) if has_float64(bits.device) else Float64(bits)  # type: ignore[return-value]


def constants(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return a table of float64 numbers."""
    return from_bits(torch.tensor([pattern(number) for number in numbers], dtype=torch.int64, device=device))
