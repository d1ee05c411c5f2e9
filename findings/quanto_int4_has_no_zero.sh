#!/usr/bin/env bash
# optimum-quanto 0.2.7 (torch 2.13.0, CPU): qint4 turns the zeros of pruned weights into other numbers.
#
# Expected: zero is exact, as in int8 of the same library and in most 4-bit schemes with zero points.
# Seen: the shift of a group is minus its least number, not rounded to a step, so that 0 is no value of nearly every
# group: a layer whose weights are half zeros has almost none after freeze(), and the zeros move by up to half a step.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 optimum-quanto==0.2.7 numpy ninja
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from optimum.quanto import freeze, qint4, qint8, quantize

print("optimum-quanto", version("optimum-quanto"), "torch", torch.__version__)
torch.manual_seed(0)
weights = torch.randn(64, 256)
weights[torch.rand(weights.shape) < 0.5] = 0
shares = {}
for qtype in (qint8, qint4):
    model = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
    model[0].weight.data = weights.clone()
    quantize(model, weights=qtype)
    freeze(model)
    decoded = model[0].weight.dequantize()
    shares[qtype.name] = (decoded[weights == 0] == 0).float().mean().item()
    print(qtype.name, "of the zeros, zero after freeze():", f"{shares[qtype.name]:.1%}")
assert shares["qint8"] == 1 and shares["qint4"] < 0.2, "another behaviour"
PYTHON
echo "as described"
