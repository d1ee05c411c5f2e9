# SPDX-License-Identifier: Apache-2.0
"""Values of a kernel's source lines while it runs: what ``launch(watch=...)`` shows."""

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fmtsim.machine.ptx.parse import Instruction
from fmtsim.support.errors import ArgumentError, shown

Note = tuple[Instruction, str, np.ndarray, np.ndarray]  # of a watched line: its register, its values, who ran


@dataclass(slots=True, kw_only=True)
class Watch:
    """What a launch is to show, and what it noted."""

    places: frozenset[str] = frozenset()  # of the source
    block: tuple[int, ...] | None = (0, 0, 0)  # None: all blocks
    threads: tuple[int, ...] = ()
    alone: bool = False  # no other block runs
    notes: list[Note] = field(default_factory=list)
    writers: dict[int, np.ndarray] = field(default_factory=dict)  # of storages: 1 + the block that wrote an element

    def writer(self, x: torch.Tensor, index: tuple[int, ...], grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the block that wrote an element last.

        Raises:
            ArgumentError: No block wrote it, or it is not known.
        """
        at = x.storage_offset() + sum(i * step for i, step in zip(index, x.stride(), strict=True))
        written = self.writers.get(x.untyped_storage().data_ptr(), np.zeros(0, np.int32))
        if not len(written) and grid != (1, 1, 1):
            raise ArgumentError("the kernel has atomics, so that a block may depend on others; look with watch=")
        number = int(written[at]) - 1 if len(written) else 0
        if number < 0:
            raise ArgumentError(f"no block writes element {list(index)}; choose another one")
        return number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])


def all_places(body: Sequence[Instruction]) -> frozenset[str]:
    """Return all source lines of a kernel."""
    return frozenset(place for x in body for place in (x.source, *x.callers) if place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What one instruction of a watched line wrote, in the threads that were chosen."""

    source: str  # "kernels.py:5"
    instruction: str
    values: (
        torch.Tensor
    )  # [threads], of the instruction's type; bits without a type are float32 where they have 32 bits

    def __str__(self) -> str:
        numbers = ", ".join(f"{x:.9g}" if isinstance(x, float) else str(x) for x in self.values.tolist())
        return f"{self.source}  {' '.join(self.instruction.split()):46}  {numbers}"


def source_function(kernel: Any) -> Any:
    """Return the Python function of a Triton kernel, None of a text."""
    while not inspect.isfunction(kernel) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel if inspect.isfunction(kernel) else None


def places(kernel: Any, watch: str | int | Sequence[str | int]) -> frozenset[str]:
    """Return the source lines that ``watch`` names: a line's number, ``file.py:5``, or a variable of a Triton function.

    Raises:
        ArgumentError: A variable that the function does not assign, or a number of a kernel without a file.
    """
    found: set[str] = set()
    function = source_function(kernel)
    file = function.__code__.co_filename.rpartition("/")[2] if function is not None else "kernel.cu"
    items: Sequence[Any] = watch if isinstance(watch, list | tuple) else [watch]
    for item in items:
        if isinstance(item, str) and ":" in item:
            found.add(item)
        elif isinstance(item, int):
            found.add(f"{file}:{item}")
        else:
            lines = _assignments(function, str(item)) if function is not None else []
            if not lines:
                raise ArgumentError(
                    f"watch={shown(item)} is not assigned in the kernel; give a variable, a line, or 'file.py:5'"
                )
            found |= {f"{file}:{line}" for line in lines}
    return frozenset(found)


def _assignments(function: Any, name: str) -> list[int]:
    """Return the lines on which a function assigns a variable."""
    lines, start = inspect.getsourcelines(function)
    indent = len(lines[0]) - len(lines[0].lstrip())
    tree = ast.parse("".join(line[indent:] if line.strip() else line for line in lines))
    found = []
    for node in ast.walk(tree):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AugAssign | ast.AnnAssign)
            else []
        )
        names = {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
        if name in names:
            found.append(start + node.lineno - 1)  # type: ignore[attr-defined]
    return found


_BITWISE = ("and", "or", "xor", "not", "shl", "prmt", "bfi")  # of addresses and codes, shown as integers
_TYPES = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "s64": np.int64, "b32": np.float32, "s16": np.int16}


def watched(notes: Sequence[Note], threads: Sequence[int]) -> tuple[Watched, ...]:
    """Return the notes of a block for the threads that were chosen."""
    result = []
    for instruction, _, words, running in notes:
        chosen = [t for t in threads if running[t]]
        if not chosen:
            continue
        kind = next((part for part in reversed(instruction.opcode) if part in _TYPES or part in ("f16", "bf16")), "")
        # of a conversion the last but one type is the result's
        if instruction.opcode[0] == "cvt":
            kind = instruction.opcode[-2]
        elif instruction.opcode[0] in _BITWISE:
            kind = ""
        codes = words[chosen]
        if kind in ("f16", "bf16") and codes.itemsize == 2:
            values = torch.from_numpy(codes.view(np.int16)).view(torch.float16 if kind == "f16" else torch.bfloat16)
        elif kind in _TYPES and np.dtype(_TYPES[kind]).itemsize == codes.itemsize:
            values = torch.from_numpy(codes.view(_TYPES[kind]))
        else:
            values = torch.from_numpy(codes.astype(np.int64))
        result.append(Watched(source=instruction.source, instruction=instruction.text, values=values))
    return tuple(result)
