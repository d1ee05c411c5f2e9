# pip: torchao==0.18.0 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""torchao on the CPU: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MXTensor, NVFP4Tensor, float8 training."""

import torch
from peer import answer, arrays, torch_tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import Float8Tensor, IntxUnpackedToInt8Tensor, PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.workflows import Int8Tensor

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MX = {
    "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp6_e3m2": DTYPE_FP6_E3M2, "mxfp4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def cast(x, request):
    x, profile, fmt = torch_tensor(x, request["dtype"]), request["profile"], request["format"]
    asymmetric = MappingType.ASYMMETRIC if "zp" in fmt or profile == "asymmetric" else MappingType.SYMMETRIC
    if fmt.startswith("mx"):
        mode = ScaleCalculationMode[profile.upper() or "FLOOR"]
        q = MXTensor.to_mx(x, MX[fmt], 32, mode)
        codes = unpack_uint4(q.qdata) if fmt == "mxfp4" else q.qdata
        return arrays(None if "fp8" in fmt else 0, value=q.dequantize(torch.float32), code=codes, scale=q.scale)
    if fmt.startswith("nvfp4"):
        per_tensor = None if profile == "single_level" else per_tensor_amax_to_scale(x.abs().amax())
        q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor)
        code = unpack_uint4(q.qdata)
        return arrays(0, value=q.dequantize(torch.float32), code=code, scale=q.scale, tensor_scale=per_tensor)
    if fmt.startswith("int8"):
        granularity = PerRow() if fmt.endswith("channel") else PerTensor()
        q = Int8Tensor.from_hp(x, granularity, mapping_type=asymmetric)
        return arrays(value=q.dequantize(torch.float32), code=q.qdata, scale=q.scale, zero=q.zero_point)
    if "int4" in fmt:
        q = IntxUnpackedToInt8Tensor.from_hp(x, (1, request["block"]), torch.int4, mapping_type=asymmetric)
        return arrays(value=q.dequantize(), code=q.qdata, scale=q.scale, zero=q.zero_point)
    dtype, rows = FLOAT8[fmt[:4]], fmt.endswith("channel")
    if profile.startswith("training"):
        granularity = ScalingGranularity.AXISWISE if rows else ScalingGranularity.TENSORWISE
        q = hp_tensor_to_float8_dynamic(
            x, dtype, LinearMMConfig(), scaling_granularity=granularity, axiswise_dim=-1 if rows else None,
            round_scales_to_power_of_2=profile.endswith("pow2"),
        )  # fmt: skip
        return arrays(value=q._data.float() / q._scale, code=q._data, scale=q._scale)
    q = Float8Tensor.from_hp(x, dtype, PerRow() if rows else PerTensor())
    return arrays(value=q.dequantize(torch.float32), code=q.qdata, scale=q.scale)


answer(cast, "torchao", "torch")
