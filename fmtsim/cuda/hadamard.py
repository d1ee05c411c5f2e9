"""Hadamard transforms fused with the cast of what they give (fmtsim/scaling/hadamard.py defines every bit)."""

import math
import struct
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import blocks
from fmtsim.cuda.block_fast import BFLOAT16, CODES, FLOAT32, INPUTS, PACKED, fast_defines, is_drawn, output_of
from fmtsim.cuda.block_parameters import cast_bytes
from fmtsim.cuda.block_view import aligned
from fmtsim.cuda.runtime import Defines, device_index, kernel
from fmtsim.formats.block import FP32, BlockFormat, scaled
from fmtsim.formats.registry import get_format
from fmtsim.ops import CastSpec, EncodedParts, Random, block_counts
from fmtsim.rounding.modes import Rounding

_THREADS = 256
_HELD = 16  # numbers a thread holds
_LONGEST = 512  # elements of a block that a warp holds

Signs = int | Tensor | None


def hadamard(x: Tensor, size: int, signs: Signs = None) -> Tensor:
    """Return the transform of x ``[..., K]`` in float32; size, 16 to 128, divides K."""
    x = _ready(x)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        defines = _plain(x.dtype, amax_only=False)
        _launch(x, out, None, None, None, signs, size, defines, _no_cast(x.device))
    return out


def quantize_hadamard(x: Tensor, size: int, signs: Signs, spec: CastSpec, random: Random, out: Tensor) -> None:
    """Quantise the transform of x into out, in one pass over x where a kernel does that (two under two levels).

    The values are those of ``quantize_blocks(hadamard(x, size, signs), spec, random, out)``. A gradient rounded
    stochastically draws by an element's place in x.
    """
    output = output_of(out.dtype)
    if output is None or not out.is_contiguous() or not _fused(x, out, spec, random, output, size, signs, None):
        blocks.quantize_blocks(hadamard(x, size, signs), spec, random, out)


def encode_hadamard(
    x: Tensor, size: int, signs: Signs, spec: CastSpec, random: Random, packed: bool = False
) -> EncodedParts:
    """Return ``encode_blocks(hadamard(x, size, signs), spec, random, packed)``, in one pass where possible."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    output = PACKED if packed else CODES
    if fmt.bits <= 8 and x.shape[-1] * fmt.bits % 8 == 0:
        columns = x.shape[-1] * fmt.bits // 8 if packed else x.shape[-1]
        codes = torch.empty((*x.shape[:-1], columns), dtype=torch.uint8, device=x.device)
        small = packed and fmt.scale.bits <= 8
        counts = block_counts(fmt, x.shape, -1)
        scales = torch.empty(counts, dtype=torch.uint8 if small else torch.float32, device=x.device)
        whole = torch.ones((), device=x.device) if fmt.tensor_scale else None
        if _fused(x, codes, spec, random, output, size, signs, (scales, whole)):
            return EncodedParts(codes, scales, whole)
    return blocks.encode_blocks(hadamard(x, size, signs), spec, random, packed)


def _fused(
    x: Tensor,
    out: Tensor,
    spec: CastSpec,
    random: Random,
    output: int,
    size: int,
    signs: Signs,
    scales: tuple[Tensor, Tensor | None] | None,
) -> bool:
    """Launch the fused kernel if it serves."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    x = _ready(x)
    run = fmt.block[1] or 0
    held = run in (16, 32, 64, 128, 256, _LONGEST) and x.shape[-1] % run == 0 and fmt.block[0] == 1
    # what the kernel casts is float32, whatever x is
    format_macros = fast_defines(spec, torch.float32, output) if is_drawn(spec, random) else None
    if not held or spec.dim != -1 or format_macros is None or not x.numel() or not aligned(x, out):
        return False
    cast = cast_bytes(spec, random, x.device)
    tensor = None
    if fmt.tensor_scale:
        tensor = torch.zeros(1, dtype=torch.int32, device=x.device)
        _launch(x, out, None, tensor, None, signs, size, _plain(x.dtype, amax_only=True), cast)
    codes_scales, whole = scales or (None, None)
    _launch(x, out, codes_scales, tensor, whole, signs, size, _casting(format_macros, x.dtype, run), cast)
    return True


