// How the extremes of a block become its scale: every rule of docs/semantics.md, sections 5 to 7, in exact arithmetic.
#pragma once
#include "common.cuh"
#include "element.cuh"

enum ScaleRule { RULE_FLOOR, RULE_CEIL, RULE_RCEIL, RULE_EVEN, RULE_AMAX };
enum ScaleArithmetic { ARITHMETIC_DIVIDE, ARITHMETIC_RECIPROCAL, ARITHMETIC_ENCODE };

// What a format says of its scales; cuda/block_parameters.py writes the same layout. `format` rounds the scales of the
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

#define FLOAT_MAX __int_as_float(0x7F7FFFFF)
#define FLOAT_MIN __int_as_float(0x00800000)

DEVICE float at_most_float_max(float value) { return fminf(value, FLOAT_MAX); }
DEVICE float reciprocal_of(float value) { return value == 0.0f ? FLOAT_MAX : at_most_float_max(__fdiv_rn(1.0f, value)); }

// 2^exponent for exponents from -1022 to 1023.
DEVICE double power_of_two(i32 exponent) { return __longlong_as_double((i64)(exponent + 1023) << 52); }

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

// Sections 5 (real scales) and 6 (steps 2 and 3).
DEVICE BlockScale real_scale(double amax, const ScaleParameters& p, TensorScale tensor) {
  float a = at_most_float_max(__double2float_rn(amax));
  float quotient = at_most_float_max(__fdiv_rn(p.max, a));  // FLT_MAX where a is 0, and then not looked at
  float wanted;
  if (p.two_level) wanted = at_most_float_max(__fmul_rn(a, at_most_float_max(__fmul_rn(tensor.encode, p.reciprocal_max))));
  else if (a == 0.0f) wanted = 1.0f;
  else if (p.arithmetic == ARITHMETIC_ENCODE) wanted = reciprocal_of(quotient);
  else wanted = at_most_float_max(fmaxf(__fdiv_rn(a, p.max), FLOAT_MIN));
  float scale = scale_rounded(wanted, p), factor;
  if (p.two_level) factor = reciprocal_of(__fmul_rn(scale, tensor.decode));
  else if (a == 0.0f) factor = 1.0f;
  else if (p.arithmetic == ARITHMETIC_ENCODE) factor = p.plain ? quotient : reciprocal_of(scale);
  else if (p.arithmetic == ARITHMETIC_RECIPROCAL) factor = reciprocal_of(scale);
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
  if (p.rule == RULE_AMAX) return real_scale(amax, p, tensor);
  i32 exponent = scale_exponent(amax, p);
  return {(float)power_of_two(exponent), 1.0f, exponent, 0};
}
