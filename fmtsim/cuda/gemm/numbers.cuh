// SPDX-License-Identifier: Apache-2.0
// Numbers of products: integers of 128 bits, powers of two, and rounding of a magnitude to a format in every mode.
#pragma once
#include "rounding.cuh"

struct U128 { u64 low, high; };

DEVICE u64 as_u64(double x) { return (u64)__double_as_longlong(x); }
DEVICE double as_double(u64 x) { return __longlong_as_double((i64)x); }

DEVICE int width_of(u64) { return 64; }
DEVICE int width_of(U128) { return 128; }
DEVICE u64 low_of(u64 x) { return x; }
DEVICE u64 low_of(U128 x) { return x.low; }
DEVICE bool is_zero(u64 x) { return x == 0; }
DEVICE bool is_zero(U128 x) { return (x.low | x.high) == 0; }
DEVICE int length_of(u64 x) { return 64 - __clzll((i64)x); }
DEVICE int length_of(U128 x) { return x.high ? 64 + length_of(x.high) : length_of(x.low); }
DEVICE u64 widen(u64 x, u64) { return x; }
DEVICE U128 widen(u64 x, U128) { return U128{x, 0}; }

// Shifts by any count from 0 on; what leaves is lost.
DEVICE u64 right(u64 x, int shift) { return shift > 63 ? 0 : x >> shift; }
DEVICE u64 left(u64 x, int shift) { return shift > 63 ? 0 : x << shift; }
DEVICE U128 right(U128 x, int shift) {
  if (shift > 63) return U128{right(x.high, shift - 64), 0};
  return shift == 0 ? x : U128{x.low >> shift | x.high << (64 - shift), x.high >> shift};
}
DEVICE U128 left(U128 x, int shift) {
  if (shift > 63) return U128{0, left(x.low, shift - 64)};
  return shift == 0 ? x : U128{x.low << shift, x.high << shift | x.low >> (64 - shift)};
}
DEVICE u64 minus(u64 x, u64 y) { return x - y; }
DEVICE U128 minus(U128 x, U128 y) { return U128{x.low - y.low, x.high - y.high - (x.low < y.low)}; }
DEVICE u64 plus(u64 x, u64 y) { return x + y; }
DEVICE U128 plus(U128 x, U128 y) {
  u64 low = x.low + y.low;
  return U128{low, x.high + y.high + (low < x.low)};
}
DEVICE void multiply(u64 x, u64 y, u64& product) { product = x * y; }
DEVICE void multiply(u64 x, u64 y, U128& product) { product = U128{x * y, __umul64hi(x, y)}; }

// 2^e for a normal exponent.
DEVICE double power_of_two(int e) { return as_double((u64)(e + 1023) << 52); }

// n 2^e for an n of at most 54 bits, exact wherever the result is a double, Inf above.
DEVICE double scaled(u64 n, int e) {
  double y = (double)n;
  while (e < -1000) { y *= power_of_two(-500); e += 500; }
  while (e > 1000) { y *= power_of_two(1000); e -= 1000; }
  return y * power_of_two(e);
}

// A mode; random_bits, variant: of stochastic rounding.
struct alignas(16) Rounding {
  i32 mode, random_bits, variant, unused;
};

// The magnitude n / 2^shift, shift > 0, rounded to an integer; w: a random integer.
template <typename T>
DEVICE T round_shift(T n, int shift, const Rounding& how, bool negative, u32 w) {
  T whole = right(n, shift);
  T rest = minus(n, left(whole, shift)), top = right(rest, max(shift - 64, 0));
  bool sticky = !is_zero(minus(rest, left(top, max(shift - 64, 0))));
  Split s = {low_of(whole), left(low_of(top), max(64 - shift, 0)), sticky};
  return moves_up(s, s.whole & 1, negative, w, how) ? plus(whole, widen(1, whole)) : whole;
}

// Accumulators and outer sums: formats of at most 53 bits of precision, whose values doubles hold.

struct alignas(16) Format {
  double largest;
  i32 mantissa_bits, min_exponent;
};

