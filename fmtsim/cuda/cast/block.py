"""Casts of block formats on the device: the verbs, and those of matrices that training multiplies."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.cuda.cast.block_launch import BlockCast
from fmtsim.cuda.cast.block_macros import BFLOAT16, CODES, PACKED, fast_macros, output_of
from fmtsim.cuda.cast.decoding import decode
from fmtsim.cuda.cast.general import view_of
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.exact import codes_of_scales
from fmtsim.formats.packing import code_dtype, pack, packed_size
from fmtsim.formats.representable import FLOAT_DTYPES
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

UNPACKED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # codes that are not packed


class BothDims(NamedTuple):
    """One matrix [M, N] in two casts.

    Attributes:
        rows: [M, N], bfloat16, blocks along N.
        columns: [M, N], bfloat16, blocks along M.
        tensor_scale: float32, 0-d, where values were left without it, else None.
    """

    rows: Tensor
    columns: Tensor
    tensor_scale: Tensor | None


def covers_blocks(spec: CastSpec, *dtypes: torch.dtype) -> bool:
    """Say whether the kernels cover casts of a block format: input and output dtype; they cover nearly all."""
    fmt = spec.format
    if not isinstance(fmt, BlockFormat) or any(dtype not in FLOAT_DTYPES for dtype in dtypes):
        return False
    return not (fmt.zero_point and fmt.element.bits > 22)  # distances from the zero point are held in 24 bits


def quantize_blocks(x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> None:
    """Quantise x into out: any strides and dtypes of the four; out may be x itself."""
    if not x.numel():
        return
    target = _with_three_axes(out, spec.dim)
    job, output = BlockCast(_viewed(x, spec.dim), target, spec, random), output_of(out.dtype)
    if output is None or not job.fast(output):
        job.general()
    if target is not out:
        out.copy_(target)


def encode_blocks(x: Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x with their scales.

    Codes are in x's shape and ``code_dtype``, scales float32. With ``packed`` codes of other widths than 8, 16 and 32
    bits are the bytes of docs/semantics.md, section 11 (``dim`` moved last), and scales are as ``Encoded`` keeps them.
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    source = _viewed(x, spec.dim)
    if packed and source.numel() and (parts := _packed(source, spec, random)) is not None:
        return parts
    codes = torch.empty(x.shape, dtype=code_dtype(fmt.bits), device=x.device)
    job = BlockCast(source, codes, spec, random)
    job.add_scales(torch.float32)
    if source.numel() and not (codes.dtype == torch.uint8 and job.fast(CODES)):
        job.general()
    return _pack_parts(job.parts(), spec) if packed else job.parts()


def quantize_both_dims(
    x: Tensor, spec: CastSpec, random: tuple[Random, Random] = (None, None), *, without_tensor_scale: bool
) -> BothDims:
    """Quantise a matrix with blocks along its rows and, from the same read, with blocks along its columns.

    The values are those of two calls of ``quantize_blocks``, with ``dim=-1`` and ``dim=-2``, as bfloat16.

    Args:
        x: [M, N]; float16, bfloat16, float32 or float64.
        spec: The cast; its ``dim`` is not looked at.
        random: Random words of the result along the rows and of that along the columns.
        without_tensor_scale: Leave the scale of the tensor out of the values of a two-level format
            (``quantize_without_tensor_scale``).
    """
    across, down = (replace(spec, dim=dim) for dim in (-1, -2))
    rows, columns = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    keyed = spec.rounding.mode == "nearest_even" or not any(isinstance(words, Tensor) for words in random)
    if x.numel() and keyed:
        job = BlockCast(x, columns, down, random[1], without_tensor_scale=without_tensor_scale)
        if without_tensor_scale and fmt.tensor_scale:
            job.tensor_scale = torch.empty((), device=x.device)
        if job.both_dims(rows, draw_of(spec.rounding, random[0])):
            return BothDims(rows, columns, job.tensor_scale)
    if without_tensor_scale:
        rows, _ = quantize_without_tensor_scale(x, across, random[0])
        return BothDims(rows, *quantize_without_tensor_scale(x, down, random[1]))
    quantize_blocks(x, across, random[0], rows)
    quantize_blocks(x, down, random[1], columns)
    return BothDims(rows, columns, None)


def quantize_without_tensor_scale(x: Tensor, spec: CastSpec, random: Random) -> tuple[Tensor, Tensor]:
    """Return the values of a two-level format without the scale of the tensor, and that scale (float32, 0-d).

    The values are bfloat16, the products of elements and block scales; ``holds_without_tensor_scale`` says whether it
    holds them.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    job = BlockCast(x, out, spec, random, without_tensor_scale=True)
    job.tensor_scale = torch.empty((), device=x.device)
    if not x.numel():
        return out, job.tensor_scale.fill_(1.0)
    if job.fast(BFLOAT16):
        return out, job.tensor_scale
    parts = encode_blocks(x, spec, random)
    assert parts.tensor_scale is not None
    decode(parts._replace(tensor_scale=None), spec, out)
    return out, parts.tensor_scale


def holds_without_tensor_scale(spec: CastSpec) -> bool:
    """Say whether a format has two levels, and bfloat16 holds the products of its elements and block scales."""
    two_level = isinstance(spec.format, BlockFormat) and spec.format.tensor_scale
    return two_level and fast_macros(spec, torch.float32, BFLOAT16, True) is not None


def _viewed(t: Tensor, dim: int) -> Tensor:
    """Return the tensor, or a contiguous copy where its strides do not fit three axes."""
    return t if view_of(t, dim) is not None else t.contiguous()


def _with_three_axes(out: Tensor, dim: int) -> Tensor:
    """Return a result, or room for a copy of it where its strides do not fit three axes."""
    return out if view_of(out, dim) is not None else torch.empty(out.shape, dtype=out.dtype, device=out.device)


# Packed codes.


def _packed(x: Tensor, spec: CastSpec, random: Random) -> EncodedParts | None:
    """Return packed codes and stored scales from one kernel, None where none does that."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    if not x.dim() or x.shape[spec.dim] * fmt.bits % 8:
        return None
    sizes, dim = list(x.shape), x.dim() + spec.dim
    rows = [*sizes[:dim], *sizes[dim + 1 :], packed_size(sizes[dim], fmt.bits)]
    codes = torch.empty(sizes if fmt.bits == 8 else rows, dtype=torch.uint8, device=x.device)
    job = BlockCast(x, codes, spec, random, packed=True)
    job.add_scales(torch.uint8 if fmt.scale.bits <= 8 else torch.float32)
    return job.parts() if job.fast(PACKED) else None


def _pack_parts(parts: EncodedParts, spec: CastSpec) -> EncodedParts:
    """Return parts as ``Encoded`` keeps them."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    codes, scales = parts.codes.reshape(1) if not parts.codes.dim() else parts.codes, parts.scales
    if fmt.bits in UNPACKED:
        codes = pack(codes, fmt.bits).view(UNPACKED[fmt.bits]).reshape(parts.codes.shape)
    else:
        codes = pack(codes.movedim(spec.dim, -1), fmt.bits)
    if fmt.scale.bits <= 8:
        scales = codes_of_scales(scales, fmt.scale)
    elif fmt.scale.name != "fp32":
        scales = scales.to({"bf16": torch.bfloat16, "fp16": torch.float16}[fmt.scale.name])
    return parts._replace(codes=codes, scales=scales)
