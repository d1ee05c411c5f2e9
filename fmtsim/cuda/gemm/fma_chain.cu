// SPDX-License-Identifier: Apache-2.0
// Products of units that add in order (fp32_fma, fp64_fma, exact, chains in any accumulator): fused multiply-adds one
// after another, or exact sums of a block and the running sum, each rounded once, to nearest even, to ACC_MANTISSA
// bits.
//
// NUMBERS: what sums are computed in.
//   HALVES, BFLOATS  the accumulator is float16 or bfloat16 and the instruction does all, two columns at once.
//   FLOATS           float32 with ACC_MANTISSA = M = 23: the instruction again. With M <= 10 it rounds the sum of a
//                    product and the running sum, both of at most M + 1 bits, to 24 >= 2 (M + 1) + 2 bits; a second
//                    rounding to M + 1 bits is innocuous: no sum of two such numbers is close to, but not at, a midpoint.
//   DOUBLES          float64 with M = 52: the instruction again. With fewer bits the same in 53 bits, where the sum is
//                    exact, or where its error does no harm (`is_right`).
//
// Macros: NUMBERS, ACC_MANTISSA, BLOCK (products of a block where a stage holds whole blocks, else 0), CLAMPED, BOUNDED
// (sums may leave the accumulator's range), PROMOTES (chains are added to an outer sum: 1 in float32, 2 in another
// way), SIGNED (zeros keep their sign), STAGES, RESIDENT, UNROLL.
#include "fma_chain.cuh"

// The instruction rounds to the accumulator, as those of pairs do; else whether doubles are right is known behind them.
#define NATIVE (ACC_MANTISSA == 52 || (NUMBERS == FLOATS && ACC_MANTISSA == 23))
#define WATCHED (NUMBERS == DOUBLES && !NATIVE)
#define CUT ((NUMBERS == DOUBLES ? 52 : 23) - ACC_MANTISSA)

struct alignas(8) Limits {
  i32 emin, emax;   // of the accumulator
  i32 growth;       // ceil(log2) of the number of all products
  i32 of_block;     // and of a block's
  i32 block;        // places of a block
  i32 lowest;       // high word of 2^emin
};

#if PAIRS
typedef u32 Sum;
DEVICE Sum zero() { return 0; }
DEVICE Sum fused(Word a, Word b, Sum c) { return NUMBERS == HALVES ? fma_half2(a, b, c) : fma_bfloat2(a, b, c); }
DEVICE float value_of(Sum s, int half) {
  return NUMBERS == HALVES ? float16(s >> (16 * half) & 0xFFFF) : as_float(half ? s & 0xFFFF0000u : s << 16);
}
#elif NUMBERS == FLOATS
typedef float Sum;
DEVICE Sum zero() { return 0.0f; }
DEVICE Sum fused(Word a, Word b, Sum c) { return __fmaf_rn(a, b, c); }
#else
typedef double Sum;
DEVICE Sum zero() { return 0.0; }
DEVICE Sum fused(Word a, Word b, Sum c) { return __fma_rn(a, b, c); }
#endif

// Of a thread's running sums, as bits, of doubles the high words alone: the largest magnitude (clamped: of 1.5 * 2^52
// last places), and twice the smallest but zero, less one.
struct Extremes {
  i32 largest;
  u32 smallest;
};

DEVICE void watch(Extremes& e, Sum s) {
#if WATCHED
  i32 high = __double2hiint(s);
  if (!CLAMPED) e.smallest = min(e.smallest, 2 * (u32)high - 1);
  if (BOUNDED && !CLAMPED) e.largest = max(e.largest, high & 0x7FFFFFFF);
#elif NUMBERS == FLOATS
  if (BOUNDED) e.largest = max(e.largest, __float_as_int(s) & 0x7FFFFFFF);
#endif
}

#define ABOVE ((CUT << 20) + (1 << 19))  // from the high word of 2^e to that of 1.5 * 2^52 last places

