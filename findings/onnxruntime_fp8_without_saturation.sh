#!/usr/bin/env bash
# onnxruntime 1.32.0 (CPU): Cast with saturate=0 goes NaN, 448, NaN with growing numbers (E4M3), and NaN, Inf (E5M2).
#
# Expected: with saturate=0 whatever rounds beyond the largest value becomes NaN (E4M3) or Inf (E5M2).
# Seen: E4M3: 465 is NaN, 480 to below 496 is 448 again, 496 is NaN. E5M2: 61440 to below 65536, which round to 65536, are
# NaN, and 65536 is Inf.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

nan, inf = float("nan"), float("inf")
print("onnxruntime", onnxruntime.__version__)
for name, expected in (
    ("FLOAT8E4M3FN", {448.0: 448.0, 464.0: 448.0, 465.0: nan, 479.0: nan, 480.0: 448.0, 495.0: 448.0, 496.0: nan}),
    ("FLOAT8E5M2", {57344.0: 57344.0, 61439.0: 57344.0, 61440.0: nan, 65535.0: nan, 65536.0: inf, 1e6: inf}),
):
    nodes = [helper.make_node("Cast", ["x"], ["q"], to=getattr(TensorProto, name), saturate=0)]
    nodes += [helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT)]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result = run.run(None, {"x": np.array(list(expected), np.float32)})[0].tolist()
    print(name, dict(zip(expected, result)))
    assert repr(result) == repr(list(expected.values())), "another behaviour"
PYTHON
echo "as described"
