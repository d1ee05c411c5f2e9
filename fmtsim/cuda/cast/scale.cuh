// SPDX-License-Identifier: Apache-2.0
// From the statistic of a block to its scale, and to an element under it (docs/semantics.md, sections 5 to 7).
// Operations on float32 are those of fmtsim/scaling/scales.py in its order, each rounded to nearest even:
//
//   one_level       by a Rule, which is data: recipes, and real scales of block formats
//   te_level        under the scale of a tensor, in Transformer Engine's order: nvfp4
//   quartet_level   the same in Quartet II's order
//   scale_exponent  by the exact exponent of an amax: MX formats
//   affine_scale    from the extremes of a block, with a zero point
//
// What rounds a scale to the format that stores it is handed in as `store`.
#pragma once
#include "element.cuh"
#include "grid.cuh"
#include "philox.cuh"

#define FLOAT_MAX as_float(0x7F7FFFFFu)
#define FLOAT_MIN as_float(0x00800000u)
#define FLOAT_MANTISSA 0x007FFFFFu

DEVICE float at_most_float_max(float value) { return fminf(value, FLOAT_MAX); }
DEVICE float reciprocal(float value) { return at_most_float_max(__fdiv_rn(1.0f, value)); }

// 2^exponent for exponents from -1022 to 1023, and the power of two next to a positive finite number, which counts as
// 2^-126 below that.
DEVICE double power_of_two(i32 exponent) { return __longlong_as_double((i64)(exponent + 1023) << 52); }
DEVICE float power_of_two(float x, bool up) {
  u32 bits = max(as_bits(x), as_bits(FLOAT_MIN));
  if (up) bits = min(bits + FLOAT_MANTISSA, 254u << 23);  // any bit of the mantissa carries into the exponent
  return as_float(bits & ~FLOAT_MANTISSA);
}

// Sums whose order is defined (fmtsim/scaling/blocks.py): elements at the largest distance first.
template <int Count, typename Number, int Size>
DEVICE Number folded(Number (&x)[Size]) {
  if constexpr (Count > 1) {
    UNROLLED for (int k = 0; k < Count / 2; k++) x[k] = x[k] + x[k + Count / 2];
    return folded<Count / 2>(x);
  }
  return x[0];
}

#define STEPS 8  // allowed scales

// A rule of real scales; the host side is fmtsim.cuda.cast.scale_rules.
struct alignas(16) Rule {
  float top, inverse_top;  // what a statistic becomes, and RN32(1 / top)
  float factor, offset;    // instead of top where factor is not 0
  float eps, least;        // least: of a scale, FLT_MIN at least
  float multiplier;
  float limit;             // of masks
  float allowed[STEPS];    // rising, the last one repeated
  i32 statistic, eps_rule, order, divides, power, stored, chooses, mask;  // of the lists below; chooses: from allowed
};
#define AMAX 0
#define STD 1
#define RMS 2
#define MEAN_ABS 3
#define EPS_OF_STATISTIC 0
#define EPS_IN_SUM 1
#define EPS_OF_SCALE 2
#define EPS_OF_INVERSE 3
#define ENCODES 0  // r = top / a, and the scale is 1 / r
#define ENCODES_DOUBLE 1
#define QUOTIENT 2  // s = a / top
#define PRODUCT 3   // s = a * RN32(1 / top)
#define INVERTS 2  // x / scale is x times a power of two, exactly
#define FLOOR 1
#define CEIL 2
#define STORED_WHOLE -1  // the scale is float32; else a method of grid.cuh
#define STORED_MAGIC 0
#define STORED_FLUSHING 2
#define CLIP 1
#define TRUST 2

// What belongs to a block: its scale as it is stored, the power of two in it that values are folded with, and what
// elements are multiplied with or divided by. number: s where elements are x / 2^s, or the zero point.
struct alignas(16) Scale {
  float stored, fold, factor;
  i32 number;
};

DEVICE float raised(float a, const Rule& r) {
  if (r.eps_rule == EPS_OF_STATISTIC) return fmaxf(a, r.eps);
  return r.eps_rule == EPS_IN_SUM ? at_most_float_max(__fadd_rn(a, r.eps)) : a;
}

