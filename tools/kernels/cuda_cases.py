# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: E501 - kernels in strings, and a case a line
"""CUDA C++ kernels as their users write them, small, each with its operands."""

import torch

from tools.kernels.cases import Case, integers, normal, patterns, special

_F32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_CASES: list[Case] = []


def _case(name, source, grid, block, arguments, shared=0, flags=(), entry=None):
    options = dict(block=block, shared=shared, flags=flags)
    _CASES.append(
        Case(
            name=f"cuda_{name}",
            kernel=source,
            grid=grid,
            make_arguments=arguments,
            options=options,
            kind="cuda",
            entry=entry or name,
        )
    )


def cases() -> list[Case]:
    """Return every case, in order."""
    return list(_CASES)


def _ordinary(seed, count, scale=4.0):
    values = special(seed, count)
    values[110:] = normal(seed + 9, count - 110, dtype=_F32, scale=scale)
    return values


_case("shuffle_sums", r"""
extern "C" __global__ void shuffle_sums(const float* x, float* y, int* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float v = i < n ? x[i] : 0.f, s = v, m = v, p = v;
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_down_sync(~0u, m, o));
    for (int o = 1; o < 32; o *= 2) { float t = __shfl_up_sync(~0u, p, o); if (lane >= o) p += t; }
    float first = __shfl_sync(~0u, v, 3), quad = __shfl_xor_sync(~0u, v, 1, 4);
    __shared__ float parts[32];
    if (lane == 0) parts[warp] = s;
    __syncthreads();
    float all = lane < blockDim.x / 32 ? parts[lane] : 0.f;
    for (int o = 16; o; o >>= 1) all += __shfl_down_sync(~0u, all, o);
    all = __shfl_sync(~0u, all, 0);
    y[4 * i] = s / all; y[4 * i + 1] = p * first; y[4 * i + 2] = m - quad; y[4 * i + 3] = all;
    unsigned b = __ballot_sync(~0u, v > 0), k = __float_as_uint(v) >> 30, same = __match_any_sync(~0u, k);
    int every; unsigned matched = __match_all_sync(~0u, warp, &every);
    z[2 * i] = b ^ same ^ __reduce_add_sync(~0u, (int)k); z[2 * i + 1] = __any_sync(~0u, v > 2) + 2 * __all_sync(~0u, v > -3) + 4 * every
        + (matched == same) * 8 + __popc(__activemask()) * 16 + (__reduce_max_sync(~0u, i) << 12) + __reduce_xor_sync(~0u, k);
}""", (2,), (128,), lambda: [normal(1, 250, dtype=_F32), torch.zeros(1024), torch.zeros(512, dtype=torch.int32), 250])  # fmt: skip

_FAST = r"""
extern "C" __global__ void %s(const float* x, const float* z, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i], b = z[i];
    y[i] = %s; y[n + i] = %s; y[2 * n + i] = %s; y[3 * n + i] = %s; y[4 * n + i] = %s; y[5 * n + i] = %s;
}"""


def _functions(name, *expressions, flags=(), scale=4.0):
    _case(name, _FAST % (name, *expressions), (7,), (128,), lambda: [_ordinary(1, 800, scale), _ordinary(2, 800, scale).flip(0), torch.zeros(6, 800),
          800], flags=flags)  # fmt: skip


_functions("fast_math_1", "__expf(a)", "__logf(a)", "__sinf(a)", "__cosf(b)", "__fdividef(a, b)", "__powf(a, b)")
_functions("fast_math_2", "rsqrtf(a)", "__frcp_rn(a)", "__log2f(a)", "__exp10f(a)", "__saturatef(a * b)", "__tanf(a)")
_functions(
    "rounding",
    "__fadd_rz(a, b)",
    "__fmul_ru(a, b)",
    "__fmaf_rd(a, b, a)",
    "__fdiv_rn(a, b)",
    "__fsqrt_rn(a)",
    "__fsub_rn(a, b)",
)
_functions(
    "rounding_2",
    "__fdiv_rz(a, b)",
    "__frcp_ru(a)",
    "__fsqrt_rd(a)",
    "__frsqrt_rn(a)",
    "__fdiv_ru(a, b)",
    "__fmaf_rz(a, b, b)",
)
_functions("libm_1", "expf(a)", "logf(a)", "powf(a, b)", "tanhf(a)", "erff(a)", "a / b")
_functions("libm_2", "log1pf(a)", "expm1f(a)", "asinf(a)", "atan2f(a, b)", "cbrtf(a)", "fmodf(a, b)")
_functions("libm_3", "erfcf(a)", "lgammaf(a)", "sinhf(a)", "exp2f(a) + log2f(b)", "hypotf(a, b)", "remainderf(a, b)")
_functions(
    "use_fast_math",
    "expf(a)",
    "logf(a)",
    "powf(a, b)",
    "tanhf(a)",
    "a / b + sqrtf(a)",
    "sinf(a) * cosf(b)",
    flags=("--use_fast_math",),
)
_functions(
    "no_contraction",
    "a * b + a",
    "a * a - b * b",
    "(a + b) * (a - b)",
    "a / b",
    "sqrtf(a)",
    "fmaf(a, b, a)",
    flags=("--fmad=false",),
)
_functions("contraction", "a * b + a", "a * a - b * b", "a * b + b * a + a * 0.5f", "1.f / (1.f + __expf(-a))", "fminf(fmaxf(a * b, 0.f), 1.f)",
           "a - truncf(a / b) * b")  # fmt: skip

