# SPDX-License-Identifier: Apache-2.0
"""The accumulation orders of cuBLASLt's kernels: from the choice that the library makes for a call to a plan.

Found by probing and by comparing bits on H100, H200, GB200 and GB300; comments say on how many calls. A configuration
that was never measured has no entry in these tables, and its calls no order.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, NamedTuple

from fmtsim.gemm.targets.question import (
    Architecture,
    Choice,
    Order,
    Question,
    cached_plan,
    ceil_div,
    library_question,
    plan_order,
    question_call,
    reduction_fields,
    slice_width,
)
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall


def _fma(call: GemmCall, **fields: Any) -> Order:
    return Order(cached_plan(tuple(fields.items())), "fp32_fma", "fp32" if call.a == "tf32" else None)


def _scalar(call: GemmCall) -> bool:
    """Return True if the orders below are those of the call: sums in float32, of any operands that are not FP8."""
    return call.a in ("bf16", "fp16", "tf32", "fp32") and call.accumulate == "fp32"


GEMM_SN: Final = {(11, 0): (2, 256), (11, 1): (4, 128), (16, 0): (1, None)}
"""Threads that share K, and products of a chain, by algorithm and CUSTOM_OPTION."""


def gemm_sn(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Every thread has one slice of K; on Hopper 16 threads take turns where K is contiguous in both operands."""
    config = GEMM_SN.get((choice.algorithm, choice.custom))
    if config is None or not _scalar(call) or choice.split not in (1, -1):
        return None
    question = library_question(call)
    if architecture == "sm_90" and choice[::3] == (11, 0) and question is not None and question.layout == 0:
        return _fma(call, **_dealt(16, 16, "serial"), promote_every=16)
    threads, chain = config
    width = ceil_div(call.k, threads)
    parts = ceil_div(call.k, width)
    slices = {"k_tile": width, "part_k": width, "split": parts} if parts > 1 else {}
    return _fma(call, **slices, promote_every=chain)


class Lanes(NamedTuple):
    """How a matrix-vector kernel deals K to lanes.

    products: Products that lie side by side in a lane's share of a tile; a negative number is an upper limit, and a
        lane then has all of a shorter slice.
    lanes: Lanes that make one result.
    chunk: Tiles after which a lane's chain is added to its sum; None never is.
    tree: Lanes are added as a tree, else one after another.
    """

    products: int
    lanes: int
    chunk: int | None = None
    tree: bool = True


_OPTIONS: Final = (
    (Lanes(1, 1), (6, 84)),
    (Lanes(1, 2), (49, 57, 63, 95)),
    (Lanes(1, 4), (41, 51, 59, 65, 69)),
    (Lanes(1, 8), (43, 53, 61, 67)),
    (Lanes(1, 16), (35, 45, 55, 81, 91)),
    (Lanes(1, 32), (37, 47, 75, 83, 93)),
    (Lanes(4, 32), (10,)),
    (Lanes(-64, 2), (48, 56, 62)),
    (Lanes(-64, 4), (40, 50, 58, 86)),
    (Lanes(-64, 8), (42, 52, 60, 66, 98)),
    (Lanes(-64, 16), (44, 54, 90)),
    (Lanes(-64, 32), (36, 46, 82)),
    (Lanes(1, 16, 32, tree=False), (11,)),
    (Lanes(1, 16, 16, tree=False), (12, 13, 14)),
)
_SM_90_OPTIONS: Final = (
    (Lanes(1, 2), (103,)),
    (Lanes(1, 4), (111,)),
    (Lanes(1, 8), (33, 89, 107)),
    (Lanes(1, 16), (73, 101)),
    (Lanes(-64, 2), (94, 102)),
    (Lanes(-64, 4), (68, 96, 110)),
    (Lanes(-64, 8), (88, 106)),
    (Lanes(-64, 16), (72, 80, 100)),
    (Lanes(-64, 32), (74, 92)),
    (Lanes(1, 1, 512), (0,)),
    (Lanes(1, 1, 256), (7, 8)),
)
_BLACKWELL_OPTIONS: Final = ((Lanes(1, 1), (0, 7)),)


def _by_option(*groups: tuple[Lanes, tuple[int, ...]]) -> dict[int, Lanes]:
    return {option: lanes for lanes, options in groups for option in options}


