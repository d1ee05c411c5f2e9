// SPDX-License-Identifier: Apache-2.0
// Codecs of optimizer states: the numbers of a tensor as codes with scales (fmtsim.spec.optimizer.StateFormat).
//
// Slot: floating-point codes. BITS of a code, 16 or 8; 32: float32 numbers; 0: there is none. MANTISSA, BIAS: of the
// format. FINITE: the code of its largest value. INFINITIES: the next code is Inf. NOT: the code of NaN. RULE: of the
// scales. LEAST: bits of what amax is raised to. RANDOM: bits of stochastic rounding, of a format with float32's
// exponents; 0 rounds to nearest even. BLOCK as optimizer.cu has it; where it is 0, scales are narrow if four
// neighbours are known to exist.
//
// Integer: numbers from LOWEST to HIGHEST in bytes. Logs: signs with logarithms.
//
// Book: codes of a codebook with amax, BITS each, 8, or 4 with two a byte, the even element's in the low half.
// UNSIGNED: of the second moment, which is never negative. How a code is found is said at
// fmtsim.rounding.codebooks.Table and fmtsim.spec.optimizer.Book.
#pragma once
#include "optimizer.cuh"

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

// The codebooks of both moments: values by code, 2^BITS for each; behind them words, buckets for each sign of the
// first, then buckets of the second, which is never negative. Of logarithms: the values of an octave.
struct alignas(16) Books {
  const float* values;
  i32 buckets, lowest;
  float least[2];
};

// Codebooks with their numbers in shared memory.
struct Tables {
  const float* values;
  const u32* words;
  const Books& books;
};

// A float32 as float16: what is too large becomes the largest number, NaN the code `nan`.
DEVICE u32 half_code(float x, u32 nan) {
  return x == x ? half_of_float(fminf(fmaxf(x, -65504.0f), 65504.0f)) : nan;
}

__device__ __noinline__ float divided(float x, float y) { return __fdiv_rn(x, y); }

// Codes of BITS each, 16 or 8, of four neighbours in memory, the first in the lowest bits.
template <int BITS, int Whole>
DEVICE u64 read_codes(const void* from, i64 at, i64 count) {
  if (BITS == 16) return read_four<Whole>((const u16*)from, at, count);
  return read_four<Whole>((const u8*)from, at, count);
}
template <int BITS, int Whole>
DEVICE void write_codes(void* to, i64 at, i64 count, u64 codes) {
  if (BITS == 16) write_four<Whole>((u16*)to, at, count, codes);
  else write_four<Whole>((u8*)to, at, count, codes);
}

// Codes of BITS each under a rule of scales; Own says what a code's value is, and which code a number has. TOP: bits of
// the largest value. SHORT: quotient() takes all values.
template <class Own, int BITS, u32 TOP, bool SHORT, int RULE, u32 LEAST, int RANDOM>
struct Codes {
  static constexpr int bits = BITS;
  static constexpr bool random = RANDOM != 0, scaled = RULE != RULE_NONE, tabled = false, fixed = false;

