# pip: torch==2.13.0 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""PyTorch on a CPU: Tensor.to, and the quantisers of torch.ao.quantization."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

warnings.simplefilter("ignore")
from torch.ao.quantization import FakeQuantize, MinMaxObserver, PerChannelMinMaxObserver  # noqa: E402

DTYPES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz, "e8m0": torch.float8_e8m0fnu, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int8_full": torch.qint8, "uint8": torch.quint8,
}  # fmt: skip


def quantized(x, profile, dtype):
    """Return value, code, scale and zero point."""
    if profile == "fake_quantize":
        module = FakeQuantize(MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
        return {"value": module(x), "scale": module.scale, "zero": module.zero_point}
    if profile == "dynamic":
        q = torch.quantize_per_tensor_dynamic(x, dtype, False)
    elif profile == "per_channel":
        observer = PerChannelMinMaxObserver(dtype=dtype, qscheme=torch.per_channel_symmetric)
        observer(x)
        q = torch.quantize_per_channel(x, *observer.calculate_qparams(), 0, dtype)
        return {"value": q.dequantize(), "code": q.int_repr(), "scale": q.q_per_channel_scales().float()}
    else:
        observer = MinMaxObserver(dtype=dtype)
        observer(x)
        q = torch.quantize_per_tensor(x, *observer.calculate_qparams(), dtype)
    scale, zero = torch.tensor(q.q_scale(), dtype=torch.float64), torch.tensor(q.q_zero_point())
    return {"value": q.dequantize(), "code": q.int_repr(), "scale": scale, "zero": zero}


folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = torch.from_numpy(np.load(folder / request["x"]))
    x = x.view(torch.int16).view(torch.bfloat16) if request["dtype"] == "bf16" else x
    dtype = DTYPES[request["format"]]
    if request["profile"]:
        try:
            results = quantized(x, request["profile"], dtype)
        except RuntimeError as error:  # NaN and Inf: refused
            print(request["profile"], str(error).splitlines()[0], file=sys.stderr)
            continue
    else:
        y = x.to(dtype)
        results = {"value": y.float()}
        if dtype.itemsize == 1:
            results["code"] = y.view(torch.uint8)
    results = {name: result.numpy() for name, result in results.items()}
    if "code" in results:
        results["code"] = results["code"].astype(np.int64)
    np.savez(folder / request["out"], **results)
(folder / "versions.json").write_text(json.dumps({"torch": torch.__version__.split("+")[0]}))
