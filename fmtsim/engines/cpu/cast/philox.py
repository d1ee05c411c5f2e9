# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 for kernels (docs/semantics.md, section 9).

The rounds are written out: as a loop the compiler keeps the state in memory and runs ten times slower.
"""

from numpy import int64, uint32, uint64

from fmtsim.engines.cpu.runtime.jit import device, subroutine

_M0, _M1 = uint64(0xD2511F53), uint64(0xCD9E8D57)
_W0, _W1 = uint32(0x9E3779B9), uint32(0xBB67AE85)
_LOW = uint64(0xFFFFFFFF)
_32 = uint64(32)


@device
def _round(w0, w1, w2, w3, k0, k1):
    p0 = _M0 * uint64(w0)
    p1 = _M1 * uint64(w2)
    return uint32(p1 >> _32) ^ w1 ^ k0, uint32(p1 & _LOW), uint32(p0 >> _32) ^ w3 ^ k1, uint32(p0 & _LOW)


@device
def philox(counter, o0, o1, k0, k1):
    """Return the four words at a 64-bit counter, for the offset words o0, o1 and the key words k0, k1."""
    w0, w1, w2, w3 = uint32(counter & _LOW), uint32(counter >> _32), o0, o1
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, k0, k1)
    k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
    return _round(w0, w1, w2, w3, k0, k1)


@device
def fill64(words, at, block, o0, o1, k0, k1):
    """Write the words of the 64 elements ``64 * block ...`` into ``words`` from ``at`` on."""
    first, place = uint64(block) * uint64(16), uint64(at)  # unsigned: numba then does not look for negative indices
    for j in range(16):
        w0, w1, w2, w3 = philox(first + uint64(j), o0, o1, k0, k1)
        words[place + uint64(j)] = w0
        words[place + uint64(16 + j)] = w1
        words[place + uint64(32 + j)] = w2
        words[place + uint64(48 + j)] = w3


@device
def _reverse_byte(byte):
    byte = ((byte & 0x0F) << 4) | (byte >> 4)
    byte = ((byte & 0x33) << 2) | ((byte >> 2) & 0x33)
    return ((byte & 0x55) << 1) | ((byte >> 1) & 0x55)


@subroutine
def integer_at(index, random_bits, shared, o0, o1, k0, k1):
    """Return the random integer of one element: ``random_bits`` wide, in ``cvt.rs`` order where ``shared``."""
    place = uint64(index)
    if shared:
        place = place >> uint64(2 if random_bits == 8 else 1)
    w0, w1, w2, w3 = philox((place >> uint64(6)) * uint64(16) + (place & uint64(15)), o0, o1, k0, k1)
    lane = int64((place >> uint64(4)) & uint64(3))
    word = int64(w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3)
    if not shared:
        return word >> (32 - random_bits)
    if random_bits == 8:
        lane = index & 3
        byte = (word >> (8 if lane == 0 else 0 if lane == 1 else 24 if lane == 2 else 16)) & 0xFF
        return _reverse_byte(byte) if lane & 1 else byte
    return (word >> (16 * (index & 1))) & ((1 << random_bits) - 1)
