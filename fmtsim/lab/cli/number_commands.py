# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim formats``, ``table``, ``cast``, ``explain`` and ``vectors``: formats, and how numbers get bits."""

import argparse
import fnmatch
import io
import math
from typing import Any

import fmtsim
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat, ScaledFormat, with_block
from fmtsim.formats.display import bit_fields, code_text, count_of, format_facts, text_table
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.formats.registry import format_to_dict, get_format, list_formats
from fmtsim.formats.scaling import block_text
from fmtsim.lab.cli.arguments.numbers import ALL_BITS
from fmtsim.lab.cli.options import parse_int, parse_numbers
from fmtsim.lab.cli.output import MISMATCH, answer, format_table, print_text
from fmtsim.rounding.modes import MODES, Mode, get_rounding
from fmtsim.rounding.oracle import encode_value
from fmtsim.support.errors import ArgumentError, CodeError, FmtsimError, FormatError, did_you_mean
from fmtsim.support.files import check_folder, write_file, write_folder
from fmtsim.support.table import aligned, number_text


def run_formats(arguments: argparse.Namespace) -> int:
    """Print one line a format, or their records as JSON; with ``--codes`` the codes of one."""
    if arguments.codes:
        # Print the facts of a format and its codes: all of them, or the landmarks of a wide format.
        fmt = get_format(arguments.pattern)
        if isinstance(fmt, PackedFormat):
            raise FormatError(
                f"{fmt.name} has no table of codes, which are bytes of blocks; fmtsim formats {fmt.name} shows it"
            )
        if isinstance(fmt, LogTileFormat):
            raise FormatError(
                f"{fmt.name} has no table of codes: its values depend on the range of each tile; "
                f"try fmtsim explain 1 2 3 --format {fmt.name}"
            )
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        codes = [_check(parse_int(text), element) for text in arguments.code]
        every = not codes and element.bits <= (ALL_BITS if arguments.all else SHORT_BITS)
        if arguments.all and element.bits > ALL_BITS:
            raise FormatError(
                f"{element.name} has 2**{element.bits} codes; --all stops at {ALL_BITS} bits, leave it out"
            )
        if every and not arguments.json:
            print_text(lambda: text_table(fmt, arguments.columns))
            return 0
        shown = {code: name_of(code, element) for code in (range(count_of(element)) if every else codes)} or landmarks(
            element
        )
        records = [
            {"code": code, "hex": code_text(code, element), "bits": bit_fields(code, element),
             "value": element.value(code), "is": name} for code, name in shown.items()
        ]  # fmt: skip
        record = {"facts": dict(format_facts(fmt)), "codes": records}
        answer(arguments, record, lambda: _table_text(record, element, whole=not codes))
        return 0
    arguments.pattern = "*" if arguments.pattern is None else arguments.pattern
    pattern = arguments.pattern.lower()
    matches = lambda fmt: any(fnmatch.fnmatchcase(name.lower(), pattern) for name in (fmt.name, *fmt.aliases))  # noqa: E731
    formats, note = [fmt for fmt in map(get_format, list_formats(arguments.kind)) if matches(fmt)], ""
    if not formats:
        fmt = _unlisted(arguments.pattern, arguments.kind)
        bits = layout(fmt) if isinstance(fmt, ScaledFormat) else f"bits {dict(fmt.facts())['bits']}"
        close = did_you_mean(fmt.name, list_formats())
        formats, note = [fmt], f"\n\n{fmt.name} is not in the list: it is what its name spells out, {bits}{close}"
    header = (
        "name", "kind", "bits", "max", "max with scales", "min normal", "smallest > 0", "special values and layout",
        "aliases",
    )  # fmt: skip
    rows = map(_format_row, formats)
    answer(arguments, list(map(_format_record, formats)), lambda: format_table(header, rows, left=(0, 1, 7, 8)) + note)
    return 0


def _unlisted(pattern: str, kind: str | None) -> Format:
    """Return the format that a name such as e3m3 spells out; a pattern or another kind is an error."""
    if not set(pattern) & set("*?["):
        fmt = get_format(pattern)
        if kind in (None, kind_of(fmt)):
            return fmt
    of_kind = f" of kind {kind}" if kind else ""
    raise ArgumentError(f"no format{of_kind} matches {pattern!r}; fmtsim formats without a pattern lists all")


