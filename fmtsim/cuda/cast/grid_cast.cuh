// Which steps of grid.cuh a cast takes, by macros: METHOD; SPECIAL: overflow gives Inf or NaN; ASYMMETRIC: the range is
// not -highest ... highest; CARRIES: it gives Inf, whose code follows the largest number's; KEEPS: the format has -0;
// RANDOM: stochastic rounding, 1 with whole words, else 2; PAIRS (below).
#pragma once
#include "grid.cuh"
#include "vectors.cuh"

#define MAGIC 0
#define BITS 1
#define FLUSHING 2
#define HALVES 3
#define FIXED 4  // one magic number serves all
#define POWERS 5  // powers of two from 2^-127 on

// The clamped magnitude a, rounded; rest: what its random word lacks of 2^32 - 1.
DEVICE float rounded_magnitude(float a, u32 rest, const Grid& g) {
  if (RANDOM && METHOD == BITS) return stochastic_bits<RANDOM == 1>(a, rest, g);
  if (RANDOM) return stochastic_magnitude<METHOD == FIXED, RANDOM == 1>(a, rest, g);
  if (METHOD == FIXED) return nearest_fixed(a, g);
  if (METHOD == POWERS) return nearest_power(a, g);
  return METHOD == MAGIC ? nearest_magic(a, g) : nearest_bits<METHOD == FLUSHING>(a, g);
}

// The value to which float32 x rounds, unless is_spoiled says that it is NaN.
DEVICE float rounded_number(float x, u32 rest, const Grid& g) {
  if (METHOD == HALVES) return nearest_half_offset(x, g);
  return finished<SPECIAL, KEEPS>(rounded_magnitude(clamped<ASYMMETRIC>(x, g), rest, g), x, g);
}

DEVICE float cast_with_rest(float x, u32 rest, const Grid& g) {
  float y = rounded_number(x, rest, g);
  return is_spoiled<SPECIAL>(y, x) ? g.nan_value : y;
}

DEVICE float cast_value(float x, u32 word, const Grid& g) { return cast_with_rest(x, ~word, g); }

// Casts of whole vectors. Where overflow does not give NaN, clamping, rounding and the rest are steps of their own
// (SPLIT), a sum of magnitudes tells whether one was NaN, and then elements are cast one by one.
#define SPLIT ((!SPECIAL || CARRIES) && METHOD != HALVES)
#define SIGNS_LAST (KEEPS && SPLIT)  // the sign may be put on packed pairs or codes

template <int Count>
DEVICE bool holds_nan(const float (&x)[Count]) {
  if (SPECIAL) return false;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < Count; k++) sums[k % 2] += fabsf(x[k]);
  float sum = sums[0] + sums[1];
  return sum != sum;
}

// Clamped magnitudes of vectors, and whether a number of them was NaN. PAIRS: two are clamped at a time, for the dtype
// has 16 bits and holds the largest one; what is ASYMMETRIC then has no signs.
template <int Type>
struct Magnitudes {
  float sums[2] = {0.0f, 0.0f};
  u32 pairs = 0;

  template <int Count>
  DEVICE void take(float (&a)[Count], const Vectors<Type, Count>& from, const Grid& g) {
#pragma unroll
    for (int k = 0; k < Count; k += 2) {
      if constexpr (PAIRS) {
        u32 high = (u32)stored<Type>(g.highest);
        u32 pair = clamp_pair<Type, ASYMMETRIC>(from.words[k / 2], high | high << 16);
        pairs = add_pairs<Type>(pairs, pair);
        a[k] = loaded<Type>((u16)pair);
        a[k + 1] = Type == BFLOAT16 ? __uint_as_float(pair & 0xFFFF0000u) : loaded<Type>((u16)(pair >> 16));
      } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float x = from.get(k + i);
          sums[i] += fabsf(x);
          a[k + i] = clamped<ASYMMETRIC>(x, g);
        }
      }
    }
  }

  DEVICE bool hold_nan() const {
    if constexpr (PAIRS) {
      float low = loaded<Type>((u16)pairs), high = loaded<Type>((u16)(pairs >> 16));
      return low != low || high != high;
    } else {
      float sum = sums[0] + sums[1];
      return sum != sum;
    }
  }
};
