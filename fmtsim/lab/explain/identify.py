# SPDX-License-Identifier: Apache-2.0
"""Which accumulation gave a result: every explanation of fmtsim that has all of its bits."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_together
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.packing import tensor_bytes
from fmtsim.gemm.products.explanation import factors
from fmtsim.gemm.products.operand_scales import read_scales
from fmtsim.gemm.products.operands import FLOATS, check_operands, check_tensor, matrix_layout, operand_format
from fmtsim.gemm.products.operator import OUT_DTYPES
from fmtsim.gemm.products.resolver import call_name
from fmtsim.gemm.targets.target import list_targets
from fmtsim.gemm.units.unit import list_units
from fmtsim.lab.analysis.compare import Difference, compare
from fmtsim.lab.explain.candidates import Accumulation, Observed, candidates, cost, merge, rows_at
from fmtsim.lab.explain.samples import FEW, Places, affordable, deciding, part_of, probe_of
from fmtsim.spec.call import Operands
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, did_you_mean, shown
from fmtsim.support.table import Column, Facts, Result, Rows, page, page_width, table_of, wrapped

_WIDE = 100  # columns of what is printed
MACS = 1 << 32  # products of operands that a stage computes, counted as a tensor core's
ALIKE = 64  # explanations that are compared with each other; where more fit, the operands say little
SHOWN = 12  # explanations that are printed
NEAREST = 24
FEW_DIFFER = 1e-3
PROBES = (0, 1)  # seeds
REFINED = "a, b = result.probe(); run the kernel on them; result.refine(a, b, y)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The explanation with the fewest differing bits, where none has all.

    Args:
        explanation: The explanation.
        mismatches, compared: Results that differ from it, of so many.
        first: The first difference: ``actual`` is the result, ``expected`` the explanation.
    """

    explanation: Any
    mismatches: int
    compared: int
    first: Difference


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Groups(Result):
    """Hold the explanations of a product or of a cast, and how far they were compared.

    Args:
        groups: Explanations with all compared bits. Those of a group agree on what ``probe`` returns too, those of
            different groups do not.
        tried: Explanations that were compared.
        nearest: What comes closest, where nothing fits.
        notes: What else there is to know, and what to try next.
    """

    groups: tuple[tuple[Any, ...], ...]
    tried: int
    nearest: Nearest | None = None
    notes: tuple[str, ...] = ()
    _counts: ClassVar[tuple[str, ...]] = ()  # fields that ``to_dict`` has besides

    @property
    def explanations(self) -> tuple[Any, ...]:
        """All explanations, group by group."""
        return tuple(explanation for group in self.groups for explanation in group)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors as JSON types."""
        near = self.nearest and {
            **self.nearest.explanation.facts(), "mismatches": self.nearest.mismatches,
            "compared": self.nearest.compared, "first": self.nearest.first.to_dict(),
        }  # fmt: skip
        groups = [[explanation.facts() for explanation in group] for group in self.groups]
        counts = {name: getattr(self, name) for name in ("tried", *self._counts)}
        return {"groups": groups, **counts, "nearest": near, "notes": list(self.notes)}

    def _head(self, what: str, text: str, compared: str) -> Facts:
        """Return what was explained, and how many explanations it has."""
        count, groups = len(self.explanations), len(self.groups)
        fits = plural(count, "explanation") + (f" in {groups} groups" if groups > 1 else "") if count else "none"
        return Facts([
            (what, text), ("tried", plural(self.tried, "explanation")), ("fits", fits),
            ("compared", compared if count else "every explanation"),
        ])  # fmt: skip

    def _tables(self, columns: Sequence[Column], what: str, result: str, shown: int = SHOWN) -> Iterator[Rows | str]:
        """Yield a table of explanations, the number of its group first, and where nothing fits the nearest one."""
        rows = [(str(i + 1), x) for i, group in enumerate(self.groups) for x in group]
        yield ""
        yield table_of([Column("group", lambda row: row[0]), *columns], rows[:shown], filled=True)
        if len(rows) > shown:
            yield f"... and {len(rows) - shown:,} more in .explanations"
        if self.nearest is not None:
            near = self.nearest
            yield f"nearest: {near.mismatches:,} of {near.compared:,} {what} differ; {result} is 'actual' below"
            yield table_of(columns, [("", near.explanation)], filled=True)
            yield f"first difference at {near.first}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Identification(Groups):
    """Say what ``identify`` found; ``print`` shows a table, notebooks an HTML one.

    Args:
        groups, tried, nearest, notes: As in ``Groups``.
        compared: Results of y that every explanation in ``groups`` was compared with.
        outputs: Results of y.
        product: What was explained.
    """

    compared: int
    outputs: int
    product: Observed = dataclasses.field(repr=False, compare=False)
    _counts: ClassVar[tuple[str, ...]] = ("compared", "outputs")

    @property
    def plans(self) -> tuple[Any, ...]:
        """Their accumulation orders, as ``plan=`` of ``fmtsim.mm`` takes them."""
        return tuple(explanation.plan for explanation in self.explanations)

    def probe(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return operands whose product tells the groups apart, of the shapes, strides and dtypes of the first ones.

        Run the kernel on them and pass both with its result to ``refine``.

        Raises:
            ArgumentError: fmtsim has no such operands for these dtypes.
        """
        probe = probe_of(self.product, seed)
        if probe is None:
            formats = f"{dtype_name(self.product.a.dtype)} x {dtype_name(self.product.b.dtype)}"
            raise ArgumentError(f"there is no probe for {formats}, whose sums are exact in every order")
        m, n, _ = self.product.sizes
        a, b = (rows_at(x, torch.arange(rows) % len(x)) for x, rows in zip(probe, (m, n), strict=True))
        layouts = self.product.layouts
        return _lay_out(a, layouts[0]), _lay_out(b, layouts[1]).t()

    def refine(self, a: Tensor, b: Tensor, y: Tensor) -> "Identification":
        """Return those of these explanations that also give ``y`` for other operands of the same K.

        Raises:
            ArgumentError, DtypeError: As ``identify``; K differs.
        """
        product = _check_product(a, b, y)._replace(
            **{name: getattr(self.product, name) for name in ("bias", "row", "column", "block_a", "block_b", "kind")}
        )
        if product.sizes != self.product.sizes:
            raise ArgumentError(
                f"the operands have M, N, K = {product.sizes}, the first ones {self.product.sizes}; pass the result of "
                "the same call for other numbers, such as those of probe()"
            )
        return _identify(product, list(self.explanations))

    def _content(self) -> Iterable[Rows | Facts | str]:
        names = [call_name(operand_format(name, x)) for name, x in (("a", self.product.a), ("b", self.product.b))]
        sizes = factors(*self.product.sizes, *names)
        every = "all" if self.compared == self.outputs else f"of {self.outputs:,}"
        text = f"{sizes} -> {dtype_name(self.product.y.dtype)}"
        yield self._head("product", text, f"{self.compared:,} results, {every}")
        yield from self.notes
        # many say little
        yield from self._tables(_COLUMNS, "results", "y", SHOWN if len(self.explanations) <= ALIKE else 3)

    def __str__(self) -> str:
        with page(page_width() or _WIDE):
            lines = Result.__str__(self).split("\n")
            return "\n".join(part for line in lines for part in wrapped(line, page_width() or _WIDE) or [""])


