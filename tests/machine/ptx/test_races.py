# SPDX-License-Identifier: Apache-2.0
"""Kernels whose result depends on which block or warp comes first, and those that put them in order."""

import pytest
import torch

import fmtsim

RACE = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry last(.param .u64 y)
{
.reg .b64 %rd<2>; .reg .b32 %r<3>;
ld.param.b64 %rd1, [y];
mov.u32 %r1, %ctaid.x;
st.global.b32 [%rd1], %r1;
ret;
}
"""


def test_blocks_that_race_for_one_place_are_named():
    y = torch.zeros(8, dtype=torch.int32)
    done = fmtsim.launch(RACE, 3, y, block=32)
    assert not done.exact and "another block wrote" in done.reasons[0]
    same = RACE.replace("mov.u32 %r1, %ctaid.x", "mov.b32 %r1, 7")  # one value: no race
    assert fmtsim.launch(same, 3, y, block=32).exact and y[0] == 7


S = "__shared__ float s[256]; int t = threadIdx.x; "
TREE = S + "s[t] = t; {b} for (int o = 128; o; o >>= 1) {{ if (t < o) s[t] += s[t + o]; {b} }} if (!t) y[0] = s[0];"
TURNS = (
    S
    + """__shared__ float u[256]; float *a = s, *b = u; a[t] = t; __syncthreads(); for (int i = 0; i < 5; i++) {{
    b[t] = a[(t + 1) % 256] + 1; {b} float *c = a; a = b; b = c; }} y[t] = a[t];"""
)
HANDED = (
    S
    + """if (t < 32) {{ s[t] = t; asm volatile("{arrives};" ::: "memory"); }}
    else if (t < 64) {{ asm volatile("{waits};" ::: "memory"); y[t] = s[t - 32]; }}"""
)
FLAG = (
    S
    + """__shared__ volatile int f; if (!t) f = 0; __syncthreads();
    if (t < 32) { s[t] = t; __threadfence_block(); f = 1; } else if (t < 64) { while (!f); y[t] = s[t - 32]; }"""
)
TICKET = (
    S
    + """__shared__ int count; if (!t) count = 0; __syncthreads(); s[t] = t; __syncwarp(); int last = 0;
    if (t % 32 == 0) {{ __threadfence_block(); last = atomicAdd(&count, 1) == 7; }}
    if (__shfl_sync(~0u, last, 0)) y[t] = s[t / 2]; {more}"""
)
RACES, UNWRITTEN, SKIPPED = "that another writes, without a barrier", "before it was written", "never reach a barrier"


@pytest.mark.parametrize(("body", "reason"), [
    (TREE.format(b=""), RACES), (TREE.format(b="__syncthreads();"), ""),
    (TREE.format(b="if (o != 64) __syncthreads();").replace("t; if (o != 64)", "t;"), RACES),
    (S + "s[t] = t; y[t] = s[63 - t % 64];", RACES), ("volatile " + S + "s[t] = t; y[t] = s[63 - t % 64];", RACES),
    (S + "s[t] = t; __syncthreads(); y[t] = s[255 - t];", ""), (S + "s[t] = t; y[t] = s[t ^ 31];", ""),
    (S + "s[t] = t; __syncthreads(); float a = s[255 - t], b = s[t]; s[t] = a - b;", RACES),  # who read is overtaken
    (S + "s[t / 64] = 7; y[t] = s[t / 64];", ""),  # one value
    (S + "__shared__ char c[256]; c[t] = t; s[t] = c[t];", ""),  # neighbours are bytes
    (TURNS.format(b=""), RACES), (TURNS.format(b="__syncthreads();"), ""),
    (S + "float v = t; for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o); if (t % 32 == 0) s[t / 32] = v;"
     "__syncthreads(); if (t < 8) y[t] = s[t];", ""),
    (HANDED.format(arrives="bar.arrive 1, 64", waits="bar.sync 1, 64"), ""),
    (HANDED.format(arrives="bar.sync 1, 32", waits="bar.sync 2, 32"), RACES),
    (FLAG, ""), (TICKET.format(more=""), ""), (TICKET.format(more="y[t] = count;"), RACES),
    (S + "s[t] = t; __threadfence_block(); y[t] = s[255 - t];", RACES),  # a fence alone orders nothing
    ("extern __shared__ float s[]; y[threadIdx.x] = s[threadIdx.x];", UNWRITTEN),
    (S + "if (t < 10) __syncthreads(); y[t] = 1;", SKIPPED), (S + "if (t < 32) __syncthreads(); y[t] = 1;", SKIPPED),
    (S + "for (int i = 0; i < t; i++) __syncthreads(); y[t] = 1;", SKIPPED),
    (S + "if (t < 32) { __syncthreads(); y[t] = 1; __syncthreads(); } else __syncthreads(); y[t] += 1;", SKIPPED),
    (S + "if (t > 99) return; s[t] = t; __syncthreads(); y[t] = s[99 - t];", ""),  # a GPU counts who has not returned
])  # fmt: skip
def test_warps_that_race_in_shared_memory_are_named(nvrtc, body, reason):
    source = f'extern "C" __global__ void k(float *y) {{ y += 256 * blockIdx.x; {body} }}'
    done = fmtsim.launch(source, 2, torch.zeros(512), block=256, shared=1024 * ("extern" in body))
    assert done.exact == (not reason) and len(done.reasons) == bool(reason), done.reasons
    assert all(reason in text and "(kernel.cu:" in text for text in done.reasons)
