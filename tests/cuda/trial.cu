// SPDX-License-Identifier: Apache-2.0
// Kernels that try out the emulator: one for each thing that it has to do as a device does.
#include "common.cuh"
KERNEL barriers(const i32* x, i32* y, i64 n) {
  DYNAMIC_SHARED(raw);
  i32* words = reinterpret_cast<i32*>(raw);
  __shared__ i32 total;
  i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) total = 0;
  if (i >= n) return;  // threads that end are not waited for
  words[threadIdx.x] = x[i];
  __syncthreads();
  atomicAdd(&total, words[threadIdx.x]);
  __syncthreads();
  y[i] = total;
}

KERNEL race(i32* y) {
  __shared__ i32 word;
  if (threadIdx.x == 5) word = 7;
  y[threadIdx.x] = word;  // no barrier: depends on the order of threads
}

KERNEL stuck(i32* y) {
  if (threadIdx.x == 3) __syncwarp(); else __syncthreads();
  y[threadIdx.x] = 1;
}

struct alignas(16) Numbers { i32 first; float second; double third[3]; };
KERNEL structure(const Numbers numbers, double* y) {
  y[0] = numbers.first + numbers.second + numbers.third[2];
}

KERNEL behind(i32* y) {
  DYNAMIC_SHARED(raw);
  raw[64] = (unsigned char)y[0];
}

KERNEL lanes(const i64* x, i64* y, u32* votes) {
  i32 t = threadIdx.x;
  i64 v = x[t];
  y[t] = __shfl_sync(~0u, v, 5);
  y[t + 32] = __shfl_xor_sync(~0u, v, 3);
  y[t + 64] = __shfl_up_sync(~0u, v, 2u, 8);
  y[t + 96] = __shfl_down_sync(~0u, v, 3u, 16);
  y[t + 128] = (i64)(__shfl_xor_sync(~0u, (float)v, 1) + __shfl_xor_sync(~0u, (double)v, 2));
  votes[t] = __ballot_sync(~0u, v % 3 == 0);
  votes[t + 32] = (u32)__any_sync(~0u, v == 40) << 1 | (u32)__all_sync(~0u, v > 0);
  votes[t + 64] = __reduce_max_sync(~0u, (u32)v);
  votes[t + 96] = __reduce_add_sync(~0u, (u32)v);
  u32 half = t < 16 ? 0xffffu : 0xffff0000u;  // two halves meet by themselves
  votes[t + 128] = t < 16 ? __reduce_min_sync(half, (u32)v) : __reduce_min_sync(half, (u32)v + 1000u);
}

KERNEL places(i32* y) {
  i32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  i32 thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  y[block * (i32)(blockDim.x * blockDim.y * blockDim.z) + thread] = block * 1000 + thread;
}

KERNEL copies(const i32* x, i32* y, i32 waits) {
  __shared__ __align__(16) i32 words[128];
  copy16_async(&words[threadIdx.x * 4], x + threadIdx.x * 4);
  commit_copies();
  if (waits) wait_copies<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = words[(threadIdx.x * 4 + i) ^ 64];
}

#define FOUR(y, expression)                                                                     \
  {                                                                                             \
    auto all = [&](int m) { return expression; };                                               \
    for (int m = 0; m < 4; ++m) y[m * n + i] = all(m);                                          \
  }
#define CHOOSE(name, ...) \
  (m == 0   ? name##_rn(__VA_ARGS__)  \
   : m == 1 ? name##_rz(__VA_ARGS__)  \
   : m == 2 ? name##_ru(__VA_ARGS__)  \
            : name##_rd(__VA_ARGS__))
KERNEL rounded(const float* a, const float* b, const float* c, float* y, i32 n) {
  for (int i = 0; i < n; ++i) {
    FOUR(y, CHOOSE(__fadd, a[i], b[i]))
    FOUR((y + 4 * n), CHOOSE(__fmul, a[i], b[i]))
    FOUR((y + 8 * n), CHOOSE(__fdiv, a[i], b[i]))
    FOUR((y + 12 * n), CHOOSE(__fmaf, a[i], b[i], c[i]))
    FOUR((y + 16 * n), CHOOSE(__double2float, (double)a[i] * b[i]))
    FOUR((y + 20 * n), CHOOSE(__ll2float, (i64)(a[i] * 1e9)))
  }
}
KERNEL rounded64(const double* a, const double* b, const double* c, double* y, i32 n) {
  for (int i = 0; i < n; ++i) {
    FOUR(y, CHOOSE(__dadd, a[i], b[i]))
    FOUR((y + 4 * n), CHOOSE(__dmul, a[i], b[i]))
    FOUR((y + 8 * n), CHOOSE(__ddiv, a[i], b[i]))
    FOUR((y + 12 * n), CHOOSE(__fma, a[i], b[i], c[i]))
  }
}
// Plain operations on both sides of directed ones stay rounded to nearest.
KERNEL beside(const float* a, float* y, i32 n) {
  const float magic = 12582912.0f;
  for (int i = 0; i < n; ++i) {
    float whole = (a[i] + magic) - magic;
    y[i] = __fmaf_rd(whole, 1.0f, 0.0f);
    y[n + i] = __fadd_ru(a[i], 0.0f) + 1.0f / 3.0f;
  }
}
KERNEL whole(const float* a, i32* y, i32 n) {
  for (int i = 0; i < n; ++i) FOUR(y, CHOOSE(__float2int, a[i]))
}
KERNEL words(const u32* a, u32* y) {
  y[0] = __byte_perm(a[0], a[1], 0x7b10);
  y[1] = __funnelshift_l(a[0], a[1], 8);
  y[2] = __funnelshift_r(a[0], a[1], 8);
  y[3] = __funnelshift_rc(a[0], a[1], 40);
  y[4] = __umulhi(a[0], a[1]);
  y[5] = (u32)__mulhi((i32)a[0], (i32)a[1]);
  y[6] = __vmaxs2(a[0], a[1]);
  y[7] = __vaddss2(a[0], a[1]);
  y[8] = __viaddmax_s16x2(a[0], a[1], 0x00010001u);
  y[9] = (u32)__dp4a((i32)a[0], (i32)a[1], 5);
  y[10] = __brev(a[0]);
  y[11] = (u32)(__clz((i32)a[1]) << 16 | __popc(a[0]) << 8 | __ffs(0));
  y[12] = (u32)(__umul64hi((u64)a[0] << 32, a[1]) & 0xffffffffu);
  y[13] = __float_as_uint(fminf(0.0f, -0.0f));
  y[14] = __float_as_uint(__fadd_rn(__uint_as_float(0x7f800000u), __uint_as_float(0xff800000u)));
  y[15] = min(3, 5u) + max(-1, 2);
}