_case("sincos_slow", r"""
extern "C" __global__ void sincos_slow(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s, c;
    sincosf(x[i], &s, &c);
    y[i] = s; y[n + i] = c; y[2 * n + i] = tanf(x[i]); sincospif(x[i], &s, &c); y[3 * n + i] = s - c;
}""", (4,), (128,), lambda: [torch.cat([special(1, 200), normal(2, 300, dtype=_F32, scale=2.0**22)]), torch.zeros(4, 500), 500])  # fmt: skip

_case("mma_f16_bf16_tf32", r"""
// one warp: A is m16 x k, B is k x n8, both K-major; C is m16 x n8
__device__ unsigned pair(const unsigned short* p) { return p[0] | (unsigned)p[1] << 16; }
extern "C" __global__ void mma_f16_bf16_tf32(const unsigned short* a, const unsigned short* b, const float* ta, const float* tb, const float* c,
                                             float* d, unsigned* h) {
    int lane = threadIdx.x, g = lane / 4, q = lane % 4;
    unsigned a0 = pair(a + g * 16 + 2 * q), a1 = pair(a + (g + 8) * 16 + 2 * q), a2 = pair(a + g * 16 + 2 * q + 8),
             a3 = pair(a + (g + 8) * 16 + 2 * q + 8), b0 = pair(b + g * 16 + 2 * q), b1 = pair(b + g * 16 + 2 * q + 8);
    float e[4]; float start[4];
    for (int i = 0; i < 4; i++) start[i] = c[(g + i / 2 * 8) * 8 + 2 * q + i % 2];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = e[i];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
    for (int i = 0; i < 4; i++) d[128 + (g + i / 2 * 8) * 8 + 2 * q + i % 2] = e[i];
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3]) : "r"(a0), "r"(a1), "r"(b0), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
    for (int i = 0; i < 4; i++) d[256 + (g + i / 2 * 8) * 8 + 2 * q + i % 2] = e[i];
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3]) : "r"(__float_as_uint(ta[g * 8 + q])), "r"(__float_as_uint(ta[(g + 8) * 8 + q])), "r"(__float_as_uint(ta[g * 8 + q + 4])), "r"(__float_as_uint(ta[(g + 8) * 8 + q + 4])),
          "r"(__float_as_uint(tb[g * 8 + q])), "r"(__float_as_uint(tb[g * 8 + q + 4])), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
    for (int i = 0; i < 4; i++) d[384 + (g + i / 2 * 8) * 8 + 2 * q + i % 2] = e[i];
    unsigned r0, r1;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"
        : "=r"(r0), "=r"(r1) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(a2), "r"(a1));
    h[lane] = r0; h[32 + lane] = r1;
}""", (1,), (32,), lambda: [normal(1, 16, 16, dtype=_FP16), normal(2, 8, 16, dtype=_FP16), normal(3, 16, 8, dtype=_F32),
      normal(4, 8, 8, dtype=_F32), normal(5, 16, 8, dtype=_F32), torch.zeros(4, 16, 8), torch.zeros(64, dtype=torch.int32)])  # fmt: skip

