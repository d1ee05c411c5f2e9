# SPDX-License-Identifier: Apache-2.0
"""Numbers as kernels get them: the float32 of a tensor's raw element, and words of Philox4x32-10."""

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy import uint32, uint64

from fmtsim.cpu.runtime.jit import bits32, device, float32_of, overload

_M0, _M1 = uint64(0xD2511F53), uint64(0xCD9E8D57)
_W0, _W1 = uint64(0x9E3779B9), uint64(0xBB67AE85)
_LOW = uint64(0xFFFFFFFF)
_32 = uint64(32)


@overload
def number(raw, table):  # type: ignore[no-untyped-def]
    """Return the float32 of a raw number: float32, int8, uint8 code by table, bfloat16 as int16, binary16 as uint16.

    float64 remains what it is.
    """
    if raw in (types.float32, types.float64):
        return lambda raw, table: raw
    if raw == types.int8:
        return lambda raw, table: np.float32(raw)
    if raw == types.uint8:
        return lambda raw, table: table[raw]
    if raw == types.int16:
        return lambda raw, table: float32_of(np.int32(raw) << np.int32(16))
    return lambda raw, table: _binary16(np.int32(raw))


@register_jitable
def _binary16(code):  # type: ignore[no-untyped-def]
    magnitude = code & 0x7FFF
    number = float32_of(np.int32(magnitude << 13)) * np.float32(2.0**112)
    if magnitude >= 0x7C00:
        number = float32_of(np.int32(0x7F800000 | (magnitude & 0x3FF) << 13))
    return float32_of(bits32(number) | np.int32((code & 0x8000) << 16))


@device
def philox(counter, o0, o1, k0, k1):
    """Return the four words at a 64-bit counter, for the offset words o0, o1 and the key words k0, k1."""
    # Words stay in the low halves of 64 bits, whose upper halves nothing reads: a product is one instruction, and its
    # low half needs none.
    w0, w1, w2, w3 = counter, counter >> _32, uint64(o0), uint64(o1)
    k0, k1 = uint64(k0), uint64(k1)
    for _ in range(10):
        p0, p1 = _M0 * (w0 & _LOW), _M1 * (w2 & _LOW)
        w0, w1, w2, w3 = (p1 >> _32) ^ w1 ^ k0, p1, (p0 >> _32) ^ w3 ^ k1, p0
        k0, k1 = k0 + _W0, k1 + _W1
    return uint32(w0 & _LOW), uint32(w1 & _LOW), uint32(w2 & _LOW), uint32(w3 & _LOW)
