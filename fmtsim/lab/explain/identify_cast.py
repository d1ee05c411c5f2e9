# SPDX-License-Identifier: Apache-2.0
"""Which cast gave a result: every format, block, scale rule, rounding and library that has all of its bits."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_dense, check_readable, inner_dim
from fmtsim.casts.encoded import Encoded
from fmtsim.casts.profile import get_profile, library_profiles, list_profiles
from fmtsim.casts.quantize import decode, encode, quantize
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat
from fmtsim.formats.floating import E8M0
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.packed import PackedFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.representable import FLOAT8_DTYPES, FLOAT_DTYPES
from fmtsim.formats.scaling import Scaling
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.explain.identify import Groups, Nearest, one_value
from fmtsim.lab.verify.outcome import boundaries
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError
from fmtsim.support.table import Column, Facts, Rows, jsonable

FEW, MANY = 1 << 11, 1 << 18  # elements of the first and the second comparison
SECONDS = 1.5  # that comparisons of all elements may take; explanations that are left have fewer compared
CHUNK = 256  # neighbours that a sample takes together: whole blocks of most formats
TILE = 128  # rows of the tallest block
ALIKE = 64
FEW_DIFFER, MOST = 0.25, 0.75  # of the elements: ties and directions change no more, other scales do
ROUNDINGS: Final = ("nearest_even", "nearest_away", "nearest_toward_zero", "toward_zero", "up", "down")
THROUGH: Final = ("", "fp16", "bf16", "fp32")
ELEMENTS: Final = (
    "e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "e4m3fnuz", "e5m2fnuz", "int8", "int8_full", "int4", "int4_full",
)  # fmt: skip
BLOCKS: Final = ((None, None), (1, None), (1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (128, 128))
RULES: Final = ("floor", "ceil", "rceil", "even")
SAME: Final = "the result is x itself: nothing was rounded here; pass what was cast"
SLOW: Final = ("iq1", "iq2", "iq3")  # formats of ggml that search for each block's codes


@dataclass(frozen=True, slots=True, kw_only=True)
class CastExplanation:
    """One explanation of a cast's result.

    Args:
        format: The format.
        like: The library whose cast it is, as ``like=`` takes it; empty for fmtsim's own.
        rounding, overflow, scale_rule, block: What the cast does, empty where the format or the library says it.
        through: The format to which x is rounded first; empty for none.
        compared: Elements that have the bits of the result.
    """

    format: Format
    like: str = ""
    rounding: str = ""
    overflow: str = ""
    scale_rule: str = ""
    block: str = ""
    through: str = ""
    compared: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of ``fmtsim.quantize`` that give these values; where ``through`` is set, of x in that format."""
        names: dict[str, Any] = {"format": self.format.name if self.format.name in list_formats() else self.format}
        return names | {name: getattr(self, name) for name in ("like", "rounding", "overflow", "scale_rule")
                        if getattr(self, name)}  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return the explanation as JSON types."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: jsonable(value) for name, value in fields.items() if value} | {"format": self.format.name}

    @property
    def sampled(self) -> str:
        """What has to stay together for an element's result: "pieces" of rows, whole "rows", or "tiles" of rows."""
        if self.like:
            return "rows" if isinstance(get_profile(self.like, self.format)[0].block, str) else "pieces"
        outer, inner = self.format.block if isinstance(self.format, BlockFormat) else (1, 1)
        return ("rows" if inner is None else "pieces") if outer == 1 else "rows" if outer is None else "tiles"

    def results(self, x: Tensor, *, codes: bool = False) -> dict[str, Tensor]:
        """Return value, or with ``codes`` also code and scale where there are some, of a matrix [rows, columns]."""
        x = quantize(x, self.through, out_dtype=x.dtype) if self.through else x
        if self.like:
            profile, fmt = get_profile(self.like, self.format, x.dtype)
            results = profile.results(x, fmt)
            if codes and "code" not in results and isinstance(fmt, ElementFormat) and profile.block is None:
                results["code"] = encode(results["value"], fmt, overflow="ieee" if fmt.has_nan else None).unpacked()
            return results
        if not codes:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            return {"value": quantize(x, **self.options, out_dtype=wide)}
        encoded = encode(x, **self.options)
        value, parts = encoded.decode(), encoded.parts()
        scales = {} if parts.scales is None else {"scale": parts.scales}
        return {"value": value} | ({} if isinstance(encoded.format, PackedFormat) else {"code": parts.codes} | scales)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CastIdentification(Groups):
    """Say what ``identify_cast`` found; ``print`` shows a table, notebooks an HTML one.

    Args:
        groups, tried, nearest, notes: As in ``Groups``.
        elements: Elements of x.
        x, result, scale: What was explained: matrices [rows, columns], and scales [rows, blocks] or None.
    """

    elements: int
    x: Tensor = dataclasses.field(repr=False, compare=False)
    result: Tensor = dataclasses.field(repr=False, compare=False)
    scale: Tensor | None = dataclasses.field(repr=False, compare=False, default=None)
    _counts: ClassVar[tuple[str, ...]] = ("elements",)

    def probe(self) -> Tensor:
        """Return numbers of x's dtype, [rows, columns of x], whose casts tell the groups apart.

        Run the kernel on them and pass both to ``refine``.
        """
        return _pool(self.x, self.explanations)

    def refine(self, x: Tensor, result: Tensor, scale: Tensor | None = None) -> "CastIdentification":
        """Return those of these explanations that also give ``result`` for other numbers."""
        return _identify(*_matrices(x, result, scale), list(self.explanations))

    def _content(self) -> Iterable[Rows | Facts | str]:
        least = min((explanation.compared for explanation in self.explanations), default=0)
        whole = "all" if least == self.elements else f"of {self.elements:,}"
        text = f"{list(self.x.shape)} {dtype_name(self.x.dtype)} -> {dtype_name(self.result.dtype)}"
        yield self._head("cast", text, f"{least:,} elements, {whole}")
        yield from self._tables(_COLUMNS, "elements", "the result")
        yield from self.notes


