// SPDX-License-Identifier: Apache-2.0
// Scales of rotated lines that follow from more than an amax, by CAST: the standard deviation of 32 numbers, and two
// levels of scales that are corrected over a group.
#pragma once
#include "rotated.cuh"

#if CAST == DEVIATION

// The standard deviation of 32 numbers: float64 sums in the order of fmtsim.scaling.blocks, and a quick way to the
// power of two that follows from it.

// The standard deviation of those of 32 numbers that are finite.
DEVICE float deviation_of(const float (&y)[PER_LANE]) {
  double sums[PER_LANE / 2], mean = 0.0;
  u32 finite = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) finite += (as_bits(y[i]) & MAGNITUDE) < FLOAT_EXPONENT;
  double count = (double)max(finite, 1u);
#pragma unroll 1
  for (int squares = 0; squares < 2; ++squares) {
#pragma unroll
    for (int i = 0; i < PER_LANE / 2; ++i) {
      double off[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float x = y[i + k * (PER_LANE / 2)];
        off[k] = (as_bits(x) & MAGNITUDE) < FLOAT_EXPONENT ? __dsub_rn((double)x, mean) : 0.0;
        if (squares) off[k] = __dmul_rn(off[k], off[k]);
      }
      sums[i] = __dadd_rn(off[0], off[1]);
    }
    if (!squares) mean = __ddiv_rn(folded<PER_LANE / 2>(sums), count);
  }
  return at_most_float_max(__double2float_rn(__dsqrt_rn(__ddiv_rn(folded<PER_LANE / 2>(sums), count))));
}

DEVICE float scale_of_deviation(float deviation) {
  return __fadd_rn(__fmul_rn(deviation, as_float(FACTOR)), as_float(OFFSET));
}

// The scale before it becomes a power of two, in float32 arithmetic; returns whether the power is sure to be the same.
// With std >= 2^-10 amax the mean is known to 2^-11 std, the variance to 2^-20; the scale must lie 2^-15 off a power.
DEVICE bool quick_scale(const float (&y)[PER_LANE], u32 amax, float& scale) {
  float sums[PER_LANE / 2], squares[4] = {};
#pragma unroll
  for (int i = 0; i < PER_LANE / 2; ++i) sums[i] = __fadd_rn(y[i], y[i + PER_LANE / 2]);
  float mean = __fmul_rn(folded<PER_LANE / 2>(sums), 1.0f / PER_LANE);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    float off = __fsub_rn(y[i], mean);
    squares[i % 4] = __fmaf_rn(off, off, squares[i % 4]);
  }
  float sum = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
  float variance = __fmul_rn(sum, 1.0f / PER_LANE);
  scale = scale_of_deviation(__fsqrt_rn(variance));
  float least = __fmul_rn(as_float(amax), as_float(0x3A800000u));  // 2^-10
  bool inside = amax - 0x2B800000u < 0x5D800000u - 0x2B800000u;     // 2^-40 ... 2^60: squares are normal
  bool apart = (as_bits(scale) & 0x7FFFFFu) - 256u < 0x7FFFFFu - 512u;
  return amax == 0 || (inside && apart && variance >= __fmul_rn(least, least));
}

#elif CAST == CORRECTED || CAST == TWO_SCALES

// Two levels of scales as in Quartet II (fmtsim.scaling.scales). A piece under the scale that its amax asks for, rounded
// to nearest.
DEVICE Piece two_scales_piece(u32 amax, float tensor) {
  Scale s = quartet_level(as_float(amax), as_float(TOP), tensor, [](float x) { return fast_scale_rounded(x); });
  return {{ELEMENT_LIMIT, ELEMENT_LIMIT_NEGATIVE, ELEMENT_LOWEST, 1.0f, 1.0f, s.stored, false},
          __fdiv_rn(1.0f, s.factor), s.factor};
}
#endif

#if CAST == CORRECTED

// They are corrected over a group so that <y, q> = <y, y> (EDEN): fmtsim.scaling.cast.

// RN32(x / piece.grow): the product with the reciprocal, corrected twice. Where quotients are so small that a remainder
// has no number, no sum over their group sees the difference.
DEVICE float quotient(float x, const Piece& piece) {
  float near = __fmul_rn(x, piece.shrink);
  near = __fmaf_rn(-__fmaf_rn(piece.grow, near, -x), piece.shrink, near);  // what is over: +0 keeps the sign of zero
  return __fmaf_rn(-__fmaf_rn(piece.grow, near, -x), piece.shrink, near);
}