#define NAN_BITS 0x7FFFFFFFFFFFFFFFull
#define INFINITY_BITS 0x7FF0000000000000ull
#define SIGN_BIT 0x8000000000000000ull

DEVICE bool is_nan(double x) { return x != x; }
DEVICE bool is_infinite(double x) { return (as_u64(x) & ~SIGN_BIT) == INFINITY_BITS; }
DEVICE double with_sign(double magnitude, bool negative) { return negative ? -magnitude : magnitude; }

struct Parts {  // of a finite number
  u64 significand;
  i32 last, exponent;
};

// Take a finite number of a format of `bits` mantissa bits apart; its exponent is at least `lowest`.
DEVICE Parts take_apart(double x, int bits, int emin, int lowest) {
  u64 magnitude = as_u64(x) & ~SIGN_BIT;
  int field = (int)(magnitude >> 52);
  u64 significand = magnitude & 0xFFFFFFFFFFFFFull;
  if (field) significand |= 1ull << 52;
  int last = (field ? field : 1) - 1075;
  int exponent = last + length_of(significand) - 1;
  int zeros = max(exponent, emin) - bits - last;  // below the format's last place
  if (significand == 0) return Parts{0, emin - bits, lowest};
  return Parts{right(significand, zeros), last + zeros, max(exponent, lowest)};
}

// What a sum is that has NaN (bit 0), +Inf (bit 1) or -Inf (bit 2) among its terms.
DEVICE double special_of(u32 limits) {
  if ((limits & 1) || limits == 6) return as_double(NAN_BITS);
  return with_sign(as_double(INFINITY_BITS), limits == 4);
}

// The number n 2^place, n > 0, in a format; Inf above its largest value. Where n has more than 64 bits its last bit may
// stand for all that was dropped below it.
template <typename T>
DEVICE double to_format(T n, int place, bool negative, const Format& to, const Rounding& how, u32 w) {
  int lowest = max(place + length_of(n) - 1, to.min_exponent) - to.mantissa_bits;
  if (lowest > place) {
    n = round_shift(n, lowest - place, how, negative, w);
    place = lowest;
  }
  double y = scaled(low_of(n), place);
  return with_sign(y > to.largest ? as_double(INFINITY_BITS) : y, negative);
}

// A double rounded to a format, to nearest even; NaN, Inf and the sign of zero stay.
DEVICE double nearest(double x, const Format& to) {
  u64 bits = as_u64(x) & ~SIGN_BIT;
  if (to.mantissa_bits == 52 || bits == 0 || bits >= INFINITY_BITS) return x;
  double y;
  if ((int)(bits >> 52) - 1023 >= to.min_exponent) {  // the carry of a mantissa goes into the exponent
    int cut = 52 - to.mantissa_bits;
    bits += (1ull << (cut - 1)) - 1 + (bits >> cut & 1);
    y = as_double(bits >> cut << cut);
  } else {
    double step = power_of_two(to.min_exponent - to.mantissa_bits + 52);  // 2^52 last places
    y = __dadd_rn(__dadd_rn(as_double(bits), step), -step);
  }
  return with_sign(y > to.largest ? as_double(INFINITY_BITS) : y, (i64)as_u64(x) < 0);
}

// x + y with the last bit set wherever the sum is not a double: rounded to fewer bits, it rounds as the exact sum does.
DEVICE double add_to_odd(double x, double y) {
  double s = __dadd_rn(x, y);
  if (s == 0 || is_nan(s) || is_infinite(s)) return s;
  double of_y = __dadd_rn(s, -x);
  double error = __dadd_rn(__dadd_rn(x, -__dadd_rn(s, -of_y)), __dadd_rn(y, -of_y));
  u64 bits = as_u64(s);
  if (error == 0 || (bits & 1)) return s;
  return as_double((error > 0) == (s > 0) ? bits + 1 : bits - 1);
}

// x + y in a format: to nearest even, zeros, Inf and NaN as in IEEE 754.
DEVICE double add_in(double x, double y, const Format& to) {
  return to.mantissa_bits == 52 ? __dadd_rn(x, y) : nearest(add_to_odd(x, y), to);
}
