#!/usr/bin/env bash
# optimum-quanto 0.2.7 (torch 2.13.0, CPU): a row of zeros becomes NaN in float8, but stays zero in int8 and int4.
#
# Expected: zeros, as for the integers; pruned rows and unused vocabulary are usual.
# Seen: quantize(model, weights=qfloat8) and freeze() divide 0 by the scale 0: the row decodes as NaN, and so does every
# output of a layer that adds it. No error, no warning.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 optimum-quanto==0.2.7 numpy
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from optimum.quanto import freeze, qfloat8, qint4, qint8, quantize

print("optimum-quanto", version("optimum-quanto"), "torch", torch.__version__)
for weights, becomes_nan in ((qint8, False), (qint4, False), (qfloat8, True)):
    model = torch.nn.Sequential(torch.nn.Linear(128, 4, bias=False))
    model[0].weight.data[0] = 0
    quantize(model, weights=weights)
    freeze(model)
    row = model[0].weight.dequantize().detach()[0]
    y = model(torch.ones(1, 128)).detach()[0, 0]
    print(weights.name, "row of zeros ->", row[:3].tolist(), "output", y.item())
    assert bool(row.isnan().all()) is becomes_nan and bool(y.isnan()) is becomes_nan, "another behaviour"
PYTHON
echo "as described"