// x rounded to M = ACC_MANTISSA bits in two operations, with cut = p - 1 - M >= M + 2 and p the bits of the arithmetic:
//     g = RN((2^cut - 1) x),   r = 2^cut x - g      (one fused multiply-add, which is exact)
// Let x > 0 have the exponent e, and u = 2^(e - M). Where g is at least 2^(e + cut) it is a multiple of u, as 2^cut x
// is: r is x rounded to a multiple of u. A tie goes to the side that makes g / u even; there x ends in zeros, 2^cut x /
// u is even, and so is r / u. Where (2^cut - 1) x lies below 2^(e + cut), g is a multiple of u / 2; but then x lies at
// most u / 4 above 2^e, to which it rounds with either. (With 2^cut + 1 and g one binade above, r would be wrong by u.)
// This sees neither subnormals of the accumulator nor its largest number: either none of that can come up, or CLAMPED
// adds and takes away 1.5 * 2^52 last places instead, or the tile is marked.
DEVICE Sum rounded(Sum x, Extremes& e, const Limits& l) {
#if WATCHED && CLAMPED
  i32 high = __viaddmax_s32(__double2hiint(x) & 0x7FF00000, ABOVE, l.lowest + ABOVE);
  double places = __hiloint2double(high, 0);
  e.largest = max(e.largest, high);
  return __dadd_rn(__dadd_rn(x, places), -places);
#elif WATCHED
  constexpr double power = (double)(1ull << CUT);
  return __fma_rn(x, power, -__dmul_rn(x, power - 1.0));
#elif NUMBERS == FLOATS && !NATIVE
  constexpr float power = (float)(1u << CUT);
  return __fmaf_rn(x, power, -__fmul_rn(x, power - 1.0f));
#else
  return x;
#endif
}

// Return true if every sum of a tile was rounded as its exact value is, products being multiples of 2^low and below
// 2^high.
//
// One product after another: let |c| >= |p| for the running sum c and a product p of P bits with P + ACC_MANTISSA <=
// 49. A sum that is not exact has a last place above p's, so |p| is less than a quarter of c's last place: the sum lies
// away from every midpoint, and rounds to c. Let |c| < |p|, c not zero. Then the sum is exact if its last place, at
// most 2^(high - 52), divides c, which is a multiple of 2^low and of the accumulator's last place at the smallest c.
// Blocks: all numbers are multiples of 2^low, so that sums below 2^(low + 53) are exact.
DEVICE bool is_right(const Limits& l, const Extremes& e, i32 low, i32 high) {
#if WATCHED
  i32 smallest = e.smallest == ~0u ? NO_LOW : (i32)((e.smallest / 2 + 1) >> 20) - 1023;
  i32 largest = (e.largest >> 20) - 1023 - (CLAMPED ? CUT : 0);
  if (CLAMPED) smallest = l.emin;
  if (!CLAMPED && low < l.emin - ACC_MANTISSA && smallest < l.emin) return false;
  if (BOUNDED && largest > l.emax - CLAMPED) return false;  // clamped, of sums before they are rounded
  if (BLOCK == 1) return high - 52 <= max(low, smallest - ACC_MANTISSA);
  return max(largest + 1, high + l.of_block) + 1 <= low + 53;
#else
  return !BOUNDED || e.largest < (l.emax + 128) << 23;
#endif
}

struct Stage { Word a[DEPTH][PANEL], b[DEPTH][PANEL]; };

DEVICE void fetch(Stage* to, const Word* a, const Word* b, i64 place) {
  constexpr int COUNT = DEPTH * PANEL / CHUNK;
  copy_words<COUNT, THREADS>(to->a, a + place * PANEL);
  copy_words<COUNT, THREADS>(to->b, b + place * PANEL);
}

struct Lane { i32 a, b; };  // where a lane's words begin

