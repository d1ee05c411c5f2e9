// SPDX-License-Identifier: Apache-2.0
// Casts of whole vectors: what one instruction can do for two bfloat16 numbers is done for two, and codes are packed as
// section 11 has them. A pair of codes travels in the halves of a word, which may hold loose bits above them.
#pragma once
#include "block.cuh"

#define ALL_BYTES(byte) ((byte) * 0x01010101u)
#define BOTH_HALVES(bits) ((bits) * 0x00010001u)
#define SIGN_OF_CODE (1u << (CODE_BITS - 1))

// Two formats of few binades, e2m1 and e2m3, need no exponents: where every step of a code is one, magnitudes are
//
//   code = min(y / d, y / 2d + 2^M, y / 4d + 2 * 2^M, largest)       d the smallest value, M bits of mantissa
//
// and rounding commutes with the minimum. Each term is one multiply-add onto a number whose last place is one, rounded
// to nearest even once; the terms 2^M are even, so that ties are those of the format.
#define NEAREST_FLOAT (!STOCHASTIC && !ELEMENT_INTEGER && ELEMENT_NEGATIVE_ZERO)
#define SEGMENTED                                                                                      \
  (NEAREST_FLOAT && OUTPUT >= 2 && ELEMENT_MANTISSA <= 3 && CODE_BITS == ELEMENT_MANTISSA + 3 && \
   ELEMENT_TOP + 127 == (ELEMENT_LOWEST >> 23) + 2)
#define IN_BFLOAT16 (NEAREST_FLOAT && INPUT == 1 && RULE != 4 && ELEMENT_MANTISSA <= 4)
#define IN_PAIRS (IN_BFLOAT16 || (SEGMENTED && RULE == 4 && INPUT != 2))

#if IN_BFLOAT16
// Two bfloat16 magnitudes on their grid under a power of two: their binades, and their sums with 2^7 last places of
// those binades, which keep their last place.
struct PairOnGrid { u32 binades, sums; };
#define PAIR_DROPPED (7 - ELEMENT_MANTISSA)
#define PAIR_MAGIC BOTH_HALVES((127u + PAIR_DROPPED) << 7)

DEVICE PairOnGrid pair_on_grid(u32 raw, const FastBlock& block) {
  u32 limits = block.limit >> 16 | block.limit, lowest = block.lowest >> 16 | block.lowest;  // bfloat16 holds both
  u32 magnitudes = __vminu2(raw & 0x7FFF7FFFu, limits);
  u32 binades = __vmaxu2(magnitudes & 0x7F807F80u, lowest);
  return {binades, fma_bfloat2(binades, PAIR_MAGIC, magnitudes)};
}

// The values of two bfloat16 numbers.
DEVICE u32 value_pair(u32 raw, const FastBlock& block) {
  PairOnGrid pair = pair_on_grid(raw, block);
  return fma_bfloat2(pair.binades, PAIR_MAGIC | 0x80008000u, pair.sums) | (raw & 0x80008000u);
}
#endif

#if OUTPUT >= 2
#define LARGEST_CODE (((ELEMENT_LIMIT - ELEMENT_LOWEST) >> (23 - ELEMENT_MANTISSA)) + (1u << ELEMENT_MANTISSA))
#define FIRST_SLOPE (254u + ELEMENT_MANTISSA - (ELEMENT_LOWEST >> 23))  // the exponent field of 1 / d

// The signs of two numbers at the places of their codes' signs.
DEVICE u32 signs_of_pair(u32 raw) { return raw >> (16 - CODE_BITS) & BOTH_HALVES(SIGN_OF_CODE); }

#if SEGMENTED && IN_BFLOAT16
#define BASE (128u + SIGN_OF_CODE / 2)  // bfloat16 counts in ones from 128 to 256
#define PAIR_OF(integer) BOTH_HALVES(0x4300u + (integer) - 128u)

// Two bfloat16 numbers under a power of two: nothing is lost before the one rounding. The sign adds half a sign bit up
// or down from the base in between.
DEVICE u32 code_pair(u32 raw, const FastBlock& block) {
  u32 slope = (FIRST_SLOPE << 23) - (block.limit - ELEMENT_LIMIT);
  u32 slopes = __byte_perm(slope, slope, 0x3232), magnitudes = raw & 0x7FFF7FFFu;
  u32 fine = fma_bfloat2(magnitudes, slopes, PAIR_OF(BASE));
  u32 middle = fma_bfloat2(magnitudes, slopes - BOTH_HALVES(0x80u), PAIR_OF(BASE + (1u << ELEMENT_MANTISSA)));
  u32 coarse = fma_bfloat2(magnitudes, slopes - BOTH_HALVES(0x100u), PAIR_OF(BASE + (2u << ELEMENT_MANTISSA)));
  u32 code = __vminu2(__vminu2(__vminu2(fine, middle), coarse), PAIR_OF(BASE + LARGEST_CODE));
  u32 half_signs = (raw & 0x80008000u) | BOTH_HALVES((125u + CODE_BITS) << 7);  // 2^(CODE_BITS - 2), signed
  return fma_bfloat2(half_signs, BOTH_HALVES(0xBF80u), code);
}

#elif SEGMENTED && RULE == 4
DEVICE u32 segmented_code(float x, const FastBlock& block) {
  float y = ARITHMETIC == 0 ? __fdiv_rn(fabsf(x), block.factor) : __fmul_rn(fabsf(x), block.factor);
  const float base = 12582912.0f;  // 1.5 * 2^23
  const float slope = as_float(FIRST_SLOPE << 23), step = (float)(1u << ELEMENT_MANTISSA);
  u32 fine = as_bits(__fmaf_rn(y, slope, base)), middle = as_bits(__fmaf_rn(y, 0.5f * slope, base + step));
  u32 coarse = as_bits(__fmaf_rn(y, 0.25f * slope, base + 2.0f * step));
  return min(min(min(fine, middle), coarse), as_bits(base) + LARGEST_CODE);
}

