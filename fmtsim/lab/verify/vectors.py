# SPDX-License-Identifier: Apache-2.0
"""Conformance vectors: inputs on which kernels go wrong, and the codes, scales and values that they must give."""

import itertools
import json
import math
import pkgutil
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor

from fmtsim.casts.arguments import cast_options, refuse_others, spelled
from fmtsim.casts.quantize import decode, encode
from fmtsim.casts.stored import restore
from fmtsim.formats.block import FP32, BlockFormat, Format, PackedFormat, ScaledFormat
from fmtsim.formats.display import count_of
from fmtsim.formats.element import ElementFormat, FloatFormat
from fmtsim.formats.registry import format_from_json, format_to_json, get_format
from fmtsim.formats.tensor_file import read_tensors, stored_tensor, tensor_content
from fmtsim.lab.explain import Element, explain
from fmtsim.lab.explain.explain_cast import neighbours, turning_point
from fmtsim.lab.verify.outcome import SPECIALS, beyond
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, FormatError
from fmtsim.support.files import Content, write_folder

FILE, PARTS = "vectors.safetensors", ("codes", "scales", "tensor_scale", "offsets")
WIDTH = 32  # elements of a block that is a row or a tensor
_MAX, _TINY, _MIN = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 2.0**-149


class Vectors(NamedTuple):
    """The vectors of a folder: format, encode's options, first and last case of each group, tensors by name."""

    format: Format
    options: dict[str, Any]
    groups: dict[str, list[int]]
    tensors: dict[str, Tensor]

    def __repr__(self) -> str:
        groups = ", ".join(f"{last - first + 1:,} {name}" for name, (first, last) in self.groups.items())
        return f"Vectors({self.format.name}, {self.options}: {groups}; tensors {', '.join(self.tensors)})"


def make_vectors(fmt: Format, options: dict[str, Any]) -> tuple[Vectors, dict[str, Content]]:
    """Return vectors and their files by name; the same format and options of ``encode`` give the same bytes."""
    scaled = isinstance(fmt, ScaledFormat)
    cases = {name: x for name, x in (_blocks(fmt) if scaled else _elements(fmt)).items() if len(x)}  # type: ignore[arg-type]
    ends = list(itertools.accumulate(map(len, cases.values())))
    groups = {name: [end - len(cases[name]), end - 1] for name, end in zip(cases, ends, strict=True)}
    x, join = torch.cat(list(cases.values())), torch.stack if scaled else torch.cat
    calls = [encode(call, fmt, pad=True, **options) for call in (x if scaled else [x])]
    parts = {name: [getattr(call, name) for call in calls] for name in PARTS} | {"decoded": [c.decode() for c in calls]}
    tensors = {"input": x} | {name: join(part) for name, part in parts.items() if part[0] is not None}
    vectors = Vectors(fmt, options, groups, tensors)
    facts = {"format": format_to_json(fmt), "casts": f"{json.dumps(options)}\n{json.dumps(groups)}"}
    data = tensor_content({name: stored_tensor(part) for name, part in tensors.items()}, facts)
    # Every bit pattern in hexadecimal; rows of zeros in tiles are left out.
    x, lines = vectors.tensors["input"], list[str]()
    tensors = vectors.tensors | {"codes": unpacked(vectors, vectors.tensors["codes"])}
    for name, (first, last) in vectors.groups.items():
        lines.append(f"# {name}")
        for case in range(first, last + 1):
            rows = x[case].any(-1) if x.dim() == 3 and x.shape[1] > 1 else ...
            cut = lambda part: part[case][rows] if part.shape[:2] == x.shape[:2] else part[case]  # noqa: B023, E731
            lines.append("; ".join([str(case), *(f"{name} {_hex(cut(part))}" for name, part in tensors.items())]))
    return vectors, {FILE: data, "vectors.txt": "\n".join(lines) + "\n", "README.md": _readme(vectors)}


def read_vectors(folder: Path) -> Vectors:
    """Read a folder that ``make_vectors`` filled; raise DataError where it is missing or damaged."""
    stored, metadata = read_tensors(folder / FILE)
    try:
        fmt, options, groups = format_from_json(metadata["format"]), *map(json.loads, metadata["casts"].splitlines())
        tensors = {name: part.tensor() for name, part in stored.items()}
        return Vectors(fmt, options, groups, {name: tensors[name] for name in ("input", "codes", "decoded", *tensors)})
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / FILE} holds no vectors ({error}); write it by fmtsim vectors") from None


