# SPDX-License-Identifier: Apache-2.0
"""Casts to blocks in bytes: fields, values, and the float32 operations of reference encoders."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.formats.packed import NEED_MATRIX, Field, PackedFormat, gguf_package
from fmtsim.scaling.blocks import chunk_size
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.errors import ArgumentError, FormatError
from fmtsim.torch_engine import ggml_search as search
from fmtsim.torch_engine.ggml_search import over

Numbers = dict[str, Tensor]
"""The fields of blocks by name, [blocks, count]: float16 of 16 bits, else int8 or uint8, high bits joined to low."""

_CPU_CHUNK = 1 << 19  # elements: temporaries stay in the last cache, and calls of torch cost little beside them
_TRIT_RUNS = ((32, 5), (16, 5), (4, 4))  # bytes, and elements in each byte, a run of bytes apart


def encode(x: Tensor, spec: CastSpec, fits: Any = search) -> EncodedParts:
    """Return the bytes of blocks, uint8 [..., bytes] with ``spec.dim`` moved last; short blocks are filled with zeros.

    ``fits`` is the module of ``fit_largest``, ``fit_range``, ``fit_signed`` and ``recode``: of torch or kernels.

    Raises:
        FormatError: The format is decoded only.
        ArgumentError: x holds NaN or an infinity, for which ggml's C has no meaning; HiF4 takes both.
    """
    fmt = spec.format
    assert isinstance(fmt, PackedFormat)
    if fmt.encoder is None:
        why = "its codebook search is not part of fmtsim"
        if fmt.name in NEED_MATRIX:
            why = f"ggml encodes {', '.join(NEED_MATRIX)} under an importance matrix, which fmtsim does not take"
        raise FormatError(f"{fmt.name} can be decoded, not encoded: {why}; choose q2_k, q3_k or iq4_xs")
    rows = (x.movedim(spec.dim, -1) if x.dim() else x.reshape(1)).float()
    if short := -rows.shape[-1] % fmt.elements:
        rows = torch.nn.functional.pad(rows, (0, short))
    blocks = rows.reshape(-1, fmt.elements)
    out = x.new_empty((len(blocks), fmt.bytes), dtype=torch.uint8)
    for rows_of_x, rows_of_out in zip(_pieces(blocks, fmt), _pieces(out, fmt), strict=True):
        if not rows_of_x.numel():
            break
        # a finite sum has finite terms; an infinite one may have overflowed
        if not (fmt.has_nan or bool(rows_of_x.sum().isfinite()) or bool(rows_of_x.isfinite().all())):
            raise ArgumentError(f"x holds NaN or Inf (as float32), which {fmt.name} does not encode; remove them first")
        # the fields of blocks, and then their bytes, uint8 [blocks, bytes]
        numbers = _ENCODERS[fmt.encoder](rows_of_x, fmt, *([] if fits is search else [fits]))
        for field, part in zip(fmt.layout, rows_of_out.split([field.size for field in fmt.layout], 1), strict=True):
            values, (bits, width) = numbers[field.low], (field.bits, field.width)
            if bits >= 8:
                part.copy_(values.contiguous().view(torch.uint8))
            elif not width and field.name == "scales":
                # eight 6-bit scales and eight minima: the second four of each in nibbles and the first four's top bits
                low, high = (torch.cat([values[:, i : i + 4], values[:, i + 8 : i + 12]], 1) for i in (0, 4))
                part.copy_(torch.cat([low | high >> 4 << 6, high[:, :4] & 15 | high[:, 4:] << 4], 1))
            elif not width:
                # base-3 digits: a byte is ceil(256 n / 243) of the number n that five digits are
                runs, lengths = [], [wide * count for wide, count in _TRIT_RUNS]
                for run, (wide, count) in zip(values.int().split(lengths, 1), _TRIT_RUNS, strict=True):
                    powers = torch.tensor([3 ** (4 - i) for i in range(count)], dtype=torch.int32, device=run.device)
                    runs.append(((run.view(-1, count, wide) * powers[:, None]).sum(1) * 256 + 242) // 243)
                part.copy_(torch.cat(runs, 1))
            else:
                values = values >> fmt.bits_of(field.low) if field.name != field.low else values
                planes = _lanes((values & (1 << bits) - 1).contiguous().view(len(rows_of_out), -1, 8 // bits, width))
                packed = planes[:, :, 0].clone()
                for i in range(1, 8 // bits):
                    packed |= planes[:, :, i] << bits * i
                part.copy_(packed.view(torch.uint8).flatten(1))
    return EncodedParts(out.view(*rows.shape[:-1], rows.shape[-1] // fmt.elements * fmt.bytes))


def decode(parts: EncodedParts, spec: CastSpec, out: Tensor) -> None:
    """Write the values of blocks into ``out``, rounded once to its dtype; NaN is canonical."""
    fmt = spec.format
    assert isinstance(fmt, PackedFormat)
    target = out.movedim(spec.dim, -1) if out.dim() else out.reshape(1)
    blocks = parts.codes.reshape(-1, fmt.bytes)
    direct = target.is_contiguous() and target.numel() == len(blocks) * fmt.elements and out.dtype == torch.float32
    values = target if direct else target.new_empty(len(blocks) * fmt.elements, dtype=torch.float32)
    for rows_of_bytes, rows in zip(_pieces(blocks, fmt), _pieces(values.view(-1, fmt.elements), fmt), strict=True):
        _write_values(rows_of_bytes, fmt, rows)
    if not direct:
        target.copy_(values.view(*target.shape[:-1], -1)[..., : target.shape[-1]])
        if out.dtype == torch.bfloat16:  # torch's vectorised conversion gives NaN all ones
            target.masked_fill_(target.isnan(), torch.nan)


def _pieces(rows: Tensor, fmt: PackedFormat) -> tuple[Tensor, ...]:
    return rows.split(max(1, (_CPU_CHUNK if rows.is_cpu else chunk_size(rows.device)) // fmt.elements))


# Bytes.


def _numbers(part: Tensor, field: Field) -> Tensor:
    bits, width = field.bits, field.width
    if bits == 8:
        return part
    part = part.clone(memory_format=torch.contiguous_format)  # at an address that wider numbers may have
    if bits == 16:
        return part.view(torch.float16)
    if not width and field.name == "scales":
        first, top, nibbles = part[:, :8] & 63, part[:, :8] >> 6 << 4, part[:, 8:]
        return torch.cat([first[:, :4], nibbles & 15 | top[:, :4], first[:, 4:], nibbles >> 4 | top[:, 4:]], 1)
    if not width:
        runs = []
        for run, (wide, count) in zip(part.int().split([w for w, _ in _TRIT_RUNS], 1), _TRIT_RUNS, strict=True):
            powers = torch.tensor([3**i for i in range(count)], dtype=torch.int32, device=part.device)
            runs.append(((run[:, None] * powers[:, None] & 255) * 3 >> 8).view(-1, wide * count))
        return torch.cat(runs, 1).to(torch.uint8)
    packed = _lanes(part.view(len(part), -1, width))
    planes = packed.new_empty((*packed.shape[:2], 8 // bits, packed.shape[2]))
    mask = (1 << bits) - 1 if packed.dtype == torch.uint8 else ((1 << bits) - 1) * 0x0101010101010101
    for i in range(8 // bits):
        torch.bitwise_and(packed >> bits * i, mask, out=planes[:, :, i])
    return planes.view(torch.uint8).view(len(part), field.count)


def _lanes(x: Tensor) -> Tensor:
    """Return bytes eight at a time, as int64, where rows allow it: torch has no vectors for rows of a few bytes."""
    return x.view(torch.int64) if x.shape[-1] % 8 == 0 else x


# Values.


def _write_values(blocks: Tensor, fmt: PackedFormat, out: Tensor) -> None:
    """Write the values of blocks, uint8 [blocks, bytes], into float32 [blocks, elements]."""
    if not fmt.fields:
        gguf = gguf_package(f"decoding {fmt.name}")
        with np.errstate(all="ignore"):  # of Inf and NaN
            numpy_values = gguf.quants.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[fmt.type])
        out.copy_(torch.from_numpy(numpy_values))
        out.masked_fill_(out.isnan(), torch.nan)
        return
    # the fields of blocks, uint8 [blocks, bytes]
    parts = blocks.split([field.size for field in fmt.layout], 1)
    numbers = {field.name: _numbers(part, field) for field, part in zip(fmt.layout, parts, strict=True)}
    for low in ("codes", "scales"):
        if (high := numbers.pop(f"high_{low}", None)) is not None:
            numbers[low] = numbers[low] | high << fmt.bits_of(low)
    # 1. elements as whole numbers
    codes = numbers["codes"]
    if fmt.values:
        values = search.values_of(codes, fmt.values)
    else:
        signed = fmt.zero or fmt.bits_of("codes") == 8
        values = (codes.view(torch.int8) - fmt.zero if signed else codes).float()
    # 2. the scales of parts of a block, and what is added
    scale, minimum = _scale(numbers["d"], fmt), numbers["min"].float() if "min" in numbers else None
    if "scales" in numbers:
        scales = numbers["scales"].view(torch.int8).float() - fmt.scale_zero
        if minimum is not None:
            scales, minima = scales.chunk(2, 1)
            minimum = -(minimum * minima)
        scale = scale * scales
    for field in fmt.layout:
        if field.name.startswith("exponents"):  # each doubles the scale of its part
            scale = scale.repeat_interleave(field.count // scale.shape[1], 1).mul_(numbers[field.name] + 1)
    # 3. product and sum, each rounded
    shape = len(values), scale.shape[1], -1
    parts = torch.mul(values.view(shape), scale[..., None], out=out.view(shape))
    if minimum is not None:
        parts += minimum[..., None]
    if not bool(scale.isfinite().all()) or (minimum is not None and not bool(minimum.isfinite().all())):
        out.masked_fill_(out.isnan(), torch.nan)


def _scale(d: Tensor, fmt: PackedFormat) -> Tensor:
    """Return the scale of a block as float32."""
    return d.float() if fmt.d_format == "fp16" else _scale_table(fmt.d_format).to(d.device)[d.int()]


@lru_cache(maxsize=2)
def _scale_table(d_format: str) -> Tensor:
    """Return ``d`` by its codes: half of E8M0 or E4M3 (codebooks have twice the values of E2M1), a quarter of E6M2."""
    if d_format == "e6m2":
        return torch.tensor([2.0 ** ((code >> 2) - 52) * (4 + code % 4) for code in range(255)] + [torch.nan])
    if d_format == "e8m0":
        return torch.tensor([2.0 ** (code - 128) for code in range(256)])
    table = [2.0 ** (max(code >> 3 & 15, 1) - 11) * ((code & 7) + 8 * (code >> 3 & 15 > 0)) for code in range(256)]
    return torch.tensor([0.0 if code == 0x7F else value for code, value in enumerate(table)])


# Blocks under a scale that their largest number gives.


def _encode_largest(x: Tensor, fmt: PackedFormat, fits: Any = search) -> Numbers:
    """Q4_0, Q5_0: the number of largest magnitude becomes the lowest code."""
    d, codes = fits.fit_largest(x, fmt)
    return {"d": d.half(), "codes": codes}


def _encode_range(x: Tensor, fmt: PackedFormat) -> Numbers:
    """Q4_1, Q5_1: codes count steps from the least number."""
    low, high, top = x.amin(1, keepdim=True), x.amax(1, keepdim=True), 15 if fmt.field("high_codes") is None else 31
    if bool((zero := (low == 0).squeeze(1)).any()):  # which the first has the sign of
        low[zero] = search.first(x[zero], x[zero] == 0)
    d = over(high - low, float(top)) + 0.0  # of zeros, too
    inverse = search.reciprocal_or_zero(d)
    codes = (x - low).mul_(inverse).add_(0.5).to(torch.int8).clamp_(max=top)
    return {"d": d.half(), "min": low.half(), "codes": search.coded(codes, d, inverse)}


def _encode_rounded(x: Tensor, fmt: PackedFormat) -> Numbers:
    """Q8_0, Q2_0, TQ1_0, TQ2_0: the largest magnitude becomes ``top``; ties away from zero."""
    top, unusable = fmt.search
    d = over(torch.maximum(x.amax(1, keepdim=True), -x.amin(1, keepdim=True)).abs(), top)
    inverse = search.reciprocal_or_zero(d)
    y = x * inverse
    below_half = (y.view(torch.int32) & -1 << 31).bitwise_or_(0x3EFFFFFF)  # of y's sign: a half would carry
    codes = y.add_(below_half.view(torch.float32)).to(torch.int8).add_(fmt.zero)
    return {"d": d.half(), "codes": search.coded(codes, d, inverse, int(unusable))}


def _encode_signs(x: Tensor, fmt: PackedFormat) -> Numbers:
    """Q1_0: the mean magnitude and a sign for each element, 1 of -0."""
    return {"d": over(search.total(x.abs().T), float(fmt.elements)).half()[:, None], "codes": (x >= 0).to(torch.uint8)}


def _encode_fp4(x: Tensor, fmt: PackedFormat) -> Numbers:
    """MXFP4, NVFP4: E2M1 of least error, of equal errors the lowest magnitude."""
    magnitudes = x.view(len(x), fmt.elements // fmt.part, -1).abs()
    amax = magnitudes.amax(2)
    if fmt.d_format == "e8m0":  # floor(log2(amax)) - 2, of the float32 logarithm; 0 of 0
        code = amax.double().log2().float().floor().nan_to_num(neginf=-125.0).int() + 125
    else:  # nearest, ties up; 256 and more are 448, and no subnormal number rounds to a normal one
        bits = over(amax, 6.0).view(torch.int32)
        normal = (bits + (1 << 19) >> 20) - (120 << 3)
        normal = torch.where(normal < 15 << 3, normal, 0x7E)
        code = torch.where(bits >> 23 > 120, normal, (over(amax, 6.0) * 512 + 0.5).int().clamp(max=7))
    code = code.to(torch.uint8)  # the last 8 bits
    d, error, codes = _scale(code, fmt)[..., None], magnitudes, torch.zeros_like(magnitudes, dtype=torch.uint8)
    for i, value in enumerate(fmt.values[1:8], 1):
        other = (d * value - magnitudes).abs_()
        codes = torch.maximum(codes, (other < error).view(torch.uint8) * i)
        error = torch.minimum(error, other)
    codes = codes.view(x.shape)
    return {"d": code, "codes": codes | ((x < 0) & (codes > 0)).to(torch.uint8) << 3}


_SEVENTH = 0.142578125  # as bfloat16


def _encode_micro_exponents(x: Tensor, fmt: PackedFormat) -> Numbers:
    """HiF4: a seventh of the largest magnitude as E6M2, whose reciprocal in bfloat16 gives exponents and elements."""
    fours = x.view(len(x), -1, fmt.part).abs()
    of_4 = fours.amax(2)
    of_8 = of_4.view(len(x), -1, 2).amax(2)
    # 1. the scale, rounded to bfloat16 and then to two mantissa bits, both to nearest even; NaN where there is one
    largest = of_8.amax(1, keepdim=True)
    bits = (largest * _SEVENTH).bfloat16().float().clamp(2.0**-48, 49152.0).view(torch.int32)
    code = (bits + 0xFFFFF + (bits >> 21 & 1) >> 21) - (127 - 48 << 2)
    code = torch.where(largest.isnan(), 255, code).to(torch.uint8)
    # 2. a doubling for eight numbers that reach 4 scales, and for four that then reach 2 of them
    inverse = over(0.25, _scale(code, fmt)).bfloat16().float()
    eights = of_8 * inverse >= 4
    inverses = (inverse * torch.where(eights, 0.5, 1.0)).repeat_interleave(2, 1)
    halves = of_4 * inverses >= 2
    # 3. quarters of what is left, ties away from zero; -0 has the code of 0
    quarters = fours * (inverses * torch.where(halves, 2.0, 4.0))[..., None]
    codes = quarters.add_(0.5).floor_().nan_to_num_(nan=0.0).clamp_(max=7).to(torch.uint8).view(x.shape)
    codes |= (x < 0).to(torch.uint8) << 3
    return {
        "d": code, "exponents_of_8": eights.view(torch.uint8), "exponents_of_4": halves.view(torch.uint8),
        "codes": codes,
    }  # fmt: skip


# Blocks of parts, whose scales are searched and then rounded.


def _encode_searched_range(x: Tensor, fmt: PackedFormat, fits: Any = search) -> Numbers:
    """Q2_K, Q4_K, Q5_K: scales and minima of parts, of 4 or 6 bits under those of the block."""
    # 1. a scale and a minimum for each part
    found_scale, found_minimum, tried = fits.fit_range(x, fmt)
    top = int(fmt.search[0])
    narrow = top == 3
    # 2. both as integers, of the largest of the block
    count = fmt.elements // fmt.part
    (d, scales), (minimum, minima) = (_graded(s.view(-1, count), narrow) for s in (found_scale, found_minimum))
    if narrow:  # ggml joins two nibbles by "or"
        scales, minima = scales & 15, (scales & 255) >> 4 | minima & 15
    # 3. codes under what is stored
    d_part, minimum_part = ((s.float() * n).view(-1) for s, n in ((d, scales), (minimum, minima)))
    codes = fits.recode(tried, d_part, minimum_part, 0, top, fmt)
    return {"d": d, "min": minimum, "scales": torch.cat([scales, minima], 1).to(torch.uint8), "codes": codes}


def _graded(scales: Tensor, narrow: bool) -> tuple[Tensor, Tensor]:
    """Return the float16 step of a block's scales [blocks, parts] and how many of them each is, int32."""
    top, largest = 15.0 if narrow else 63.0, scales.amax(1, keepdim=True).clamp(min=0.0) + 0.0
    inverse = torch.where(largest > 0, over(top, largest), 0.0)
    steps = search.nearest(inverse * scales, -(2.0**22), 2.0**22).int()
    return over(largest, top).half(), steps if narrow else (steps & 255).clamp_(max=63)


