// SPDX-License-Identifier: Apache-2.0
// Casts to block formats (MX, NVFP4, scaled E4M3 and INT8): a block's scale and its elements in float32 arithmetic that
// is exact. The format is given by macros (fmtsim.cuda.cast.scale_rules.fast_macros): a dozen instructions an
// element.
//
//   x = 1.mmm|rrrr 2^e     magic = 2^(max(e, lowest) + 23 - M)     x + magic = 2^(...) + n, rounded to nearest even
//
// The float32 addition drops the bits that the element lacks. Under a scale 2^s the same grid lies s binades higher, so
// x itself is rounded: nothing is divided. `n` is read off the sum's bits: it gives the code.
#pragma once
#include "amax.cuh"
#include "scale.cuh"

// What was found of a block's magnitudes: amax over finite elements, and whether there are others.
struct BlockAmax {
  u32 amax;
  bool nonfinite, has_nan;
};

// That of a block whose elements are Count vectors in each of Lanes neighbouring lanes. All lanes of a warp look
// together.
template <int Lanes, int Count, class Vector>
DEVICE BlockAmax find_amax(const Vector* in) {
  u32 amax = amax_of_raw(raw_amax_of_lanes<Lanes>(raw_amax<false, Count>(in)));
  BlockAmax result = {amax, amax >= FLOAT_EXPONENT, amax > FLOAT_EXPONENT};
  if (__any_sync(~0u, result.nonfinite)) {  // look again, at finite elements alone
    amax = amax_of_raw(raw_amax_of_lanes<Lanes>(raw_amax<true, Count>(in)));
    if (result.nonfinite) result.amax = amax;
  }
  return result;
}

// The magic number of a binade whose last place has `mantissa` bits above it.
DEVICE float magic_of(u32 binade, u32 mantissa) { return as_float(binade + ((23u - mantissa) << 23)); }

// A block as its elements see it: the grid of magnitudes under its scale, and what turns a rounded x into a value.
struct FastBlock {
  u32 limit, limit_negative, lowest;  // largest magnitudes and the smallest binade, as float bits
  float factor, scale;                // real rules: x * factor is rounded, and multiplied by scale
  float stored;                       // the scale as encode returns it
  bool refused;                       // not for this arithmetic: NaN, Inf, or a scale at float32's limits
};

#if RULE == 4
// S(.) for scale formats whose magic numbers are finite.
DEVICE float fast_scale_rounded(float value) {
#if SCALE_PLAIN
  return value;
#else
  value = fminf(value, as_float(SCALE_LIMIT));
  float magic = magic_of(max(as_bits(value) & FLOAT_EXPONENT, SCALE_LOWEST), SCALE_MANTISSA);
  return __fsub_rn(__fadd_rn(value, magic), magic);
#endif
}

DEVICE Scale scale_of_block(u32 amax, TensorScale tensor) {
  const Rule r = rule_of_format(as_float(ELEMENT_MAX), ARITHMETIC == 2, ARITHMETIC == 0, SCALE_PLAIN);
  float a = as_float(min(amax, as_bits(FLOAT_MAX)));
  auto store = [](float x) { return fast_scale_rounded(x); };
  return TWO_LEVEL ? te_level(a, tensor, store) : one_level(a, r, store);
}

DEVICE FastBlock under_scale(const Scale& s, u32 amax) {
  return {ELEMENT_LIMIT, ELEMENT_LIMIT_NEGATIVE, ELEMENT_LOWEST, s.factor, s.stored, s.stored, amax >= FLOAT_EXPONENT};
}

