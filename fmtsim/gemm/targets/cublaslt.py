# SPDX-License-Identifier: Apache-2.0
"""The accumulation orders of cuBLASLt's kernels: from the choice that the library makes for a call to a plan.

Found by probing and by comparing bits on H100, H200, GB200 and GB300; docs/evidence.md says how many calls of each
family. A configuration that was never measured has no entry in these tables, and its calls no order.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.targets.question import Choice, Question, call_of, question_of
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall
from fmtsim.spec.plan import GemmPlan

Architecture = Literal["sm_90", "sm_100", "sm_103"]


class Order(NamedTuple):
    """The accumulation order of a choice.

    plan: The accumulation order.
    unit: Unit that runs, where it is not the target's for such operands.
    operands: Format in which that unit takes them, where it is not the call's: float32 that is not rounded to TF32.
    certain: False where results of zeros or subnormal products had other signs on the GPU.
    """

    plan: GemmPlan
    unit: str | None = None
    operands: str | None = None
    certain: bool = True


def order_of(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Return the order in which cuBLASLt adds a call's products; None where it was never measured.

    Args:
        choice: What the library takes for the call.
        call: The call.
        architecture: Of the GPU.
    """
    family = FAMILIES.get(choice.algorithm)
    return None if family is None else family(choice, call, architecture)


def plainest(choice: Choice, question: Question) -> Choice:
    """Return one representative choice of those with the same order, by CUTLASS's tiles; of single chains the first.

    Where N is 1, a bias tells chains on tensor cores apart.
    """
    algorithm, whole, kind = choice.algorithm, choice.split == 1, question.kind
    if algorithm in (21, 23, 24) and choice.stages in STAGES:
        tile = STAGES[choice.stages]
        return choice._replace(algorithm=24, stages=next(stages for stages in STAGES if STAGES[stages] == tile))
    if whole and algorithm in (12, 20, 55, 56) and kind.compute != "16f":
        return Choice(12)
    if whole and algorithm in (39, 43, 63) and question.n > 1:
        return Choice(66 if kind.a in ("bf16", "fp16") and kind.compute == "32f" else 43)
    return choice


def same_order(choice: Choice, other: Choice, question: Question, architecture: Architecture) -> bool:
    """Return True if two choices are known to come to the same order, also of a product with a bias that torch adds."""
    call = call_of(question)
    calls = [call]
    if 1 in (question.n, question.k) and call.operation == "mm":
        calls.append(replace(call, operation="linear", bias=True))
    orders = [[order_of(candidate, one, architecture) for one in calls] for candidate in (choice, other)]
    return orders[0] == orders[1] and None not in orders[0]


def tile_of(algorithm: int, call: GemmCall) -> int | None:
    """Return the products of a tile of a kernel that is named by its algorithm alone, nvjet (66); None for others."""
    return _nvjet_tile(call) if algorithm == 66 else None


def _plan(**fields: Any) -> Order:
    """Return the order of a tensor-core kernel; a call with one part has no fields of a reduction."""
    if fields.get("split", 1) == 1:
        gone = ("split", "part_k", "partial", "round_trip", "reduce") + (
            () if "residue_first" in fields else ("k_tile",)
        )
        fields = {name: value for name, value in fields.items() if name not in gone}
    return Order(_cached(tuple(fields.items())))


@lru_cache(maxsize=4096)
def _cached(fields: tuple[tuple[str, Any], ...]) -> GemmPlan:
    return GemmPlan(**dict(fields))


# nvjet


