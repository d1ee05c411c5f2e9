# SPDX-License-Identifier: Apache-2.0
"""A product as every path takes it: operands, definition, accumulation order, and the arguments of kernels.

The order lies on the device as arrays. ``Problem`` of problem.cuh, which the general kernels take by value, has the
product and its unit as numbers.

A fast path has one kernel that packs each operand panel by panel, and another that computes tiles from the panels. It
takes some products, by facts of the host alone, and leaves the tiles that it marks to the general path.
"""

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.runtime import Defines, Program, Programs
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.rounding.modes import CODES, Rounding
from fmtsim.spec.call import OperandFormat
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import (
    FP32,
    Arithmetic,
    Datapath,
    IntegerDatapath,
    PairwiseDatapath,
    TwoStageDatapath,
    sum_dtype,
)
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import adds_in_order, combination, schedule
from fmtsim.support.errors import DeviceError
from fmtsim.support.replay.gpu import captures

TILE: Final = 128  # rows and columns of the tiles that marks stand for
PADDING: Final = -1  # a k position of ``AccumulationOrder.source`` without a product
CHAIN_END, PART_END = 1, 2

TYPES = (  # in the order of the macros TYPE_... of the kernels
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8,
)  # fmt: skip
SINGLES = tuple(  # whose values float32 holds: operands of the fast paths that do not compute in float64
    dtype for dtype in TYPES if dtype.is_floating_point and dtype not in (torch.float64, torch.float8_e8m0fnu)
)
REALS = (*SINGLES, torch.float64)
KINDS = {torch.float32: 0, torch.float64: 1, torch.int32: 2}  # of sums
NO_FRACTION = -1
NO_BOUND = -(1 << 24)  # of the alignment exponent
LIMBS = (20, 40, 80, 144)  # digits of 32 bits for which kernels exist


class Gpu(NamedTuple):
    """A device as fast paths see it: its compute capability, and the bytes of shared memory that a block may take."""

    capability: tuple[int, int]
    shared: int