_case("mma_s8_f8", r"""
extern "C" __global__ void mma_s8_f8(const unsigned* a, const unsigned* b, const int* c, int* d, const unsigned* fa, const unsigned* fb, float* f) {
    int lane = threadIdx.x, g = lane / 4, q = lane % 4; int e[4]; float o[4];
    unsigned a0 = a[g * 8 + q], a1 = a[(g + 8) * 8 + q], a2 = a[g * 8 + q + 4], a3 = a[(g + 8) * 8 + q + 4], b0 = b[g * 8 + q], b1 = b[g * 8 + q + 4];
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[lane]), "r"(c[lane + 32]), "r"(c[lane + 64]), "r"(c[lane + 96]));
    for (int i = 0; i < 4; i++) d[32 * i + lane] = e[i];
    asm volatile("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[lane]), "r"(c[lane + 32]), "r"(c[lane + 64]), "r"(c[lane + 96]));
    for (int i = 0; i < 4; i++) d[128 + 32 * i + lane] = e[i];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3]) : "r"(a0), "r"(a1), "r"(b0), "r"(c[lane]), "r"(c[lane + 32]), "r"(c[lane + 64]), "r"(c[lane + 96]));
    for (int i = 0; i < 4; i++) d[256 + 32 * i + lane] = e[i];
    a0 = fa[g * 8 + q]; a1 = fa[(g + 8) * 8 + q]; a2 = fa[g * 8 + q + 4]; a3 = fa[(g + 8) * 8 + q + 4]; b0 = fb[g * 8 + q]; b1 = fb[g * 8 + q + 4];
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(o[0]), "=f"(o[1]), "=f"(o[2]), "=f"(o[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.25f));
    for (int i = 0; i < 4; i++) f[32 * i + lane] = o[i];
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(o[0]), "=f"(o[1]), "=f"(o[2]), "=f"(o[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(-1.5f));
    for (int i = 0; i < 4; i++) f[128 + 32 * i + lane] = o[i];
}""", (1,), (32,), lambda: [patterns(1, 16, 32, dtype=torch.int8), patterns(2, 8, 32, dtype=torch.int8), patterns(3, 128, dtype=torch.int32),
      torch.zeros(3, 128, dtype=torch.int32), normal(4, 16, 32, dtype=_F32).to(torch.float8_e4m3fn), normal(5, 8, 32, dtype=_F32).to(
          torch.float8_e4m3fn), torch.zeros(2, 128)])  # fmt: skip

_case("ldmatrix_tile", r"""
extern "C" __global__ void ldmatrix_tile(const unsigned* x, unsigned* y) {
    __shared__ __align__(16) unsigned tile[512];
    for (int i = threadIdx.x; i < 512; i += 32) tile[i] = x[i];
    __syncthreads();
    unsigned at = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x * 8), r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    for (int i = 0; i < 4; i++) y[32 * i + threadIdx.x] = r[i];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at + 16));
    for (int i = 0; i < 4; i++) y[128 + 32 * i + threadIdx.x] = r[i];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" :: "r"(at), "r"(r[0] + 1), "r"(r[1] ^ 5) : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(at + 16), "r"(r[1]) : "memory");
    __syncthreads();
    for (int i = threadIdx.x; i < 512; i += 32) y[256 + i] = tile[i];
}""", (1,), (32,), lambda: [patterns(1, 512, dtype=torch.int32), torch.zeros(768, dtype=torch.int32)])  # fmt: skip

_case("cp_async_stages", r"""
extern "C" __global__ void cp_async_stages(const float* x, float* y, int n) {
    extern __shared__ float ring[];
    int t = threadIdx.x;
    float acc = 0;
    for (int k = t; k < 512; k += 128) ring[1024 + k] = k;
    for (int k = 0; k < 2; k++) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(ring + k * 512 + t * 4)), "l"(x + k * 512 + t * 4));
        asm volatile("cp.async.commit_group;");
    }
    for (int k = 0; k < n; k++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        float* now = ring + k % 3 * 512;
        acc = acc * 0.5f + now[511 - t] * now[(t * 7) % 512];
        if (k + 2 < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"((unsigned)__cvta_generic_to_shared(ring + (k + 2) % 3 * 512 + t * 4)), "l"(x + (k + 2) * 512 + t * 4), "r"(t % 5 ? 4 : 0));
        asm volatile("cp.async.commit_group;");
    }
    y[blockIdx.x * blockDim.x + t] = acc;
}""", (1,), (128,), lambda: [normal(1, 8, 512, dtype=_F32), torch.zeros(128), 8], shared=6144)  # fmt: skip