def _largest_scale(scales: Tensor) -> Tensor:
    """Return the scale [blocks, 1] of largest magnitude; searches give NaN where sums overflow, which counts as 0."""
    return search.signed_largest(scales.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))


def _encode_searched(x: Tensor, fmt: PackedFormat, fits: Any = search, *, three_bits: bool) -> Numbers:
    """Q3_K, Q6_K: scales of parts, of 6 or 8 bits under that of the block."""
    scale, offset, tried = fits.fit_signed(x, fmt)
    scales, top = scale.view(len(x), -1), 32 if three_bits else 128
    largest = _largest_scale(scales)
    zero = largest == 0 if three_bits else largest.abs() < search.LEAST
    inverse = over(-float(top), largest)
    d = torch.where(zero, 0.0, over(1.0, inverse)).half()
    steps = torch.where(zero, -float(fmt.scale_zero), search.nearest(inverse * scales, -top, top - 1))
    codes = fits.recode(tried, (d.float() * steps).view(-1), offset, -fmt.zero, fmt.zero - 1, fmt)
    if not three_bits and bool(zero.any()):
        codes = codes.masked_fill(zero, 0)
    return {"d": d, "scales": (steps + fmt.scale_zero).to(torch.int8).view(torch.uint8), "codes": codes}


def _encode_codebook(x: Tensor, fmt: PackedFormat) -> Numbers:
    """IQ4_NL, IQ4_XS: scales of parts of 32, which IQ4_XS has in 6 bits under that of the block."""
    parts = search.parts_of(x, fmt)
    scale, codes = search.search_codebook(parts, fmt.values, int(fmt.search[0]))
    scales = scale.view(len(x), -1)
    if fmt.part == fmt.elements:
        return {"d": scales.half(), "codes": codes.T.to(torch.uint8)}
    d = over(-_largest_scale(scales), 32.0)
    steps = search.nearest(search.reciprocal_or_zero(d) * scales, -32, 31)
    codes = search.nearest_value(parts * search.reciprocal_or_zero(d * steps).view(-1), fmt.values).T.reshape(x.shape)
    return {"d": d.half(), "scales": (steps + 32).to(torch.uint8), "codes": codes.to(torch.uint8)}


_ENCODERS: dict[str, Callable[..., Numbers]] = {
    "largest": _encode_largest, "range": _encode_range, "rounded": _encode_rounded, "signs": _encode_signs,
    "fp4": _encode_fp4, "micro_exponents": _encode_micro_exponents,
    "searched_range": _encode_searched_range, "codebook": _encode_codebook,
    "searched_3bit": partial(_encode_searched, three_bits=True),
    "searched_signed": partial(_encode_searched, three_bits=False),
}  # fmt: skip