def _nvjet(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Whole tiles of K are dealt to the parts. The library divides K by the parts before it rounds up to tiles: where
    the quotient is a whole number of tiles and K has a remainder, the parts end before K and the rest is lost.
    """
    tile, split = _nvjet_tile(call), choice.split
    if tile is None or split < 1 or (split > 1 and choice.reduction != 2):
        return None
    blocks = call.scaling in LARGE_BLOCKS
    if blocks and architecture != "sm_90":
        return None
    fields: dict[str, Any] = {"k_tile": tile}
    if blocks:
        fields |= {"promote_every": 128, "scaled_promotion": True}
        fields["successive_scales"] = call.scaling == "row_block_128"
    elif call.scaling != "none" and not call.fast_accum and architecture == "sm_90":
        fields["promote_every"] = 128
    if call.scaling == "row":
        fields["epilogue"] = "column_row"
    if split == 1:
        return _plan(**fields, bias_after_rounding=call.bias and call.n == 1)
    end = split * _ceil(call.k // split, tile) * tile
    if end == 0 or (end < call.k and blocks):
        return None
    return _plan(**fields, split=split, k_end=end if end < call.k else None)


def _nvjet_tile(call: GemmCall) -> int | None:
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
    tile, products = stage
    fields: dict[str, Any] = {"k_tile": tile, "residue_first": True}
    if call.a != "tf32" and products < 16:
        fields["instruction_k"] = products
    if choice.split == 1:
        return _plan(**fields)
    reduction = _reduction(choice, call)
    if reduction is None or (call.bias and call.n == 1 and call.accumulate == "fp32"):
        return None
    width = _slice(call, choice.split)
    return _plan(**fields, part_k=width, split=_ceil(call.k, width), **reduction)


def _reduction(choice: Choice, call: GemmCall) -> dict[str, Any] | None:
    """Return how partial sums are added: REDUCTION_SCHEME 0 and 1 in the output, 2 as they are, 4 rounded to it."""
    out = get_format(call.out)
    assert isinstance(out, FloatFormat)
    rounded = None if out.name == "fp32" else out
    if choice.reduction in (0, 1):  # without a rounding and a bias this is the sum of the parts as they are
        return {"partial": rounded, "reduce": "in_place"} if rounded is not None or call.bias else {}
    if call.accumulate == "fp16":
        return {"partial": out, "round_trip": True} if choice.reduction == 2 else None
    if choice.reduction not in (2, 4):
        return None
    return {"partial": rounded if choice.reduction == 4 else None, "bias_after_rounding": call.bias}


def _slice(call: GemmCall, split: int) -> int:
    """Return the products of a slice, whose starts are aligned to whole lines where K lies along rows."""
    align, line = (4, 32) if call.a == "tf32" else (8, 64)
    question = question_of(call)
    along_rows = question is not None and (question.layout != 2 or 1 in (call.m, call.n))
    step = line if along_rows and call.k % line == 0 else align
    return _ceil(_ceil(call.k, split), step) * step


# Kernels without tensor cores: chains of float32 multiply-adds, one for each lane of a group of threads


def _fma(call: GemmCall, **fields: Any) -> Order:
    return Order(_cached(tuple(fields.items())), "fp32_fma", "fp32" if call.a == "tf32" else None)


def _scalar(call: GemmCall) -> bool:
    """Return True if the orders below are those of the call: sums in float32, of any operands that are not FP8."""
    return call.a in ("bf16", "fp16", "tf32") and call.accumulate == "fp32"


GEMM_SN: Final = {(11, 0): (2, 256), (11, 1): (4, 128), (16, 0): (1, None)}
"""Threads that share K, and products of a chain, by algorithm and CUSTOM_OPTION."""


def _gemm_sn(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Every thread has one slice of K; on Hopper 16 threads take turns where K is contiguous in both operands."""
    config = GEMM_SN.get((choice.algorithm, choice.custom))
    if config is None or not _scalar(call) or choice.split != 1:
        return None
    question = question_of(call)
    if architecture == "sm_90" and choice[::3] == (11, 0) and question is not None and question.layout == 0:
        return _fma(call, **_dealt(16, 16, "serial"), promote_every=16)
    threads, chain = config
    width = _ceil(call.k, threads)
    parts = _ceil(call.k, width)
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
    (Lanes(1, 8), (33, 89)),
    (Lanes(1, 16), (73, 101)),
    (Lanes(-64, 2), (94, 102)),
    (Lanes(-64, 4), (68, 96, 110)),
    (Lanes(-64, 8), (106,)),
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
    (Lanes(1, 2), (85, 95, 103)),
    (Lanes(1, 4), (97, 111)),
    (Lanes(1, 16), (73, 91, 101)),
    (Lanes(1, 32), (75, 83, 93)),
    (Lanes(-64, 2), (1, 38, 48, 84, 94, 102)),
    (Lanes(-64, 4), (96, 110)),
    (Lanes(-64, 4, tree=False), (2,)),
    (Lanes(-64, 8), (78, 106)),
    (Lanes(-64, 16), (72, 100)),
    (Lanes(-64, 32), (74, 92)),
    (Lanes(1, 16, 32, tree=False), (11,)),
    (Lanes(1, 16, 16, tree=False), (12, 13, 14)),
)
GEMV_FLOAT32: Final[dict[str, dict[int, Lanes]]] = {"sm_90": _by_option(*_FLOAT32_OPTIONS)}
"""The same with float32 operands, which are multiplied as they are; option 10 has another number of lanes there."""

_MOST_RESULTS: Final = {"sm_90": 8448, "sm_100": 9728, "sm_103": 9728}  # of option 10, which has fewer lanes beyond


