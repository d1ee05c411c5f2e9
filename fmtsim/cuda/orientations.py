"""Casts of one matrix along both axes from one read, as the products of training need them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.cuda import blocks
from fmtsim.cuda.block_fast import BFLOAT16, CODES, PACKED, fast_defines, output_of
from fmtsim.cuda.block_jobs import BlockJob, Rows
from fmtsim.cuda.parameters import draw_of
from fmtsim.formats.block import BlockFormat
from fmtsim.ops import CastSpec, EncodedParts, Random, block_counts


class Both(NamedTuple):
    """One matrix [M, N] in two casts.

    Attributes:
        rows: [M, N], blocks along N.
        columns: [M, N], or [N, M] where that was asked for, blocks along M.
        tensor_scale: float32, 0-d, where values were left without it, else None.
    """

    rows: Tensor
    columns: Tensor
    tensor_scale: Tensor | None


def quantize_both(
    x: Tensor,
    spec: CastSpec,
    dtype: torch.dtype,
    random: tuple[Random, Random] = (None, None),
    *,
    transposed: bool = False,
    bare: bool = False,
) -> Both:
    """Quantise a matrix with blocks along its rows and, from the same read, with blocks along its columns.

    The values are those of two calls of ``quantize_blocks``, with ``dim=-1`` and ``dim=-2``.

    Args:
        x: [M, N]; float16, bfloat16, float32 or float64.
        spec: The cast; its ``dim`` is not looked at.
        dtype: Of both results.
        random: Random words of the result along the rows and of that along the columns.
        transposed: Write the second result as [N, M].
        bare: Leave the scale of the tensor out of the values of a two-level format (``quantize_bare``).
    """
    across, down = (_along(spec, dim) for dim in (-1, -2))
    output = output_of(dtype)
    rows = torch.empty(x.shape, dtype=dtype, device=x.device)
    columns = torch.empty(x.shape[::-1] if transposed else x.shape, dtype=dtype, device=x.device)
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    if output is not None and x.numel() and _same_draws(spec, random):
        job = BlockJob(x, columns, down, random[1], bare=bare, reordered=transposed)
        if bare and fmt.tensor_scale:
            job.tensor_scale = torch.empty((), device=x.device)
        if job.both(output, Rows(rows, None, draw_of(spec.rounding, random[0]), transposed)):
            return Both(rows, columns, job.tensor_scale)
    results, scale = [], None
    for cast, words in ((across, random[0]), (down, random[1])):
        if bare:
            values, scale = quantize_bare(x, cast, words, dtype)
        else:
            values = torch.empty(x.shape, dtype=dtype, device=x.device)
            blocks.quantize_blocks(x, cast, words, values)
        results.append(values)
    return Both(results[0], results[1].t().contiguous() if transposed else results[1], scale)


def encode_both(
    x: Tensor, spec: CastSpec, random: tuple[Random, Random] = (None, None), *, packed: bool = False
) -> tuple[EncodedParts, EncodedParts]:
    """Encode a matrix with blocks along its rows and, from the same read, with blocks along its columns.

    The parts are those of two calls of ``encode_blocks``, with ``dim=-1`` and ``dim=-2``: packed codes of the second
    lie as [N, bytes], which is the operand that a product contracting over M takes.
    """
    across, down = (_along(spec, dim) for dim in (-1, -2))
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    if x.numel() and x.dim() == 2 and fmt.bits in (4, 8) and _same_draws(spec, random):
        m, n = x.shape
        narrow = packed and fmt.bits == 4
        output = PACKED if packed else CODES
        shapes = ((m, n // 2), (n, m // 2)) if narrow else ((m, n), (m, n))
        scale_dtype = torch.uint8 if packed and fmt.scale.bits <= 8 else torch.float32
        found = [torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes]
        scales = [torch.empty(block_counts(fmt, x.shape, d), dtype=scale_dtype, device=x.device) for d in (-1, -2)]
        job = BlockJob(x, found[1], down, random[1], reordered=True)
        job.scales = scales[1]
        if fmt.tensor_scale:
            job.tensor_scale = torch.ones((), device=x.device)
        if m % 2 == n % 2 == 0 and job.both(
            output, Rows(found[0], scales[0], draw_of(spec.rounding, random[0]), narrow)
        ):
            first, second = (
                EncodedParts(codes, scale, job.tensor_scale) for codes, scale in zip(found, scales, strict=True)
            )
            return first, second
    return blocks.encode_blocks(x, across, random[0], packed), blocks.encode_blocks(x, down, random[1], packed)


def quantize_bare(
    x: Tensor, spec: CastSpec, random: Random, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Return the values of a two-level format without the scale of the tensor, and that scale (float32, 0-d).

    The values are the products of elements and block scales; ``holds_bare`` says whether bfloat16 holds them.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    job = BlockJob(x, out, spec, random, bare=True)
    job.tensor_scale = torch.empty((), device=x.device)
    output = output_of(dtype)
    if not x.numel():
        return out, job.tensor_scale.fill_(1.0)
    if output is not None and job.fast(output):
        return out, job.tensor_scale
    parts = blocks.encode_blocks(x, spec, random)
    assert parts.tensor_scale is not None
    blocks.decode_blocks(parts._replace(tensor_scale=None), spec, out)
    return out, parts.tensor_scale


def holds_bare(spec: CastSpec) -> bool:
    """Say whether a format has two levels, and bfloat16 holds the products of its elements and block scales."""
    fmt = spec.format
    if not isinstance(fmt, BlockFormat) or not fmt.tensor_scale:
        return False
    return fast_defines(spec, torch.float32, BFLOAT16, True) is not None


def _along(spec: CastSpec, dim: int) -> CastSpec:
    return CastSpec(format=spec.format, rounding=spec.rounding, overflow=spec.overflow, dim=dim)


def _same_draws(spec: CastSpec, random: tuple[Random, Random]) -> bool:
    """Say whether the kernel for both axes draws as asked: from keys."""
    return spec.rounding.mode == "nearest_even" or not any(isinstance(words, Tensor) for words in random)
