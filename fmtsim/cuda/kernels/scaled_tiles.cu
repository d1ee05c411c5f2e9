// Operands whose blocks are tiles of memory or whole rows: a block of threads each. Up to HELD vectors of a thread stay in
// registers; where a tile has more, it is read twice.
//
// Macros: those of scaled.cuh, WORDS 0 or 2; HELD.
#include "scaled.cuh"

// A tile in memory, its vectors numbered along its rows.
struct Tile {
  u64 top, left, columns;  // of memory
  u32 high, wide;          // rows, and vectors of a row

  DEVICE u64 row_of(u32 k) const { return top + (high == 1 ? 0 : k / wide); }
  DEVICE u64 column_of(u32 k) const { return left + (high == 1 ? k : k % wide) * 8; }
  DEVICE u64 place_of(u32 k) const { return row_of(k) * columns + column_of(k); }
};

DEVICE void cast_vector(
    u16* y, u8* masks, const Eight& in, u32 k, const Tile& t, u64 row_step, u64 column_step, const Scale& scale,
    const Rule& r, const Grid& g, const Draw& d) {
  u64 first = t.row_of(k) * row_step + t.column_of(k) * column_step;
  Results out;
  out.clear();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 passes, rest = WORDS ? ~random_word(first + (u64)i * column_step, d) : 0;
    u32 value = cast_element<false>(in.get(i), scale, rest, r, g, passes);
    out.put(i, value, passes);
  }
  out.store(y, masks, t.place_of(k));
}

KERNEL __launch_bounds__(512) cast_tiles(
    const Input* x, u16* y, float* scales, u8* masks, u64 rows, u64 columns, u64 row_step, u64 column_step, u32 height,
    u32 width, const __grid_constant__ Rule rule, const __grid_constant__ Grid grid,
    const __grid_constant__ Grid scale_grid, const __grid_constant__ Draw d) {
  u32 across = (u32)((columns + width - 1) / width), down = blockIdx.x / across;
  Tile t = {(u64)down * height, (u64)(blockIdx.x - down * across) * width, columns, 0, 0};
  t.high = (u32)min((u64)height, rows - t.top), t.wide = (u32)(min((u64)width, columns - t.left) / 8);
  u32 count = t.high * t.wide, top = 0;
  bool clean;
#if HELD
  Eight in[HELD];
#pragma unroll
  for (int h = 0; h < HELD; h++) {
    u32 k = threadIdx.x + h * blockDim.x;
    in[h].clear();
    if (k < count) in[h].load(x + t.place_of(k));
  }
  top = raw_amax_of<HELD>(in, clean);
#else
  for (u32 k = threadIdx.x; k < count; k += blockDim.x) {
    Eight in[1];
    in[0].load(x + t.place_of(k));
    top = raw_larger(top, raw_amax_of<1>(in, clean));
  }
#endif
  top = largest_of_block(amax_of_raw(top));
  __shared__ Scale shared;
  if (threadIdx.x == 0) {
    shared = scale_of(__uint_as_float(top), rule, scale_grid);
    scales[blockIdx.x] = shared.stored;
  }
  __syncthreads();
  Scale scale = shared;
#if HELD
#pragma unroll
  for (int h = 0; h < HELD; h++) {
    u32 k = threadIdx.x + h * blockDim.x;
    if (k < count) cast_vector(y, masks, in[h], k, t, row_step, column_step, scale, rule, grid, d);
  }
#else
  for (u32 k = threadIdx.x; k < count; k += blockDim.x) {
    Eight in;
    in.load(x + t.place_of(k));
    cast_vector(y, masks, in, k, t, row_step, column_step, scale, rule, grid, d);
  }
#endif
}
