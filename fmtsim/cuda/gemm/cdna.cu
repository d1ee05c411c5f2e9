// SPDX-License-Identifier: Apache-2.0
// Products of AMD's CDNA2 and CDNA3 units and of saturating integer units (docs/matmul.md, section 3), one output a
// thread, in doubles and 64-bit integers. Macro UNIT: TWO_STAGE, PAIRWISE or INTEGER.
#include "problem.cuh"

#define TWO_STAGE 0
#define PAIRWISE 1
#define INTEGER 2

// Operands in shared memory as doubles.
__shared__ double values[2][SIDE][WINDOW];
__shared__ i32 absent[WINDOW];  // whether a place has no product

DEVICE int reach(Inputs& in, const Problem& p, i64 first, int count) {
  return reach(in, first, count, [&](int side, int place, i32 k) {
    i64 row = in.first_row + side, column = in.first_column + side;
    bool of_a = k >= 0 && row < p.rows, of_b = k >= 0 && column < p.columns;
    values[0][side][place] = of_a ? element_at(in.a, row * p.a_row + k * p.a_stride, p.a_type) : 0.0;
    values[1][side][place] = of_b ? element_at(in.b, column * p.b_row + k * p.b_stride, p.b_type) : 0.0;
    if (side == 0) absent[place] = k < 0;
  });
}

// n 2^shift, toward minus infinity.
DEVICE i64 floor_shift(i64 n, int shift) { return shift >= 0 ? n << shift : n >> min(-shift, 63); }

#if UNIT == TWO_STAGE

DEVICE int exponent_of(double x, int emin) {  // of a finite number; zero has the lowest
  u64 significand = as_u64(x) & ~SIGN_BIT;
  int e = (int)(significand >> 52) - 1023;
  return significand ? max(e, emin) : emin;
}

DEVICE u32 limit_of(double x) {  // bit 0: NaN, bit 1: +Inf, bit 2: -Inf
  return is_nan(x) ? 1 : !is_infinite(x) ? 0 : x > 0 ? 2 : 4;
}

// Steps 1 to 3 of the unit: sums of products of one parity, or of all.
struct Stage {
  i64 sum;
  int exponent;
  bool any;
};

DEVICE void find_max_exponents(Inputs& in, const Problem& p, i64 first, Stage* stages, u32& limits) {
  for (int start = 0; start < p.block; start += WINDOW) {
    int count = min(WINDOW, p.block - start), at = reach(in, p, first + start, count);
    for (int i = 0; i < count; ++i) {
      if (absent[at + i]) continue;
      double x = values[0][threadIdx.x / SIDE][at + i], y = values[1][threadIdx.x % SIDE][at + i], product = x * y;
      u32 limit = limit_of(product);
      if (!limit && !p.parity && fabs(product) >= 0x1p128) limit = product > 0 ? 2 : 4;
      limits |= limit;
      Stage& s = stages[p.parity ? (start + i) & 1 : 0];
      int e = product == 0 ? -126 : exponent_of(x, p.a_emin) + exponent_of(y, p.b_emin);
      s.exponent = s.any ? max(s.exponent, e) : e;
      s.any = true;
    }
  }
}

DEVICE void add_products(Inputs& in, const Problem& p, i64 first, Stage* stages) {
  for (int start = 0; start < p.block; start += WINDOW) {
    int count = min(WINDOW, p.block - start), at = reach(in, p, first + start, count);
    for (int i = 0; i < count; ++i) {
      double product = values[0][threadIdx.x / SIDE][at + i] * values[1][threadIdx.x % SIDE][at + i];
      if (product == 0 || limit_of(product)) continue;
      Stage& s = stages[p.parity ? (start + i) & 1 : 0];
      Parts n = take_apart(product, 52, -1022, -1022);
      int shift = s.exponent - p.fraction_bits - n.last;
      u64 cut = shift > 0 ? right(n.significand, shift) : left(n.significand, -shift);
      s.sum += product < 0 ? -(i64)cut : (i64)cut;
    }
  }
}

