// Integers of 128 bits, powers of two, and how a magnitude is rounded to a coarser grid in every mode.
#pragma once
#include "common.cuh"

// Modes of rounding; gemm_unit.py has the same numbers.
#define MODE_EVEN 0
#define MODE_AWAY 1
#define MODE_HALF_TO_ZERO 2
#define MODE_ZERO 3
#define MODE_UP 4
#define MODE_DOWN 5
#define MODE_ODD 6
#define MODE_STOCHASTIC 7

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

// Say whether a discarded rest moves a magnitude away from zero when it is decided by r random bits w:
// floor(rest 2^r / 2^shift) + w >= 2^r and its variants (docs/semantics.md, section 1).
template <typename T>
DEVICE bool chance(T rest, int shift, int bits, int variant, u32 w) {
  int r = variant == 1 ? bits + 1 : bits;
  u64 taken = shift >= r ? low_of(right(rest, shift - r)) : low_of(rest) << (r - shift);
  u64 drawn = variant == 1 ? 2 * (u64)w + 1 : (u64)w;
  if (variant == 2 && shift > r) {  // nearest even of what r bits leave
    T lost = minus(rest, left(right(rest, shift - r), shift - r));
    bool half = low_of(right(lost, shift - r - 1)) & 1;
    bool more = !is_zero(minus(lost, left(right(lost, shift - r - 1), shift - r - 1)));
    taken += half && (more || (taken & 1));
  }
  return taken + drawn >= 1ull << r;
}

// The magnitude n / 2^shift, shift > 0, rounded to an integer.
template <typename T>
DEVICE T round_shift(T n, int shift, int mode, bool negative, int bits, int variant, u32 w) {
  T whole = right(n, shift);
  T rest = minus(n, left(whole, shift));
  if (is_zero(rest)) return whole;
  bool half = low_of(right(rest, shift - 1)) & 1;
  bool more = !is_zero(minus(rest, left(right(rest, shift - 1), shift - 1)));
  bool odd = low_of(whole) & 1, away = false;
  if (mode == MODE_EVEN) away = half && (more || odd);
  else if (mode == MODE_AWAY) away = half;
  else if (mode == MODE_HALF_TO_ZERO) away = half && more;
  else if (mode == MODE_UP) away = !negative;
  else if (mode == MODE_DOWN) away = negative;
  else if (mode == MODE_ODD) away = !odd;
  else if (mode == MODE_STOCHASTIC) away = chance(rest, shift, bits, variant, w);
  return away ? plus(whole, widen(1, whole)) : whole;
}
