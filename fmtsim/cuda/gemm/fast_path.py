# SPDX-License-Identifier: Apache-2.0
"""A fast path of products: one kernel packs each operand panel by panel, another computes tiles from the panels.

A path takes some products, by facts of the host alone, and leaves the tiles that it marks to the general path.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.gemm.job import SINGLES, TILE, Job, order_bytes, problem_of
from fmtsim.cuda.runtime import Defines, Program, Programs

THREADS: Final = 256


class Plan(NamedTuple):
    """How a path computes a product.

    Attributes:
        shape: How its kernels are specialised, in the path's own terms.
        programs: The kernels that it launches: the product's first, then those that pack a, then those that pack b.
    """

    shape: Any
    programs: Programs


class Packing(NamedTuple):
    """How an operand is packed.

    Attributes:
        grid: Of the kernel that packs it.
        source: The arguments that say what is packed.
        packed: What the kernel fills, in the order in which the product takes it.
    """

    grid: tuple[int, ...]
    source: tuple[Any, ...]
    packed: tuple[Tensor, ...]


class FastPath(ABC):
    """One fast path, declared: its kernels, the operands that it takes, macros, shared memory and arguments.

    Attributes:
        name: Of the product's kernel, in a file of that name.
        packing: The file of ``pack_operand``.
        dtypes: Of operands that it reads.
        addends: Sums may begin with a matrix c; the kernel then takes ``Order`` and ``Problem`` (problem.cuh).
    """

    name: ClassVar[str]
    packing: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = SINGLES
    addends: ClassVar[bool] = True

    @abstractmethod
    def _shape(self, job: Job) -> Any:
        """Return the specialisation of the kernels for a product, None where they do not take it."""

    @abstractmethod
    def _product_macros(self, job: Job, shape: Any) -> Defines:
        """Return the macros of the product's kernel."""

    @abstractmethod
    def _operand_macros(self, job: Job, shape: Any, side: int) -> Defines:
        """Return the macros of ``pack_operand`` for the first or the second operand of the kernel."""

    @abstractmethod
    def _pack(self, job: Job, shape: Any, side: int, panels: int) -> Packing:
        """Return the packing of the first or the second operand of the kernel into panels."""

    @abstractmethod
    def _shared(self, job: Job, shape: Any) -> int:
        """Return the bytes of shared memory that a block of threads of the product takes."""

    def _packing_kernels(self, shape: Any) -> tuple[str, ...]:
        """Return the names of the kernels that pack an operand."""
        return ("pack_operand",)

    def _panels(self, job: Job, shape: Any) -> tuple[int, int]:
        """Return the panels of both operands of the kernel."""
        return panels_of(job.shape[0]), panels_of(job.shape[1])

    def _arguments(
        self, job: Job, shape: Any, packed: list[Tensor], flags: Tensor, marks: Tensor, sums: Tensor
    ) -> tuple[Any, ...]:
        """Return the arguments of the product's kernel."""
        (m, n, k), order, blocks = job.shape, job.order, np.int32(job.order.blocks)
        if not self.addends:
            return *packed, flags, order.ends, order.part_blocks, blocks, sums, marks, np.int32(m), np.int32(n)
        return *packed, flags, job.c, order_bytes(job), blocks, marks, sums, shape.limits(k), problem_of(job, TILE)

    def plan(self, job: Job) -> Plan | None:
        """Return the path's plan for a product, None where it does not take it; reads no data."""
        if job.a.dtype not in self.dtypes or job.b.dtype not in self.dtypes or (job.c is not None and not self.addends):
            return None
        shape = self._shape(job)
        if shape is None:
            return None
        product = f"{self.name}.cu", self.name, self._product_macros(job, shape)
        macros = [self._operand_macros(job, shape, side) for side in (0, 1)]
        names = self._packing_kernels(shape)
        return Plan(shape, (product, *((self.packing, name, defines) for defines in macros for name in names)))

    def run(self, job: Job, plan: Plan, sums: Tensor, marks: Tensor) -> None:
        """Write the sums [parts, M, N] of all tiles but those that it marks.

        ``marks`` uint8 [ceil(M / 128), ceil(N / 128)] becomes 1 where a tile is left to the general path.
        """
        panels = self._panels(job, plan.shape)
        flags = torch.zeros(sum(panels), dtype=torch.int32, device=job.a.device)  # of numbers that no kernel takes
        packed: list[Tensor] = []
        for side, flags_of_side in enumerate(flags.split(panels)):
            how = self._pack(job, plan.shape, side, panels[side])
            launch(job, plan.programs[1 + side], how.grid, *how.source, *how.packed, flags_of_side)
            packed += how.packed
        launch(
            job, plan.programs[0], (panels[0] * panels[1], 1, len(job.order.parts)),
            *self._arguments(job, plan.shape, packed, flags, marks, sums), shared=self._shared(job, plan.shape),
        )  # fmt: skip


def panels_of(rows: int, width: int = TILE) -> int:
    """Return the panels of a matrix of so many rows."""
    return -(-rows // width)


def launch(
    job: Job, program: Program, grid: tuple[int, ...], *arguments: Any, threads: int = THREADS, shared: int = 0
) -> None:
    """Launch a kernel on the device of a product."""
    file, name, defines = program
    runtime.kernel(file, name, runtime.device_index(job.a), defines)(grid, threads, *arguments, shared=shared)