  // Prepare a scale for decoding (RECIPROCAL and POWER divide by it) or encoding (INVERSE does).
  static DEVICE Scale prepared(float scale) {
    if (!scaled) return Scale{1.0f, 1.0f, true};
    if (RULE == RULE_AMAX) return Scale{scale, scale, true};
    u32 size = as_bits(scale);
    bool within = SHORT && size >= 0x21800000u && size <= 0x5D800000u;  // 2^-60 to 2^60
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
    UNROLLED for (int k = 0; k < 4; k++) {
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
  static DEVICE float next(u32 top, float old, const Tables&) {
    top = top > LEAST ? top : LEAST;
    float amax = as_float(top);
    if (RULE == RULE_RECIPROCAL) return top ? __fdiv_rn(as_float(TOP), amax) : 1.0f;
    if (RULE != RULE_POWER) return __fdiv_rn(amax, as_float(TOP));
    if (top == 0 || top >= INFINITE) return old;
    i32 power = (i32)(TOP >> 23) - (i32)(top >> 23) - ((top & 0x7FFFFF) > (TOP & 0x7FFFFF));
    power = power < -126 ? -126 : power > 126 ? 126 : power;
    return as_float((u32)(power + 127) << 23);
  }

  // Four neighbours out of memory, decoded.
  template <int Whole>
  static DEVICE Four load(const void* from, i64 at, i64 count, const Scale& s, const Tables&) {
    if constexpr (BITS == 32 || BITS == 0) return BITS ? read<Whole>((const float*)from, at, count) : Four{};
    else {
      const u64 codes = read_codes<BITS, Whole>(from, at, count);
      Four four;
      UNROLLED for (int k = 0; k < 4; k++)
        four.x[k] = Own::value((u32)(codes >> (BITS * k)) & ((2u << (BITS - 1)) - 1));
      decode<!BLOCK && (Whole > 0)>(four, s);
      return four;
    }
  }

  // Encode four neighbours into memory; x becomes what they decode to.
  template <int Whole>
  static DEVICE void store(void* to, i64 at, i64 count, Four& x, const Scale& s, const Four& words, const Tables&) {
    if constexpr (BITS == 32) write<Whole>((float*)to, at, count, x);
    else if constexpr (BITS != 0) {
      u64 codes = 0;
      UNROLLED for (int k = 0; k < 4; k++) {
        u32 c = Own::code(to_encode(x.x[k], s), as_bits(words.x[k]));
        codes |= (u64)c << (BITS * k);
        x.x[k] = Own::value(c);
      }
      decode<!BLOCK && (Whole > 0)>(x, s);
      write_codes<BITS, Whole>(to, at, count, codes);
    }
  }
};

template <int BITS, int MANTISSA, int BIAS, u32 FINITE, int INFINITIES, u32 NOT, int RULE, u32 LEAST, int RANDOM>
struct Slot : Codes<Slot<BITS, MANTISSA, BIAS, FINITE, INFINITIES, NOT, RULE, LEAST, RANDOM>, BITS,
                    (FINITE << (23 - MANTISSA)) + ((127u - BIAS) << 23), (BIAS < 32), RULE, LEAST, RANDOM> {
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
    if (is_bfloat) return as_float(code << 16);
    if (is_half) return float_of_half((u16)code);
    return as_float(size_of(code) | (code & SIGN ? 0x80000000u : 0));
  }

  // word: a random one.
  static DEVICE u32 code(float x, u32 word) {
    if (is_half && !RANDOM) return half_code(x, NOT);
    u32 bits = as_bits(x), sign = bits >> 31 ? SIGN : 0;
    bits &= MAGNITUDE;
    if (bits > INFINITE) return NOT;
    bits = bits > TOP ? TOP : bits;
    u32 drawn = RANDOM ? word >> (32 - (RANDOM ? RANDOM : 1)) << (23 - MANTISSA - RANDOM) : 0;
    if (RANDOM) return sign | (bits + drawn) >> (23 - MANTISSA);
    return sign | nearest_code<MANTISSA, BIAS>(bits);
  }
};

// Integers in two's complement of 8 bits. DRAWN: bits of a word, as random(): 32 or fewer.
template <int LOWEST, int HIGHEST, u32 TOP, int RULE, u32 LEAST, int DRAWN>
struct Integer : Codes<Integer<LOWEST, HIGHEST, TOP, RULE, LEAST, DRAWN>, 8, TOP, true, RULE, LEAST, DRAWN> {
  static DEVICE float value(u32 code) { return (float)(i8)code; }

  static DEVICE u32 code(float x, u32 word) {
    if (x != x) return HIGHEST;
    float size = fminf(fabsf(x), 512.0f), whole = truncf(size);
    u32 number = (u32)(i32)whole;
    if (DRAWN) {
      u32 rest = (u32)__float2ull_rz((size - whole) * 4294967296.0f) >> (32 - (DRAWN ? DRAWN : 1));
      number += (u32)(((u64)rest + (word >> (32 - (DRAWN ? DRAWN : 1)))) >> DRAWN);
    } else {
      number = (u32)__float2int_rn(size);
    }
    i32 k = x < 0.0f ? -(i32)number : (i32)number;
    return (u32)(k < LOWEST ? LOWEST : k > HIGHEST ? HIGHEST : k) & 0xFFu;
  }
};

#if OF_CODES
// Signs and logarithms of BITS together with a scale that stays: numbers of a step are the codes themselves, as bits.
template <int BITS>
struct Logs {
  static constexpr int bits = BITS;
  static constexpr bool random = false, scaled = false, tabled = false, fixed = true;

  static DEVICE Scale prepared(float scale) { return Scale{scale, scale, true}; }
  static DEVICE Scale used(float scale) { return prepared(scale); }
  static DEVICE float next(u32, float old, const Tables&) { return old; }

  template <int Whole>
  static DEVICE Four load(const void* from, i64 at, i64 count, const Scale&, const Tables&) {
    const u64 codes = read_codes<BITS, Whole>(from, at, count);
    Four four;
    UNROLLED for (int k = 0; k < 4; k++) four.x[k] = as_float((u32)(codes >> (BITS * k)) & ((1u << BITS) - 1));
    return four;
  }

