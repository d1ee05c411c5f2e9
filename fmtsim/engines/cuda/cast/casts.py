# SPDX-License-Identifier: Apache-2.0
"""The engine's verbs of casts and what they cover, and the fast dispatch of the commonest ones.

Small tensors cost host time alone, so what depends on the cast, the dtypes and the device is looked up in one place.
"""

from collections.abc import Callable
from functools import cache, lru_cache

import torch

from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.cast import block, elements
from fmtsim.engines.cuda.cast.block_macros import draws_words, output_of
from fmtsim.engines.cuda.cast.decoding import decode
from fmtsim.engines.cuda.cast.elements import encode_elements, packs, quantize_elements
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey, spec_from_json

__all__ = ["decode", "encode", "encode_packed", "quantize", "quantize_contiguous", "supports"]

_ALIGNED = 16
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


def encode(x: torch.Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x in its shape, and the scales of a block format."""
    encode_any = block.encode_blocks if isinstance(spec.format, BlockFormat) else encode_elements
    return encode_any(x, spec, random, packed)


def encode_packed(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return codes and scales as an encoded tensor keeps them: packed along ``dim`` (docs/semantics.md, section 11)."""
    return encode(x, spec, random, packed=True)


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

    False for float64, given random words, blocks that are not runs of the last dimension, and whatever else there is.
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
    cast, stochastic = elements.launch_of(grid, rounding, dtype, out_dtype, index), rounding.mode == "stochastic"

    def launch(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        if isinstance(random, RandomKey) != stochastic:
            return False
        cast(x, out, random, 0)
        return True

    return launch


def _fast_blocks(
    spec: CastSpec, fmt: BlockFormat, dtype: torch.dtype, out_dtype: torch.dtype, index: int
) -> _Launch | None:
    (rows, run), output, stochastic = fmt.block, output_of(out_dtype), spec.rounding.mode == "stochastic"
    if output is None or spec.dim != -1 or rows != 1 or not run or not draws_words(spec, RandomKey(0)):
        return None
    cast = block.rows_of(spec, dtype, output, (run, 1, 1), True, index)
    if cast is None or not cast.one_pass:  # no fast kernel, or a block is longer than a warp holds
        return None

    def launch(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        whole = x.dim() > 0 and x.shape[-1] % run == 0 and x.numel() < block.MOST
        if isinstance(random, RandomKey) != stochastic or not whole:
            return False
        cast(x, EncodedParts(out), random)
        return True

    return launch
