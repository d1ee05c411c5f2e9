# SPDX-License-Identifier: Apache-2.0
"""What ``bisect`` returns: where two runs of a model part, and how far the difference grows."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS
from fmtsim.lab.analysis.comparison import Comparison
from fmtsim.lab.analysis.trace import AGAIN, Operation
from fmtsim.support import table

Kind = Literal["", "operation", "parameter", "buffer", "input", "code"]
_SAID = {
    "operation": "its inputs are equal, its output is not",
    "parameter": "the runs began with another parameter",
    "buffer": "the runs began with another buffer",
    "input": "the runs were given other inputs",
    "code": "made by code outside of these operations, before this one",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bisection(table.Tabular):
    """Say where two runs part; ``print`` shows it, notebooks a table.

    Args:
        kind: ``"operation"``: an operation with equal inputs whose output differs. ``"parameter"``, ``"buffer"`` or
            ``"input"``: what the first run read is not what the second one read. ``"code"``: an operation's input
            differs although all operations before it agree, so that code between them, or the loss, made the
            difference. Empty where no bit differs.
        a, b: The operation in each run; None where no bit differs.
        tensor: Name of its first tensor that differs.
        before: The last operation before it whose bits agree, None where it is the first.
        comparison: That tensor of both runs (actual is the first run's), None where it was not kept.
        note: Why there is no comparison, or what else has to be known.
        compared: Operations that both runs have.
        different: How many of these have other outputs.
        alone: Operations that one run alone has, of either: those inside layers that are converted in one alone.
        losses: Of both runs, None where there is none or where batches differ in size.
        gradients: How many parameters' gradients differ, and of how many; (0, 0) where batches differ in size.
        worst: The parameter whose gradients differ most, and the norm of their difference over that of the second run;
            None where no gradients were kept.
    """

    kind: Kind = ""
    a: Operation | None = None
    b: Operation | None = None
    tensor: str = ""
    before: Operation | None = None
    comparison: Comparison | None = None
    note: str = ""
    compared: int = 0
    different: int = 0
    alone: tuple[int, int] = (0, 0)
    losses: tuple[float, float] | None = None
    gradients: tuple[int, int] = (0, 0)
    worst: tuple[str, float] | None = None

    @property
    def equal(self) -> bool:
        """Whether no bit differs that both runs have."""
        return not self.kind

    def _content(self) -> Iterable[table.Facts]:
        return (table.Facts(self._facts()),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        found = None if self.comparison is None else self.comparison.to_dict()
        worst = None if self.worst is None else list(self.worst)
        each = {name: None if x is None else dataclasses.asdict(x) for name, x in (("a", self.a), ("b", self.b))}
        plain = {"compared": self.compared, "different": self.different, "alone": list(self.alone), "note": self.note}
        grown = {"losses": self.losses and list(self.losses), "gradients": list(self.gradients), "worst": worst}
        where = {"tensor": self.tensor, "before": None if self.before is None else str(self.before)}
        return {"equal": self.equal, "kind": self.kind, **each, **where, "comparison": found, **plain, **grown}

    @property
    def inside_modules(self) -> bool:
        """Whether the operation that was found is not code between others: False of a module that calls others, too."""
        calls = self.before is not None and self.a is not None and is_call(self.a) and self.kind == "operation"
        if calls and self.before is not None and self.a is not None:
            return not _below(self.before.layer, self.a.layer)
        return self.kind != "code"

    def _facts(self) -> list[tuple[str, str]]:
        alone = [f"{n} in {run} alone" for n, run in zip(self.alone, "ab", strict=True) if n]
        compared = "; ".join([f"{self.compared:,} operations are in both runs", *alone])
        facts = [("result", "no bit differs" if self.equal else str(self.a)), ("compared", compared)]
        if self.a is not None and self.b is not None:
            facts[:1] = self._where(self.a, self.b)
        if self.note:
            facts.append(("note", self.note))
        return [*facts, *self._grown()] if not self.equal else facts

    def _where(self, a: Operation, b: Operation) -> Iterator[tuple[str, str]]:
        yield "first difference", f"{a}, operation {a.index}"
        own = ", in code of its own" if not self.inside_modules and self.kind == "operation" else ""
        keys = [[text for name, text in one.facts if name == "random key"] for one in (a, b)]
        said = _SAID[self.kind] if keys[0] == keys[1] else "its inputs are equal, its random key is not"
        yield "what", f"{self.tensor}: {said}{own}"
        if a.operation != b.operation:
            yield "in b", str(b)
        if self.before is not None:
            yield "last equal", str(self.before)
        if self.comparison is not None and self.comparison.first is not None:
            c, first = self.comparison, self.comparison.first
            pairs = zip("ab", first.hex, first.values, strict=True)
            values = ", ".join(f"{run} {code} = {value!r}" for run, code, value in pairs)
            yield "values", f"at {list(first.index)}: {values}"
            ulp = "" if c.max_ulp is None else f", at most {c.max_ulp:,} ulp apart (median {c.median_ulp:,})"
            yield "how many", f"{c.mismatches:,} of {c.count:,}{ulp}"
        others = dict(b.facts)
        for name, text in a.facts:
            other = others.pop(name, "")
            yield from [(name, text)] if text == other else [(f"{name}, a", text), (f"{name}, b", other or "none")]
        yield from ((f"{name}, b", text) for name, text in others.items())

    def _grown(self) -> Iterator[tuple[str, str]]:
        yield "grows to", f"{self.different:,} of {self.compared:,} operations have other outputs"
        if self.losses is not None:
            x, y = self.losses
            relative = "" if x == y or not y or not math.isfinite(x - y) else f", {abs(x - y) / abs(y):.3g} relative"
            yield "loss", f"{x!r} in both" if x == y else f"a {x!r}, b {y!r}{relative}"
        if self.gradients[1]:
            text = f"{self.gradients[0]:,} of {self.gradients[1]:,} differ"
            if self.worst is not None:
                text += f", most that of {self.worst[0]}: by {self.worst[1]:.3g} of its norm"
            yield "gradients", text


def _below(layer: str, other: str) -> bool:
    """Say whether a module lies inside another one."""
    return layer != other and (not other or layer.startswith(f"{other}."))


def is_call(one: Operation) -> bool:
    """Say whether an operation is a module's call, which both runs of a model have."""
    inside = one.operation in (*OPERANDS, *PRODUCTS) or "::" in one.operation or one.operation.startswith(AGAIN)
    return one.direction == "forward" and not inside
