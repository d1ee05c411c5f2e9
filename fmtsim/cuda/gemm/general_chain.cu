// Chains of IEEE 754 fused multiply-adds, k in order: a tile of 16 x 16 threads with SIZE x SIZE outputs each.
//
// DOUBLE: in float64 instead of float32. PROMOTES: chains join an outer sum. SIGNED: zero results keep their sign.
#include "general_sums.cuh"

#if DOUBLE
typedef double Real;
typedef u64 Bits;
#define SIZE 4
DEVICE Real fused(Real a, Real b, Real c) { return __fma_rn(a, b, c); }
#else
typedef float Real;
typedef u32 Bits;
#define SIZE 8
DEVICE Real fused(Real a, Real b, Real c) { return __fmaf_rn(a, b, c); }
#endif

#define WIDTH (16 * SIZE)  // rows and columns of a tile
#define DEPTH 16           // products that lie in shared memory at a time
#define PITCH (WIDTH + 4)

struct alignas(16) Tile {
  Real a[DEPTH][PITCH], b[DEPTH][PITCH];
};

#define SHARE (DEPTH * WIDTH / 256)  // elements of an operand that a thread brings

struct Side {
  const void* base;
  i64 row_stride, stride, first_row;
  i32 type, rows;
};
DEVICE int place_of(const Side& s, int j) {
  return s.stride == 1 ? threadIdx.x % DEPTH : threadIdx.x / WIDTH + 256 / WIDTH * j;
}
DEVICE int row_of(const Side& s, int j) {
  return s.stride == 1 ? threadIdx.x / DEPTH + 256 / DEPTH * j : threadIdx.x % WIDTH;
}

// The bits of DEPTH places of one operand, zeros outside; they are under way while sums go on.
template <typename T>
DEVICE void fetch(Bits (&share)[SHARE], const Side& s, const i32* source, i64 first, i64 stop) {
#pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    i64 place = first + place_of(s, j), row = s.first_row + row_of(s, j);
    share[j] = 0;
    if (place < stop && row < s.rows) share[j] = ((const T*)s.base)[row * s.row_stride + source[place] * s.stride];
  }
}

DEVICE void fetch(Bits (&share)[SHARE], const Side& s, const i32* source, i64 first, i64 stop) {
  switch (bytes_of(s.type)) {
    case 1: fetch<u8>(share, s, source, first, stop); break;
    case 2: fetch<u16>(share, s, source, first, stop); break;
#if DOUBLE
    case 8: fetch<u64>(share, s, source, first, stop); break;
#endif
    default: fetch<u32>(share, s, source, first, stop);
  }
}

DEVICE void store(Real (&to)[DEPTH][PITCH], const Bits (&share)[SHARE], const Side& s) {
#pragma unroll
  for (int j = 0; j < SHARE; ++j) {
#if !DOUBLE
    if (s.type == TYPE_FP32) {
      to[place_of(s, j)][row_of(s, j)] = __uint_as_float(share[j]);
      continue;
    }
#endif
    to[place_of(s, j)][row_of(s, j)] = (Real)value_of(share[j], s.type);
  }
}

// Outputs of a thread lie in groups of four neighbours, 64 apart.
DEVICE int offset_of(int i, int lane) { return 4 * lane + (i & 3) + 64 * (i >> 2); }

struct Outputs {
  Real running[SIZE][SIZE];
#if PROMOTES
  Real total[SIZE][SIZE];
#endif
};

DEVICE void begin(Outputs& o, const void* c, const Problem& p, i64 first_row, i64 first_column) {
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      i64 row = first_row + offset_of(i, threadIdx.x / 16), column = first_column + offset_of(j, threadIdx.x % 16);
      bool given = c != nullptr && row < p.rows && column < p.columns;
      Real start = given ? (Real)addend_at(c, p, row, column) : (Real)0;
#if PROMOTES
      o.total[i][j] = start;
      start = 0;
#endif
      o.running[i][j] = start;
    }
  }
}

#if PROMOTES
DEVICE void end_chains(Outputs& o, const Problem& p, i64 t, i64 first_row, i64 first_column, const float* scale_a,
                       const float* scale_b, const i32* scale_places) {
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      i64 row = first_row + offset_of(i, threadIdx.x / 16), column = first_column + offset_of(j, threadIdx.x % 16);
      if (row >= p.rows || column >= p.columns) continue;
      double total = o.total[i][j], running = o.running[i][j];
      end_chain(total, running, p, t, row, column, scale_a, scale_b, scale_places);
      o.total[i][j] = (Real)total;
      o.running[i][j] = 0;
    }
  }
}
#endif

DEVICE void add_place(Outputs& o, const Tile& tile, int place) {
  Real x[SIZE], y[SIZE];
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    x[i] = tile.a[place][offset_of(i, threadIdx.x / 16)];
    y[i] = tile.b[place][offset_of(i, threadIdx.x % 16)];
  }
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      o.running[i][j] = fused(x[i], y[j], o.running[i][j]);
#if !SIGNED
      o.running[i][j] += (Real)0;
#endif
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
chain_product(const void* a, const void* b, const void* c, const float* scale_a, const float* scale_b,
              const i32* source, const u8* ends, const i32* scale_places, const i32* part_blocks, const u8* marks,
              void* sums, const Problem p) {
  __shared__ Tile tile;
  int across = (p.columns + WIDTH - 1) / WIDTH;
  i64 first_row = blockIdx.x / across * WIDTH, first_column = blockIdx.x % across * WIDTH;
  if (is_idle(marks, p, first_row, first_column)) return;
  Side x = Side{a, p.a_row, p.a_stride, first_row, p.a_type, p.rows};
  Side y = Side{b, p.b_row, p.b_stride, first_column, p.b_type, p.columns};
  Bits of_a[SHARE], of_b[SHARE];
  Outputs o;
  for (int part = 0; part < p.parts; ++part) {
    i64 stop = part_blocks[2 * part + 1];
    begin(o, part == 0 ? c : nullptr, p, first_row, first_column);
    i64 begun = part_blocks[2 * part];
    fetch(of_a, x, source, begun, stop);
    fetch(of_b, y, source, begun, stop);
    for (i64 first = begun; first < stop; first += DEPTH) {
      __syncthreads();
      store(tile.a, of_a, x);
      store(tile.b, of_b, y);
      __syncthreads();
      fetch(of_a, x, source, first + DEPTH, stop);
      fetch(of_b, y, source, first + DEPTH, stop);
      int count = (int)min((i64)DEPTH, stop - first);
#if !PROMOTES
#pragma unroll 4
#endif
      for (int place = 0; place < count; ++place) {
        add_place(o, tile, place);
#if PROMOTES
        i64 t = first + place;
        if (ends[t]) end_chains(o, p, t, first_row, first_column, scale_a, scale_b, scale_places);
#endif
      }
    }
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        i64 row = first_row + offset_of(i, threadIdx.x / 16), column = first_column + offset_of(j, threadIdx.x % 16);
        if (row >= p.rows || column >= p.columns) continue;
#if PROMOTES
        write_sum(sums, p, part, row, column, o.total[i][j]);
#else
        write_sum(sums, p, part, row, column, o.running[i][j]);
#endif
      }
    }
  }
}
