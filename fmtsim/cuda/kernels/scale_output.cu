// What follows a product whose operands left the scales of their tensors outside: sums times scales, a bias, a dtype.
//
// out = RN(RN32(RN32(y * RN32(a * b)) + bias)), RN to float32, bfloat16 or float16 (OUTPUT 0, 1, 2). Four numbers a
// thread; y and out begin at whole vectors, and their size is a multiple of four.
#include "block_exact.cuh"

DEVICE u32 rounded(float value) {
#if OUTPUT == 1
  u32 bits = (u32)__float_as_int(value);
  return value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
#else
  return narrowed(value, OUTPUT);
#endif
}

KERNEL __launch_bounds__(256) scale_output(
    const float* y, const float* a, const float* b, const float* bias, void* out, u64 fours, u64 columns) {
  float factor = a != nullptr && b != nullptr ? __fmul_rn(*a, *b) : a != nullptr ? *a : *b;
  u64 stride = (u64)gridDim.x * blockDim.x;
  Words4 in[4];
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i * stride < fours) in[i] = ((const Words4*)y)[first + i * stride];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u64 at = first + i * stride;
    if (at >= fours) continue;
    u32 words[4] = {in[i].x, in[i].y, in[i].z, in[i].w};
    u64 column = bias == nullptr ? 0 : at * 4 % columns;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float value = __fmul_rn(__int_as_float((i32)words[j]), factor);
      if (bias != nullptr) value = __fadd_rn(value, bias[column + j]);
      words[j] = rounded(value);
    }
#if OUTPUT == 0
    ((Words4*)out)[at] = {words[0], words[1], words[2], words[3]};
#else
    ((Words2*)out)[at] = {words[0] | words[1] << 16, words[2] | words[3] << 16};
#endif
  }
}
