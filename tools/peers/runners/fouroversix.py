# pip: fouroversix==1.0.5 torch==2.13.0 transformers==5.23.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""fouroversix, its PyTorch backend (installed with SKIP_CUDA_BUILD=1 and --no-build-isolation where torch is)."""

import torch
from fouroversix import QuantizationConfig
from fouroversix.quantize.frontend import dequantize, quantize_to_fp4
from peer import answer, arrays, torch_tensor


def cast(x, request):
    x = torch_tensor(x, request["dtype"])
    rows = -len(x) % 128  # of zeros, below: rows come in blocks of 128
    padded = torch.cat([x, x.new_zeros(rows, x.shape[1])])
    rule = request["profile"] or "mse"
    q = quantize_to_fp4(padded, QuantizationConfig(backend="pytorch", dtype="nvfp4", scale_rule=rule))
    value = dequantize(q, torch.float32, backend="pytorch", intermediate_dtype=torch.float32)
    return arrays(value=value[: len(x)], tensor_scale=q.amax.reshape(1))


answer(cast, "fouroversix", "torch")
