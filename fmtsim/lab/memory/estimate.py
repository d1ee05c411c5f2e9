# SPDX-License-Identifier: Apache-2.0
"""What an estimate of memory says: a line for each kind of tensor, on one device."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.table import Rows, Tabular, aligned

GB = 10**9


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
class MemoryEstimate(Tabular):
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
            rows = [("saved in a block", "elements a token", "kept as", "bytes a token")]
            rows += [(each.name, f"{each.elements:,g}", each.kept, f"{each.bytes:,g}") for each in self.saved]
            text += ["", *aligned(rows, left=(0, 2))]
        return "\n".join(text)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, with the total."""
        return asdict(self) | {"total": self.total}

    def _content(self) -> Iterable[Rows | str]:
        yield self.what
        yield Rows(list(self._rows()), left=(0, 1))
        yield from (f"{note}." for note in self.notes)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield "on each device", "kept as", "GB", "share"
        for line in self.lines:
            share = line.bytes / self.total if self.total else 0.0
            yield line.name, line.kept, f"{line.bytes / GB:,.3f}", f"{share:.1%}"
        yield "total", "", f"{self.gigabytes:,.3f}", ""


NAMES = (
    "weights", "quantised weights", "adapters", "master weights", "gradients", "first moment", "second moment",
    "scale histories", "activations", "head and loss", "gradients of the logits", "recomputed block", "KV cache",
)  # fmt: skip
"""Lines that estimates have."""
