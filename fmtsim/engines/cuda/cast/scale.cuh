// SPDX-License-Identifier: Apache-2.0
// How the statistic of a block becomes its scale: the rules of block formats (docs/semantics.md, sections 5 to 7), from
// extremes in float64, and scale rules as data (fmtsim.formats.scaling), from a float32 statistic by the float32 operations
// that fmtsim/scaling/scales.py names, in its order.
#pragma once
#include "element.cuh"
#include "grid.cuh"
#include "philox.cuh"

#define FLOAT_MAX as_float(0x7F7FFFFFu)
#define FLOAT_MIN as_float(0x00800000u)
#define FLOAT_MANTISSA 0x007FFFFFu

DEVICE float at_most_float_max(float value) { return fminf(value, FLOAT_MAX); }
DEVICE float reciprocal(float value) { return at_most_float_max(__fdiv_rn(1.0f, value)); }
DEVICE float reciprocal_of(float value) { return value == 0.0f ? FLOAT_MAX : reciprocal(value); }

// 2^exponent for exponents from -1022 to 1023, and the power of two next to a positive finite number, which counts as
// 2^-126 below that.
DEVICE double power_of_two(i32 exponent) { return __longlong_as_double((i64)(exponent + 1023) << 52); }
DEVICE float power_of_two(float x, bool up) {
  u32 bits = max(as_bits(x), as_bits(FLOAT_MIN));
  if (up) bits = min(bits + FLOAT_MANTISSA, 254u << 23);
  return as_float(bits & ~FLOAT_MANTISSA);
}

// Sums whose order is defined (fmtsim/scaling/blocks.py): elements at the largest distance first.
template <int Count, typename Number, int Size>
DEVICE Number folded(Number (&x)[Size]) {
  if constexpr (Count > 1) {
#pragma unroll
    for (int k = 0; k < Count / 2; k++) x[k] = x[k] + x[k + Count / 2];
    return folded<Count / 2>(x);
  }
  return x[0];
}

// Block formats.

enum ScaleRule { RULE_FLOOR, RULE_CEIL, RULE_RCEIL, RULE_EVEN, RULE_AMAX };
enum ScaleArithmetic { ARITHMETIC_DIVIDE, ARITHMETIC_RECIPROCAL, ARITHMETIC_ENCODE };

// What a format says of its scales; fmtsim.engines.cuda.cast.block_launch writes the same layout. `format` rounds the scales of the
// real rules to nearest even, saturating; `plain` says that it is float32, which rounds nothing.
struct alignas(16) ScaleParameters {
  Element format;
  i32 rule, arithmetic, two_level, zero_point;
  i32 max_exponent, mantissa_bits, levels, element_has_nan;
  float max, reciprocal_max, scale_max;  // RN32 of element.max, of its reciprocal and of the scale format's largest
  i32 plain;
};

// Extremes of a block over its finite elements and zero: `low` <= 0 <= `high`.
struct BlockExtremes {
  double low, high;
  bool has_nan;
};

// The two scales of a whole tensor (section 6); ones where a format has none.
struct TensorScale {
  float encode, decode;
};

// A block's scale: elements are x / 2^exponent under power-of-two rules, else x * factor (x / factor under divide).
struct BlockScale {
  float scale, factor;
  i32 exponent;
  i32 zero;
};

// A positive finite double as floor(log2) and the 52 bits behind the leading one.
struct Binade {
  i32 exponent;
  u64 fraction;
};
DEVICE Binade binade_of(double magnitude) {
  i32 shift = 0;
  if (magnitude < power_of_two(-1022)) magnitude *= power_of_two(54), shift = 54;
  u64 bits = (u64)__double_as_longlong(magnitude);
  return {(i32)(bits >> 52) - 1023 - shift, bits & ((1ull << 52) - 1)};
}

// The exponent s of section 5 for an amax that is finite and not negative.
DEVICE i32 scale_exponent(double amax, const ScaleParameters& p) {
  double seen = amax;
  if (p.rule == RULE_RCEIL) seen = __fmul_rn(at_most_float_max(__double2float_rn(amax)), p.reciprocal_max);
  if (seen == 0.0) return -127;
  if (seen > 1e300 && p.rule == RULE_RCEIL) return 127;  // the product is Inf where element.max lies below 1
  Binade binade = binade_of(seen);
  i32 exponent = binade.exponent;
  if (p.rule == RULE_CEIL || p.rule == RULE_RCEIL) exponent += binade.fraction != 0;
  // amax + half a last place of the element reaches the next binade exactly when the addition carries out of 52 bits
  if (p.rule == RULE_EVEN && p.mantissa_bits < 52) exponent += (i32)((binade.fraction + (1ull << (51 - p.mantissa_bits))) >> 52);
  if (p.rule != RULE_RCEIL) exponent -= p.max_exponent;
  return min(max(exponent, -127), 127);
}

