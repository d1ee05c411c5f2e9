// The gradient of a tensor from that of its rotated values: y times scales and mask, rotated back, rounded to a dtype.
//
// out = RN(H(RN32(y * RN32(a * b)) * mask)), RN to float32, bfloat16 or float16 (OUTPUT 0, 1, 2) and H the transform of
// SIZE neighbours in a row (1: none), signs last. Four numbers a lane: butterflies at distance 1 and 2 within it, at 4,
// 8 and 16 with other lanes.
#include "block_exact.cuh"

#define THREADS 256
#define VECTORS 4

DEVICE u32 rounded(float value) {
  u32 bits = (u32)__float_as_int(value);
  if (value != value) return OUTPUT == 0 ? 0x7FC00000u : OUTPUT == 1 ? 0x7FC0u : 0x7E00u;
#if OUTPUT == 1
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#elif OUTPUT == 2
  return narrowed(value, OUTPUT);
#else
  return bits;
#endif
}

DEVICE void pair(float& a, float& b) {
  float sum = __fadd_rn(a, b);
  b = __fsub_rn(a, b);
  a = sum;
}

KERNEL __launch_bounds__(THREADS) finish_rotated(
    const float* y, const u8* mask, const float* a, const float* b, void* out, u64 fours, u32 signs) {
  float factor = a != nullptr && b != nullptr ? __fmul_rn(*a, *b) : a != nullptr ? *a : b != nullptr ? *b : 1.0f;
  u64 first = (u64)blockIdx.x * (THREADS * VECTORS) + threadIdx.x;
  Words4 in[VECTORS];
  u32 kept[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u64 at = first + v * THREADS;
    in[v] = {0, 0, 0, 0}, kept[v] = 0x01010101u;
    if (at < fours) in[v] = ((const Words4*)y)[at];
    if (at < fours && mask != nullptr) kept[v] = ((const u32*)mask)[at];
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u64 at = first + v * THREADS;
    float x[4] = {__int_as_float((i32)in[v].x), __int_as_float((i32)in[v].y), __int_as_float((i32)in[v].z),
                  __int_as_float((i32)in[v].w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (a != nullptr || b != nullptr) x[i] = __fmul_rn(x[i], factor);
      if (mask != nullptr) x[i] = __fmul_rn(x[i], kept[v] >> (8 * i) & 1 ? 1.0f : 0.0f);
    }
#if SIZE > 1
    pair(x[0], x[1]), pair(x[2], x[3]);
    pair(x[0], x[2]), pair(x[1], x[3]);
#pragma unroll
    for (int flip = 1; flip < SIZE / 4; flip *= 2) {
      float sign = threadIdx.x & flip ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], flip));
    }
    u32 turned = signs >> (4 * (threadIdx.x % (SIZE / 4)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __fmul_rn(x[i], __int_as_float(SIZE == 16 ? 0x3E800000 : 0x3E3504F3));  // RN32(1 / sqrt(SIZE))
      if (turned >> i & 1) x[i] = -x[i];
    }
#endif
    if (at >= fours) continue;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = rounded(x[i]);
#if OUTPUT == 0
    ((Words4*)out)[at] = {words[0], words[1], words[2], words[3]};
#else
    ((Words2*)out)[at] = {words[0] | words[1] << 16, words[2] | words[3] << 16};
#endif
  }
}
