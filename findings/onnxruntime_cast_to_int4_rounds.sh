#!/usr/bin/env bash
# onnxruntime 1.32.0 (CPU): Cast of float32 to INT4 rounds, half away from zero; to INT8 and INT32 it truncates.
#
# Expected: one rule for all integers; onnx's reference evaluator drops the fraction for each of them.
# Seen: 0.5 and 1.7 become 1 and 2 as INT4 and UINT4, 0 and 1 as INT8.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

x = np.array([1.5, 1.7, 0.5, 2.5, -1.5, -1.7], np.float32)
print("onnxruntime", onnxruntime.__version__, x.tolist())
for name in ("INT4", "UINT4", "INT8", "INT32"):
    nodes = [helper.make_node("Cast", ["x"], ["q"], to=getattr(TensorProto, name))]
    nodes += [helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT)]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    numbers = x[:4] if name == "UINT4" else x
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result = run.run(None, {"x": numbers})[0].tolist()
    reference = ReferenceEvaluator(model).run(None, {"x": numbers})[0].tolist()
    print(name, result, "reference", reference)
    expected = np.sign(numbers) * np.floor(np.abs(numbers) + 0.5) if name.endswith("INT4") else np.trunc(numbers)
    assert result == expected.tolist(), "another behaviour"
PYTHON
echo "as described"
