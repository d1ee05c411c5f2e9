# pip: transformer_engine==2.20.2 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's reference quantisers in plain torch. The package is installed without its CUDA libraries, so its
modules are loaded beside stand-ins for what needs them."""

import importlib.util
import sys
import types
from unittest.mock import MagicMock

import torch
from peer import answer, arrays, torch_tensor

root = next(iter(importlib.util.find_spec("transformer_engine").submodule_search_locations))
for name in ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.quantized_tensor"):
    module = sys.modules[f"transformer_engine{name}"] = types.ModuleType(f"transformer_engine{name}")
    module.__path__ = [root + name.replace(".", "/")]
module.QuantizedTensorStorage, module.Quantizer = object, type("Quantizer", (), {"__init__": lambda self, **_: None})
sys.modules["transformer_engine.pytorch.custom_recipes"].gemm = MagicMock()
from transformer_engine.pytorch.custom_recipes import reference_current_scaling, reference_nvfp4  # noqa: E402


def cast(x, request):
    x, profile, fmt = torch_tensor(x, request["dtype"]), request["profile"], request["format"]
    if fmt == "nvfp4":
        amax = x.abs().amax().float().reshape(1)
        how = {"pow_2_scales": profile == "pow2", "eps": 0.0}
        if profile.startswith("four_over_six"):
            how |= {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": profile[-3:].upper(), "nvfp4_e4m3_max": 256}
        quantise = reference_nvfp4.NVFP4QuantizerRef._quantize_blockwise_reference
        q, scale = quantise(x, amax, 16, 1, **how)
        code, scale = torch.stack([q & 15, q >> 4], -1).flatten(-2), scale.float()
        numbers = reference_nvfp4.cast_from_fp4x2(q, torch.float32) * scale.repeat_interleave(16, 1)
        whole = 1.0 if profile == "pow2" else amax * torch.tensor(1 / (6.0 * how.get("nvfp4_e4m3_max", 448)))
        return arrays(0, value=numbers * whole, code=code, scale=scale)
    dtype = torch.float8_e4m3fn if fmt.startswith("e4m3") else torch.float8_e5m2
    quantiser = reference_current_scaling.CurrentScalingQuantizerRef(dtype, pow_2_scales=profile == "pow2")
    quantiser.rowwise_usage, quantiser.columnwise_usage = True, False
    q, scale, _, _ = quantiser._quantize(x)
    return arrays(value=q.float() * scale, code=q, scale=scale)


answer(cast, "transformer_engine", "torch")
