// SPDX-License-Identifier: Apache-2.0
// Products of every fused unit (docs/matmul.md, section 2) and every number in exact integers, one output a thread: the
// general path, which does what fast paths leave.
//
// WIDE: products of two significands need more than 64 bits. LIMBS: digits of an exact sum over all exponents, for the
// blocks whose terms lie too far apart for 64 bits; 0 where 64 bits hold the sum of every block in units of
// 2^(E - fraction_bits), or of 2^grid where nothing is truncated.
#include "problem.cuh"

#if WIDE
typedef U128 Magnitude;
#else
typedef u64 Magnitude;
#endif

// Exact sums over any range of exponents: digits of 32 bits that carry only when they are read.

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

// A k position of an operand: significand, place of its last bit, and exponent * 256 + flags. Scales are multiplied in.
struct alignas(16) Element {
  u64 significand;
  i32 last, word;
};
#define NEGATIVE 1
#define IS_ZERO 2
#define IS_NAN 4
#define IS_INFINITE 8
#define SCALE_ZERO 16
#define SCALE_INFINITE 32
#define MISSING 64

DEVICE Element element_of(double x, int bits, int lsb, int lowest, double scale, const Problem& p) {
  Element e;
  u64 magnitude = as_u64(x) & ~SIGN_BIT;
  i32 flags = ((i64)as_u64(x) < 0 ? NEGATIVE : 0) | (magnitude == 0 ? IS_ZERO : 0);
  if (magnitude >= INFINITY_BITS) flags |= magnitude == INFINITY_BITS ? IS_INFINITE : IS_NAN;
  Parts n = take_apart(magnitude < INFINITY_BITS ? x : 0.0, bits, lsb + bits, lowest);
  if (p.scale_block) {
    u64 of_scale = as_u64(scale) & ~SIGN_BIT;
    if (of_scale == 0) flags |= SCALE_ZERO;
    if (of_scale >= INFINITY_BITS) flags |= of_scale == INFINITY_BITS ? SCALE_INFINITE : IS_NAN;
    Parts s = take_apart(of_scale < INFINITY_BITS ? scale : 0.0, p.scale_bits, p.scale_emin, p.scale_emin);
    n.significand *= s.significand;
    n.last += s.last;
    n.exponent = p.group > 1 ? s.exponent : n.exponent + s.exponent;
  } else if (p.group > 1) {
    n.exponent = 0;
  }
  e.significand = n.significand;
  e.last = n.last;
  e.word = n.exponent * 256 + flags;
  return e;
}

// Bit 0: NaN, bit 1: +Inf, bit 2: -Inf, of a product one of whose numbers is not finite.
DEVICE u32 limit_of(i32 x, i32 y) {
  i32 any = x | y;
  if (any & IS_NAN) return 1;
  u32 infinite = (x ^ y) & NEGATIVE ? 4 : 2;
  if (any & IS_INFINITE) return any & IS_ZERO ? 1 : infinite;
  return any & (IS_ZERO | SCALE_ZERO) ? 1 : infinite;
}

// The sum of one block.
struct Sum {
#if LIMBS
  Limbs<LIMBS> limbs;
#endif
  i64 total;
  int unit, base;  // the last place of terms, and of the total
  bool fits, any_negative, all_negative;

  // Terms are multiples of 2^lowest or truncated to multiples of 2^last_place, and their sum is below 2^highest.
  DEVICE void begin(int last_place, int lowest, int highest) {
    unit = last_place;
    base = LIMBS ? max(last_place, lowest) : last_place;
    fits = !LIMBS || highest - base <= 62;
    any_negative = false;
    all_negative = true;
    total = 0;
  }

