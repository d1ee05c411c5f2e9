// Operands whose blocks are tiles of memory or whole rows: a block of threads each, which reads it twice.
//
// Macros: those of scaled.cuh, WORDS 0 or 2.
#include "scaled.cuh"

KERNEL __launch_bounds__(256) cast_tiles(
    const Input* x, u16* y, float* scales, u8* masks, u64 rows, u64 columns, u64 row_step, u64 column_step, u32 height,
    u32 width, const __grid_constant__ Rule rule, const __grid_constant__ Grid grid,
    const __grid_constant__ Grid scale_grid, const __grid_constant__ Draw d) {
  u32 across = (u32)((columns + width - 1) / width), down = blockIdx.x / across;
  u64 top_row = (u64)down * height, left = (u64)(blockIdx.x - down * across) * width;
  u32 high = (u32)min((u64)height, rows - top_row), wide = (u32)(min((u64)width, columns - left) / 8);
  u64 corner = top_row * columns + left;
  u32 count = high * wide, top = 0;
  for (u32 k = threadIdx.x; k < count; k += blockDim.x) {
    u32 row = high == 1 ? 0 : k / wide;
    Eight in[1];
    bool clean;
    in[0].load(x + corner + row * columns + (k - row * wide) * 8);
    top = raw_larger(top, raw_amax_of<1>(in, clean));
  }
  top = largest_of_block(amax_of_raw(top));
  __shared__ Scale shared;
  if (threadIdx.x == 0) {
    shared = scale_of(__uint_as_float(top), rule, scale_grid);
    scales[blockIdx.x] = shared.stored;
  }
  __syncthreads();
  Scale scale = shared;
  for (u32 k = threadIdx.x; k < count; k += blockDim.x) {
    u32 row = high == 1 ? 0 : k / wide, column = (k - row * wide) * 8;
    u64 place = corner + row * columns + column;
    u64 first = (top_row + row) * row_step + (left + column) * column_step;
    Eight in;
    Results out;
    in.load(x + place);
    out.clear();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 passes, rest = WORDS ? ~random_word(first + (u64)i * column_step, d) : 0;
      u32 value = cast_element<false>(in.get(i), scale, rest, rule, grid, passes);
      out.put(i, value, passes);
    }
    out.store(y, masks, place);
  }
}
