// SPDX-License-Identifier: Apache-2.0
// Rounding of any element format, in any mode, under run-time parameters: exact, in integers (docs/semantics.md,
// sections 1 to 3). The general path: kernels with a faster one use it for what that cannot do.
//
//   Real r = real_of(x);                          // float or double
//   r = scaled(r, -s);                            // optional: r * 2^-s, exactly, whatever underflows elsewhere
//   u64 code = element_code(r, word, e, tables);  // word: a random integer of e.random_bits bits, else ignored
//   double value = element_value(code, e, tables) // exact; NaN is 0x7FF8...0; float_of_value narrows once, to even
//
// Host side: fmtsim.cuda.cast.parameters: element_of gives the bytes of an Element, tables_of those of Tables.
#pragma once
#include "rounding.cuh"

#define KIND_GRID 0  // floats and integers: magnitudes n * 2^q
#define KIND_HALF_OFFSET 1  // integers at odd multiples of half a step
#define KIND_TABLE 2  // sorted values
#define KIND_LOGARITHMIC 3  // sign, and sorted magnitudes

// Parameters, the same on the host (fmtsim/cuda/cast/parameters.py). Codes without a sign are "magnitude
// codes": those of floats count up with the values from 0, through subnormals and carries.
struct alignas(16) Element {
  u64 max_code;       // magnitude code of the largest finite value; of an integer its largest number
  u64 over_code;      // magnitude code of what lies beyond, Inf included, where overflow is not saturation
  u64 nan_code;       // code of NaN, or of what stands for it
  u64 sign_code;      // the sign bit of a code, 0 without one
  u64 code_mask;      // all bits of a code
  i64 min_number;     // lowest integer
  i32 kind;           // KIND_GRID ... KIND_LOGARITHMIC
  i32 mode;           // of rounding.cuh
  i32 random_bits;    // 1 to 32
  i32 variant;        // stochastic: 0, 1, 2 for a, b, c
  i32 mantissa_bits;  // floats: M; integers: 0
  i32 min_exponent;   // floats: exponent of the smallest normal number; integers: that of the step
  i32 entries;        // tables: values in them
  u32 flags;          // of the list below
};
#define IS_INTEGER 1u  // two's complement codes
#define IS_FLUSHED 2u  // no subnormals
#define HAS_ZERO 4u  // code 0 is zero
#define HAS_NEGATIVE_ZERO 8u  // -0 has a code of its own
#define IS_UNSIGNED 16u  // a float format without a sign
#define SATURATES 32u  // overflow gives the largest value, Inf too
#define OVER_IS_NAN 64u  // over_code is nan_code, which has no sign
#define HAS_NAN 128u
#define HAS_INFINITY 256u
#define HAS_NEGATIVE_NAN 512u  // unsigned: numbers below zero are NaN

// Sorted values [entries], the points between them where nearest rounding changes [entries - 1], the codes of the
// sorted values [entries], the values by code [1 << bits]; null for grids.
struct Tables {
  const double* values;
  const double* middles;
  const i32* codes;
  const double* by_code;
};

// (-1)^negative * significand * 2^(exponent - 52), 2^52 <= significand < 2^53; or zero, Inf, NaN.
#define REAL_FINITE 0
#define REAL_ZERO 1
#define REAL_INFINITE 2
#define REAL_NOT_A_NUMBER 3
struct Real {
  u64 significand;
  i32 exponent;
  i32 sort;
  bool negative;
};

DEVICE Real real_of_bits(u64 fraction, i32 field, i32 top, i32 bias, i32 shift, bool negative) {
  Real r;
  r.negative = negative;
  r.significand = fraction << shift;
  r.exponent = field - bias;
  r.sort = REAL_FINITE;
  if (field == top) {
    r.sort = fraction ? REAL_NOT_A_NUMBER : REAL_INFINITE;
  } else if (field) {
    r.significand |= 1ull << 52;
  } else if (!fraction) {
    r.sort = REAL_ZERO;
  } else {
    i32 up = __clzll((i64)r.significand) - 11;
    r.significand <<= up;
    r.exponent = 1 - bias - up;
  }
  return r;
}

DEVICE Real real_of(float x) {
  u32 bits = as_bits(x);
  return real_of_bits(bits & 0x7FFFFFu, (bits >> 23) & 0xFF, 0xFF, 127, 29, bits >> 31);
}

