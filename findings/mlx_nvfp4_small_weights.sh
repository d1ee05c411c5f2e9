#!/usr/bin/env bash
# mlx 0.32.4 (CPU): mode "nvfp4" turns blocks of ordinary small weights into zeros.
#
# Expected: NVFP4 has a float32 scale of the tensor beside its E4M3 scales: the size of weights does not matter.
# Seen: mx.quantize by default has none: the scale of a block is amax / 6 in E4M3, whose least number is 2**-9.
# Blocks up to amax 0.0058 decode as zeros, and from there to 0.09 scales have less than 4 bits: of weights of
# standard deviation 0.002 nearly all vanish; modes "mxfp4" and "affine" keep them. No error, no warning.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
import numpy as np

print("mlx", version("mlx"))
normal = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
errors = {}
for mode, group in (("nvfp4", 16), ("mxfp4", 32), ("affine", 32)):
    for size in (0.02, 0.002):
        how = {"group_size": group, "bits": 4, "mode": mode}
        weights = normal * np.float32(size)
        decoded = np.array(mx.dequantize(*mx.quantize(mx.array(weights), **how), **how).astype(mx.float32))
        errors[mode, size] = float(np.linalg.norm(decoded - weights) / np.linalg.norm(weights))
        zeros = f"{(decoded == 0).mean():.0%}"
        print(mode, "deviation", size, "relative error", round(errors[mode, size], 3), "zeros:", zeros)
assert errors["nvfp4", 0.002] > 0.8 and errors["mxfp4", 0.002] < 0.2 > errors["affine", 0.002], "another behaviour"
PYTHON
echo "as described"
