#!/usr/bin/env bash
# fouroversix 1.0.5 (torch 2.13.0, its PyTorch backend): the largest number of a small block is quantised as -0.
#
# Expected: of all numbers of a block the largest stays the largest; NVFP4 saturates at 6.
# Seen: where a block's scale is between 1 and 1.5 times the least E4M3 number it is rounded down, and elements rise to
# 9 times that scale. The rounding has no clamp: they round to 8, which is no E2M1 number; its bits are the code of -0.
# Here a block of numbers up to 6.2e-6, next to ones: the largest is lost, those beside it stay. No error.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy "setuptools<82" wheel ninja packaging psutil
SKIP_CUDA_BUILD=1 "$room/env/bin/pip" install -q --no-deps --no-build-isolation fouroversix==1.0.5
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from fouroversix import QuantizationConfig
from fouroversix.quantize.frontend import dequantize, quantize_to_fp4

print("fouroversix", version("fouroversix"), "torch", torch.__version__)
x = torch.ones(128, 64)
x[0, :16] = 6.2e-6 * torch.arange(1, 17) / 16  # amax / 6 * 2688 is 1.42 * 2**-9
q = quantize_to_fp4(x, QuantizationConfig(backend="pytorch", dtype="nvfp4", scale_rule="static_6"))
decoded = dequantize(q, torch.float32, backend="pytorch", intermediate_dtype=torch.float32)[0, :16]
print("x      ", [f"{v:.1e}" for v in x[0, :16:3].tolist()])
print("decoded", [f"{v:.1e}" for v in decoded[::3].tolist()])
assert decoded[15] == 0 and decoded[15].signbit() and decoded[9] > 3e-6, "another behaviour"
assert (decoded[:10] > 0).any() and (decoded[13:] == 0).all(), "another behaviour"
PYTHON
echo "as described"
