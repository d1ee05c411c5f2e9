# SPDX-License-Identifier: Apache-2.0
"""check_recode: whether numbers of one format are numbers of another, by all their codes, and where weights are not."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode, encode
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.element import ElementFormat
from fmtsim.formats.packed import PackedFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Block
from fmtsim.lab.analysis.stats import Counts
from fmtsim.ptq.export import open_checkpoint
from fmtsim.ptq.export.checkpoint_files import Checkpoint
from fmtsim.ptq.export.layouts import Reordered
from fmtsim.spec.cast import EncodedParts
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.progress import make_progress
from fmtsim.support.records import located
from fmtsim.support.table import Column, Record, Result, Rows, decibels, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecode(Record):
    """Say what a weight loses in another format, under the scales of that format's rule and under its own.

    Args:
        name: The weight's.
        blocks: Blocks that it has in its own format; of a tensor in the other format.
        by_rule: Those that change under the scales of the other format's own rule.
        carried: Those that change under the weight's own scales (``carry``); None where these cannot be carried over.
        scales: ``"rule"`` or ``"own"``: the scales that it gets, which the three fields below are of.
        sqnr_db: Signal to noise ratio in dB, inf where no number changes.
        max_relative: Largest error of a number, relative to the number.
        first: Places ``(row of blocks, block)`` of the first that change.
        by_rule_db: ``sqnr_db`` under the scales of the other format's own rule.
        signal: Sum of the weight's squares.
    """

    _derived: ClassVar = ("changed",)
    name: str
    blocks: int
    by_rule: int
    carried: int | None
    scales: str
    sqnr_db: float
    max_relative: float
    first: tuple[tuple[int, int], ...]
    by_rule_db: float
    signal: float

    @property
    def changed(self) -> int:
        """Blocks that change under the scales that the weight gets."""
        return self.by_rule if self.carried is None or self.scales == "rule" else self.carried


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recode(Result):
    """Say whether the blocks of one format are blocks of another; ``check_recode`` makes it, ``print`` shows it.

    Args:
        source: Name of the format that numbers are in; of a checkpoint "".
        target: Name of the format that they shall be in.
        codes: Finite values of the source's elements that were tried.
        ratios: Each r for which r times every value of the source's elements is one of the target's elements. Under
            the scale s / r the target then has what the source has under s.
        scales: Scales of the source that were tried: every code of 16 bits or fewer, else the first and the last of
            each power of two.
        held: Those for which a scale s / r is one of the target's (times a tensor scale that is a power of two).
        lowest, highest: Least and largest of ``held``.
        span: Scales of a tensor (where the target has a tensor scale), or of a block of the target (where it is
            larger than the source's), may differ by powers of two up to this; None where each block stands alone.
        by_rule: Of the ``pairs`` of a scale and a largest element, those whose blocks lose nothing by the target's own
            scale rule; None where that depends on other blocks, or they are too many.
        pairs: See ``by_rule``.
        weights: Weights of a checkpoint.
        note: That the source is a format, where a file or folder of its name exists.
    """

    source: str
    target: str
    codes: int = 0
    ratios: tuple[Fraction, ...] = ()
    scales: int = 0
    held: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    span: float | None = None
    by_rule: int | None = None
    pairs: int = 0
    weights: tuple[WeightRecode, ...] = ()
    note: str = ""

    @property
    def lossless(self) -> bool:
        """Whether no block loses anything: of formats under scales that are carried over, of weights under theirs."""
        if not self.source:
            return not any(weight.changed for weight in self.weights)
        return self.held == self.scales and self.span is None

    def _content(self) -> Iterator[Rows | str]:
        if not self.source:
            yield table_of(_COLUMNS, [weight for weight in self.weights if weight.by_rule or weight.changed])
            total, own = (sum(w.blocks for w in self.weights), sum(w.scales == "own" for w in self.weights))
            scales = f"{own} under their own scales, {len(self.weights) - own} by the scale rule of {self.target}"
            yield f"{len(self.weights)} weights to {self.target}, {total} blocks: {scales}"
            worst = f", largest relative error {max((w.max_relative for w in self.weights), default=0.0):.3g}"
            words = {"loss": ("changed", "sqnr_db", worst), "by the rule alone": ("by_rule", "by_rule_db", "")}
            signal = sum(w.signal for w in self.weights)
            for which, (blocks, ratio, more) in words.items() if own else [("loss", words["loss"])]:
                count = sum(getattr(w, blocks) for w in self.weights)
                noise = sum(w.signal * 10 ** (-getattr(w, ratio) / 10) for w in self.weights if w.signal)
                lost = (
                    f"{count} blocks change, SQNR {Counts(signal=signal, noise=noise).sqnr_db:.1f} dB{more}"
                    if count
                    else "none"
                )
                yield f"{which}: {lost}"
            if free := sum(w.carried == 0 < w.changed for w in self.weights):
                yield f"{free} of them would lose nothing under their own scales (--scales own)"
            return
        tried = f"{self.codes} values x {self.scales} scales tried"
        yield f"{self.source} -> {self.target}: {self.held} of {self.scales} scales lose nothing ({tried})"
        if not self.ratios:
            yield "no multiple of the source's elements is among the target's"
        elif self.held:
            scale = f"the target's scale being s / {float(_simplest(self.ratios)):g}"
            yield f"from {self.lowest:g} to {self.highest:g}, {scale}"
        if self.span is not None and self.held:
            yield f"together they lose nothing if scales differ by powers of two, up to {self.span:g}"
        if self.by_rule is not None:
            yield f"by its scale rule {self.by_rule} of {self.pairs} pairs of scale and largest element lose nothing"
        if self.note:
            yield self.note


_COLUMNS = (
    Column("weight", "name"), Column("blocks", "blocks", ">"), Column("change by rule", "by_rule", ">"),
    Column("under own scales", "carried", ">", "-"), Column("scales", "scales"),
    Column("SQNR dB", lambda w: decibels(w.sqnr_db), ">"),
    Column("largest relative error", "max_relative", ">.3g"),
    Column("first (row, block)", lambda w: " ".join(f"({row}, {column})" for row, column in w.first)),
)  # fmt: skip


def check_recode(a: Any, b: Any, *, scales: str = "best") -> Recode:
    """Say whether numbers in one format lose a bit in another: by proof over all codes, or block by block.

    Of two formats: every value of a's elements, times a number r, is looked up among those of b's elements, and every
    scale s of a, divided by r, among those of b, in exact arithmetic. NaN and infinities are left out, zeros have no
    sign. Where one tensor or block of b holds several scales of a, ``span`` says how far these may lie apart.

    Args:
        a: A block format, an Encoded, or a checkpoint: its path (``"./mxfp4"`` where a format has its name), or what
            ``open_checkpoint`` returns.
        b: The block format to recode to.
        scales: Of weights: as ``recode`` takes them.

    Returns:
        A Recode; of a checkpoint with what each weight loses: blocks, SQNR in dB, largest relative error.

    Raises:
        ArgumentError: A format is not one of blocks, or has zero points; a checkpoint has no quantised weight.
        FormatError: A format is unknown.
        DataError: The checkpoint cannot be read.

    >>> import fmtsim
    >>> print(fmtsim.lab.check_recode("mxfp4", "nvfp4"))
    mxfp4 -> nvfp4: 255 of 255 scales lose nothing (15 values x 255 scales tried)
    from 5.87747e-39 to 1.70141e+38, the target's scale being s / 1
    together they lose nothing if scales differ by powers of two, up to 131072
    """
    target = block_format("b", b)
    note = ""
    if isinstance(a, str) and os.path.exists(a):
        path = os.path.join(os.curdir, a)
        try:
            a, note = get_format(a), f"{a} is the format of this name; {path} means the checkpoint"
        except FormatError:
            a = Path(a)
    if isinstance(a, os.PathLike):
        a = open_checkpoint(a)
    if isinstance(a, Encoded | Reordered):
        a = {"": a}
    if not isinstance(a, Mapping):
        with located(f"there is no checkpoint {shown(a)}, and as a format"):
            a = get_format(a)
        with located(note):
            source = block_format("a", a)
        # 1. Every multiple r of the source's elements that the target's elements hold; a block stands alone where no
        #    block of the target holds two of the source.
        ratios, power = _ratios(source.element, target.element), Fraction(2)
        alone, element = _within(target, source), source.scale
        if element.bits <= 16:
            tried = sorted(s for s in _values(element) if s > 0)
        else:  # of 32 bits the first and the last of each power of two
            powers, ends = (
                range(element.min_exponent, element.max_exponent + 1),
                (Fraction(1), 2 - Fraction(element.eps)),
            )
            tried = [power**k * m for k in powers for m in ends]
        # 2. The scales s for which s / r is one of the target's, under a tensor scale that is a power of two.
        levels = [power**k for k in range(-149, 128)] if target.tensor_scale else [power**0]
        chosen = ratios if not target.tensor_scale else (_simplest(ratios),) if ratios else ()
        held = [s for s in tried if any(_is_scale(s / r / level, target) for r in chosen for level in levels)]
        # 3. How far the scales of one tensor, or of one block of the target, may lie apart.
        span: Fraction | None = None
        if ratios and not alone:  # several scales s of the source under one t: each is r t
            whole = [r for r in ratios if _is_power(r)] or [power**0]
            span = max(whole) / min(whole)
        elif ratios and target.tensor_scale:
            units = [s for s in tried if _is_power(s / chosen[0]) and _is_scale(s / chosen[0], target)]
            span = max(units) / min(units) if units else None
        by_rule, pairs = _by_rule(source, target, tried) if alone and not target.tensor_scale else (None, 0)
        return Recode(
            source=source.name, target=target.name, codes=len(_values(source.element)), ratios=ratios,
            scales=len(tried), held=len(held), span=None if span is None else float(span), by_rule=by_rule,
            pairs=pairs, lowest=float(held[0]) if held else 0.0, highest=float(held[-1]) if held else 0.0,
            note=note,
        )  # fmt: skip
    weights = []
    with make_progress(None) as progress:
        progress.stage(f"recoding to {target.name}", len(a))
        for number, name in enumerate(a):
            value = a[name]
            if isinstance(value, Encoded | Reordered):
                weights.append(recode(name, value, target, scales)[1])
            progress.step(number + 1)
    if not weights:
        what = repr(a) if isinstance(a, Checkpoint) else shown(a)
        raise ArgumentError(f"{what} has no quantised weights; pass a checkpoint that has some")
    return Recode(source="", target=target.name, weights=tuple(weights))


def block_format(name: str, fmt: Any) -> BlockFormat:
    """Return a format of blocks without zero points, under one tensor scale at most."""
    fmt = get_format(fmt)
    tensor = fmt.scaling.tensor if isinstance(fmt, BlockFormat) else None
    fault = None
    if isinstance(fmt, PackedFormat):
        fault = "is one of GGUF's, which fmtsim ptq --export gguf writes of a model; choose one such as nvfp4"
    elif not isinstance(fmt, BlockFormat):
        blocks = " or ".join(f"{fmt.name}_{block}" for block in ("channel", "tensor", "1x128"))
        fault = "has no scales; choose " + ("one such as nvfp4" if isinstance(fmt, LogTileFormat) else blocks)
    elif fmt.zero_point:
        fault = "has zero points; choose one without, such as int4_1x32"
    elif tensor is not None and tensor.block != (None, None):
        fault = "has scales of rows above those of blocks; choose one such as nvfp4"
    elif fmt.element.bits > 16:
        fault = f"has elements of {fmt.element.bits} bits; choose one of 16 or fewer"
    if fault:
        raise ArgumentError(f"{name}={fmt.name} {fault}")
    return fmt  # type: ignore[no-any-return]


@cache
def _values(fmt: ElementFormat) -> frozenset[Fraction]:
    """Return the finite values of a format of 16 bits or fewer."""
    return frozenset(Fraction(value) for value in fmt.values if math.isfinite(value))


@cache
def _ratios(source: ElementFormat, target: ElementFormat) -> tuple[Fraction, ...]:
    """Return every r for which r times each value of the source is a value of the target, ascending."""
    # The largest value becomes some value of its sign, which leaves few candidates.
    values, others = _values(source), _values(target)
    largest = max(values, key=abs)
    candidates = sorted({other / largest for other in others if other * largest > 0})
    return tuple(r for r in candidates if all(r * value in others for value in values))


def _is_power(number: Fraction) -> bool:
    """Return True for a power of two."""
    return number.numerator & (number.numerator - 1) == 0 == number.denominator & (number.denominator - 1)


def _simplest(ratios: tuple[Fraction, ...]) -> Fraction:
    """Return 1 where it is one of the ratios, else the largest power of two, else the largest."""
    return max(ratios, key=lambda r: (r == 1, _is_power(r), r))


def _is_scale(scale: Fraction, fmt: BlockFormat) -> bool:
    if fmt.scale.bits <= 16:
        return scale in _values(fmt.scale)
    stored = torch.tensor(float(scale)).item()  # in float32
    return stored < float("inf") and Fraction(stored) == scale


def _within(inner: BlockFormat, outer: BlockFormat) -> bool:
    """Return True if each block of one format lies within a block of the other."""
    pairs = zip(inner.block, outer.block, strict=True)
    return all(big is None or (small is not None and big % small == 0) for small, big in pairs)


def _by_rule(source: BlockFormat, target: BlockFormat, scales: list[Fraction]) -> tuple[int | None, int]:
    """Return for how many pairs of a scale and a largest element the target's own rule loses nothing, and of how many.

    It is (None, 0) where there are too many.
    """
    # 1. Blocks with each largest element: as many as it takes to hold all smaller ones beside it.
    values = sorted(map(float, _values(source.element)), key=abs)
    width = target.block[1] or len(values) + 1
    tops, rows = sorted({abs(value) for value in values if value}), []
    for top in tops:
        below = [value for value in values if abs(value) <= top]
        size = max(width - 1, 1)
        parts = [below[i : i + size] for i in range(0, len(below), size)] if width > 1 else [[]]
        rows += [(top, ([below[-1], *part] + [below[-1]] * width)[:width]) for part in parts]
    if target.block[0] != 1 or len(scales) * len(rows) * width > 1 << 23:
        return None, 0
    # 2. A pair loses nothing where all its blocks come back.
    exact = torch.tensor([row for _, row in rows], dtype=torch.float64)
    x = torch.tensor(list(map(float, scales)), dtype=torch.float64)[:, None, None] * exact
    same = (encode(x.float(), target).decode(torch.float64) == x).all(-1)
    owner = torch.tensor([top for top, _ in rows])
    return sum(int(same[:, owner == top].all(1).sum()) for top in tops), len(tops) * len(scales)


def _expand(scale: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """Return scales [rows of blocks, blocks in a row] at each element of a matrix."""
    height, width = (n if size is None else size for n, size in zip(shape, block, strict=True))
    return scale.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]


def _block_max(x: Tensor, block: Block) -> Tensor:
    """Return the largest of each block of a matrix."""
    height, width = (n if size is None else size for n, size in zip(x.shape, block, strict=True))
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))


def carry(weight: Encoded, target: BlockFormat) -> Encoded | None:
    """Return a weight in another format under its own scales, none of which falls.

    Blocks of zeros have no say; elements under a larger scale are rounded to nearest. None where no multiple of the
    elements, or no scale as large, is in the target.
    """
    source, (scale, tensor_scale) = weight.format, weight.parts()[1:3]
    whole = tensor_scale is None or tensor_scale.dim() == 0
    if not isinstance(source, BlockFormat) or source.zero_point or scale is None or not whole:
        return None
    if not (ratios := _ratios(source.element, target.element)):
        return None
    # 1. The step of each block of the target: the largest scale that it holds, over the multiple of the elements.
    ratio = _simplest(ratios) if _within(target, source) else max(ratios)
    x = weight.decode(torch.float64).reshape(-1, weight.shape[-1])
    scale = scale.double() if tensor_scale is None else scale.double() * tensor_scale.double()
    step = _block_max(torch.where(x == 0, 0.0, _expand(scale, source.block, x.shape)), target.block) / float(ratio)
    # 2. A tensor scale brings the largest step just below the largest of the target's scales.
    second = torch.tensor(1.0)
    if target.tensor_scale:  # the largest step is below the largest power of two of the scale's format, or between both
        top = torch.frexp(torch.tensor(target.scale.max, dtype=torch.float64)).exponent
        second = torch.exp2((torch.frexp(step.max()).exponent - top).double()).float()
        second = second * 2 if step.max() / second > target.scale.max else second
    # 3. Scales, which round up so that no element saturates, and elements under them.
    step = step / second.double()
    scales = decode(encode(step, target.scale, rounding="up").unpacked(), target.scale).float()
    if bool((scales < step).any()):
        return None
    exact = _expand(scales.double() * second.double(), target.block, x.shape)
    codes = encode(torch.where(exact > 0, x / exact, 0.0), target.element).unpacked().reshape(weight.shape)
    return Encoded.from_parts(
        EncodedParts(codes, scales, second if target.tensor_scale else None), target, weight.shape
    )


def recode(name: str, weight: Any, target: BlockFormat, scales: str = "best") -> tuple[Encoded, WeightRecode]:
    """Return a weight in another format, and what it loses there; one that has the format stays as it is.

    Args:
        name: The weight's.
        weight: An Encoded, a Reordered, or a tensor.
        target: The format, as ``block_format`` returns it.
        scales: ``"rule"``: those of the format's own rule; ``"own"``: the weight's, where they can be carried over;
            ``"best"``: those of both under which the SQNR is higher.
    """
    if scales not in ("best", "rule", "own"):
        raise ArgumentError(f"scales={shown(scales)} is unknown; choose 'best', 'rule' or 'own'")
    # 1. The weight under scales of either kind. Groups of a Reordered are no blocks of the weight.
    same = isinstance(weight, Encoded) and weight.format == target
    x = weight.double() if isinstance(weight, Tensor) else weight.decode(torch.float64)
    recoded = {"rule": encode(x.float(), target, pad=True)}
    if isinstance(weight, Encoded) and (moved := weight if same else carry(weight, target)) is not None:
        recoded["own"] = moved
    # 2. Of each kind the changed blocks, NaN among them, the SQNR, and the largest error relative to its number.
    block = weight.format.block if isinstance(weight, Encoded) else target.block  # type: ignore[union-attr]  # all have
    signal, losses = float(x.square().nansum()), dict[str, tuple[Tensor, float, float]]()
    for kind, other in recoded.items():
        error = (other.decode(torch.float64) - x).abs_()
        changed = _block_max(error.reshape(-1, x.shape[-1]), block) != 0
        ratio = Counts(signal=signal, noise=float(error.square().nansum())).sqnr_db
        losses[kind] = changed, ratio, float(error.div_(x.abs()).nan_to_num_(0.0, math.inf).max())
    # 3. The scales that it gets: its own where both lose the same.
    best = max(reversed(losses), key=lambda kind: losses[kind][1])
    chosen = "own" if same else best if scales == "best" else scales if scales in recoded else "rule"
    changed, ratio, max_relative = losses[chosen]
    return recoded[chosen], WeightRecode(
        name=name, blocks=changed.numel(), by_rule=int(losses["rule"][0].sum()),
        carried=int(losses["own"][0].sum()) if "own" in losses else None, scales=chosen, sqnr_db=ratio,
        by_rule_db=losses["rule"][1], signal=signal, max_relative=max_relative,
        first=tuple((row, column) for row, column in changed.nonzero()[:3].tolist()),
    )  # fmt: skip
