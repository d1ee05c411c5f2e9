# SPDX-License-Identifier: Apache-2.0
"""How codes and scales are stored: as packed bytes and in small dtypes, and read back."""

import torch

from fmtsim.casts.lanes import define_operator
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.interop import safetensors_tag, torch_dtype
from fmtsim.formats.packing import code_dtype, pack, packed_size, unpack
from fmtsim.formats.representable import codes_of_scales, scales_of_codes
from fmtsim.spec.cast import block_bytes, block_counts, level_shape, spec_from_json
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import CodeError, FormatError

_PLAIN = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # widths that need no packing
_PLAIN_TAGS = {8: "U8", 16: "U16", 32: "U32", 64: "U64"}

Layout = dict[str, tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...]]]


def stored_layout(fmt: Format, shape: torch.Size, dim: int) -> Layout:
    """Return tag and shape in a file, dtype and shape in memory, of every tensor that a format asks for."""
    if isinstance(fmt, PackedFormat):
        size = block_bytes(fmt, shape, dim)
        return {"codes": ("U8", size, torch.uint8, size)}
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    tag = None if isinstance(element, LogTileFormat) else safetensors_tag(element)
    rows, bits = _rows(shape, dim), fmt.bits
    packed = (*rows[:-1], packed_size(rows[-1], bits))
    layout: Layout = {}
    # 1. codes: in a dtype of their width, under a tag of safetensors, or as packed bytes
    if bits in _PLAIN:
        layout["codes"] = (tag or _PLAIN_TAGS[bits], tuple(shape), _PLAIN[bits], tuple(shape))
    elif tag is not None and rows[-1] * bits % 8 == 0:  # a tag below 8 bits counts elements, so rows end on bytes
        layout["codes"] = (tag, rows, torch.uint8, packed)
    else:
        layout["codes"] = ("U8", packed, torch.uint8, packed)
    # 2. scales, zero points or lowest logarithms, and the tensor's scale
    if isinstance(fmt, BlockFormat | LogTileFormat):
        grid = block_counts(fmt, shape, dim)
        tag, dtype = _scale_type(fmt)
        layout["scales"] = (tag, grid, dtype, grid)
        if isinstance(fmt, LogTileFormat):
            layout["offsets"] = ("F32", grid, torch.float32, grid)
        elif fmt.zero_point:
            layout["offsets"] = ("I32", grid, torch.int32, grid)
        if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
            second = level_shape(fmt, shape, dim)
            layout["tensor_scale"] = ("F32", second, torch.float32, second)
    return layout


def _scale_type(fmt: BlockFormat | LogTileFormat) -> tuple[str, torch.dtype]:
    """Return the tag and the dtype in which a format's scales are stored."""
    if isinstance(fmt, LogTileFormat):
        return "F32", torch.float32
    if fmt.scale.bits <= 8:
        return safetensors_tag(fmt.scale) or "U8", torch.uint8
    dtype, tag = torch_dtype(fmt.scale), safetensors_tag(fmt.scale)
    if dtype is None or tag is None:
        raise FormatError(
            f"{fmt.name}: scales in {fmt.scale.name} have no dtype of their own; choose fp32, bf16 or fp16"
        )
    return tag, dtype