DEVICE void add_place(Sum (&c)[8][8], const Stage& stage, i32 place, const Lane& lane) {
  Word x[8], y[8];
  load<Word, 8, 8>(x, stage.a[place] + lane.a);
  load<Word, 8, 4>(y, stage.b[place] + lane.b);
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) c[i][j] = fused(x[i], y[j], c[i][j]);
}

DEVICE void end_block(Sum (&c)[8][8], Extremes& e, const Limits& l) {
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      c[i][j] = rounded(c[i][j], e, l);
      watch(e, c[i][j]);
    }
}

// Outputs of a thread.
struct Outputs {
  void* sums;
  const void* c;
  i32 row, column;

  DEVICE i64 row_of(int i) const { return row + 8 * i; }
  DEVICE i64 column_of(int j, int half) const { return column + (j / 2 * 8 + j % 2) * (PAIRS ? 2 : 1) + half; }
};
#define EACH_HALF for (int half = 0; half < (PAIRS ? 2 : 1); ++half)

// A sum as it leaves the kernel.
#if PAIRS
DEVICE float number(Sum s, int half) { return value_of(s, half); }
#else
DEVICE Sum number(Sum s, int) { return s; }
#endif
DEVICE auto result(Sum s, int half) { return SIGNED ? number(s, half) : number(s, half) + 0.0f; }

// Begin a part at c or at zero; false where c is not finite but has to be. `low` becomes at most c's last bit.
DEVICE bool begin(Sum (&s)[8][8], Extremes& e, const Outputs& to, const Limits& l, const Problem& p, i32& low) {
  bool good = true;
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      s[i][j] = zero();
      if (to.c == nullptr || blockIdx.z != 0) continue;
      UNROLLED EACH_HALF {
        i64 row = to.row_of(i), column = to.column_of(j, half);
        if (row >= p.rows || column >= p.columns) continue;
        double c = addend_at(to.c, p, row, column);
#if PROMOTES
        write_sum(to.sums, p, blockIdx.z, row, column, c);
#elif PAIRS
        s[i][j] |= code_of((float)c) << (16 * half);
#else
        s[i][j] = (Sum)c;
        u64 bits = as_u64(c) & ~SIGN_BIT;
        good &= bits < INFINITY_BITS;
        if (bits) low = min(low, (i32)(bits >> 52) - 1076 + __ffsll((i64)(bits | 1ull << 52)));
        if (CLAMPED) rounded(s[i][j], e, l);
        watch(e, s[i][j]);
#endif
      }
    }
  return good;
}

// Add chains to their outer sums and begin others.
DEVICE void end_chains(Sum (&s)[8][8], const Outputs& to, const Problem& p, bool first, i64 t, const Order& order) {
  UNROLLED for (int i = 0; i < 8; ++i) {
    __syncwarp();  // a barrier for the compiler, which would read all outer sums before it adds to the first
    UNROLLED for (int j = 0; j < 8; ++j) {
      UNROLLED EACH_HALF {
        i64 row = to.row_of(i), column = to.column_of(j, half);
        if (row < p.rows && column < p.columns)
          promote<PROMOTES>(to.sums, p, row, column, result(s[i][j], half), first, t, order);
      }
      s[i][j] = zero();
    }
  }
}

DEVICE void write(const Sum (&s)[8][8], const Outputs& to, const Problem& p) {
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j)
      UNROLLED EACH_HALF {
        i64 row = to.row_of(i), column = to.column_of(j, half);
        if (row < p.rows && column < p.columns) write_sum(to.sums, p, blockIdx.z, row, column, result(s[i][j], half));
      }
}

