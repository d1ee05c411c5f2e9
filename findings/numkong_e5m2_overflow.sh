#!/usr/bin/env bash
# NumKong 7.8.6 (x86 with AVX-512): arrays cast to float8_e5m2 give Inf, NaN and Inf again as numbers grow; NaN becomes Inf.
#
# Expected: Inf for every number from 61440 on, NaN for NaN, as the constructor of one number gives.
# Seen: 61440 to 73728 are Inf, above that to below 122880 NaN, from 122880 on Inf. NaN in an array becomes Inf in E5M2 and
# 448 in E4M3; one number stays NaN in both.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q numkong==7.8.6 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import numkong
import numpy as np

nan, inf = float("nan"), float("inf")


def cast(numbers, dtype):
    return np.asarray(numkong.astype(numkong.astype(np.array(numbers, np.float32), dtype), "float32")).tolist()


print("numkong", numkong.__version__, "AVX-512:", numkong.get_capabilities()["skylake"])
numbers = [61439.0, 61440.0, 73728.0, 73736.0, 98304.0, 122872.0, 122880.0, 1e30, nan]
arrays, ones = cast(numbers, "float8_e5m2"), [float(numkong.float8_e5m2(number)) for number in numbers]
print(numbers, "\narray", arrays, "\none number", ones)
assert repr(arrays) == repr([57344.0, inf, inf, nan, nan, nan, inf, inf, inf]), "another behaviour"
assert repr(ones) == repr([57344.0, *[inf] * 7, nan]), "another behaviour"
print("NaN to float8_e4m3: array", cast([nan], "float8_e4m3"), "one number", float(numkong.float8_e4m3(nan)))
assert cast([nan], "float8_e4m3") == [448.0] and np.isnan(float(numkong.float8_e4m3(nan))), "another behaviour"
PYTHON
echo "as described"
