// Accumulators and outer sums: formats of at most 53 bits of precision, whose values doubles hold.
#pragma once
#include "general_numbers.cuh"

struct alignas(16) Format {
  double largest;
  i32 mantissa_bits, min_exponent;
};

struct alignas(16) Rounding {
  i32 mode, bits, variant, layout;
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
// stand for all that was cut off below it.
template <typename T>
DEVICE double to_format(T n, int place, bool negative, const Format& to, const Rounding& how, u32 w) {
  int lowest = max(place + length_of(n) - 1, to.min_exponent) - to.mantissa_bits;
  if (lowest > place) {
    n = round_shift(n, lowest - place, how.mode, negative, how.bits, how.variant, w);
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