def gpu_of(x: Tensor) -> Gpu:
    """Return the GPU that a tensor is on."""
    index = runtime.device_index(x)
    return Gpu(runtime.capability(index), runtime.shared_limit(index))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AccumulationOrder:
    """The order in which products are added, in blocks of one length.

    Args:
        source: int32 [blocks * block] on the device: which k stands at a position, or PADDING. A padded one is not a
            term: a product of zeros may stand in for it where that changes nothing. Padding is at the end of a block,
            and every block has a product.
        block: k positions of a block.
        contiguous: ``source`` is 0, 1, ..., K - 1 and then padding.
        parts: First block of each part, or lane of a part, and the block behind its last, on the host.
        part_blocks: The same as int32 [parts, 2] on the device.
        ends: uint8 [blocks] on the device: 0, 1 behind the last block of a chain, 2 behind the last of a part.
        scale_places: int32 [blocks] on the device: the group along K (``k // promote_every``) of the scales that belong
            to a block's chain under ``scaled_promotion``.
        combination: int32 [steps, 2] on the device where the parts are lanes, or folded: a Postfix that adds them. Else
            None.
    """

    source: Tensor
    block: int
    contiguous: bool
    parts: tuple[tuple[int, int], ...]
    part_blocks: Tensor
    ends: Tensor
    scale_places: Tensor
    combination: Tensor | None = None

    @property
    def blocks(self) -> int:
        """Blocks of all parts."""
        return self.source.numel() // self.block


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Job:
    """One product, as the paths see it.

    Args:
        a, b: [M, K] and [N, K] of any strides and of a dtype in which the formats' values lie: float8, 16-bit,
            float32, float64, or 8-bit integers for an IntegerDatapath.
        c: [M, N] in the dtype of the sums, of any strides, or None.
        scale_a, scale_b: float32 [M or N, groups] of any strides: scales inside the unit where it has some, else those
            of a scaled promotion; or None, which stands for ones.
        spec: Datapath, accumulation order, formats.
        random: Seed and offset where the unit rounds stochastically.
        out: [M, N] in the dtype of the sums.
        order: The schedule of ``spec`` for K.
        gpu: What the operands are on.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None
    scale_a: Tensor | None
    scale_b: Tensor | None
    spec: GemmSpec
    random: RandomKey | None
    out: Tensor
    order: AccumulationOrder
    gpu: Gpu

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sums: float32, float64 or int32."""
        return sum_dtype(self.spec.datapath)

    @property
    def promotes(self) -> bool:
        """Whether chains are added to an outer sum."""
        return self.spec.promotes

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Both operands, each with its scales inside the unit: None where it has none."""
        inside = isinstance(self.spec.datapath, Datapath) and self.spec.datapath.scale is not None
        return (self.a, self.scale_a if inside else None), (self.b, self.scale_b if inside else None)


def accumulation_order(k: int, spec: GemmSpec, device: torch.device) -> AccumulationOrder:
    """Return the order of K products on a device; the first call for a K, unit and plan copies it there.

    Raises:
        DeviceError: That copy is needed while a CUDA graph is captured.
        ArgumentError: Promotions of unit and plan disagree.
    """
    return _order(k, spec.datapath, spec.plan, device)


@lru_cache(maxsize=64)
def _order(k: int, unit: Arithmetic, plan: GemmPlan, device: torch.device) -> AccumulationOrder:
    if captures(device):
        raise DeviceError(
            f"the order of K={k} products of this unit and plan is not on {device} yet, and a CUDA graph that is being "
            "captured cannot copy it; run the product once before the capture (see fmtsim.cuda.warmup)"
        )
    parts = schedule(k, unit, plan)
    chains = [chain for part in parts for chain in part]
    blocks = [block for chain in chains for block in chain.blocks]
    length = max(map(len, blocks))
    source = np.full((len(blocks), length), PADDING, np.int32)
    for row, block in zip(source, blocks, strict=True):
        row[: len(block)] = block
    stops = np.cumsum([sum(len(chain.blocks) for chain in part) for part in parts])
    ends = np.zeros(len(blocks), np.uint8)
    ends[np.cumsum([len(chain.blocks) for chain in chains]) - 1] = CHAIN_END
    ends[stops - 1] = PART_END
    starts = np.repeat([chain.start for chain in chains], [len(chain.blocks) for chain in chains])
    ranges = np.stack([np.concatenate([[0], stops[:-1]]), stops], 1).astype(np.int32)
    flat = source.reshape(-1)
    promote = plan.promote_every or getattr(unit, "promote_every", None) or 1

    def copied(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return AccumulationOrder(
        source=copied(flat),
        block=length,
        contiguous=bool((flat[:k] == np.arange(k)).all()),
        parts=tuple((int(first), int(stop)) for first, stop in ranges),
        part_blocks=copied(ranges),
        ends=copied(ends),
        scale_places=copied((starts // promote).astype(np.int32)),
        combination=None if adds_in_order(plan) else copied(np.array(combination(k, plan), np.int32)),
    )


# What kernels are told of a product.


class Sums(NamedTuple):
    """The representation of a block's sum: the macros of exact_integer.cu, and the exponent of its lowest bit."""

    wide: bool
    limbs: int
    grid: int

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros."""
        return (("WIDE", str(int(self.wide))), ("LIMBS", str(self.limbs)))


class Range(NamedTuple):
    """Bits of a significand, exponent of the last bit of the smallest number, exponent above the largest number."""

    bits: int
    lsb: int
    top: int


def exponent_range(fmt: OperandFormat | None) -> Range:
    """Return the bits and exponents of a format, zeros for anything but floating-point formats."""
    if not isinstance(fmt, FloatFormat):
        return Range(0, 0, 0)
    return Range(fmt.mantissa_bits + 1, fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent + 1)


@lru_cache(maxsize=1024)
def sums_of(spec: GemmSpec, k: int, with_c: bool) -> Sums | None:
    """Return how exact_integer.cu holds the sums of a fused unit, None where it cannot.

    ``with_c`` says that chains begin with numbers from outside.
    """
    unit = spec.datapath
    assert isinstance(unit, Datapath)
    a, b, scale = exponent_range(spec.a), exponent_range(spec.b), exponent_range(unit.scale)
    count = min(unit.block or k, k)
    product = a.bits + b.bits + 2 * scale.bits
    span = a.top + b.top - a.lsb - b.lsb + unit.group.bit_length() + 2 * scale.bits
    term = max(product, span) if unit.group > 1 else product
    if max(a.bits, b.bits) + scale.bits > 63 or term > 126:
        return None
    wide = term > 62
    lowest = a.lsb + b.lsb + 2 * scale.lsb
    if unit.fraction_bits is not None:
        bits = unit.fraction_bits + 2 + 2 * (unit.scale is not None) + 1 + count.bit_length() + 1
        if unit.group > 1:
            bits += max(a.top + b.top, 0) + unit.group.bit_length()
        if bits <= 62:
            return Sums(wide, 0, 0)
    else:
        # a running sum is at most four times the sum of all magnitudes where roundings add no more
        blocks, mantissa_bits = -(-k // (unit.block or k)), unit.accumulator.mantissa_bits
        in_range = unit.rounding.mode in ("nearest_even", "toward_zero") or blocks >> mantissa_bits == 0
        if not with_c and in_range and span + 2 * (scale.top - scale.lsb) + 3 + k.bit_length() <= 62:
            return Sums(wide, 0, lowest)
    acc = exponent_range(unit.accumulator)
    top = max(a.top + b.top + 2 * scale.top + count.bit_length(), acc.top, 128) + 2
    if unit.fraction_bits is not None and unit.min_exponent is not None:
        top = max(top, unit.min_exponent - unit.fraction_bits + 2 + count.bit_length())
    narrow = is_representable(unit.accumulator, torch.float32)
    lowest = min(lowest, -149 if narrow else -1074)
    return next((Sums(wide, n, lowest) for n in LIMBS if top - lowest <= 32 * (n - 4)), None)


def is_plain(fmt: FloatFormat | None) -> bool:
    """Return True if kernels can round to a format: IEEE 754's kinds of numbers, at most 50 mantissa bits or 52."""
    if fmt is None:
        return True
    saturates = fmt.overflow == "saturate"
    return fmt.infinities and not saturates and fmt.has_subnormals and fmt.nan == "ieee" and fmt.mantissa_bits != 51


