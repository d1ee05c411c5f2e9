// The standard deviation of 32 numbers: float64 sums in the order of fmtsim.scaling.statistics, and a quick way to the
// power of two that follows from it.
#pragma once
#include "rotated.cuh"

// Sums in float64: element i and i + n / 2 are added until one number is left.
DEVICE double folded(double (&x)[HELD / 2]) {
#pragma unroll
  for (int n = HELD / 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = __dadd_rn(x[i], x[i + n]);
  }
  return x[0];
}

DEVICE float root_of(double mean) { return at_most_float_max(__double2float_rn(__dsqrt_rn(mean))); }

// The standard deviation of 32 numbers that are finite.
DEVICE float deviation_of(const float (&y)[HELD]) {
  double sums[HELD / 2];
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) sums[i] = __dadd_rn((double)y[i], (double)y[i + HELD / 2]);
  double mean = __dmul_rn(folded(sums), 1.0 / HELD);
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) {
    double a = __dsub_rn((double)y[i], mean), b = __dsub_rn((double)y[i + HELD / 2], mean);
    sums[i] = __dadd_rn(__dmul_rn(a, a), __dmul_rn(b, b));
  }
  return root_of(__dmul_rn(folded(sums), 1.0 / HELD));
}

DEVICE float scale_of_deviation(float deviation) {
  return __fadd_rn(__fmul_rn(deviation, as_float(FACTOR)), as_float(OFFSET));
}

// The scale before it becomes a power of two, in float32 arithmetic; returns whether the power is sure to be the same.
// With std >= 2^-10 amax the mean is known to 2^-11 std, the variance to 2^-20; the scale must lie 2^-15 off a power.
DEVICE bool quick_scale(const float (&y)[HELD], u32 amax, float& scale) {
  float sums[HELD / 2], squares[4] = {};
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) sums[i] = __fadd_rn(y[i], y[i + HELD / 2]);
#pragma unroll
  for (int n = HELD / 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) sums[i] = __fadd_rn(sums[i], sums[i + n]);
  }
  float mean = __fmul_rn(sums[0], 1.0f / HELD);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    float off = __fsub_rn(y[i], mean);
    squares[i % 4] = __fmaf_rn(off, off, squares[i % 4]);
  }
  float sum = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
  float variance = __fmul_rn(sum, 1.0f / HELD);
  scale = scale_of_deviation(__fsqrt_rn(variance));
  float least = __fmul_rn(as_float(amax), as_float(0x3A800000u));  // 2^-10
  bool inside = amax - 0x2B800000u < 0x5D800000u - 0x2B800000u;     // 2^-40 ... 2^60: squares are normal
  bool apart = (as_bits(scale) & 0x7FFFFFu) - 256u < 0x7FFFFFu - 512u;
  return amax == 0 || (inside && apart && variance >= __fmul_rn(least, least));
}

// That of the finite ones among them; all lanes of a warp call it together (see block_rows.cu).
template <int SIZE>
__device__ __noinline__ float deviation_slowly(const Source& source, const u32* signs, const float* factor) {
  float y[HELD];
  double sums[HELD / 2];
  rotate_slowly<SIZE, HELD>(y, source, signs, factor);
  u32 count = 0;
#pragma unroll 1
  for (int i = 0; i < HELD; ++i) {
    bool finite = (as_bits(y[i]) & MAGNITUDE) < FLOAT_EXPONENT;
    count += finite;
    if (!finite) y[i] = as_float(0x7FC00000);
  }
  double counted = count ? (double)count : 1.0, mean = 0.0;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
#pragma unroll 1
    for (int i = 0; i < HELD / 2; ++i) {
      double parts[2];
#pragma unroll 1
      for (int k = 0; k < 2; ++k) {
        float x = y[i + k * (HELD / 2)];
        double off = x == x ? __dsub_rn((double)x, mean) : 0.0;
        parts[k] = turn ? __dmul_rn(off, off) : off;
      }
      sums[i] = __dadd_rn(parts[0], parts[1]);
    }
#pragma unroll 1
    for (int n = HELD / 4; n > 0; n /= 2) {
#pragma unroll 1
      for (int i = 0; i < n; ++i) sums[i] = __dadd_rn(sums[i], sums[i + n]);
    }
    if (turn == 0) mean = __ddiv_rn(sums[0], counted);
  }
  return root_of(__ddiv_rn(sums[0], counted));
}
