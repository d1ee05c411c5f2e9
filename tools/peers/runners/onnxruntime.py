# pip: onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on a CPU: Cast with saturate 1 and 0, QuantizeLinear with the scale 1, DynamicQuantizeLinear."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

TYPES = {
    "e4m3": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2", "e4m3fnuz": "FLOAT8E4M3FNUZ", "e5m2fnuz": "FLOAT8E5M2FNUZ",
    "e8m0": "FLOAT8E8M0", "bf16": "BFLOAT16", "fp16": "FLOAT16", "int8_full": "INT8", "uint8": "UINT8",
    "int4_full": "INT4", "uint4": "UINT4",
}  # fmt: skip
SOURCES = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "fp64": TensorProto.DOUBLE}
options = onnxruntime.SessionOptions()
options.log_severity_level = 3


def session(profile, to, source):
    """Return a session of x to y, the codes' values, with the scale and the zero point where there are any."""
    outputs = ["y"]
    if profile in ("", "non_saturating"):
        saturate = {"saturate": 0} if profile else {}
        nodes = [helper.make_node("Cast", ["x"], ["codes"], to=to, **saturate)]
    elif profile == "quantize_linear":
        zero = {"name": "zero", "data_type": to, "dims": [], "vals": [0]}
        constants = [helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]), helper.make_tensor(**zero)]
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in constants]
        nodes.append(helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["codes"]))
    else:
        nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"])]
        outputs += ["codes", "scale", "zero"]
    if profile == "dynamic":
        nodes.append(helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"]))
    else:
        nodes.append(helper.make_node("Cast", ["codes"], ["y"], to=TensorProto.FLOAT))
    kinds = {"y": TensorProto.FLOAT, "codes": to, "scale": TensorProto.FLOAT, "zero": to}
    infos = [helper.make_tensor_value_info(name, kinds[name], None) for name in outputs]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", source, None)], infos)
    opset = 25 if to == TensorProto.FLOAT8E8M0 else 23
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]), outputs


sessions = {}
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    key = request["profile"], getattr(TensorProto, TYPES[request["format"]]), SOURCES[request["dtype"]]
    if key not in sessions:
        sessions[key] = session(*key)
    run, outputs = sessions[key]
    results = dict(zip(outputs, run.run(outputs, {"x": np.load(folder / request["x"])}), strict=True))
    names = {"y": "value", "codes": "code", "scale": "scale", "zero": "zero"}
    np.savez(folder / request["out"], **{names[name]: result for name, result in results.items()})
versions = {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
(folder / "versions.json").write_text(json.dumps(versions))