// 1 / r and r; plain: without the multiplier.
DEVICE float encoding(float a, bool empty, const Rule& r, float& factor, float& plain) {
  if (r.order == ENCODES_DOUBLE) factor = __double2float_rn(__dmul_rn(__ddiv_rn(1.0, (double)a), (double)r.top));
  else factor = __fdiv_rn(r.top, a);
  factor = empty ? 1.0f : at_most_float_max(factor);
  if (r.power && !empty) factor = power_of_two(factor, r.power == FLOOR);
  plain = reciprocal(factor);
  if (r.multiplier == 1.0f) return plain;
  float s = __fmul_rn(plain, r.multiplier);
  factor = reciprocal(s);
  return s;
}

DEVICE float decoding(float a, bool empty, const Rule& r, float& plain) {
  float s = a;
  if (r.factor != 0.0f) s = __fmul_rn(a, r.factor);
  else s = r.order == PRODUCT ? __fmul_rn(a, r.inverse_top) : __fdiv_rn(a, r.top);
  if (r.offset != 0.0f) s = __fadd_rn(s, r.offset);
  s = at_most_float_max(fmaxf(s, r.least));
  if (r.power) s = power_of_two(s, r.power == CEIL);
  bool one = empty && !(r.offset != 0.0f && r.factor != 0.0f);  // an offset keeps the scale of nothing above zero
  plain = one ? 1.0f : s;
  if (r.multiplier != 1.0f) s = at_most_float_max(__fmul_rn(s, r.multiplier));
  return one ? 1.0f : s;
}

// The scale of a block with a statistic, finite and not below zero.
template <typename Store>
DEVICE Scale one_level(float a, const Rule& r, const Store& store) {
  bool empty = a == 0.0f;
  a = raised(a, r);
  empty = empty && a == 0.0f;
  float plain, factor = 1.0f;
  bool encodes = r.order <= ENCODES_DOUBLE && r.factor == 0.0f;
  float s = encodes ? encoding(a, empty, r, factor, plain) : decoding(a, empty, r, plain);
  float stored = store(s);
  if (r.divides == INVERTS) factor = __fdiv_rn(1.0f, stored);
  else if (r.divides) factor = r.eps_rule == EPS_OF_INVERSE ? fmaxf(s, r.eps) : stored == 0.0f ? FLOAT_MIN : stored;
  else if (!encodes || r.stored != STORED_WHOLE || r.chooses)
    factor = reciprocal(r.eps_rule == EPS_OF_INVERSE ? fmaxf(stored, r.eps) : stored);
  return {stored, r.multiplier == 1.0f ? stored : plain, factor, 0};
}

// The rule of a block format's real scales; its arithmetic encodes, divides or does neither ("reciprocal").
DEVICE Rule rule_of_format(float top, bool encodes, bool divides, bool whole) {
  Rule r = {};
  r.top = top, r.least = FLOAT_MIN, r.multiplier = 1.0f, r.eps_rule = EPS_OF_SCALE;
  r.order = encodes ? ENCODES : QUOTIENT, r.divides = divides, r.stored = whole ? STORED_WHOLE : STORED_MAGIC;
  return r;
}

// A scale as a grid stores it: the least allowed one that is not below, in the format of scales.
DEVICE float stored_scale(float s, const Rule& r, const Grid& g) {
  if (r.chooses) {
    float least = r.allowed[STEPS - 1];
    UNROLLED for (int i = STEPS - 2; i >= 0; i--) least = r.allowed[i] >= s ? r.allowed[i] : least;
    s = least;
  }
  if (r.stored == STORED_WHOLE) return s;
  float a = fminf(s, g.highest);
  if (r.stored == STORED_MAGIC) return nearest_magic(a, g);
  return r.stored == STORED_FLUSHING ? nearest_bits<true>(a, g) : nearest_bits<false>(a, g);
}

