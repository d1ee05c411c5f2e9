"""Arithmetic of memory: what weights, caches and training states take in a format."""

from dataclasses import dataclass
from math import ceil, prod

from fmtsim.errors import ArgumentError
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.registry import get_format

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Describe how many bytes each parameter takes while a model is trained.

    Args:
        weight: The weight that products read.
        gradient: Its gradient.
        master: The copy that the optimizer updates, 0 where the weight is that.
        first: The first moment.
        second: The second moment.
    """

    weight: float
    gradient: float
    master: float = 0.0
    first: float = 0.0
    second: float = 0.0

    @property
    def total(self) -> float:
        """Bytes a parameter."""
        return self.weight + self.gradient + self.master + self.first + self.second

    def gigabytes(self, parameters: float) -> float:
        """Return the memory of a model in units of 10^9 bytes; scales of whole tensors are not counted."""
        return parameters * self.total / GB


# Micikevicius et al., arXiv:1710.03740 with Adam, as in ZeRO (arXiv:1910.02054, section 3.1); Peng et al., FP8-LM,
# arXiv:2310.18313, section 2.2, whose 6 bytes count the FP16 master as the only copy of the weight.
SCHEMES = {
    "fp32": TrainingMemory(weight=4, gradient=4, first=4, second=4),
    "mixed": TrainingMemory(weight=2, gradient=2, master=4, first=4, second=4),
    "fp8_lm": TrainingMemory(weight=0, gradient=1, master=2, first=1, second=2),
    "mixed_8bit_adam": TrainingMemory(weight=2, gradient=2, master=4, first=1, second=1),
}


def bits_per_element(fmt: str | Format, columns: int | None = None) -> float:
    """Return the bits of an element with its share of the scales.

    Args:
        fmt: A format, by name or as a record.
        columns: Extent of the axis that blocks run along, for a format with a scale a row or tensor; None leaves out
            scales that are shared by a whole extent, and the scale of a tensor.
    """
    found = get_format(fmt)
    if isinstance(found, LogTileFormat):
        raise ArgumentError(f"{found.name} has no scale a block to count; choose an element or block format")
    if not isinstance(found, BlockFormat):
        return float(found.bits)
    sizes = [columns if i and size is None else size for i, size in enumerate(found.block)]
    if any(size is None for size in sizes):
        return float(found.element.bits)
    shared = prod(size for size in sizes if size is not None)
    point = found.element.bits if found.zero_point else 0
    return found.element.bits + (found.scale.bits + point) / shared


def weight_gigabytes(parameters: float, fmt: str | Format) -> float:
    """Return the memory of weights in units of 10^9 bytes, scales of blocks included."""
    return parameters * bits_per_element(fmt) / 8 / GB


def cache_gigabytes(
    fmt: str | Format, *, layers: int, heads: int, features: int, tokens: int, sequences: int = 1
) -> float:  # fmt: skip
    """Return the memory of keys and values in units of 10^9 bytes; ``heads`` are those of keys, ``features`` of one."""
    return 2 * layers * heads * features * tokens * sequences * bits_per_element(fmt, features) / 8 / GB


def devices(gigabytes: float, each: float) -> int:
    """Return how many devices of so many gigabytes hold it, nothing else counted."""
    return max(1, ceil(gigabytes / each))