// S(.) of a float that is not negative.
DEVICE float scale_rounded(float value, const ScaleParameters& p) {
  if (p.plain) return value;
  const Tables none = {nullptr, nullptr, nullptr, nullptr};
  return float_of_value(element_value(element_code(real_of(value), 0, p.format, none), p.format, none));
}

// S_enc and S_dec from the finite amax of the tensor (section 6, step 1).
DEVICE TensorScale tensor_scale_of(double amax, const ScaleParameters& p) {
  float a = at_most_float_max(__double2float_rn(amax));
  float encode = 1.0f;
  if (a > 0.0f) encode = at_most_float_max(__fdiv_rn(__fmul_rn(p.scale_max, p.max), a));
  if (encode == 0.0f) encode = 1.0f;
  return {encode, __fdiv_rn(1.0f, encode)};
}

// Sections 5 (real scales) and 6 (steps 2 and 3) for an amax of at most FLOAT_MAX. step: the tensor's encode scale over
// element.max; max: element.max; plain: the scale format is float32, which rounds nothing; else rounded is S(.).
template <typename Rounded>
DEVICE BlockScale real_scale(
    float a, bool two_level, float step, float decode, i32 arithmetic, float max, bool plain, const Rounded& rounded) {
  float quotient = at_most_float_max(__fdiv_rn(max, a)), wanted;  // FLT_MAX where a is 0, and then not looked at
  if (two_level) wanted = at_most_float_max(__fmul_rn(a, step));
  else if (a == 0.0f) wanted = 1.0f;
  else if (arithmetic == ARITHMETIC_ENCODE) wanted = reciprocal_of(quotient);
  else wanted = at_most_float_max(fmaxf(__fdiv_rn(a, max), FLOAT_MIN));
  float scale = rounded(wanted), factor;
  if (two_level) factor = reciprocal_of(__fmul_rn(scale, decode));
  else if (a == 0.0f) factor = 1.0f;
  else if (arithmetic == ARITHMETIC_ENCODE) factor = plain ? quotient : reciprocal_of(scale);
  else if (arithmetic == ARITHMETIC_RECIPROCAL) factor = reciprocal_of(scale);
  else factor = scale > 0.0f ? scale : FLOAT_MIN;
  return {scale, factor, 0, 0};
}

// Section 7.
DEVICE BlockScale affine_scale(BlockExtremes extremes, const ScaleParameters& p) {
  float low = fmaxf(__double2float_rn(extremes.low), -FLOAT_MAX), high = at_most_float_max(__double2float_rn(extremes.high));
  float extent = at_most_float_max(__fsub_rn(high, low));
  float scale = extent > 0.0f ? fmaxf(__fdiv_rn(extent, (float)p.levels), FLOAT_MIN) : 1.0f;
  float zero = fminf(fmaxf(rintf(__fdiv_rn(-low, scale)), 0.0f), (float)p.levels);
  return {scale, reciprocal_of(scale), 0, (i32)zero};
}

// The scale of a block by whatever rule its format has.
__device__ __noinline__ BlockScale scale_of(BlockExtremes extremes, const ScaleParameters& p, TensorScale tensor) {
  if (p.zero_point) return affine_scale(extremes, p);
  double amax = fmax(-extremes.low, extremes.high);
  if (p.rule == RULE_AMAX) {
    float a = at_most_float_max(__double2float_rn(amax)), step = at_most_float_max(__fmul_rn(tensor.encode, p.reciprocal_max));
    return real_scale(
        a, p.two_level, step, tensor.decode, p.arithmetic, p.max, p.plain, [&](float x) { return scale_rounded(x, p); });
  }
  i32 exponent = scale_exponent(amax, p);
  return {(float)power_of_two(exponent), 1.0f, exponent, 0};
}

// Everything about a cast of a block format but the data; fmtsim.engines.cuda.cast.block_launch writes the same layout.
struct alignas(16) Cast {
  Element element;
  ScaleParameters scale;
  Draw draw;
  Tables tables;
  const i64* given;
};

