// SPDX-License-Identifier: Apache-2.0
// Products of every fused unit (FP8 to TF32; Hopper, Ada, Ampere, units of one's own) on GPUs without fp64 tensor
// cores, and of units whose terms or sums round in ways that aligned_fp64_mma.cu does not know: aligned terms, each
// added by one float64 multiply-add. Tiles with NaN, Inf or sums near the ends of the accumulator's range are marked
// for the general path.
//
// A running sum that carries M = 1.5 * 2^52 u has the grid u = 2^(E - FRACTION) itself (aligned_fp64_mma.cu), so that a
// multiply-add toward zero adds floor(p / u), and trunc(p / u) = floor(p (1 + eps) / u) + [p < 0].
//
// Macros: BLOCK (k positions of a record), RECORDS (of a block: more than 32 k positions have several), FRACTION, TERMS
// (their rounding: MODE_TOWARD_ZERO, MODE_DOWN, MODE_NEAREST_EVEN, MODE_NEAREST_AWAY), ROUND (the mode of sums), BITS
// (of a random integer), ODD (its variant b: twice the integer plus one), BY_REST (other stochastic variants: the rest
// decides), ALIGNED (the columns are a multiple of 64), STAGES; ACC_MANTISSA, CLAMPED, PROMOTES as in fma_chain.cu.
#include "aligned_fp64_fma.cuh"

#define CUT (52 - ACC_MANTISSA)
#define ABOVE ((CUT << 20) + (1 << 19))  // from the high word of 2^e to that of 1.5 * 2^52 last places
#define SWAPPED (ROUND == MODE_STOCHASTIC)  // operands change places: a thread then has the four outputs of a counter
#define DRAWN (BITS + ODD)
#define SHIFT (((52 - FRACTION) << 20) + (1 << 19))  // from the high word of 2^E to that of M
#define TO_NEAREST (TERMS == MODE_NEAREST_EVEN || TERMS == MODE_NEAREST_AWAY)

struct alignas(16) Limits {
  double enlarged;  // 1 + eps
  i32 emin, emax;   // of the accumulator
  i32 least;        // high word of the smallest M
  i32 lowest;       // high word of 2^emin
};

struct Stage { u8 a[ROW_BYTES], b[COLUMN_BYTES]; };

struct Lane { i32 warp_row, row, warp_column, column; };  // of a warp in a panel, and of a lane's words in it

// Of a block, of each output in units of u: terms that were rounded to nearest.
#if TO_NEAREST
struct Terms { u32 sum[8][8]; };
#else
struct Terms {};
#endif

// Of a thread's sums, as high words: the largest (clamped: of 1.5 * 2^52 last places), and twice the smallest but zero,
// less one.
struct Extremes {
  i32 largest;
  u32 smallest;
};

// The largest field of M that a product of the block asks for, two columns a word.
struct Fields { u32 word[8][4]; };

DEVICE void clear(Fields& fields) {
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 4; ++j) fields.word[i][j] = 0;
}

DEVICE void compare_exponents(Fields& fields, const Stage& stage, const Lane& at, int place) {
  const u32* a = (const u32*)(stage.a + VALUE_BYTES) + at.warp_row + at.row * 4;
  const u32* b = (const u32*)(stage.b + VALUE_BYTES) + at.warp_column / 2 + at.column * 4;
  u32 x[8], y[4];
  load<u32, 8, 8>(x, a + place * PANEL);
  load<u32, 4, 1>(y, b + place * (PANEL / 2));
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 4; ++j) fields.word[i][j] = __viaddmax_s16x2(x[i], y[j], fields.word[i][j]);
}

DEVICE void compare_exponents(Fields& fields, const Stage& stage, const Lane& at) {
#pragma unroll 4
  for (int place = 0; place < BLOCK; ++place) compare_exponents(fields, stage, at, place);
}

