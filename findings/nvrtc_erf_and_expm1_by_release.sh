#!/usr/bin/env bash
# NVRTC 13.0.88 and 13.5.37: erff and expm1f are other polynomials, so that GELU and ELU of the same source have other bits
# by the minor release of CUDA 13 that compiles it.
#
# Expected: a function of CUDA's math library is the same arithmetic within a major release.
# Seen: the constants in the PTX of erff and expm1f differ; those of erfcf, tanhf, log1pf, expf, logf and sinf do not.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
cat >"$room/constants.py" <<'PYTHON'
"""Print the float constants of a function's PTX: constants.py LIBRARY FUNCTION."""
import ctypes, re, sys

nvrtc, source = ctypes.CDLL(sys.argv[1]), f'extern "C" __global__ void k(float* x) {{ *x = {sys.argv[2]}(*x); }}'
program, size = ctypes.c_void_p(), ctypes.c_size_t()
assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None) == 0
assert nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_90")) == 0
assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
text = ctypes.create_string_buffer(size.value)
assert nvrtc.nvrtcGetPTX(program, text) == 0
print(*re.findall(r"0f[0-9A-F]{8}", text.value.decode()))
PYTHON
constants() { # of a release, of a function
    library=$(find "$room/$1" -name 'libnvrtc.so*' | head -1)
    LD_LIBRARY_PATH=$(dirname "$library") "$room/env/bin/python" "$room/constants.py" "$library" "$2"
}
for release in 13.0.88 13.5.37; do
    "$room/env/bin/pip" install -q --no-deps --target "$room/$release" "nvidia-cuda-nvrtc==$release"
done
for function in expm1f erff erfcf tanhf log1pf expf logf sinf; do
    old=$(constants 13.0.88 "$function")
    new=$(constants 13.5.37 "$function")
    echo "$function: $([[ "$old" == "$new" ]] && echo the same || printf 'other\n  13.0.88 %s\n  13.5.37 %s' "$old" "$new")"
    case $function in expm1f | erff) wanted=other ;; *) wanted=same ;; esac
    [[ "$([[ "$old" == "$new" ]] && echo same || echo other)" == "$wanted" ]] || { echo "another behaviour"; exit 1; }
done
echo "as described"