def _rows(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """Return the shape with ``dim`` moved last; a tensor without dimensions is a row of one."""
    if not shape:
        return (1,)
    sizes = list(shape)
    return (*sizes[:dim], *sizes[len(sizes) + dim + 1 :], sizes[dim])


def store(
    codes: torch.Tensor, scales: torch.Tensor | None, fmt: Format, dim: int, *, validated: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return codes of a tensor's shape and float32 scales as they are stored, none of them rounded.

    Args:
        codes: Unsigned bit patterns.
        scales: Those of blocks or tiles, None where the format has none.
        fmt: The format.
        dim: The inner axis of blocks.
        validated: All of them are known to be those of the format, which saves looking.

    Raises:
        CodeError: One of them does not belong to the format.
    """
    # 1. scales: as codes, a choice between two formats in the sign's bit (NaN has none), or in a dtype of their own
    if scales is not None and isinstance(fmt, BlockFormat):
        _, dtype = _scale_type(fmt)
        if dtype == torch.uint8:
            signs = None if fmt.alternative is None else torch.signbit(scales) & ~scales.isnan()
            scales = codes_of_scales(scales if signs is None else scales.abs(), fmt.scale, validated=validated)
            scales = scales if signs is None else scales | (signs.to(torch.uint8) << (fmt.scale.bits - 1))
        else:
            narrow = scales.to(dtype)
            lost = (narrow != scales) & ~scales.isnan()
            if not validated and is_readable(lost) and bool(lost.any()):
                raise CodeError(
                    f"scale {scales[lost][0].item():g} is not a value of {fmt.scale.name}; pass scales of that format"
                )
            scales = narrow
    # 2. codes: packed along dim, or each in a dtype of its width, in the tensor's order
    rows, bits = codes.reshape(1) if codes.dim() == 0 else codes, fmt.bits
    if bits not in _PLAIN:
        return pack(rows.movedim(dim, -1), bits, validated=validated), scales
    return pack(rows, bits, validated=validated).view(_PLAIN[bits]).reshape(codes.shape), scales


def restore(
    codes: torch.Tensor, scales: torch.Tensor | None, fmt: Format, dim: int, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Undo ``store`` for a tensor of a shape."""
    return restore_codes(codes, fmt, dim, shape), None if scales is None else restore_scales(scales, fmt)


def restore_scales(scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return float32 scales; raise CodeError for a code that is not that of a scale."""
    if not isinstance(fmt, BlockFormat):  # tiles: float32 as they are
        return scales
    # the sign's bit chooses between two formats of elements; magnitudes alone are codes
    sign = 1 << (fmt.scale.bits - 1) if fmt.alternative else 0
    plain = scales_of_codes(scales & ~sign, fmt.scale) if fmt.scale.bits <= 8 else scales.to(torch.float32)
    return torch.where((scales & sign) != 0, -plain, plain) if sign else plain


def restore_codes(codes: torch.Tensor, fmt: Format, dim: int, shape: torch.Size) -> torch.Tensor:
    """Return codes of the tensor's shape."""
    bits = fmt.bits
    if bits in _PLAIN:  # signed dtypes hold 16 and 32 bits; engines take them unsigned in a wider one
        plain = codes.to(code_dtype(bits))
        return plain & ((1 << bits) - 1) if bits in (16, 32) else plain
    rows = _rows(shape, dim)  # packed with dim last, and moved back
    unpacked = unpack(codes, bits, rows[-1])
    return unpacked.reshape(rows).movedim(-1, dim) if shape else unpacked.reshape(())


def _store(codes, scales, spec):  # type: ignore[no-untyped-def]
    cast = spec_from_json(spec)  # operators return new tensors: what needs no change is copied
    return store(codes.clone(), scales.clone(), cast.format, cast.dim, validated=True)


def _restore(codes, scales, spec, shape):  # type: ignore[no-untyped-def]
    cast = spec_from_json(spec)
    return restore(codes.clone(), scales.clone(), cast.format, cast.dim, torch.Size(shape))


def _store_shapes(codes, scales, spec):  # type: ignore[no-untyped-def]
    cast = spec_from_json(spec)
    layout = stored_layout(cast.format, codes.shape, cast.dim)
    _, _, dtype, size = layout["codes"]
    # scales of one dimension stand for none
    small = torch.empty_like(scales) if scales.dim() == 1 else scales.new_empty(scales.shape, dtype=layout["scales"][2])
    return codes.new_empty(size, dtype=dtype), small


def _restore_shapes(codes, scales, spec, shape):  # type: ignore[no-untyped-def]
    dtype = code_dtype(spec_from_json(spec).format.bits)
    return codes.new_empty(shape, dtype=dtype), torch.empty_like(scales, dtype=torch.float32)


define_operator("store(Tensor codes, Tensor scales, str spec) -> (Tensor, Tensor)", _store, _store_shapes)
define_operator(
    "restore(Tensor codes, Tensor scales, str spec, SymInt[] shape) -> (Tensor, Tensor)", _restore, _restore_shapes
)