DEVICE FastBlock fast_block(u32 amax, TensorScale tensor) { return under_scale(scale_of_block(amax, tensor), amax); }
#else
DEVICE FastBlock fast_block(u32 amax, TensorScale) {
  // 1. the amax, or what it becomes, whose exponent counts: rceil divides, even adds half a last place of the element
  u32 seen = amax;
  if (RULE == 2) seen = as_bits(__fmul_rn(as_float(amax), as_float(ELEMENT_RECIPROCAL)));
  if (RULE == 3) seen += 1u << (22 - EVEN_MANTISSA);
  i32 exponent = (i32)(seen >> 23) - 127;
  // 2. up where anything lies behind the leading one
  if (RULE == 1 || RULE == 2) exponent += (seen & FLOAT_MANTISSA) != 0;
  // 3. the largest element at 2^exponent
  if (RULE != 2) exponent -= ELEMENT_TOP;
  // Subnormal amaxes, NaN and Inf land outside the range, too; zeros are zeros under any scale.
  bool refused = (u32)(exponent - SCALE_FIRST) > (u32)(SCALE_LAST - SCALE_FIRST) && amax != 0;
  u32 shift = amax == 0 ? 0u : (u32)exponent << 23;
  float stored = as_float(amax == 0 ? 0x00400000u : 0x3F800000u + shift);  // 2^-127 is subnormal
  return {ELEMENT_LIMIT + shift, ELEMENT_LIMIT_NEGATIVE + shift, ELEMENT_LOWEST + shift, 1.0f, 1.0f, stored, refused};
}
#endif

#define SCALES_IN_BYTES (OUTPUT == 3 && SCALE_STORED != 0)

// Scales of encode are stored as float32, packed ones as Encoded has them: SCALE_STORED is 0 for float32, 1 for the
// exponent byte of powers of two, 2 for small float formats.
#if SCALES_IN_BYTES
DEVICE u32 scale_code(float scale) {
#if SCALE_STORED == 1
  return as_bits(scale) >> 23;
#else
  // the steps of its binade, which the sum with the magic number counts in its low bits, and the steps of those before
  u32 binade = max(as_bits(scale) & FLOAT_EXPONENT, SCALE_LOWEST);
  float magic = magic_of(binade, SCALE_MANTISSA);
  u32 code = as_bits(__fadd_rn(scale, magic)) - as_bits(magic) + ((binade - SCALE_LOWEST) >> (23 - SCALE_MANTISSA));
  return scale == scale ? code : SCALE_NAN;
#endif
}
#endif

DEVICE void store_scale(void* scales, u64 block, float scale) {
#if SCALES_IN_BYTES
  ((u8*)scales)[block] = (u8)scale_code(scale);
#elif OUTPUT >= 2
  ((float*)scales)[block] = scale;
#endif
}

// A number being rounded: what is rounded, with its sign apart and its magnitude clamped.
struct FastElement {
  u32 sign, binade;
  float magnitude;
};

DEVICE FastElement fast_element(float x, const FastBlock& block) {
#if RULE == 4
  // 1. over the scale; under a power of two the grid lies higher instead
  x = ARITHMETIC == 0 ? __fdiv_rn(x, block.factor) : __fmul_rn(x, block.factor);
#endif
  // 2. saturate the magnitude
  u32 sign = as_bits(x) & ~MAGNITUDE;
  u32 limit = ELEMENT_LIMIT == ELEMENT_LIMIT_NEGATIVE || !sign ? block.limit : block.limit_negative;
  float magnitude = fminf(fabsf(x), as_float(limit));
  // 3. the binade whose last place counts: subnormal elements share the lowest, integers have one
  u32 binade = ELEMENT_INTEGER ? block.lowest : max(as_bits(magnitude) & FLOAT_EXPONENT, block.lowest);
  return {sign, binade, magnitude};
}

// Stochastic rounding (section 1, variant a with 32 bits) by what the random word lacks of 2^32 - 1, as grid.cuh has
// it: the least multiple of the last place that is not below the magnitude less its share of the rest. The sum with 1.5
// * 2^23 + `more` last places.
DEVICE float stochastic_sum(const FastElement& e, u32 rest, float more) {
  const float place = as_float((127u - ELEMENT_MANTISSA) << 23), fine = as_float((95u - ELEMENT_MANTISSA) << 23);
  return stochastic_sum(e.magnitude, as_float(e.binade), fine, __fmul_rn(INTEGER_BASE + more, place), rest);
}

