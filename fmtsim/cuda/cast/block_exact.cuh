// One element of a block, exactly: any format, rounding, scale rule and dtype, for what the fast kernels refuse.
#pragma once
#include "common.cuh"
#include "element.cuh"
#include "philox.cuh"
#include "scale.cuh"

enum Dtype { DTYPE_FLOAT32, DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT64 };

// Everything about a cast but the data; cuda/block_parameters.py writes the same layout.
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
    double x, bool is_double, u64 index, const BlockScale& s, bool spoiled, float decode, const Cast& c, const Draw& d) {
  u32 word = c.element.mode == MODE_STOCHASTIC ? random_integer(index, d, c.given) : 0;
  u64 code = element_code(scaled_element(x, is_double, s, c.scale), word, c.element, c.tables);
  double value = element_value(code, c.element, c.tables);
  if (c.scale.zero_point) {
    i32 levels = c.scale.levels, number = (i32)value + s.zero;
    code = x != x ? levels : min(max(number, 0), levels);
    value = (double)((i32)code - s.zero);
  }
  value = __dmul_rn(__dmul_rn(value, (double)s.scale), (double)decode);
  if (spoiled || value != value) value = __longlong_as_double((i64)NAN64);
  return {value, code};
}

// Round a double once to float32, or to a narrower dtype: to odd first, which leaves the second rounding the last word.
DEVICE u32 narrowed(double value, i32 dtype) {
  if (value != value) return dtype == DTYPE_FLOAT32 ? 0x7FC00000u : dtype == DTYPE_BFLOAT16 ? 0x7FC0u : 0x7E00u;
  if (dtype == DTYPE_FLOAT32) return (u32)__float_as_int(__double2float_rn(value));
  float toward_zero = __double2float_rz(value);
  u32 bits = (u32)__float_as_int(toward_zero);
  if ((double)toward_zero != value) bits |= 1;
  u32 sign = bits >> 31 << 15, magnitude = bits & 0x7FFFFFFF;
  if (dtype == DTYPE_BFLOAT16) return sign | (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // at least halfway from 65504 to 65536
  if (magnitude < 0x38800000) {  // below 2^-14: steps of 2^-24
    float steps = __fmul_rn(__int_as_float((i32)magnitude), 16777216.0f);
    return sign | (u32)(__fsub_rn(__fadd_rn(steps, 8388608.0f), 8388608.0f));
  }
  return sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
}

DEVICE double load_element(const void* base, i64 place, i32 dtype) {
  if (dtype == DTYPE_FLOAT32) return ((const float*)base)[place];
  if (dtype == DTYPE_FLOAT64) return ((const double*)base)[place];
  u32 bits = ((const u16*)base)[place];
  if (dtype == DTYPE_BFLOAT16) return __int_as_float((i32)(bits << 16));
  if ((bits & 0x7FFF) > 0x7C00) return __longlong_as_double(0x7FF8000000000000ll);
  if ((bits & 0x7FFF) == 0x7C00) return __int_as_float((i32)(0x7F800000u | bits >> 15 << 31));
  double magnitude = (double)__int_as_float((i32)((bits & 0x7FFF) << 13)) * power_of_two(112);
  return bits & 0x8000 ? -magnitude : magnitude;
}

DEVICE void store_value(void* base, i64 place, double value, i32 dtype) {
  if (dtype == DTYPE_FLOAT64) {
    ((double*)base)[place] = value;
  } else if (dtype == DTYPE_FLOAT32) {
    ((u32*)base)[place] = narrowed(value, dtype);
  } else {
    ((u16*)base)[place] = (u16)narrowed(value, dtype);
  }
}
