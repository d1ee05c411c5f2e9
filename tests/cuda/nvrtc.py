# SPDX-License-Identifier: Apache-2.0
"""Whether kernels can be compiled here, GPU or not, and what machine code says of them."""

import struct

import pytest


def reason():
    """Return why kernels cannot be compiled; None where they can."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program  # noqa: F401

        nvrtc.nvrtcVersion()
    except Exception as error:  # what is missing decides the type
        return f"kernels cannot be compiled: {error}; pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
    return None


_REASON = reason()
needs_nvrtc = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def spilled(code):
    """Return the bytes of local memory that a cubin's functions take: EIATTR_FRAME_SIZE in ELF's .nv.info."""
    table, size, count, names = *struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    kernels = []
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if code[start : code.index(0, start)] != b".nv.info":
            continue
        place, end = offset, offset + length
        while place < end:
            form, attribute, payload = struct.unpack_from("<BBH", code, place)
            if (form, attribute) == (4, 17):
                kernels.append(struct.unpack_from("<I", code, place + 8)[0])
            place += 4 + (payload if form == 4 else 0)
    assert kernels
    return sum(kernels)