_COLUMNS = (
    Column("format", lambda row: row[1].format.name), Column("like", lambda row: row[1].like),
    Column("block", lambda row: row[1].block), Column("scale rule", lambda row: row[1].scale_rule),
    Column("rounding", lambda row: row[1].rounding), Column("overflow", lambda row: row[1].overflow),
    Column("through", lambda row: row[1].through),
)  # fmt: skip


def identify_cast(
    x: Tensor, result: "Tensor | Encoded", *, scale: Tensor | None = None, format: Any = None, dim: int = -1
) -> CastIdentification:
    """Name every cast that gives the bits of a result: formats, blocks, scale rules, roundings, overflow, libraries.

    Candidates are all listed formats under every rounding and overflow, also through another format first, block
    formats under every scale rule, element formats scaled by blocks, rows or the tensor, and the casts of other
    libraries (``fmtsim.list_profiles()``).

    Args:
        x: What was cast, of any shape: float16, bfloat16, float32 or float64.
        result: What came out, of x's shape: its values in any float dtype, a float8 tensor, or codes as integers (two
            4-bit codes a byte, of half the size along ``dim``, are taken apart in either order); or an ``Encoded``.
        scale: The scales beside codes, one a block along ``dim``: floats, float8, or bytes that are E8M0 codes. Where
            they are given, they have to fit as well.
        format: Look at this format alone.
        dim: The dimension along which blocks run.

    Returns:
        The explanations. NaN equals NaN in values; -0 differs from 0, unless nothing fits otherwise: a note says so.
            The same call gives the same answer.

    Raises:
        ArgumentError: Shapes that do not fit, or no elements.
        DtypeError: A dtype that is none of those above.
        FormatError: The format is unknown.

    >>> import fmtsim, torch
    >>> x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> found = fmtsim.identify_cast(x, fmtsim.quantize(x, "mxfp4", scale_rule="even"))
    >>> any(one.format.name == "mxfp4" and one.scale_rule == "even" for one in found.explanations)
    True
    """
    only = None if format is None else get_format(format)
    matrices = _matrices(x, result, scale, dim)
    found = _identify(*matrices, list(_candidates(*matrices, only)))
    if found.groups or isinstance(result, Encoded):
        return found
    if result.shape != x.shape:
        other = matrices[1].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        note = "the first of two elements is the high half of its byte"
    else:
        # integers that were computed as floating-point numbers keep the sign of zero, their codes do not
        other = matrices[1] + 0.0 if result.dtype in FLOAT_DTYPES else matrices[1]
        note = "without the sign of -0, which codes of integers do not have"
        if not bool(_unequal(other.float(), matrices[1].float()).any()):
            return found
    matrices = matrices[0], other, matrices[2]
    again = _identify(*matrices, list(_candidates(*matrices, only)))
    return dataclasses.replace(again, notes=(note, *again.notes)) if again.groups else found


