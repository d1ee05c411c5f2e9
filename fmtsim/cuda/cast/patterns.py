"""Casts of 16-bit dtypes that are no grid: a table of what each pattern becomes (table_patterns.cu).

The general kernel makes the table on the device at the first call for a cast.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fmtsim.cuda.cast.parameters import values_of
from fmtsim.cuda.runtime import program as runtime
from fmtsim.spec.cast import CastSpec

WORTH = 1 << 20  # elements that pay for a table in every multiprocessor
_COUNT = 1 << 16
_VECTOR = 16  # bytes
_BESIDE = 2048  # bytes of shared memory beside the entries
_tables: dict[tuple[CastSpec, torch.dtype, int, bool], torch.Tensor] = {}

# Casts a float tensor into a tensor of codes or values, in one dimension.
Cast = Callable[[torch.Tensor, torch.Tensor], None]


def convert_patterns(x: torch.Tensor, to: torch.Tensor, spec: CastSpec, slot: int, cast: Cast) -> bool:
    """Cast contiguous x into ``to`` and say whether that was done.

    Args:
        x: Elements of any dtype.
        to: Values of a dtype that holds them, or codes of ``slot`` bits.
        spec: The cast.
        slot: 0 for values.
        cast: The general kernel.

    False for dtypes of more than 16 bits, too few elements, random words, formats of more than 8 bits, a device without
    the shared memory, and a first call during the capture of a CUDA graph.
    """
    result = slot or 8 * to.element_size()
    entry = 16 if result == 16 else 8
    if x.element_size() != 2 or x.numel() < WORTH or result not in (4, 8, 16, 32) or spec.format.bits > 8:
        return False
    index = runtime.device_index(x)
    shared = _COUNT * entry // 8 + 1024
    if spec.rounding.mode == "stochastic" or runtime.shared_limit(index) < shared + _BESIDE:
        return False
    table = _table(x, to, spec, slot, cast)
    if table is None:
        return False
    values = values_of(spec.format, x.device)  # type: ignore[arg-type]
    vectors = not (x.data_ptr() | to.data_ptr()) % _VECTOR
    kernel = runtime.kernel("table_patterns.cu", "convert", index, _defines(entry, result, vectors))
    threads = _threads(entry)
    resident = max(runtime.shared_limit(index) // (shared + _BESIDE), 1) * runtime.multiprocessors(index)
    blocks = min(resident, -(-x.numel() // (threads * 16)))
    kernel(blocks, threads, x, to, np.int64(x.numel()), table, values, np.int32(values.numel()), shared=shared)
    return True


def variants() -> Iterator[tuple[str, str, runtime.Defines]]:
    """Yield file, kernel and macros."""
    for entry, result in ((8, 4), (8, 8), (8, 32), (16, 16)):
        yield "table_patterns.cu", "convert", _defines(entry, result, True)


def _table(x: torch.Tensor, to: torch.Tensor, spec: CastSpec, slot: int, cast: Cast) -> torch.Tensor | None:
    key = spec, x.dtype, runtime.device_index(x), not slot and to.element_size() == 2
    if key in _tables:
        return _tables[key]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    points = torch.arange(_COUNT, device=x.device, dtype=torch.int32).to(torch.int16).view(x.dtype)
    entries = torch.empty(_COUNT, dtype=to.dtype if key[3] else torch.uint8, device=x.device)
    cast(points, entries)
    runtime.finished(x)
    return _tables.setdefault(key, entries)


def _threads(entry: int) -> int:
    return 512 if entry == 8 else 1024


def _defines(entry: int, result: int, vectors: bool) -> runtime.Defines:
    numbers = {"ENTRY": entry, "RESULT": result, "VECTORS": int(vectors), "THREADS": _threads(entry)}
    return tuple((name, str(number)) for name, number in numbers.items())
