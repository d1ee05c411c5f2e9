// The elements of a rotated line: their random words, their values, and the exact way of block formats.
#pragma once
#include "rotated.cuh"

#if CAST == DEVIATION || CAST == LARGEST
// A piece under the power of two that is not above s.
DEVICE Piece piece_of(float s) {
  u32 exponent = as_bits(fminf(fmaxf(s, FLOAT_MIN), FLOAT_MAX)) & FLOAT_EXPONENT;
  Piece piece = {{ELEMENT_LIMIT, ELEMENT_LIMIT_NEGATIVE, ELEMENT_LOWEST, 1.0f, 1.0f, 1.0f, false}};
  piece.shrink = as_float(0x7F000000u - exponent);  // 2^-126 ... 2^126
  piece.grow = as_float(exponent);
  return piece;
}
#endif

// The value of x times 2^k, scales that stay outside aside; `passes`: whether x lies within the format's range.
DEVICE float cast_one(float x, u32 rest, const Piece& piece, bool& passes) {
#if CAST == BLOCK_FORMAT || CAST == CORRECTED
  passes = true;
  return fast_value(x, rest, piece.block, 1.0f);
#elif CAST == LARGEST
  // RN32(x / MULTIPLIER): the product with the reciprocal, and what is over
  float z = __fmul_rn(x, piece.shrink);
#if DIVIDES
  float near = __fmul_rn(z, as_float(MULTIPLIER_RECIPROCAL));
  float over = __fmaf_rn(near, as_float(MULTIPLIER), -z);  // +0 where nothing is over, which keeps the sign of zero
  z = fabsf(near) < as_float(FLOAT_EXPONENT) ? __fmaf_rn(-over, as_float(MULTIPLIER_RECIPROCAL), near) : near;
#endif
  passes = fabsf(z) < as_float(ELEMENT_LIMIT);
  return __fmul_rn(fast_value(z, rest, piece.block, 1.0f), piece.grow);
#else
  // Up to the least multiple of the last place that is not below the magnitude less half a place.
  float z = __fmul_rn(x, piece.shrink);
  passes = fabsf(z) < as_float(ELEMENT_LIMIT);
  FastElement e = fast_element(z, piece.block);
  const float half = as_float((126u - ELEMENT_MANTISSA) << 23), base = as_float(0x4B400000u - (ELEMENT_MANTISSA << 23));
  float binade = as_float(e.binade), sum = __fmaf_ru(binade, base, __fmaf_ru(-binade, half, e.magnitude));
  return __fmul_rn(as_float(as_bits(__fmaf_rn(-binade, base, sum)) | e.sign), piece.grow);
#endif
}

// What the random words of elements i, i + 8, i + 16, i + 24 of a lane lack of 2^32 - 1, i below 8. `counter`: of the
// first of the 64 elements that lanes 2 n and 2 n + 1 hold together.
DEVICE void take_rests(u32 (&rests)[4], u64 counter, int i, const Draw& draw) {
  bool second = threadIdx.x & 1;
  Words4 own = philox<true>(counter + (second ? 8 : 0) + i, draw);
  u32 unused = (u32)(0xFFFFFFFFull >> draw.bits);
  u32 keep[2] = {second ? own.z : own.x, second ? own.w : own.y};
  u32 got[2] = {__shfl_xor_sync(~0u, second ? own.x : own.z, 1), __shfl_xor_sync(~0u, second ? own.y : own.w, 1)};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    rests[2 * k] = (second ? got[k] : keep[k]) | unused;
    rests[2 * k + 1] = (second ? keep[k] : got[k]) | unused;
  }
}

// A line's numbers cast one by one, from memory; all lanes of a warp call it together (see block_rows.cu).
template <int SIZE>
__device__ __noinline__ void cast_exactly(
    u16* to, const Source& source, const u32* signs, const float* factor, u64 first, TensorScale tensor,
    const Draw& draw, const Cast& c) {
  float y[HELD];
  rotate_slowly<SIZE, HELD>(y, source, signs, factor);
#pragma unroll 1
  for (int start = 0; start < HELD; start += RUN) {
    u32 amax = 0;
    bool has_nan = false;
#pragma unroll 1
    for (int i = start; i < start + RUN; ++i) {
      u32 magnitude = as_bits(y[i]) & MAGNITUDE;
      if (magnitude < FLOAT_EXPONENT) amax = max(amax, magnitude);
      has_nan |= magnitude > FLOAT_EXPONENT;
    }
    BlockScale s = scale_of({0.0, (double)as_float(amax), has_nan}, c.scale, tensor);
    bool spoiled = has_nan && !c.scale.element_has_nan;
#pragma unroll 1
    for (int i = start; i < start + RUN; ++i) {
      ExactElement e = exact_element(y[i], false, first + i, s, spoiled, 1.0f, c, draw);
      to[i] = (u16)narrowed(e.value, DTYPE_BFLOAT16);
    }
  }
}