GEMV: Final[dict[str, dict[int, Lanes]]] = {
    "sm_90": _by_option(*_OPTIONS, *_SM_90_OPTIONS),
    "sm_100": _by_option(*_OPTIONS, *_BLACKWELL_OPTIONS, (Lanes(1, 1), (8,))),
    "sm_103": _by_option(*_OPTIONS, *_BLACKWELL_OPTIONS, (Lanes(1, 1, 256), (8,))),
}
"""What CUSTOM_OPTION says of algorithm 13 with operands of 16 bits, by architecture; option 5 stands by itself."""

_FLOAT32_OPTIONS: Final = (
    (Lanes(1, 1, 512), (0,)),
    (Lanes(1, 1, 256), (7,)),
    (Lanes(1, 2), (49, 85, 95, 103)),
    (Lanes(1, 4), (77, 97, 111, 115)),
    (Lanes(1, 16), (73, 91, 101)),
    (Lanes(1, 32), (75, 83, 93)),
    (Lanes(4, 32), (10,)),
    (Lanes(-64, 2), (1, 38, 48, 84, 94, 102)),
    (Lanes(-64, 4), (96, 110, 114)),
    (Lanes(-64, 4, tree=False), (2,)),
    (Lanes(-64, 8), (70, 78, 106)),
    (Lanes(-64, 16), (72, 100)),
    (Lanes(-64, 32), (74, 82, 92)),
    (Lanes(1, 16, 32, tree=False), (11,)),
    (Lanes(1, 16, 16, tree=False), (12, 13, 14)),
)
GEMV_FLOAT32: Final[dict[str, dict[int, Lanes]]] = {"sm_90": _by_option(*_FLOAT32_OPTIONS)}
"""The same with float32 operands, which are multiplied as they are."""

_MOST_RESULTS: Final = {"sm_90": 8448, "sm_100": 9728, "sm_103": 9728}  # of option 10, which has fewer lanes beyond
# With 2 to 79 results 15 of 15 calls have the 32 lanes of 16-bit operands, with 489 to 4,096 0 of 5 (H100, 2026-11-27).
_MOST_RESULTS_FLOAT32: Final = 100  # likewise, of each product of a batch: from 489 on there are fewer


