"""Casts of one matrix along both axes from one read, as the products of training need them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.cuda.cast import blocks
from fmtsim.cuda.cast.block_fast import BFLOAT16, fast_defines
from fmtsim.cuda.cast.block_jobs import BlockJob
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.formats.block import BlockFormat
from fmtsim.spec.cast import CastSpec, Random


class Both(NamedTuple):
    """One matrix [M, N] in two casts.

    Attributes:
        rows: [M, N], bfloat16, blocks along N.
        columns: [M, N], bfloat16, blocks along M.
        tensor_scale: float32, 0-d, where values were left without it, else None.
    """

    rows: Tensor
    columns: Tensor
    tensor_scale: Tensor | None


def quantize_both(x: Tensor, spec: CastSpec, random: tuple[Random, Random] = (None, None), *, bare: bool) -> Both:
    """Quantise a matrix with blocks along its rows and, from the same read, with blocks along its columns.

    The values are those of two calls of ``quantize_blocks``, with ``dim=-1`` and ``dim=-2``, as bfloat16.

    Args:
        x: [M, N]; float16, bfloat16, float32 or float64.
        spec: The cast; its ``dim`` is not looked at.
        random: Random words of the result along the rows and of that along the columns.
        bare: Leave the scale of the tensor out of the values of a two-level format (``quantize_bare``).
    """
    across, down = (_along(spec, dim) for dim in (-1, -2))
    rows, columns = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    if x.numel() and _same_draws(spec, random):
        job = BlockJob(x, columns, down, random[1], bare=bare)
        if bare and fmt.tensor_scale:
            job.tensor_scale = torch.empty((), device=x.device)
        if job.both(rows, draw_of(spec.rounding, random[0])):
            return Both(rows, columns, job.tensor_scale)
    if bare:
        (rows, _), (columns, scale) = (quantize_bare(x, *how) for how in zip((across, down), random, strict=True))
        return Both(rows, columns, scale)
    for cast, words, out in ((across, random[0], rows), (down, random[1], columns)):
        blocks.quantize_blocks(x, cast, words, out)
    return Both(rows, columns, None)


def quantize_bare(x: Tensor, spec: CastSpec, random: Random) -> tuple[Tensor, Tensor]:
    """Return the values of a two-level format without the scale of the tensor, and that scale (float32, 0-d).

    The values are bfloat16, the products of elements and block scales; ``holds_bare`` says whether it holds them.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    job = BlockJob(x, out, spec, random, bare=True)
    job.tensor_scale = torch.empty((), device=x.device)
    if not x.numel():
        return out, job.tensor_scale.fill_(1.0)
    if job.fast(BFLOAT16):
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
