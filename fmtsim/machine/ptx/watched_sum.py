# SPDX-License-Identifier: Apache-2.0
"""The order in which a launch adds the terms of one element: what ``launch(watch_sum=...)`` shows.

The launch is asked as a black box (FPRev: revealing the order of floating-point summation, 2024): all terms are ones
but for a huge M at i and -M at j. What is added to either before the two cancel is lost; the ones that survive say how
many terms the sum has in which i and j meet, and these counts draw the tree. It is shown only if it makes the launch's
bits of the launch's data.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.machine.ptx.parse import Instruction, parse
from fmtsim.machine.ptx.triton import Program
from fmtsim.machine.ptx.watched_lines import Note, Watch, all_places
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError

_MOST_TERMS = 4096
_DRAWS = 32  # on so many the order has to make the launch's bits
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
_WIDE = 60  # characters of an example
# Of a type: M and the ones, of which thousands are lost beside M, in float32 too
_LEVELS = {torch.float64: (2.0**200, 1.0), torch.float16: (2.0**14, 2.0**-24)} | dict.fromkeys(
    (torch.float32, torch.bfloat16), (2.0**60, 1.0)
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WatchedSum(table.Result):
    """In which order a launch adds terms of an argument to one element; ``print`` shows it, notebooks a table.

    Args:
        element, terms: Their names.
        additions: In order, of each what it adds: a number below ``count`` is a term (its place in ``terms``, row by
            row), ``count + i`` the result of addition i. More than two at once are one sum of tensor cores.
        leaves, count: Terms that are added, and elements of ``terms``.
        steps: For each kind of addition: how its operands meet, how many there are, of how many terms, and an example,
            from left to right.
        rounding: What is rounded to which type.
        whole: The sum is stored as it is, or rounded; else more is done to it.
        reason: Why there is no order; the rest is then empty.
    """

    element: str
    terms: str
    additions: tuple[tuple[int, ...], ...] = ()
    leaves: int = 0
    count: int = 0
    steps: tuple[tuple[str, int, str, str], ...] = ()
    rounding: str = ""
    whole: bool = True
    reason: str = ""

    def _content(self) -> tuple[table.Rows | str, ...]:
        if self.reason:
            return (f"{self.element} as a sum of {self.terms}: the order is not shown: {self.reason}",)
        verb = "is" if self.whole else "is made of"
        head = (
            f"{self.element} {verb} the sum of {self.leaves:,} elements of {self.terms}: {self.rounding}, in this order"
        )
        rows = [(f"{number:,}", span, how, example) for how, number, span, example in self.steps]
        return head, table.Rows([("additions", "of terms", "how they meet", "for example"), *rows], (2, 3))


def watched_sum(run: Callable[[Watch], Any], program: Program, out: Tensor, terms: Tensor) -> WatchedSum:
    """Return the order in which a program adds ``terms`` to ``out``, views of its arguments, which it overwrites.

    Raises:
        ArgumentError: Views of no argument, an element that is no sum of these terms, sums by atomics.
    """
    # 1. What the launch computes, and which block
    owners = {x.untyped_storage().data_ptr(): (name, x) for name, x in reversed(program.tensors)}
    mine, other = out.untyped_storage().data_ptr(), terms.untyped_storage().data_ptr()
    sizes_fit = out.numel() == 1 and 2 <= terms.numel() <= _MOST_TERMS and 0 not in terms.stride()  # noqa: PLR2004
    if mine not in owners or other not in owners or mine == other or not sizes_fit:
        raise ArgumentError(
            "watch_sum= takes one element and its terms, views of two tensors of the launch that share no memory, as "
            f"watch_sum=(y[1], x[1]); 2 to {_MOST_TERMS:,} terms"
        )
    if terms.dtype not in _LEVELS or not out.is_floating_point() or not terms.isfinite().all():
        raise ArgumentError(f"watch_sum= adds finite {', '.join(map(str, _LEVELS))}; got {terms.dtype} in {out.dtype}")
    element, what = (_name(x, *owners[key]) for x, key in ((out, mine), (terms, other)))
    flat = {key: x.new_empty(0).set_(x.untyped_storage()) for key, (_, x) in owners.items()}
    start, own = {key: x.clone() for key, x in flat.items()}, terms.clone().flatten()
    record = run(watch := Watch())
    if record.reasons:
        raise ArgumentError(f"{element} has no certain order: {'; '.join(record.reasons)}")
    block = watch.writer(out, (0,) * out.dim(), record.grid)
    fills = dict.fromkeys(flat, 1.0) | {mine: 0.0, other: 0.0}

    def ask(values: Tensor, given: Container[int] = (), places: frozenset[str] = frozenset()) -> Watch:
        """Run the block on these terms; other tensors are zeros or ones or, if ``given``, the launch's."""
        for key, x in flat.items():
            x.copy_(start[key]) if not x.is_floating_point() or key in given else x.fill_(fills[key])
        terms.copy_(values.view(terms.shape))
        run(watch := Watch(places=places, block=block, alone=True))
        return watch

    def answer(values: dict[int, float], given: Container[int] = ()) -> float:
        """Return the element for these terms, zeros where there is none."""
        places = torch.tensor([*values], dtype=torch.long)
        ask(torch.zeros_like(own).index_put((places,), torch.tensor([*values.values()], dtype=own.dtype)), given)
        return out.double().item()

    # 2. Arguments that take no part are zero; which terms are added?
    ones = dict.fromkeys(range(len(own)), 1.0)
    whole = answer(ones) - answer({})
    for key in (key for key, x in flat.items() if x.is_floating_point() and fills[key]):
        fills[key] = 0.0
        fills[key] = 0.0 if answer(ones) - answer({}) == whole else 1.0
    scales = [answer({i: 1.0}) for i in range(len(own))]
    leaves = [i for i, scale in enumerate(scales) if scale]
    refused = ArgumentError(f"{element} is not a sum of {what}, or of its products with another argument")
    if len(leaves) < 2 or answer({}) or len({scales[i] for i in leaves}) > 1:  # noqa: PLR2004
        raise refused
    scale, (large, small), most = scales[leaves[0]], _LEVELS[own.dtype], int(1 / torch.finfo(out.dtype).eps)

    def meet(i: int, j: int) -> int:
        """Return of how many terms the sum is in which i and j meet."""
        survivors = 0
        for first in range(0, len(leaves), most):
            values = dict.fromkeys(leaves[first : first + most], small) | {i: large, j: -large}
            counted = answer(values) / (scale * small)
            if not abs(counted - (number := round(counted) if abs(counted) < 2**53 else -1)) < 0.3 or number < 0:
                raise refused
            survivors += number
        return len(leaves) - survivors

    # 3. The tree, from its first term on: those that it meets later come from sums of their own
    additions: list[tuple[int, ...]] = []
    sizes, lows = dict.fromkeys(range(len(own)), 1), dict(enumerate(range(len(own))))

    def build(members: list[int], parent: int) -> list[int]:
        """Append additions of members, and return those operands of the sum of ``parent`` terms that they make."""
        node, groups = members[len(members) // 2], dict[int, list[int]]()  # the middle: chains are not deep recursions
        for j in members:
            if j != node:
                groups.setdefault(meet(node, j), []).append(j)
        rest = groups.pop(parent, [])
        for size in sorted(groups):
            operands = (node, *build(groups[size], size))
            additions.append(tuple(sorted(operands, key=lambda operand: (-sizes[operand], lows[operand]))))
            node = len(own) + len(additions) - 1
            sizes[node], lows[node] = sum(sizes[i] for i in operands), min(lows[i] for i in operands)
            if sizes[node] != size:
                raise refused
        return [node, *(build(rest, parent) if rest else [])]

    build(leaves, len(leaves) + 1)
    # 4. The same on the launch's data, and on random ones: an instruction of the block has to write the sum's bits
    shown = WatchedSum(element=element, terms=what, additions=tuple(additions), leaves=len(leaves), count=len(own))
    body = parse(program.ptx).functions[program.entry].body
    taking_part = {key for key, fill in fills.items() if fill}
    weights = torch.tensor([answer({i: 1.0}, taking_part) / scale for i in range(len(own))], dtype=torch.float64)
    draws = torch.randn(_DRAWS, len(own), generator=torch.Generator().manual_seed(0)).to(own.dtype)
    draws[0] = own
    seen = [(ask(row, set(flat), all_places(body)).notes, out.clone().flatten()) for row in draws]
    notes, results = [noted for noted, _ in seen], torch.cat([result for _, result in seen])
    wide = torch.promote_types(own.dtype, torch.float32)
    for sums, products in dict.fromkeys(((wide, wide), (wide, own.dtype), (own.dtype, own.dtype))):
        for fused in (None, -1, 0):
            values = _values(shown, draws, weights, body, (sums, products, fused))
            codes = values.view(_INTEGERS[sums.itemsize]).numpy().view(f"u{sums.itemsize}")
            written = (
                any(
                    words.itemsize == root.itemsize and root in words[running.view(bool)]
                    for *_, words, running in noted
                )
                for noted, root in zip(notes, codes[-1], strict=True)
            )
            if all(written):
                how = "fused products, " if fused is not None else f"{products} products, "
                how = f"{how * bool((weights[leaves] != 1).any())}{sums} sums".replace("torch.", "")
                how = "sums of the matrix unit" if max(map(len, additions)) > 2 else how  # noqa: PLR2004
                whole = torch.equal(values[-1].to(out.dtype), results)
                return replace(shown, steps=_steps(shown, codes, notes), rounding=how, whole=whole)
    reason = "additions in this order have other bits; perhaps more than these terms is added"
    return WatchedSum(element=element, terms=what, reason=reason)


def _name(x: Tensor, name: str, owner: Tensor) -> str:
    """Return a view of a tensor in words: ``x[1, :]``."""
    at, index = x.storage_offset() - owner.storage_offset(), []
    for size, step in zip(owner.shape, owner.stride(), strict=True):
        along = size > 1 and step in x.stride()
        index.append(":" if along else str(at // max(step, 1)))
        at -= 0 if along else at // max(step, 1) * step
    return f"{name}[{', '.join(index)}]" if {*x.stride()} <= {*owner.stride()} else f"{name}[...]"


def _values(
    found: WatchedSum, x: Tensor, weights: Tensor, body: list[Instruction],
    rounding: tuple[torch.dtype, torch.dtype, int | None],
) -> Tensor:  # fmt: skip
    """Return terms x * weights, and the results of additions: [terms + additions, draws].

    ``rounding``: types of sums and of products, and which of two products is not rounded but fused into the sum.
    """
    from fmtsim.machine.ptx import matrix_instructions as unit  # with numba

    sums, products, fused = rounding
    exact = x.double() * weights  # 24 and 24 bits
    rounded = exact.to(products).to(sums)
    shapes = [unit.form(i.opcode) for i in body if i.opcode[0] == "mma" or i.opcode[:2] == ("wgmma", "mma_async")]
    results: list[Tensor] = []
    for addition in found.additions:
        new = [i for i in addition if i < found.count]
        old = [results[i - found.count] for i in addition if i >= found.count]
        if len(addition) > 2:  # noqa: PLR2004, one sum of a unit, with at most one result
            if not shapes or len(old) > 1 or sums != torch.float32:
                return torch.full((1, len(x)), torch.nan, dtype=sums)
            codes = [v.to(x.dtype).contiguous().view(_INTEGERS[x.itemsize]).numpy().view(f"u{x.itemsize}")[:, None]
                     for v in (x[:, new], weights[new].expand(len(x), -1))]  # fmt: skip
            addend = (old or [torch.zeros(len(x))])[0].numpy().view(np.uint32)[:, None, None]
            product = unit._product(codes[0], codes[1], addend, shapes[0])
            results.append(torch.from_numpy(product.view(np.float32)[:, 0, 0]))
        elif fused is not None and new:  # rounded to odd in float64, then once
            p, s = exact[:, new[fused]], (old or [rounded[:, new[-1 - fused]]])[0].double()
            total = p + s
            error = (p - (total - (total - p))) + (s - (total - p))
            even = (total.view(torch.int64) & 1 == 0) & (error != 0)
            results.append(torch.where(even, total.nextafter(error * torch.inf), total).to(sums))
        else:
            a, b = (*old, *(rounded[:, i] for i in new))
            results.append(a + b)
    return torch.cat([rounded.T, torch.stack(results)])


def _ways(found: WatchedSum, codes: np.ndarray, notes: Sequence[Note]) -> list[str]:
    """Return how the operands of each addition meet: where the codes of terms and results are in a block's notes."""
    makers: dict[int, int] = {}  # of a code: the thread that made it first
    ways: dict[tuple[int, int], str] = {}  # how a code came to a thread, empty where the thread made it
    for x, _, words, running in notes:
        low = words.astype(codes.dtype)
        for t in np.flatnonzero(running.view(bool) & np.isin(low, codes)).tolist():
            if x.opcode[0] == "shfl":
                ways[t, int(low[t])] = f"shuffle {getattr(x.operands[2], 'value', '')}".strip()
            elif x.opcode[0] == "ld" and "shared" in ".".join(x.opcode):
                ways[t, int(low[t])] = "shared memory"
            elif words.itemsize == codes.itemsize and (
                x.opcode[0] == "ld" or any("f" in part for part in x.opcode[1:])
            ):
                ways.setdefault((t, int(low[t])), "")
                makers.setdefault(int(low[t]), t)
    result = []
    for i, addition in enumerate(found.additions):
        thread, operands = makers.get(int(codes[found.count + i])), [int(codes[operand]) for operand in addition]
        others = {ways.get((thread or 0, code), "?" if code in makers else "") for code in operands} - {""}
        how = (
            "in a thread"
            if not others
            else ": ".join(["across threads", *[", ".join(sorted(others))] * ("?" not in others)])
        )
        result.append("matrix unit" if len(addition) > 2 else "not seen" if thread is None else how)  # noqa: PLR2004
    return result


def _steps(found: WatchedSum, codes: np.ndarray, notes: Sequence[list[Note]]) -> tuple[tuple[str, int, str, str], ...]:
    """Return the rows of the table; codes of 16 bits coincide, so that the most frequent answer of all draws counts."""
    seen = [_ways(found, codes[:, i], notes[i]) for i in range(1, 2 if codes.itemsize > 2 else _DRAWS)]  # noqa: PLR2004
    hows: list[tuple[str, int]] = []  # of each addition, and how many other ways its largest operand has behind it
    terms: dict[int, list[int]] = {i: [i] for i in range(found.count)}
    for i, addition in enumerate(found.additions):
        terms[found.count + i] = sorted(t for operand in addition for t in terms[operand])
        how = Counter(ways[i] for ways in seen).most_common(1)[0][0]
        largest = max(addition, key=lambda operand: len(terms[operand])) - found.count
        before = hows[largest] if largest >= 0 else (how, 0)
        hows.append((how, before[1] + (before[0] != how)))

    def text(operand: int, like: tuple[str, int]) -> str:
        """Return the additions of one kind behind an operand, from left to right."""
        parts: list[str] = []
        while operand >= found.count and hows[operand - found.count] == like:
            operands = found.additions[operand - found.count]
            new = [i for i in operands if i < found.count]
            if operands[2:]:  # at once
                parts.append(_runs(new))
            else:
                right = text(operands[1], like)
                parts.append(f"({right})" if " + " in right else right)
            if operands[2:] and len(new) == len(operands):
                return " + ".join(parts[::-1])
            operand = operands[0]
        return " + ".join([*parts, _runs(terms[operand])][::-1])

    rows = []
    for like in dict.fromkeys(sorted(hows, key=lambda how: how[1])):
        members = [found.count + i for i, how in enumerate(hows) if how == like]
        counts = [len(terms[i]) for i in members]
        span = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        example = text(min(members, key=lambda i: (-len(terms[i]), terms[i][0])), like)
        rows.append((like[0], len(members), span, example if len(example) < _WIDE else f"{example[:_WIDE]} ..."))
    return tuple(rows)


def _runs(places: list[int]) -> str:
    """Return places as text: ``{0-3, 512-515}``."""
    starts = [p for p in places if p - 1 not in places]
    ends = [p for p in places if p + 1 not in places]
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return texts[0] if len(places) == 1 else "{" + ", ".join([*texts[:2], *["..."] * (len(texts) > 2)]) + "}"  # noqa: PLR2004
