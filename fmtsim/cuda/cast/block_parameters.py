"""What the kernels of block formats take by value: a cast, the layout of blocks, a job of columns, as bytes."""

import struct
from functools import lru_cache

import numpy as np
import torch

from fmtsim.cuda.cast.parameters import draw_of, element_of, tables_of
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, Random

RULES = {"floor": 0, "ceil": 1, "rceil": 2, "even": 3, "amax": 4}
ARITHMETICS = {"divide": 0, "reciprocal": 1, "encode": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
CODE_DTYPES = {torch.uint8: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7}
NO_DRAW = draw_of(Rounding(), None)
_WIDE = IntFormat(name="wide", bits=24)  # what elements round to before a zero point is added


@lru_cache(maxsize=1024)
def _scale_parameters(fmt: BlockFormat) -> bytes:
    """Return the ``ScaleParameters`` of a format, without the Element in front."""
    largest = np.float32(fmt.element.max)
    mantissa = fmt.element.mantissa_bits if isinstance(fmt.element, FloatFormat | IntFormat) else 0
    return struct.pack(
        "<8i3fi",
        RULES[fmt.scale_rule],
        ARITHMETICS[fmt.arithmetic],
        fmt.tensor_scale,
        fmt.zero_point,
        fmt.element.max_exponent,
        mantissa,
        fmt.element.max_code if isinstance(fmt.element, IntFormat) else 0,
        fmt.element.has_nan and not fmt.zero_point,
        float(largest),
        float(np.float32(1) / largest),
        float(np.float32(fmt.scale.max)),
        fmt.scale.name == "fp32",
    )


def cast_bytes(spec: CastSpec, random: Random, device: torch.device) -> bytes:
    """Return the ``Cast`` of a block format; given random words must stay alive until the kernel has run."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    given = random.data_ptr() if isinstance(random, torch.Tensor) else 0
    tables = tables_of(fmt.element, device).pointers
    return _constant_part(spec) + draw_of(spec.rounding, random) + tables + struct.pack("<2q", given, 0)


@lru_cache(maxsize=1024)
def _constant_part(spec: CastSpec) -> bytes:
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    element = element_of(_WIDE if fmt.zero_point else fmt.element, spec.rounding, spec.overflow)
    return element + element_of(fmt.scale, Rounding(), "saturate") + _scale_parameters(fmt)


def layout_bytes(
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    out_strides: tuple[int, int, int],
    block: tuple[int, int],
    source: int,
    target: int,
    writes_codes: bool,
) -> bytes:
    """Return a ``BlockLayout``; ``source`` and ``target`` are numbers of ``DTYPES`` or ``CODE_DTYPES``."""
    across = -(-sizes[1] // block[1])
    trailing_first = strides[2] <= strides[1] if sizes[2] > 1 else False
    order = (source, target, trailing_first, writes_codes)
    return struct.pack("<12q4i", *sizes, *strides, *out_strides, *block, across, *order)


def column_bytes(
    x: torch.Tensor,
    results: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int],
    row_draw: bytes,
) -> bytes:
    """Return a ``ColumnJob``.

    Args:
        x: The tensor.
        results: Column-wise result, its scales, row-wise result, amax of the tensor (an input), scale of the tensor.
        sizes: Of the inner and the trailing axis.
        row_draw: Where the row-wise result's random words come from, a ``Draw``.
    """
    pointers = [0 if t is None else t.data_ptr() for t in (x, *results[:3], None, *results[3:])]
    return struct.pack("<9q", *pointers, *sizes) + bytes(8) + row_draw


def decode_bytes(spec: CastSpec, device: torch.device) -> tuple[bytes, bytes]:
    """Return the ``Element`` and the ``Tables`` that decode a format."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    return element_of(fmt.element, Rounding(), fmt.default_overflow), tables_of(fmt.element, device).pointers