def layout_of(fmt: FloatFormat) -> tuple[int, int, int]:
    """Return the exponent bits, mantissa bits and bias of a format."""
    return fmt.exponent_bits, fmt.mantissa_bits, fmt.exponent_bias


def promotion_of(spec: GemmSpec) -> int:
    """Return how chains join an outer sum (``promote``, problem.cuh): 0 not, 1 in float32 as IEEE 754 adds, 2 else."""
    unit = spec.datapath
    assert isinstance(unit, Datapath)
    if not spec.promotes:
        return 0
    plain = is_representable(unit.accumulator, torch.float32) and not spec.plan.scaled_promotion
    return 1 if plain and layout_of(spec.outer) == layout_of(FP32) else 2


def problem_bytes(job: Job, tile: int, grid: int = 0) -> bytes:
    """Return a product as ``Problem``: ``tile`` rows and columns for a mark, ``grid`` of ``sums_of``."""
    m, n, _ = job.shape
    strides = [
        stride
        for x in (job.a, job.b, job.scale_a, job.scale_b, job.c)
        for stride in ((0, 0) if x is None else (x.stride(0), x.stride(1)))
    ]
    how = job.spec.datapath.rounding if isinstance(job.spec.datapath, Datapath) else Rounding()
    head = struct.pack("<10q", *strides) + draw_of(how, job.random)
    types = TYPES.index(job.a.dtype), TYPES.index(job.b.dtype)
    shape = struct.pack("<8i", m, n, *types, job.order.block, len(job.order.parts), tile, job.promotes)
    formats, rest = _constants(job.spec, grid)
    return head + formats + shape + rest