_COLUMNS = (
    Column("units", lambda row: ", ".join(row[1].units)), Column("order", lambda row: row[1].order),
    Column("epilogue", lambda row: row[1].epilogue),
    Column("library", lambda row: ", ".join(
        # libraries that choose the order in the operands' layouts, or else in others
        [book for book in row[1].books if ", " not in book]
        or sorted({f"{book.split()[0]} in other layouts" for book in row[1].books})
    )),
)  # fmt: skip


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def identify(
    a: Tensor,
    b: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    target: Any = None,
    thorough: bool = False,
) -> Identification:
    """Name every accumulation that gives the bits of a product: units, orders of K, splits, roundings, libraries.

    Candidates are the units that take the operands, each with one chain, promotions, and K split by tiles in up to 128
    parts (runs, interleaved tiles, slices; added in order, in pairs, in the output; in float32 or rounded), lanes on
    CUDA cores, ways to make TF32 of float32, to multiply scales and to add a bias, and what the library of every
    target chooses for this call. Orders that depend on the position in y, as stream-K has, are not among them.

    Args:
        a: [M, K], a dtype that ``fmtsim.mm`` takes, or int8; strides count for the libraries' choices.
        b: [K, N], likewise.
        y: [M, N], the result to explain. All its bits count, NaN and -0 included.
        bias: [N], what the kernel added to each row, or None.
        scale_a, scale_b: Scales as ``fmtsim.scaled_mm`` takes them. An alpha is ``torch.tensor(alpha)`` as scale_a,
            with ``torch.tensor(1.0)`` as scale_b.
        target: Look at this GPU with its library, or at this unit, alone.
        thorough: Also try every way to cut K into up to 128 parts, which takes minutes.

    Returns:
        The explanations. The same call gives the same answer: nothing is drawn at random.

    Raises:
        ArgumentError: Shapes that do not fit, no elements, an unknown target, operands that no unit takes.
        DtypeError: A dtype that is not an operand's or a result's.

    >>> import fmtsim, torch
    >>> g = torch.Generator().manual_seed(0)
    >>> a, b = (torch.randn(64, 512, generator=g).bfloat16() for _ in range(2))
    >>> plan = fmtsim.GemmPlan(k_tile=64, split=4)
    >>> y = fmtsim.mm(a, b.t(), target="hopper.wgmma", plan=plan, out_dtype=torch.float32)
    >>> result = fmtsim.identify(a, b.t(), y)
    >>> again = fmtsim.mm(a, b.t(), target="hopper.wgmma", plan=result.plans[0], out_dtype=torch.float32)
    >>> again.equal(y), result.explanations[0].units[0]
    (True, 'hopper.mma')
    """
    product = _check_product(a, b, y, bias, scale_a, scale_b)
    names = (*list_targets(), *list_units())
    if target is not None and not (isinstance(target, str) and target in names):
        raise ArgumentError(f"unknown target {shown(target)}{did_you_mean(str(target), names)}; choose one of {names}")
    options = candidates(product, target, thorough=thorough)
    if not options:
        raise ArgumentError(
            f"no unit multiplies {a.dtype} x {b.dtype} to {y.dtype}"
            + (f" on {target}" if target else "") + "; cast y back to the dtype that the kernel wrote, or choose "
            "another target"
        )  # fmt: skip
    return _identify(product, options, thorough=thorough)


