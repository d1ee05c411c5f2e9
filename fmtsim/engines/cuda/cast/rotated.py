# SPDX-License-Identifier: Apache-2.0
"""Operands of products that are rotated before they are cast: bfloat16 in, bfloat16 values out, in one or two passes.

The bits are those of ``fmtsim.gemm.layers``: the transform of fmtsim/scaling/hadamard.py in float32,
rounded to bfloat16 where the quantiser says so, then the cast. Values are elements times the scales of their blocks,
which bfloat16 holds exactly; a scale that all blocks share stays outside.
"""

import struct
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from fmtsim.engines.cuda.cast.parameters import NO_DRAW, draw_of
from fmtsim.engines.cuda.cast.rotated_plan import Launch, Plan, kernel_macros, plan_of
from fmtsim.engines.cuda.runtime import device_index, kernel, multiprocessors
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_word
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.replay.gpu import constant
from fmtsim.support.replay.hooks import Structure, packed

Keys = tuple[RandomKey | None, RandomKey | None]
Signs = RandomKey | int | None

_FILE, _THREADS, _TILE = "rotated.cu", 128, 8192  # a tile has 64 elements a thread
_PER_LANE = 32  # elements of a lane
_PARTS = 8  # blocks of threads a multiprocessor that look for the amax of a tensor
_GRID_LIMIT = 65535
_SIZES, _MASK = struct.Struct("<3q"), struct.Struct("<4I")
_MOST = 512  # layouts of a plan
_WORD = Rounding(mode="stochastic")  # draws whole words
_RANDOM = struct.Struct("<I12x")
_JOB = struct.Struct(f"<7q{_SIZES.size}s{_MASK.size + len(NO_DRAW) + _RANDOM.size}s")  # the kernels' first argument


def covers(x: Tensor, quantizer: Quantizer) -> bool:
    """Say whether ``cast_rotated`` takes a matrix under a quantiser; the device is not looked at.

    It takes bfloat16 ``[rows, inner]``, contiguous or the transposed view of such a matrix, ``inner`` a multiple of 64
    (and ``rows`` of 8 in a transposed view), under at most one Hadamard transform of 16 or 32 elements along the inner
    axis and one of these casts: a block format of up to 32 elements in a row whose values bfloat16 holds, or e2m1 under
    the rules of Quartet or the two levels of Quartet II (``rotated_plan``); or under a transform of 128 and the
    corrected scales of Quartet II, ``inner`` then being a multiple of 128.
    """
    plan = plan_of(quantizer)
    if plan is None or not _is_matrix(x) or x.shape[1] % (plan.lanes * _PER_LANE):
        return False
    return x.is_contiguous() or (not plan.masks and x.stride() == (1, x.shape[0]) and x.shape[0] % 8 == 0)


def counts_keys(quantizer: Quantizer) -> bool:
    """Say whether ``cast_rotated`` takes bfloat16 matrices under a quantiser whose sizes are multiples of 128."""
    plan = plan_of(quantizer)
    return plan is not None and not (plan.masks and quantizer.source != "original")


