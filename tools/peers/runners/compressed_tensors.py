# pip: compressed-tensors==0.20.1 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors on the CPU: calculate_qparams, then quantize and dequantize, as llm-compressor calls them."""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from peer import answer, arrays, torch_tensor

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def arguments(fmt, block):
    """Return QuantizationArgs, as the preset schemes have them."""
    common = {"dynamic": False, "symmetric": "zp" not in fmt}
    if fmt.startswith("nvfp4"):
        float8 = torch.float8_e4m3fn
        common |= {"strategy": "tensor_group", "group_size": 16, "scale_dtype": float8, "zp_dtype": float8}
        return QuantizationArgs(num_bits=4, type="float", **common)
    if fmt.startswith("mxfp"):
        common |= {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
        return QuantizationArgs(num_bits=int(fmt[4]), type="float", **common)
    common |= {"strategy": "group", "group_size": block} if isinstance(block, int) else {
        "strategy": {"row": "channel", "tensor": "tensor"}[block]}  # fmt: skip
    kind, bits = ("float", 8) if fmt.startswith("e4m3") else ("int", 4 if "int4" in fmt else 8)
    return QuantizationArgs(num_bits=bits, type=kind, **common)


def cast(x, request):
    x, fmt, block = torch_tensor(x, request["dtype"]), request["format"], request["block"]
    args = arguments(fmt, block)
    blocks = x.unflatten(-1, (-1, block if isinstance(block, int) else x.shape[-1]))
    low, high = (x.amin(), x.amax()) if block == "tensor" else (blocks.amin(-1), blocks.amax(-1))
    tensor_scale = generate_gparam(x.amin(), x.amax()) if fmt.startswith("nvfp4") else None
    scale, zero = calculate_qparams(low, high, args, global_scale=tensor_scale)
    zero = None if args.symmetric else zero
    q = quantize(x, scale, zero, args, global_scale=tensor_scale)
    value = dequantize(q, scale, zero, args, global_scale=tensor_scale)
    if args.type == "float":
        code = q.float().to(torch.float8_e4m3fn) if args.num_bits == 8 else None
        if args.num_bits == 4:
            code = torch.searchsorted(FP4, q.float().abs()) + 8 * q.signbit()
        nan_code = None if args.num_bits != 4 else 0
        return arrays(nan_code, value=value, code=code, scale=scale, tensor_scale=tensor_scale)
    return arrays(value=value, code=q.nan_to_num(0).long(), scale=scale, zero=zero)


answer(cast, "compressed-tensors", "torch")
