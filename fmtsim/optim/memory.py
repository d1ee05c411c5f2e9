# SPDX-License-Identifier: Apache-2.0
"""Bytes that training keeps for each parameter, by kind: measured, and by arithmetic."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fmtsim.optim import stepping
from fmtsim.optim.base import QuantizedOptimizer
from fmtsim.spec.optimizer import in_parameter

KINDS = ("parameters", "gradients", "first", "second", "weights", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Report the memory of an optimizer.

    Args:
        elements: Parameters, counted one by one.
        measured: Bytes of the tensors that are there, by kind: ``"parameters"``, ``"gradients"``, the states
            ``"first"`` and ``"second"``, ``"weights"`` (kept besides the parameters) and ``"other"``.
        expected: Bytes by arithmetic, codes and scales, of the states.
    """

    elements: int
    measured: Mapping[str, int]
    expected: Mapping[str, int]

    def per_parameter(self, *kinds: str) -> float:
        """Return the measured bytes a parameter of these kinds; of the optimizer's own where none is named."""
        chosen = kinds or ("first", "second", "weights", "other")
        return sum(self.measured[kind] for kind in chosen) / max(self.elements, 1)

    def __str__(self) -> str:
        lines = [f"{self.elements} parameters", f"{'':12s} {'bytes':>14s} {'a parameter':>12s} {'arithmetic':>14s}"]
        for kind, count in self.measured.items():
            expected = str(self.expected[kind]) if kind in self.expected else ""
            lines.append(f"{kind:12s} {count:14d} {count / max(self.elements, 1):12.4f} {expected:>14s}")
        return "\n".join(lines)


def memory(optimizer: QuantizedOptimizer) -> Memory:
    """Measure what an optimizer keeps; states exist from the first step on.

    Returns:
        Measured bytes by kind, and for states what the scheme's arithmetic gives.
    """
    measured, expected, elements = dict.fromkeys(KINDS, 0), dict.fromkeys(("first", "second", "weights"), 0), 0
    seen: set[tuple[object, int]] = set()  # memory that several tensors share counts once
    for group in optimizer.param_groups:
        for p in group["params"]:
            shape = tuple(stepping.local(p).shape)
            elements += stepping.local(p).numel()
            for kind, tensor in _tensors(p, optimizer):
                storage = tensor.untyped_storage()
                if (tensor.device, storage.data_ptr()) not in seen:
                    seen.add((tensor.device, storage.data_ptr()))
                    measured[kind] += storage.nbytes()
            if p not in optimizer.state:
                continue
            for slot, fmt in optimizer.scheme.formats(shape, optimizer.rule.slots).items():
                if slot != "weights" or not in_parameter(fmt, p.dtype):
                    expected[slot] += fmt.bytes_of(shape)
    return Memory(elements=elements, measured=measured, expected=expected)


def _tensors(p: Tensor, optimizer: QuantizedOptimizer) -> Iterator[tuple[str, Tensor]]:
    yield "parameters", stepping.local(p)
    if p.grad is not None:
        yield "gradients", stepping.local(p.grad)
    for name, value in optimizer.state.get(p, {}).items():
        if isinstance(value, Tensor):
            kind = name.split("_")[0]
            yield kind if kind in KINDS else "other", value