// Begin a block: running sums become M plus the truncated addend plus the number of negative terms.
//
// TO_NEAREST: a tie must not see the parity of other terms, so the running sum stays out of it. With c' the addend to
// nearest even, B = M + 2 floor(c' / 2u) u is an even number of u, and RN(B + p) is B plus the nearest to p, ties to
// even. |p| < 4 * 2^E (16 with scales), so B + p keeps the exponent of M, and the low words of B and of that sum differ
// by the term in units of u, modulo 2^32. The terms of a block, with what c' has above B, stay below 2^31 u
// (aligned_fp64_fma.py): adding low words as 32-bit integers is all that is left. RN(B - p) lies as far below B, so
// every other k position subtracts and the low words of B cancel. To nearest with ties away, 1 + eps moves every tie.
DEVICE void start(double (&s)[8][8], Terms& terms, const Fields& fields, const Stage& stage, const Lane& at,
                  const Limits& l) {
  u32 rows[8], columns[8];
  load<u32, 8, 8>(rows, (const u32*)(stage.a + ROW_BYTES - PANEL * 4) + at.warp_row + at.row * 4);
  load<u32, 8, 4>(columns, (const u32*)(stage.b + COLUMN_BYTES - PANEL * 4) + at.warp_column + at.column * 4);
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      // 1. the exponent of the addend, and of the largest product, as fields of M
      const double c = s[i][j];
      const i32 high = __double2hiint(c);
      i32 addend = high & 0x7FF00000;
      if (CLAMPED) addend = high == 0 ? 0 : max(addend, l.lowest);  // only a zero has that high word, and is +0
      const u32 pair = fields.word[i][j / 2];
      const i32 products = (i32)((j % 2 ? pair >> 16 << 20 : pair << 20) | 1u << 19);
      const i32 field = max(__viaddmax_s32(addend, SHIFT, products), l.least);
      const double m = __hiloint2double(field, 0);
#if TO_NEAREST
      // 2. B; terms begin with what c' has above B, less the low word of B where an odd number of them does not cancel
      const double sum = TERMS == MODE_NEAREST_EVEN ? __dadd_rn(c, m) : __fma_rn(c, l.enlarged, m);
      const u32 low = (u32)__double2loint(sum), even = low & ~1u;
      s[i][j] = __hiloint2double(__double2hiint(sum), (i32)even);
      terms.sum[i][j] = (low & 1u) - even * (BLOCK % 2);
#else
      // 2. the addend is one more term, floored onto M; 3. plus one for every negative term
      const double sum = __fma_rz(c, l.enlarged, m);
      const u32 negative = TERMS == MODE_DOWN ? 0 : __popc(rows[i] ^ columns[j]) + ((u32)high >> 31);
      s[i][j] = __longlong_as_double(__double_as_longlong(sum) + negative);
#endif
    }
}

// The number of negative terms of a further record of a block.
DEVICE void add_negatives(double (&s)[8][8], const Stage& stage, const Lane& at) {
  u32 rows[8], columns[8];
  load<u32, 8, 8>(rows, (const u32*)(stage.a + ROW_BYTES - PANEL * 4) + at.warp_row + at.row * 4);
  load<u32, 8, 4>(columns, (const u32*)(stage.b + COLUMN_BYTES - PANEL * 4) + at.warp_column + at.column * 4);
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j)
      s[i][j] = __longlong_as_double(__double_as_longlong(s[i][j]) + __popc(rows[i] ^ columns[j]));
}

DEVICE void add_products(double (&s)[8][8], Terms& terms, const Stage& stage, const Lane& at) {
  const double* a = (const double*)stage.a + at.warp_row + at.row * CHUNK;
  const double* b = (const double*)stage.b + at.warp_column + at.column * CHUNK;
#pragma unroll 16  // of shorter loops the compiler copies every sum in each turn
  for (int place = 0; place < BLOCK; ++place) {
    double x[8], y[8];
    load<double, 8, 8>(x, a + place * PANEL);
    load<double, 8, 4>(y, b + place * PANEL);
    UNROLLED for (int i = 0; i < 8; ++i)
      UNROLLED for (int j = 0; j < 8; ++j) {
#if TO_NEAREST
        const u32 low = (u32)__double2loint(__fma_rn(place % 2 ? -x[i] : x[i], y[j], s[i][j]));
        terms.sum[i][j] += place % 2 ? 0 - low : low;
#else
        s[i][j] = __fma_rz(x[i], y[j], s[i][j]);
#endif
      }
  }
}

// What a block has added to M, whose exponent field the sum still has: exact.
DEVICE double block_sum(double s, const Terms& terms, int i, int j) {
  const double m = __hiloint2double((__double2hiint(s) & 0x7FF00000) | 1 << 19, 0);
#if TO_NEAREST
  s = __longlong_as_double(__double_as_longlong(s) + (i64)(i32)terms.sum[i][j]);
#endif
  return __dadd_rn(s, -m);
}

// A magnitude in a mode that looks at what truncation leaves; `places` is 1.5 * 2^52 last places.
DEVICE double rounded_by_rest(double magnitude, double places, bool negative, u32 w, const Rounding& how) {
  // 1. whole last places, and what truncation drops
  const double counted = __dadd_rz(magnitude, places), whole = __dadd_rn(counted, -places);
  const double lost = __dadd_rn(magnitude, -whole);
  if (lost == 0.0) return whole;
  // 2. that as a fraction of 64 bits of a last place
  const i32 unit = __double2hiint(places) - (52 << 20) - (1 << 19);  // high word of a last place
  const double rest = __dmul_rn(__dmul_rn(lost, __hiloint2double(0x7FE00000 - unit, 0)), 0x1p64);
  const u64 fraction = __double2ull_rz(rest);
  // 3. one last place more where the mode moves the magnitude up
  const Rounding mode = {ROUND, how.random_bits, how.variant, 0};
  const Split s = {0, fraction, (double)fraction != rest};
  const bool up = moves_up(s, __double2loint(counted) & 1, negative, w, mode);
  return up ? __dadd_rn(whole, __hiloint2double(unit, 0)) : whole;
}

