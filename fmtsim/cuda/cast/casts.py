"""The engine's verbs of casts and what they cover, and the fast dispatch of the commonest ones.

Small tensors cost host time alone, so what depends on the cast, the dtypes and the device is looked up in one place.
"""

import struct
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch

from fmtsim.cuda import runtime
from fmtsim.cuda.cast import block, elements
from fmtsim.cuda.cast.block_macros import amax_macros, draws_words, fast_macros, output_of, run_macros, vector_of
from fmtsim.cuda.cast.decoding import decode
from fmtsim.cuda.cast.elements import (
    encode_elements,
    encode_packed_elements,
    packs,
    quantize_elements,
)
from fmtsim.cuda.cast.general import THREADS, cast_bytes
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey, spec_from_json

__all__ = ["decode", "encode", "encode_packed", "quantize", "quantize_contiguous", "supports"]

_ALIGNED = 16
_ZERO = np.int64(0)
_Launch = Callable[[torch.Tensor, torch.Tensor, Random], bool]  # of x and its result; says whether it was done


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Say whether the kernels cover a verb on these tensors: input and output of quantize, else the one it has.

    LogFMT tiles are left to torch ops, and so are results that must be rounded once more to a narrow output dtype.
    """
    fmt, dtypes = spec.format, [tensor.dtype for tensor in tensors]
    if isinstance(fmt, LogTileFormat) or not all(dtype in FLOAT_DTYPES for dtype in dtypes):
        return False
    if not _runs(tensors[0].device):
        return False
    if isinstance(fmt, BlockFormat):
        return block.covers_blocks(spec, *dtypes)
    if verb == "encode_packed":
        return packs(spec, tensors[0])
    return verb == "encode" or dtypes[-1] in (torch.float32, torch.float64) or is_representable(fmt, dtypes[-1])


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    if not isinstance(random, torch.Tensor) and quantize_contiguous(x, spec, out, random):
        return
    if isinstance(spec.format, BlockFormat):
        block.quantize_blocks(x, spec, random, out)
    else:
        quantize_elements(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x in its shape, and the scales of a block format."""
    if isinstance(spec.format, BlockFormat):
        return block.encode_blocks(x, spec, random)
    return encode_elements(x, spec, random)


def encode_packed(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return codes and scales as an encoded tensor keeps them: packed along ``dim`` (docs/semantics.md, section 11)."""
    if isinstance(spec.format, BlockFormat):
        return block.encode_blocks(x, spec, random, packed=True)
    return encode_packed_elements(x, spec, random)


@cache
def _runs(device: torch.device) -> bool:
    return runtime.available(device)


# Fast dispatch.


def quantize_contiguous(x: torch.Tensor, cast: CastSpec | str, out: torch.Tensor, random: Random = None) -> bool:
    """Quantise x into out where both are contiguous and a fast kernel takes them, and say whether that is so.

    Args:
        x, out: Of one shape, on one device.
        cast: The cast, or its JSON, which is looked up faster.
        random: Where the rounding draws words, their key.

    False for float64, given random words, blocks that are no runs of the last dimension, and whatever else there is.
    """
    if not x.numel() or (x.data_ptr() | out.data_ptr()) % _ALIGNED or not (x.is_contiguous() and out.is_contiguous()):
        return False
    launch = _fast_launch(cast, x.dtype, out.dtype, runtime.device_index(x))
    return launch is not None and launch(x, out, random)


@lru_cache(maxsize=4096)
def _fast_launch(cast: CastSpec | str, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Launch | None:
    """Return what launches a cast on a device, None where fast dispatch does not serve it."""
    spec = spec_from_json(cast) if isinstance(cast, str) else cast
    if torch.float64 in (dtype, out_dtype) or isinstance(spec.format, LogTileFormat) or not runtime.serves(index):
        return None
    element = spec.format.element if isinstance(spec.format, BlockFormat) else spec.format
    if not element.has_nan and element.nan_policy == "error":
        return None  # somebody has to look at the numbers
    if isinstance(spec.format, BlockFormat):
        return _fast_blocks(spec, spec.format, dtype, out_dtype, index)
    return _fast_elements(spec, dtype, out_dtype, index)


def _fast_elements(spec: CastSpec, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Launch | None:
    grid, rounding = elements.fast_grid(spec, None), spec.rounding
    if grid is None or not (out_dtype == torch.float32 or is_representable(spec.format, out_dtype)):
        return None
    kernel = runtime.kernel("quantize.cu", "quantize", index, elements.quantize_macros(grid, dtype, out_dtype))
    threads, tile, parameters = elements.THREADS, elements.TILE, grid.parameters
    width, unroll = elements.vectors_of(grid, dtype, out_dtype)

    def launch_stochastic(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        if not isinstance(random, RandomKey):
            return False
        count = x.numel()
        bounds = _ZERO, np.int64(count // tile * tile), np.int64(count)
        kernel(-(-count // (4 * tile)), threads, x, out, *bounds, parameters, draw_of(rounding, random))
        return True

    if rounding.mode == "stochastic":
        return launch_stochastic
    bound, together = kernel.bound(threads, 5, parameters, draw_of(rounding, None)), threads * unroll * width

    def launch(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        if isinstance(random, RandomKey):
            return False
        count = x.numel()
        bound(-(-count // together), x.data_ptr(), out.data_ptr(), 0, count // width * width, count)
        return True

    return launch


def _fast_blocks(
    spec: CastSpec, fmt: BlockFormat, dtype: torch.dtype, out_dtype: torch.dtype, index: int
) -> _Launch | None:
    (rows, run), output, stochastic = fmt.block, output_of(out_dtype), spec.rounding.mode == "stochastic"
    if output is None or spec.dim != -1 or rows != 1 or not run or run % 16 or not draws_words(spec, RandomKey(0)):
        return None
    fast, vector = fast_macros(spec, dtype, output), vector_of(dtype, output, fmt.bits)
    macros = None if fast is None else run_macros(fast, dtype, vector, run)
    if macros is None or ("RUN", "0") in macros:  # no fast kernel, or a block is longer than a warp holds
        return None
    kernel = runtime.kernel("block_rows.cu", "cast_runs", index, macros)
    extremes, bound, pieces = None, None, struct.pack("<4I", run // 16, 1, 1, 0)
    if fmt.tensor_scale:
        extremes = runtime.kernel("statistic.cu", "amax_of_tensor", index, amax_macros(dtype)).bound(THREADS, 3)
    if not stochastic:
        constant = cast_bytes(spec, None, torch.device("cuda", index))
        bound = kernel.bound(THREADS, 7, pieces, np.uint32(fmt.tensor_scale), constant)
    most, together = 8 * runtime.multiprocessors(index), 4 * vector * THREADS

    def launch(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        count = x.numel()
        if isinstance(random, RandomKey) != stochastic or not x.dim() or x.shape[-1] % run or count >= 1 << 36:
            return False
        found = None
        if extremes is not None:
            found = torch.zeros(2, dtype=torch.int32, device=x.device)
            grid = min(-(-count // (64 * THREADS // x.itemsize)), most)
            extremes(grid, x.data_ptr(), found.data_ptr(), count * x.itemsize // 16)
        grid = -(-count // together)
        if bound is not None:
            bound(grid, x.data_ptr(), out.data_ptr(), 0, 0, 0 if found is None else found.data_ptr(), 0, count)
        else:
            drawn = cast_bytes(spec, random, x.device)
            arguments = None, None, found, None, np.uint64(count), pieces, np.uint32(found is not None), drawn
            kernel(grid, THREADS, x, out, *arguments)
        return True

    return launch