DEVICE Scale scale_of(float a, const Rule& r, const Grid& g) {
  return one_level(a, r, [&](float s) { return stored_scale(s, r, g); });
}

// Two levels in Transformer Engine's order (section 6): what block amaxes are multiplied with, S_enc / element.max, and
// S_dec, by which values are multiplied; ones where a format has no scale of the tensor.
struct TensorScale {
  float step, decode;
};

// From the finite amax of the tensor; product: RN32(largest scale * element.max).
DEVICE TensorScale te_tensor(double amax, float product, float inverse_top) {
  float a = at_most_float_max(__double2float_rn(amax)), encode = 1.0f;
  if (a > 0.0f) encode = at_most_float_max(__fdiv_rn(product, a));
  if (encode == 0.0f) encode = 1.0f;
  return {at_most_float_max(__fmul_rn(encode, inverse_top)), __fdiv_rn(1.0f, encode)};
}

template <typename Store>
DEVICE Scale te_level(float a, TensorScale tensor, const Store& store) {
  float stored = store(at_most_float_max(__fmul_rn(a, tensor.step)));
  float whole = __fmul_rn(stored, tensor.decode);
  return {stored, stored, whole == 0.0f ? FLOAT_MAX : reciprocal(whole), 0};  // zero would take a division's slow path
}

// Two levels in Quartet II's order: elements are x / factor.
DEVICE float quartet_tensor(float amax, float scale_top, float top) {
  float tensor = __fdiv_rn(__fdiv_rn(amax, scale_top), top);
  return tensor == 0.0f ? 1.0f : tensor;
}

template <typename Store>
DEVICE Scale quartet_level(float a, float top, float tensor, const Store& store) {
  float stored = store(__fdiv_rn(__fdiv_rn(a, top), tensor));
  stored = stored == 0.0f ? 1.0f : stored;
  return {stored, stored, __fmul_rn(stored, tensor), 0};
}

// Block formats, exactly: scales from extremes in float64, elements in integers.

enum ExponentRule { RULE_FLOOR, RULE_CEIL, RULE_RCEIL, RULE_EVEN, RULE_NONE };

// What a format says of its scales; fmtsim.cuda.cast.any_format writes the same layout.
struct alignas(16) FormatRule {
  Element format;                   // rounds the scales of the real rules to nearest even, saturating
  i32 exponents;                    // of the list above
  i32 max_exponent, mantissa_bits;  // of elements
  i32 encodes, divides, whole;      // real rules: their arithmetic, and whether scales are float32
  i32 two_level, zero_point, levels, element_has_nan;
  float top, inverse_top;           // RN32 of the largest element, and of its reciprocal
  float scale_top;                  // RN32 of the scale format's largest
};

// Extremes of a block over its finite elements and zero: `low` <= 0 <= `high`.
struct BlockExtremes {
  double low, high;
  bool has_nan;
};

// The exponent s of section 5 for an amax that is finite and not negative.
DEVICE i32 scale_exponent(double amax, const FormatRule& p) {
  double seen = amax;
  if (p.exponents == RULE_RCEIL) seen = __fmul_rn(at_most_float_max(__double2float_rn(amax)), p.inverse_top);
  if (seen == 0.0) return -127;
  if (seen > 1e300 && p.exponents == RULE_RCEIL) return 127;  // the product is Inf where element.max lies below 1
  // 1. floor(log2) and the 52 bits behind the leading one
  i32 shift = 0;
  if (seen < power_of_two(-1022)) seen *= power_of_two(54), shift = 54;
  u64 bits = (u64)__double_as_longlong(seen), fraction = bits & ((1ull << 52) - 1);
  i32 exponent = (i32)(bits >> 52) - 1023 - shift;
  // 2. up where anything lies behind the leading one
  if (p.exponents == RULE_CEIL || p.exponents == RULE_RCEIL) exponent += fraction != 0;
  // 3. amax + half a last place of the element reaches the next binade exactly when the addition carries out of 52 bits
  if (p.exponents == RULE_EVEN && p.mantissa_bits < 52) exponent += (i32)((fraction + (1ull << (51 - p.mantissa_bits))) >> 52);
  // 4. the largest element at 2^s; rceil has divided by it
  if (p.exponents != RULE_RCEIL) exponent -= p.max_exponent;
  return min(max(exponent, -127), 127);
}