def cast_rotated(
    x: Tensor,
    quantizer: Quantizer,
    keys: Keys = (None, None),
    signs: Signs = None,
    factor: Tensor | None = None,
    count: Tensor | None = None,
) -> Operand | None:
    """Rotate and quantise a matrix; None where ``covers`` says that it is not taken.

    Args:
        x: bfloat16 ``[rows, inner]``, contiguous or a transposed view.
        quantizer: What to do.
        keys: Random words of elements and of scales; by an element's place in ``[rows, inner]``, whatever the strides.
        signs: The key of a rotation with ``signs="random"``, or its mask.
        factor: float32, 0-d: what x is multiplied with first, each product rounded to float32: the scale that values
            which are quantised again were left without. None is 1.
        count: int64, 0-d, on the device: what the offsets of all keys are larger by, so that a CUDA graph that is
            replayed draws anew. None is 0.

    Returns:
        Elements times block scales, bfloat16, with the strides of x; a bool slope under a ``ClipMask``; and what all
        are still to be multiplied with: the scale of the tensor of two-level formats, or the constant
        ``multiplier`` of a ``Scaling``, also of blocks in which no element is finite and not zero, whose scale is 1 by
        definition (zeros do not tell, NaN and Inf come out as 6 times one or the other).

    NaN, Inf and -0 come out as ``quantize_operand`` has them, NaN canonical. Nothing waits for the device.
    """
    plan, index = plan_of(quantizer), device_index(x)
    if plan is None:
        return None
    where = x.dtype, x.shape, x.stride(), factor is not None, count is not None, index
    how = plan.launches.get(where)
    if how is None:
        if not covers(x, quantizer):
            return None
        how = plan.launches[where] = _prepared(plan, *where[1:])
    scale = None if plan.outside is None else constant(plan.outside, x.device)
    if plan.two_level:
        scale = torch.empty((), device=x.device)
    key = keys[plan.draws_scales]
    assert plan.drawn.mode != "stochastic" or key is not None
    values = torch.empty_like(x)  # with its strides
    mask = torch.empty_like(x, dtype=torch.bool) if plan.masks else None
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    parts = None if how.find is None else torch.empty(how.parts, dtype=torch.int32, device=x.device)
    turns = how.signs or _signs_of(plan.signs, plan.size, signs)
    turns = packed(signs, turns, partial(_signs_of, plan.signs, plan.size))
    job = Structure(_JOB, (x, values, mask, parts, scale, factor, count, how.sizes, turns))
    if how.find is not None:
        how.find(how.parts, job)
    how.cast(how.grid, job, plan.head + draw_of(plan.drawn, key) + plan.tail)
    return Operand(values, quantizer, tensor_scale=scale, slope=mask)


def _prepared(
    plan: Plan, shape: tuple[int, ...], strides: tuple[int, ...], multiplies: bool, counts: bool, index: int
) -> Launch:
    """Return how matrices of a shape and layout are cast; worked out once, for it takes longer than a launch."""
    contiguous = strides[1] == 1
    defines = kernel_macros(plan, not contiguous, multiplies, counts)
    finds = kernel(_FILE, "rotated_amax", index, defines).bound(_THREADS, (_JOB.size,)) if plan.two_level else None
    casts = kernel(_FILE, "cast_rotated", index, defines).bound(_THREADS, (_JOB.size, plan.cast_size))
    rows, columns = shape if contiguous else shape[::-1]
    height = 2 * _PER_LANE if contiguous else plan.lanes * _PER_LANE
    grid = -(-columns * height // _TILE), -(-rows // height)
    parts = 0 if finds is None else min(grid[0] * grid[1], _PARTS * multiprocessors(index))
    signs = b"" if plan.signs == "random" else _signs_of(plan.signs, plan.size, None)
    if len(plan.launches) >= _MOST:
        plan.launches.clear()
    return Launch(finds, casts, grid, parts, _SIZES.pack(rows, columns, parts), signs)


@lru_cache(maxsize=4096)  # layers of a model have keys of their own
def _signs_of(own: Signs | Literal["random"], size: int, signs: Signs) -> bytes:
    """Return the bytes of the signs of a lane's elements, and of the key that draws more of them.

    Args:
        own: Those of the transform, or where they come from.
        size: Of the transform.
        signs: What is drawn from, or the mask, where they are random.
    """
    given = signs if own == "random" else own
    key = given if isinstance(given, RandomKey) else None
    mask = _drawn(size, key) if key is not None else given if isinstance(given, int) else 0
    bits = mask * 0x10001 if size == 16 else mask  # groups of fewer are repeated
    words = (bits >> 32 * place & 0xFFFFFFFF for place in range(4))
    draw = NO_DRAW if key is None else draw_of(_WORD, key)
    return _MASK.pack(*words) + draw + _RANDOM.pack(key is not None)


def _is_matrix(x: Tensor) -> bool:
    rows = x.shape[0] if x.dim() == 2 else 0
    return x.dtype == torch.bfloat16 and rows > 0 and x.numel() > 0 and max(x.shape) <= _GRID_LIMIT * 2 * _PER_LANE


def _drawn(size: int, key: RandomKey) -> int:
    """Return the mask of random signs: bit j of word w of a key turns element 32 w + j of a group."""
    return sum(random_word(key, word) << 32 * word for word in range(-(-size // 32))) & ((1 << size) - 1)
