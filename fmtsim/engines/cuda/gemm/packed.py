# SPDX-License-Identifier: Apache-2.0
"""What fast paths share: one kernel packs each operand panel by panel, another computes the tiles of the product.

A fast path is a module with ``programs(job)``, the kernels that it launches for a product, first the product's, then
those that pack a and b, None where it does not take the product, decided from facts of the host alone; and with
``run(job, sums, marks)``, which writes the sums [parts, M, N] of all tiles but those that it marks.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.gemm.job import TILE, Job
from fmtsim.engines.cuda.runtime import Program, Programs

THREADS: Final = 256


class Side(NamedTuple):
    """How an operand is packed.

    Attributes:
        grid: Of the kernel that packs it.
        source: The arguments that say what is packed.
        made: What the kernel fills, in the order in which the product takes it.
    """

    grid: tuple[int, int]
    source: tuple[Any, ...]
    made: tuple[Tensor, ...]


def panels_of(rows: int, width: int = TILE) -> int:
    """Return how many panels a matrix of so many rows has."""
    return -(-rows // width)


def pack(job: Job, programs: Programs, panels: tuple[int, int], side: Callable[[int], Side]) -> tuple[Tensor, ...]:
    """Pack both operands; return what was made of them, and the flags of panels with numbers that no kernel takes."""
    flags = torch.zeros(sum(panels), dtype=torch.int32, device=job.a.device)
    made: list[Tensor] = []
    for which, own in enumerate(flags.split(panels)):
        operand = side(which)
        launch(job, programs[1 + which], operand.grid, *operand.source, *operand.made, own)
        made += operand.made
    return *made, flags


def launch(job: Job, program: Program, grid: tuple[int, ...], *arguments: Any, shared: int = 0) -> None:
    """Launch a kernel of 256 threads a block on the device of a product."""
    file, name, defines = program
    runtime.kernel(file, name, runtime.device_index(job.a), defines)(grid, THREADS, *arguments, shared=shared)
