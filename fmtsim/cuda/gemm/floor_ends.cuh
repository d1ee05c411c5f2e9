// Beginning and end of the floor kernel's chains: tiles, the addend, promotion, results.
#pragma once

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

// Say whether a tile has neither NaN nor Inf, nor (WIDE) exponents that could lead above the accumulator's range;
// `least` becomes the smallest field of M that may be trusted.
DEVICE bool within_range(const Floor& f, const Tile tile, const i32* a_bases, const i32* b_bases, i32& least,
                         i32* scratch) {
  bool special = false;
  if (WIDE && threadIdx.x < 4) scratch[threadIdx.x] = threadIdx.x & 1 ? -ROW_OF_ZEROS : ROW_OF_ZEROS;
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
  least = (f.zero_field + max(f.found, f.lowest - smallest)) << FIELD_PLACE;
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

// Set the chains to the addend, or to +0; say whether an addend is out of range.
DEVICE bool begin(State& s, const Constants& k, const Floor& f, const Sums& sums, const Place& p, float* outer) {
  // A block without products has the grid of an empty sum of powers, which c must lie on.
  const i32 least = (f.base >> FIELD_PLACE) - f.zero_field + (KEPT > FRACTION ? KEPT - FRACTION : 0);
  bool bad = false;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float c = 0.0f;
        if (sums.c != nullptr && blockIdx.z == 0 && inside(sums, p, h, j, i)) {
          const i64 row = p.row + 16 * h + 8 * (i >> 1), column = p.column + 8 * j + (i & 1);
          c = sums.c[row * sums.c_row + column * sums.c_column];
        }
        if (PROMOTE) outer_of(outer, h, j)->sum[i] = c;
        const u32 exponent = __float_as_uint(c) >> 23 & 0xFFu;
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
#pragma unroll
  for (int i = 0; i < 4; ++i) {
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
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!inside(sums, p, h, j, i)) continue;
    const i64 row = p.row + 16 * h + 8 * (i >> 1), column = p.column + 8 * j + (i & 1);
    const float value = PROMOTE ? outer_of(outer, h, j)->sum[i] : chain_value(s, p, h, j, i);
    sums.out[blockIdx.z * sums.part + row * sums.row + column * sums.column] = value;
  }
}
