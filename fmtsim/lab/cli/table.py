# SPDX-License-Identifier: Apache-2.0
"""``fmtsim table``: the codes of a format with their bits and values."""

import argparse
import math
from typing import Any

from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.display import bit_fields, code_text, count_of, format_facts, text_table
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.lab.cli.arguments.table import ALL_BITS
from fmtsim.lab.cli.options import parse_int
from fmtsim.lab.cli.output import answer, format_table, print_text
from fmtsim.support.errors import CodeError, FormatError
from fmtsim.support.table import aligned, number_text

SHORT_BITS = 8  # up to here every code is printed


def run(arguments: argparse.Namespace) -> int:
    """Print the facts of a format and its codes: all of them, or the landmarks of a wide format."""
    fmt = get_format(arguments.format)
    if isinstance(fmt, LogTileFormat):
        raise FormatError(
            f"{fmt.name} has no table of codes: its values depend on the range of each tile; "
            f"try fmtsim explain 1 2 3 --format {fmt.name}"
        )
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    codes = [_check(parse_int(text), element) for text in arguments.code]
    every = not codes and element.bits <= (ALL_BITS if arguments.all else SHORT_BITS)
    if arguments.all and element.bits > ALL_BITS:
        raise FormatError(f"{element.name} has 2**{element.bits} codes; --all stops at {ALL_BITS} bits, leave it out")
    if every and not arguments.json:
        print_text(lambda: text_table(fmt, arguments.columns))
        return 0
    shown = {code: name_of(code, element) for code in (range(count_of(element)) if every else codes)} or landmarks(
        element
    )
    record = {"facts": dict(format_facts(fmt)), "codes": [_record(c, n, element) for c, n in shown.items()]}
    answer(arguments, record, lambda: _text(record, element, whole=not codes))
    return 0


def _text(record: dict[str, Any], element: ElementFormat, *, whole: bool) -> str:
    rows = [(code["hex"], code["bits"], number_text(code["value"]), code["is"]) for code in record["codes"]]
    table = format_table(("code", "bits", "value", "what it is"), rows, left=(0, 1, 3))
    parts = [*aligned(list(record["facts"].items())), "", table]
    if whole and element.bits <= ALL_BITS:
        parts.append(f"\n{count_of(element)} codes in all; --all prints each of them.")
    return "\n".join(parts)


def landmarks(fmt: ElementFormat) -> dict[int, str]:
    """Return the codes of a wide format that say most about it, in the order of codes."""
    if isinstance(fmt, FloatFormat):
        one = fmt.exponent_bias << fmt.mantissa_bits
        first_normal = (1 << fmt.mantissa_bits) if fmt.has_zero else 0
        subnormals = {1: "", first_normal - 1: ""} if fmt.has_subnormals and fmt.mantissa_bits else {}
        candidates = [0, *subnormals, first_normal, one, one + 1, fmt.max_code, fmt.inf_code, fmt.nan_code]
        found = {code for code in candidates if code is not None}
        if fmt.has_negative_zero:
            found |= {fmt.sign_mask, fmt.sign_mask | fmt.max_code}
    elif isinstance(fmt, IntFormat):
        lowest = fmt.min_code % (1 << fmt.bits)
        found = {0, 1, fmt.max_code, lowest, (1 << fmt.bits) - 1}
    elif isinstance(fmt, LogFormat):
        found = {0, 1, fmt.gamma, fmt.max_code, fmt.max_code + 1, 2 * fmt.max_code + 1}
    else:
        found = {0, 1, count_of(fmt) // 2, count_of(fmt) - 2, count_of(fmt) - 1}
    return {code: name_of(code, fmt) for code in sorted(found) if code < count_of(fmt)}


def name_of(code: int, fmt: ElementFormat) -> str:
    """Return what a code is: zero, subnormal, largest, infinity, NaN, and so on."""
    value = fmt.value(code)
    if math.isnan(value):
        return "NaN" if not isinstance(fmt, FloatFormat) or code == fmt.nan_code else "NaN, never the result of a cast"
    if math.isinf(value):
        return "infinity"
    if value == 0:
        return "zero" if math.copysign(1, value) > 0 else "negative zero"
    names = {fmt.max: "largest", fmt.min: "lowest", 1.0: "one"}
    if isinstance(fmt, IntFormat) and value < fmt.min:
        return "decodes, never the result of a cast"
    if isinstance(fmt, FloatFormat):
        names |= {fmt.min_normal: "smallest normal", 1.0 + fmt.eps: "next after one"}
        names |= {fmt.min_subnormal: "smallest subnormal"} if fmt.has_subnormals and fmt.mantissa_bits else {}
        if value not in names and abs(value) < fmt.min_normal:
            largest = fmt.min_normal - fmt.min_subnormal
            return "largest subnormal" if value == largest else "subnormal"
    return names.get(value, "")


def _check(code: int, fmt: ElementFormat) -> int:
    if not 0 <= code < count_of(fmt):
        last = count_of(fmt) - 1
        raise CodeError(f"code {code} is outside {fmt.name}; choose 0 to {last} (0x{last:X})")
    return code


def _record(code: int, name: str, fmt: ElementFormat) -> dict[str, Any]:
    return {
        "code": code,
        "hex": code_text(code, fmt),
        "bits": bit_fields(code, fmt),
        "value": fmt.value(code),
        "is": name,
    }
