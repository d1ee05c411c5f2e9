# pip: openvino==2026.4.1 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""OpenVINO on a CPU: Convert to a format and back to f32, FakeQuantize of 256 levels a step apart."""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13 as op

TYPES = {
    "e4m3": "f8e4m3",
    "e5m2": "f8e5m2",
    "e8m0": "f8e8m0",
    "e2m1": "f4e2m1",
    "bf16": "bf16",
    "fp16": "f16",
    "nf4": "nf4",
}
core = openvino.Core()


def compiled(outputs, x):
    return core.compile_model(openvino.Model(outputs, [x]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


folder = Path(sys.argv[1])
models = {}
for request in json.loads((folder / "requests.json").read_text()):
    key = request["profile"], request["format"]
    x = np.load(folder / request["x"])
    if key not in models:
        parameter = op.parameter([-1], np.float32)
        if key[0] == "fake_quantize":
            low, high = (-128, 127) if key[1] == "int8_full" else (0, 255)
            ends = [op.constant(np.array([end], np.float32)) for end in (low, high, low, high)]
            models[key] = compiled([op.fake_quantize(parameter, *ends, 256)], parameter)
        else:
            codes = op.convert(parameter, getattr(openvino.Type, TYPES[key[1]]))
            # a pair of conversions by f16 would be taken out
            models[key] = compiled([codes if key[1] == "fp16" else op.convert(codes, openvino.Type.f32)], parameter)
    np.savez(folder / request["out"], value=models[key]([x])[0].astype(np.float32))
(folder / "versions.json").write_text(json.dumps({"openvino": openvino.__version__.split("-")[0]}))
