// Products of fused units whose terms and sums doubles hold, 64 x 64 outputs a block of threads.
//
// With C = 1.5 * 2^52 u, a fused multiply-add a b + C rounds the product to a multiple n of u, and its bits are those
// of C plus n: the sum of the bits of all terms is the exact sum of the block. The mode of that one rounding makes the
// term rounding: to nearest even, or down. Pushing a by less than the last place of any product turns ties away from
// zero, and makes "down" into "toward zero" for positive products, and one less for negative ones, which are counted.
//
// TERM: MODE_EVEN, MODE_AWAY, MODE_ZERO, MODE_DOWN, or EXACT: a block's products have an exact sum in float64.
// BLOCK: places of a block where that divides 32, else 0. NARROW: sums of terms fit 32 bits. ROUND: the mode of
// sums. PROMOTES: chains join an outer sum.
#define EXACT 8
#include "general_tile.cuh"

#if NARROW
typedef i32 Total;
DEVICE Total bits_of(double x) { return (i32)(u32)as_u64(x); }
#else
typedef i64 Total;
DEVICE Total bits_of(double x) { return (i64)as_u64(x); }
#endif

#if TERM == MODE_EVEN || TERM == MODE_AWAY
DEVICE double term(double a, double b, double c) { return __fma_rn(a, b, c); }
#elif TERM == EXACT
DEVICE double term(double a, double b, double c) { return __fma_rn(a, b, c); }
#else
DEVICE double term(double a, double b, double c) { return __fma_rd(a, b, c); }
#endif

#if ROUND != MODE_EVEN && ROUND != MODE_ZERO
// Whether a discarded fraction of the last place moves a magnitude away from zero.
DEVICE bool moves_away(double rest, bool odd, bool negative, const Rounding& how, u32 w) {
  if (rest == 0) return false;
  if (ROUND == MODE_AWAY) return rest >= 0.5;
  if (ROUND == MODE_HALF_TO_ZERO) return rest > 0.5;
  if (ROUND == MODE_UP) return !negative;
  if (ROUND == MODE_DOWN) return negative;
  if (ROUND == MODE_ODD) return !odd;
  double all = power_of_two(how.bits + (how.variant == 1)), drawn = how.variant == 1 ? 2.0 * w + 1.0 : (double)w;
  return (how.variant == 2 ? rint(rest * all) : floor(rest * all)) + drawn >= all;
}
#endif

// A sum rounded to the accumulator, zeros to +0; x may stand for a number that rounds alike.
DEVICE double to_accumulator(double x, const Problem& p, u32 w) {
  double magnitude = fabs(x), y = magnitude;
  if (p.accumulator.mantissa_bits < 52) {
    int last = exponent_of(x, p.accumulator.min_exponent) - p.accumulator.mantissa_bits;
    double place = power_of_two(last), whole = place * 0x1p52;
#if ROUND == MODE_EVEN
    y = __dadd_rn(__dadd_rn(magnitude, whole), -whole);
#elif ROUND == MODE_ZERO
    y = __dadd_rn(__dadd_rz(magnitude, whole), -whole);
#else
    double counted = __dadd_rz(magnitude, whole);  // its last bit is that of the number of places
    y = __dadd_rn(counted, -whole);
    double rest = (magnitude - y) * power_of_two(-last);
    if (moves_away(rest, as_u64(counted) & 1, x < 0, p.rounding, w)) y += place;
#endif
  }
  if (y > p.accumulator.largest) y = as_double(INFINITY_BITS);
  return y == 0 ? 0.0 : with_sign(y, x < 0);
}

// Running sums lie in shared memory, those of a thread 256 apart; outer sums in the result. Both are touched seldom.
struct Sums {
  const void* c;
  const float *scale_a, *scale_b;
  const i32* scale_places;
  double* running;
  void* sums;
  i64 first_row, first_column;

  DEVICE i64 row(int r) const { return first_row + offset_of(r, threadIdx.x / 16); }
  DEVICE i64 column(int s) const { return first_column + offset_of(s, threadIdx.x % 16); }
};
DEVICE int sum_of(int r, int s) { return (4 * r + s) * 256 + threadIdx.x; }

struct Outputs {
#if TERM == EXACT
  double exact[4][4];
#else
  Total total[4][4];      // of the bits of terms
  double constant[4][4];  // C
#endif
  u32 exponents[4][2];  // the largest of a block, two outputs a word
};

