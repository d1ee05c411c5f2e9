# pip: qonnx==1.0.0 onnx numpy
# SPDX-License-Identifier: Apache-2.0
"""qonnx: the numpy functions of its IntQuant and FloatQuant nodes, scale 1."""

import numpy as np
from peer import answer
from qonnx.custom_op.general.floatquant import float_quant
from qonnx.custom_op.general.intquant import int_quant

FLOATS = {
    "e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0), "e2m1": (2, 1, 6.0), "e2m3": (2, 3, 7.5), "e3m2": (3, 2, 28.0),
}  # fmt: skip


def cast(x, request):
    fmt, one, mode = request["format"], np.float32(1), request["profile"].upper() or "ROUND"
    with np.errstate(all="ignore"):
        if fmt.startswith("int"):
            narrow, bits = not fmt.endswith("_full"), np.array(int(fmt[3:].split("_")[0]))
            return {"value": int_quant(x, one, np.float32(0), bits, True, narrow, mode)}
        exponent, mantissa, most = FLOATS[fmt]
        return {"value": float_quant(x, one, exponent, mantissa, max_val=most, rounding_mode=mode).astype(np.float32)}


answer(cast, "qonnx", "numpy")