  template <typename T>
  DEVICE void add(T n, int place, bool negative, const Problem& p) {
    any_negative |= negative;
    all_negative &= negative;
    if (unit > place) {
      n = round_shift(n, unit - place, Rounding{p.term_mode, 1, 0, 0}, negative, 0);
      place = unit;
    }
    if (is_zero(n)) return;
#if LIMBS
    if (!fits) {
      limbs.add(n, place - p.grid, negative);
      return;
    }
#endif
    u64 shifted = low_of(n) << (place - base);
    total += negative ? -(i64)shifted : (i64)shifted;
  }

  DEVICE double rounded(const Problem& p, u32 w) {
    bool minus_zero = all_negative || (any_negative && p.rounding.mode == MODE_DOWN), negative = total < 0;
    double y = minus_zero ? -0.0 : 0.0;
    if (total != 0) {
      u64 n = negative ? -(u64)total : (u64)total;
      y = to_format(n, base, negative, p.accumulator, p.rounding, w);
    }
#if LIMBS
    if (!fits) {
      int place;
      U128 n = limbs.take(place, negative);
      if (!is_zero(n)) y = to_format(n, place + p.grid, negative, p.accumulator, p.rounding, w);
    }
#endif
    return p.signed_zero || y != 0 ? y : 0.0;
  }
};

__shared__ Element elements[2][SIDE][WINDOW];

DEVICE Element load(const Inputs& in, const Problem& p, int side, i64 row, i32 k) {
  if (k < 0 || row >= (side ? p.columns : p.rows)) return Element{0, 0, IS_ZERO | MISSING};
  double scale = 1.0;
  if (p.scale_block) {
    scale = side ? scale_at(in.order.scale_b, p.scale_b_row, p.scale_b_stride, row, k / p.scale_block)
                 : scale_at(in.order.scale_a, p.scale_a_row, p.scale_a_stride, row, k / p.scale_block);
  }
  if (side) return element_of(element_at(in.b, row * p.b_row + k * p.b_stride, p.b_type), p.b_bits, p.b_lsb,
                                p.b_emin, scale, p);
  return element_of(element_at(in.a, row * p.a_row + k * p.a_stride, p.a_type), p.a_bits, p.a_lsb,
                    p.a_emin, scale, p);
}

DEVICE int reach(Inputs& in, const Problem& p, i64 first, int count) {
  return reach(in, first, count, [&](int row, int place, i32 k) {
    elements[0][row][place] = load(in, p, 0, in.first_row + row, k);
    elements[1][row][place] = load(in, p, 1, in.first_column + row, k);
  });
}

// Steps 1 and 3 of a block: what is not finite, the alignment exponent of its products, and their lowest place.
DEVICE void find_max_exponents(Inputs& in, const Problem& p, i64 first, u32& limits, int& exponent, int& lowest) {
  for (int start = 0; start < p.block; start += WINDOW) {
    int count = min(WINDOW, p.block - start), at = reach(in, p, first + start, count);
    const Element* xs = elements[0][threadIdx.x / SIDE] + at;
    const Element* ys = elements[1][threadIdx.x % SIDE] + at;
    for (int i = 0; i < count; ++i) {
      i32 x = xs[i].word, y = ys[i].word, any = x | y;
      if (any & MISSING) continue;
      if (any & (IS_NAN | IS_INFINITE | SCALE_INFINITE)) limits |= limit_of(x, y);
      if (p.group == 1 && any & (IS_ZERO | SCALE_ZERO)) continue;
      exponent = max(exponent, (x >> 8) + (y >> 8));
#if LIMBS
      lowest = min(lowest, xs[i].last + ys[i].last);
#endif
    }
  }
}

// The products of a group, in two's complement and units of 2^place.
struct Group {
  Magnitude total;
  int place, members;
  bool all_negative;

  DEVICE void begin() {
    total = widen(0, total);
    members = 0;
    all_negative = true;
  }

  DEVICE void add(Magnitude n, const Element& x, const Element& y, const Problem& p) {
    bool negative = (x.word ^ y.word) & NEGATIVE;
    place = p.a_lsb + p.b_lsb + (p.scale_block ? (x.word >> 8) + (y.word >> 8) - 2 * p.scale_bits : 0);
    if (!is_zero(n)) n = left(n, x.last + y.last - place);
    total = negative ? minus(total, n) : plus(total, n);
    all_negative &= negative;
    ++members;
  }

