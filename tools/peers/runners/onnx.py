# pip: onnx==1.23.2 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""The reference evaluator of onnx: Cast with saturate 1 and 0, and back to float."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

TYPES = {
    "e4m3": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2", "e4m3fnuz": "FLOAT8E4M3FNUZ", "e5m2fnuz": "FLOAT8E5M2FNUZ",
    "e8m0": "FLOAT8E8M0", "bf16": "BFLOAT16", "fp16": "FLOAT16", "e2m1": "FLOAT4E2M1",
}  # fmt: skip
SOURCES = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "fp64": TensorProto.DOUBLE}
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    to, saturate = getattr(TensorProto, TYPES[request["format"]]), {"saturate": 0} if request["profile"] else {}
    nodes = [helper.make_node("Cast", ["x"], ["q"], to=to, **saturate), helper.make_node("Cast", ["q"], ["y"], to=1)]
    x = helper.make_tensor_value_info("x", SOURCES[request["dtype"]], None)
    graph = helper.make_graph(nodes, "g", [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    with np.errstate(all="ignore"):
        value = ReferenceEvaluator(model).run(None, {"x": np.load(folder / request["x"])})[0]
    np.savez(folder / request["out"], value=value.astype(np.float32))
(folder / "versions.json").write_text(json.dumps({"onnx": onnx.__version__, "numpy": np.__version__}))