DEVICE Real real_of(double x) {
  u64 bits = (u64)__double_as_longlong(x);
  return real_of_bits(bits & 0xFFFFFFFFFFFFFull, (i32)(bits >> 52) & 0x7FF, 0x7FF, 1023, 0, bits >> 63);
}

DEVICE Real scaled(Real r, i32 exponent) {
  r.exponent += exponent;
  return r;
}

// A magnitude code with the sign in front, where this code has one.
DEVICE u64 signed_code(u64 magnitude, bool negative, const Element& e) {
  return negative && (magnitude || (e.flags & HAS_NEGATIVE_ZERO)) ? magnitude | e.sign_code : magnitude;
}

DEVICE u64 beyond(bool negative, const Element& e) {
  return e.flags & OVER_IS_NAN ? e.nan_code : signed_code(e.over_code, negative, e);
}

DEVICE u64 float_code(const Real& x, u32 word, const Element& e) {
  // 1. NaN, zero, numbers that the format has no sign for, Inf
  if (x.sort == REAL_NOT_A_NUMBER) return e.nan_code;
  bool has_zero = e.flags & HAS_ZERO;
  if (x.sort == REAL_ZERO) return has_zero ? signed_code(0, x.negative, e) : 0;
  if (x.negative && (e.flags & IS_UNSIGNED)) return e.flags & HAS_NEGATIVE_NAN ? e.nan_code : 0;
  if (x.sort == REAL_INFINITE) return e.flags & SATURATES ? signed_code(e.max_code, x.negative, e) : beyond(x.negative, e);
  // 2. the last place of the result: that of the binade, or of the smallest values
  bool below = x.exponent < e.min_exponent, flushing = below && (e.flags & IS_FLUSHED);
  if (below && !has_zero) return 0;
  i32 place = flushing ? e.min_exponent : (below ? e.min_exponent : x.exponent) - e.mantissa_bits;
  // 3. whole places and the rest; codes count up with the values, so the candidate is base + whole
  Split s = split(x.significand, place - x.exponent + 52);
  i64 first = 1ll << e.mantissa_bits;
  i64 base = (i64)(place + e.mantissa_bits - e.min_exponent + has_zero - 1) * first;  // of the code of n = first
  u64 down = flushing ? 0 : (u64)(base + (i64)s.whole), step = flushing ? (u64)first : 1;
  // 4. the mode decides by rest, parity and sign; a carry runs into the exponent
  bool up = moves_up(s, !flushing && (down & 1), x.negative, word, e);
  u64 code = up ? down + step : down;
  // 5. overflow
  if (code <= e.max_code) return signed_code(code, x.negative, e);
  return !leaves_range(e.mode, x.negative) || (e.flags & SATURATES) ? signed_code(e.max_code, x.negative, e) : beyond(x.negative, e);
}

// Integers, on a half-offset grid too, where the number k stands for k + 1/2.
DEVICE u64 integer_code(const Real& x, u32 word, const Element& e) {
  i64 highest = (i64)e.max_code, number = highest;
  bool half = e.kind == KIND_HALF_OFFSET;
  if (x.sort == REAL_INFINITE) {
    number = x.negative ? e.min_number : highest;
  } else if (x.sort != REAL_NOT_A_NUMBER && x.sort != REAL_ZERO && x.exponent - e.min_exponent >= 40) {
    number = x.negative ? e.min_number : highest;
  } else if (x.sort != REAL_NOT_A_NUMBER) {
    Split s = {0, 0, false};
    if (x.sort == REAL_FINITE) s = split(x.significand, e.min_exponent - x.exponent + 52);
    if (half) {  // floor(|y| + 1/2)
      s.whole += s.fraction >> 63;
      s.fraction ^= 1ull << 63;
    }
    i64 n = (i64)s.whole, shift = half && !x.negative;
    i64 candidate = (x.negative ? -n : n) - shift;
    bool outward = half && n == 0 && ties_toward_zero(e.mode);  // no value lies toward zero: that of x's sign
    n += outward || moves_up(s, candidate & 1, x.negative, word, e);
    number = (x.negative ? -n : n) - shift;
    number = number < e.min_number ? e.min_number : number > highest ? highest : number;
  }
  return (u64)number & e.code_mask;
}

