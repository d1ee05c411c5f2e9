// SPDX-License-Identifier: Apache-2.0
// The parts of aligned_fp64_mma.cu: products on the fp64 tensor core; how the sum of a block begins and ends; tiles,
// the addend, promotion and results of chains.
#pragma once

// Fragments and their products.

// d += a b for 16 rows, 8 columns and 4 QUADS places.
template <int QUADS>
DEVICE void floor_chain(double (&d)[4], const double (&a)[2 * QUADS], const double (&b)[QUADS]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (QUADS == 4) {
    dmma_rz_16x8x16(d, a, b);
    return;
  } else if constexpr (QUADS == 2) {
    dmma_rz_16x8x8(d, a, b);
    return;
  }
#endif
  double upper[2] = {d[0], d[1]}, lower[2] = {d[2], d[3]};
  UNROLLED for (int q = 0; q < QUADS; ++q) {
    dmma_rz_8x8x4(upper, a[2 * q], b[q]);
    dmma_rz_8x8x4(lower, a[2 * q + 1], b[q]);
  }
  d[0] = upper[0], d[1] = upper[1], d[2] = lower[0], d[3] = lower[1];
}

// Load the 16 rows `group` at `count` groups of 4 places from place `4 first` on: value[2 q + i] is row g + 8 i, place
// 4 q + t of lane (g, t).
template <int QUADS, bool BOTH_WORDS>
DEVICE void load_values(double (&value)[2 * QUADS], const u8* values, int group, int first, int count, int lane) {
  const Words4* from = (const Words4*)values;
  UNROLLED for (int q = 0; q < QUADS; ++q) {
    if (q >= count) continue;
    if constexpr (BOTH_WORDS) {
      const Words4 w = from[(group * (SPAN / 4) + first + q) * 32 + lane];
      value[2 * q] = __hiloint2double(w.y, w.x);
      value[2 * q + 1] = __hiloint2double(w.w, w.z);
    } else {
      const Words2* w = (const Words2*)(from + (group * GROUPS8 + (first + q) / 2) * 32 + lane) + (first + q) % 2;
      value[2 * q] = __hiloint2double(w->x, 0);
      value[2 * q + 1] = __hiloint2double(w->y, 0);
    }
  }
}

// Load the 8 columns `half` of the 16 rows `group`: value[q] is column g, place 4 q + t.
template <int QUADS>
DEVICE void load_column(double (&value)[QUADS], const u8* values, int group, int half, int first, int lane) {
  const Words4* from = (const Words4*)values;
  UNROLLED for (int q = 0; q < QUADS; ++q) {
    const u32* w = (const u32*)(from + (group * GROUPS8 + (first + q) / 2) * 32 + lane) + (first + q) % 2 + half * 2;
    value[q] = __hiloint2double(*w, 0);
  }
}

// Sum the powers of 16 rows and the 8 columns j of 32.
DEVICE void add_powers(float (&sums)[4], const u8* a, const u8* b, int a_group, int b_group, int j, int lane) {
  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
  UNROLLED for (int pair = 0; pair < PAIRS8; ++pair) {
    const Words4 w = *(const Words4*)(a + power_place(ROWS_A, a_group, 2 * pair, lane));
    const Words2 v = *(const Words2*)(b + power_place(ROWS_B, b_group + j / 2, 2 * pair, lane) + j % 2 * 8);
    const u32 left[4] = {w.x, w.y, w.z, w.w}, right[2] = {v.x, v.y};
    hmma_bf16_16x8x16(sums, left, right);
  }
  if (SPAN % 16 == 0) return;
  const Words2 w = *(const Words2*)(a + power_place(ROWS_A, a_group, 2 * PAIRS8, lane));
  const u32 left[4] = {w.x, w.y, 0, 0};
  const u32 right[2] = {*(const u32*)(b + power_place(ROWS_B, b_group + j / 2, 2 * PAIRS8, lane) + j % 2 * 4), 0};
  hmma_bf16_16x8x16(sums, left, right);
}

// A block's sum: in float64, or short ones in float32.

#if SINGLE

// Chains of the kernels on the fp64 tensor core in float32, where sums have at most 21 bits and accumulators at most
// 21: the low word of the running sum is then the sum itself, and nothing but the chain on the tensor core is done in
// float64.
#define FIELD_PLACE 23  // where the exponent stands in a field: a float32
#define M_HIGH (((1023 - 127 + 52 - FRACTION) << 20) + (1 << 19))  // from a field / 8 to the high word of M
#define LOW_FLOAT (1.5f * (1 << 23) / (1 << FRACTION))  // plus n 2^-F, |n| < 2^22, its bits are its own plus n
#define SCALE ((254u + FRACTION) << 23)  // less a field 2^E: 2^(F - E), in range for all E that blocks of 8 or more have