def gemv(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """A slice of K for each part, tiles of it for the lanes, and chains along each lane's own products."""
    if 1 not in (call.m, call.n) or not _scalar(call):
        return None
    half = call.a in ("bf16", "fp16")
    if not half and call.m == call.n == 1 < call.batch:  # another order, which is not known
        return None
    width = ceil_div(call.k, choice.split)
    if choice.custom == 5 and half:
        return _fma(call, **_dealt(32 * ceil_div(call.k, 32), 32, "serial"), promote_every=16) if call.m == 1 else None
    table = GEMV if half else GEMV_FLOAT32
    lanes = table.get(architecture, {}).get(choice.custom)
    results = call.m * call.n
    fits = call.batch * results <= _MOST_RESULTS[architecture] if half else results <= _MOST_RESULTS_FLOAT32
    if lanes is None or (choice.custom == 10 and not fits):
        return None
    lane_products = lanes.products if lanes.products > 0 else min(-lanes.products, ceil_div(width, lanes.lanes))
    fields: dict[str, Any] = {"promote_every": lanes.chunk and lanes.chunk * lane_products}
    fields |= _dealt(lanes.lanes * lane_products, lanes.lanes, "tree" if lanes.tree else "serial")
    parts = ceil_div(call.k, width)
    if parts > 1:
        after = call.bias and call.n > 1  # one column has its bias added to the sum
        fields |= {"k_tile": lanes.lanes * lane_products, "part_k": width, "split": parts, "bias_after_rounding": after}
    return _fma(call, **fields)


def _dealt(tile: int, lanes: int, way: str) -> dict[str, Any]:
    return {} if lanes == 1 else {"k_tile": tile, "lanes": lanes, "lane_reduce": way}


def dot(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Blocks of 128 threads own tiles in turn; a second kernel adds the blocks. Where K is contiguous in the matrix, or
    both operands are vectors, a thread has two chains.
    """
    if not _scalar(call) or 1 not in (call.m, call.n) or choice.split < 1:
        return None
    layout = "row" if call.m == call.n else call.b_layout if call.m == 1 else call.a_layout
    lanes = _dealt(256, 256, "pair_tree") if layout == "row" else _dealt(128, 128, "tree")
    parts = min(choice.split, ceil_div(call.k, lanes["k_tile"]))
    return _fma(call, **lanes, **({"split": parts, "owner": "interleaved", "reduce": "folded"} if parts > 1 else {}))


def multiply_adds(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """One chain of fused multiply-adds for each result.

    CUTLASS kernels (20) fill K up to 8 products with zeros, xmma kernels (55, 56) always end with some: -0, which only
    a product below the range of float32 leaves behind, becomes +0. Of single products 12 keeps the sign also where an
    operand is zero, which a chain that begins with +0 cannot; it stands for the others in books as well.
    """
    if choice.split != 1 or not _scalar(call):
        return None
    # H100, 2026-11-27: 333 calls with K <= 64 on zeros, subnormal and tiny numbers, Inf and NaN at the first or last
    # place along K: 0 of 722,848 results of 20, 55 and 56 differ. Of 12 (K = 1), which gives the bare product and so -0
    # for 0 times a negative number, 1,613 of 18,336 do: it stays a guess. (H200, 2026-11-23: as chains, the signs of
    # 314,258 zeros of 19,349 million results differed.)
    if choice.algorithm in (55, 56) or (choice.algorithm == 20 and call.k < 8):
        return _fma(call, promote_every=call.k)
    return _fma(call)._replace(certain=call.k > 1)


def _slices(call: GemmCall, width: int, **fields: Any) -> Order:
    """Return the order of parts that are slices of K of one width, each a chain."""
    parts = ceil_div(call.k, width)
    return _fma(call, **({"k_tile": width, "part_k": width, "split": parts, **fields} if parts > 1 else {}))


def sgemm_largek(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Slices of multiples of 8 products; a bias is added to their sum."""
    if call.a != "fp32" or choice.split < 1:
        return None
    return _slices(call, ceil_div(ceil_div(call.k, choice.split), 8) * 8)


def cutlass_simt(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Slices as on tensor cores; the residue of a slice comes first, which leaves a chain as it is."""
    if choice.split == 1:
        return multiply_adds(choice, call, architecture)
    reduction = reduction_fields(choice, call)
    if call.a != "fp32" or choice.split < 1 or reduction is None:
        return None
    return _slices(call, slice_width(call, choice.split), **reduction)


def xmma_simt(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Parts own tiles of 8 products in turn.

    With CUSTOM_OPTION 1 a part of more than one tile is added in an order that depends on the place in the result.
    """
    if choice.split == 1:
        return multiply_adds(choice, call, architecture)
    tiles = ceil_div(call.k, 8)
    rotated = choice.custom == 1 and 2 < choice.split < tiles
    if call.a != "fp32" or choice.split < 1 or choice.reduction != 2 or rotated:
        return None
    parts = min(choice.split, tiles)
    return _fma(call, **({"k_tile": 8, "split": parts, "owner": "interleaved"} if parts > 1 else {}))


def choice_order(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Return the order in which cuBLASLt adds a call's products; None where it was never measured.

    Args:
        choice: What the library takes for the call.
        call: The call.
        architecture: Of the GPU.
    """
    family = FAMILIES.get(choice.algorithm)
    return None if family is None else family(choice, call, architecture)


def same_order(choice: Choice, other: Choice, question: Question, architecture: Architecture) -> bool:
    """Return True if two choices are known to come to the same order, also of a product with a bias that torch adds.

    The sign of a result that is zero may differ.
    """
    call = question_call(question)
    calls = [call]
    if 1 in (question.n, question.k) and call.operation == "mm":
        calls.append(replace(call, operation="linear", bias=True))
    orders = [
        [unsigned(choice_order(candidate, one, architecture), one) for one in calls] for candidate in (choice, other)
    ]
    return orders[0] == orders[1] and None not in orders[0]


def unsigned(order: Order | None, call: GemmCall) -> Order | None:
    """Return an order without the addition to +0 that one chain of all products ends with."""
    if order is None or order.plan.promote_every != call.k:
        return order
    return order._replace(plan=replace(order.plan, promote_every=None))


# nvjet


def _nvjet(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Whole tiles of K are dealt to the parts. The library divides K by the parts before it rounds up to tiles: where
    the quotient is a whole number of tiles and K has a remainder, the parts end before K and the rest is lost.
    """
    # Runs of ceil(tiles / S) tiles, float32 partial sums added in order, one final rounding: 42,486 of 42,492 calls.
    # The six others have K = 44832, S = 35: 1280 products a part, so that the last 32 are dropped; operands that are
    # zero but for ones there give 0 instead of 32 (2026-11-22). Others found the same on H100, GB200 and GB300 (5,709
    # and 1,062 shapes).
    tile, split = nvjet_tile(call), choice.split
    if tile is None or split < 1 or (split > 1 and choice.reduction != 2):
        return None
    blocks = call.scaling in LARGE_BLOCKS
    if blocks and architecture != "sm_90":
        return None
    fields: dict[str, Any] = {"k_tile": tile}
    # block_128: t = fma(p, RN(s_a s_b), t) for each 128 products, parts in tiles of 512; row_block_128:
    # t = fma(RN(p s_a), s_b, t), parts in tiles of 128. 20 and 10 calls, K <= 16384, S <= 6: 0 differ in float32.
    if blocks:
        fields |= {"promote_every": 128, "scaled_promotion": True}
        fields["successive_scales"] = call.scaling == "row_block_128"
    elif call.scaling != "none" and not call.fast_accum and architecture == "sm_90":
        fields["promote_every"] = 128
    # Of 109,264,896 results with exact sums 0 differ; the row's scale first differs in 525, the product of both in 612.
    if call.scaling == "row":
        fields["epilogue"] = "column_row"
    if split == 1:
        # One part: rounded, then the bias added, 22 of 22 calls that show it; several parts: bias in float32, 12 of 12.
        return plan_order(**fields, bias_after_rounding=call.bias and call.n == 1)
    end = split * ceil_div(call.k // split, tile) * tile
    if end == 0 or (end < call.k and blocks):
        return None
    return plan_order(**fields, split=split, k_end=end if end < call.k else None)


def nvjet_tile(call: GemmCall) -> int | None:
    """Return the products of a tile of nvjet (66), which its algorithm alone decides; None where it has no kernel."""
    if call.a in ("bf16", "fp16"):
        return 64 if call.accumulate == "fp32" else None
    if call.a in ("e4m3", "e5m2") and call.scaling in ("tensor", "row", *LARGE_BLOCKS):
        return 512 if call.scaling == "block_128" else 128
    return None


# CUTLASS 2.x

STAGES: Final = {
    0: (32, 8),
    **{stages: (16 << (stages - 1) // 6, 16) for stages in range(1, 25)},
    25: (32, 16),
    27: (16, 16),
}
"""Width of a tile and products of an instruction (of 16-bit operands) by STAGES_ID."""


def _cutlass(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Parts are slices of K, and the residue of a slice comes first. TF32 instructions have 8 products throughout."""
    stage = STAGES.get(choice.stages)
    if stage is None or call.a not in ("bf16", "fp16", "tf32") or choice.split < 1:
        return None
    # Residue first in each slice: TF32 (21) 1,389 of 1,389 calls; 16 bits (23, 24) 954 of 954 in all layouts. Found
    # later by `calibrate`: 3,448 of 3,465 calls of layers, 17 not explained.
    tile, products = stage
    fields: dict[str, Any] = {"k_tile": tile, "residue_first": True}
    if call.a != "tf32" and products < 16:
        fields["instruction_k"] = products
    if choice.split == 1:
        return plan_order(**fields)
    reduction = reduction_fields(choice, call)
    if reduction is None or (call.bias and call.n == 1 and call.accumulate == "fp32"):
        return None
    width = slice_width(call, choice.split)
    return plan_order(**fields, part_k=width, split=ceil_div(call.k, width), **reduction)


# TF32 kernels with CUTLASS-like tiles that are not CUTLASS 2.x


TILES: Final = {
    11: (32, 32), 12: (32, 64), 13: (64, 32), 14: (32, 128), 15: (64, 64), 16: (128, 32), 17: (64, 128),
    18: (128, 64), 19: (64, 256), 20: (128, 128), 21: (256, 64), 23: (128, 256), 24: (256, 128),
}  # fmt: skip
"""Rows and columns of a tile of the library's result, which are torch's columns and rows, by TILE_ID."""


# H100 80GB HBM3, 2026-11-27, the same versions; operands that show where each part of K begins, at up to 28 places of
# every tile. Of 3,020 stream-K calls 2,314 are one chain in every tile, 336 cut all tiles alike, 370 the last ones. 0
# or 131 bytes of workspace meant one chain in 2,313 of 2,313 calls, the counters told 2, 3, 4, 5 and 8 parts in 317 of
# 317; an H200 and an H100 with random sizes, 2026-11-28: 110 of 110 and 15 of 15. The last s tiles have floor(C / s)
# parts of even runs; s is what waves of C blocks leave of the tiles, padded to clusters; which ones was not found.
_COUNTERS: Final = {Fraction(1, 2): 2, Fraction(1): 3, Fraction(3, 4): 4, Fraction(6, 5): 5, Fraction(7, 8): 8}
"""Parts of every tile by counters per partial sum in the workspace; 6 and 7 parts have as many as 3."""
_NOTHING_SHARED: Final = 256  # bytes of workspace


def shared(choice: Choice, question: Question, workspace: int) -> Choice:
    """Return a stream-K choice (split -1) for a call as one without a split, or one of equal parts, where it is one.

    Args:
        choice: With split -1.
        question: The call.
        workspace: Bytes that the library wants for it: partial sums of whole tiles, a counter of 4 bytes for each
            addition of two, and 159 more.
    """
    if choice.algorithm not in (39, 43) or choice.custom not in TILES:
        return choice
    if workspace < _NOTHING_SHARED:
        return Choice(choice.algorithm)
    rows, columns = TILES[choice.custom]
    tiles = ceil_div(question.n, rows) * ceil_div(question.m, columns) * question.batch
    sums, counters = divmod(workspace - 159, rows * columns * question.kind.out.itemsize)
    parts = _COUNTERS.get(Fraction(counters, 4 * sums)) if sums else None
    if parts is None or sums < parts * tiles or (parts == 3 and sums >= 6 * tiles):
        return choice
    return Choice(choice.algorithm, parts, 2, 0, choice.stages)


_STREAM_STAGES: Final = {34: 32, 35: 64}
"""Products of a tile of K by STAGES_ID of kernels that share tiles of the result."""


def _one_chain(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Stream-K kernels (split -1) that share some tiles along K have no known order.

    A split of more than 1 means that all tiles are shared alike: even runs of K, whose sums are added as neighbours in
    up to 8 parts.
    """
    # The same measurement: boundaries as owner="even" has them in 335 of 335 calls; neighbours added in all 64 recorded
    # results of each of 57 calls. 9 parts are added from the last to the first (2 calls), which no plan says.
    plain = not call.bias and architecture == "sm_90"
    if choice.split in range(2, 9) and choice.reduction == 2 and choice.stages in _STREAM_STAGES and plain:
        narrow = {"partial": "fp16", "round_trip": True} if call.accumulate == "fp16" else {}
        shared = {"k_tile": _STREAM_STAGES[choice.stages], "split": choice.split, "owner": "even"}
        return plan_order(**shared, **narrow, reduce="neighbours")
    # TF32 by algorithm 43: 661 of 802 calls of layers are one chain everywhere, in 141 the order differs from tile to
    # tile.
    return plan_order() if choice.split == 1 and not (call.bias and call.n == 1) else None


def _interleaved(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Parts own tiles in turn, and nothing comes first. CUSTOM_OPTION 1 adds them in pairs, 0 and 2 one after another;
    where a Choice has 0 it is not known which.
    """
    if choice.split == 1:
        return _one_chain(choice, call, architecture)
    stage = STAGES.get(choice.stages)
    if stage is None or call.a != "tf32" or choice.split < 1 or choice.reduction != 2:
        return None
    # In pairs: F.linear of 9x149x5016 in TF32 (6 parts; H100, 2026-11-27), whose choice was recorded without the
    # option; 19 of 20 others with 3 and more parts are added one after another.
    parts = min(choice.split, ceil_div(call.k, stage[0]))
    way = "pairwise" if choice.custom == 1 and parts > 2 else "serial"
    order = plan_order(k_tile=stage[0], split=parts, owner="interleaved", reduce=way)
    return order._replace(certain=choice.custom > 0 or parts < 3)


Family = Callable[[Choice, GemmCall, Architecture], Order | None]
FAMILIES: Final[dict[int, Family]] = {
    10: sgemm_largek,
    11: gemm_sn,
    12: multiply_adds,
    13: gemv,
    14: dot,
    16: gemm_sn,
    20: cutlass_simt,
    21: _cutlass,
    23: _cutlass,
    24: _cutlass,
    39: _one_chain,
    43: _one_chain,
    55: xmma_simt,
    56: multiply_adds,
    63: _interleaved,
    66: _nvjet,
}
"""By ALGO_ID. Not known: 41, 42, and 39 and 43 with split -1, whose order differs from tile to tile of the result."""
