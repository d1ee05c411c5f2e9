"""In which order a library adds the products of a GEMM, and what it does with the sum: a plan, as plain data."""

from dataclasses import dataclass
from typing import Literal

from fmtsim.errors import ArgumentError, FormatError, shown
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.records import check_types

Epilogue = Literal["scale", "row_column", "column_row"]
Reduce = Literal["serial", "pairwise", "in_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """Describe how one library call orders its sums; docs/matmul.md, section 4, has the rules.

    The default is the plain chain: all of K in order, blocks of the unit's own length, from +0.

    Args:
        k_tile: Width of a tile of K, the unit in which K is split; None where nothing is split.
        split: Parts into which the tiles are dealt; every part is a sum of its own, later reduced.
        owner: ``"contiguous"``: part s owns ``ceil(tiles / split)`` tiles from ``s`` times that number on;
            ``"interleaved"``: part s owns the tiles t with ``t % split == s``.
        residue_first: The incomplete tile comes first instead of last.
        part_k: Products of a part, where K is cut into parts first and each part into tiles of its own (CUTLASS 2.x);
            ``split`` is then ``ceil(K / part_k)``. None deals whole tiles.
        instruction_k: Products of one instruction where that is less than the unit's block.
        promote_every: Products of a part after which its chain is added to a float32 sum and restarts at +0
            (use_fast_accum=False); None never does.
        scaled_promotion: Multiply each promoted chain by its block scales as it is added, in one fused
            multiply-add (1x128 and 128x128 scales).
        successive_scales: Of the two scales of ``scaled_promotion``, multiply by a's first and round, then add with b's
            (1x128 by 1x128 scales); else by their rounded product.
        partial: Format to which each part's sum is rounded before the reduction; None keeps float32.
        reduce: ``"serial"``: part after part; ``"pairwise"``: the halves onto each other first; ``"in_place"``: parts
            are added to the output as they arrive, which begins with the bias: a part itself is not rounded, the output
            is rounded to ``partial`` after every addition.
        round_trip: Round the reduction to ``partial`` after every addition.
        epilogue: What multiplies the sum: ``"scale"``: the product of both scales, rounded once;
            ``"row_column"``: first the scale of the row, then that of the column; ``"column_row"``: the reverse.
        bias_after_rounding: Where an output of 16 bits has a bias, round to the output's dtype before the bias is added
            as well as after.
        source: Where the plan comes from: a recording, a rule, or a guess.
        verified: Recorded bits of this very GPU, library and shape stand behind it.
    """

    k_tile: int | None = None
    split: int = 1
    owner: Literal["contiguous", "interleaved"] = "contiguous"
    residue_first: bool = False
    part_k: int | None = None
    instruction_k: int | None = None
    promote_every: int | None = None
    scaled_promotion: bool = False
    successive_scales: bool = False
    partial: FloatFormat | None = None
    reduce: Reduce = "serial"
    round_trip: bool = False
    epilogue: Epilogue = "scale"
    bias_after_rounding: bool = False
    source: str = ""
    verified: bool = False

    def __post_init__(self) -> None:
        given: object = self.partial
        if isinstance(given, str):
            object.__setattr__(self, "partial", get_format(given))
        if self.partial is not None and not isinstance(self.partial, FloatFormat):
            raise FormatError(
                f"partial={shown(self.partial)} is not a floating-point format; pass its name or a FloatFormat"
            )
        for name in ("k_tile", "part_k", "instruction_k", "promote_every"):
            _check(name, getattr(self, name) is None or _count(getattr(self, name)), getattr(self, name), "1 or more")
        _check("split", _count(self.split), self.split, "1 or more")
        check_types(self)
        if self.k_tile is None and (self.split > 1 or self.residue_first):
            raise ArgumentError(
                "a plan that splits K or begins with its residue needs the width of a tile; pass k_tile="
            )
        if self.part_k is not None and (self.k_tile is None or self.owner != "contiguous"):
            raise ArgumentError(
                f"part_k={self.part_k} cuts parts that lie side by side into tiles; pass k_tile=, and no owner"
            )
        if self.scaled_promotion and self.promote_every is None:
            raise ArgumentError("scaled_promotion=True needs promote_every=, the products that share a scale")
        if self.successive_scales and not self.scaled_promotion:
            raise ArgumentError("successive_scales=True needs scaled_promotion=True, which multiplies by scales")
        if self.round_trip and self.partial is None:
            raise ArgumentError("round_trip=True needs partial=, the format to round to")
        if self.reduce == "in_place" and (self.round_trip or self.bias_after_rounding):
            raise ArgumentError(
                "reduce='in_place' rounds the output after every addition and begins with the bias; leave round_trip "
                "and bias_after_rounding out"
            )


def _count(value: object) -> bool:
    return type(value) is int and value >= 1


def _check(name: str, fine: bool, value: object, allowed: str) -> None:
    if not fine:
        raise ArgumentError(f"GemmPlan {name}={shown(value)} is not possible; choose {allowed}")
