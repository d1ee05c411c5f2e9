# SPDX-License-Identifier: Apache-2.0
"""Scale rules as the numbers that kernels take (docs/semantics.md, sections 5 and 6)."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import FloatFormat, IntFormat

FLOOR, CEIL, RCEIL, EVEN, AMAX = range(5)
RECIPROCAL, ENCODE, TWO_LEVEL = range(3)
_RULES = {"floor": FLOOR, "ceil": CEIL, "rceil": RCEIL, "even": EVEN, "amax": AMAX}
_ARITHMETIC = {"reciprocal": RECIPROCAL, "encode": ENCODE}

FLT_MAX = np.float32(3.4028234663852886e38)
_ONE = np.float32(1)


class Scaling(NamedTuple):
    """How amax becomes a scale, as numbers.

    ``encode_scale`` and ``decode_scale`` are those of the whole tensor in a two-level format, else 1.
    """

    rule: int
    arithmetic: int
    max: np.float32
    reciprocal_max: np.float32
    max_exponent: int
    mantissa_bits: int
    plain: bool
    encode_scale: np.float32
    decode_scale: np.float32


def scaling_of(fmt: BlockFormat, tensor_amax: float | None) -> Scaling:
    """Return the numbers of a block format; ``tensor_amax`` is the finite amax that two-level formats need."""
    scaling = _scaling_of(fmt)
    if tensor_amax is None:
        return scaling
    with np.errstate(all="ignore"):
        amax = min(np.float32(tensor_amax), FLT_MAX)
        quotient = np.float32(np.float32(fmt.scale.max) * scaling.max) / amax if amax > 0 else _ONE
        encode_scale = min(quotient, FLT_MAX) if quotient > 0 else _ONE
        return scaling._replace(encode_scale=encode_scale, decode_scale=_ONE / encode_scale)


@lru_cache(maxsize=256)
def _scaling_of(fmt: BlockFormat) -> Scaling:
    """Return the numbers of a block format, without those of a tensor."""
    with np.errstate(over="ignore"):
        largest = np.float32(fmt.element.max)
    return Scaling(
        rule=_RULES[fmt.scale_rule],
        arithmetic=TWO_LEVEL if fmt.tensor_scale else _ARITHMETIC[fmt.arithmetic],
        max=largest,
        reciprocal_max=np.float32(1.0 / fmt.element.max),
        max_exponent=fmt.element.max_exponent,
        mantissa_bits=fmt.element.mantissa_bits if isinstance(fmt.element, FloatFormat | IntFormat) else 0,
        plain=fmt.scale.name == "fp32",
        encode_scale=_ONE,
        decode_scale=_ONE,
    )
