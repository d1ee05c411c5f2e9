# SPDX-License-Identifier: Apache-2.0
"""The accumulation orders of cuBLASLt's kernels without tensor cores: chains of float32 multiply-adds.

Matrix-vector and small kernels take operands of any dtype, the others float32 alone (and TF32, unsplit).
"""

# H200, torch 2.11.0+cu130, cuBLASLt 13.1.0, 2026-11-24, products in float32: the heuristic's algorithm and split are
# those of the kernel that ran in 2,076 of 2,076 calls; of 1,095 fresh calls 1,083 have the orders below, 12 are named
# unknown.

from typing import Any, Final, NamedTuple

from fmtsim.gemm.targets.order import Architecture, Order, cached_plan, ceil_div, reduction_of, slice_of
from fmtsim.gemm.targets.question import Choice, question_of
from fmtsim.spec.call import GemmCall


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
    question = question_of(call)
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
    reduction = reduction_of(choice, call)
    if call.a != "fp32" or choice.split < 1 or reduction is None:
        return None
    return _slices(call, slice_of(call, choice.split), **reduction)


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
