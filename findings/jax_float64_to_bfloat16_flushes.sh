#!/usr/bin/env bash
# jax 0.10.2 (CPU, 64-bit numbers enabled): float64 to bfloat16 turns numbers into 0 that float32 keeps.
#
# Expected: float64 and float32 of the same value become the same bfloat16; 2**-127 is a bfloat16.
# Seen: astype(bfloat16) of 2**-127 is 0 from float64 and 2**-127 from float32; float64 goes by float32, whose subnormals
# are flushed on that way alone. numpy with ml_dtypes keeps it from both.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q jax==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

jax.config.update("jax_enable_x64", True)
print("jax", jax.__version__)
for number in (2.0**-127, 1.5 * 2.0**-130):
    results = [float(jnp.asarray(np.array([number], t)).astype(jnp.bfloat16)[0]) for t in (np.float64, np.float32)]
    peers = [float(np.array([number], t).astype(ml_dtypes.bfloat16)[0]) for t in (np.float64, np.float32)]
    print(number, "jax from float64, float32:", results, "numpy:", peers)
    assert results == [0.0, number] and peers == [number, number], "another behaviour"
PYTHON
echo "as described"
