# SPDX-License-Identifier: Apache-2.0
"""In which order a library adds the products of a GEMM, and what it does with the sum: a plan, as plain data."""

from dataclasses import dataclass
from typing import Literal

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.records import check_types, lists_fields

Epilogue = Literal["scale", "row_column", "column_row"]
Owner = Literal["contiguous", "even", "interleaved"]
Reduce = Literal["serial", "pairwise", "neighbours", "in_place", "folded"]
LaneReduce = Literal["serial", "tree", "pair_tree"]
_LANES = 4096  # so that few sums wait for each other in a tree


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """Describe how one library call orders its sums; docs/matmul.md, section 4, has the rules.

    The default is the plain chain: all of K in order, blocks of the unit's own length, from +0.

    Args:
        k_tile: Width of a tile of K, the unit in which K is split; None where nothing is split.
        split: Parts into which the tiles are dealt; every part is a sum of its own, later reduced.
        owner: ``"contiguous"``: part s owns ``ceil(tiles / split)`` tiles from ``s`` times that number on;
            ``"even"``: parts lie side by side as well, of equal numbers of tiles; what is over makes the last ones one
            tile longer; ``"interleaved"``: part s owns the tiles t with ``t % split == s``.
        residue_first: The incomplete tile comes first instead of last.
        part_k: Products of a part, where K is cut into parts first and each part into tiles of its own (CUTLASS 2.x);
            ``split`` is then ``ceil(K / part_k)``. None deals whole tiles.
        k_end: Products from this one on are never multiplied, NaN and Inf among them too (a library that drops the end
            of K); K is then as if it ended here. None multiplies all.
        lanes: Sums into which every part is dealt: of each tile lane l owns ``v = ceil(k_tile / lanes)`` products from
            ``l v`` on. Promotion counts the products of a lane.
        lane_reduce: How the lanes of a part are added: ``"serial"``: one after another; ``"tree"``: lane i and lane
            ``i + lanes / 2``, then of what is left i and ``i + lanes / 4``, down to one; ``"pair_tree"``: lane 2 i and
            lane 2 i + 1, then these sums as a tree. A lane without products is +0.
        instruction_k: Products of one instruction where that is less than the unit's block.
        promote_every: Products of a part after which its chain is added to a float32 sum and restarts at +0
            (use_fast_accum=False); None never does.
        scaled_promotion: Multiply each promoted chain by its block scales as it is added, in one fused
            multiply-add (1x128 and 128x128 scales).
        successive_scales: Of the two scales of ``scaled_promotion``, multiply by a's first and round, then add with b's
            (1x128 by 1x128 scales); else by their rounded product.
        partial: Format to which each part's sum is rounded before the reduction; None keeps float32.
        reduce: ``"serial"``: part after part; ``"pairwise"``: the halves onto each other first;
            ``"neighbours"``: each part and the next one, then these sums likewise, down to one, where of an odd number
            the first waits; ``"in_place"``: parts are added to the output as they arrive, which begins with the bias: a
            part itself is not rounded, the output is rounded to ``partial`` after every addition; ``"folded"``: as one
            block of 128 threads adds them (cuBLAS' reduce_1Block_kernel; docs/matmul.md, section 4).
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
    owner: Owner = "contiguous"
    residue_first: bool = False
    part_k: int | None = None
    k_end: int | None = None
    lanes: int = 1
    lane_reduce: LaneReduce = "serial"
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
        partial: object = self.partial
        if isinstance(partial, str):
            object.__setattr__(self, "partial", get_format(partial))
        if self.partial is not None and not isinstance(self.partial, FloatFormat):
            raise FormatError(
                f"partial={shown(self.partial)} is not a floating-point format; pass its name or a FloatFormat"
            )
        for name in ("k_tile", "part_k", "k_end", "instruction_k", "promote_every"):
            _check(name, getattr(self, name) is None or _count(getattr(self, name)), getattr(self, name), "1 or more")
        for name in ("split", "lanes"):
            _check(name, _count(getattr(self, name)), getattr(self, name), "1 or more")
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
        # Refuse lanes, and sums folded by threads, that no kernel has.
        lanes = self.lanes
        _check("lanes", lanes <= _LANES, lanes, f"1 to {_LANES}")
        if lanes > 1 and self.k_tile is None:
            raise ArgumentError(f"lanes={lanes} share every tile; pass k_tile=, the products of all lanes")
        if lanes == 1 and self.lane_reduce != "serial":
            raise ArgumentError(f"lane_reduce={self.lane_reduce!r} needs lanes=, the sums that it adds")
        if self.lane_reduce != "serial" and lanes & (lanes - 1):
            raise ArgumentError(f"lanes={lanes} cannot be added as a {self.lane_reduce}; choose a power of two")
        what = "lanes=" if lanes > 1 else "reduce='folded'"
        sums = lanes > 1 or self.reduce == "folded"
        if sums and (self.partial is not None or self.scaled_promotion or self.reduce == "in_place"):
            raise ArgumentError(
                f"{what} adds sums as they are; leave partial, scaled_promotion and reduce='in_place' out"
            )


def _count(value: object) -> bool:
    return type(value) is int and value >= 1


def _check(name: str, fine: bool, value: object, allowed: str) -> None:
    if not fine:
        raise ArgumentError(f"GemmPlan {name}={shown(value)} is not possible; choose {allowed}")
