# SPDX-License-Identifier: Apache-2.0
"""Matrix products in exact integers: slow, obvious, and what engines are held to (docs/matmul.md, section 4).

What a unit does with one block is in ``product_oracle_units.py``; here products become blocks, chains, parts, sums and
outputs.
The accumulation order is written as labels: every index k gets the numbers of its part, chain, tile, window and half
(rules 1 and 2), and sorting by these numbers is the order. No floating-point operation decides anything, and nothing is
shared with an engine, nor with ``schedule.py``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import Any

from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.oracle import round_value
from fmtsim.rounding.philox import random_integer
from fmtsim.spec.datapath import FP32, Arithmetic, Datapath, FmaDatapath, IntegerDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import Epilogue, GemmPlan
from fmtsim.support.errors import ArgumentError
from tests.support.product_oracle_units import (
    Product,
    add,
    fma,
    fma_block,
    fused_block,
    integer_block,
    multiply,
    pairwise_block,
    to_accumulator,
    two_stage_block,
)

Block = list[int]
Chain = list[Block]
Part = list[Chain]
Words = Iterator[int | None]


def gemm_oracle(
    a: Sequence[Sequence[Any]],
    b: Sequence[Sequence[Any]],
    spec: GemmSpec,
    *,
    c: Sequence[Sequence[Any]] | None = None,
    scale_a: Sequence[Sequence[float]] | None = None,
    scale_b: Sequence[Sequence[float]] | None = None,
    random: Sequence[int] | None = None,
) -> list[list[Any]]:
    """Return the reduced sums of ``a b^T``, without the epilogue.

    Args:
        a: [M][K] floats that lie on ``spec.a``, or integers for an IntegerDatapath.
        b: [N][K], likewise.
        spec: The unit, the accumulation order, the operands' formats.
        c: [M][N] values of the accumulator, the addend of the first part; what the output begins with, such as a bias,
            where parts are reduced in place.
        scale_a: [M][ceil(K / g)] scales inside the unit where it has some (g = ``scale_block``), else those of
            ``scaled_promotion`` (g = ``promote_every``).
        scale_b: [N][ceil(K / g)], likewise.
        random: Seed and offset; they count where the unit rounds stochastically.

    Returns:
        [M][N] floats, ints for an IntegerDatapath. NaN is Python's NaN. Without products c, or +0.

    Raises:
        ArgumentError: Unit and plan promote differently, a group or a promoted chain has two scales, scales have no
            use, or random numbers are missing.
    """
    _check(spec, scale_a is not None or scale_b is not None, random)
    order = _labelled(len(a[0]) if len(a) else 0, spec.datapath, spec.plan)
    zero = _zero(spec.datapath)

    def output(m: int, n: int) -> Any:
        words = _words(spec.datapath, random, m * len(b) + n, len(a) * len(b))
        scales = None if scale_a is None else scale_a[m], None if scale_b is None else scale_b[n]
        products = _products(a[m], b[n], *scales, spec)
        addend = None if c is None else c[m][n]
        start_of_first = zero if addend is None or spec.plan.reduce == "in_place" else addend
        if not order:  # rule 6
            return zero if addend is None else addend
        starts = [start_of_first, *[zero] * len(order)]
        lanes: dict[int, dict[int, Any]] = defaultdict(dict)
        for ((part, lane), chains), start in zip(order.items(), starts, strict=False):
            lanes[part][lane] = _part_sum(chains, start, products, words, spec)
        sums = [_lane_sum([of_part.get(lane, zero) for lane in range(spec.plan.lanes)], spec)
                for of_part in lanes.values()]  # fmt: skip
        return _in_place(sums, addend, spec) if spec.plan.reduce == "in_place" else _reduced(sums, spec)

    return [[output(m, n) for n in range(len(b))] for m in range(len(a))]


def epilogue_oracle(
    value: float,
    out: FloatFormat,
    *,
    rule: Epilogue = "scale",
    scales: tuple[float, float] | None = None,
    bias: float | None = None,
    bias_after_rounding: bool = False,
    result_scale: float | None = None,
    arithmetic: FloatFormat = FP32,
) -> float:
    """Return what a library makes of one reduced sum: scales, bias, output format (rule 7).

    Args:
        value: The sum.
        out: Format of the output.
        rule: How the scales multiply.
        scales: Scale of the row (or of a), scale of the column (or of b); None where the call has none.
        bias: Value added after the scales.
        bias_after_rounding: Round to an output of 16 bits before adding the bias, too.
        result_scale: Multiplies an FP8 output; None is 1.
        arithmetic: Format of each step.
    """
    y = value
    if scales is not None:
        row, column = scales
        factors = {"scale": [multiply(arithmetic, row, column)], "row_column": [row, column]}
        for factor in factors.get(rule, [column, row]):
            y = multiply(arithmetic, y, factor) or 0.0  # a product that is zero is +0
    if bias is not None:
        y = add(arithmetic, add(out, y, -0.0) if bias_after_rounding and out.bits == 16 else y, bias)
    if out.bits > 8:
        return add(out, y, -0.0)  # adding -0 changes nothing, so this rounds
    if result_scale is not None:
        y = multiply(arithmetic, y, result_scale) or 0.0
    return round_value(y, out, "nearest_even", "saturate")


def _check(spec: GemmSpec, scaled: bool, random: Sequence[int] | None) -> None:
    unit, plan = spec.datapath, spec.plan
    if scaled and not plan.scaled_promotion and getattr(unit, "scale", None) is None:
        raise ArgumentError("neither unit nor plan has scales; leave scale_a and scale_b to the epilogue")
    if isinstance(unit, Datapath) and unit.rounding.mode == "stochastic" and random is None:
        raise ArgumentError("the unit rounds stochastically and random=None; pass seed and offset")
    if isinstance(unit, IntegerDatapath) and (plan.scaled_promotion or plan.partial or plan.reduce == "in_place"):
        raise ArgumentError(
            "integer sums have neither scaled_promotion nor partial nor reduce='in_place'; leave them out of the plan"
        )


def _products(
    a: Sequence[Any], b: Sequence[Any], scale_a: Sequence[float] | None, scale_b: Sequence[float] | None, spec: GemmSpec
) -> list[Product]:
    """Return the products of an output with their scales, which are the unit's where that has some."""
    every = spec.datapath.scale_block if _has_scales(spec.datapath) else spec.plan.promote_every  # type: ignore[union-attr]
    scales = ([1.0 if s is None else s[k // (every or 1)] for k in range(len(a))] for s in (scale_a, scale_b))
    return list(map(Product, a, b, *scales))


def _has_scales(unit: Arithmetic) -> bool:
    return isinstance(unit, Datapath) and unit.scale is not None


def _words(unit: Arithmetic, random: Sequence[int] | None, place: int, outputs: int) -> Words:
    """Return the random integer of each block of an output: block t draws for element ``t outputs + place``."""
    if random is None or not isinstance(unit, Datapath) or unit.rounding.mode != "stochastic":
        return repeat(None)
    rounding = unit.rounding
    return (random_integer(rounding, random, t * outputs + place) for t in count())


def _zero(unit: Arithmetic) -> Any:
    return 0 if isinstance(unit, IntegerDatapath) else 0.0


def _part_sum(part: Part, start: Any, products: list[Product], words: Words, spec: GemmSpec) -> Any:
    """Return the sum of a part: its one chain, or the outer sum of its chains (rules 3 and 4)."""
    if promotion_interval(spec.datapath, spec.plan) is None:
        return _chain_sum(part[0], start, products, words, spec)
    outer = start
    for chain in part:
        inner = _chain_sum(chain, _zero(spec.datapath), products, words, spec)
        outer = _promoted(outer, inner, {products[k][2:] for block in chain for k in block}, chain, spec)
    return outer


def _chain_sum(chain: Chain, running: Any, products: list[Product], words: Words, spec: GemmSpec) -> Any:
    for block in chain:
        running = _block_sum([products[k] for k in block], running, next(words), spec)
    return running


def _block_sum(block: list[Product], running: Any, word: int | None, spec: GemmSpec) -> Any:
    unit, a, b = spec.datapath, spec.a, spec.b
    if isinstance(unit, IntegerDatapath):
        return integer_block(block, running, unit)
    if not isinstance(a, FloatFormat) or not isinstance(b, FloatFormat):
        raise ArgumentError(f"a unit of floats does not multiply {a.name} by {b.name}; pass floating-point formats")
    block = block if _has_scales(unit) else [Product(p.a, p.b) for p in block]
    if isinstance(unit, Datapath):
        return fused_block(block, running, unit, a, b, word)
    others: dict[type, Any] = {TwoStageDatapath: two_stage_block, FmaDatapath: fma_block}
    one_block = others.get(type(unit), pairwise_block)
    return one_block(block, running, unit, a, b)  # type: ignore[arg-type]


def _promoted(outer: Any, p: Any, scales: set[Any], chain: Chain, spec: GemmSpec) -> Any:
    """Add a chain to the outer sum (rule 4)."""
    unit, plan = spec.datapath, spec.plan
    if isinstance(unit, IntegerDatapath):
        return to_accumulator(outer + p, unit)
    if not isinstance(unit, Datapath) or plan.promote_every is not None:
        target = FP32
    else:
        target = unit.promotion or unit.accumulator
    if not plan.scaled_promotion:
        return add(target, outer, p)
    groups = {k // plan.promote_every for block in chain for k in block} if plan.promote_every else {0}
    if len(groups) > 1:
        raise ArgumentError(
            f"a chain of promote_every={plan.promote_every} products has two scales; choose a k_tile that holds "
            "whole chains"
        )
    # Scales belong to the unit where that takes some; the promotion then has none.
    scale_a, scale_b = (1.0, 1.0) if _has_scales(unit) else scales.pop()
    if plan.successive_scales:
        return fma(FP32, multiply(FP32, p, scale_a), scale_b, outer)
    return fma(FP32, p, multiply(FP32, scale_a, scale_b), outer)


def _lane_sum(sums: list[Any], spec: GemmSpec) -> Any:
    """Return the sum of a part's lanes (rule 5)."""
    if spec.plan.lane_reduce == "pair_tree":
        sums = [_plus(sums[i], sums[i + 1], spec) for i in range(0, len(sums), 2)]
    while len(sums) > 1 and spec.plan.lane_reduce != "serial":
        half = len(sums) // 2
        sums = [_plus(sums[i], sums[i + half], spec) for i in range(half)]
    result = sums[0]
    for lane in sums[1:]:
        result = _plus(result, lane, spec)
    return result


def _folded(parts: list[Any], spec: GemmSpec) -> Any:
    """Add parts in 128 places: those 64 apart, those 32 apart, every fourth, then the four sums (rule 5)."""
    zero = _zero(spec.datapath)
    q = [*parts[:128], *[zero] * (128 - len(parts))]
    for i, part in enumerate(parts[128:]):
        q[i % 128] = _plus(q[i % 128], part, spec)
    for apart in (64, 32):
        q = [_plus(q[t], q[t + apart], spec) for t in range(apart)]
    u = q[:4]
    for t in range(4, 32):
        u[t % 4] = _plus(u[t % 4], q[t], spec)
    return _plus(_plus(_plus(u[0], u[1], spec), u[2], spec), u[3], spec)


def _reduced(sums: list[Any], spec: GemmSpec) -> Any:
    """Return the sum of the parts (rule 5)."""
    plan = spec.plan
    if plan.reduce == "folded":
        return _folded(sums, spec)
    if plan.partial is not None:
        sums = [add(plan.partial, p, -0.0) for p in sums]
    if plan.reduce == "neighbours":
        while len(sums) > 1:
            waits = [sums.pop(0)] if len(sums) % 2 else []
            sums = waits + [_plus(x, y, spec) for x, y in zip(sums[::2], sums[1::2], strict=True)]
    if plan.reduce in ("serial", "neighbours"):
        result, rest = sums[0], sums[1:]
    else:
        half, last = -(-len(sums) // 2), len(sums) - 1
        result = sums[last]
        rest = [_plus(sums[i], sums[i + half], spec) if i + half < last else sums[i] for i in range(half)]
        rest = rest if last else []
    for p in rest:
        result = _plus(result, p, spec)
    return result


def _in_place(sums: list[Any], addend: Any, spec: GemmSpec) -> Any:
    """Return the output after every part was added to it, and rounded to its format (rule 5)."""
    output = spec.plan.partial
    result = addend
    for p in sums:
        result = p if result is None else _plus(result, p, spec)
        result = result if output is None else add(output, result, -0.0)  # adding -0 changes nothing, so this rounds
    return result


def _plus(x: Any, y: Any, spec: GemmSpec) -> Any:
    """Add two parts."""
    unit, plan = spec.datapath, spec.plan
    if isinstance(unit, IntegerDatapath):
        return to_accumulator(x + y, unit)
    wide = isinstance(unit, Datapath) and _wider_than_fp32(unit.accumulator)
    total = add(unit.accumulator if isinstance(unit, Datapath) and wide else FP32, x, y)
    return add(plan.partial, total, -0.0) if plan.partial is not None and plan.round_trip else total


def _wider_than_fp32(fmt: FloatFormat) -> bool:
    return fmt.mantissa_bits > 23 or fmt.max > FP32.max or fmt.min_subnormal < FP32.min_subnormal


# The accumulation order (rules 1 and 2).


def order_of_products(k: int, datapath: Arithmetic, plan: GemmPlan) -> list[Part]:
    """Return the accumulation order: the chains of each part (of each lane, if a plan has lanes), as blocks of indices.

    Args:
        k: Products in a sum; 0 gives no parts.
        datapath: The unit: its block, its promotion, whether blocks are paired.
        plan: Tiles, parts, lanes, promotion, length of an instruction, the end of K.

    Raises:
        ArgumentError: Unit and plan promote after different numbers of products.
    """
    return list(_labelled(k, datapath, plan).values())


def _labelled(k: int, datapath: Arithmetic, plan: GemmPlan) -> dict[tuple[int, int], list[Chain]]:
    """Return the chains of each part and lane that has products."""
    k = min(k, plan.k_end or k)
    promote = promotion_interval(datapath, plan)
    lengths = [n for n in (datapath.block, plan.instruction_k) if n is not None]
    length = min(lengths, default=k)
    paired = isinstance(datapath, Datapath) and datapath.paired
    seen: Counter[tuple[int, ...]] = Counter()  # products of a sum, and of what a chain has of a tile, so far
    labels: dict[tuple[int, ...], Block] = defaultdict(list)
    for i in range(k):
        tile, place = _tile(i, k, plan)
        part = _owner(tile, k, plan) if plan.part_k is None else i // plan.part_k
        lane = place // -(-(plan.k_tile or k) // plan.lanes)
        chain = seen[part, lane] // promote if promote else 0
        window, inside = divmod(seen[part, lane, chain, tile], 2 * length if paired else length)
        half = inside // 2 % 2 if paired else 0
        labels[part, lane, chain, tile, window, half].append(i)
        seen[part, lane] += 1
        seen[part, lane, chain, tile] += 1
    sums: dict[tuple[int, int], dict[int, Chain]] = defaultdict(lambda: defaultdict(list))
    for (part, lane, chain, *_), block in sorted(labels.items()):
        sums[part, lane][chain].append(block)
    return {of_lane: list(chains.values()) for of_lane, chains in sums.items()}


def promotion_interval(datapath: Arithmetic, plan: GemmPlan) -> int | None:
    """Return after how many products a chain is promoted, by the unit or by the plan; None where neither does."""
    of_unit = datapath.promote_every if isinstance(datapath, Datapath) else None
    if of_unit and plan.promote_every and of_unit != plan.promote_every:
        raise ArgumentError(
            f"promote_every={of_unit} of the unit and promote_every={plan.promote_every} of the plan are two "
            "outer sums; leave one of them out"
        )
    return of_unit or plan.promote_every


def _tile(i: int, k: int, plan: GemmPlan) -> tuple[int, int]:
    """Return the number of the tile in which product i lies, and its place there."""
    if plan.k_tile is None:
        return 0, i
    if plan.part_k is not None:  # tiles are counted within the part
        start = i // plan.part_k * plan.part_k
        i, k = i - start, min(plan.part_k, k - start)
    residue = k % plan.k_tile
    if plan.residue_first and residue:
        return (0, i) if i < residue else (1 + (i - residue) // plan.k_tile, (i - residue) % plan.k_tile)
    return divmod(i, plan.k_tile)


def _owner(tile: int, k: int, plan: GemmPlan) -> int:
    """Return the number of the part that owns a tile."""
    if plan.k_tile is None:
        return 0
    if plan.owner == "interleaved":
        return tile % plan.split
    tiles = -(-k // plan.k_tile)
    if plan.owner == "even":  # counted from the last tile, the longer parts come first
        last, longer, share = tiles - 1 - tile, tiles % plan.split, tiles // plan.split
        edge = longer * (share + 1)
        place = last // (share + 1) if last < edge else longer + (last - edge) // share
        return plan.split - 1 - place
    return tile // -(-tiles // plan.split)
