#!/usr/bin/env bash
# OpenVINO 2026.4.1 (CPU): a model that converts to f16 and back to f32 does not convert; to bf16 and back it does.
#
# Expected: rounding to float16, which INFERENCE_PRECISION_HINT f32 leaves to the model: 100000 becomes Inf.
# Seen: 100000 stays 100000 and 1 + 2**-20 stays; the pair of conversions is taken out when the model is compiled.
# Folded on constants, the same pair gives Inf and 1.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q openvino==2026.4.1 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import numpy as np
import openvino
from openvino import opset13 as op
from openvino.passes import ConstantFolding, Manager

numbers = np.array([100000.0, 1 + 2.0**-20, 65537.0], np.float32)
results = {}
for name in ("f16", "bf16"):
    x = op.parameter([-1], np.float32)
    y = op.convert(op.convert(x, getattr(openvino.Type, name)), openvino.Type.f32)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    results[name] = openvino.Core().compile_model(openvino.Model([y], [x]), "CPU", settings)([numbers])[0].tolist()
constant = op.convert(op.convert(op.constant(numbers), openvino.Type.f16), openvino.Type.f32)
model, passes = openvino.Model([constant], []), Manager()
passes.register_pass(ConstantFolding())
passes.run_passes(model)
results["f16, folded"] = model.get_results()[0].input_value(0).get_node().data.tolist()
print("openvino", openvino.__version__, numbers.tolist(), "->", results)
assert results["f16"] == numbers.tolist(), "another behaviour"
assert results["bf16"][0] == 99840.0 and results["bf16"][1] == 1.0, "another behaviour"
assert results["f16, folded"] == [float("inf"), 1.0, float("inf")], "another behaviour"
PYTHON
echo "as described"