// rest: what the element's random word lacks of 2^32 - 1; as below.
DEVICE float fast_value(float x, u32 rest, const FastBlock& block, float decode) {
  FastElement e = fast_element(x, block);
#if STOCHASTIC
  const float base = as_float(0x4B400000u - (ELEMENT_MANTISSA << 23));  // 1.5 * 2^23 last places of a binade
  float rounded = __fmaf_rn(-as_float(e.binade), base, stochastic_sum(e, rest, 0.0f));
#else
  float magic = magic_of(e.binade, ELEMENT_MANTISSA);  // 1. round: the sum drops what lies below the last place
  float rounded = __fsub_rn(__fadd_rn(e.magnitude, magic), magic);
#endif
  float value = as_float(as_bits(rounded) | e.sign);           // 2. the sign
  if (!ELEMENT_NEGATIVE_ZERO) value = __fadd_rn(value, 0.0f);  // 3. -0 becomes 0 where the format has none
#if RULE == 4
  // 4. times the scale, and the tensor's
  value = __fmul_rn(value, block.scale);
#if TWO_LEVEL && !WITHOUT_TENSOR_SCALE
  value = __fmul_rn(value, decode);
#endif
#endif
  return value;
}

// The code of a magnitude: the steps counted by the sum's low bits, and the binades before them. Only the low byte of
// the result is the code; above it lie bits of the sum.
DEVICE u32 magnitude_code(const FastElement& e, u32 rest, const FastBlock& block) {
#if STOCHASTIC
  if (ELEMENT_INTEGER) return as_bits(stochastic_sum(e, rest, 0.0f));
  float before = (float)(0u - (block.lowest >> (23 - ELEMENT_MANTISSA)) & 0xFFu);  // the same for the whole block
  return add_shifted<23 - ELEMENT_MANTISSA>(e.binade, as_bits(stochastic_sum(e, rest, before)));
#endif
  u32 sum = as_bits(__fadd_rn(e.magnitude, magic_of(e.binade, ELEMENT_MANTISSA)));
  if (ELEMENT_INTEGER) return sum;
  return sum + (e.binade >> (23 - ELEMENT_MANTISSA)) - (block.lowest >> (23 - ELEMENT_MANTISSA));
}

DEVICE u32 fast_code(float x, u32 rest, const FastBlock& block) {
  FastElement e = fast_element(x, block);
  u32 code = magnitude_code(e, rest, block);
#if ELEMENT_INTEGER
  return (e.sign ? 0u - code : code) & ((1u << CODE_BITS) - 1u);
#else
  code &= (1u << (CODE_BITS - 1)) - 1u;
  return ELEMENT_NEGATIVE_ZERO || code ? code | e.sign >> (32 - CODE_BITS) : code;
#endif
}

// Where elements lie that are cast one by one: the first in x and in the result, and from one to the next; index: the
// place in the tensor to which the first one's random word belongs.
struct Path {
  u64 x, out, x_stride, out_stride, index;
  u32 count;
};

// Cast part of a block the exact path, from memory; return the block's scale. A call, and one that takes no vectors, so
// that the common path keeps its registers. All lanes of a warp make it together, those that have nothing to do with a
// count of 0: a call of some lanes alone was found to lose uniform registers of the others. Codes of fewer bits than
// bytes lie side by side and fill whole ones.
__device__ __noinline__ float cast_exactly(
    const void* x, void* out, Path path, u32 amax, bool has_nan, TensorScale tensor, const Draw& draw, const Cast& c) {
  Scale s = scale_of({0.0, (double)as_float(amax), has_nan}, c.scale, tensor);
  bool invalid = has_nan && !c.scale.element_has_nan;
  u32 pending = 0, bits = 0;
#pragma unroll 1
  for (u32 i = 0; i < path.count; ++i) {
    u64 place = path.x + i * path.x_stride, to = path.out + i * path.out_stride, index = path.index + i * path.x_stride;
    float decode = WITHOUT_TENSOR_SCALE ? 1.0f : tensor.decode;
    ExactElement e = exact_element(load_element(x, place, INPUT), false, index, s, invalid, decode, c, draw);
    if (OUTPUT == 0) ((u32*)out)[to] = narrowed(e.value, OUTPUT);
    if (OUTPUT == 1) ((u16*)out)[to] = (u16)narrowed(e.value, OUTPUT);
    if (OUTPUT <= 1) continue;
    pending |= (u32)e.code << bits, bits += OUTPUT_BITS;
    if (bits >= 8) ((u8*)out)[to * OUTPUT_BITS / 8] = (u8)pending, pending >>= 8, bits -= 8;
  }
  return invalid ? as_float(0x7FC00000) : s.stored;
}
