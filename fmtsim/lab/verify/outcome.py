# SPDX-License-Identifier: Apache-2.0
"""Checks as tasks, their outcomes, and the engines of this machine or of a device that they compare."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import fmtsim
from fmtsim.casts import ops
from fmtsim.casts.ops import load_engine
from fmtsim.lab.analysis.compare import compare
from fmtsim.spec.cast import CastSpec, EncodedParts, Random
from fmtsim.spec.engine import Casts
from fmtsim.support.errors import ArgumentError, DataError, DeviceError
from fmtsim.support.table import Record

Found = TypeVar("Found")
Advance = Callable[[float], None]
"""Called with the share of a check that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Record):
    """Say how many results of one check on one format were compared, how many differed, and where first."""

    check: str
    format: str
    cases: int
    mismatches: int
    first: str = ""
    seconds: float = field(default=0.0, compare=False)


class Task(NamedTuple):
    """Name one check; ``run`` does it, tells its argument the share that is done, and returns what it found."""

    name: str
    run: Callable[[Advance], Any]


def task_of(name: str, check: Callable[[Advance], Found], failed: Callable[[str], Found]) -> Task:
    """Return a task that takes its own time, and for which an error of the check is a mismatch.

    Args:
        name: What a progress bar shows.
        check: The check; a DataError of it ends the command.
        failed: What is found where the check raises another error, from a text that names it: the others are still
            worth running.
    """

    def run(advance: Advance) -> Found:
        start = time.perf_counter()
        try:
            result = check(advance)
        except DataError:
            raise
        except Exception as error:
            result = failed(f"raised {type(error).__name__}: {error}")
        advance(1.0)
        return replace(result, seconds=time.perf_counter() - start)  # type: ignore[type-var]  # a dataclass

    return Task(name, run)


class Tally:
    """Count comparisons of bits and remember the first that differ."""

    def __init__(self, check: str, format: str) -> None:
        self._check, self._format = check, format
        self._cases = self._mismatches = 0
        self._first = ""

    def compare(self, got: torch.Tensor, right: torch.Tensor, inputs: torch.Tensor, what: str) -> None:
        """Compare two tensors bit for bit; ``inputs`` has the same shape and names the numbers they came from."""
        self._cases += right.numel()
        if got.shape != right.shape or got.dtype != right.dtype:
            self._mismatches += max(right.numel(), 1)
            kinds = f"{got.dtype} {tuple(got.shape)}, expected {right.dtype} {tuple(right.shape)}"
            self._first = self._first or f"{what}: {kinds}"
            return
        if torch.equal(bits_of(got), bits_of(right)):
            return
        diff = compare(got.reshape(-1), right.reshape(-1))
        self._mismatches += diff.mismatches
        if not self._first and diff.first is not None:
            (index,) = diff.first.index
            input_text = f" of {inputs.reshape(-1)[index].item()!r}" if inputs.shape == right.shape else ""
            actual, expected = (f"{x!r} ({code})" for x, code in zip(diff.first.values, diff.first.hex, strict=True))
            self._first = f"{what}: element {index}{input_text} is {actual}, expected {expected}"

    def outcome(self) -> Outcome:
        """Return what was counted so far."""
        return Outcome(
            check=self._check, format=self._format, cases=self._cases, mismatches=self._mismatches, first=self._first
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


def engines(device: torch.device | None = None) -> dict[str, Casts]:
    """Return the engines that run on this machine's CPU (the numba engine only where numba loads), and a device's."""
    by_name: dict[str, Casts] = {"torch_engine": load_engine("torch_engine")}
    with contextlib.suppress(ImportError):
        by_name["cpu"] = load_engine("cpu")
    if device is not None:
        by_name[str(device)] = OnDevice(device)
    return by_name


def covers(engine: Casts, verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Return True if an engine covers a cast; engines without ``supports`` cover all."""
    supports = getattr(engine, "supports", None)
    return supports is None or bool(supports(verb, spec, *tensors))


class PlantedError:
    """Wrap an engine so that the lowest bit of one result of each call is wrong: a check must see it."""

    def __init__(self, engine: Casts) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def quantize(self, x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
        """Quantise, then flip a bit of the last element."""
        self._engine.quantize(x, spec, random, out)
        _flip(out)

    def encode(self, x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Encode, then flip a bit of the last code."""
        parts = self._engine.encode(x, spec, random)
        _flip(parts.codes)
        return parts

    def decode(self, parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
        """Decode, then flip a bit of the last element."""
        self._engine.decode(parts, spec, out)
        _flip(out)


def _flip(tensor: torch.Tensor) -> None:
    if tensor.numel():
        bits = bits_of(tensor).reshape(-1)
        bits[-1] ^= 1
        tensor.copy_((bits.view(tensor.dtype) if tensor.dtype.is_floating_point else bits).reshape(tensor.shape))


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
    import fmtsim.cuda

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
