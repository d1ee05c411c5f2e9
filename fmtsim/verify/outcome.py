"""What a check found, and the engines it looked at."""

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fmtsim.spec.cast import CastSpec, EncodedParts, Random
from fmtsim.verify.device import OnDevice


class Engine(Protocol):
    """The three verbs of an engine."""

    def quantize(self, x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
        """Write the values that x rounds to into out."""

    def encode(self, x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Return codes and scales."""

    def decode(self, parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
        """Write the values of codes into out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Say how many results of one check on one format were compared, how many differed, and where first."""

    check: str
    format: str
    cases: int
    mismatches: int
    first: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "check": self.check,
            "format": self.format,
            "cases": self.cases,
            "mismatches": self.mismatches,
            "first": self.first,
        }


class Tally:
    """Count comparisons of bits and remember the first that differ."""

    def __init__(self, check: str, format: str) -> None:
        self._check, self._format = check, format
        self._cases = self._mismatches = 0
        self._first = ""

    def compare(self, got: torch.Tensor, wanted: torch.Tensor, inputs: torch.Tensor, what: str) -> None:
        """Compare two tensors bit for bit; ``inputs`` has the same shape and names the numbers they came from."""
        self._cases += wanted.numel()
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            self._mismatches += max(wanted.numel(), 1)
            kinds = f"{got.dtype} {tuple(got.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
            self._first = self._first or f"{what}: {kinds}"
            return
        got_bits, wanted_bits = bits_of(got), bits_of(wanted)
        if torch.equal(got_bits, wanted_bits):
            return
        different = (got_bits != wanted_bits).reshape(-1)
        self._mismatches += int(different.sum())
        if not self._first:
            index = int(different.nonzero()[0])
            given = f" of {inputs.reshape(-1)[index].item()!r}" if inputs.shape == wanted.shape else ""
            found, expected = got.reshape(-1)[index].item(), wanted.reshape(-1)[index].item()
            digits = wanted.element_size() * 2
            mask = (1 << (4 * digits)) - 1
            raw = [int(bits.reshape(-1)[index]) & mask for bits in (got_bits, wanted_bits)]
            self._first = (
                f"{what}: element {index}{given} is {found!r} (0x{raw[0]:0{digits}X}), "
                f"expected {expected!r} (0x{raw[1]:0{digits}X})"
            )

    def outcome(self) -> Outcome:
        """Return what was counted so far."""
        return Outcome(
            check=self._check, format=self._format, cases=self._cases, mismatches=self._mismatches, first=self._first
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


def engines(device: torch.device | None = None) -> dict[str, Engine]:
    """Return the engines that run on this machine's CPU (the numba engine only where numba loads), and a device's."""
    found: dict[str, Engine] = {"torch_engine": importlib.import_module("fmtsim.torch_engine")}
    with contextlib.suppress(ImportError):
        found["cpu"] = importlib.import_module("fmtsim.cpu")
    if device is not None:
        found[str(device)] = OnDevice(device)
    return found


def covers(engine: Engine, verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Say whether an engine takes a cast; engines without ``supports`` take all."""
    supports = getattr(engine, "supports", None)
    return supports is None or bool(supports(verb, spec, *tensors))


class PlantedError:
    """Wrap an engine so that the lowest bit of one result of each call is wrong: a check must see it."""

    def __init__(self, engine: Engine) -> None:
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
        tensor.copy_(
            bits.view(tensor.dtype).reshape(tensor.shape)
            if tensor.dtype.is_floating_point
            else bits.reshape(tensor.shape)
        )
