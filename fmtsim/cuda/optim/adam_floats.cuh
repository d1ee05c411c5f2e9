// One state of floating-point codes: how its numbers become codes and back, and what its scales are, as the tables of
// fmtsim.spec.optimizer.StateFormat say.
//
// Parameters of Slot, a macro's value for each state: BITS of a code, 16 or 8; 32: float32 numbers; 0: there is none.
// MANTISSA, BIAS: of the format. FINITE: the code of its largest value. INFINITIES: the next code is Inf. NOT: the code
// of NaN. RULE: of the scales. LEAST: bits of what amax is raised to. RANDOM: bits of stochastic rounding, of a format
// with float32's exponents; 0 rounds to nearest even. BLOCK as adam_floats.cu has it; where it is 0, scales are narrow
// if the count of elements is Endless.
#pragma once
#include "adam.cuh"
#include "philox.cuh"

#define RULE_NONE 0
#define RULE_AMAX 1
#define RULE_INVERSE 2
#define RULE_RECIPROCAL 3
#define RULE_POWER 4

// A scale with what multiplies or divides numbers and values; worked out once for many of them.
struct Scale {
  float scale, inverse;
  bool narrow;  // nothing is divided by it, or quotient() takes it
};

// float16 by the card's own instructions. half_code: what is too large becomes the largest number, NaN that code.
#ifdef FMTSIM_HOST
DEVICE float half_value(u32 code) {
  u32 size = code & 0x7FFF, bits = magnitude_of<10, 15>(size);
  if (size >= 0x7C00) bits = INFINITE | (size > 0x7C00 ? 0x400000 : 0);
  return __uint_as_float(bits | (code & 0x8000) << 16);
}
DEVICE u32 half_code(float x, u32 nan) {
  u32 bits = __float_as_uint(x), size = bits & MAGNITUDE;
  if (size > INFINITE) return nan;
  return (bits >> 16 & 0x8000) | nearest_code<10, 15>(size > 0x477FE000u ? 0x477FE000u : size);  // 65504
}
#else
DEVICE float half_value(u32 code) { return float_of_half((u16)code); }
DEVICE u32 half_code(float x, u32 nan) { return x == x ? half_of_float(fminf(fmaxf(x, -65504.0f), 65504.0f)) : nan; }
#endif

__device__ __noinline__ float divided(float x, float y) { return __fdiv_rn(x, y); }

template <int BITS, int MANTISSA, int BIAS, u32 FINITE, int INFINITIES, u32 NOT, int RULE, u32 LEAST, int RANDOM>
struct Slot {
  static constexpr int bits = BITS;
  static constexpr bool random = RANDOM != 0, scaled = RULE != RULE_NONE;
  static constexpr u32 SIGN = BITS ? 1u << (BITS - 1) : 0;
  static constexpr u32 TOP = (FINITE << (23 - MANTISSA)) + ((127u - BIAS) << 23);

  static constexpr bool is_half = BITS == 16 && MANTISSA == 10 && BIAS == 15 && FINITE == 0x7BFF;
  static constexpr bool is_bfloat = BITS == 16 && MANTISSA == 7 && BIAS == 127 && FINITE == 0x7F7F;

  // The magnitude of a code as bits.
  static DEVICE u32 size_of(u32 code) {
    u32 size = code & (SIGN - 1), bits = magnitude_of<MANTISSA, BIAS>(size);
    return size <= FINITE ? bits : INFINITE | (INFINITIES && size == FINITE + 1 ? 0 : 0x400000);
  }

  static DEVICE float value(u32 code) {
    if (is_bfloat) return __uint_as_float(code << 16);
    if (is_half) return half_value(code);
    return __uint_as_float(size_of(code) | (code & SIGN ? 0x80000000u : 0));
  }

  // word: a random one.
  static DEVICE u32 code(float x, u32 word) {
    if (is_half && !RANDOM) return half_code(x, NOT);
    u32 bits = __float_as_uint(x), sign = bits >> 31 ? SIGN : 0;
    bits &= MAGNITUDE;
    if (bits > INFINITE) return NOT;
    bits = bits > TOP ? TOP : bits;
    u32 drawn = RANDOM ? word >> (32 - (RANDOM ? RANDOM : 1)) << (23 - MANTISSA - RANDOM) : 0;
    if (RANDOM) return sign | (bits + drawn) >> (23 - MANTISSA);
    return sign | nearest_code<MANTISSA, BIAS>(bits);
  }