def _gemv(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """A slice of K for each part, tiles of it for the lanes, and chains along each lane's own products."""
    if 1 not in (call.m, call.n) or not _scalar(call):
        return None
    if call.a == "tf32" and call.m == call.n == 1 < call.batch:  # another order, which is not known
        return None
    half = call.a in ("bf16", "fp16")
    width = _ceil(call.k, choice.split)
    if choice.custom == 5 and half:
        return _fma(call, **_dealt(32 * _ceil(call.k, 32), 32, "serial"), promote_every=16) if call.m == 1 else None
    table = GEMV if half else GEMV_FLOAT32 if call.a == "tf32" else {}
    lanes = table.get(architecture, {}).get(choice.custom)
    if lanes is None or (choice.custom == 10 and call.batch * call.m * call.n > _MOST_RESULTS[architecture]):
        return None
    lane_products = lanes.products if lanes.products > 0 else min(-lanes.products, _ceil(width, lanes.lanes))
    fields: dict[str, Any] = {"promote_every": lanes.chunk and lanes.chunk * lane_products}
    fields |= _dealt(lanes.lanes * lane_products, lanes.lanes, "tree" if lanes.tree else "serial")
    parts = _ceil(call.k, width)
    if parts > 1:
        after = call.bias and call.n > 1  # one column has its bias added to the sum
        fields |= {"k_tile": lanes.lanes * lane_products, "part_k": width, "split": parts, "bias_after_rounding": after}
    return _fma(call, **fields)


def _dealt(tile: int, lanes: int, way: str) -> dict[str, Any]:
    return {} if lanes == 1 else {"k_tile": tile, "lanes": lanes, "lane_reduce": way}


def _dot(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Blocks of 128 threads own tiles in turn; a second kernel adds the blocks. Where K is contiguous in the matrix, or
    both operands are vectors, a thread has two chains.
    """
    if not _scalar(call) or 1 not in (call.m, call.n) or choice.split < 1:
        return None
    layout = "row" if call.m == call.n else call.b_layout if call.m == 1 else call.a_layout
    lanes = _dealt(256, 256, "pair_tree") if layout == "row" else _dealt(128, 128, "tree")
    parts = min(choice.split, _ceil(call.k, lanes["k_tile"]))
    return _fma(call, **lanes, **({"split": parts, "owner": "interleaved", "reduce": "folded"} if parts > 1 else {}))


# The others


def _multiply_adds(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """One chain of fused multiply-adds for each result."""
    if choice.split != 1 or not _scalar(call):
        return None
    return _fma(call)._replace(certain=call.k > 1)


TILES: Final = {
    11: (32, 32), 12: (32, 64), 13: (64, 32), 14: (32, 128), 15: (64, 64), 16: (128, 32), 17: (64, 128),
    18: (128, 64), 19: (64, 256), 20: (128, 128), 21: (256, 64), 23: (128, 256), 24: (256, 128),
}  # fmt: skip
"""Rows and columns of a tile of the library's result, which are torch's columns and rows, by TILE_ID."""


def _one_chain(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Stream-K kernels (split -1) leave tiles whole where 67 to 99 of them fill most of the GPU at once.

    From 100 to 128 tiles, some of the last ones are shared along K in one call of ten.
    """
    if choice.split == -1 and architecture == "sm_90" and choice.custom in TILES:
        rows, columns = TILES[choice.custom]
        whole = 66 < _ceil(call.n, rows) * _ceil(call.m, columns) * call.batch < 100
    else:
        whole = choice.split == 1
    return _plan() if whole and not (call.bias and call.n == 1) else None


def _interleaved(choice: Choice, call: GemmCall, architecture: Architecture) -> Order | None:
    """Parts own tiles in turn, and nothing comes first."""
    if choice.split == 1:
        return _one_chain(choice, call, architecture)
    stage = STAGES.get(choice.stages)
    if stage is None or call.a != "tf32" or choice.split < 1 or choice.reduction != 2:
        return None
    return _plan(k_tile=stage[0], split=min(choice.split, _ceil(call.k, stage[0])), owner="interleaved")


Family = Callable[[Choice, GemmCall, Architecture], Order | None]
FAMILIES: Final[dict[int, Family]] = {
    11: _gemm_sn,
    12: _multiply_adds,
    13: _gemv,
    14: _dot,
    16: _gemm_sn,
    20: _multiply_adds,
    21: _cutlass,
    23: _cutlass,
    24: _cutlass,
    39: _one_chain,
    43: _one_chain,
    55: _multiply_adds,
    56: _multiply_adds,
    63: _interleaved,
    66: _nvjet,
}
"""By ALGO_ID. Not known: 41, 42, and 39 and 43 with split -1, whose order differs from tile to tile of the result."""


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