_case("fp8_conversions", r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
extern "C" __global__ void fp8_conversions(const float* x, unsigned char* y, float* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
    y[n + i] = __nv_cvt_float_to_fp8(x[i], __NV_NOSAT, __NV_E4M3);
    y[2 * n + i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2);
    y[3 * n + i] = __nv_cvt_float_to_fp8(x[i], __NV_NOSAT, __NV_E5M2);
    y[4 * n + i] = __nv_cvt_bfloat16raw_to_fp8(__float2bfloat16_rn(x[i]), __NV_SATFINITE, __NV_E4M3);
    y[5 * n + i] = __nv_cvt_halfraw_to_fp8(__float2half_rn(x[i]), __NV_SATFINITE, __NV_E5M2);
    __nv_fp8x4_e4m3 four(make_float4(x[i], x[(i + 1) % n], x[(i + 2) % n], x[(i + 3) % n]));
    ((unsigned*)(y + 6 * n))[i] = four.__x;
    z[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw((unsigned char)i, __NV_E4M3)));
    z[n + i] = float(__nv_fp8_e5m2(__float2half_rz(x[i])));
    z[2 * n + i] = __bfloat162float(__float2bfloat16_rz(x[i])) + __half2float(__float2half_ru(x[i]));
    z[3 * n + i] = __bfloat162float(__float2bfloat16_ru(x[i])) - __half2float(__float2half_rd(x[i]));
}""", (4,), (128,), lambda: [special(1, 512), torch.zeros(10, 512, dtype=torch.uint8), torch.zeros(4, 512), 512])  # fmt: skip

_case("half2_arithmetic", r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void half2_arithmetic(const __half2* x, const __half2* z, __half2* y, const __nv_bfloat162* bx, const __nv_bfloat162* bz, __nv_bfloat162* by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half2 a = x[i], b = z[i];
    y[i] = __hadd2(a, b); y[n + i] = __hmul2(a, b); y[2 * n + i] = __hfma2(a, b, a); y[3 * n + i] = __hmax2(a, b);
    y[4 * n + i] = __h2div(a, b); y[5 * n + i] = h2exp(a); y[6 * n + i] = __hfma2_relu(a, b, b); y[7 * n + i] = __hadd2_sat(a, b);
    y[8 * n + i] = h2sqrt(a); y[9 * n + i] = h2tanh(a); y[10 * n + i] = __hmin2_nan(a, b); y[11 * n + i] = a * b + a;
    y[12 * n + i] = h2log(a); y[13 * n + i] = h2rcp(a); y[14 * n + i] = __hgt2(a, b); y[15 * n + i] = h2floor(a) - __habs2(b);
    __nv_bfloat162 c = bx[i], d = bz[i];
    by[i] = __hadd2(c, d); by[n + i] = __hmul2(c, d); by[2 * n + i] = __hfma2(c, d, c); by[3 * n + i] = __hmax2_nan(c, d);
    by[4 * n + i] = __h2div(c, d); by[5 * n + i] = h2exp(c); by[6 * n + i] = __hfma2_relu(c, d, d); by[7 * n + i] = c * d - c;
    by[8 * n + i] = h2rsqrt(c); by[9 * n + i] = h2tanh(c); by[10 * n + i] = __hle2(c, d); by[11 * n + i] = __hneg2(__habs2(c));
}""", (4,), (128,), lambda: [special(1, 1000, _FP16), special(2, 1000, _FP16).flip(0), torch.zeros(16, 1000, dtype=_FP16), special(
    3, 1000, _BF16), special(4, 1000, _BF16).flip(0), torch.zeros(12, 1000, dtype=_BF16), 500])  # fmt: skip

_case("integer_intrinsics", r"""
extern "C" __global__ void integer_intrinsics(const int* x, const int* z, int* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int a = x[i], b = z[i]; unsigned u = a, v = b;
    y[i] = __dp4a(a, b, i); y[n + i] = __dp4a(u, v, (unsigned)i); y[2 * n + i] = __popc(a) + 64 * __clz(b); y[3 * n + i] = __brev(u) ^ __ffs(b);
    y[4 * n + i] = __byte_perm(u, v, i * 0x1357); y[5 * n + i] = __funnelshift_l(u, v, i); y[6 * n + i] = __funnelshift_rc(u, v, i);
    y[7 * n + i] = __mulhi(a, b) + __umulhi(u, v); y[8 * n + i] = __mul24(a, b) - __umul24(u, v); y[9 * n + i] = __sad(a, b, u) + __usad(u, v, 3);
    y[10 * n + i] = __dp2a_lo(a, b, i) - __dp2a_hi(a, b, i); y[11 * n + i] = a / (b | 1) + u / (v | 1) + a % (b | 1) + u % (v | 1);
    y[12 * n + i] = __vadd4(u, v) ^ __vabsdiffu4(u, v) ^ __vmaxs2(u, v); y[13 * n + i] = __hadd(a, b) + __rhadd(a, b) + __uhadd(u, v);
    y[14 * n + i] = (a >> (b & 31)) ^ (u >> (v & 31)) ^ (a << (b & 31)); y[15 * n + i] = __vcmpgtu4(u, v) + __viaddmax_s32(a, b, 7) + __vimin3_s32(a, b, 5);
}""", (4,), (128,), lambda: [patterns(1, 500, dtype=torch.int32), patterns(2, 500, dtype=torch.int32), torch.zeros(16, 500, dtype=torch.int32),
      500])  # fmt: skip

