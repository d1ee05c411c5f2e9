// Elements of the input's dtype, and their largest magnitudes.
//
// INPUT is float32, bfloat16 or float16; OUTPUT is 0 float32, 1 bfloat16, 2 codes of CODE_BITS bits, one a byte, 3 the
// same packed (docs/semantics.md, section 11). "Raw" magnitudes are two in a word where elements have 16 bits.
#pragma once
#include "vectors.cuh"

#ifndef INPUT  // of kernels that read no elements
#define INPUT FLOAT32
#endif
#if INPUT == 0
#define INPUT_BITS 32
#else
#define INPUT_BITS 16
#endif
#ifndef OUTPUT
#elif OUTPUT == 0
#define OUTPUT_BITS 32
#elif OUTPUT == 1
#define OUTPUT_BITS 16
#elif OUTPUT == 2
#define OUTPUT_BITS 8
#else
#define OUTPUT_BITS CODE_BITS
#endif

// An element of the input's dtype as float32. NaN and Inf of float16 come out finite: blocks with those are refused.
DEVICE float input_value(u32 bits) {
#if INPUT == 0
  return as_float(bits);
#elif INPUT == 1
  return as_float(bits << 16);
#else
  return as_float(as_bits(__fmul_rn(as_float((bits & 0x7FFF) << 13), 5192296858534827628530496329220096.0f)) |
                  (bits & 0x8000) << 16);  // 2^112
#endif
}

// Largest magnitude of a vector as float32 bits, NaN above Inf; and the same over finite elements alone.
DEVICE u32 widened(u32 magnitude) {
#if INPUT == 0
  return magnitude;
#elif INPUT == 1
  return magnitude << 16;
#else
  return magnitude < 0x7C00 ? as_bits(input_value(magnitude)) : FLOAT_EXPONENT + (magnitude - 0x7C00);
#endif
}

#define RAW_MAGNITUDE (INPUT == FLOAT32 ? MAGNITUDE : 0x7FFF7FFFu)
DEVICE u32 raw_larger(u32 a, u32 b) { return INPUT == FLOAT32 ? max(a, b) : __vmaxu2(a, b); }
DEVICE u32 amax_of_raw(u32 top) { return INPUT == FLOAT32 ? top : widened(max(top & 0xFFFF, top >> 16)); }

template <int COUNT>
DEVICE u32 raw_amax(const Packed<COUNT, INPUT_BITS>& v) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < Packed<COUNT, INPUT_BITS>::LENGTH; ++i) top = raw_larger(top, v.words[i] & RAW_MAGNITUDE);
  return top;
}

template <int COUNT>
DEVICE u32 finite_amax(const Packed<COUNT, INPUT_BITS>& v, bool& has_nan) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    u32 magnitude = widened(v.get(i) & (INPUT == 0 ? MAGNITUDE : 0x7FFFu));
    if (magnitude < FLOAT_EXPONENT) top = max(top, magnitude);
    has_nan |= magnitude > FLOAT_EXPONENT;
  }
  return top;
}
