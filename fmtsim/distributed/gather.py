# SPDX-License-Identifier: Apache-2.0
"""Weights gathered in low precision, and tokens dispatched to other ranks in low precision."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fmtsim.casts.arguments import check_input, check_readable
from fmtsim.casts.quantize import encode, quantize
from fmtsim.distributed.arithmetic import (
    canonical,
    each,
    from_bytes,
    from_rows,
    require_ranks,
    require_row_blocks,
    row_template,
    to_bytes,
    to_rows,
)
from fmtsim.distributed.ranks import Ranks
from fmtsim.formats.block import Format, ScaledFormat
from fmtsim.formats.element import ElementFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, check_use
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import statistic
from fmtsim.scaling.scaled_cast import scales
from fmtsim.scaling.scales import Scales
from fmtsim.spec.cast import CastSpec
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import checked

HALO = Scaling(arithmetic="divide")  # amax / 127, true division


def all_gather(
    x: Tensor,
    format: str | Format,
    *,
    scaling: Scaling | None = HALO,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Gather the shards of all ranks, sent as codes, as HALO gathers weights in int8.

    Args:
        x: This rank's shard; any shape, float16, bfloat16, float32 or float64, the same on all ranks.
        format: The element format that travels, such as ``"int8"`` or ``"e4m3"``; or a format with scales of its own,
            such as ``"mxfp8_e4m3"``, which needs ``scaling=None``.
        scaling: How the scale of the whole tensor follows from its largest magnitude on all ranks. None: every rank
            encodes its shard by itself.
        sizes: Elements of each tensor, where a flat x holds several, each with a scale of its own.
        group: The ranks; None is the default group.

    Returns:
        [ranks, *x.shape] in x's dtype: the values of the codes, each rounded once to float32 and once to x's dtype.
        With ``scaling`` these are the bits of quantising the whole tensor in one process. NaN and Inf: where the format
        has NaN such an element becomes NaN; where it has none its whole tensor does. Without ``scaling``: as for
        ``fmtsim.quantize``.

    Raises:
        ArgumentError: There is no group, ranks disagree, or the scaling does not fit.
        DtypeError: x is not a floating-point tensor.
        CollectiveError: A rank does not answer.
    """
    ranks, fmt = Ranks(group), get_format(format)
    _check(x)
    checked("scaling", scaling, Scaling | None)
    parts = (x.numel(),) if sizes is None else checked("sizes", sizes, tuple[int, ...])
    if sizes is not None and scaling is None:
        raise ArgumentError(f"sizes={parts} belong to a scale that ranks share; pass a scaling, or leave them out")
    ranks.agree(("all_gather", fmt, scaling, tuple(x.shape), str(x.dtype), parts), x.device)
    return gather_parts(x, fmt, scaling, parts, ranks)


def gather_parts(x: Tensor, fmt: Format, scaling: Scaling | None, sizes: tuple[int, ...], ranks: Ranks) -> Tensor:
    """Do what ``all_gather`` does, for arguments that all ranks agree on."""
    if scaling is None:
        encoded = encode(x.detach(), fmt, pad=True)
        wires = ranks.gather(to_rows(encoded, 1)[0], "an all-gather")
        shards = [from_rows(wire[None], encoded).decode(out_dtype=x.dtype) for wire in wires]
        return torch.stack(shards)
    require_whole(fmt, scaling)
    assert not isinstance(fmt, ScaledFormat)
    if sum(sizes) != x.numel() or min(sizes, default=-1) < 0:
        raise ArgumentError(
            f"sizes={sizes} sum to {sum(sizes)}, not to the {x.numel()} elements of x; name them all, none below 0"
        )
    flat = x.detach().reshape(-1).float()
    shared_scales = _shared_scales(flat.split(sizes), scaling, fmt, ranks)
    elements = _elements(flat, shared_scales, sizes, fmt)
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow)
    values = from_bytes(ranks.gather(to_bytes(elements, spec), "an all-gather"), spec, flat.numel())
    scaled = each(torch.mul, values, sizes, shared_scales.scale)
    return canonical(scaled.to(x.dtype)).reshape(ranks.size, *x.shape)


def simulate_gather(shards: Sequence[Tensor], fmt: Format, scaling: Scaling | None) -> Tensor:
    """Return in one process what ``all_gather`` gives ranks that hold these shards, [ranks, *shape]."""
    if scaling is None:
        return torch.stack([encode(x.detach(), fmt, pad=True).decode(out_dtype=x.dtype) for x in shards])
    require_whole(fmt, scaling)
    assert not isinstance(fmt, ScaledFormat)
    whole = torch.stack([x.detach() for x in shards])
    flat = whole.reshape(-1).float()
    shared_scales = _shared_scales([flat], scaling, fmt, None)
    values = _elements(flat, shared_scales, (flat.numel(),), fmt) * shared_scales.scale
    return canonical(values.to(whole.dtype)).reshape(whole.shape)