#elif IN_BFLOAT16
// The codes of two bfloat16 numbers on a grid of more binades: the steps that the sums count, and the binades before.
DEVICE u32 code_pair(u32 raw, const FastBlock& block) {
  PairOnGrid pair = pair_on_grid(raw, block);
  u32 lowest = block.lowest >> 16 | block.lowest, places = pair.binades >> PAIR_DROPPED;
  u32 offset = BOTH_HALVES(PAIR_DROPPED << 7) + (lowest >> PAIR_DROPPED);
  u32 codes = pair.sums - places * ((1u << PAIR_DROPPED) - 1u) - offset;
  return codes | signs_of_pair(raw);
}
#endif

#if IN_PAIRS
// The codes of elements 2 i and 2 i + 1 of a vector.
template <int COUNT>
DEVICE u32 pair_of(const Vectors<INPUT, COUNT>& in, int i, const FastBlock& block) {
#if IN_BFLOAT16
  return code_pair(in.words[i], block);
#else
  u32 low = segmented_code(in.get(2 * i), block);
  u32 high = segmented_code(in.get(2 * i + 1), block);
#if INPUT == 0
  u32 raw = __byte_perm(in.words[2 * i], in.words[2 * i + 1], 0x7632);
#else
  u32 raw = in.words[i];
#endif
  return __byte_perm(low, high, 0x5410) | signs_of_pair(raw);
#endif
}
#endif

// Four codes, one a byte, from the signs of x (bit 7 of each byte of `signs`) and magnitude codes with loose high bits.
DEVICE u32 signed_codes(u32 magnitudes, u32 signs) {
  return (magnitudes & ALL_BYTES(SIGN_OF_CODE - 1u)) | (signs & ALL_BYTES(0x80u)) >> (8 - CODE_BITS);
}

// Codes `first` ... first + 3 of a vector, one a byte, in the order 0 1 2 3, or, ZIPPED, 0 2 1 3.
#define ZIPPED (OUTPUT == 3 && CODE_BITS == 4)
template <int COUNT>
DEVICE u32 four_codes(const Vectors<INPUT, COUNT>& in, const u32 (&rests)[4], int first, const FastBlock& block) {
#if IN_PAIRS
  return __byte_perm(
      pair_of<COUNT>(in, first / 2, block), pair_of<COUNT>(in, first / 2 + 1, block), ZIPPED ? 0x6240 : 0x6420);
#elif ELEMENT_INTEGER || !ELEMENT_NEGATIVE_ZERO
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= fast_code(in.get(first + i), rests[i], block) << (8 * i);
  return __byte_perm(codes, 0, ZIPPED ? 0x3120 : 0x3210);
#else
  u32 code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    code[i] = magnitude_code(fast_element(in.get(first + i), block), rests[i], block);
  u32 low = __byte_perm(code[0], code[1], 0x0040), high = __byte_perm(code[2], code[3], 0x0040), signs;
#if INPUT == 0
  signs = __byte_perm(__byte_perm(in.words[first], in.words[first + 1], 0x0073),
                      __byte_perm(in.words[first + 2], in.words[first + 3], 0x0073), 0x5410);
#else
  signs = __byte_perm(in.words[first / 2], in.words[first / 2 + 1], 0x7531);
#endif
  return __byte_perm(signed_codes(__byte_perm(low, high, 0x5410), signs), 0, ZIPPED ? 0x3120 : 0x3210);
#endif
}

// Put four codes, one a byte, side by side as OUTPUT asks.
DEVICE u32 squeezed(u32 codes) {
#if OUTPUT == 2 || CODE_BITS == 8
  return codes;
#elif CODE_BITS == 6
  u32 twos = codes + (codes & 0x00FF00FFu) * 3u;       // 4 a + 256 b = 4 (a + 64 b) in each half
  return (twos + (twos & 0xFFFFu) * 15u) >> 6;         // 16 (4 twelve bits) + 2^16 (4 twelve bits)
#else
  u32 mask = (1u << CODE_BITS) - 1u, all = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) all |= (codes >> (8 * i) & mask) << (i * CODE_BITS);
  return all;
#endif
}

// A vector from its codes as four_codes has them; COUNT is a multiple of eight where they are packed closer than bytes.
template <int COUNT>
DEVICE Packed<COUNT, OUTPUT_BITS> packed_codes(const u32 (&fours)[COUNT / 4]) {
  Packed<COUNT, OUTPUT_BITS> out;
  out.clear();
#if ZIPPED
#pragma unroll
  for (int first = 0; first < COUNT; first += 8) {  // codes 0 2 1 3 and 4 6 5 7, then 0 2 4 6 and 1 3 5 7
    u32 low = fours[first / 4], high = fours[first / 4 + 1];
    out.words[first / 8] = __byte_perm(low, high, 0x7632) * 16u + __byte_perm(low, high, 0x5410);
  }
#else
#pragma unroll
  for (int first = 0; first < COUNT; first += 4) {
    u32 bits = squeezed(fours[first / 4]), at = first * OUTPUT_BITS;
    out.words[at / 32] += bits * (1u << (at % 32));
    if (at % 32 + 4 * OUTPUT_BITS > 32) out.words[at / 32 + 1] = bits >> (32 - at % 32);
  }
#endif
  return out;
}
#endif
