# pip: brevitas==0.13.4 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""brevitas on the CPU: quant_weight() of a QuantLinear layer."""

import brevitas.nn as qnn
from brevitas.quant import Int8WeightPerChannelFloat, Int8WeightPerTensorFloat
from brevitas.quant.experimental.float_quant_ocp import Fp8e4m3OCPWeightPerTensorFloat, Fp8e5m2OCPWeightPerTensorFloat
from peer import answer, arrays, torch_tensor

QUANTISERS = {
    "int8_tensor": Int8WeightPerTensorFloat, "int8_channel": Int8WeightPerChannelFloat,
    "e4m3_tensor": Fp8e4m3OCPWeightPerTensorFloat, "e5m2_tensor": Fp8e5m2OCPWeightPerTensorFloat,
}  # fmt: skip


def cast(x, request):
    x = torch_tensor(x, request["dtype"])
    layer = qnn.QuantLinear(x.shape[1], x.shape[0], bias=False, weight_quant=QUANTISERS[request["format"]])
    layer.weight.data = x
    q = layer.quant_weight()
    return arrays(value=q.value, scale=q.scale.reshape(-1))


answer(cast, "brevitas", "torch")