// The exact sum x rounded to the accumulator. Stochastic rounding adds the random integer w of DRAWN bits, in units of
// 2^-DRAWN of a last place, and truncates: a rest of at least 2^DRAWN less the integer moves a magnitude up.
DEVICE double rounded(double x, u32 w, Extremes& e, const Limits& l, const Rounding& how) {
  const i32 exponent = __double2hiint(x) & 0x7FF00000;
  const i32 high = CLAMPED ? __viaddmax_s32(exponent, ABOVE, l.lowest + ABOVE) : exponent + ABOVE;
  const double places = __hiloint2double(high, 0);
  double y;
  if (ROUND == MODE_NEAREST_EVEN && !CLAMPED) {
    constexpr double power = (double)(1ull << CUT);
    y = __fma_rn(x, power, -__dmul_rn(x, power - 1.0));
  } else if (ROUND == MODE_NEAREST_EVEN) {
    y = __dadd_rn(__dadd_rn(x, places), -places);
  } else {
    double magnitude = fabs(x);
    if (ROUND == MODE_STOCHASTIC && !BY_REST) {
      const i32 unit = high - (DRAWN << 20) - (1 << 19);  // of 2^52 of the integer's units
      magnitude = __dadd_rn(magnitude, __dadd_rn(__hiloint2double(unit, (i32)w), -__hiloint2double(unit, 0)));
    }
    if (BY_REST) y = rounded_by_rest(magnitude, places, x < 0, w, how);
    else y = __dadd_rn(__dadd_rz(magnitude, places), -places);
    const i32 top = __double2hiint(y), sign = __double2hiint(x) & (i32)0x80000000;
    y = __hiloint2double(top == 0 ? 0 : top | sign, __double2loint(y));
  }
  if (CLAMPED) {
    e.largest = max(e.largest, high);
  } else {
    e.largest = max(e.largest, __double2hiint(y) & 0x7FFFFFFF);
    e.smallest = min(e.smallest, 2 * (u32)__double2hiint(y) - 1);
  }
  return y;
}

DEVICE bool is_right(const Extremes& e, const Limits& l) {
  if (CLAMPED) return (e.largest >> 20) - 1023 - CUT < l.emax;
  return (e.largest >> 20) - 1023 <= l.emax && (i32)((e.smallest / 2 + 1) >> 20) - 1023 >= l.emin;
}

// Outputs of a thread, by the numbers of its words of the first and the second operand.
struct Outputs {
  void* sums;
  const void* c;
  i32 first, second;

  DEVICE i64 row_of(int i, int j) const { return SWAPPED ? second + j / 2 * 8 + j % 2 : first + 8 * i; }
  DEVICE i64 column_of(int i, int j) const { return SWAPPED ? first + 8 * i : second + j / 2 * 8 + j % 2; }
};

DEVICE u32 integer_of(u32 word) { return BY_REST ? word : ODD ? 2 * (word >> (32 - BITS)) + 1 : word >> (32 - BITS); }

// Take M away and round; t counts blocks.
DEVICE void finish(double (&s)[8][8], const Terms& terms, Extremes& e, const Outputs& to, i32 t, const Limits& l,
                   const Problem& p) {
  UNROLLED for (int j = 0; j < 8; ++j)
    UNROLLED for (int half = 0; half < 2; ++half) {
      u32 words[4] = {};
      u64 index = ((u64)t * p.rows + to.row_of(half, j)) * p.columns + to.column_of(half, j);
      if (BY_REST && ROUND == MODE_STOCHASTIC) {
        UNROLLED for (int i = 0; i < 4; ++i) words[i] = random_integer(index + 16 * i, p.draw, nullptr);
      } else if (ROUND == MODE_STOCHASTIC && ALIGNED) {
        Words4 drawn = philox(counter_of(index), p.draw);
        words[0] = drawn.x, words[1] = drawn.y, words[2] = drawn.z, words[3] = drawn.w;
      } else if (ROUND == MODE_STOCHASTIC) {
        UNROLLED for (int i = 0; i < 4; ++i) words[i] = random_word(index + 16 * i, p.draw);
      }
      UNROLLED for (int i = half; i < 8; i += 2) {
        s[i][j] = rounded(block_sum(s[i][j], terms, i, j), integer_of(words[i / 2]), e, l, p.rounding);
      }
    }
}