// Section 7.
DEVICE Scale affine_scale(BlockExtremes extremes, const FormatRule& p) {
  float low = fmaxf(__double2float_rn(extremes.low), -FLOAT_MAX), high = at_most_float_max(__double2float_rn(extremes.high));
  float extent = at_most_float_max(__fsub_rn(high, low));
  float scale = extent > 0.0f ? fmaxf(__fdiv_rn(extent, (float)p.levels), FLOAT_MIN) : 1.0f;
  float zero = fminf(fmaxf(rintf(__fdiv_rn(-low, scale)), 0.0f), (float)p.levels);
  return {scale, scale, reciprocal(scale), (i32)zero};
}

DEVICE TensorScale te_tensor(double amax, const FormatRule& p) {
  return te_tensor(amax, __fmul_rn(p.scale_top, p.top), p.inverse_top);
}

__device__ __noinline__ float stored_scale(float s, const FormatRule& p) {
  if (p.whole) return s;
  const Tables none = {nullptr, nullptr, nullptr, nullptr};
  return float_of_value(element_value(element_code(real_of(s), 0, p.format, none), p.format, none));
}

// The scale of a block by whatever rule its format has.
__device__ __noinline__ Scale scale_of(BlockExtremes extremes, const FormatRule& p, TensorScale tensor) {
  if (p.zero_point) return affine_scale(extremes, p);
  double amax = fmax(-extremes.low, extremes.high);
  if (p.exponents != RULE_NONE) {
    i32 exponent = scale_exponent(amax, p);
    float scale = (float)power_of_two(exponent);
    return {scale, scale, 1.0f, exponent};
  }
  auto store = [&](float s) { return stored_scale(s, p); };
  float a = at_most_float_max(__double2float_rn(amax));
  if (p.two_level) return te_level(a, tensor, store);
  return one_level(a, rule_of_format(p.top, p.encodes, p.divides, p.whole), store);
}

// Everything about a cast of a block format but the data; fmtsim.cuda.cast.any_format writes the same layout.
struct alignas(16) Cast {
  Element element;
  FormatRule scale;
  Draw draw;
  Tables tables;
  const i64* given;
};

struct ExactElement {
  double value;
  u64 code;
};

// Return x over its scale, as arithmetic in x's precision has it: float64 inputs stay in float64.
DEVICE Real scaled_element(double x, bool is_double, const Scale& s, const FormatRule& p) {
  if (!p.zero_point && p.exponents != RULE_NONE) return scaled(real_of(x), -s.number);
  bool divides = p.divides && !p.zero_point;
  if (is_double) return real_of(divides ? __ddiv_rn(x, (double)s.factor) : __dmul_rn(x, (double)s.factor));
  float y = __double2float_rn(x);
  return real_of(divides ? __fdiv_rn(y, s.factor) : __fmul_rn(y, s.factor));
}

// Cast one element; `index` is its row-major place in the tensor. The value is not yet rounded to the output dtype.
// Under a zero point `element` is a signed integer wide enough for every code's distance from it.
DEVICE ExactElement exact_element(
    double x, bool is_double, u64 index, const Scale& s, bool invalid, float decode, const Cast& c, const Draw& d) {
  u32 word = c.element.mode == MODE_STOCHASTIC ? random_integer(index, d, c.given) : 0;
  u64 code = element_code(scaled_element(x, is_double, s, c.scale), word, c.element, c.tables);
  double value = element_value(code, c.element, c.tables);
  if (c.scale.zero_point) {
    i32 levels = c.scale.levels, number = (i32)value + s.number;
    code = x != x ? levels : min(max(number, 0), levels);
    value = (double)((i32)code - s.number);
  }
  value = __dmul_rn(__dmul_rn(value, (double)s.stored), (double)decode);
  if (invalid || value != value) value = __longlong_as_double((i64)NAN64);
  return {value, code};
}