_case("long_long", r"""
extern "C" __global__ void long_long(const long long* x, const long long* z, long long* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    long long a = x[i], b = z[i] >> (i % 50); unsigned long long u = a, v = b | 1;
    y[i] = a / (b | 1); y[n + i] = a % (b | 1); y[2 * n + i] = u / v; y[3 * n + i] = u % v; y[4 * n + i] = __mul64hi(a, b) + __umul64hi(u, v);
    y[5 * n + i] = __popcll(a) + __clzll(b) * 100 + __ffsll(a) * 10000; y[6 * n + i] = __brevll(u) ^ (u << (i & 63)) ^ (a >> (i & 63));
    y[7 * n + i] = (long long)(float)a + (long long)(double)b + llabs(a) + max(a, b);
}""", (2,), (128,), lambda: [patterns(1, 200, dtype=torch.int64), patterns(2, 200, dtype=torch.int64), torch.zeros(8, 200, dtype=torch.int64),
      200])  # fmt: skip

_case("doubles", r"""
extern "C" __global__ void doubles(const double* x, const double* z, double* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double a = x[i], b = z[i];
    y[i] = a / b; y[n + i] = sqrt(a); y[2 * n + i] = exp(a); y[3 * n + i] = log(b); y[4 * n + i] = a * b + a; y[5 * n + i] = sin(a);
    y[6 * n + i] = fmin(a, b) - floor(a); y[7 * n + i] = rsqrt(b) + (float)a; y[8 * n + i] = __dadd_rz(a, b) * __dmul_ru(a, b); y[9 * n + i] = (int)a + (long long)b;
}""", (4,), (128,), lambda: [special(1, 500, torch.float64), torch.cat([special(2, 100, torch.float64), normal(3, 400, dtype=torch.float64)]).flip(0),
      torch.zeros(10, 500, dtype=torch.float64), 500])  # fmt: skip

_case("block_softmax", r"""
extern "C" __global__ void block_softmax(const float* x, float* y, int n) {
    extern __shared__ float row[];
    __shared__ float part[8];
    const float* in = x + blockIdx.x * n; float top = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) { row[i] = in[i]; top = fmaxf(top, row[i]); }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = top;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; w++) top = fmaxf(top, part[w]);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[i] = expf(row[i] - top);
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    asm volatile("bar.sync 1, 256;" ::: "memory");
    sum = 0;
    for (int w = 0; w < blockDim.x / 32; w++) sum += part[w];
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * n + i] = row[i] / sum;
}""".replace("-INFINITY", "-__int_as_float(0x7f800000)"), (3,), (256,), lambda: [normal(1, 3, 1000, dtype=_F32, scale=4.0), torch.zeros(
    3, 1000), 1000], shared=4000)  # fmt: skip

_case("local_switch_calls", r"""
__device__ __noinline__ float horner(const float* c, int n, float x) { float s = 0; for (int k = n; k--;) s = s * x + c[k]; return s; }
__device__ __noinline__ int collatz(int v) { int n = 0; while (v > 1) { v = v & 1 ? 3 * v + 1 : v / 2; n++; } return n; }
__constant__ float table[8] = {1.f, .5f, .25f, -2.f, 3.f, -.125f, 7.f, 1e-3f};
struct Pair { float scale; int shift; long long big; };
extern "C" __global__ void local_switch_calls(const float* x, const int* op, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float stack[24];
    for (int k = 0; k < 24; k++) stack[k] = x[(i + k) % n] * table[k & 7];
    float v = x[i];
    switch (op[i]) {
        case 0: v = v + 1; break;
        case 1: v = sqrtf(fabsf(v)); break;
        case 2: v = stack[op[(i + 1) % n]]; break;
        case 3: v = horner(stack, 5, v);
        case 4: v *= 2; break;
        case 5: v = collatz(i + 1); break;
        case 6: stack[op[(i + 2) % n] + 3] = v; v = horner(stack, 12, 0.5f); break;
        case 7: v = -v; break;
        case 9: v = floorf(v * 8) / 8; break;
        default: v = 0.f;
    }
    y[i] = v + stack[(i * 5) % 24];
}""", (4,), (128,), lambda: [normal(1, 500, dtype=_F32), integers(2, 500, high=11), torch.zeros(500), 500])  # fmt: skip

