# pip: optimum-quanto==0.2.7 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""optimum-quanto on the CPU: the optimizers that quantize() and freeze() take by default, then quantize_weight."""

from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qtypes, quantize_weight
from peer import answer, arrays, torch_tensor

QTYPES = {"int8": "qint8", "e4m3": "qfloat8_e4m3fn", "e5m2": "qfloat8_e5m2", "e4m3fnuz": "qfloat8_e4m3fnuz"}


def cast(x, request):
    x, fmt = torch_tensor(x, request["dtype"]), request["format"]
    if fmt.startswith("uint"):
        qtype = qtypes[f"qint{fmt[4]}"]
        scale, shift = MaxOptimizer()(x, qtype=qtype, axis=0, group_size=request["block"])
        q = quantize_weight(x, qtype, 0, scale, shift, group_size=request["block"], optimized=False)
        return arrays(value=q.dequantize(), code=q._data.unpack(), scale=scale, zero=shift)
    qtype = qtypes[QTYPES[fmt.partition("_")[0]]]
    scale = AbsmaxOptimizer()(x, qtype=qtype, axis=0)
    q = quantize_weight(x, qtype, 0, scale)
    return arrays(value=q.dequantize(), code=q._data, scale=q._scale)


answer(cast, "optimum-quanto", "torch")
