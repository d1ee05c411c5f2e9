// SPDX-License-Identifier: Apache-2.0
// The last step of a native product whose operands left scales outside: sums times scales, a bias, a dtype.
//
// y and out are [M, N], N a multiple of four, and begin at whole vectors; OUTPUT is float32, bfloat16 or float16.
// out = RN(RN32(RN32(RN32(y * column) * row) + bias)), with a scale for every column and every row, or one for all.
#include "element.cuh"

// Rows of four numbers: threads of a block lie along a row, and each takes four rows.
KERNEL __launch_bounds__(256) finish_sums(
    const float* y, const float* columns, const float* rows, const float* bias, void* out, u32 column_step, u32 row_step,
    u64 m, u64 fours) {
  u64 four = (u64)blockIdx.y * blockDim.x + threadIdx.x, first = (u64)blockIdx.x * 4;
  if (four >= fours) return;
  Words4 in[4];
  UNROLLED for (int i = 0; i < 4; ++i)
    if (first + i < m) in[i] = ((const Words4*)y)[(first + i) * fours + four];
  float scale[4], added[4];
  UNROLLED for (int j = 0; j < 4; ++j) {
    scale[j] = columns == nullptr ? 1.0f : columns[column_step * (four * 4 + j)];
    added[j] = bias == nullptr ? 0.0f : bias[four * 4 + j];
  }
  UNROLLED for (int i = 0; i < 4; ++i) {
    if (first + i >= m) break;
    u32 words[4] = {in[i].x, in[i].y, in[i].z, in[i].w};
    float row = rows == nullptr ? 1.0f : rows[row_step * (first + i)];
    UNROLLED for (int j = 0; j < 4; ++j) {
      float value = as_float(words[j]);
      value = columns == nullptr ? value : __fmul_rn(value, scale[j]);
      value = rows == nullptr ? value : __fmul_rn(value, row);
      words[j] = rounded_bits<OUTPUT>(bias == nullptr ? value : __fadd_rn(value, added[j]));
    }
    store_four<OUTPUT>(out, (first + i) * fours + four, words);
  }
}
