# pip: tensorflow-cpu==2.21.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow on a CPU: tf.cast, op by op and compiled by XLA."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorflow as tf

TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16", "fp16": "half"}
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    name = TYPES[request["format"]]
    dtype = getattr(tf.dtypes, name, None) or getattr(tf.dtypes.experimental, name)
    x = np.load(folder / request["x"])
    x = tf.constant(x.view(ml_dtypes.bfloat16) if request["dtype"] == "bf16" else x)
    cast = tf.function(lambda x, dtype=dtype: tf.cast(x, dtype), jit_compile=request["profile"] == "xla")
    value = (cast(x) if request["profile"] else tf.cast(x, dtype)).numpy().astype(np.float32)
    np.savez(folder / request["out"], value=value)
(folder / "versions.json").write_text(json.dumps({"tensorflow-cpu": tf.__version__}))