struct State {
  double sum[HALVES][4][4];   // M + n u while a block runs, n an integer plus the bits of LOW_FLOAT
  float chain[HALVES][4][4];  // 2^E while a block runs, then the chain
};

// As if a block had ended with the sum c.
DEVICE void begin_chain(State& s, const Constants& k, int h, int j, int i, double c) {
  const u32 bits = as_bits((float)c);
  const i32 significand = bits << 1 == 0 ? 0 : (i32)((bits & 0x7FFFFFu) | 0x800000u) >> 3;
  s.chain[h][j][i] = significand == 0 ? 0.0f : as_float((bits & 0x7F800000u) + ((u32)(FRACTION - 20) << 23));
  s.sum[h][j][i] = __hiloint2double(0, __float_as_int(LOW_FLOAT) + ((i32)bits < 0 ? -significand : significand));
}

// Where FRACTION is at most ACC_MANTISSA the next block truncates the chain to a grid that is no finer than the
// accumulator's; only the last block of a chain has to.
DEVICE void finish(State& s, const Constants& k, int h, int j, int i, bool last) {
  const float units = __fadd_rn(__int_as_float(__double2loint(s.sum[h][j][i])), -LOW_FLOAT);
  const float chain = __fmul_rn(units, s.chain[h][j][i]);
  const u32 cut = last || FRACTION > ACC_MANTISSA || DOWN ? 0xFFFFFFFFu << (23 - ACC_MANTISSA) : 0xFFFFFFFFu;
  s.chain[h][j][i] = as_float(as_bits(chain) & cut);
}

DEVICE double chain_of(const State& s, int h, int j, int i) { return (double)s.chain[h][j][i]; }
DEVICE void clear_chain(State& s, int h, int j, int i) { s.chain[h][j][i] = 0.0f; }
DEVICE i32 field_in(const State& s, int h, int j, int i) { return __float_as_int(s.chain[h][j][i]); }

// Begin a block with `negative` negative products, whose exponents have the field `products`.
DEVICE void start(State& s, const Constants& k, int h, int j, int i, i32 products, u32 negative) {
  const float chain = s.chain[h][j][i];
  const i32 field = __float_as_int(fmaxf(fabsf(chain), __int_as_float(products))) & 0x7F800000;
  const float units = __fmul_rn(chain, as_float(SCALE - (u32)field));  // the chain on the grid
  const i32 cut = DOWN ? __float2int_rd(units) : __float2int_rz(units);
  s.sum[h][j][i] = __hiloint2double((field >> 3) + M_HIGH, __float_as_int(LOW_FLOAT) + cut + (i32)negative);
  s.chain[h][j][i] = __int_as_float(field);
}

#else

// Chains of the kernels on the fp64 tensor core in float64: sums of any length up to 44 bits, accumulators of up to 24
// bits.
#define FIELD_PLACE 20  // where the exponent stands in a field: the high word of M
#define SHIFT (((52 - FRACTION) << 20) + (1 << 19))  // from the exponent field of a chain to a field

// M's low word is Constants::low: what is added to the sum's carries nothing. DOUBLE_M: M is a double that lives on and
// gets a new high word in each block, which saves copies of the low one. ptxas (12.9 to 13.5, sm_90) loses the low word
// of such a double where it spills it (tests/cuda/test_gemm_methods.py, spills), so that without DOUBLE_M, or
// with too few registers, the high word is kept alone and M made anew at every use.
#if DOUBLE_M
typedef double Field;
DEVICE Field field_of(i32 high, Field last) { return __hiloint2double(high, __double2loint(last)); }
DEVICE i32 high_of(Field field) { return __double2hiint(field); }
DEVICE double constant_of(const Constants&, Field field) { return field; }
#else
typedef i32 Field;
DEVICE Field field_of(i32 high, Field) { return high; }
DEVICE i32 high_of(Field field) { return field; }
DEVICE double constant_of(const Constants& k, Field field) { return __hiloint2double(field, k.low); }
#endif

struct State {
  double sum[HALVES][4][4];  // M + sum while a block runs, then the chain
  Field field[HALVES][4][4];  // M, or its high word
};

