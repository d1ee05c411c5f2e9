// Operands of the tiled kernel in shared memory: 64 rows, 64 columns and 32 places, as doubles with exponents.
#pragma once
#include "general_sums.cuh"

#define WIDTH 64    // rows and columns of a tile: 16 x 16 threads with 4 x 4 outputs each
#define DEPTH 32    // places that lie in shared memory at a time
#define PITCH (WIDTH + 2)
#define EMPTY -16384  // exponent of a zero: two of them add up to the lowest i16

struct alignas(128) Tile {
  double a[DEPTH][PITCH], b[DEPTH][PITCH];
  u32 a_exponents[DEPTH][PITCH];      // each exponent twice, as the halves of a word
  u32 b_exponents[DEPTH][PITCH / 2];  // two columns a word
  u32 negative[2][WIDTH], present[2][WIDTH];  // a bit a place: sign, and whether there is a number other than zero
  i32 refused;  // something is not finite
};

// Outputs 0 to 3 of a thread lie in two pairs of neighbours, 32 apart.
DEVICE int offset_of(int i, int lane) { return 2 * lane + (i & 1) + 32 * (i >> 1); }

// The exponent of section 1 of docs/matmul.md.
DEVICE int exponent_of(double x, int lowest) {
  u32 high = (u32)(as_u64(x) >> 32) & 0x7FFFFFFF;
  return max((int)(high >> 20) - 1023, lowest);
}

// A number a little farther from zero, by less than any multiple of the products' last place.
DEVICE double pushed(double x) { return as_double(as_u64(x) + ((as_u64(x) & ~SIGN_BIT) != 0 ? 4 : 0)); }

struct Side {
  const void* base;
  const float* scales;
  i64 row_stride, stride, scale_row, scale_stride, first_row;
  i32 type, rows, lowest;
};

DEVICE void store(Tile& tile, int side, int k, int row, double x, int exponent) {
  u32 half = (u32)exponent & 0xFFFF;
  if (side) {
    tile.b[k][row] = x;
    ((u16*)tile.b_exponents[k])[row] = (u16)half;
  } else {
    tile.a[k][row] = x;
    tile.a_exponents[k][row] = half << 16 | half;
  }
}

#define SHARE (DEPTH * WIDTH / 256)  // elements of an operand that a thread brings

DEVICE int place_of(const Side& s, int j) { return s.stride == 1 ? threadIdx.x % DEPTH : threadIdx.x / WIDTH + 4 * j; }
DEVICE int row_of(const Side& s, int j) { return s.stride == 1 ? threadIdx.x / DEPTH + 8 * j : threadIdx.x % WIDTH; }

// The bits of what a thread brings, and a bit for each that exists.
struct Share {
  u64 raw[SHARE];
  u32 present;
};

// All loads of a share are under way before the first is needed.
template <typename T>
DEVICE void fetch(Share& share, const Side& s, const i32* source, i64 first, int count) {
  share.present = 0;
#pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    int k = place_of(s, j);
    i32 place = k < count && s.first_row + row_of(s, j) < s.rows ? source[first + k] : -1;
    share.present |= (u32)(place >= 0) << j;
    i64 at = (s.first_row + row_of(s, j)) * s.row_stride + place * s.stride;
    share.raw[j] = place < 0 ? 0 : (u64)((const T*)s.base)[at];
  }
}

DEVICE void fetch(Share& share, const Side& s, const i32* source, i64 first, int count) {
  switch (bytes_of(s.type)) {
    case 1: fetch<u8>(share, s, source, first, count); break;
    case 2: fetch<u16>(share, s, source, first, count); break;
    case 4: fetch<u32>(share, s, source, first, count); break;
    default: fetch<u64>(share, s, source, first, count);
  }
}

DEVICE void put(double (&to)[DEPTH][PITCH], const Share& share, const Side& s) {
#pragma unroll
  for (int j = 0; j < SHARE; ++j) to[place_of(s, j)][row_of(s, j)] = as_double(share.raw[j]);
}

// Turn the bits that a thread has put into numbers with exponents.
DEVICE void decode(Tile& tile, u32 present, const Side& s, int side, const i32* source, const Problem& p) {
#pragma unroll 1
  for (int j = 0; j < SHARE; ++j) {
    int k = place_of(s, j), row = row_of(s, j), exponent = EMPTY;
    double x = 0.0;
    if (present >> j & 1) {
      x = value_of(as_u64(side ? tile.b[k][row] : tile.a[k][row]), s.type);
      exponent = exponent_of(x, s.lowest);
      if (p.scale_block) {
        i64 group = source[k] / p.scale_block;
        double scale = fabs((double)scale_at(s.scales, s.scale_row, s.scale_stride, s.first_row + row, group));
        exponent += exponent_of(scale, p.scale_emin);
        x *= scale;
      }
      if (!(fabs(x) < as_double(INFINITY_BITS))) { tile.refused = 1; x = 0.0; }
      if (x == 0) exponent = EMPTY;
#if TERM == MODE_ZERO || TERM == MODE_AWAY
      if (!side) x = pushed(x);
#endif
    }
    store(tile, side, k, row, x, exponent);
  }
}

// Bit masks of signs and of numbers other than zero, which correct what was rounded down instead of toward zero.
DEVICE void take_signs(Tile& tile) {
  int k = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < 2 * WIDTH; i += 8) {
    int side = i / WIDTH, row = i % WIDTH;
    double x = side ? tile.b[k][row] : tile.a[k][row];
    u32 negative = __ballot_sync(~0u, x < 0), present = __ballot_sync(~0u, x != 0);
    if (k == 0) { tile.negative[side][row] = negative; tile.present[side][row] = present; }
  }
}

// Bring `count` places from `first` on into shared memory; true where one is not finite. All threads come along.
DEVICE bool stage(Tile& tile, const Side& a, const Side& b, const i32* source, i64 first, int count, const Problem& p) {
  Share of_a, of_b;
  fetch(of_a, a, source, first, count);
  fetch(of_b, b, source, first, count);
  __syncthreads();
  put(tile.a, of_a, a);
  put(tile.b, of_b, b);
  decode(tile, of_a.present, a, 0, source + first, p);
  decode(tile, of_b.present, b, 1, source + first, p);
  __syncthreads();
#if TERM == MODE_ZERO
  take_signs(tile);
  __syncthreads();
#endif
  return tile.refused != 0;
}
