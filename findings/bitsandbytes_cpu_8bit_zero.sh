#!/usr/bin/env bash
# bitsandbytes 0.50.2 (torch 2.13.0, CPU): 8-bit blockwise quantisation has no zero, and NaN becomes the least number.
#
# Expected: the dynamic map has a code for 0, so zeros stay 0; NaN stays visible.
# Seen: the CPU library rounds x / absmax to one of 65,536 steps from -1 to 1 first, none of which is 0: zeros decode as
# 2e-5 of the block's largest number, so an optimizer's zero moments become positive. A block with NaN decodes NaN as
# minus its largest number. No error, no warning.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import bitsandbytes.functional as F
import torch

print("bitsandbytes", version("bitsandbytes"), "torch", torch.__version__)
code = F.create_dynamic_map()
assert (code == 0).any()
x = torch.zeros(256)
x[0], x[1] = 1.0, torch.nan
codes, state = F.quantize_blockwise(x, code=code, blocksize=256)
decoded = F.dequantize_blockwise(codes, state)
print("1, NaN, 0, 0 decode as", [f"{v:.2e}" for v in decoded[:4].tolist()], "absmax", state.absmax.item())
assert decoded[0] == 1 and decoded[1] < -0.9 and (decoded[2:] > 0).all() and decoded[2] < 1e-4, "another behaviour"
PYTHON
echo "as described"
