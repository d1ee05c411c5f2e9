# SPDX-License-Identifier: Apache-2.0
"""Which products of a model its target leaves out or adds in an order that is a guess."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fmtsim.gemm.model_layers import PASSES
from fmtsim.gemm.products.resolver import resolve
from fmtsim.gemm.targets.doubts import padded_k, products_left_out, without_doubts
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis.invariance import Model, check_rows, list_products, operand_formats
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import BASES
from fmtsim.support import table

TOKENS = tuple(1 << i for i in range(14))
_SHOWN = 6  # numbers of tokens in a line
_HEADER = ("layer", "product", "operands", "tokens", "finding")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedCall:
    """Say what a target makes of one product."""

    layer: str  # name of the layers, or their outputs and inputs
    product: str  # ``"forward"``, ``"dgrad"`` or ``"wgrad"``
    tokens: int  # rows of the layers' input
    call: GemmCall  # what the library sees
    basis: str  # the evidence for the order, as in ``explain_mm``
    left_out: int  # how many products at the end of every sum are never multiplied
    # the K, filled up with zeros, of which nothing is left out; None where nothing is, or none is known
    padded_k: int | None
    source: str  # where the order comes from

    @property
    def finding(self) -> str:
        """What is wrong with the call, empty where nothing is."""
        if not self.left_out:
            return "the order is a guess" if self.basis == "guess" else ""
        step = "" if self.padded_k is None else f"; pad K to {self.padded_k}"
        doubt = " (a guess)" if self.basis == "guess" else ""
        return f"leaves out {self.left_out} of {self.call.k} products{doubt}{step}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        names = ("layer", "product", "tokens", "basis", "left_out", "padded_k", "source")
        sizes = {name: getattr(self.call, name) for name in ("operation", "m", "n", "k", "batch", "bias")}
        return {name: getattr(self, name) for name in names} | sizes | {"operands": operand_formats(self.call)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GemmScan(table.Result):
    """Hold what ``scan_gemm`` found; ``print`` shows what is wrong as a table, notebooks one in HTML."""

    calls: tuple[ScannedCall, ...]  # every call that was looked at

    @property
    def left_out(self) -> tuple[ScannedCall, ...]:
        """The calls whose last products are never multiplied."""
        return tuple(x for x in self.calls if x.left_out)

    @property
    def guesses(self) -> tuple[ScannedCall, ...]:
        """The calls whose order is a guess."""
        return tuple(x for x in self.calls if x.basis == "guess")

    def _content(self) -> tuple[table.Rows, str]:
        tokens_by_row: dict[tuple[str, ...], list[int]] = {}
        for x in sorted(self.calls, key=lambda x: not x.left_out):
            if x.finding:
                tokens_by_row.setdefault((x.layer, x.product, operand_formats(x.call), x.finding), []).append(x.tokens)
        rows: list[tuple[str, ...]] = [_HEADER]
        for (*names, finding), tokens in tokens_by_row.items():
            more = f" ... {tokens[-1]} ({len(tokens)})" if len(tokens) > _SHOWN else ""
            rows.append((*names, ", ".join(map(str, tokens[:_SHOWN])) + more, finding))
        counts = Counter(x.basis for x in self.calls)
        bases = ", ".join(f"{counts[basis]} by {words}" for basis, words in BASES.items() if counts[basis])
        total = f"{len(self.calls)} calls, orders: {bases}; {len(self.left_out)} leave products out"
        return table.Rows(rows), total

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "calls": len(self.calls), "bases": dict(Counter(x.basis for x in self.calls)),
            "left_out": [x.to_dict() for x in self.left_out],
            "guesses": [x.to_dict() for x in self.guesses],
        }  # fmt: skip


def scan_gemm(
    model: Model, target: Any = None, tokens: Iterable[int] = TOKENS, *, dtypes: Sequence[str] = ("bf16",),
    passes: Sequence[str] = PASSES,
) -> GemmScan:  # fmt: skip
    """Look through a model's linear layers for products that the library drops, and for orders that are guesses.

    Nothing is multiplied.

    Args:
        model, target, dtypes: As in ``batch_invariance``.
        tokens: Rows of the layers' input. They are the K of ``wgrad``, which layers in FP8 pad to a multiple of 16.
        passes: ``"forward"`` (y = x w^T), ``"dgrad"`` (dx = g w), ``"wgrad"`` (dw = g^T x), or some of them.

    Raises:
        ArgumentError: No such model, target, dtype or pass, or tokens below 1.

    >>> scan_gemm([(4096, 14336, False)], "h200", [512], dtypes=["fp8_slow"], passes=["forward"]).left_out
    ()
    """
    asked = check_rows("scan_gemm", "tokens", tokens)
    products = list_products("scan_gemm", model, target, dtypes, passes)
    calls = []
    for product, rows in itertools.product(products, asked):
        call = product.call(rows)
        with without_doubts():  # guesses and dropped products are what is reported here
            spec = resolve(call)
        lost = products_left_out(call.k, spec.plan)
        padded = padded_k(get_target(call.target), call.facts()) if lost and call.target is not None else None
        calls.append(ScannedCall(
            layer=product.layer, product=product.product, tokens=rows, call=call, basis=spec.basis, left_out=lost,
            padded_k=padded, source=spec.plan.source,
        ))  # fmt: skip
    return GemmScan(calls=tuple(calls))