// As if a block had ended with the sum c: M, which is taken away first, is a number so tiny that only a sum of zero
// notices, which therefore is M itself.
DEVICE void begin_chain(State& s, const Constants& k, int h, int j, int i, double c) {
#if DOUBLE_M
  s.field[h][j][i] = __hiloint2double(0, k.low);
#else
  s.field[h][j][i] = 0;
#endif
  s.sum[h][j][i] = c == 0.0 ? constant_of(k, s.field[h][j][i]) : c;
}

DEVICE void finish(State& s, const Constants& k, int h, int j, int i, bool) {
  const double d = __dadd_rn(s.sum[h][j][i], -constant_of(k, s.field[h][j][i]));
  s.sum[h][j][i] = __longlong_as_double(__double_as_longlong(d) & (-1ll << (52 - ACC_MANTISSA)));
}

DEVICE double chain_of(const State& s, int h, int j, int i) { return s.sum[h][j][i]; }
DEVICE void clear_chain(State& s, int h, int j, int i) { s.sum[h][j][i] = 0.0; }
DEVICE i32 field_in(const State& s, int h, int j, int i) { return high_of(s.field[h][j][i]); }

// Begin a block with `negative` negative products, whose exponents have the field `products`.
DEVICE void start(State& s, const Constants& k, int h, int j, int i, i32 products, u32 negative) {
  const double c = s.sum[h][j][i];
  const i32 high = __double2hiint(c), field = max((high & 0x7FF00000) + SHIFT, products);
  s.field[h][j][i] = field_of(field, s.field[h][j][i]);
  const double sum = __fma_rz(c, k.enlarged, constant_of(k, s.field[h][j][i]));
  const u32 terms = DOWN ? 0 : negative + ((u32)high >> 31);
  s.sum[h][j][i] = LONG ? __longlong_as_double(__double_as_longlong(sum) + terms)
                        : __hiloint2double(__double2hiint(sum), __double2loint(sum) + (i32)terms);
}

#endif

// Chains.

struct Tile { i32 row, column; };

// The rows and columns of a lane: rows row + 8 i, columns column + 8 j + (0, 1).
struct Place {
  i32 row, column;
  const i32* a_bases;
  const i32* b_bases;
};

// Neighbouring blocks share panels: 16 tiles down, then the next column.
DEVICE Tile tile_of(const Sums& s) {
  const i32 high = (s.m + ROWS_A - 1) / ROWS_A, wide = (s.n + ROWS_B - 1) / ROWS_B, band = 16 * wide;
  const i32 top = (i32)blockIdx.x / band * 16, rest = (i32)blockIdx.x % band, rows = min(16, high - top);
  return {(top + rest % rows) * ROWS_A, rest / rows * ROWS_B};
}

DEVICE void mark(const Sums& s, const Tile tile) {
  s.marks[(i64)(tile.row / 128) * ((s.n + 127) / 128) + tile.column / 128] = 1;
}

// Return true if a tile has neither NaN nor Inf, nor (WIDE) exponents that could lead above the accumulator's range;
// `least` becomes the smallest field of M that may be trusted.
DEVICE bool within_range(const Floor& f, const Tile tile, const i32* a_bases, const i32* b_bases, i32& least,
                         i32* scratch) {
  bool special = false;
  if (WIDE && threadIdx.x < 4) scratch[threadIdx.x] = threadIdx.x & 1 ? -FAR : FAR;
  if (WIDE) __syncthreads();
  for (int i = threadIdx.x; i < ROWS_A + ROWS_B; i += THREADS) {
    const bool first = i < ROWS_A;
    const i32 base = first ? a_bases[tile.row + i] : b_bases[tile.column + i - ROWS_A];
    special |= base == ROW_OF_SPECIALS;
    if (WIDE && base != ROW_OF_ZEROS) {
      atomicMin(scratch + (first ? 0 : 2), base);
      atomicMax(scratch + (first ? 1 : 3), base);
    }
  }
  if (__syncthreads_or(special)) return false;
  if (!WIDE) return true;
  const i32 smallest = scratch[0] + scratch[2], largest = scratch[1] + scratch[3];
  least = (f.zero_field + max(f.least_exponent, f.lowest - smallest)) << FIELD_PLACE;
  __syncthreads();
  return largest <= f.highest;
}

DEVICE i32 base_of(const i32* bases, i32 row) { return bases[row] == ROW_OF_ZEROS ? 0 : bases[row]; }

