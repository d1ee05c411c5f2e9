#!/usr/bin/env bash
# torchao 0.18.0 (torch 2.13.0, CPU): bfloat16 weights get other 4-bit codes than the same numbers in float32.
#
# Expected: IntxWeightOnlyConfig rounds w / scale to the nearest integer; every bfloat16 number is a float32 number.
# Seen: scale, reciprocal and product are rounded to bfloat16's 8 bits before the product is rounded to 4: one weight in
# a hundred gets another code than in a float32 model, and one that is not the nearest by the scale that is stored.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 torchao==0.18.0 numpy
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

print("torchao", version("torchao"), "torch", torch.__version__)
torch.manual_seed(0)
weights = torch.randn(256, 1024).bfloat16()
quantised = {}
for dtype in (torch.float32, torch.bfloat16):
    layer = torch.nn.Linear(1024, 256, bias=False, dtype=dtype)
    layer.weight.data = weights.to(dtype)
    quantize_(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    quantised[dtype] = layer.weight
short, exact = quantised[torch.bfloat16], quantised[torch.float32]
share = (short.qdata != exact.qdata).float().mean().item()
scales = short.scale.float().repeat_interleave(32, 1)
nearest = torch.round(weights.float() / scales).clamp(-8, 7)
wrong = (short.qdata.float() != nearest).float().mean().item()
print(f"codes of bfloat16 and float32 weights differ: {share:.2%}; not nearest by bfloat16's scales: {wrong:.2%}")
assert 0.005 < share < 0.05 and 0.005 < wrong < 0.05, "another behaviour"
PYTHON
echo "as described"