_case("integer_atomics", r"""
extern "C" __global__ void integer_atomics(const int* x, int* c, unsigned long long* big, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __shared__ int bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    if (i < n) {
        int v = x[i];
        atomicAdd(bins + (v & 15), 1); atomicSub(c, v); atomicMax(c + 1, v); atomicMin(c + 2, v); atomicAnd(c + 3, v | 0xff00); atomicOr(c + 4, v & 0x0f0f0f0f);
        atomicXor(c + 5, v); atomicInc((unsigned*)c + 6, 100); atomicAdd(big, (unsigned long long)v * v); atomicMax(big + 1, (unsigned long long)(unsigned)v << 8);
        for (int old = c[7], seen; ; old = seen) { seen = atomicCAS(c + 7, old, old + (v & 3)); if (seen == old) break; }
    }
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(c + 8 + threadIdx.x, bins[threadIdx.x]);
}""", (3,), (128,), lambda: [patterns(1, 380, dtype=torch.int32), torch.full((24,), 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64),
      380])  # fmt: skip

_case("int8_gemv_vector", r"""
extern "C" __global__ void int8_gemv_vector(const int4* w, const int4* x, const float* scale, float* y, int k16) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x & 31, acc = 0;
    #pragma unroll 4
    for (int i = lane; i < k16; i += 32) {
        int4 a = w[row * k16 + i], b = __ldg(x + i);
        acc = __dp4a(a.x, b.x, acc); acc = __dp4a(a.y, b.y, acc); acc = __dp4a(a.z, b.z, acc); acc = __dp4a(a.w, b.w, acc);
    }
    for (int o = 16; o; o >>= 1) acc += __shfl_down_sync(~0u, acc, o);
    if (lane == 0) y[row] = acc * scale[row];
}""", (4,), (128,), lambda: [patterns(1, 16, 1024, dtype=torch.int8), patterns(2, 1024, dtype=torch.int8), normal(3, 16, dtype=_F32), torch.zeros(16),
      64])  # fmt: skip

_case("rmsnorm_template", r"""
#include <cuda_bf16.h>
template <typename T, int N> __device__ __forceinline__ void norm(const T* x, const T* w, T* y, float eps) {
    float v[N], sum = 0;
    #pragma unroll
    for (int k = 0; k < N; k++) { v[k] = float(x[k * 32 + threadIdx.x]); sum += v[k] * v[k]; }
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    float r = rsqrtf(sum / (N * 32) + eps);
    #pragma unroll
    for (int k = 0; k < N; k++) y[k * 32 + threadIdx.x] = T(v[k] * r) * w[k * 32 + threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(32) rmsnorm_template(const __nv_bfloat16* x, const __nv_bfloat16* w, __nv_bfloat16* y, float eps) {
    norm<__nv_bfloat16, 8>(x + blockIdx.x * 256, w, y + blockIdx.x * 256, eps);
}""", (5,), (32,), lambda: [normal(1, 5, 256), normal(2, 256), torch.zeros(5, 256, dtype=_BF16), 1e-6])  # fmt: skip

# products that are scaled by 2^k before they are rounded (FMUL.D2 and .M2): tiny ones, and those beyond the largest number
_case("scaled_products", r"""
extern "C" __global__ void scaled_products(const float* x, const float* z, float* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float* c = z + i;
    float a = x[i];
    y[8 * i] = a * c[0] * 0.5f; y[8 * i + 1] = a * c[1] * 8.0f; y[8 * i + 2] = a * c[2] * 0.25f + c[3]; y[8 * i + 3] = (a * 3.0f) * 4.0f;
    y[8 * i + 4] = a * c[4] * -0.5f; y[8 * i + 5] = a * c[5] * 16.0f; y[8 * i + 6] = __saturatef(a * c[6] * 0.125f); y[8 * i + 7] = -(a * c[7]) * 2.0f;
}""", (8,), (128,), lambda: [patterns(1, 1024, dtype=_F32), 2.0 ** (torch.arange(1031) % 254 - 126.0) * 1.7, torch.zeros(8192)])  # fmt: skip
