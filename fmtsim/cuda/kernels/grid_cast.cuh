// Which steps of grid.cuh a cast takes, by macros: METHOD; SPECIAL: overflow gives Inf or NaN; ASYMMETRIC: the range is
// not -highest ... highest; KEEPS: the format has -0; RANDOM: stochastic rounding, 1 with whole words and small last
// places (grid.cuh), else 2.
#pragma once
#include "grid.cuh"

#define MAGIC 0
#define BITS 1
#define FLUSHING 2
#define HALVES 3

// The magnitude to which float32 x rounds, but for overflow.
DEVICE float rounded_magnitude(float x, u32 word, const Grid& g) {
  float a = clamped<ASYMMETRIC>(x, g);
  if (RANDOM) return stochastic_magic<RANDOM == 1>(a, word, g);
  return METHOD == MAGIC ? nearest_magic(a, g) : nearest_bits<METHOD == FLUSHING>(a, g);
}

// The value to which float32 x rounds, unless is_spoiled says that it is NaN.
DEVICE float rounded_number(float x, u32 word, const Grid& g) {
  if (METHOD == HALVES) return nearest_half_offset(x, g);
  return finished<SPECIAL, KEEPS>(rounded_magnitude(x, word, g), x, g);
}

DEVICE float cast_value(float x, u32 word, const Grid& g) {
  float y = rounded_number(x, word, g);
  return is_spoiled<SPECIAL>(y, x) ? g.nan_value : y;
}

// Casts of whole vectors: SPECIAL treats NaN where it occurs; the others ask once for all (a sum with NaN is NaN), and then
// take cast_value one by one.
#define SIGNS_LAST (KEEPS && !SPECIAL && METHOD != HALVES)  // the sign may be put on packed pairs or codes

template <int Count>
DEVICE bool holds_nan(const float (&x)[Count]) {
  if (SPECIAL) return false;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < Count; k++) sums[k % 2] += fabsf(x[k]);
  float sum = sums[0] + sums[1];
  return sum != sum;
}