def _matrices(x: Any, result: Any, scale: Any, dim: int = -1) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return numbers, results and scales as matrices on the CPU, blocks along the rows."""
    # 1. dtypes
    if isinstance(result, Encoded):
        if isinstance(result.format, PackedFormat):  # whose bytes are no codes of elements
            result = result.decode()
        else:
            parts = result.parts()
            result, scale = parts.codes, parts.scales if scale is None else scale
            dim = -1 if parts.scales is None else dim
    for name, tensor in (("x", x), ("result", result), ("scale", scale)):
        if tensor is None and name == "scale":
            continue
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is {type(tensor).__name__}; pass a torch.Tensor")
        check_dense(name, tensor)
        check_readable(name, tensor)
        if tensor.is_complex() or tensor.is_quantized:
            raise DtypeError(f"{name} has dtype {tensor.dtype}; pass real numbers, or codes as integers (int_repr())")
    if x.dtype not in FLOAT_DTYPES:
        raise DtypeError(f"x has dtype {x.dtype}; pass what was cast, float16, bfloat16, float32 or float64")
    x, result = x.detach().cpu(), result.detach().cpu()
    if not x.numel():
        raise ArgumentError(f"x has shape {tuple(x.shape)}: nothing was cast")
    dim = inner_dim(x, dim)
    # 2. codes of four bits, two a byte
    result = result.view(torch.uint8) if result.dtype == torch.float4_e2m1fn_x2 else result
    x, result = (tensor.reshape(1) if not tensor.dim() else tensor.movedim(dim, -1) for tensor in (x, result))
    if result.dtype.itemsize == 1 and result.shape[:-1] == x.shape[:-1] and 2 * result.shape[-1] == x.shape[-1]:
        pairs = result.view(torch.uint8).to(torch.int64)
        result = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    if result.shape != x.shape:
        raise ArgumentError(f"result has shape {tuple(result.shape)}, x {tuple(x.shape)}; pass the result of this x")
    x, result = x.reshape(-1, x.shape[-1]).contiguous(), result.reshape(-1, x.shape[-1]).contiguous()
    # 3. scales, whatever their layout, as numbers by rows
    if scale is not None:
        scale = scale.detach().cpu()
        if not scale.numel() or scale.numel() > x.numel():
            raise ArgumentError(
                f"scale has {scale.numel()} numbers for {x.numel()} elements; pass one a block, row or tensor"
            )
        if scale.dtype == torch.uint8:
            scale = decode(scale, "e8m0")
        scale = scale.float().reshape(1, 1) if scale.numel() == 1 else scale.float()
        rows = len(x) if scale.numel() % len(x) == 0 else 1
        scale = scale.reshape(rows, -1)
    return x, result, scale


def _candidates(x: Tensor, result: Tensor, scale: Tensor | None, only: Format | None) -> Iterator[CastExplanation]:
    """Yield every explanation that fmtsim has for results of this dtype, other libraries' first."""
    is_code = _codes(result) is not None
    formats = [get_format(name) for name in list_formats()] if only is None else [only]
    stored = get_format(result.dtype) if result.dtype in FLOAT8_DTYPES else None
    step = max(result.numel() // (16 * FEW), 1)
    values = None if is_code else result.reshape(-1)[::step].double().unique()[:4096]
    if is_code and stored is None:  # a format of so many bits
        # codes of a format: none is too large, and all but one bit is used
        low, high = (int(bound) for bound in result.to(torch.int64).aminmax())
        used = max(high.bit_length(), (-low - 1).bit_length()) + 1 if low < 0 else high.bit_length()
        bits = {fmt: fmt.element.bits if isinstance(fmt, BlockFormat) else fmt.bits for fmt in formats}
        formats = [fmt for fmt in formats if used <= bits[fmt] <= max(used + 1, 2)]
    # 1. libraries
    for library in dict.fromkeys(like.partition("/")[0] for like in list_profiles()):
        for profile in library_profiles(library):
            for fmt in map(get_format, profile.formats):
                if fmt in formats:
                    block = profile.block_of(fmt)
                    yield CastExplanation(format=fmt, like=profile.like, block="" if block is None else str(block))
    # 2. element formats alone, where each result is one of their values: of 16 bits, or narrower than x, such as tf32
    widest = max(16, get_format(x.dtype).bits - 1)
    elements = [fmt for fmt in formats if isinstance(fmt, ElementFormat) and fmt.bits <= widest]
    for fmt in elements:
        if stored is not None and fmt != stored:
            continue
        if values is not None and not bool((_on_grid(values, fmt)).all()):
            continue
        overflows = ("saturate", "ieee") if isinstance(fmt, FloatFormat) else ("",)
        for through, rounding, overflow in itertools.product(THROUGH, ROUNDINGS, overflows):
            if through and (through == fmt.name or get_format(x.dtype).bits <= get_format(through).bits):
                continue
            yield CastExplanation(format=fmt, rounding=rounding, overflow=overflow, through=through)
    # 3. block formats under each scale rule
    for fmt in formats:
        if isinstance(fmt, PackedFormat) and not fmt.name.startswith(SLOW) and not is_code:
            yield CastExplanation(format=fmt)
        if not isinstance(fmt, BlockFormat) or (stored is not None and fmt.element != stored):
            continue
        for rule, rounding in itertools.product(RULES if fmt.power_of_two else ("",), ROUNDINGS[:4]):
            yield CastExplanation(format=fmt, scale_rule=rule, rounding=rounding, block=_block_text(fmt))
    # 4. element formats scaled by blocks, rows or the tensor: by powers of two, or real scales of 32 or 16 bits
    scalings: list[tuple[str, str, dict[str, Any]]] = [
        ("", f"amax, {arithmetic}", {"arithmetic": arithmetic}) for arithmetic in ("divide", "reciprocal", "encode")
    ]
    scalings.append(("", "amax, divide, fp16", {"arithmetic": "divide", "scale": get_format("fp16")}))
    scalings += [(rule, "power of two", {"exponent_rule": rule, "scale": E8M0}) for rule in RULES]
    halves = [("", f"amax to {top:g}", {"arithmetic": "divide", "top": top}) for top in (7.5, 8.0, 127.5, 128.0)]
    for name, extent, (rule, text, fields) in itertools.product(ELEMENTS, BLOCKS, scalings + halves):
        element: Any = get_format(name)
        if "top" in fields and not (isinstance(element, IntFormat) and 0 < fields["top"] - float(element.max) <= 1):
            continue  # integers are also scaled to half a step, or a step, beyond their largest
        if only not in (None, element) or (stored is not None and element != stored):
            continue
        if is_code and stored is None and element not in formats:
            continue
        scaled = BlockFormat(name=f"{name}, {text}", element=element, scaling=Scaling(block=extent, **fields))
        for rounding in ROUNDINGS[:4]:
            yield CastExplanation(format=scaled, scale_rule=rule, rounding=rounding, block=_block_text(scaled))


def _block_text(fmt: BlockFormat) -> str:
    words: dict[Any, str] = {(None, None): "tensor", (1, None): "row"}
    outer, inner = fmt.block
    return words.get(fmt.block) or (str(inner) if outer == 1 else f"{outer}x{inner}")


def _on_grid(values: Tensor, fmt: ElementFormat) -> Tensor:
    """Return which float64 numbers are values of a format."""
    numbers = values[values.isfinite()]
    return quantize(numbers, fmt, overflow="saturate", out_dtype=torch.float64) == numbers


def _codes(result: Tensor) -> Tensor | None:
    """Return a result's codes as integers, None where it has values."""
    if result.dtype in FLOAT8_DTYPES:
        return result.view(torch.uint8)
    return None if result.dtype.is_floating_point else result


def _differs(explanation: CastExplanation, sample: "_Sample") -> Tensor:
    """Return where an explanation has other bits than the result; all where it cannot be computed."""
    x, result, scale = sample.x, sample.result, sample.scale
    everywhere, codes = torch.ones_like(result, dtype=torch.bool), _codes(result)
    try:
        results = explanation.results(x, codes=codes is not None or scale is not None)
    except FmtsimError:
        return everywhere
    # 1. codes, signed or not, or values in the result's dtype, rounded to it once
    if codes is None:
        wrong = _unequal(results["value"].to(result.dtype), result)
    elif "code" not in results:
        return everywhere
    else:
        fmt = explanation.format.element if isinstance(explanation.format, BlockFormat) else explanation.format
        mask = (1 << fmt.bits) - 1
        wrong = (results["code"].to(torch.int64) & mask) != (codes.to(torch.int64) & mask)
    # 2. the scales
    if scale is not None:
        if "scale" not in results or results["scale"].numel() != scale.numel():
            return everywhere
        scales = results["scale"].float()
        others = _unequal(scales.reshape(-1), scale.reshape(-1)).reshape(scales.shape)
        wrong = (
            wrong | others.repeat_interleave(x.shape[1] // scales.shape[1], 1).expand_as(wrong)
            if len(scales) == len(x)
            else wrong | others.any()
        )
    return wrong


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    """Return where numbers differ in a bit; NaN equals NaN."""
    return ((a != b) & ~(a.isnan() & b.isnan())) | ((a == 0) & (b == 0) & (a.signbit() != b.signbit()))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some rows, or pieces of rows, of what was cast."""

    x: Tensor
    result: Tensor
    scale: Tensor | None


def _identify(x: Tensor, result: Tensor, scale: Tensor | None, options: list[CastExplanation]) -> CastIdentification:
    """Compare explanations with few elements, and those that remain with more, up to all."""
    whole = _Sample(x, result, scale)
    # 1. few elements, the unusual ones first: pieces of rows, or whole rows where scales need them. Ties decide few
    # elements and directions half of them: what differs in most has another scale
    few = {"pieces": _pieces(whole, FEW), "rows": _rows(whole, 4 * FEW), "tiles": _tiles(whole, 4 * FEW)}
    shares: dict[CastExplanation, float] = {}
    near: dict[CastExplanation, float] = {}
    for ties in (False, True):
        for option in options:
            family = dataclasses.replace(option, rounding="", overflow="")
            if ties == (option.rounding in ("", "nearest_even")):
                continue
            if ties and not near.get(family, 1.0) < (FEW_DIFFER if "nearest" in option.rounding else MOST):
                continue
            shares[option] = _count(option, few[option.sampled]) / few[option.sampled].x.numel()
            near[family] = min(shares[option], near.get(family, 1.0))
    facts: dict[str, Any] = {"tried": len(shares), "elements": x.numel(), "x": x, "result": result, "scale": scale}
    remaining = [option for option, share in shares.items() if not share]
    if not remaining:
        nearest = _nearest(whole, shares)
        return CastIdentification(groups=(), nearest=nearest, notes=_advice(few["pieces"], whole), **facts)
    # 2. more of them, then all, as long as time allows
    many = {"pieces": _pieces(whole, MANY), "rows": _rows(whole, MANY), "tiles": _tiles(whole, MANY)}
    remaining = [option for option in remaining if not _count(option, many[option.sampled])]
    compared, start = [], time.perf_counter()
    for option in remaining:
        if time.perf_counter() - start < SECONDS:
            if not _count(option, whole):
                compared.append(dataclasses.replace(option, compared=x.numel()))
        else:
            compared.append(dataclasses.replace(option, compared=many[option.sampled].x.numel()))
    # 3. which of them numbers can tell apart
    groups = _groups(x, compared)
    notes = [SAME] if _is_same(whole) else []
    if len(groups) > 1:
        notes.append("x = result.probe(); cast it with the same kernel; result.refine(x, y) tells the groups apart")
    if len(groups) > ALIKE:
        notes.insert(0, "these numbers say little: they lie on the grid of many formats, or are few")
    nearest = None if compared else _nearest(whole, shares)
    return CastIdentification(groups=groups, nearest=nearest, notes=tuple(notes), **facts)


def _is_same(sample: _Sample) -> bool:
    return sample.result.dtype == sample.x.dtype and not bool(_unequal(sample.x, sample.result).any())


def _count(explanation: CastExplanation, sample: _Sample) -> int:
    return int(_differs(explanation, sample).sum())


def _pieces(whole: _Sample, elements: int) -> _Sample:
    """Return about so many elements in pieces of rows: those with unusual numbers first, then at equal distances."""
    rows, columns = whole.x.shape
    if whole.x.numel() <= elements:
        return whole
    # 1. pieces: neighbours that whole blocks fit into
    size = next((size for size in (CHUNK, 128, 64, 32) if columns % size == 0), columns)
    if whole.scale is not None:  # of which each piece needs its own
        blocks = whole.scale.shape[1] if len(whole.scale) == rows else 1
        size = columns if columns % max(blocks, 1) or size % (columns // blocks) else size
    x, result = whole.x.reshape(-1, size), whole.result.reshape(-1, size)
    # 2. the unusual: NaN, infinities, zeros, largest and smallest pieces
    amax = x.abs().nan_to_num(nan=0.0).amax(1)
    unusual = [x.isnan().any(1), x.isinf().any(1), (x == 0).any(1) & (x != 0).any(1), amax == 0]
    places = [int(mask.nonzero()[0]) for mask in unusual if bool(mask.any())]
    places += [int(amax.argmax()), int(torch.where(amax == 0, torch.inf, amax).argmin())]
    count = max(elements // size, 1)
    spaced = torch.linspace(0, len(x) - 1, max(count - len(places), 1), dtype=torch.float64).long().tolist()
    at = torch.tensor(sorted({*places, *spaced}))
    # 3. the scales of these pieces
    scale = whole.scale
    if scale is not None and scale.numel() > 1:
        per_piece = scale.reshape(len(x), -1) if scale.numel() % len(x) == 0 else None
        if per_piece is not None:
            scale = per_piece[at]
        elif len(scale) == rows:
            scale = scale.repeat_interleave(columns // size, 0)[at]
    return _Sample(x[at], result[at], scale)


def _rows(whole: _Sample, elements: int) -> _Sample:
    """Return about so many elements in whole rows, with the largest and the lowest number of all."""
    rows, columns = whole.x.shape
    if whole.x.numel() <= elements:
        return whole
    numbers = whole.x.nan_to_num(nan=0.0)
    places = {int(numbers.amax(1).argmax()), int(numbers.amin(1).argmin())}
    places |= {int(mask.any(1).nonzero()[0]) for mask in (whole.x.isnan(), whole.x.isinf()) if bool(mask.any())}
    count = max(elements // columns - len(places), 1)
    places |= set(torch.linspace(0, rows - 1, count, dtype=torch.float64).long().tolist())
    at = torch.tensor(sorted(places))
    scale = whole.scale[at] if whole.scale is not None and len(whole.scale) == rows else whole.scale
    return _Sample(whole.x[at], whole.result[at], scale)


def _tiles(whole: _Sample, elements: int) -> _Sample:
    """Return the first rows, about so many elements, but at least the rows of one block of several rows."""
    rows, columns = whole.x.shape
    if whole.scale is None:  # the first columns are enough
        columns = min(columns, CHUNK)
    count = min(-(-elements // (columns * TILE)) * TILE, rows)
    scale = whole.scale
    if scale is not None and scale.numel() > 1 and count < rows:
        scale = scale.reshape(-1)[: scale.numel() * count // rows].reshape(1, -1)
    return _Sample(whole.x[:count, :columns], whole.result[:count, :columns], scale)


def _nearest(whole: _Sample, shares: dict[CastExplanation, float]) -> Nearest | None:
    """Return the explanation with the smallest share of differing elements, and the first of them."""
    best = min(shares, key=lambda option: shares[option], default=None)
    if best is None or shares[best] == 1:
        return None
    mask = _differs(best, whole)
    row, column = (int(i) for i in mask.nonzero()[0])
    # codes, or values in the result's dtype
    results, codes = best.results(whole.x, codes=True), _codes(whole.result)
    if codes is None:
        actual, expected = whole.result, results["value"].to(whole.result.dtype)
    else:
        actual, expected = codes.to(torch.uint8), results["code"].to(torch.uint8)
    first = compare(actual[row, column : column + 1], expected[row, column : column + 1]).first
    if first is None:  # the element's code is equal and its scale is not
        return None
    first = dataclasses.replace(first, index=(row, column))
    return Nearest(explanation=best, mismatches=int(mask.sum()), compared=whole.x.numel(), first=first)


def _advice(sample: _Sample, whole: _Sample) -> tuple[str, ...]:
    """Return what else may explain results that no candidate gives."""
    if (note := one_value(whole.result)) and one_value(whole.x) is None:
        return (note,)
    if _is_same(sample):
        return (SAME,)
    notes = ["is a transform applied first, or are blocks along another dimension? pass dim=, or what was rounded"]
    if _codes(sample.result) is None:
        values = sample.result.double()
        for name in list_formats():
            fmt = get_format(name)
            if not isinstance(fmt, ElementFormat) or fmt.bits > 16 or not bool(_on_grid(values.unique(), fmt).all()):
                continue
            low, high = (quantize(sample.x.double(), fmt, mode, overflow="saturate") for mode in ("down", "up"))
            if bool(((values == low) | (values == high)).all()):
                notes.insert(
                    0, f"every result is one of the two {name} neighbours of its x: stochastic rounding would do that"
                )
                break
    return tuple(notes)


def _groups(x: Tensor, explanations: list[CastExplanation]) -> tuple[tuple[CastExplanation, ...], ...]:
    """Return explanations by what they make of numbers that tell casts apart."""
    numbers = _pool(x, explanations)
    groups: dict[Any, list[CastExplanation]] = {}
    for explanation in explanations:
        try:
            value = explanation.results(numbers)["value"].double()
        except FmtsimError:  # a library that refuses these numbers
            groups.setdefault(explanation, []).append(explanation)
            continue
        canonical = torch.where(value.isnan(), torch.nan, value)
        groups.setdefault(canonical.numpy().tobytes(), []).append(explanation)
    return tuple(tuple(group) for group in groups.values())


def _pool(x: Tensor, explanations: Iterable[CastExplanation]) -> Tensor:
    """Return numbers [rows, columns of x] at which casts differ: boundaries of formats, and rows that end at them."""
    columns, generator = x.shape[1], torch.Generator().manual_seed(0)
    # 1. every boundary with its neighbours in float32, and in float64 where x has such numbers
    elements = {fmt.element if isinstance(fmt, BlockFormat) else fmt for fmt in (one.format for one in explanations)}
    narrow = sorted(
        (fmt for fmt in elements if isinstance(fmt, ElementFormat) and fmt.bits <= 8), key=lambda fmt: fmt.name
    )
    dtypes = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
    edges = torch.cat([torch.tensor([0.0, -0.0, torch.inf, torch.nan], dtype=torch.float64)]
                      + [boundaries(fmt, dtype).double() for fmt in narrow for dtype in dtypes])  # fmt: skip
    finite = edges[edges.isfinite()]
    numbers = [torch.cat([part, part.new_zeros(-len(part) % columns)]).reshape(-1, columns) for part in (finite, edges)]
    # 2. rows of random numbers whose largest magnitude is a boundary, or of any size
    normal = torch.randn(48, columns, generator=generator, dtype=torch.float64)
    tops = finite[torch.randint(len(finite), (32, 1), generator=generator)]
    scaled = normal[:32] / normal[:32].abs().amax(1, keepdim=True) * tops
    return torch.cat([*numbers, scaled, normal, torch.zeros(1, columns, dtype=torch.float64)]).to(x.dtype)