def kind_of(fmt: Format) -> str:
    """Return the kind of a format as ``--kind`` names it."""
    return str(format_to_dict(fmt)["kind"])


def _format_record(fmt: Format) -> dict[str, Any]:
    record = format_to_dict(fmt)
    record["bits"] = fmt.bits
    record["default_overflow"] = fmt.default_overflow
    if isinstance(fmt, ScaledFormat):
        record["bits_per_element"] = fmt.bits_per_element
    if isinstance(fmt, BlockFormat):
        record["element_max"], record["element_min"] = fmt.element.max, fmt.element.min
    if not isinstance(fmt, LogTileFormat | PackedFormat):
        record["max"], record["min"] = fmt.max, fmt.min
    if isinstance(fmt, FloatFormat):
        record |= {"min_normal": fmt.min_normal, "min_subnormal": fmt.min_subnormal, "exponent_bias": fmt.exponent_bias}
    return record


def _format_row(fmt: Format) -> tuple[str, ...]:
    shown = fmt.element if isinstance(fmt, BlockFormat) else fmt
    largest = "-" if isinstance(shown, LogTileFormat | PackedFormat) else _short(shown.max)
    scaled = _short(fmt.max) if isinstance(fmt, BlockFormat) else ""
    normal, smallest = "-", "-"
    if isinstance(shown, FloatFormat):
        normal, smallest = _short(shown.min_normal), _short(shown.min_subnormal)
    elif isinstance(shown, IntFormat):
        smallest = _short(shown.eps / 2 if shown.half_offset else shown.eps)
    bits = fmt.bits_per_element if isinstance(fmt, ScaledFormat) else fmt.bits
    return (fmt.name, kind_of(fmt), f"{bits:g}", largest, scaled, normal, smallest, layout(fmt), ", ".join(fmt.aliases))


def _short(value: float) -> str:
    exact = number_text(value)
    return exact if len(exact) <= 10 else f"{value:.4g}"


def layout(fmt: Format) -> str:
    """Return a few words on what a format's name does not say: special values, or the block and its scale."""
    if isinstance(fmt, FloatFormat):
        nan = {"ieee": "NaN", "top": "one NaN", "negative_zero": "NaN at -0", "none": ""}[fmt.nan]
        words = ["" if fmt.signed else "unsigned", "Inf" if fmt.infinities else "", nan]
        words += ["" if fmt.has_zero else "no zero", "" if fmt.has_subnormals or not fmt.has_zero else "no subnormals"]
        return ", ".join(filter(None, words)) or "finite"
    if isinstance(fmt, BlockFormat):
        extra = (" x fp32 tensor scale" if fmt.tensor_scale else "") + (", zero point" if fmt.zero_point else "")
        return (
            f"{fmt.element.name} in {block_text(fmt.block)}, scale {fmt.scale.name} by {fmt.scaling.rule_text}{extra}"
        )
    if isinstance(fmt, LogTileFormat):
        return f"tile {block_text(fmt.block)}"
    if isinstance(fmt, PackedFormat):
        return dict(fmt.facts())["block"]
    if isinstance(fmt, IntFormat):
        return f"from {fmt.min:g}, step {fmt.eps:g}"
    return f"from {fmt.min:g}"


SHORT_BITS = 8  # up to here every code is printed