DEVICE void survey(Outputs& o, const Tile& tile, int at, int count) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll (BLOCK == 0 || BLOCK > 8 ? 8 : BLOCK)
  for (int i = 0; i < count; ++i) {
    int k = at + i;
    u32 x[4], y[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Words2 pair = *(const Words2*)&tile.a_exponents[k][offset_of(2 * h, ty)];
      x[2 * h] = pair.x;
      x[2 * h + 1] = pair.y;
      y[h] = tile.b_exponents[k][tx + 16 * h];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) o.exponents[r][h] = __viaddmax_s16x2(x[r], y[h], o.exponents[r][h]);
    }
  }
}

DEVICE void add_terms(Outputs& o, const Tile& tile, int at, int count) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll (BLOCK == 0 || BLOCK > 8 ? 8 : BLOCK)
  for (int i = 0; i < count; ++i) {
    int k = at + i;
    double x[4], y[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      x[h] = tile.a[k][offset_of(h, ty)];
      y[h] = tile.b[k][offset_of(h, tx)];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#if TERM == EXACT
        o.exact[r][s] = term(x[r], y[s], o.exact[r][s]);
#else
        o.total[r][s] += bits_of(term(x[r], y[s], o.constant[r][s]));
#endif
      }
    }
  }
#if TERM == MODE_ZERO
  u32 places = (count == 32 ? ~0u : (1u << count) - 1) << at;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      int row = offset_of(r, ty), column = offset_of(s, tx);
      u32 below = (tile.negative[0][row] ^ tile.negative[1][column]) & tile.present[0][row] & tile.present[1][column];
      o.total[r][s] += __popc(below & places);
    }
  }
#endif
}

DEVICE int largest_of(const Outputs& o, int r, int s) {
  u32 pair = o.exponents[r][s >> 1];
  return (i16)(s & 1 ? pair >> 16 : pair);
}

// The exponents of a block are known: choose each output's grid. Without a term that is not zero the result is zero.
DEVICE void begin_terms(Outputs& o, const Sums& all, const Problem& p) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#if TERM == EXACT
      o.exact[r][s] = 0.0;
#else
      double c = all.running[sum_of(r, s)];
      int e = max(largest_of(o, r, s), c == 0 ? 2 * EMPTY : exponent_of(c, p.accumulator.min_exponent));
      int unit = max(max(e, p.lowest), -700) - p.fraction_bits;
      o.constant[r][s] = as_double((u64)(unit + 52 + 1023) << 52 | 0x8000000000000ull);
      o.total[r][s] = 0;
#endif
    }
  }
}

// The running sum joins as a term; the sum of the block is rounded. An infinite one stays.
DEVICE void end_terms(Outputs& o, const Sums& all, const Problem& p, int count, i64 t) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      double c = all.running[sum_of(r, s)], y;
#if TERM == EXACT
      y = add_to_odd(o.exact[r][s], c);
#else
      double constant = o.constant[r][s];
#if TERM == MODE_ZERO || TERM == MODE_AWAY
      double aligned = term(pushed(c), 1.0, constant);
#else
      double aligned = term(c, 1.0, constant);
#endif
      Total total = o.total[r][s] + bits_of(aligned);
#if NARROW
      y = (double)total;
#else
      total -= (count + 1) * (i64)as_u64(constant);
      y = as_double(0x4338000000000000ull + (u64)total) - 0x1.8p52;
#endif
#if TERM == MODE_ZERO
      y += c < 0 ? 1.0 : 0.0;
#endif
      y *= as_double((as_u64(constant) & INFINITY_BITS) - (52ull << 52));  // u
#endif
#if ROUND == MODE_STOCHASTIC
      u32 w = drawn(p, t, all.row(r), all.column(s));
#else
      u32 w = 0;
#endif
      if (!is_infinite(c)) all.running[sum_of(r, s)] = to_accumulator(y, p, w);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) o.exponents[r][0] = o.exponents[r][1] = 0x80008000u;
}

