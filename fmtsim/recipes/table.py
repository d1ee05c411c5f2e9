# SPDX-License-Identifier: Apache-2.0
"""Operands of a layer for the eye: as a table, in text and in HTML."""

from collections.abc import Iterable
from html import escape

from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.scaling import block_text
from fmtsim.gemm.layers.config import FORMULAS, LinearConfig, product_of
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.table import aligned, filled, html

HEADINGS = ("product", "operand", "of", "transforms", "format", "scale", "rounding", "gradient")
_SOURCES = {"original": "the tensor", "forward": "the forward codes", "requantised": "the forward codes, again",
            "stored": "stored codes"}  # fmt: skip


def operand_rows(config: LinearConfig) -> list[tuple[str, ...]]:
    """Return a row for each operand, and for each product that is rounded, cells in the order of ``HEADINGS``."""
    rows: list[tuple[str, ...]] = []
    for name, quantizer in config.operands.items():
        product = FORMULAS[product_of(name)]
        shown = product if not rows or rows[-1][0] != product and all(row[0] != product for row in rows) else ""
        rows.append((shown, name[0], *_cells(quantizer)))
        out = getattr(config, product_of(name)).out
        if name in ("w_f", "w_d", "x_w") and out.format is not None:
            rows.append(("", product.partition(" ")[0], "the product", *_cells(out)[1:]))
    return rows


def table_text(title: str, config: LinearConfig | None, facts: Iterable[tuple[str, str]]) -> str:
    """Return a table of operands under a title, and facts by name, as text."""
    lines = ["linear layers stay in high precision"]
    if config is not None:
        lines = aligned(filled(HEADINGS, operand_rows(config)))
    return "\n".join([title, *lines, *(f"{name}: {text}" for name, text in facts)])


def table_html(title: str, config: LinearConfig | None, facts: Iterable[tuple[str, str]]) -> str:
    """Return the same as HTML."""
    parts = [f"<b>{escape(title)}</b>"]
    parts += [] if config is None else [html([HEADINGS, *operand_rows(config)])]
    parts += [f"<div>{escape(name)}: {escape(text)}</div>" for name, text in facts]
    return "".join(parts)


def _cells(quantizer: Quantizer) -> tuple[str, ...]:
    if quantizer.source == "forward":
        return (_SOURCES["forward"], *("",) * 5)
    formats, scales, roundings = [], [], []
    step: Quantizer | None = quantizer
    while step is not None:
        formats.append("high precision" if step.format is None else step.format.name)
        scales.append(_scale(step))
        roundings.append("" if step.format is None else str(step.rounding.mode) + _bits(step))
        step = step.then
    transforms = "; ".join(map(str, quantizer.transforms))
    gradient = str(quantizer.gradient)
    return (
        _SOURCES[quantizer.source], transforms, " > ".join(formats), " > ".join(scales), " > ".join(roundings),
        "" if gradient == "straight through" else gradient,
    )  # fmt: skip


def _bits(quantizer: Quantizer) -> str:
    bits = quantizer.rounding.random_bits
    return f" ({bits} bits)" if bits is not None else ""


def _scale(quantizer: Quantizer) -> str:
    if quantizer.scaling is not None:
        return str(quantizer.scaling)
    fmt: Format | None = quantizer.format
    if not isinstance(fmt, BlockFormat):
        return "" if fmt is None else "none"
    return (
        f"{block_text(fmt.block)}, {fmt.scale.name} by {fmt.scale_rule}{', tensor scale' if fmt.tensor_scale else ''}"
    )
