# SPDX-License-Identifier: Apache-2.0
"""A device under test: its engine behind the verbs that the checks call with tensors of the CPU."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import fmtsim
from fmtsim.casts import ops
from fmtsim.spec.cast import CastSpec, EncodedParts, Random
from fmtsim.support.errors import ArgumentError, DeviceError

Choose = Callable[..., Any]


def device_of(name: str) -> torch.device:
    """Return the device of a name such as ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ArgumentError: The name is not one of a CUDA device.
        DeviceError: The CUDA engine does not run there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda":
        raise ArgumentError(f"--device {name} is not a CUDA device; choose cuda or cuda:1, or leave it out for the CPU")
    import fmtsim.engines.cuda

    reason = fmtsim.cuda.why_unavailable(device)
    if reason is not None:
        raise DeviceError(f"nothing can be checked on {name}: {reason}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def described(device: torch.device) -> str:
    """Return one line about a device, its software and the day, as the head of a record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    today = datetime.now(UTC).date().isoformat()
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, fmtsim {fmtsim.__version__}, {today}"


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with the strides that it has."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


class OnDevice:
    """An engine of casts that takes tensors of the CPU and computes on a device, as a user's call there does."""

    def __init__(self, device: torch.device, choose: Choose = ops.engine_for) -> None:
        self._device, self._choose = device, choose

    def quantize(self, x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> None:
        """Write the values that x rounds to into out."""
        there, result = moved(x, self._device), moved(out, self._device)
        self._choose("quantize", spec, there, result).quantize(there, spec, self._drawn(random), result)
        out.copy_(result)

    def encode(self, x: Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Return codes and scales."""
        there = moved(x, self._device)
        parts = self._choose("encode", spec, there).encode(there, spec, self._drawn(random))
        return EncodedParts(*(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]

    def decode(self, parts: EncodedParts, spec: CastSpec, out: Tensor) -> None:
        """Write the values of codes into out."""
        result = moved(out, self._device)
        there = EncodedParts(*(None if part is None else moved(part, self._device) for part in parts))  # type: ignore[arg-type]
        self._choose("decode", spec, result).decode(there, spec, result)
        out.copy_(result)

    def _drawn(self, random: Random) -> Random:
        return moved(random, self._device) if isinstance(random, Tensor) else random