def dispatch(
    x: Tensor,
    counts: Sequence[int] | Tensor,
    format: str | Format = "logfmt8",
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows to other ranks, as codes with their scales: the all-to-all of experts, in LogFMT tiles or any format.

    Args:
        x: [tokens, width]; the first ``counts[0]`` rows go to rank 0, the next ``counts[1]`` to rank 1, and so on. Rows
            and counts may differ between ranks, width and dtype not.
        counts: Rows for each rank; a tensor on a device is waited for.
        format: The format that travels: element formats, and those with blocks along a row.
        group: The ranks; None is the default group.

    Returns:
        [tokens received, width] in x's dtype: rows from rank 0, then from rank 1, ...; the bits are those of
        ``fmtsim.quantize(x, format, out_dtype=x.dtype, pad=True)`` on the rank that sent them, NaN and Inf too.

    Raises:
        ArgumentError: There is no group, counts do not fit x, the format has scales across rows, or ranks disagree.
        DtypeError: x is not a floating-point tensor.
        CollectiveError: A rank does not answer.
    """
    ranks, fmt = Ranks(group), get_format(format)
    _check(x)
    require_row_blocks(fmt)
    sizes = counts.tolist() if isinstance(counts, Tensor) and counts.layout == torch.strided else counts
    sent = list(checked("counts", sizes, tuple[int, ...]))
    if x.dim() != 2 or len(sent) != ranks.size or sum(sent) != len(x) or min(sent) < 0:
        raise ArgumentError(
            f"counts={sent} do not part x of shape {tuple(x.shape)} among {ranks.size} ranks; "
            "pass one number of rows a rank, which sum to the rows of a matrix"
        )
    ranks.agree(("dispatch", fmt, x.shape[1], str(x.dtype)), x.device)
    received = [row[ranks.rank] for row in ranks.gather_objects(sent, "the exchange of row counts")]
    if not x.shape[1]:
        return x.new_empty(sum(received), 0)
    template = row_template(fmt, x.shape[1], x.device)
    width = to_rows(template, 1).shape[1]
    out = to_rows(encode(x.detach(), fmt, pad=True), len(x)) if len(x) else x.new_empty(0, width, dtype=torch.uint8)
    into = out.new_empty(sum(received), width)
    with ranks.answering("the dispatch of rows"):
        dist.all_to_all_single(into, out, received, sent, group=ranks.group)
    if not len(into):
        return x.new_empty(0, x.shape[1])
    return from_rows(into, template, len(into)).decode(out_dtype=x.dtype)


def whole_tensors(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that keeps each tensor, for ZeRO with one scale a tensor, which must not be split (FP8-LM).

    The largest tensor first, each goes to the rank with the fewest elements so far, the lowest one in a tie; tensors of
    one size go in their order.

    >>> whole_tensors([4, 10, 5, 1], 2)
    [1, 0, 1, 1]
    """
    checked("sizes", sizes, tuple[int, ...])
    require_ranks(checked("ranks", ranks, int))
    loads, owner = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += sizes[i]
    return owner


def _shared_scales(parts: Sequence[Tensor], scaling: Scaling, fmt: ElementFormat, ranks: Ranks | None) -> Scales:
    """Return the scales of tensors from their largest magnitudes on all ranks; NaN where NaN could not travel."""
    local_amaxes = torch.stack([statistic(part[None], (None, None), "amax").reshape(-1).sum() for part in parts])
    wrong = torch.stack([(~part.isfinite()).any() for part in parts]).float()
    amaxes = torch.cat([local_amaxes, wrong])
    if ranks is not None:
        amaxes = ranks.largest(amaxes, "the exchange of largest magnitudes")
    shared_scales = scales(amaxes[: len(parts)], scaling, float(fmt.max))
    if fmt.has_nan:
        return shared_scales
    return shared_scales._replace(scale=torch.where(amaxes[len(parts) :] > 0, torch.nan, shared_scales.scale))


def _elements(x: Tensor, shared_scales: Scales, sizes: Sequence[int], fmt: ElementFormat) -> Tensor:
    """Return values of the format, one for each element."""
    x = torch.where(x.isfinite(), x, torch.nan if fmt.has_nan else 0.0)
    y = each(torch.div if shared_scales.divides else torch.mul, x, sizes, shared_scales.factor)
    return quantize(y, fmt, out_dtype=torch.float32)


def require_whole(fmt: Format, scaling: Scaling) -> None:
    """Refuse formats with scales of their own, and rules that are not one scale from the largest magnitude."""
    if isinstance(fmt, ScaledFormat):
        raise ArgumentError(f"{fmt.name} has scales of its own; pass scaling=None, or an element format")
    check_use("the", scaling, "a gathered tensor", ArgumentError)


def _check(x: Tensor) -> None:
    check_input(x)
    check_readable("x", x)