// A real as float64; what lies below its range becomes the nearest thing that is still above zero.
DEVICE double double_of(const Real& x) {
  u64 sign = (u64)x.negative << 63;
  if (x.sort == REAL_ZERO) return __longlong_as_double((i64)sign);
  if (x.sort == REAL_INFINITE || x.exponent > 1023) return __longlong_as_double((i64)(sign | 0x7FF0000000000000ull));
  if (x.exponent >= -1022) {
    u64 field = (u64)(x.exponent + 1023) << 52;
    return __longlong_as_double((i64)(sign | field | (x.significand & 0xFFFFFFFFFFFFFull)));
  }
  i32 down = -1022 - x.exponent;
  u64 bits = down < 53 ? x.significand >> down : 0;
  bool lost = down >= 53 || (bits << down) != x.significand;
  return __longlong_as_double((i64)(sign | bits | lost));
}

// Rank to which a number within the table's ends rounds; negative: the sign of the number whose magnitude this may be.
DEVICE i32 table_rank(double value, u32 word, bool negative, const Element& e, const Tables& t) {
  i32 low = 0, high = e.entries - 1;
  if (value <= t.values[0]) return 0;
  if (value >= t.values[high]) return high;
  while (high - low > 1) {
    i32 middle = (low + high) >> 1;
    if (t.values[middle] <= value) low = middle;
    else high = middle;
  }
  double under = t.values[low], over = t.values[low + 1];
  if (value == under) return low;
  bool positive = __double_as_longlong(value) >= 0;
  double a = under < 0 ? -under : under, b = over < 0 ? -over : over;
  bool opposite = under < 0 && over > 0;
  if (e.mode == MODE_STOCHASTIC) {
    double part = __ddiv_rn(__dsub_rn(value, under), __dsub_rn(over, under));
    if (part == 0) return low;
    Real d = real_of(part);
    Split s = split(d.significand, 52 - d.exponent);
    return low + (s.whole || stochastic_up(s.fraction, s.sticky, word, e));
  }
  // A magnitude moves from the inner value to the outer one; of two equal magnitudes the one of x's sign is the outer.
  double middle = t.middles[low];
  bool same = a == b, tie = value == middle, outward = same ? positive : b > a;  // the outer value is the upper one
  bool nearest = by_mode(e.mode, 1, true, true, false);  // of modes that send ties toward zero
  if (opposite && ties_toward_zero(e.mode) && (!nearest || (same && tie))) return low + positive;
  bool half = outward ? value >= middle : value <= middle;
  return low + (by_mode(e.mode, half, !tie, (bool)(low & 1) == outward, negative == outward) == outward);
}

DEVICE u64 table_code(const Real& x, u32 word, const Element& e, const Tables& t) {
  if (x.sort == REAL_NOT_A_NUMBER) return e.nan_code;
  if (e.kind == KIND_TABLE) return (u64)t.codes[table_rank(double_of(x), word, false, e, t)];
  Real magnitude = x;
  magnitude.negative = false;
  u64 code = (u64)t.codes[table_rank(double_of(magnitude), word, x.negative, e, t)];
  return x.negative ? code | e.sign_code : code;
}

DEVICE u64 element_code(const Real& x, u32 word, const Element& e, const Tables& t) {
  if (e.kind >= KIND_TABLE) return table_code(x, word, e, t);
  return e.flags & IS_INTEGER ? integer_code(x, word, e) : float_code(x, word, e);
}

#define NAN64 0x7FF8000000000000ull

// significand * 2^exponent as float64; the result has to fit.
DEVICE double exact_double(u64 significand, i32 exponent, bool negative) {
  if (!significand) return __longlong_as_double((i64)((u64)negative << 63));
  i32 up = __clzll((i64)significand) - 11;  // negative for 54 bits and more, which do not occur
  Real r = {significand << up, exponent + 52 - up, REAL_FINITE, negative};
  return double_of(r);
}