def _launch(
    x: Tensor,
    out: Tensor,
    scales: Tensor | None,
    tensor: Tensor | None,
    whole: Tensor | None,
    signs: Signs,
    size: int,
    defines: Defines,
    cast: bytes,
) -> None:
    macros = _sized(defines, size)
    given = signs.to(device=x.device, dtype=torch.float32).contiguous() if isinstance(signs, Tensor) else None
    grid = -(-x.numel() // (_HELD * _THREADS))
    kernel("block_hadamard.cu", "hadamard", device_index(x), macros)(
        grid, _THREADS, x, out, scales, tensor, whole, np.uint64(x.numel()), _sign_bytes(signs, given), cast
    )


def _sign_bytes(signs: Signs, given: Tensor | None) -> bytes:
    """Return a ``Signs``: a mask, or where a tensor of signs lies."""
    mask = signs if isinstance(signs, int) else 0
    return mask.to_bytes(16, "little") + struct.pack("<2q", 0 if given is None else given.data_ptr(), 0)


def _ready(x: Tensor) -> Tensor:
    """Return x contiguous in a dtype that the kernel loads; float64 is rounded to float32 first."""
    return (x.float() if x.dtype == torch.float64 else x).contiguous()


@lru_cache(maxsize=8)
def _no_cast(device: torch.device) -> bytes:
    """Return a cast for a kernel that does not look at it."""
    return cast_bytes(CastSpec(format=scaled(FP32, (1, 16)), rounding=Rounding(), overflow="saturate"), None, device)


def variants_of(dtype: torch.dtype) -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel for an input dtype."""
    fmt = get_format("mxfp4")
    assert isinstance(fmt, BlockFormat)
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow="saturate")
    for size in (16, 128):
        for amax_only in (False, True):
            yield "block_hadamard.cu", "hadamard", _sized(_plain(dtype, amax_only=amax_only), size)
        for output in (FLOAT32, BFLOAT16, CODES, PACKED):
            defines = fast_defines(spec, torch.float32, output)
            assert defines is not None
            yield "block_hadamard.cu", "hadamard", _sized(_casting(defines, dtype, 32), size)


@lru_cache(maxsize=1024)
def _sized(defines: Defines, size: int) -> Defines:
    root = int(np.float32(1 / math.sqrt(size)).view(np.uint32))
    return (*defines, ("SIZE", str(size)), ("ROOT", f"{root}u"))


@lru_cache(maxsize=1024)
def _casting(defines: Defines, dtype: torch.dtype, run: int) -> Defines:
    """Return the macros of a kernel that transforms and casts."""
    rest = (("INPUT", str(INPUTS[dtype])), ("RUN", str(run)), ("AMAX_ONLY", "0"))
    return (*(pair for pair in defines if pair[0] != "INPUT"), *rest)


@lru_cache(maxsize=8)
def _plain(dtype: torch.dtype, *, amax_only: bool) -> Defines:
    """Return the macros of a kernel that transforms and casts nothing."""
    rest = (("INPUT", str(INPUTS[dtype])), ("OUTPUT", str(FLOAT32)), ("RUN", "0"), ("AMAX_ONLY", str(int(amax_only))))
    return (*_NO_FORMAT, *rest)


# Macros of a kernel that casts nothing.
_NO_FORMAT: Defines = tuple(
    (name, "0")
    for name in (
        "RULE", "TWO_LEVEL", "WITHOUT_TENSOR_SCALE", "STOCHASTIC", "ELEMENT_INTEGER", "ELEMENT_TOP",
        "ELEMENT_LIMIT", "ELEMENT_LIMIT_NEGATIVE", "ELEMENT_LOWEST", "ELEMENT_MANTISSA", "ELEMENT_NEGATIVE_ZERO",
        "SCALE_FIRST", "SCALE_LAST", "SCALE_STORED", "CODE_BITS",
    )
)  # fmt: skip