def order_bytes(job: Job) -> bytes:
    """Return the ends of chains and their scales as ``Order``."""
    order = job.order
    tensors = job.scale_a, job.scale_b, order.scale_places, order.ends, order.part_blocks
    return struct.pack("<5Q", *(0 if x is None else x.data_ptr() for x in tensors))


@lru_cache(maxsize=1024)
def _constants(spec: GemmSpec, grid: int) -> tuple[bytes, bytes]:
    """Return the parts of ``Problem`` that do not depend on the data: formats and rounding, and its last numbers."""
    unit, plan = spec.datapath, spec.plan
    fused = unit if isinstance(unit, Datapath) else Datapath()
    how = fused.rounding
    formats = format_bytes(accumulator_of(unit)) + format_bytes(spec.outer)
    formats += struct.pack("<4i", CODES[how.mode], how.bits, "abc".index(how.variant), 0)
    fraction_bits = NO_FRACTION if fused.fraction_bits is None else fused.fraction_bits
    sum_bits, parity = 0, False
    if isinstance(unit, TwoStageDatapath):
        fraction_bits, sum_bits, parity = unit.fraction_bits, unit.sum_bits, unit.parity
    leaves = unit.block if isinstance(unit, PairwiseDatapath) else 0
    saturates, width = (unit.saturate, unit.accumulator_bits) if isinstance(unit, IntegerDatapath) else (False, 0)
    a, b, scale = exponent_range(spec.a), exponent_range(spec.b), exponent_range(fused.scale)
    lowest = (fused.operand or fmt for fmt in (spec.a, spec.b))
    rest = struct.pack(
        "<24i",
        plan.scaled_promotion, plan.successive_scales, KINDS[sum_dtype(unit)], fraction_bits,
        CODES[fused.term_rounding], NO_BOUND if fused.min_exponent is None else fused.min_exponent,
        fused.group, fused.signed_zero,
        fused.scale_block, scale.bits - 1, 0 if fused.scale is None else fused.scale.min_exponent, sum_bits,
        a.bits - 1, b.bits - 1, *(fmt.min_exponent if isinstance(fmt, FloatFormat) else 0 for fmt in lowest),
        grid, a.lsb, b.lsb, parity, leaves, saturates, width, 0,
    )  # fmt: skip
    return formats, rest


def accumulator_of(unit: Arithmetic) -> FloatFormat:
    """Return the format of a unit's running sum."""
    return unit.accumulator if isinstance(unit, Datapath) else FP32


def format_bytes(fmt: FloatFormat) -> bytes:
    """Return a format as the struct of numbers.cuh."""
    return struct.pack("<d2i", fmt.max, fmt.mantissa_bits, fmt.min_exponent)


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
        return panel_count(job.shape[0]), panel_count(job.shape[1])

    def _arguments(
        self, job: Job, shape: Any, packed: list[Tensor], flags: Tensor, marks: Tensor, sums: Tensor
    ) -> tuple[Any, ...]:
        """Return the arguments of the product's kernel."""
        (m, n, k), order, blocks = job.shape, job.order, np.int32(job.order.blocks)
        if not self.addends:
            return *packed, flags, order.ends, order.part_blocks, blocks, sums, marks, np.int32(m), np.int32(n)
        return *packed, flags, job.c, order_bytes(job), blocks, marks, sums, shape.limits(k), problem_bytes(job, TILE)

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


def panel_count(rows: int, width: int = TILE) -> int:
    """Return the panels of a matrix of so many rows."""
    return -(-rows // width)


def launch(
    job: Job, program: Program, grid: tuple[int, ...], *arguments: Any, threads: int = THREADS, shared: int = 0
) -> None:
    """Launch a kernel on the device of a product."""
    file, name, defines = program
    runtime.kernel(file, name, runtime.device_index(job.a), defines)(grid, threads, *arguments, shared=shared)
