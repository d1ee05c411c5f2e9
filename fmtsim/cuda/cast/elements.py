"""Casts of element formats on a GPU: which kernel runs, on which layout, with which random words."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fmtsim.cuda.cast.buckets import Table, build, layout_of
from fmtsim.cuda.cast.grid import BITS, FIXED, FLUSHING, HALVES, MAGIC, POWERS, Grid, grid_of
from fmtsim.cuda.cast.parameters import draw_of, element_of, tables_of, values_of
from fmtsim.cuda.cast.patterns import convert_patterns
from fmtsim.cuda.cast.patterns import variants as pattern_variants
from fmtsim.cuda.runtime import program as runtime
from fmtsim.formats.packing import code_dtype, packed_size
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # macros of vectors.cuh
_PLAIN = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # packed codes of whole words
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
THREADS = 128
_TILE = 1024  # elements of a warp that share Philox counters; a block of THREADS has four
_VECTOR = 16  # bytes
_TABLE_THREADS = 256
_TABLE_BLOCKS = 6  # of a multiprocessor: what the registers allow
_WORTH_A_TABLE = 1 << 16  # elements
_tables: dict[tuple[CastSpec, int], Table] = {}

Defines = runtime.Defines


def quantize_elements(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    if x.numel() == 0:
        return
    source, target = _in_one_order(x, out, ordered=spec.rounding.mode == "stochastic")
    narrow = torch.float64 not in (x.dtype, out.dtype)
    grid = fast_grid(spec, random) if narrow else None
    if grid is not None:
        _quantize_fast(source, spec, random, target, grid)
    elif narrow and random is None and _by_patterns(source, spec, target, 0):
        pass
    elif narrow and (table := _table(spec, source)) is not None:
        _look_up(source, "quantize", target, table, 8)
    else:
        _quantize_any(source, spec, random, target)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def encode_elements(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x in its shape."""
    fmt = spec.format
    codes = torch.empty(x.shape, dtype=code_dtype(fmt.bits), device=x.device)
    if x.numel():
        _encode(x.contiguous(), spec, random, codes, (1, x.numel()), 8 * codes.element_size())
    return EncodedParts(codes)