  DEVICE void end(Sum& sum, const Problem& p) {
    if (!members) return;
    bool below = low_of(right(total, width_of(total) - 1));
    sum.add(below ? minus(widen(0, total), total) : total, place, is_zero(total) ? all_negative : below, p);
    begin();
  }
};

// Steps 4 and 5: products, or exact sums of groups of them, rounded to the grid and added.
DEVICE void add_terms(Inputs& in, const Problem& p, i64 first, Sum& sum) {
  Group group;
  group.begin();
  for (int start = 0; start < p.block; start += WINDOW) {
    int count = min(WINDOW, p.block - start), at = reach(in, p, first + start, count);
    const Element* xs = elements[0][threadIdx.x / SIDE] + at;
    const Element* ys = elements[1][threadIdx.x % SIDE] + at;
    for (int i = 0; i < count; ++i) {
      Element x = xs[i], y = ys[i];
      bool missing = (x.word | y.word) & MISSING;
      Magnitude n;
      multiply(x.significand, y.significand, n);
      if (p.group > 1) {
        if (!missing) group.add(n, x, y, p);
        if ((start + i + 1) % p.group == 0) group.end(sum, p);
      } else if (!missing) {
        sum.add(n, x.last + y.last, (x.word ^ y.word) & NEGATIVE, p);
      }
    }
  }
  if (p.group > 1) group.end(sum, p);
}

DEVICE double block_sum(Inputs& in, const Problem& p, i64 first, double running, Sum& sum, u32 w) {
  // 1. what is not finite, the alignment exponent, and the lowest place, of addend and products
  u64 bits = as_u64(running) & ~SIGN_BIT;
  bool negative = (i64)as_u64(running) < 0;
  u32 limits = bits > INFINITY_BITS ? 1 : bits < INFINITY_BITS ? 0 : negative ? 4 : 2;
  int lowest = p.accumulator.min_exponent;
  Parts c = take_apart(limits ? 0.0 : running, 52, lowest, lowest);
  int zeros = max(__ffsll((i64)c.significand) - 1, 0), place = c.last + zeros;
  int exponent = c.significand ? c.exponent : NO_EXPONENT, last_place = c.significand ? place : -NO_EXPONENT;
  find_max_exponents(in, p, first, limits, exponent, last_place);
  // 2. terms are multiples of 2^unit
  int unit = LIMBS ? NO_EXPONENT : p.grid;
  if (p.fraction_bits != NO_FRACTION) {
    unit = exponent == NO_EXPONENT ? 0 : max(exponent, p.lowest) - p.fraction_bits;
  }
  // A term is below four times 2^exponent, with scales sixteen times; groups go by their scales alone.
  int highest = max(exponent + 4, unit) + 33 - __clz(p.block);
  if (p.group > 1) last_place = NO_EXPONENT / 2;
  // 3. the exact sum of terms, the addend among them; 4. one rounding
  sum.begin(unit, last_place, highest);
  add_terms(in, p, first, sum);
  sum.add(widen(c.significand >> zeros, Magnitude()), place, negative, p);
  double y = sum.rounded(p, w);
  if (!limits) return y;
  return special_of(limits);
}

KERNEL __launch_bounds__(SIDE * SIDE)
exact_integer(const void* a, const void* b, const void* c, const i32* source, const Order order, const u8* marks,
              void* sums, const Problem p) {
  each_output(a, b, c, source, order, marks, sums, p, [&](Inputs& in, auto add) {
    Sum sum;
#if LIMBS
    sum.limbs.clear();
#endif
    add([&](i64 t, double running, i64 row, i64 column) {
      return block_sum(in, p, t * p.block, running, sum, drawn(p, t, row, column));
    });
  });
}