// A scale rounded stochastically to its format, saturating; rest: what its random word lacks of 2^32 - 1.
DEVICE float scale_drawn(float value, u32 rest) {
  value = fminf(value, as_float(SCALE_LIMIT));
  float binade = as_float(max(as_bits(value) & FLOAT_EXPONENT, SCALE_LOWEST));
  const float fine = as_float((95u - SCALE_MANTISSA) << 23), base = as_float(0x4B400000u - (SCALE_MANTISSA << 23));
  return __fmaf_rn(-binade, base, stochastic_sum(value, binade, fine, base, rest));
}

// Sums of the products of a group, in the order of fmtsim.scaling.blocks.folded_sum: places whose bits are read
// backwards are added like digits that carry.
__device__ __noinline__ float correction_slowly(
    const Source& source, const u32* signs, const float* factor, float tensor) {
  float y[GROUP];
  rotate_slowly<GROUP>(y, source, signs, factor);
  double over[8], square[8];
#pragma unroll 1
  for (u32 k = 0; k < GROUP; ++k) {
    u32 i = __brev(k) >> 25;
    Piece piece = two_scales_piece(finite_amax_of<RUN>(y + i / RUN * RUN), tensor);
    float z = __fdiv_rn(y[i], piece.grow);
    double a = __dmul_rn((double)z, (double)nearest<true>(z, piece.block)), b = __dmul_rn((double)z, (double)z);
    u32 level = 0;
    for (; k >> level & 1; ++level) a = __dadd_rn(over[level], a), b = __dadd_rn(square[level], b);
    over[level] = a, square[level] = b;
  }
  return over[7] == 0.0 ? 1.0f : __double2float_rn(__ddiv_rn(square[7], over[7]));
}

// A finite magnitude as a double, 0 as 2^-127: conversions have an eighth of the rate of integer instructions.
DEVICE double widened_magnitude(u32 magnitude) {
  return __longlong_as_double((i64)((u64)((magnitude >> 3) + 0x38000000u) << 32 | magnitude << 29));
}

// Cast a lane's rotated numbers in place.
DEVICE void cast_corrected(float (&y)[PER_LANE], const Line& line, float tensor, const Draw& draw) {
  Piece piece[PIECES];
  double over = 0.0, square = 0.0;
  // 1. elements under the scale of their piece, and the lane's sums of z q and z z
  u32 any = 0;
  bool nonfinite = false;
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 amax = 0;
#pragma unroll
    for (int i = b * RUN; i < (b + 1) * RUN; ++i) amax = max(amax, as_bits(y[i]) & MAGNITUDE);
    nonfinite |= amax >= FLOAT_EXPONENT;  // then nothing of this block is looked at
    piece[b] = two_scales_piece(amax, tensor);
#pragma unroll
    for (int i = b * RUN; i < (b + 1) * RUN; ++i) {
      float z = quotient(y[i], piece[b]);
      y[i] = nearest<true>(z, piece[b].block);
      u32 q = as_bits(y[i]) & MAGNITUDE;
      double whole = widened_magnitude(as_bits(z) & MAGNITUDE);
      over = __fma_rn(whole, widened_magnitude(q), over);
      square = __fma_rn(whole, whole, square);
      any |= q;
    }
  }
  if (any == 0) over = 0.0;
  // 2. those of the group
#pragma unroll
  for (int flip = 1; flip < GROUP / PER_LANE; flip *= 2) {
    over = __dadd_rn(over, __shfl_xor_sync(~0u, over, flip));
    square = __dadd_rn(square, __shfl_xor_sync(~0u, square, flip));
    nonfinite |= (bool)__shfl_xor_sync(~0u, (i32)nonfinite, flip);
  }
  // 3. the correction <z, z> / <z, q>, in the defined order of sums where another one might round otherwise: it moves a
  // quotient by less than 2^-47 of it, and few are as near to a tie as that
  double c = __ddiv_rn(square, over);
  float correction = over == 0.0 ? 1.0f : __double2float_rn(c);
  bool near = __double2float_rn(c * (1.0 - TOLERANCE)) != __double2float_rn(c * (1.0 + TOLERANCE));
  near = near && over != 0.0 && !nonfinite;
  if (__any_sync(~0u, near)) {
    u32 back = threadIdx.x % (GROUP / PER_LANE);
    Source source = line.source;
    source.from -= back * (PER_LANE * source.stride + source.gap);
    float again = correction_slowly(source, line.signs, line.factor, tensor);
    if (near) correction = again;
    __syncwarp();  // the others have read what this lane is about to write
  }
  // 4. scales times the correction, rounded stochastically, and values under them
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 rest = ~random_integer(line.first / RUN + b, draw, nullptr);
    float scale = scale_drawn(__fmul_rn(piece[b].block.stored, correction), rest);
#pragma unroll
    for (int i = b * RUN; i < (b + 1) * RUN; ++i) y[i] = nonfinite ? as_float(0x7FC00000) : __fmul_rn(y[i], scale);
  }
}

#endif