struct ExactElement {
  double value;
  u64 code;
};

// Return x over its scale, as arithmetic in x's precision has it: float64 inputs stay in float64.
DEVICE Real scaled_element(double x, bool is_double, const BlockScale& s, const ScaleParameters& p) {
  if (!p.zero_point && p.rule != RULE_AMAX) return scaled(real_of(x), -s.exponent);
  bool divides = p.arithmetic == ARITHMETIC_DIVIDE && !p.zero_point;
  if (is_double) return real_of(divides ? __ddiv_rn(x, (double)s.factor) : __dmul_rn(x, (double)s.factor));
  float y = __double2float_rn(x);
  return real_of(divides ? __fdiv_rn(y, s.factor) : __fmul_rn(y, s.factor));
}

// Cast one element; `index` is its row-major place in the tensor. The value is not yet rounded to the output dtype.
// Under a zero point `element` is a signed integer wide enough for every code's distance from it.
DEVICE ExactElement exact_element(
    double x, bool is_double, u64 index, const BlockScale& s, bool invalid, float decode, const Cast& c, const Draw& d) {
  u32 word = c.element.mode == MODE_STOCHASTIC ? random_integer(index, d, c.given) : 0;
  u64 code = element_code(scaled_element(x, is_double, s, c.scale), word, c.element, c.tables);
  double value = element_value(code, c.element, c.tables);
  if (c.scale.zero_point) {
    i32 levels = c.scale.levels, number = (i32)value + s.zero;
    code = x != x ? levels : min(max(number, 0), levels);
    value = (double)((i32)code - s.zero);
  }
  value = __dmul_rn(__dmul_rn(value, (double)s.scale), (double)decode);
  if (invalid || value != value) value = __longlong_as_double((i64)NAN64);
  return {value, code};
}

// Scale rules as data.

#define STEPS 8  // allowed scales

// Parameters; the host side is fmtsim.engines.cuda.cast.scaled_rules.
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
#define STORED_WHOLE -1  // the scale is float32; else a method of fmtsim/engines/cuda/cast/grid.py
#define STORED_MAGIC 0
#define STORED_FLUSHING 2
#define CLIP 1
#define TRUST 2

// Numbers that belong to a block: its scale, the power of two in it that values are folded with, and what elements are
// multiplied with or divided by.
struct alignas(16) Scale {
  float stored, fold, factor, unused;
};

DEVICE float raised(float a, const Rule& r) {
  if (r.eps_rule == EPS_OF_STATISTIC) return fmaxf(a, r.eps);
  return r.eps_rule == EPS_IN_SUM ? at_most_float_max(__fadd_rn(a, r.eps)) : a;
}

// A scale as it is kept: the least allowed one that is not below, in the format of scales.
DEVICE float stored_scale(float s, const Rule& r, const Grid& g) {
  if (r.chooses) {
    float least = r.allowed[STEPS - 1];
#pragma unroll
    for (int i = STEPS - 2; i >= 0; i--) least = r.allowed[i] >= s ? r.allowed[i] : least;
    s = least;
  }
  if (r.stored == STORED_WHOLE) return s;
  float a = fminf(s, g.highest);
  if (r.stored == STORED_MAGIC) return nearest_magic(a, g);
  return r.stored == STORED_FLUSHING ? nearest_bits<true>(a, g) : nearest_bits<false>(a, g);
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
DEVICE Scale scale_of(float a, const Rule& r, const Grid& g) {
  bool empty = a == 0.0f;
  a = raised(a, r);
  empty = empty && a == 0.0f;
  float plain, factor = 1.0f;
  bool encodes = r.order <= ENCODES_DOUBLE && r.factor == 0.0f;
  float s = encodes ? encoding(a, empty, r, factor, plain) : decoding(a, empty, r, plain);
  float stored = stored_scale(s, r, g);
  if (r.divides == INVERTS) factor = __fdiv_rn(1.0f, stored);
  else if (r.divides) factor = stored == 0.0f ? FLOAT_MIN : stored;
  else if (!encodes || r.stored != STORED_WHOLE || r.chooses)
    factor = reciprocal(r.eps_rule == EPS_OF_INVERSE ? fmaxf(stored, r.eps) : stored);
  return {stored, r.multiplier == 1.0f ? stored : plain, factor, 0.0f};
}