// The lowest last bit of any product of two panels, and a power of two above them all.
DEVICE void find_span(i32& low, i32& high, const Span* a, const Span* b, i64 first, i64 stop) {
#if WATCHED
  __shared__ i32 extremes[2];
  if (threadIdx.x == 0) extremes[0] = NO_LOW, extremes[1] = 2 * NO_HIGH;
  __syncthreads();
  for (i64 place = first + threadIdx.x; place < stop; place += THREADS) {
    Span x = a[place], y = b[place];
    if (x.high == NO_HIGH || y.high == NO_HIGH) continue;
    low = min(low, x.low + y.low);
    high = max(high, x.high + y.high + 2);
  }
  atomicMin(extremes, low);
  atomicMax(extremes + 1, high);
  __syncthreads();
  low = extremes[0], high = extremes[1];
#endif
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
fma_chain(const Word* words_a, const Word* words_b, const Span* spans_a, const Span* spans_b, const u32* flags,
          const void* c, const Order order, i64 places, u8* marks, void* sums, const Limits l, const Problem p) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  const Panels panels = panels_of(p.rows, p.columns, COLUMNS);
  u8* mark = marks + panels.tile();
  i32 begun = order.part_blocks[2 * blockIdx.z], stop = order.part_blocks[2 * blockIdx.z + 1];
  i64 first = (i64)begun * l.block, end = (i64)stop * l.block;
  i32 low = NO_LOW, high = 2 * NO_HIGH;
  find_span(low, high, spans_a + panels.a * places, spans_b + panels.b * places, first, end);
  bool hopeless = NUMBERS >= FLOATS && !NATIVE && panels.is_flagged(flags);
#if WATCHED
  hopeless |= BOUNDED ? BLOCK != 1 && high + l.of_block + 1 > low + 53 : high + l.growth + 1 > l.emax;
#endif
  if (hopeless) {
    if (threadIdx.x == 0) *mark = 1;
    return;
  }
  const Word *a = words_a + panels.a * places * PANEL, *b = words_b + panels.b * places * PANEL;
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2, warp_column = warp / 2;
  Lane at = {warp_row * 64 + lane / 4 * CHUNK, warp_column * 32 + lane % 4 * CHUNK};
  Outputs to = {sums, c, panels.a * PANEL + warp_row * 64 + lane / 4,
                panels.b * COLUMNS + (warp_column * 32 + lane % 4 * 2) * (PAIRS ? 2 : 1)};
  Sum s[8][8];
  Extremes e = {0, ~0u};
  bool good = begin(s, e, to, l, p, low);
  i32 count = (i32)((end - first + DEPTH - 1) / DEPTH), block = begun, left = l.block / DEPTH;
  bool joined = PROMOTES && c != nullptr && blockIdx.z == 0;
  auto bring = [&](i32 slot, i32 i) { fetch(stages + slot, a, b, first + (i64)i * DEPTH); };
  bring_first<STAGES>(0, count, bring);
  for (i32 i = 0, slot = 0; i < count; ++i, slot = slot_after<STAGES>(slot)) {
    bring_next<STAGES>(slot, i, count, bring);
    const Stage& stage = stages[slot];
#if BLOCK
    i32 here = min(DEPTH / BLOCK, stop - block);
    u32 over = PROMOTES ? __ballot_sync(~0u, lane < here && order.ends[block + min(lane, here - 1)] != 0) : 0;
#pragma unroll UNROLL
    for (i32 t = 0; t < here; ++t) {
      UNROLLED for (int place = 0; place < BLOCK; ++place) add_place(s, stage, t * BLOCK + place, at);
      end_block(s, e, l);
      if (PROMOTES && (over >> t & 1)) {
        end_chains(s, to, p, !joined, block + t, order);
        joined = true;
      }
    }
    block += here;
#else
#pragma unroll UNROLL
    for (i32 place = 0; place < DEPTH; ++place) add_place(s, stage, place, at);
    if (--left == 0) {
      end_block(s, e, l);
      left = l.block / DEPTH;
      if (PROMOTES && order.ends[block]) {
        end_chains(s, to, p, !joined, block, order);
        joined = true;
      }
      ++block;
    }
#endif
  }
  if (!PROMOTES) write(s, to, p);
  if ((WATCHED || BOUNDED) && !(good && is_right(l, e, low, high))) *mark = 1;
}
