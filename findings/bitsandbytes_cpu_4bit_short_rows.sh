#!/usr/bin/env bash
# bitsandbytes 0.50.2 (torch 2.13.0, CPU): 4-bit weights whose rows are no multiple of a block decode to other numbers.
#
# Expected: dequantize_4bit gives code[nibble] * absmax of each block of the flattened tensor, whatever its shape.
# Seen: for [5, 64] in blocks of 128 (NF4) the mean error against the weights is several times that of the codes and
# absmax by that definition; for [8, 128] both agree. No error, no warning.
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
for shape, agrees in (((8, 128), True), ((5, 64), False)):
    torch.manual_seed(0)
    weights = torch.randn(*shape)
    packed, state = F.quantize_4bit(weights, blocksize=128, quant_type="nf4")
    decoded = F.dequantize_4bit(packed, state)
    nibbles = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()[: weights.numel()].long()
    scales = state.absmax.repeat_interleave(128)[: weights.numel()]
    defined = (state.code[nibbles] * scales).view(shape)
    errors = [(x - weights).abs().mean().item() for x in (decoded, defined)]
    print(shape, "mean error of dequantize_4bit", round(errors[0], 3), "by definition", round(errors[1], 3))
    assert (errors[0] < 1.1 * errors[1]) is agrees, "another behaviour"
PYTHON
echo "as described"