def _table_text(record: dict[str, Any], element: ElementFormat, *, whole: bool) -> str:
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
        codes = {code for code in candidates if code is not None}
        if fmt.has_negative_zero:
            codes |= {fmt.sign_mask, fmt.sign_mask | fmt.max_code}
    elif isinstance(fmt, IntFormat):
        lowest = fmt.min_code % (1 << fmt.bits)
        codes = {0, 1, fmt.max_code, lowest, (1 << fmt.bits) - 1}
    elif isinstance(fmt, LogFormat):
        codes = {0, 1, fmt.gamma, fmt.max_code, fmt.max_code + 1, 2 * fmt.max_code + 1}
    else:
        codes = {0, 1, count_of(fmt) // 2, count_of(fmt) - 2, count_of(fmt) - 1}
    return {code: name_of(code, fmt) for code in sorted(codes) if code < count_of(fmt)}


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


def run_cast(arguments: argparse.Namespace) -> int:
    """Print one line for each number, format and rounding; ``--rounding all`` shows every mode."""
    numbers = parse_numbers(arguments.numbers)
    formats = [_element(name) for name in arguments.formats]
    modes = MODES if arguments.rounding == "all" else (get_rounding(arguments.rounding).mode,)
    results = [
        result
        for fmt in formats
        for mode in modes
        for result in cast(numbers, fmt, mode, arguments.overflow, arguments.random_bits, arguments.seed)
    ]
    results += [result for fmt in formats for like in arguments.like for result in cast_like(numbers, fmt, like)]
    # By number first: the formats and roundings of one number are what one compares.
    count = len(numbers)
    ordered = [results[start] for index in range(count) for start in range(index, len(results), count)]
    answer(arguments, results, lambda: format_table(_CAST_HEADER, map(_cast_row, ordered), left=(1, 2, 4, 5)))
    return 0


_CAST_HEADER = ("input", "format", "rounding", "value", "code", "bits", "error", "relative", "below", "above")


def cast(
    numbers: list[float], fmt: ElementFormat, rounding: Mode, overflow: Overflow | None, random_bits: int | None,
    seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Round numbers and return a record for each; the oracle says why, and the engine is compared with it."""
    bits = random_bits if rounding == "stochastic" else None
    explanation = fmtsim.explain(numbers, fmt, rounding=rounding, overflow=overflow, generator=seed, random_bits=bits)
    if not explanation.engine_agrees:
        raise FmtsimError(f"the engine gives other codes of {fmt.name} than the oracle: a defect; try fmtsim verify")
    return [
        {
            **{name: getattr(element, name) for name in ("input", "value", "code", "hex", "bits", "error")},
            **{name: getattr(element.decision, name) for name in ("below", "above")},
            "format": fmt.name, "rounding": rounding, "relative_error": element.relative_error,
        }
        for element in explanation.elements
    ]  # fmt: skip


def cast_like(numbers: list[float], fmt: ElementFormat, like: str) -> list[dict[str, Any]]:
    """Round numbers as another library does, and return a record for each as ``cast`` does; NaN has no error."""
    import torch

    from fmtsim.casts.profile import get_profile

    # Python's numbers are float64, which some libraries do not take
    dtype = torch.float64 if "fp64" in get_profile(like, fmt)[0].inputs else torch.float32
    values = fmtsim.quantize(torch.tensor(numbers, dtype=dtype), fmt, like=like).tolist()
    records = []
    for x, value, record in zip(numbers, values, cast(numbers, fmt, "nearest_even", None, None, 0), strict=True):
        code = encode_value(value, fmt, get_rounding("nearest_even"), "ieee" if fmt.has_nan else "saturate")
        error = value - x if math.isfinite(value) and math.isfinite(x) else None
        relative = None if error is None or x == 0 else error / abs(x)
        code_facts = {"code": code, "hex": code_text(code, fmt), "bits": bit_fields(code, fmt)}
        records.append(record | code_facts | {"value": value, "error": error, "relative_error": relative,
                                              "rounding": f"like {like}"})  # fmt: skip
    return records


def _cast_row(record: dict[str, Any]) -> tuple[str, ...]:
    error, relative = record["error"], record["relative_error"]
    return (
        number_text(record["input"]), record["format"], record["rounding"], number_text(record["value"]), record["hex"],
        record["bits"], "-" if error is None else f"{float(error):+.4g}" if error else "0",
        "-" if relative is None else f"{relative:+.3%}" if relative else "0", number_text(record["below"]),
        number_text(record["above"]),
    )  # fmt: skip


def _element(name: str) -> ElementFormat:
    fmt = get_format(name)
    if isinstance(fmt, ScaledFormat):
        explain, python = f"fmtsim explain NUMBER --format {fmt.name}", f"fmtsim.quantize(x, {fmt.name!r})"
        raise FormatError(
            f"{fmt.name} scales whole blocks, so a number alone has no cast; "
            f"try {python if isinstance(fmt, PackedFormat) else explain}"
            + (f", or the element: --to {fmt.element.name}" if isinstance(fmt, BlockFormat) else "")
        )
    return fmt


_EXPLAIN_OPTIONS = ("rounding", "overflow", "random_bits", "block_size", "scale_rule")
DEFECT = 1


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the explanation; exit with 1 where the engine disagrees with the oracle."""
    import torch

    numbers = parse_numbers(arguments.numbers)
    options: Any = {name: getattr(arguments, name) for name in _EXPLAIN_OPTIONS}
    if arguments.like:
        x = torch.tensor(numbers, dtype=getattr(torch, arguments.dtype))
        steps = fmtsim.explain(x, arguments.format, like=arguments.like, **options)
        answer(arguments, steps.to_dict(), lambda: str(steps))
        return 0
    x = torch.tensor(numbers, dtype=getattr(torch, arguments.dtype))
    explanation = fmtsim.explain(x, arguments.format, generator=arguments.seed, **options)
    answer(arguments, explanation.to_dict(), lambda: str(explanation))
    return 0 if explanation.engine_agrees else DEFECT


def run_identify_cast(arguments: argparse.Namespace) -> int:
    """Name what fits and print it; 1 where nothing fits."""
    import torch

    from fmtsim.lab.cli.products import read_tensor

    x, y = read_tensor(arguments.x, arguments.dtype), read_tensor(arguments.result, None, codes=True)
    scale = None if arguments.scale is None else read_tensor(arguments.scale, None, codes=True)
    result = fmtsim.identify_cast(x, y, scale=scale, format=arguments.format)
    for run in arguments.refine:
        result = result.refine(read_tensor(run[0], arguments.dtype), read_tensor(run[1], None, codes=True))
    if arguments.probe:
        content = io.BytesIO()
        torch.save({"x": result.probe()}, content)
        write_file(arguments.probe, content.getvalue())
    answer(arguments, result.to_dict(), lambda: str(result).replace(".explanations", "--json"))
    return 0 if result.groups else MISMATCH


def run_vectors(arguments: argparse.Namespace) -> int:
    """Write a folder of golden files, and print what is in it; with ``--check`` compare a kernel's results with it."""
    if arguments.check is not None:
        # what a kernel did differently; exit with 1 where there is anything
        import torch

        from fmtsim.lab.cli.result_commands import load_tensors
        from fmtsim.lab.verify.vectors import PARTS, check_part, read_vectors

        vectors, parts = read_vectors(arguments.check), []
        for text, names in ((arguments.encode, PARTS), (arguments.decode, ("decoded",))):
            tensors = load_tensors(text) if text else {}
            named = {name: read for name, read in tensors.items() if name in names}
            if len(tensors) == 1:
                named = named or dict(zip(names, tensors.values(), strict=False))
            if text and not named:
                raise ArgumentError(f"{text} holds {', '.join(tensors)}; name a tensor {names[0]}, or pass {text}:NAME")
            parts += [check_part(vectors, name, torch.as_tensor(read()), arguments.all) for name, read in named.items()]
        equal = not any(part["mismatches"] for part in parts)
        record = {"equal": equal, "parts": parts}
        answer(arguments, record, lambda: "\n".join(line for p in parts for line in _part_lines(p)))
        return 0 if equal else MISMATCH
    from fmtsim.lab.verify.vectors import make_vectors

    check_folder(arguments.out)
    fmt = with_block(get_format(arguments.format), arguments.block_size, arguments.scale_rule)
    options = {name: getattr(arguments, name) for name in ("rounding", "overflow", "random_bits")}
    vectors, files = make_vectors(fmt, options | {"generator": arguments.seed})
    paths = list(map(str, write_folder(arguments.out, files)))
    cases = {name: last - first + 1 for name, (first, last) in vectors.groups.items()}
    text = ", ".join(f"{count} {name}" for name, count in cases.items())
    answer(arguments, {"files": paths, "cases": cases}, lambda: f"{text}\nwrote {', '.join(paths)}")
    return 0


def _part_lines(part: dict[str, Any]) -> list[str]:
    nan = f", {part['other_nan']:,} of them NaN of other bits" if part["other_nan"] else ""
    lines = [f"{part['part']}: {part['compared'] - part['mismatches']:,} of {part['compared']:,} match{nan}"]
    lines += [f"differ: {', '.join(f'{n:,} {group}' for group, n in part['groups'].items() if n)}"] * bool(
        part["mismatches"]
    )
    for one in part["first"]:
        number = f"input {one['input']} = {number_text(one['number'])}, " if "input" in one else ""
        value = f" ({number_text(one['value'])})" if "value" in one else ""
        pair = f"{number}expected {one['expected']}{value}, actual {one['actual']}"
        lines += [f"{one['group']} {one['index']}: {pair}", *[f"  {one['rule']}"] * bool(one["rule"])]
    return lines
