# SPDX-License-Identifier: Apache-2.0
"""Float64 tensors where the device has the dtype, else one error; Apple's GPUs and some of Intel's compute none."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fmtsim.support.errors import DtypeError


def has_float64(device: torch.device) -> bool:
    """Return True if a device computes in float64."""
    if device.type in ("cpu", "cuda", "meta"):
        return True
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


def check_float64(
    device: torch.device, what: str = "a step of this operation", instead: str = "move the tensor to the CPU"
) -> None:
    """Refuse results or steps in float64 on a device that computes none."""
    if not has_float64(device):
        raise DtypeError(f"{what} is float64, which {device} does not have; {instead}")


def float64(x: Tensor) -> Tensor:
    """Return float16, bfloat16, float32 or float64 elements, or integers up to ``2**53``, as float64, exactly.

    The conversion is torch's own: a process that flushes float32 subnormals makes zeros of them.

    Raises:
        DtypeError: The device computes no float64.
    """
    check_float64(x.device)
    return x.to(torch.float64)


def from_bits(bits: Tensor) -> Tensor:
    """Return the float64 numbers of int64 bit patterns; raise DtypeError where the device computes no float64."""
    check_float64(bits.device)
    return bits.view(torch.float64)


def constants(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return a table of float64 numbers; raise DtypeError where the device computes no float64."""
    check_float64(device)
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def floor_log2(number: Tensor) -> Tensor:
    """Return ``floor(log2(number))`` of positive integers below ``2**62``, in their dtype.

    A number keeps its leading bit and loses the one below it, so that its rounding to float32 does not carry.
    """
    leading_bit = number & ~(number >> 1)
    return (leading_bit.to(torch.float32).view(torch.int32) >> 23).to(number.dtype) - 127
