# pip: mlx==0.32.4 mlx-cpu==0.32.4 numpy
# SPDX-License-Identifier: Apache-2.0
"""mlx on the CPU: quantize and dequantize of its modes, and to_fp8."""

import mlx.core as mx
import numpy as np
from peer import answer

MODES = {"mxfp8_e4m3": ("mxfp8", 8, 32), "mxfp4": ("mxfp4", 4, 32), "nvfp4": ("nvfp4", 4, 16)}


def numbers(x, bits=None):
    """Return an mlx array as float32, or the codes of ``bits`` bits that it packs, first in the lowest bits."""
    if bits is None:
        return np.array(x.astype(mx.float32))
    stream = np.unpackbits(np.array(x).view(np.uint8), bitorder="little").reshape(-1, bits)
    return stream.astype(np.int64) @ (1 << np.arange(bits))


def cast(x, request):
    x = mx.array(x).view(mx.bfloat16) if request["dtype"] == "bf16" else mx.array(x)
    if request["format"] == "e4m3":
        code = mx.to_fp8(x)
        return {"value": numbers(mx.from_fp8(code, mx.float32)), "code": np.array(code).astype(np.int64)}
    fmt = request["format"]
    mode, bits, group = MODES.get(fmt) or ("affine", int(fmt[4]), request["block"])
    how = {"group_size": group, "bits": bits, "mode": mode}
    q = mx.quantize(x, **how)
    if mode == "affine":
        value, scale, zero = mx.dequantize(*q, **how), numbers(q[1]), numbers(q[2])
        return {"value": numbers(value), "code": numbers(q[0], bits), "scale": scale, "zero": zero}
    value = mx.dequantize(*q, **how, dtype=mx.float32)
    return {"value": numbers(value), "code": numbers(q[0], bits)}


answer(cast, "mlx")
