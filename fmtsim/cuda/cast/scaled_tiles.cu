// Operands whose blocks are tiles of memory or whole rows: a block of threads each. Up to HELD vectors of a thread stay
// in registers; where a tile has more, it is read twice.
//
// Macros: those of scaled.cuh, WORDS 0 or 2; HELD.
#include "scaled.cuh"

// The vectors of a tile that a thread takes: every blockDim.x-th of those numbered along its rows.
struct Walk {
  u32 row, column, wide, rows_on, columns_on;  // within the tile, columns in vectors

  DEVICE Walk(u32 vectors) {
    wide = vectors, row = threadIdx.x / wide, column = threadIdx.x - row * wide;
    rows_on = blockDim.x / wide, columns_on = blockDim.x - rows_on * wide;
  }
  DEVICE void go() {
    row += rows_on, column += columns_on;
    if (column >= wide) column -= wide, row++;
  }
};

template <bool Clean>
DEVICE void cast_vector(
    u16* y, u8* masks, const Eight& in, u64 place, u64 first, u64 column_step, const Scale& scale, const Rule& r,
    const Grid& g, const Draw& d) {
  Results out;
  out.clear();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 passes, rest = WORDS ? ~random_word(first + (u64)i * column_step, d) : 0;
    u32 value = cast_element<Clean>(in.get(i), scale, rest, r, g, passes);
    out.put(i, value, passes);
  }
  out.store(y, masks, place);
}

KERNEL __launch_bounds__(512) cast_tiles(
    const Input* x, u16* y, float* scales, u8* masks, u64 rows, u64 columns, u64 row_step, u64 column_step, u32 height,
    u32 width, const __grid_constant__ Rule rule, const __grid_constant__ Grid grid,
    const __grid_constant__ Grid scale_grid, const __grid_constant__ Draw d) {
  u32 across = (u32)((columns + width - 1) / width), down = blockIdx.x / across;
  u64 top_row = (u64)down * height, left = (u64)(blockIdx.x - down * across) * width, corner = top_row * columns + left;
  u64 corner_first = top_row * row_step + left * column_step;
  u32 high = (u32)min((u64)height, rows - top_row), wide = (u32)(min((u64)width, columns - left) / 8), top = 0;
  bool clean;
  Walk walk(wide);
#if HELD
  Eight in[HELD];
#pragma unroll
  for (int h = 0; h < HELD; h++, walk.go()) {
    in[h].clear();
    if (walk.row < high) in[h].load(x + corner + walk.row * columns + walk.column * 8);
  }
  top = raw_amax_of<HELD>(in, clean);
#else
  for (; walk.row < high; walk.go()) {
    Eight in[1];
    in[0].load(x + corner + walk.row * columns + walk.column * 8);
    top = raw_larger(top, raw_amax_of<1>(in, clean));
  }
  clean = false;
#endif
  top = largest_of_block(amax_of_raw(top));
  __shared__ Scale shared;
  if (threadIdx.x == 0) {
    shared = scale_of(__uint_as_float(top), rule, scale_grid);
    scales[blockIdx.x] = shared.stored;
  }
  __syncthreads();
  Scale scale = shared;
  walk = Walk(wide);
#if HELD
#pragma unroll
  for (int h = 0; h < HELD; h++, walk.go()) {
    if (walk.row >= high) continue;
    u64 place = corner + walk.row * columns + walk.column * 8;
    u64 first = corner_first + walk.row * row_step + walk.column * 8 * column_step;
    if (clean && !WORDS) cast_vector<true>(y, masks, in[h], place, first, column_step, scale, rule, grid, d);
    else cast_vector<false>(y, masks, in[h], place, first, column_step, scale, rule, grid, d);
  }
#else
  for (; walk.row < high; walk.go()) {
    u64 place = corner + walk.row * columns + walk.column * 8;
    u64 first = corner_first + walk.row * row_step + walk.column * 8 * column_step;
    Eight in;
    in.load(x + place);
    cast_vector<false>(y, masks, in, place, first, column_step, scale, rule, grid, d);
  }
#endif
}
