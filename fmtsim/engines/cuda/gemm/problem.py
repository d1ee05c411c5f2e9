# SPDX-License-Identifier: Apache-2.0
"""A product and its unit as the numbers that the general kernels take by value (``Problem`` of problem.cuh)."""

import struct
from functools import lru_cache
from typing import NamedTuple

import torch

from fmtsim.engines.cuda.cast.parameters import draw_of
from fmtsim.engines.cuda.gemm.job import Job, promotes
from fmtsim.engines.cuda.runtime import Defines
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import CODES, Rounding
from fmtsim.spec.call import OperandFormat
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

# The order of these is that of the macros TYPE_... of the kernels.
TYPES = (
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


class Sums(NamedTuple):
    """How a block's sum is held: the macros of exact_integer.cu, and the place of the lowest bit."""

    wide: bool
    limbs: int
    grid: int

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros."""
        return (("WIDE", str(int(self.wide))), ("LIMBS", str(self.limbs)))


class Range(NamedTuple):
    """Bits of a significand, place of the last bit of the smallest number, exponent behind the largest."""

    bits: int
    lsb: int
    top: int


def range_of(fmt: OperandFormat | None) -> Range:
    """Return the bits and exponents of a format, zeros for anything but floating-point formats."""
    if not isinstance(fmt, FloatFormat):
        return Range(0, 0, 0)
    return Range(fmt.mantissa_bits + 1, fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent + 1)


@lru_cache(maxsize=1024)
def sums_of(spec: GemmSpec, k: int, with_c: bool) -> Sums | None:
    """Return how the kernel for any number holds the sums of a fused unit, None where it cannot.

    ``with_c`` says that chains begin with numbers from outside.
    """
    unit = spec.datapath
    assert isinstance(unit, Datapath)
    a, b, scale = range_of(spec.a), range_of(spec.b), range_of(unit.scale)
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
    elif not with_c and _stays_in_range(unit, k) and span + 2 * (scale.top - scale.lsb) + 3 + k.bit_length() <= 62:
        return Sums(wide, 0, lowest)
    acc = range_of(unit.accumulator)
    top = max(a.top + b.top + 2 * scale.top + count.bit_length(), acc.top, 128) + 2
    if unit.fraction_bits is not None and unit.min_exponent is not None:
        top = max(top, unit.min_exponent - unit.fraction_bits + 2 + count.bit_length())
    narrow = is_representable(unit.accumulator, torch.float32)
    lowest = min(lowest, -149 if narrow else -1074)
    return next((Sums(wide, n, lowest) for n in LIMBS if top - lowest <= 32 * (n - 4)), None)


def _stays_in_range(unit: Datapath, k: int) -> bool:
    """Say whether a running sum is at most four times the sum of all magnitudes: no rounding adds more than it gets."""
    blocks = -(-k // (unit.block or k))
    return unit.rounding.mode in ("nearest_even", "toward_zero") or blocks >> unit.accumulator.mantissa_bits == 0


def is_plain(fmt: FloatFormat | None) -> bool:
    """Say whether kernels can round to a format: IEEE 754's kinds of numbers, at most 50 mantissa bits or 52."""
    if fmt is None:
        return True
    return fmt.infinities and fmt.has_subnormals and fmt.nan == "ieee" and fmt.mantissa_bits != 51


def outer_format(spec: GemmSpec) -> FloatFormat:
    """Return the format of the sum to which chains are promoted."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or spec.plan.promote_every is not None:
        return FP32
    return unit.promotion or unit.accumulator


def layout_of(fmt: FloatFormat) -> tuple[int, int, int]:
    """Return the exponent bits, mantissa bits and bias of a format."""
    return fmt.exponent_bits, fmt.mantissa_bits, fmt.exponent_bias


def promotion_of(spec: GemmSpec) -> int:
    """Return how chains join an outer sum (``promote``, problem.cuh): 0 not, 1 in float32 as IEEE 754 adds, 2 else."""
    unit = spec.datapath
    assert isinstance(unit, Datapath)
    if not promotes(unit, spec.plan):
        return 0
    plain = is_representable(unit.accumulator, torch.float32) and not spec.plan.scaled_promotion
    return 1 if plain and layout_of(outer_format(spec)) == layout_of(FP32) else 2


def problem_of(job: Job, tile: int, grid: int = 0) -> bytes:
    """Return a product as ``Problem``: ``tile`` rows and columns for a mark, ``grid`` of ``sums_of``."""
    m, n, _ = job.shape
    strides = [stride for x in (job.a, job.b, job.scale_a, job.scale_b, job.c) for stride in _strides(x)]
    how = job.spec.datapath.rounding if isinstance(job.spec.datapath, Datapath) else Rounding()
    head = struct.pack("<10q", *strides) + draw_of(how, job.random)
    types = TYPES.index(job.a.dtype), TYPES.index(job.b.dtype)
    shape = struct.pack("<8i", m, n, *types, job.order.block, len(job.order.parts), tile, job.promotes)
    formats, rest = _constants(job.spec, grid)
    return head + formats + shape + rest


def order_bytes(job: Job) -> bytes:
    """Return where chains end and what scales them as ``Order``."""
    order = job.order
    tensors = job.scale_a, job.scale_b, order.scale_places, order.ends, order.part_blocks
    return struct.pack("<5Q", *(0 if x is None else x.data_ptr() for x in tensors))


def _strides(x: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


@lru_cache(maxsize=1024)
def _constants(spec: GemmSpec, grid: int) -> tuple[bytes, bytes]:
    """Return what does not depend on the data: formats and rounding, and the rest of the numbers."""
    unit, plan = spec.datapath, spec.plan
    fused = unit if isinstance(unit, Datapath) else Datapath()
    how = fused.rounding
    formats = format_bytes(accumulator_of(unit)) + format_bytes(outer_format(spec)) + _rounding(how)
    fraction_bits = NO_FRACTION if fused.fraction_bits is None else fused.fraction_bits
    sum_bits, parity = 0, False
    if isinstance(unit, TwoStageDatapath):
        fraction_bits, sum_bits, parity = unit.fraction_bits, unit.sum_bits, unit.parity
    leaves = unit.block if isinstance(unit, PairwiseDatapath) else 0
    saturates = isinstance(unit, IntegerDatapath) and unit.saturate
    a, b, scale = range_of(spec.a), range_of(spec.b), range_of(fused.scale)
    rest = struct.pack(
        "<24i",
        plan.scaled_promotion, plan.successive_scales, KINDS[sum_dtype(unit)], fraction_bits,
        CODES[fused.term_rounding], NO_BOUND if fused.min_exponent is None else fused.min_exponent,
        fused.group, fused.signed_zero,
        fused.scale_block, scale.bits - 1, 0 if fused.scale is None else fused.scale.min_exponent, sum_bits,
        a.bits - 1, b.bits - 1, *(_lowest_exponent(fmt, fused) for fmt in (spec.a, spec.b)),
        grid, a.lsb, b.lsb, parity, leaves, saturates, 0, 0,
    )  # fmt: skip
    return formats, rest


def accumulator_of(unit: Arithmetic) -> FloatFormat:
    """Return the format of a unit's running sum."""
    return unit.accumulator if isinstance(unit, Datapath) else FP32


def _lowest_exponent(fmt: OperandFormat, unit: Datapath) -> int:
    given = unit.operand or fmt
    return given.min_exponent if isinstance(given, FloatFormat) else 0


def format_bytes(fmt: FloatFormat) -> bytes:
    """Return a format as the struct of numbers.cuh."""
    return struct.pack("<d2i", fmt.max, fmt.mantissa_bits, fmt.min_exponent)


def _rounding(how: Rounding) -> bytes:
    return struct.pack("<4i", CODES[how.mode], how.bits, "abc".index(how.variant), 0)


def macros(**numbers: int) -> Defines:
    """Return numbers as macros of a kernel, in parentheses, which negative ones need."""
    return tuple((name, f"({value})") for name, value in numbers.items())
