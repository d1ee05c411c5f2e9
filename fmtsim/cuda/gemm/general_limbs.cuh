// Exact sums over any range of exponents: digits of 32 bits that carry only when they are read.
#pragma once
#include "general_numbers.cuh"

// The number sum of digit[i] 2^(32 i + lowest); digits are signed and may hold 2^30 additions.
template <int N>
struct Limbs {
  i64 digit[N];

  DEVICE void clear() {
#pragma unroll 1
    for (int i = 0; i < N; ++i) digit[i] = 0;
  }

  // Add n 2^(at) with at counted from the lowest bit.
  DEVICE void add(u64 n, int at, bool negative) {
    int i = at >> 5, shift = at & 31;
    u64 low = (n & 0xFFFFFFFFu) << shift, high = (n >> 32) << shift;
    u64 middle = (low >> 32) + (high & 0xFFFFFFFFu);
    low &= 0xFFFFFFFFu;
    digit[i] += negative ? -(i64)low : (i64)low;
    digit[i + 1] += negative ? -(i64)middle : (i64)middle;
    digit[i + 2] += negative ? -(i64)(high >> 32) : (i64)(high >> 32);
  }
  DEVICE void add(U128 n, int at, bool negative) {
    add(n.low, at, negative);
    if (n.high) add(n.high, at + 64, negative);
  }

  // The sign, the first 96 bits and more of the magnitude, whose last bit stands for all that follow, and its place;
  // the sum is then zero again.
  DEVICE U128 take(int& place, bool& negative) {
    i64 carry = 0;
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      carry += digit[i];
      digit[i] = carry & 0xFFFFFFFF;
      carry >>= 32;
    }
    negative = carry < 0;
    u64 borrow = 1;
    int top = 0;
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      if (negative) {  // two's complement
        borrow += (u64)digit[i] ^ 0xFFFFFFFFu;
        digit[i] = (i64)(borrow & 0xFFFFFFFFu);
        borrow >>= 32;
      }
      if (digit[i]) top = i;
    }
    int first = max(top - 3, 0);
    U128 n = U128{0, 0};
    u64 lost = 0;
#pragma unroll 1
    for (int i = N - 1; i >= 0; --i) {
      if (i <= top && i >= first) n = plus(left(n, 32), U128{(u64)digit[i], 0});
      if (i < first) lost |= (u64)digit[i];
      digit[i] = 0;
    }
    place = 32 * first;
    n.low |= lost != 0;
    return n;
  }
};
