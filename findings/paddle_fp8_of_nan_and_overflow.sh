#!/usr/bin/env bash
# Paddle 3.3.1 (CPU): astype("float8_e4m3fn") turns NaN into 448, and 465 to 479 into NaN; E5M2's overflow is Inf, then 57344.
#
# Expected: NaN stays NaN, and numbers beyond the largest value all become it (or all NaN, or Inf in E5M2).
# Seen: E4M3: 464 is 448, 465 to below 480 NaN, from 480 on 448; Inf and NaN become 448. E5M2: 61440 to below 65536 become
# Inf, 65536 and Inf itself 57344; NaN stays NaN.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q paddlepaddle==3.3.1 numpy
"$room/env/bin/python" - <<'PYTHON'
import numpy as np
import paddle

nan, inf = float("nan"), float("inf")
print("paddle", paddle.__version__)
for name, expected in (
    ("float8_e4m3fn", [(464.0, 448.0), (465.0, nan), (479.0, nan), (480.0, 448.0), (inf, 448.0), (nan, 448.0)]),
    ("float8_e5m2", [(61439.0, 57344.0), (61440.0, inf), (65535.0, inf), (65536.0, 57344.0), (inf, 57344.0), (nan, nan)]),
):
    numbers = paddle.to_tensor(np.array([number for number, _ in expected], np.float32))
    result = numbers.astype(name).astype("float32").numpy().tolist()
    print(name, list(zip(numbers.numpy().tolist(), result)))
    assert repr(result) == repr([value for _, value in expected]), "another behaviour"
PYTHON
echo "as described"
