// SPDX-License-Identifier: Apache-2.0
// The factors of a reduction over ranks (docs/distributed.md), a thread a tensor.
#include "scale.cuh"

// What elements are multiplied with before the cast and behind the sums, factors [2, tensors], from the largest
// magnitudes of all ranks. factor: the reduction's, in place of mu; scaled: else the scale is 1; ranks: 0 for a sum.
KERNEL factors_of_tensors(
    const float* tops, const float* mu, float* factors, i64 count, float factor, float ranks, i32 scaled, const Rule r) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Grid none = {};  // scales are float32
  float encode = __fmul_rn(scaled ? scale_of(tops[i], r, none).factor : 1.0f, mu == nullptr ? factor : *mu);
  encode = fminf(fmaxf(encode, FLOAT_MIN), FLOAT_MAX);
  float decode = reciprocal(encode);
  factors[i] = encode;
  factors[count + i] = ranks == 0.0f ? decode : __fdiv_rn(decode, ranks);
}