DEVICE double block_sum(Inputs& in, const Problem& p, i64 first, double running) {
  // 1. sums of products on the grid of their largest exponent, of each parity or of all
  Stage stages[2] = {{0, 0, false}, {0, 0, false}};
  u32 limits = limit_of(running);
  find_max_exponents(in, p, first, stages, limits);
  add_products(in, p, first, stages);
  if (limits) return special_of(limits);
  // 2. both sums on one grid
  int e1 = stages[1].any ? max(stages[0].exponent, stages[1].exponent) : stages[0].exponent;
  i64 total = floor_shift(stages[0].sum, stages[0].exponent - e1);
  if (stages[1].any) total += floor_shift(stages[1].sum, stages[1].exponent - e1);
  // 3. addend and sum on the grid of the larger exponent, with the unit's fraction bits each
  int of_c = exponent_of(running, -126), e = max(e1, of_c);
  total = floor_shift(total, e1 - e + p.sum_bits - p.fraction_bits);
  Parts c = take_apart(running, 52, -1022, -1022);
  i64 addend = running < 0 ? -(i64)c.significand : (i64)c.significand;
  addend = floor_shift(addend, c.last + p.fraction_bits - e);
  if (p.parity && of_c < e - p.fraction_bits - 1) addend = 0;
  int bits = max(p.sum_bits, p.fraction_bits);
  total = (total << (bits - p.sum_bits)) + (addend << (bits - p.fraction_bits));
  // 4. one rounding to float32
  if (total == 0) return 0.0;
  u64 magnitude = total < 0 ? -(u64)total : (u64)total;
  double y = to_format(magnitude, e - bits, total < 0, p.accumulator, Rounding{MODE_NEAREST_EVEN, 0, 0, 0}, 0);
  return y == 0 ? 0.0 : y;
}

#elif UNIT == PAIRWISE

DEVICE float read(double x, int emin) { return x != 0 && fabs(x) < power_of_two(emin) ? 0.0f : (float)x; }
DEVICE float flushed(float x) { return fabsf(x) < 0x1p-126f ? __fmul_rn(x, 0.0f) : x; }

DEVICE double block_sum(Inputs& in, const Problem& p, i64 first, double running) {
  float level[32];  // level[j]: a sum of 2^j products that waits for its neighbour
  int bits = 0;
  for (int start = 0; start < p.leaves; start += WINDOW) {
    int count = min(WINDOW, p.leaves - start);
    int present = max(min(count, p.block - start), 0);
    int at = present ? reach(in, p, first + start, present) : 0;
    for (int i = 0; i < count; ++i) {
      float sum = 0.0f;
      if (i < present && !absent[at + i]) {
        float x = read(values[0][threadIdx.x / SIDE][at + i], p.a_emin);
        sum = flushed(__fmul_rn(x, read(values[1][threadIdx.x % SIDE][at + i], p.b_emin)));
      }
      for (bits = 0; (start + i) >> bits & 1; ++bits) sum = flushed(__fadd_rn(level[bits], sum));
      level[bits] = sum;
    }
  }
  return flushed(__fadd_rn(read(running, -126), level[bits]));
}

#else

DEVICE double block_sum(Inputs& in, const Problem& p, i64 first, double running) {
  i64 sum = (i64)running;
  for (int start = 0; start < p.block; start += WINDOW) {
    int count = min(WINDOW, p.block - start), at = reach(in, p, first + start, count);
    for (int i = 0; i < count; ++i) {
      sum += (i64)(values[0][threadIdx.x / SIDE][at + i] * values[1][threadIdx.x % SIDE][at + i]);
    }
  }
  return to_integer((double)sum, p);
}

#endif

KERNEL __launch_bounds__(SIDE * SIDE)
cdna_product(const void* a, const void* b, const void* c, const i32* source, const Order order, const u8* marks,
             void* sums, const Problem p) {
  each_output(a, b, c, source, order, marks, sums, p, [&](Inputs& in, auto add) {
    add([&](i64 t, double running, i64, i64) { return block_sum(in, p, t * p.block, running); });
  });
}
