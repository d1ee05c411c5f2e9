#!/usr/bin/env bash
# ptxas 12.8 of triton 3.6.0: a clamp by min and max turns NaN into 0, where PTX says 1.
#
# Expected: min.f32 and max.f32 return the operand that is no NaN (PTX ISA, 9.7.3.11 and 9.7.3.12), so that max(min(NaN, 1), 0)
# is 1, and a range that is not [0, 1] behaves alike.
# Seen: with the bounds 1 and 0 both instructions become one addition with .SAT, whose result for NaN is +0 (9.7.3.3). With
# other bounds they stay a minimum and a maximum (FMNMX).
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q --no-deps triton==3.6.0
tools=$("$room/env/bin/python" -c 'import importlib.util as u; print(u.find_spec("triton").submodule_search_locations[0])')/backends/nvidia/bin
chmod +x "$tools"/*
machine_code() { # of a clamp to [lower, upper], given as bits
    cat >"$room/clamp.ptx" <<PTX
.version 8.7
.target sm_90a
.address_size 64
.visible .entry clamp(.param .u64 x)
{
.reg .b64 %a; .reg .f32 %f<3>;
ld.param.u64 %a, [x];
ld.global.f32 %f0, [%a];
min.f32 %f1, %f0, 0f$2;
max.f32 %f2, %f1, 0f$1;
st.global.f32 [%a], %f2;
ret;
}
PTX
    "$tools/ptxas" -arch=sm_90a "$room/clamp.ptx" -o "$room/clamp.cubin"
    "$tools/nvdisasm" -c "$room/clamp.cubin" | grep -oE 'FADD\S*|FMNMX\S*' | sort | uniq -c | tr -s ' \n' ' '
}
"$tools/ptxas" --version | grep release
unit=$(machine_code 00000000 3F800000)
other=$(machine_code 00000000 40000000)
echo "to [0, 1]:$unit"
echo "to [0, 2]:$other"
[[ "$unit" == *FADD.SAT* && "$unit" != *FMNMX* ]] || { echo "another behaviour"; exit 1; }
[[ "$other" == *"2 FMNMX"* && "$other" != *SAT* ]] || { echo "another behaviour"; exit 1; }
echo "as described"