  template <int Whole>
  static DEVICE void store(void* to, i64 at, i64 count, Four& x, const Scale& s, const Four&, const Tables& t) {
    u64 codes = 0;
    UNROLLED for (int k = 0; k < 4; k++) {
      u32 code = as_bits(x.x[k]), size = code & ((1u << (BITS - 1)) - 1), sign = code >> (BITS - 1) << 31;
      codes |= (u64)code << (BITS * k);
      u32 bits = as_bits(t.books.values[size % GAMMA]) + (size / GAMMA << 23);
      x.x[k] = __fmul_rn(as_float(bits | sign), s.scale);
    }
    write_codes<BITS, Whole>(to, at, count, codes);
  }
};
#endif

template <int BITS, bool UNSIGNED>
struct Book {
  static constexpr int bits = BITS;
  static constexpr bool random = false, scaled = true, tabled = true, fixed = false;
  static constexpr u32 SIZE = 1 << BITS;

  // Narrow: corrected() divides by it, once it is lifted; what that gets wrong, numbers below 2^-80, lies in the first
  // bucket.
  static DEVICE float lift(float scale) { return scale < 0x1p-56f ? 0x1p64f : 1.0f; }
  static DEVICE Scale prepared(float scale) {
    float lifted = __fmul_rn(scale, lift(scale));
    return Scale{scale, __fdiv_rn(1.0f, lifted), lifted >= 0x1p-56f && lifted <= 0x1p60f};
  }
  static DEVICE Scale used(float scale) { return prepared(scale == 0.0f ? 1.0f : scale); }
  static DEVICE float next(u32 top, float, const Tables& t) {
    const u32 least = as_bits(t.books.least[UNSIGNED]);
    return as_float(top > least ? top : least);
  }

  // Certain: the scale is narrow, so that no quotient is NaN or above 1.
  template <bool Certain>
  static DEVICE u32 code(float x, const Scale& s, const Tables& t) {
    float more = lift(s.scale), y = 0.0f;
    if (Certain) y = corrected(__fmul_rn(x, more), __fmul_rn(s.scale, more), s.inverse);
    else y = divided(x, s.scale);
    u32 bits = as_bits(y);
    u32 magnitude = bits & MAGNITUDE, negative = UNSIGNED ? 0 : (u32)((i32)as_bits(x) >> 31);
    i32 key = (i32)(magnitude >> 16) - t.books.lowest;
    key = key < 0 ? 0 : !Certain && key >= t.books.buckets ? t.books.buckets - 1 : key;
    u32 word = t.words[key + (UNSIGNED ? 2 * t.books.buckets : (i32)negative & t.books.buckets)];
    u32 code = (word >> 17) + (((bits ^ negative) & 0xFFFFu) >= (word & 0x1FFFFu));
    return !Certain && magnitude > INFINITE ? 0 : code;
  }

  template <bool Certain>
  static DEVICE u32 codes(const Four& x, const Scale& s, const Tables& t) {
    u32 codes = 0;
    UNROLLED for (int k = 0; k < 4; k++) codes |= code<Certain>(x.x[k], s, t) << (BITS * k);
    return codes;
  }

  // The codes of four neighbours; at: of the first of them, a multiple of four.
  template <int Whole>
  static DEVICE u32 codes_at(const void* from, i64 at, i64 count) {
    if (BITS == 8) return (u32)read_four<Whole>((const u8*)from, at, count);
    const u8* bytes = (const u8*)from + at / 2;
    if (Whole > 0 || at + 4 <= count) return *(const u16*)bytes;
    return (at < count ? bytes[0] : 0) | (at + 2 < count ? (u32)bytes[1] << 8 : 0);
  }

  template <int Whole>
  static DEVICE Four load(const void* from, i64 at, i64 count, const Scale& s, const Tables& t) {
    const u32 codes = codes_at<Whole>(from, at, count);
    Four four;
    UNROLLED for (int k = 0; k < 4; k++)
      four.x[k] = __fmul_rn(t.values[(codes >> (BITS * k) & (SIZE - 1)) + UNSIGNED * SIZE], s.scale);
    return four;
  }

  template <int Whole>
  static DEVICE void store(void* to, i64 at, i64 count, Four& x, const Scale& s, const Four&, const Tables& t) {
    u32 codes = s.narrow ? Book::codes<true>(x, s, t) : Book::codes<false>(x, s, t);
    if (BITS == 8) return write_four<Whole>((u8*)to, at, count, codes);
    u8* bytes = (u8*)to + at / 2;
    if (Whole > 0 || at + 4 <= count) {
      *(u16*)bytes = (u16)codes;
      return;
    }
    if (at >= count) return;
    bytes[0] = (u8)(at + 1 < count ? codes : codes & 0xF);  // the half of a last byte that is no element is 0
    if (at + 2 < count) bytes[1] = (u8)(codes >> 8 & 0xF);  // no four are there, so no fourth
  }
};
