#!/usr/bin/env bash
# ml_dtypes 0.6.0: float8_e8m0fnu of a Python float from 1.5 * 2**128 to below 2**129 is 2**-127, its smallest value.
#
# Expected: NaN, which every other number beyond 1.5 * 2**127 gives (2**128 and 2**129 among them).
# Seen: the constructor wraps around to code 0; astype of a float64 array of the same numbers gives NaN.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

e8m0 = ml_dtypes.float8_e8m0fnu
print("ml_dtypes", ml_dtypes.__version__)
for factor, wraps in ((1.0, False), (1.49, False), (1.5, True), (1.99, True), (2.0, False), (3.0, False)):
    number = factor * 2.0**128
    with np.errstate(over="ignore"):
        one, array = e8m0(number), np.array([number]).astype(e8m0)[0]
    print(f"{factor} * 2**128: one number {one}, array {array}")
    assert np.isnan(np.float32(array)) and np.isnan(np.float32(one)) is np.bool_(not wraps), "another behaviour"
    assert not wraps or float(one) == 2.0**-127, "another behaviour"
PYTHON
echo "as described"