// Begin a part at c or at zero; false where c is not finite.
DEVICE bool begin_part(Outputs& o, const Sums& all, const Problem& p, int part) {
  bool finite = true;
#pragma unroll
  for (int r = 0; r < 4; ++r) o.exponents[r][0] = o.exponents[r][1] = 0x80008000u;
#pragma unroll 1
  for (int r = 0; r < 4; ++r) {
#pragma unroll 1
    for (int s = 0; s < 4; ++s) {
      i64 row = all.row(r), column = all.column(s);
      bool given = part == 0 && all.c != nullptr && row < p.rows && column < p.columns;
      double start = given ? addend_at(all.c, p, row, column) : 0.0;
      finite &= fabs(start) < as_double(INFINITY_BITS);
#if PROMOTES
      if (row < p.rows && column < p.columns) write_sum(all.sums, p, part, row, column, start);
      start = 0.0;
#endif
      all.running[sum_of(r, s)] = start;
    }
  }
  return finite;
}

#if PROMOTES
DEVICE void end_chains(const Sums& all, const Problem& p, int part, i64 t) {
#pragma unroll 1
  for (int r = 0; r < 4; ++r) {
#pragma unroll 1
    for (int s = 0; s < 4; ++s) {
      i64 row = all.row(r), column = all.column(s);
      if (row >= p.rows || column >= p.columns) continue;
      double outer = sum_at(all.sums, p, part, row, column);
      end_chain(outer, all.running[sum_of(r, s)], p, t, row, column, all.scale_a, all.scale_b, all.scale_places);
      write_sum(all.sums, p, part, row, column, outer);
    }
  }
}
#endif

#if !PROMOTES
DEVICE void write_part(const Sums& all, const Problem& p, int part) {
#pragma unroll 1
  for (int r = 0; r < 4; ++r) {
#pragma unroll 1
    for (int s = 0; s < 4; ++s) {
      i64 row = all.row(r), column = all.column(s);
      if (row < p.rows && column < p.columns) write_sum(all.sums, p, part, row, column, all.running[sum_of(r, s)]);
    }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(256, 2)
tiled_product(const void* a, const void* b, const void* c, const float* scale_a, const float* scale_b,
              const i32* source, const u8* ends, const i32* scale_places, const i32* part_blocks, const u8* marks,
              u8* left, void* sums, const Problem p) {
  DYNAMIC_SHARED(memory);
  Tile& tile = *(Tile*)memory;
  int across = (p.columns + WIDTH - 1) / WIDTH;
  i64 first_row = blockIdx.x / across * WIDTH, first_column = blockIdx.x % across * WIDTH;
  if (is_idle(marks, p, first_row, first_column)) return;
  if (threadIdx.x == 0) tile.refused = 0;
  Side x = Side{a,         scale_a,  p.a_row, p.a_stride, p.scale_a_row, p.scale_a_stride,
                first_row, p.a_type, p.rows,  p.a_emin};
  Side y = Side{b,            scale_b,  p.b_row,   p.b_stride, p.scale_b_row, p.scale_b_stride,
                first_column, p.b_type, p.columns, p.b_emin};
  double* running = (double*)(memory + sizeof(Tile));
  Sums all = Sums{c, scale_a, scale_b, scale_places, running, sums, first_row, first_column};
  Outputs o;
#if BLOCK
  const int block = BLOCK;
#else
  const int block = p.block;
#endif
  int together = max(DEPTH / block, 1);
  for (int part = 0; part < p.parts; ++part) {
    __syncthreads();
    if (!begin_part(o, all, p, part)) tile.refused = 1;
    int stop = part_blocks[2 * part + 1];
    for (int t = part_blocks[2 * part]; t < stop; t += together) {
      int blocks = min(together, stop - t);
#if BLOCK
      if (stage(tile, x, y, source, (i64)t * block, blocks * block, p)) { left[blockIdx.x] = 1; return; }
#endif
      for (int i = 0; i < blocks; ++i) {
#if BLOCK
#if TERM != EXACT
        survey(o, tile, i * BLOCK, BLOCK);
#endif
        begin_terms(o, all, p);
        add_terms(o, tile, i * BLOCK, BLOCK);
#else
        for (int pass = TERM == EXACT; pass < 2; ++pass) {
          if (pass) begin_terms(o, all, p);
          for (int start = 0; start < block; start += DEPTH) {
            int count = min(DEPTH, block - start);
            if (stage(tile, x, y, source, (i64)(t + i) * block + start, count, p)) { left[blockIdx.x] = 1; return; }
            if (pass) add_terms(o, tile, 0, count);
            else survey(o, tile, 0, count);
          }
        }
#endif
        end_terms(o, all, p, block, t + i);
#if PROMOTES
        if (ends[t + i]) end_chains(all, p, part, t + i);
#endif
      }
    }
#if !PROMOTES
    write_part(all, p, part);
#endif
  }
}