  // Prepare a scale for decoding (RECIPROCAL and POWER divide by it) or encoding (INVERSE does).
  static DEVICE Scale prepared(float scale) {
    if (!scaled) return Scale{1.0f, 1.0f, true};
    if (RULE == RULE_AMAX) return Scale{scale, scale, true};
    u32 size = __float_as_uint(scale);
    bool within = BIAS < 32 && size >= 0x21800000u && size <= 0x5D800000u;  // 2^-60 to 2^60
    return Scale{scale, __fdiv_rn(1.0f, scale), RULE != RULE_RECIPROCAL || within};
  }

  // prepared() of a new scale, by which numbers are about to be encoded.
  static DEVICE Scale used(float scale) {
    if (RULE == RULE_AMAX && scale == 0.0f) scale = 1.0f;
    if (RULE == RULE_INVERSE && scale < 1e-12f) scale = 1e-12f;
    return prepared(scale);
  }

  // Four values decoded in place. Certain: the scale is known to be narrow.
  template <bool Certain>
  static DEVICE void decode(Four& q, const Scale& s) {
    if (RULE == RULE_NONE) return;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (RULE != RULE_RECIPROCAL) q.x[k] = __fmul_rn(q.x[k], RULE == RULE_POWER ? s.inverse : s.scale);
      else if (Certain) q.x[k] = quotient(q.x[k], s.scale, s.inverse);
      else q.x[k] = divided(q.x[k], s.scale);
    }
  }

  static DEVICE float to_encode(float x, const Scale& s) {
    if (RULE == RULE_NONE) return x;
    if (RULE == RULE_AMAX) return __fdiv_rn(x, s.scale);
    return __fmul_rn(x, RULE == RULE_INVERSE ? s.inverse : s.scale);
  }

  // The scale of numbers whose largest magnitude has these bits, NaN above Inf. old: that until now.
  static DEVICE float next(u32 top, float old) {
    top = top > LEAST ? top : LEAST;
    float amax = __uint_as_float(top);
    if (RULE == RULE_RECIPROCAL) return top ? __fdiv_rn(__uint_as_float(TOP), amax) : 1.0f;
    if (RULE != RULE_POWER) return __fdiv_rn(amax, __uint_as_float(TOP));
    if (top == 0 || top >= INFINITE) return old;
    i32 power = (i32)(TOP >> 23) - (i32)(top >> 23) - ((top & 0x7FFFFF) > (TOP & 0x7FFFFF));
    power = power < -126 ? -126 : power > 126 ? 126 : power;
    return __uint_as_float((u32)(power + 127) << 23);
  }

  // Four neighbours out of memory, decoded.
  template <class Count>
  static DEVICE Four load(const void* from, i64 at, Count count, const Scale& s) {
    if constexpr (BITS == 32 || BITS == 0) return BITS ? read((const float*)from, at, count) : Four{};
    else {
      u64 codes = BITS == 16 ? read_four((const u16*)from, at, count) : read_four((const u8*)from, at, count);
      Four four;
#pragma unroll
      for (int k = 0; k < 4; k++) four.x[k] = value((u32)(codes >> (BITS * k)) & (2 * SIGN - 1));
      decode<!BLOCK && Is<Count>::endless>(four, s);
      return four;
    }
  }

  // Encode four neighbours into memory; x becomes what they decode to.
  template <class Count>
  static DEVICE void store(void* to, i64 at, Count count, Four& x, const Scale& s, const Four& words) {
    if constexpr (BITS == 32) write((float*)to, at, count, x);
    else if constexpr (BITS != 0) {
      u64 codes = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        u32 c = code(to_encode(x.x[k], s), __float_as_uint(words.x[k]));
        codes |= (u64)c << (BITS * k);
        x.x[k] = value(c);
      }
      decode<!BLOCK && Is<Count>::endless>(x, s);
      if (BITS == 16) write_four((u16*)to, at, count, codes);
      else write_four((u8*)to, at, count, codes);
    }
  }
};
