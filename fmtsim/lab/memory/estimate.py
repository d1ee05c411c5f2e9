# SPDX-License-Identifier: Apache-2.0
"""An estimate of memory: a line for each kind of tensor on one device, bits of numbers, and devices of a run."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from fmtsim.casts.arguments import check_flags
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.element import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import as_int, checked
from fmtsim.support.table import Column, Result, Rows, aligned, table_of

GB = 10**9
_UNITS = (("GB", GB, GB // 10), ("MB", 10**6, 10**6), ("KB", 10**3, 0))  # unit, bytes, and the total it begins at
_COLUMNS = (Column("on each device", "name"), Column("kept as", "kept"))
_SAVED = (
    Column("saved in a block", "name"), Column("elements a token", "elements", ">,g"), Column("kept as", "kept"),
    Column("bytes a token", "bytes", ">,g"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Give the memory of one kind of tensor on one device.

    Args:
        name: Its kind, such as ``"weights"``.
        kept: In which format.
        bytes: How much it is.
        formula: How the bytes follow.
    """

    name: str
    kept: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Describe one tensor of a block that waits for the backward pass.

    Args:
        name: What it is, such as ``"input of the first norm"``.
        elements: Of a token, on one device.
        kept: In which formats.
        bytes: Of a token, on one device.
    """

    name: str
    elements: float
    kept: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Result):
    """Say what a run needs on each device. It prints as a table, also in notebooks.

    Args:
        what: The model and the run.
        parameters: Of the whole model.
        lines: What is counted, in bytes of one device.
        saved: The tensors of the last block that wait for the backward pass, where activations are counted.
        notes: What is not counted, and what was assumed.
    """

    what: str
    parameters: int
    lines: tuple[MemoryLine, ...]
    saved: tuple[SavedTensor, ...] = ()
    notes: tuple[str, ...] = ()
    _derived = ("total",)

    @property
    def total(self) -> int:
        """Bytes of one device."""
        return sum(line.bytes for line in self.lines)

    @property
    def gigabytes(self) -> float:
        """The same in units of 10^9 bytes."""
        return self.total / GB

    def __getitem__(self, name: str) -> int:
        """Return the bytes of a line, 0 where the estimate has none of that name.

        Raises:
            ArgumentError: No estimate has a line of that name.
        """
        if name not in NAMES:
            raise ArgumentError(f"a memory estimate has no line {shown(name)}; choose one of {', '.join(NAMES)}")
        return sum(line.bytes for line in self.lines if line.name == name)

    def formulas(self) -> str:
        """Return the formula of each line, and the tensors of a block that wait for the backward pass, as text."""
        text = aligned([(line.name, line.formula) for line in self.lines])
        if self.saved:
            text += ["", *aligned(*table_of(_SAVED, self.saved))]
        return "\n".join(text)

    def _content(self) -> Iterable[Rows | str]:
        yield self.what
        total = MemoryLine(name="total", kept="", bytes=self.total, formula="")
        unit, size, _ = next(row for row in _UNITS if self.total >= row[2])
        scaled = Column(unit, lambda line: line.bytes / size, ">,.3f")
        share = Column("share", lambda line: None if line is total else line.bytes / max(self.total, 1), ">.1%")
        yield table_of((*_COLUMNS, scaled, share), (*self.lines, total))
        yield from (f"{note}." for note in self.notes)


NAMES = (
    "weights", "quantised weights", "adapters", "master weights", "gradients", "first moment", "second moment",
    "scale histories", "activations", "head and loss", "gradients of the logits", "recomputed block", "KV cache",
)  # fmt: skip
"""Lines that estimates have."""


ELEMENTS = FloatFormat | IntFormat | CodebookFormat | LogFormat


def bits_per_element(fmt: str | Format, columns: int | None = None) -> float:
    """Return the bits of an element with its share of the scales of blocks.

    Args:
        fmt: A format, by name or as a record.
        columns: Extent of the axis that blocks run along, for a format with a scale a row; None leaves out scales that
            are shared by a whole extent. The scale of a whole tensor is never counted.

    Raises:
        FormatError: There is no such format.

    >>> bits_per_element("bf16"), bits_per_element("nvfp4"), bits_per_element("int8_channel", 4096)
    (16.0, 4.5, 8.0078125)
    """
    record = get_format(fmt)
    if isinstance(record, ELEMENTS):
        return float(record.bits)
    if isinstance(record, BlockFormat) and columns is not None and record.block[0] is not None:
        record = replace(record, scaling=replace(record.scaling, block=(record.block[0], record.block[1] or columns)))
    return float(record.bits_per_element)


def bits_of(quantizer: Quantizer) -> float | None:
    """Return the bits of an element of a quantised operand with its share of scales, None where it is not quantised.

    Scales that a whole row, column or tensor shares are not counted.
    """
    if quantizer.format is None:
        return None
    bits, scaling = bits_per_element(quantizer.format), quantizer.scaling
    if scaling is not None and None not in scaling.block:
        outer, inner = scaling.block
        bits += scaling.scale.bits / (outer * inner)  # type: ignore[operator]
    return bits


Zero = Literal[0, 1, 2, 3]
MOST = 10**12  # of devices, tokens and the like; more would be a slip


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Describe how devices shard a training run.

    Args:
        devices: All devices; those that are not tensor parallel are data parallel.
        zero: What data-parallel devices shard (ZeRO): 1 optimizer states and master weights, 2 gradients as well, 3
            weights as well, as FSDP does.
        tensor_parallel: Devices over which each layer is sharded.
        sequence_parallel: Those devices also shard the activations between the layers.
    """

    devices: int = 1
    zero: Zero = 0
    tensor_parallel: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("devices", "tensor_parallel"):
            positive(name, getattr(self, name))
        if self.devices % self.tensor_parallel:
            raise ArgumentError(
                f"tensor_parallel={self.tensor_parallel} does not divide devices={self.devices}; choose a divisor"
            )
        checked("zero", self.zero, Zero)
        check_flags(sequence_parallel=self.sequence_parallel)

    def share(self, total: float, stage: int) -> int:
        """Return the bytes on one device of a tensor that is sharded from a stage of ZeRO on."""
        return ceil(total / (self.tensor_parallel * self._shards(stage)))

    def words(self, stage: int) -> str:
        """Return the divisors of a total, in words."""
        divisors = [f" / {self.tensor_parallel} (tensor parallel)"] if self.tensor_parallel > 1 else []
        divisors += [f" / {self._shards(stage)} (ZeRO {self.zero})"] if self._shards(stage) > 1 else []
        return "".join(divisors)

    def _shards(self, stage: int) -> int:
        return self.devices // self.tensor_parallel if self.zero >= stage else 1


def positive(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number from ``least``.

    Raises:
        ArgumentError: It is none.
    """
    number = as_int(value)
    if type(number) is not int or not least <= number <= MOST:
        raise ArgumentError(f"{name}={shown(value)} is not possible; choose a whole number from {least} to 10**12")
    return number