// The value of a code that element_code returns, and of every other code of the format.
DEVICE double element_value(u64 code, const Element& e, const Tables& t) {
  if (e.kind >= KIND_TABLE) return t.by_code[code];
  if (e.flags & IS_INTEGER) {
    i64 number = (i64)code;
    if (e.min_number < 0 && (code & (e.code_mask ^ (e.code_mask >> 1)))) number -= (i64)e.code_mask + 1;
    i64 twice = 2 * number + (e.kind == KIND_HALF_OFFSET);
    return exact_double((u64)(twice < 0 ? -twice : twice), e.min_exponent - 1, twice < 0);
  }
  u64 magnitude = code & ~e.sign_code;
  bool negative = code & e.sign_code;
  if (magnitude > e.max_code || (negative && !magnitude && !(e.flags & HAS_NEGATIVE_ZERO))) {
    bool infinite = (e.flags & HAS_INFINITY) && magnitude == e.max_code + 1;
    u64 sign = (u64)negative << 63;
    return __longlong_as_double((i64)(infinite ? sign | 0x7FF0000000000000ull : NAN64));
  }
  i32 first = e.flags & HAS_ZERO ? 1 : 0;
  i32 field = (i32)(magnitude >> e.mantissa_bits);
  u64 mantissa = magnitude & ((1ull << e.mantissa_bits) - 1);
  if (field < first) return exact_double(e.flags & IS_FLUSHED ? 0 : mantissa, e.min_exponent - e.mantissa_bits, negative);
  return exact_double(mantissa | 1ull << e.mantissa_bits, field - first + e.min_exponent - e.mantissa_bits, negative);
}

// float64 to float32, rounded once to nearest even; NaN is canonical.
DEVICE float float_of_value(double value) {
  return canonical(__double2float_rn(value));
}

// Elements of any dtype in memory.

// Round a double once to float32, or to a narrower dtype: to odd first, which leaves the second rounding the last word.
DEVICE u32 narrowed(double value, i32 dtype) {
  if (value != value) return dtype == FLOAT32 ? 0x7FC00000u : dtype == BFLOAT16 ? 0x7FC0u : 0x7E00u;
  if (dtype == FLOAT32) return (u32)__float_as_int(__double2float_rn(value));
  float toward_zero = __double2float_rz(value);
  u32 bits = (u32)__float_as_int(toward_zero);
  if ((double)toward_zero != value) bits |= 1;
  u32 sign = bits >> 31 << 15, magnitude = bits & 0x7FFFFFFF;
  if (dtype == BFLOAT16) return sign | bfloat16_bits<true>(__int_as_float((i32)magnitude));
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // at least halfway from 65504 to 65536
  if (magnitude < 0x38800000) {  // below 2^-14: steps of 2^-24
    float steps = __fmul_rn(__int_as_float((i32)magnitude), 16777216.0f);
    return sign | (u32)(__fsub_rn(__fadd_rn(steps, 8388608.0f), 8388608.0f));
  }
  return sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
}

DEVICE double load_element(const void* base, i64 place, i32 dtype) {
  if (dtype == FLOAT32) return ((const float*)base)[place];
  if (dtype == FLOAT64) return ((const double*)base)[place];
  u32 bits = ((const u16*)base)[place];
  if (dtype == BFLOAT16) return __int_as_float((i32)(bits << 16));
  if ((bits & 0x7FFF) > 0x7C00) return __longlong_as_double(0x7FF8000000000000ll);
  if ((bits & 0x7FFF) == 0x7C00) return __int_as_float((i32)(0x7F800000u | bits >> 15 << 31));
  double magnitude = (double)__int_as_float((i32)((bits & 0x7FFF) << 13)) * 0x1p112;
  return bits & 0x8000 ? -magnitude : magnitude;
}

DEVICE void store_value(void* base, i64 place, double value, i32 dtype) {
  if (dtype == FLOAT64) {
    ((double*)base)[place] = value;
  } else if (dtype == FLOAT32) {
    ((u32*)base)[place] = narrowed(value, dtype);
  } else {
    ((u16*)base)[place] = (u16)narrowed(value, dtype);
  }
}

// A float32 rounded to a dtype, as bits; NaN becomes the canonical one. Four such side by side, stored at once.
template <int Type>
DEVICE u32 rounded_bits(float value) {
  if constexpr (Type == FLOAT32) return as_bits(canonical(value));
  if constexpr (Type == FLOAT16) return narrowed(value, Type);
  return bfloat16_bits<false>(value);
}
template <int Type>
DEVICE void store_four(void* out, u64 four, const u32 (&y)[4]) {
  if constexpr (Type == FLOAT32) ((Words4*)out)[four] = {y[0], y[1], y[2], y[3]};
  else ((Words2*)out)[four] = {y[0] | y[1] << 16, y[2] | y[3] << 16};
}
