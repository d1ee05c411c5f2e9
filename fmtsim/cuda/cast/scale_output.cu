// What follows a product whose operands left scales outside: sums times scales, a bias, a dtype.
//
// y and out are [M, N], N a multiple of four, and begin at whole vectors; OUTPUT is float32, bfloat16 or float16 (0, 1,
// 2). scale_output: out = RN(RN32(RN32(y * RN32(a * b)) + bias)). finish_sums: out = RN(RN32(RN32(RN32(y * column) * row)
// + bias)), with a scale for every column and every row, or one for all.
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

// Rows of four numbers: threads of a block lie along a row, and each takes four rows.
KERNEL __launch_bounds__(256) finish_sums(
    const float* y, const float* columns, u32 column_step, const float* rows, u32 row_step, const float* bias, void* out,
    u64 m, u64 fours) {
  u64 four = (u64)blockIdx.y * blockDim.x + threadIdx.x, first = (u64)blockIdx.x * 4;
  if (four >= fours) return;
  Words4 in[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i < m) in[i] = ((const Words4*)y)[(first + i) * fours + four];
  float scale[4], added[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    scale[j] = columns == nullptr ? 1.0f : columns[column_step * (four * 4 + j)];
    added[j] = bias == nullptr ? 0.0f : bias[four * 4 + j];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i >= m) break;
    u32 words[4] = {in[i].x, in[i].y, in[i].z, in[i].w};
    float row = rows == nullptr ? 1.0f : rows[row_step * (first + i)];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float value = __int_as_float((i32)words[j]);
      value = columns == nullptr ? value : __fmul_rn(value, scale[j]);
      value = rows == nullptr ? value : __fmul_rn(value, row);
      words[j] = rounded(bias == nullptr ? value : __fadd_rn(value, added[j]));
    }
    u64 at = (first + i) * fours + four;
#if OUTPUT == 0
    ((Words4*)out)[at] = {words[0], words[1], words[2], words[3]};
#else
    ((Words2*)out)[at] = {words[0] | words[1] << 16, words[2] | words[3] << 16};
#endif
  }
}