DEVICE bool begin(double (&s)[8][8], Extremes& e, const Outputs& to, const Limits& l, const Problem& p) {
  bool good = true;
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      s[i][j] = 0.0;
      i64 row = to.row_of(i, j), column = to.column_of(i, j);
      if (to.c == nullptr || blockIdx.z != 0 || row >= p.rows || column >= p.columns) continue;
      double c = addend_at(to.c, p, row, column);
#if PROMOTES
      write_sum(to.sums, p, blockIdx.z, row, column, c);
#else
      good &= fabs(c) < as_double(INFINITY_BITS);
      s[i][j] = rounded(c + 0.0, 0, e, l, p.rounding);
#endif
    }
  return good;
}

DEVICE void end_chains(double (&s)[8][8], const Outputs& to, const Problem& p, bool first, i64 t, const Order& order) {
  UNROLLED for (int i = 0; i < 8; ++i) {
    __syncwarp();  // a barrier for the compiler, which would read all outer sums before it adds to the first
    UNROLLED for (int j = 0; j < 8; ++j) {
      i64 row = to.row_of(i, j), column = to.column_of(i, j);
      if (row < p.rows && column < p.columns) promote<PROMOTES>(to.sums, p, row, column, s[i][j], first, t, order);
      s[i][j] = 0.0;
    }
  }
}

KERNEL __launch_bounds__(THREADS, 1)
aligned_fp64_fma(const u8* records_a, const u8* records_b, const u32* flags, const void* c, const Order order,
                 i32 blocks, u8* marks, void* sums, const Limits l, const Problem p) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  const Panels panels = SWAPPED ? panels_of(p.columns, p.rows) : panels_of(p.rows, p.columns);
  u8* mark = marks + (SWAPPED ? (i64)panels.b * panels.count_a + panels.a : panels.tile());
  if (panels.is_flagged(flags)) {
    if (threadIdx.x == 0) *mark = 1;
    return;
  }
  i32 begun = order.part_blocks[2 * blockIdx.z], count = order.part_blocks[2 * blockIdx.z + 1] - begun;
  const u8* a = records_a + ((i64)panels.a * blocks + begun) * RECORDS * ROW_BYTES;
  const u8* b = records_b + ((i64)panels.b * blocks + begun) * RECORDS * COLUMN_BYTES;
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2 * 64, warp_column = warp / 2 * 32;
  Lane at = {warp_row, lane / 4, warp_column, lane % 4};
  Outputs to = {sums, c, panels.a * PANEL + warp_row + lane / 4, panels.b * PANEL + warp_column + lane % 4 * 2};
  double s[8][8];
  Extremes e = {0, ~0u};
  bool good = begin(s, e, to, l, p), joined = PROMOTES && c != nullptr && blockIdx.z == 0;
  Fields fields;
  Terms terms;
  constexpr int STEPS = RECORDS == 1 ? 1 : 2 * RECORDS;  // of a block: its records twice, where there are several
  auto bring = [&](i32 slot, i32 i) {
    const i64 record = RECORDS == 1 ? i : (i64)(i / STEPS) * RECORDS + i % RECORDS;
    copy_words<ROW_BYTES / 16, THREADS>(stages[slot].a, a + record * ROW_BYTES);
    copy_words<COLUMN_BYTES / 16, THREADS>(stages[slot].b, b + record * COLUMN_BYTES);
  };
  bring_first<STAGES>(0, count * STEPS, bring);
  for (i32 i = 0, slot = 0; i < count * STEPS; ++i, slot = slot_after<STAGES>(slot)) {
    bring_next<STAGES>(slot, i, count * STEPS, bring);
    const Stage& stage = stages[slot];
    const i32 step = i % STEPS, t = i / STEPS;
    if (step == 0) clear(fields);
    if (step < RECORDS) compare_exponents(fields, stage, at);
    if (RECORDS > 1 && step < RECORDS) continue;
    if (step % RECORDS == 0) start(s, terms, fields, stage, at, l);
    else if (TERMS == MODE_TOWARD_ZERO) add_negatives(s, stage, at);
    add_products(s, terms, stage, at);
    if (step < STEPS - 1) continue;
    finish(s, terms, e, to, begun + t, l, p);
    if (PROMOTES && order.ends[begun + t]) {
      end_chains(s, to, p, !joined, begun + t, order);
      joined = true;
    }
  }
#if !PROMOTES
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      i64 row = to.row_of(i, j), column = to.column_of(i, j);
      if (row < p.rows && column < p.columns) write_sum(sums, p, blockIdx.z, row, column, s[i][j] + 0.0);
    }
#endif
  if (!good || !is_right(e, l)) *mark = 1;
}
