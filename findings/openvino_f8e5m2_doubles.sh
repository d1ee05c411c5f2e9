#!/usr/bin/env bash
# OpenVINO 2026.4.1 (CPU): a conversion to f8e5m2 turns numbers just below 2**-15 into 2**-14, twice their value.
#
# Expected: the nearest value, 2**-15; a conversion never puts the smaller of two numbers above the larger one.
# Seen: numbers from (1 - 2**-12) * 2**-15 to below 2**-15 become 2**-14, and 2**-15 itself stays; the same below 2**-16.
# The path is by float16, in whose subnormal range a carry of the rounding counts twice.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q openvino==2026.4.1 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import numpy as np
import openvino
from openvino import opset13 as op

x = op.parameter([-1], np.float32)
y = op.convert(op.convert(x, openvino.Type.f8e5m2), openvino.Type.f32)
model = openvino.Core().compile_model(openvino.Model([y], [x]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
print("openvino", openvino.__version__)
for power in (-16, -15):
    numbers = np.array([0.999, 1 - 2.0**-12, 1 - 2.0**-23, 1.0], np.float32) * np.float32(2.0**power)
    multiples = model([numbers])[0] / np.float32(2.0**power)
    print(f"0.999, 1 - 2**-12, 1 - 2**-23 and 1 times 2**{power} become", multiples, f"times 2**{power}")
    assert multiples.tolist() == [1.0, 2.0, 2.0, 1.0], "another behaviour"
PYTHON
echo "as described"