def _elements(fmt: ElementFormat) -> dict[str, Tensor]:
    """Return the numbers of each group in float32, 1-D; vectors.md says what groups are for."""
    values = _values(fmt)
    zeros = [part * min(abs(value) for value in values if value) for part in (0.25, 0.5, 0.75, 1.0)]
    ends = [*values[-1:], *beyond(fmt, values), _MAX]
    low = [v for v in values if isinstance(fmt, FloatFormat) and fmt.has_subnormals and 0 < abs(v) <= fmt.min_normal]
    return {
        "values": torch.tensor(values), "ties": _beside(_ties(fmt)), "subnormals": _beside(low),
        "underflow": _beside([*zeros, *(-x for x in zeros)]), "overflow": _beside([*ends, *(-x for x in ends)]),
        "specials": torch.tensor([*SPECIALS, *(sign * end for sign in (1, -1) for end in (_MAX, _TINY, _MIN))]),
    }  # fmt: skip


def _values(fmt: ElementFormat) -> list[float]:
    """Return finite values in order: all up to 8 bits, of wider formats those whose codes stand beside powers of 2."""
    count = count_of(fmt)
    edges = [edge for k in range(fmt.bits) for edge in (1 << k, count // 2 + (1 << k), count - (1 << k))]
    seams = {edge + step for edge in edges for step in (-1, 0, 1)}
    values = {fmt.value(code) for code in (range(count) if count <= 256 else seams) if 0 <= code < count}
    return sorted(value for value in values if _MIN <= abs(value) <= _MAX or value == 0)


def _ties(fmt: ElementFormat) -> list[float]:
    """Return where rounding to nearest turns over between each value and the next one, as float32 has it."""
    ties = []
    for low in _values(fmt):
        high = neighbours(low, fmt)[1]
        if high is not None and math.isfinite(high):
            tie = torch.tensor(float(turning_point(Fraction(low), Fraction(low), Fraction(high), fmt))).item()
            ties += [tie] if low < tie < high else []
    return ties


def _beside(points: list[float]) -> Tensor:
    """Return numbers in float32 with both neighbours there, each once."""
    x = torch.tensor(points)
    return torch.cat([x, *(x.nextafter(torch.full_like(x, end)) for end in (-math.inf, math.inf))]).unique()


def _blocks(fmt: ScaledFormat) -> dict[str, Tensor]:
    """Return the numbers of each group in float32, ``[cases, rows, K]``, each case one block.

    In formats of two levels another block follows it, whose amax gives the tensor a scale of 1.
    """
    outer, inner = fmt.block[0] or 1, fmt.block[1] or WIDTH
    element, scale, level = None, FP32, None
    if isinstance(fmt, BlockFormat):
        element, scale, level = fmt.element, fmt.scale, fmt.scaling.tensor
    top = 1.0 if element is None else element.max

    def stacked(rows: list[Tensor]) -> Tensor:
        x = torch.zeros(len(rows), outer, inner if level is None else 2 * inner)
        for case, row in zip(x, rows, strict=True):
            case[0, : len(row)] = row
            case[0, inner : inner + 1] = top * (level.top or scale.max) if level else 0.0
        return x

    def of_amax(amaxes: Tensor) -> Tensor:
        amaxes = amaxes[(amaxes > 0) & amaxes.isfinite()]
        x = stacked([(torch.arange(inner) * 7 % 17 - 8) / 16 * amax for amax in amaxes])
        for number, amax in enumerate(amaxes):  # in the last row, so that a kernel has to see the whole block
            x[number, -1, number * 5 % inner] = amax * (-1) ** number
        return x

    # 1. amax where rules change the scale, in every binade of float32, or one in 16 for large blocks
    significands = [1.0, 2 * math.frexp(top)[0]]
    significands += [2 - 2.0 ** -(element.mantissa_bits + 1)] if isinstance(element, FloatFormat) else []
    amaxes = _beside([s * 2.0**e for e in range(-149, 128, 1 if outer * inner <= 128 else 16) for s in significands])
    groups = {"scale_boundaries": of_amax(amaxes[amaxes >= _TINY]), "tiny": of_amax(amaxes[amaxes < _TINY])}
    ties = _ties(scale) if scale.bits <= 8 and scale.mantissa_bits else []
    groups["scale_ties"] = of_amax(_beside([tie * top for tie in ties]))
    # 2. ends of the range of scales
    smallest = min(value for value in _values(scale) if value > 0) * top
    groups["underflow"] = of_amax(_beside([part * smallest for part in (0.25, 0.5, 0.75, 1.0)]))
    groups["overflow"] = of_amax(_beside([top * scale.max, top * scale.max * 2, _MAX]))
    # 3. elements under a scale of 1, which the amax in front of them gives
    if element is not None and inner > 1:
        one = torch.tensor([2.0 ** math.floor(math.log2(top)) if fmt.scale_rule == "ceil" else top])  # type: ignore[union-attr]
        for name in ("ties", "subnormals"):
            chunks = (x := _elements(element)[name])[x.abs() <= one].split(inner - 1)
            groups[name] = stacked([torch.cat([one, chunk]) for chunk in chunks if len(chunk)])
    # 4. zeros; NaN and infinities, which ggml's formats do not encode
    numbers, zeros = (torch.arange(inner) - inner / 2) / inner, torch.zeros(inner)
    signs = (-1.0) ** torch.arange(inner)
    groups["zeros"] = stacked([zeros, -zeros, zeros * signs, numbers.where(signs > 0, -zeros)])
    single, finite = torch.arange(inner) == inner // 3, isinstance(fmt, PackedFormat) and not fmt.has_nan
    rows = [
        (torch.where(single, s, numbers), torch.where(single, s, zeros), zeros + s)
        for s in SPECIALS[: 0 if finite else 3]
    ]
    return groups | {"nonfinite": stacked([x for three in rows for x in three])}


def unpacked(vectors: Vectors, codes: Tensor) -> Tensor:
    """Return codes as files hold them, one an element; those of packed formats stay bytes of blocks."""
    packed, x = isinstance(vectors.format, PackedFormat), vectors.tensors["input"]
    return codes if packed or codes.shape == x.shape else restore(codes, None, vectors.format, -1, x.shape)[0]


def _readme(vectors: Vectors) -> str:
    fmt, tensors = vectors.format, vectors.tensors
    shapes = "\n".join(f"- `{name}` {str(x.dtype)[6:]} {list(x.shape)}" for name, x in tensors.items())
    groups = "\n".join(f"- `{name}`: cases {first} to {last}" for name, (first, last) in vectors.groups.items())
    options = ", ".join(f"{name} {value}" for name, value in vectors.options.items() if value is not None)
    facts = "\n".join(f"- {heading}: {text}" for heading, text in fmt.facts())
    text = (pkgutil.get_data(__package__, "vectors.md") or b"").decode()
    return text.format(name=fmt.name, bits=fmt.bits, facts=facts, options=options, shapes=shapes, groups=groups)


def check_part(vectors: Vectors, part: str, actual: Tensor, every: bool = False) -> dict[str, Any]:
    """Compare what a kernel gave with a tensor of the files: how much differs, in which groups, and where first.

    Two NaN match; NaN codes of other bits are counted apart. ``every`` lists all differences of each group.

    Raises:
        ArgumentError: There is no such tensor, or it has another shape or kind of dtype.
    """
    fmt, x, expected = vectors.format, vectors.tensors["input"], vectors.tensors.get(part)
    if expected is None:
        raise ArgumentError(f"vectors of {fmt.name} have no {part}; pass {', '.join(vectors.tensors)}")
    shapes = [list(expected.shape)] + [list(x.shape)] * (part == "codes" and not isinstance(fmt, PackedFormat))
    small = actual.element_size() == 1 and part != "decoded"  # float8 and int8 hold the bits of uint8
    actual = actual.view(torch.uint8) if small else actual
    if list(actual.shape) not in shapes or actual.is_floating_point() != expected.is_floating_point():
        allowed = f"{str(expected.dtype)[6:]} {' or '.join(map(str, shapes))}"
        raise ArgumentError(f"{part} is {str(actual.dtype)[6:]} {list(actual.shape)}; pass {allowed}")
    if part == "codes":
        mask = (1 << min(fmt.bits, 63)) - 1
        expected, actual = (unpacked(vectors, codes).long() & mask for codes in (expected, actual))
    actual = actual.to(expected.dtype)
    element, pair_of_nan = getattr(fmt, "element", fmt), actual.isnan() & expected.isnan()
    if part == "codes" and isinstance(element, FloatFormat):
        pair_of_nan = decode(actual, element).isnan() & decode(expected, element).isnan()
    unequal = _bits(actual) != _bits(expected)
    other = unequal & ~pair_of_nan
    digits, differences = (-(-fmt.bits // 4) if part == "codes" else 0), []
    for group, (first, last) in vectors.groups.items():
        for number, (offset, *place) in enumerate(other[first : last + 1].nonzero()[: None if every else 1].tolist()):
            index = (first + offset, *place)
            pair: dict[str, Any] = {"expected": _hex(expected[index], digits), "actual": _hex(actual[index], digits)}
            if x.shape == expected.shape:
                values = {"number": x[index].item(), "value": vectors.tensors["decoded"][index].item()}
                pair |= {"input": _hex(x[index]), **values}
            pair["rule"] = "" if number else _rule(vectors, index, of_scale=x.shape != expected.shape)
            differences.append({"group": group, "index": list(index), **pair})
    groups = {group: int(other[first : last + 1].sum()) for group, (first, last) in vectors.groups.items()}
    counts = {"compared": other.numel(), "mismatches": sum(groups.values()), "groups": groups}
    return {"part": part, **counts, "other_nan": int((unequal & pair_of_nan).sum()), "first": differences}


@spelled
def vectors(
    format: Any, folder: str | Path | None = None, *more: Never, rounding: Any = None, overflow: Any = None,
    random_bits: int | None = None, generator: Any = 0, **others: Never,
) -> Vectors:  # fmt: skip
    """Return inputs of a format on which kernels go wrong, with their codes and values; write them into a folder.

    ``fmtsim vectors --check`` compares a kernel's results with the folder. ``rounding``, ``overflow``, ``random_bits``
    and ``generator`` are those of ``fmtsim.encode``, whose errors they raise; the seed is 0 unless it is told.

    >>> vectors("e2m1").tensors["codes"][:3].tolist()  # two codes a byte
    [239, 205, 171]
    """
    refuse_others(vectors, more, others)
    options = {"rounding": rounding, "overflow": overflow, "random_bits": random_bits}
    if isinstance(format, Quantizer):
        format, rounding, overflow, like = cast_options(format, **options)
        if rounding.variant != "a" or rounding.layout != "word":
            raise FormatError(f"vectors draw random bits as variant 'a' alone, not as {rounding}; choose that")
        options = {"rounding": rounding.mode, "overflow": overflow, "random_bits": rounding.random_bits, "like": like}
    said = {name: value for name, value in options.items() if value is not None}
    result, files = make_vectors(get_format(format), {"generator": generator} | said)
    if folder is not None:
        write_folder(Path(folder), files)
    return result


def _rule(vectors: Vectors, index: tuple[int, ...], of_scale: bool) -> str:
    """Return what decided a code, or the steps of a scale, as ``fmtsim.explain`` tells it."""
    fmt, x = vectors.format, vectors.tensors["input"]
    try:
        if not isinstance(fmt, ScaledFormat):
            return _told(explain(x, fmt, **vectors.options).elements[index[0]])
        # blocks, one after the other, become the line that explain takes
        rows, inner = x.shape[1], fmt.block[1] or WIDTH
        line = x[index[0]].unflatten(-1, (-1, inner)).transpose(0, 1).flatten()
        told = explain(line, fmt, block_size=rows * inner if rows > 1 else None, **vectors.options)
        if of_scale:
            return "; ".join(told.scales[index[2] if len(index) == 3 else 0].steps)
        return _told(told.elements[(index[2] // inner * rows + index[1]) * inner + index[2] % inner])
    except FmtsimError as error:
        return str(error)


def _told(element: Element) -> str:
    return f"{element.decision.rule}: {element.decision.reason}"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _hex(x: Tensor, digits: int = 0) -> str:
    digits = digits or 2 * x.element_size()
    return " ".join(f"{word & ((1 << 4 * digits) - 1):0{digits}x}" for word in _bits(x).flatten().tolist())
