# SPDX-License-Identifier: Apache-2.0
"""How devices share out a run."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from fmtsim.casts.arguments import check_flags
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import as_int, checked

Zero = Literal[0, 1, 2, 3]
MOST = 10**12  # of devices, tokens and the like; more would be a slip


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Say how devices share out a run.

    Args:
        count: All of them.
        zero: What the data-parallel ones share out: nothing, states, gradients too, weights too.
        parallel: Devices that share out each layer.
        sequence: They share out the tokens, too.
    """

    count: int = 1
    zero: Zero = 0
    parallel: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        for name, value in (("devices", self.count), ("tensor_parallel", self.parallel)):
            positive(name, value)
        if self.count % self.parallel:
            raise ArgumentError(
                f"tensor_parallel={self.parallel} does not divide devices={self.count}; choose a divisor"
            )
        checked("zero", self.zero, Zero)
        check_flags(sequence_parallel=self.sequence)

    def share(self, total: float, stage: int) -> int:
        """Return the bytes of one device of what is shared out from a stage of ZeRO on."""
        return ceil(total / (self.parallel * self._parts(stage)))

    def words(self, stage: int) -> str:
        """Return by what a total is divided, in words."""
        parts = [f" / {self.parallel} (tensor parallel)"] if self.parallel > 1 else []
        parts += [f" / {self._parts(stage)} (ZeRO {self.zero})"] if self._parts(stage) > 1 else []
        return "".join(parts)

    def _parts(self, stage: int) -> int:
        return self.count // self.parallel if self.zero >= stage else 1


def positive(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number from ``least``.

    Raises:
        ArgumentError: It is none.
    """
    found = as_int(value)
    if type(found) is not int or not least <= found <= MOST:
        raise ArgumentError(f"{name}={shown(value)} is not possible; choose a whole number from {least} to 10**12")
    return found
