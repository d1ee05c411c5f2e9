# pip: jax==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""JAX on a CPU: astype, op by op and under jit, with 64-bit numbers enabled."""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

jax.config.update("jax_enable_x64", True)
TYPES = {
    "bf16": "bfloat16", "fp16": "float16", "e3m4": "float8_e3m4", "e4m3_ieee": "float8_e4m3", "e4m3": "float8_e4m3fn",
    "e4m3b11fnuz": "float8_e4m3b11fnuz", "e4m3fnuz": "float8_e4m3fnuz", "e5m2": "float8_e5m2",
    "e5m2fnuz": "float8_e5m2fnuz", "e8m0": "float8_e8m0fnu", "e2m1": "float4_e2m1fn",
}  # fmt: skip
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = np.load(folder / request["x"])
    x = jnp.asarray(x.view(ml_dtypes.bfloat16) if request["dtype"] == "bf16" else x)
    dtype = getattr(jnp, TYPES[request["format"]])
    if request["profile"] == "jit":
        result = np.asarray(jax.jit(lambda x, dtype=dtype: x.astype(dtype))(x))
    else:
        result = np.asarray(x.astype(dtype))
    code = result.view(f"u{result.dtype.itemsize}").astype(np.int64)
    np.savez(folder / request["out"], value=result.astype(np.float32), code=code)
(folder / "versions.json").write_text(json.dumps({"jax": jax.__version__, "ml_dtypes": ml_dtypes.__version__}))
