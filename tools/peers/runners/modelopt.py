# pip: nvidia-modelopt==0.47.0 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""ModelOpt on the CPU: the quantised tensors of compressed weights, and fake quantisation without CUDA extensions."""

import torch
from modelopt.torch.quantization.qtensor import (
    FP8QTensor,
    INT4QTensor,
    INT8QTensor,
    MXFP4QTensor,
    MXFP8QTensor,
    NVFP4QTensor,
)
from modelopt.torch.quantization.tensor_quant import FakeTensorQuantFunction, fp8_eager
from peer import answer, arrays, torch_tensor


def nibbles(q, low_first):
    pair = [q & 15, q >> 4] if low_first else [q >> 4, q & 15]
    return torch.stack(pair, -1).flatten(-2)


def cast(x, request):
    x, fmt, block = torch_tensor(x, request["dtype"]), request["format"], request["block"]
    axis = 0 if block == "row" else None
    if request["profile"] == "fake":
        amax = x.abs().amax(-1, keepdim=True) if block == "row" else x.abs().amax()
        return arrays(value=(fp8_eager(x, amax) if fmt.startswith("e4m3") else FakeTensorQuantFunction.apply(x, amax)))
    if fmt.startswith("nvfp4"):
        q, scale, tensor_scale = NVFP4QTensor.quantize(x.clone(), 16)
        value = q.dequantize(torch.float32, scale=scale, double_scale=tensor_scale, block_sizes={-1: 16})
        code = nibbles(q._quantized_data, True)
        return arrays(0, value=value, code=code, scale=scale, tensor_scale=tensor_scale.reshape(1))
    if fmt == "mxfp4":
        q, scale = MXFP4QTensor.quantize(x, 32)
        value = q.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
        return arrays(0, value=value, code=nibbles(q._quantized_data, True))
    if fmt == "mxfp8_e4m3":
        q, scale = MXFP8QTensor.quantize(x)
        return arrays(value=q.dequantize(torch.float32, scale=scale), code=q._quantized_data)
    if fmt.startswith("int4"):
        q, scale = INT4QTensor.quantize(x, block)
        value = q.dequantize(torch.float32, scale=scale, block_sizes={-1: block})
        return arrays(value=value, code=nibbles(q._quantized_data, False).long() - 8, scale=scale)
    kind = FP8QTensor if fmt.startswith("e4m3") else INT8QTensor
    q, scale = kind.quantize(x, axis=axis)
    return arrays(value=q.dequantize(torch.float32, scale=scale), code=q._quantized_data, scale=scale)


answer(cast, "nvidia-modelopt", "torch")
