#!/usr/bin/env bash
# torch 2.13.0 (CPU): the compiler keeps torch.mm for good as it is at the first torch.compile of a process.
#
# Expected: a function that stands in for torch.mm for some lines (a counter of products, a mock of a test) is gone
# when the lines end.
# Seen: where something without a product is compiled for the first time inside these lines, every product that is
# compiled later calls the stand-in. And a product whose compiled code is in the cache on disk, written by a process
# in which nothing stood in, raises AttributeError, because the code looks the function up by the stand-in's name.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 numpy setuptools
export TORCHINDUCTOR_CACHE_DIR="$room/cache"
cat >"$room/products.py" <<'PYTHON'
import sys
from unittest import mock

import torch

real, calls = torch.mm, []


def counted(*args, **kwargs):
    calls.append(args)
    return real(*args, **kwargs)


torch.manual_seed(0)
x, w = torch.randn(4, 8), torch.randn(8, 4)
if sys.argv[1] == "counted":
    with mock.patch.object(torch, "mm", counted):
        torch.compile(lambda t: t.relu() + 1)(x)
assert torch.mm is real
calls.clear()
try:
    assert torch.equal(torch.compile(lambda a, b: a @ b)(x, w), x @ w)
    print(torch.__version__, "calls of the stand-in after it is gone:", len(calls))
except AttributeError as error:
    print(torch.__version__, "AttributeError:", error)
PYTHON
counted=$("$room/env/bin/python" "$room/products.py" counted)
rm -rf "$room/cache"
plain=$("$room/env/bin/python" "$room/products.py" plain)
cached=$("$room/env/bin/python" "$room/products.py" counted)
printf '%s\n' "$counted" "$plain" "$cached"
[[ $counted == *"is gone: 1" && $plain == *"is gone: 0" && $cached == *"no attribute 'mm'" ]] || {
    echo "another behaviour" >&2
    exit 1
}
echo "as described"
