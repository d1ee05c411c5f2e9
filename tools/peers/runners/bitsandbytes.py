# pip: bitsandbytes==0.50.2 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes on the CPU: quantize_4bit and quantize_blockwise, and their inverses into float32."""

import bitsandbytes.functional as F
import torch
from peer import answer, arrays, torch_tensor


def cast(x, request):
    x, fmt, block = torch_tensor(x, request["dtype"]), request["format"], request["block"]
    if "dynamic8" in fmt:
        code = F.create_dynamic_map(signed="unsigned" not in fmt)
        q, state = F.quantize_blockwise(x, code=code, blocksize=block)
        state.dtype = torch.float32
        return arrays(value=F.dequantize_blockwise(q, state), code=q, scale=state.absmax)
    q, state = F.quantize_4bit(x, blocksize=block, quant_type="nf4" if fmt.startswith("nf4") else "fp4")
    state.dtype = torch.float32
    code = torch.stack([q.flatten() >> 4, q.flatten() & 15], 1).reshape(x.shape)
    return arrays(value=F.dequantize_4bit(q, state), code=code, scale=state.absmax)


answer(cast, "bitsandbytes", "torch")