def encode_packed_elements(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x packed along ``dim``, as an encoded tensor keeps them (docs/semantics.md, section 11)."""
    bits = spec.format.bits
    if bits in _PLAIN:
        codes = torch.empty(x.shape, dtype=_PLAIN[bits], device=x.device)
        rows = (1, x.numel())
    else:
        x = x.reshape(1) if x.dim() == 0 else x.movedim(spec.dim, -1)
        codes = torch.empty((*x.shape[:-1], packed_size(x.shape[-1], bits)), dtype=torch.uint8, device=x.device)
        rows = (math.prod(x.shape[:-1]), x.shape[-1])
        if rows[1] * bits % 8 == 0:  # rows end on bytes: one stream
            rows = (1, x.numel())
    if x.numel():
        _encode(x.contiguous(), spec, random, codes, rows, bits)
    return EncodedParts(codes)


def packs(spec: CastSpec, x: torch.Tensor) -> bool:
    """Say whether ``encode_packed_elements`` covers a cast: random words belong to places in the tensor's own order."""
    bits, last = spec.format.bits, spec.dim == -1 or x.dim() == 0
    return bits in _PLAIN or (bits <= 32 and (last or spec.rounding.mode != "stochastic"))


def decode_elements(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out (a dtype that holds them, or float32 and float64)."""
    codes, fmt = parts.codes.contiguous(), spec.format
    if codes.numel() == 0:
        return
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    count = codes.numel()
    if fmt.bits <= 8 and out.dtype != torch.float64:
        values = values_of(fmt, codes.device)  # type: ignore[arg-type]
        vectors = codes.data_ptr() % _VECTOR == 0 and target.data_ptr() % _VECTOR == 0
        kernel = _kernel("decode.cu", "decode", codes, _decode_defines(out.dtype, vectors))
        per_thread = 4 * (_VECTOR // target.element_size())
        blocks = _blocks(count, per_thread)
        kernel(blocks, THREADS, codes, target, np.int64(count), values, np.int32(values.numel()))
    else:
        element = element_of(fmt, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        tables = tables_of(fmt, codes.device).pointers  # type: ignore[arg-type]
        defines = _general_defines(torch.float32, out.dtype, codes.element_size())
        kernel = _kernel("element.cu", "decode", codes, defines)
        kernel(_blocks(count), THREADS, codes, target, np.int64(count), element, tables)
    if target is not out:
        out.copy_(target)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel: the commonest grid in all dtypes, the others in one."""
    grids = [(method, special, False, True, 0) for method in (MAGIC, BITS, FLUSHING) for special in (False, True)]
    grids += [(HALVES, False, True, False, 0), (FIXED, False, True, False, 0), (FIXED, False, False, False, 1)]
    grids += [(MAGIC, special, special, not special, random) for special in (False, True) for random in (1, 2)]
    grids += [(BITS, False, False, True, random) for random in (1, 2)] + [(POWERS, False, True, False, 0)]
    for method, special, asymmetric, keeps, random in grids:
        grid = Grid(bytes(112), method, special, asymmetric, method in (HALVES, FIXED), True, keeps, random, 3)
        common = method == MAGIC and not asymmetric and not special and random < 2
        dtypes = _NARROW if common else _NARROW[1:2]
        for dtype, out in ((kept, out) for kept in dtypes for out in {kept, torch.float32}):
            for vectors in (True, False) if common else (True,):
                yield "scalar.cu", "quantize", fast_defines(grid, dtype, out, vectors)
        for code, slot in ((4, 4), (6, 6), (8, 8), (7, 8), (13, 16), (5, 5)) if common else ((4, 4),):
            for kernel in ("encode", "encode_rows"):
                yield "encode.cu", kernel, _code_defines(grid, torch.bfloat16, True, code, slot)
    for dtype in _DTYPES:
        for kernel in ("quantize", "encode", "encode_rows", "decode"):
            yield "element.cu", kernel, _general_defines(dtype, dtype, 1)
    for dtype in _NARROW:
        yield "decode.cu", "decode", _decode_defines(dtype, True)
        for narrow in (0, 4, 8) if dtype == torch.float32 else (0,):
            yield "table.cu", "quantize", _table_defines(dtype, torch.float32, True, 8, narrow)
        yield "table.cu", "encode", _table_defines(dtype, torch.uint8, True, 4, 4)
    yield from pattern_variants()


def fast_grid(spec: CastSpec, random: Random) -> Grid | None:
    """Return the parameters of the fast kernels for a cast of narrow dtypes, None where it needs others."""
    if isinstance(random, torch.Tensor):
        return None
    return grid_of(spec.format, spec.rounding, spec.overflow)  # type: ignore[arg-type]


def _quantize_fast(source: torch.Tensor, spec: CastSpec, random: Random, target: torch.Tensor, grid: Grid) -> None:
    count, stochastic = source.numel(), spec.rounding.mode == "stochastic"
    width, unroll = vectors_of(grid, source.dtype, target.dtype)
    first = _first_whole(source, target, width)
    vectors = first is not None and not (stochastic and first)
    first, last, blocks = first or 0, 0, _blocks(count, unroll)
    if vectors:
        group = _TILE if stochastic else width  # elements that are cast together
        last = first + max(count - first, 0) // group * group
        blocks = max(-(-count // (4 * _TILE)), 1) if stochastic else _blocks((last - first) // width, unroll)
    defines = fast_defines(grid, source.dtype, target.dtype, vectors)
    kernel = _kernel("scalar.cu", "quantize", source, defines)
    bounds = np.int64(min(first, count)), np.int64(last), np.int64(count)
    kernel(blocks, THREADS, source, target, *bounds, grid.parameters, draw_of(spec.rounding, random))


def _quantize_any(source: torch.Tensor, spec: CastSpec, random: Random, target: torch.Tensor) -> None:
    count = source.numel()
    kernel = _kernel("element.cu", "quantize", source, _general_defines(source.dtype, target.dtype, 1))
    kernel(_blocks(count), THREADS, source, target, np.int64(count), *_general_arguments(spec, random, source))


def _encode(
    x: torch.Tensor, spec: CastSpec, random: Random, codes: torch.Tensor, rows: tuple[int, int], slot: int
) -> None:
    """Write the codes of contiguous x, ``slot`` bits from one to the next in each row."""
    bits, count = spec.format.bits, x.numel()
    grid = fast_grid(spec, random) if x.dtype != torch.float64 and slot <= 32 else None
    if grid is not None and grid.encodes:
        vectors = x.data_ptr() % _VECTOR == 0
        defines = _code_defines(grid, x.dtype, vectors, bits, slot)
        parameters = grid.parameters, draw_of(spec.rounding, random)
        if rows[0] == 1:
            span = _TILE if spec.rounding.mode == "stochastic" else 32 * _run(slot, x.dtype, grid.random)
            blocks = -(-count // (4 * span))
            _kernel("encode.cu", "encode", x, defines)(blocks, THREADS, x, codes, np.int64(count), *parameters)
            return
        _kernel("encode.cu", "encode_rows", x, defines)(
            _blocks(rows[0] * -(-rows[1] // 8)), THREADS, x, codes, *map(np.int64, rows), *parameters
        )
        return
    if random is None and rows[0] == 1 and slot in (4, 8) and _by_patterns(x, spec, codes, slot):
        return
    if x.dtype != torch.float64 and slot in (4, 8) and rows[0] == 1 and (table := _table(spec, x)) is not None:
        _look_up(x, "encode", codes, table, slot)
        return
    _encode_any(x, spec, random, codes, rows, slot)


def _run(slot: int, dtype: torch.dtype, random: int) -> int:
    """Return how many elements a thread of encode.cu takes; their codes fill words."""
    least = 4 if dtype.itemsize == 4 else 16 if slot <= 8 else 8
    if slot == 6 and dtype.itemsize == 2 and not random:
        least = 32
    return max(32 // math.gcd(slot, 32), least)


def _encode_any(
    x: torch.Tensor, spec: CastSpec, random: Random, codes: torch.Tensor, rows: tuple[int, int], slot: int
) -> None:
    defines = _general_defines(x.dtype, torch.float32, slot // 8 if slot in _PLAIN else 1)
    arguments = _general_arguments(spec, random, x)
    if slot in _PLAIN:
        _kernel("element.cu", "encode", x, defines)(
            _blocks(x.numel()), THREADS, x, codes, np.int64(x.numel()), *arguments
        )
        return
    _kernel("element.cu", "encode_rows", x, defines)(
        _blocks(rows[0] * -(-rows[1] // 8)), THREADS, x, codes, *map(np.int64, rows), np.int32(slot), *arguments
    )


def _table(spec: CastSpec, x: torch.Tensor) -> Table | None:
    """Return the table of a cast where there is one and enough elements are worth it.

    The first call for a cast launches some hundred small kernels; a stream that is being captured would not run them.
    """
    layout = layout_of(spec) if x.numel() >= _WORTH_A_TABLE else None
    key = spec, runtime.device_index(x)
    if layout is None or key in _tables:
        return _tables[key] if layout else None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    values = values_of(spec.format, x.device)  # type: ignore[arg-type]

    def encode(points: torch.Tensor) -> torch.Tensor:
        codes = torch.empty(points.shape, dtype=torch.uint8, device=points.device)
        _encode_any(points, spec, None, codes, (1, points.numel()), 8)
        return codes

    table = build(spec, layout, values, encode)
    runtime.finished(x)
    return _tables.setdefault(key, table)


def _by_patterns(x: torch.Tensor, spec: CastSpec, to: torch.Tensor, slot: int) -> bool:
    """Cast by a table of all patterns of a 16-bit dtype, where that serves, and say so."""

    def cast(points: torch.Tensor, entries: torch.Tensor) -> None:
        if entries.dtype == torch.uint8:
            _encode_any(points, spec, None, entries, (1, points.numel()), 8)
        else:
            _quantize_any(points, spec, None, entries)

    return convert_patterns(x, to, spec, slot, cast)


def _look_up(x: torch.Tensor, verb: str, to: torch.Tensor, table: Table, slot: int) -> None:
    index = runtime.device_index(x)
    kernel = runtime.kernel(
        "table.cu", verb, index, _table_defines(x.dtype, to.dtype, whole_vectors(x, to), slot, table.layout.narrow)
    )
    shared = table.layout.shared
    resident = max(min(_TABLE_BLOCKS, runtime.shared_limit(index) // (shared + 1024)), 1) * runtime.multiprocessors(
        index
    )
    blocks = min(resident, -(-x.numel() // (_TABLE_THREADS * 8)))
    kernel(blocks, _TABLE_THREADS, x, to, np.int64(x.numel()), table.parameters, shared=shared)


def _general_arguments(spec: CastSpec, random: Random, x: torch.Tensor) -> tuple[Any, ...]:
    """Return element, tables, draw and given words for element.cu."""
    given = random.contiguous() if isinstance(random, torch.Tensor) else None
    element = element_of(spec.format, spec.rounding, spec.overflow)  # type: ignore[arg-type]
    tables = tables_of(spec.format, x.device).pointers  # type: ignore[arg-type]
    return element, tables, draw_of(spec.rounding, random), given


def _kernel(file: str, name: str, x: torch.Tensor, defines: Defines) -> Callable[..., None]:
    return runtime.kernel(file, name, runtime.device_index(x), defines)


def _blocks(count: int, per_thread: int = 1) -> int:
    return max(-(-count // (THREADS * per_thread)), 1)


def _in_one_order(x: torch.Tensor, out: torch.Tensor, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one-dimensional views of input and output in the same order, or copies where there are none.

    Element by element any common order will do, so a transposed tensor needs no copy unless random words fix the order.
    """
    if not ordered and x.stride() == out.stride() and not x.is_contiguous() and _dense(x):
        return tuple(tensor.as_strided((x.numel(),), (1,)) for tensor in (x, out))  # type: ignore[return-value]
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return x.contiguous().view(-1), target.view(-1)


def _dense(x: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def whole_vectors(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Say whether both addresses are those of whole vectors."""
    return not (x.data_ptr() | out.data_ptr()) % _VECTOR


def _first_whole(source: torch.Tensor, target: torch.Tensor, width: int) -> int | None:
    """Return the first element at which both addresses are those of whole vectors, None where there is none."""
    for first in range(width):
        sizes = ((tensor.data_ptr(), tensor.element_size()) for tensor in (source, target))
        if not any((start + first * size) % min(_VECTOR, width * size) for start, size in sizes):
            return first
    return None


def vectors_of(grid: Grid, dtype: torch.dtype, out: torch.dtype) -> tuple[int, int]:
    """Return how many elements a vector of scalar.cu has, and how many of them a thread takes.

    With random words, which keep threads busier, both sides have whole vectors; else neighbours write side by side.
    """
    if dtype.itemsize == 2 and out.itemsize == 4 and not grid.random:
        return 4, 2
    return (8 if 2 in (dtype.itemsize, out.itemsize) else 4), 2


@lru_cache(maxsize=1024)
def fast_defines(grid: Grid, dtype: torch.dtype, out: torch.dtype, vectors: bool) -> Defines:
    """Return the macros of scalar.cu."""
    rest = {"INPUT": _DTYPES[dtype], "OUTPUT": _DTYPES[out], "VECTORS": int(vectors), "PAIRS": grid.pairs(dtype)}
    width, unroll = vectors_of(grid, dtype, out)
    return (*grid.defines, *_pairs(rest | {"WIDTH": width, "UNROLL": unroll}))


@lru_cache(maxsize=1024)
def _code_defines(grid: Grid, dtype: torch.dtype, vectors: bool, code: int, slot: int) -> Defines:
    rest = {"INPUT": _DTYPES[dtype], "VECTORS": int(vectors), "PAIRS": grid.pairs(dtype), "CODE": code, "SLOT": slot}
    rest |= {"INTEGER": int(grid.integer), "MANTISSA": grid.mantissa, "RUN": _run(slot, dtype, grid.random)}
    return (*grid.defines, *_pairs(rest))


@lru_cache(maxsize=64)
def _table_defines(dtype: torch.dtype, out: torch.dtype, vectors: bool, slot: int, narrow: int) -> Defines:
    numbers = {"INPUT": _DTYPES[dtype], "OUTPUT": _DTYPES.get(out, 0), "VECTORS": int(vectors), "SLOT": slot}
    return _pairs(numbers | {"NARROW": narrow, "RESIDENT": _TABLE_BLOCKS})


@lru_cache(maxsize=64)
def _general_defines(dtype: torch.dtype, out: torch.dtype, code_bytes: int) -> Defines:
    return _pairs({"INPUT": _DTYPES[dtype], "OUTPUT": _DTYPES[out], "CODES": code_bytes})


@lru_cache(maxsize=16)
def _decode_defines(out: torch.dtype, vectors: bool) -> Defines:
    return _pairs({"OUTPUT": _DTYPES[out], "VECTORS": int(vectors)})


def _pairs(numbers: dict[str, int]) -> Defines:
    return tuple((name, str(value)) for name, value in numbers.items())