def _check_product(a: Any, b: Any, y: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None) -> Observed:
    for name, x in (("a", a), ("b", b), ("y", y), ("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b)):
        if name in "aby" or x is not None:
            check_tensor(name, x, "2" if name in "aby" else "1" if name == "bias" else "0+")
            if not is_readable(x):
                raise ArgumentError(
                    f"{name} has no numbers (it is fake, or on the device meta); pass the tensor itself"
                )
    check_together(a=a, b=b, y=y)
    check_operands("mm", a, b, None, False)
    sizes = m, n, k = a.shape[0], b.shape[1], a.shape[1]
    if y.shape != (m, n):
        raise ArgumentError(f"y has shape {tuple(y.shape)}; the product of these a and b is [{m}, {n}]")
    if 0 in sizes:
        raise ArgumentError(f"M={m}, N={n}, K={k}: nothing is multiplied, so there is no order to find")
    if y.dtype not in (*OUT_DTYPES, torch.int32):
        names = ", ".join(dtype_name(dtype) for dtype in (*OUT_DTYPES, torch.int32))
        raise DtypeError(f"y has dtype {y.dtype}; pass the result as the kernel wrote it: {names}")
    if bias is not None and bias.dtype not in FLOATS:
        raise DtypeError(f"bias has dtype {bias.dtype}; pass it as the kernel added it: 16 bits, float32 or float64")
    for name, x in (("a", a), ("b", b)):
        operand_format(name, x)
    layouts = matrix_layout(a), matrix_layout(b, transposed=True)
    # Candidates are computed without torch's dispatcher, which would negate what it has yet to negate.
    bias, scale_a, scale_b = (None if x is None else x.detach().cpu().resolve_neg() for x in (bias, scale_a, scale_b))
    values, rows, results = (x.detach().cpu().resolve_neg().contiguous() for x in (a, b.mT, y))
    product = Observed(a=values, b=rows, y=results, layouts=layouts)
    if bias is not None:
        if len(bias) != n:
            raise ArgumentError(f"bias has {len(bias)} elements; y has {n} columns")
        product = product._replace(bias=bias)
    if (scale_a is None) != (scale_b is None):
        raise ArgumentError("scale_a and scale_b belong together; pass torch.tensor(1.0) for the one that is missing")
    if scale_a is not None:
        kind, scales = read_scales(scale_a, scale_b, sizes, (None, None), (None, None))
        operands = Operands(values, rows, **scales)
        block_a, block_b = operands.scales_of_rows(m, n)
        product = product._replace(row=operands.row, column=operands.column, block_a=block_a, block_b=block_b,
                                   kind=kind)  # fmt: skip
    return product


def _identify(product: Observed, options: list[Accumulation], *, thorough: bool = False) -> Identification:
    """Compare explanations with a few results, and those that remain with more, up to all."""
    places = deciding(product)
    few = {slow: part_of(product, places, FEW // 32 if slow else FEW)[0] for slow in (False, True)}

    def count(options: Iterable[Accumulation]) -> list[tuple[int, Accumulation]]:
        options = list(options)
        by_cuts = sorted(range(len(options)), key=lambda i: repr(options[i].cuts))  # the engine keeps few orders of K
        wrong = {i: int(x.differs(few[cost(x.spec.datapath) > 100]).sum()) for i in by_cuts for x in (options[i],)}
        return [(wrong[i], x) for i, x in enumerate(options)]

    # 1. the results that decide; sums that are rounded on the way where the others do not fit, or both might
    rounded = [option for option in options if option.rounds_parts and not option.books]
    counts = count(option for option in options if option.books or not option.rounds_parts)
    orders = {(option.spec.datapath, option.cuts) for wrong, option in counts if not wrong}
    some = count(option for option in rounded if (option.spec.datapath, option.cuts) in orders)
    if not orders:  # each order on one unit first: where it is the right one, most results are right on others, too
        plans = {(option.plan, option.spec.accumulate): option for option in rounded}
        some = count(plans.values())
        likely = {(option.plan, option.spec.accumulate) for wrong, option in some if 2 * wrong < few[False].y.numel()}
        some += count(x for x in rounded if (key := (x.plan, x.spec.accumulate)) in likely and x is not plans[key])
    if bool(orders) != all(wrong for wrong, _ in some):
        some = count(rounded)
    counts += some
    remaining = [option for wrong, option in counts if not wrong]
    facts: dict[str, Any] = {"tried": len(counts), "outputs": product.y.numel(), "product": product}
    # 2. more of them, up to all, for those that remain
    compared = 0
    for macs in (MACS // 8, MACS):
        part, _ = part_of(product, places, affordable(product, remaining, macs))
        remaining = [option for option in remaining if not bool(option.differs(part).any())]
        compared = part.y.numel()
        if compared == product.y.numel():
            break
    # 3. what came out
    if not remaining:
        near = _nearest(product, places, [option for _, option in sorted(counts, key=lambda x: x[0])[:NEAREST]])
        return Identification(groups=(), compared=0, nearest=near, notes=_advice(product, near, thorough), **facts)
    if len(remaining) > ALIKE:
        note = (
            f"these operands say little: {len(remaining):,} of {len(counts):,} explanations fit; sums are zero, exact "
            f"or of few products, or the narrow results hide the order. Others say more: {REFINED}"
        )
        return Identification(groups=(tuple(remaining),), compared=compared, notes=(note,), **facts)
    # One explanation for those that give the same bits for all operands of this K, libraries' choices first.
    distinct: list[Accumulation] = []
    for option in remaining:
        same = next((i for i, other in enumerate(distinct) if other.equals(option)), None)
        if same is None:
            distinct.append(option)
        else:
            distinct[same] = merge(distinct[same], option)
    # Explanations by what they give for operands that were made to tell them apart.
    by_bits: dict[bytes, list[Accumulation]] = {}
    probes = [probe for seed in PROBES if (probe := probe_of(product, seed)) is not None]
    for option in distinct:
        bits = b""
        for a, b in probes:
            places = (torch.arange(len(a)) % product.sizes[0], torch.arange(len(b)) % product.sizes[1])
            bits += tensor_bytes(option.multiply(product.part(*places)._replace(a=a, b=b)))
        by_bits.setdefault(bits, []).append(option)
    groups = tuple(map(tuple, by_bits.values()))
    notes = []
    if len(groups) > 1:
        notes.append(f"these operands do not tell the {len(groups)} groups apart, others do: {REFINED}")
    if compared < product.y.numel():
        notes.append(f"{compared:,} of {product.y.numel():,} results were compared, those that decide first")
    return Identification(groups=groups, compared=compared, notes=tuple(notes), **facts)


def _nearest(product: Observed, places: Places, options: list[Accumulation]) -> Nearest:
    """Return the explanation with the fewest differing bits, of some that have few in the results that decide."""
    for macs, count in ((MACS // 8, 3), (MACS // 2, 1)):
        part, (rows, columns) = part_of(product, places, affordable(product, options, macs))
        wrong = [int(option.differs(part).sum()) for option in options]
        order = sorted(range(len(options)), key=lambda i: wrong[i])
        if wrong[order[0]] and part.y.numel() == product.y.numel():
            order = order[:1]
        options, wrong = [options[i] for i in order[:count]], [wrong[i] for i in order[:count]]
    best = options[0]
    if not wrong[0]:  # the one that differs lies among results that are not in the part
        part, (rows, columns) = product, (torch.arange(product.sizes[0]), torch.arange(product.sizes[1]))
        wrong = [int(best.differs(part).sum())]
    first = compare(part.y, best.multiply(part)).first
    assert first is not None
    i, j = first.index
    return Nearest(explanation=best, mismatches=wrong[0], compared=part.y.numel(),
                   first=replace(first, index=(int(rows[i]), int(columns[j]))))  # fmt: skip


def one_value(y: Tensor) -> str | None:
    """Return what to say of results that nothing explains and that are all the same, None where they are not."""
    numbers = y.flatten().double()
    if len(numbers) < 2 or not torch.allclose(numbers, numbers[:1], 0, 0, equal_nan=True):
        return None
    return (
        f"every result is {y.flatten()[0].item()}, which no explanation gives: it was not written, or not yet (an "
        "empty tensor, a kernel that failed, another stream), or it is not of these operands"
    )


def _advice(product: Observed, near: Nearest, thorough: bool) -> tuple[str, ...]:
    """Return what to try where nothing fits."""
    if near.first.actual != near.first.expected and (note := one_value(product.y)):
        return (note,)
    share = near.mismatches / near.compared
    if share < FEW_DIFFER:
        return ("few results differ: look at these elements alone (edges of tiles, a race, a bit that flipped)",)
    steps = [] if product.bias is not None else ["bias= if the kernel adds one"]
    steps += [] if product.kind != "none" else ["scale_a= and scale_b= if it multiplies by an alpha or scales"]
    steps += [] if product.y.dtype != torch.float32 else ["y in the dtype that it wrote"]
    steps += [] if thorough else ["thorough=True for unusual cuts of K"]
    return (
        f"to try: {'; '.join(steps)}",
        "not among the candidates: parts added in the order of their arrival (atomics) or by torch.sum (more than 4), "
        "stream-K, products of split operands (3xTF32, bf16x3), activations in the epilogue, beta times C",
    )


def _lay_out(x: Tensor, layout: str) -> Tensor:
    return x if layout == "row" else x.t().contiguous().t()
