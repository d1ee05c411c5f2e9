"""Casts of block formats on the device: the verbs."""

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.block_decode import CODES_OF_VECTOR, decode_macros, decoder_of
from fmtsim.cuda.cast.block_fast import BFLOAT16, CODES, PACKED, fast_defines, output_of
from fmtsim.cuda.cast.block_jobs import THREADS, BlockJob
from fmtsim.cuda.cast.block_parameters import CODE_DTYPES, DTYPES, decode_bytes, layout_bytes
from fmtsim.cuda.cast.block_view import aligned, extent, view_of, viewed
from fmtsim.cuda.runtime.program import device_index, kernel
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.exact import codes_of_scales
from fmtsim.formats.packing import code_dtype, pack, packed_size
from fmtsim.formats.representable import FLOAT_DTYPES
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

_PLAIN = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # codes that are not packed


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
    source, target = viewed(x, spec.dim), view_of(out, spec.dim)
    held = out if target is not None else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    job = BlockJob(source, held, spec, random)
    output = output_of(held.dtype)
    if output is None or not job.fast(output):
        job.general(DTYPES[held.dtype], False)
    if held is not out:
        out.copy_(held)


def encode_blocks(x: Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x with their scales.

    Codes are in x's shape and ``code_dtype``, scales float32. With ``packed`` codes of other widths than 8, 16 and 32
    bits are the bytes of docs/semantics.md, section 11 (``dim`` moved last), and scales are as ``Encoded`` keeps them.
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    source = viewed(x, spec.dim)
    if packed and source.numel() and (parts := _packed(source, spec, random)) is not None:
        return parts
    codes = torch.empty(x.shape, dtype=code_dtype(fmt.bits), device=x.device)
    job = BlockJob(source, codes, spec, random)
    job.add_scales(torch.float32)
    if source.numel() and not (codes.dtype == torch.uint8 and job.fast(CODES)):
        job.general(CODE_DTYPES[codes.dtype], True)
    parts = job.parts()
    return _pack_parts(parts, spec) if packed else parts


def decode_blocks(parts: EncodedParts, spec: CastSpec, out: Tensor) -> None:
    """Write the values of codes into out: any strides, any of the four dtypes, rounded once."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    if not out.numel():
        return
    if _decode_runs(parts, spec, out):
        return
    codes = viewed(parts.codes, spec.dim)
    target = view_of(out, spec.dim)
    held = out if target is not None else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    view, held_view = view_of(codes, spec.dim), view_of(held, spec.dim)
    assert view is not None and held_view is not None
    layout = layout_bytes(
        *view, held_view.strides, extent(fmt, view.sizes), CODE_DTYPES[codes.dtype], DTYPES[held.dtype], False
    )
    scales = parts.scales.contiguous()
    offsets = None if parts.offsets is None else parts.offsets.contiguous()
    total = codes.numel()
    kernel("block_general.cu", "decode_blocks", device_index(out))(
        -(-total // THREADS), THREADS, codes, scales, offsets, parts.tensor_scale, held, np.uint64(total), layout,
        *decode_bytes(spec, out.device),
    )  # fmt: skip
    if held is not out:
        out.copy_(held)


def _decode_runs(parts: EncodedParts, spec: CastSpec, out: Tensor) -> bool:
    """Launch the kernel of byte codes in runs of memory, if it serves."""
    fmt, codes = spec.format, parts.codes
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    view = view_of(codes, spec.dim)
    if view is None or not view.dense or view.sizes[2] != 1 or codes.dtype != torch.uint8 or not aligned(codes, out):
        return False
    outer, run = extent(fmt, view.sizes)
    output = output_of(out.dtype)
    if output is None or (output == BFLOAT16 and not fmt.power_of_two):  # more than one rounding
        return False
    if outer != 1 or run % 16 or view.sizes[1] % run or not out.is_contiguous():
        return False
    if parts.tensor_scale is not None and fast_defines(spec, torch.float32, 0) is None:
        return False  # elements times block scales may have to be exact in more than float32
    scales = parts.scales.contiguous()
    offsets = None if parts.offsets is None else parts.offsets.contiguous()
    total = codes.numel()
    if total // 16 >= 1 << 32:
        return False
    values, decoder = decoder_of(fmt, out.device)
    sixteens = run // 16
    shift = sixteens.bit_length() - 1 if sixteens & (sixteens - 1) == 0 else -1
    macros = decode_macros(output, decoder is None or offsets is not None)
    kernel("block_decode.cu", "decode_runs", device_index(out), macros)(
        -(-total // (4 * CODES_OF_VECTOR[output] * THREADS)), THREADS, codes, values, scales, offsets,
        parts.tensor_scale, out, np.uint64(total), np.uint32(sixteens), np.int32(shift), decoder or bytes(32),
    )  # fmt: skip
    return True


def _packed(x: Tensor, spec: CastSpec, random: Random) -> EncodedParts | None:
    """Return packed codes and stored scales from one kernel, None where none does that."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    if not x.dim() or x.shape[spec.dim] * fmt.bits % 8:
        return None
    rows = [
        *x.shape[: x.dim() + spec.dim],
        *x.shape[x.dim() + spec.dim + 1 :],
        packed_size(x.shape[spec.dim], fmt.bits),
    ]
    shape = list(x.shape) if fmt.bits == 8 else rows
    job = BlockJob(x, torch.empty(shape, dtype=torch.uint8, device=x.device), spec, random, reordered=True)
    job.add_scales(torch.uint8 if fmt.scale.bits <= 8 else torch.float32)
    return job.parts() if job.fast(PACKED) else None


def _pack_parts(parts: EncodedParts, spec: CastSpec) -> EncodedParts:
    """Return parts as ``Encoded`` keeps them."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    codes, scales = parts.codes.reshape(1) if not parts.codes.dim() else parts.codes, parts.scales
    if fmt.bits in _PLAIN:
        codes = pack(codes, fmt.bits).view(_PLAIN[fmt.bits]).reshape(parts.codes.shape)
    else:
        codes = pack(codes.movedim(spec.dim, -1), fmt.bits)
    if fmt.scale.bits <= 8:
        scales = codes_of_scales(scales, fmt.scale)
    elif fmt.scale.name != "fp32":
        scales = scales.to({"bf16": torch.bfloat16, "fp16": torch.float16}[fmt.scale.name])
    return parts._replace(codes=codes, scales=scales)