// 2^(base of row + base of column), which results are multiplied by.
DEVICE double unit_of(const Place& p, int h, int j, int i) {
  if (!WIDE) return 1.0;
  const i32 a = base_of(p.a_bases, p.row + 16 * h + 8 * (i >> 1)), b = base_of(p.b_bases, p.column + 8 * j + (i & 1));
  return __hiloint2double((1023 + a + b) << 20, 0);
}

// What a chain holds, in float32: exact.
DEVICE float chain_value(const State& s, const Place& p, int h, int j, int i) {
#if SINGLE && !WIDE
  return s.chain[h][j][i];
#else
  return __double2float_rn(chain_of(s, h, j, i) * unit_of(p, h, j, i));
#endif
}

DEVICE bool inside(const Sums& s, const Place& p, int h, int j, int i) {
  return p.row + 16 * h + 8 * (i >> 1) < s.m && p.column + 8 * j + (i & 1) < s.n;
}

struct alignas(16) Outer { float sum[4]; };

// The outer sums of a lane's tile of 16 x 8.
DEVICE Outer* outer_of(float* outer, int h, int j) { return (Outer*)(outer + (h * 4 + j) * 4 * THREADS); }

// Set the chains to the addend, or to +0; return true if an addend is out of range.
DEVICE bool begin(State& s, const Constants& k, const Floor& f, const Sums& sums, const Place& p, float* outer) {
  // A block without products has the grid of an empty sum of powers, which c must lie on.
  const i32 least = (f.base >> FIELD_PLACE) - f.zero_field + (ACC_MANTISSA > FRACTION ? ACC_MANTISSA - FRACTION : 0);
  bool bad = false;
  UNROLLED for (int h = 0; h < HALVES; ++h) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      UNROLLED for (int i = 0; i < 4; ++i) {
        float c = 0.0f;
        if (sums.c != nullptr && blockIdx.z == 0 && inside(sums, p, h, j, i)) {
          const i64 row = p.row + 16 * h + 8 * (i >> 1), column = p.column + 8 * j + (i & 1);
          c = sums.c[row * sums.c_row + column * sums.c_column];
        }
        if (PROMOTE) outer_of(outer, h, j)->sum[i] = c;
        const u32 exponent = as_bits(c) >> 23 & 0xFFu;
        bad |= c != 0.0f && (exponent == 0 || exponent >= 127 + 126);
        if (PROMOTE) c = 0.0f;
        const double scaled = (double)c / unit_of(p, h, j, i);
        const i32 scaled_exponent = ((__double2hiint(scaled) >> 20) & 0x7FF) - 1023;
        bad |= c != 0.0f && (scaled_exponent < least || (WIDE && (fabs(scaled) > 1e30 || fabs(scaled) < 1e-30)));
        begin_chain(s, k, h, j, i, scaled);
      }
    }
  }
  return bad;
}

// Add the chains of a tile to the outer sums, in float32 to nearest even, and set them to +0.
DEVICE void promote_tile(State& s, const Sums& sums, const Place& p, float* outer, int h, int j, i32 block) {
  Outer t = *outer_of(outer, h, j);
  UNROLLED for (int i = 0; i < 4; ++i) {
    const float chain = chain_value(s, p, h, j, i);
    if (PROMOTE == 1) {
      t.sum[i] = __fadd_rn(t.sum[i], chain);
    } else {
      const i64 row = min(p.row + 16 * h + 8 * (i >> 1), sums.m - 1);
      const i64 column = min(p.column + 8 * j + (i & 1), sums.n - 1);
      const i32 place = sums.scale_places[block];
      const float a = sums.scale_a[row * sums.scale_a_row + place * sums.scale_a_group];
      const float b = sums.scale_b[column * sums.scale_b_row + place * sums.scale_b_group];
      t.sum[i] = PROMOTE == 2 ? __fmaf_rn(chain, __fmul_rn(a, b), t.sum[i]) : __fmaf_rn(__fmul_rn(chain, a), b, t.sum[i]);
    }
    clear_chain(s, h, j, i);
  }
  *outer_of(outer, h, j) = t;
}

DEVICE void write_tile(const State& s, const Sums& sums, const Place& p, float* outer, int h, int j) {
  UNROLLED for (int i = 0; i < 4; ++i) {
    if (!inside(sums, p, h, j, i)) continue;
    const i64 row = p.row + 16 * h + 8 * (i >> 1), column = p.column + 8 * j + (i & 1);
    const float value = PROMOTE ? outer_of(outer, h, j)->sum[i] : chain_value(s, p, h, j, i);
    sums.out[blockIdx.z * sums.part + row * sums.row + column * sums.column] = value;
  }
}
