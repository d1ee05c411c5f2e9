// SPDX-License-Identifier: Apache-2.0
// Operands under a recipe's scale rule whose blocks are no runs of memory: tiles (128 x 128 of DeepSeek-V3), whole
// rows, and columns.
//
// Macros: those of scaled.cuh, and CACHED (tiles; WORDS is 0 or 2 then) or RUN (columns). Of blocks of 128 in columns:
// GROUPED: x, bfloat16, is multiplied by the numbers of its blocks of 128 in rows first (INPUT is float32 then); BOTH:
// it is cast under the scales of these blocks, too.
#include "scaled.cuh"

#ifdef CACHED

// A block of threads casts a tile. Up to CACHED vectors of a thread stay in registers; where a tile has more, it is
// read twice.

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
  UNROLLED for (int i = 0; i < 8; i++) {
    u32 passes, rest = WORDS ? ~random_word(first + (u64)i * column_step, d) : 0;
    u32 value = cast_element<Clean>(in.get(i), scale, rest, r, g, passes);
    out.put(i, value, passes);
  }
  out.store(y, masks, place);
}

KERNEL __launch_bounds__(512) cast_tiles(
    const Number* x, u16* y, float* scales, u8* masks, const u32*, u32*, u64 rows, u64 columns, u64 row_step,
    u64 column_step, u32 height, u32 width, const __grid_constant__ Rule rule, const __grid_constant__ Grid grid,
    const __grid_constant__ Grid scale_grid, const __grid_constant__ Draw d) {
  // 1. the tile of this block of threads
  u32 across = (u32)((columns + width - 1) / width), down = blockIdx.x / across;
  u64 top_row = (u64)down * height, left = (u64)(blockIdx.x - down * across) * width, corner = top_row * columns + left;
  u64 corner_first = top_row * row_step + left * column_step;
  u32 high = (u32)min((u64)height, rows - top_row), wide = (u32)(min((u64)width, columns - left) / 8), top = 0;
  bool clean;
  Walk walk(wide);
// 2. its amax
#if CACHED
  Eight in[CACHED];
  UNROLLED for (int h = 0; h < CACHED; h++, walk.go()) {
    in[h].clear();
    if (walk.row < high) in[h].load(x + corner + walk.row * columns + walk.column * 8);
  }
  top = finite_raw_amax<CACHED>(in, clean);
#else
  for (; walk.row < high; walk.go()) {
    Eight in[1];
    in[0].load(x + corner + walk.row * columns + walk.column * 8);
    top = raw_larger(top, finite_raw_amax<1>(in, clean));
  }
  clean = false;
#endif
  // 3. its scale
  top = block_max(amax_of_raw(top));
  __shared__ Scale shared;
  if (threadIdx.x == 0) {
    shared = scale_of(as_float(top), rule, scale_grid);
    scales[blockIdx.x] = shared.stored;
  }
  __syncthreads();
  // 4. elements
  Scale scale = shared;
  walk = Walk(wide);
#if CACHED
  UNROLLED for (int h = 0; h < CACHED; h++, walk.go()) {
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

#else

// Tiles of 64 rows (128 for blocks of 128) and 128 columns, a row of a tile being the 16 vectors of half a warp.
// Half-warp w takes rows w, w + 16, w + 32, w + 48 (the second sixteen those of the next 64), so that one Philox call
// gives the words of four elements of a thread where the matrix's own order goes down columns. RUN: rows of a block, a
// power of two from 16 to 128, or 0 where amaxes of whole columns are given.

#define ROWS 4  // of a thread
#define HALVES_OF_WARPS (RUN == 128 ? 32 : 16)
#define BLOCKS (RUN ? HALVES_OF_WARPS * ROWS / RUN : 1)
#define WIDTH 128
#define BLOCK_OF(j) (BLOCKS == 1 ? 0 : (j) * BLOCKS / ROWS)

// Shared memory keeps column 8 lane + i at place 16 i + lane: neighbouring lanes meet neighbouring banks.
DEVICE u32 column_at(u32 place) { return place % 16 * 8 + place / 16; }

DEVICE void draw(u32 (&rests)[ROWS], u64 first, u64 row_step, const Draw& d) {
#if WORDS == 1
  Words4 w = philox<true>(counter_of(first), d);
  rests[0] = w.x, rests[1] = w.y, rests[2] = w.z, rests[3] = w.w;
#else
  UNROLLED for (int j = 0; j < ROWS; j++) rests[j] = WORDS ? ~random_word(first + (u64)(16 * j) * row_step, d) : 0;
#endif
}

#if GROUPED
typedef u16 Given;
DEVICE void load_grouped(Eight& to, const u16* from, float group) {
  Vectors<BFLOAT16, 8> in;
  in.load<false>(from);
  UNROLLED for (int i = 0; i < 8; i++) to.words[i] = as_bits(__fmul_rn(in.get(i), group));
}
#else
typedef Number Given;
#endif

#if BOTH
// Casts the rows of a tile under the scales of its rows; half of a warp holds a row.
DEVICE void cast_rows(
    u16* y, float* scales, const Eight (&in)[ROWS], const bool (&inside)[ROWS], u64 place, u64 columns, u64 block,
    u64 across, const Rule& rule, const Grid& grid, const Grid& scale_grid) {
  u32 mine = 0, share = threadIdx.x % ROWS;
  UNROLLED for (int j = 0; j < ROWS; j++) {
    bool clean;
    u32 top = amax_of_raw(finite_raw_amax<1>(in + j, clean));
    UNROLLED for (int flip = 1; flip < 16; flip *= 2) top = max(top, __shfl_xor_sync(~0u, top, flip));
    mine = share == j ? top : mine;
  }
  const Scale own = scale_of(as_float(mine), rule, scale_grid);
  UNROLLED for (int j = 0; j < ROWS; j++) {
    Scale s = {__shfl_sync(~0u, own.stored, j, ROWS), FOLDS ? __shfl_sync(~0u, own.fold, j, ROWS) : 1.0f,
               __shfl_sync(~0u, own.factor, j, ROWS), 0};
    Results out;
    out.clear();
    UNROLLED for (int i = 0; i < 8; i++) {
      u32 passes, value = cast_element<false>(in[j].get(i), s, 0, rule, grid, passes);
      out.put(i, value, passes);
    }
    if (!inside[j]) continue;
    out.store(y, nullptr, place + 16 * j * columns);
    if (threadIdx.x % 16 == 0) scales[block + 16 * j * across] = s.stored;
  }
}
#endif

// given: amaxes of columns; GROUPED: the numbers of blocks; BOTH: takes the scales of rows. more: BOTH: takes the
// values of rows. Tiles are numbered along rows.
KERNEL __launch_bounds__(16 * HALVES_OF_WARPS, WORDS ? 1 : 64 / HALVES_OF_WARPS) cast_columns(
    const Given* x, u16* y, float* scales, u8* masks, void* given, void* more, u64 rows, u64 columns, u64 row_step,
    u64 column_step, u32, u32, const __grid_constant__ Rule rule, const __grid_constant__ Grid grid,
    const __grid_constant__ Grid scale_grid, const __grid_constant__ Draw d) {
  __shared__ float factors[BLOCKS][WIDTH], folds[FOLDS ? BLOCKS : 1][WIDTH];
  __shared__ u32 tops[BLOCKS][WIDTH];
  u32 lane = threadIdx.x % 16, half = threadIdx.x / 16;
  u32 across = (u32)((columns + WIDTH - 1) / WIDTH), tile_row = blockIdx.x / across;
  u64 row = (u64)tile_row * (HALVES_OF_WARPS * ROWS) + half / 16 * 64 + half % 16;
  u64 left = (u64)(blockIdx.x - tile_row * across) * WIDTH;
  u64 column = left + lane * 8;
  u64 place = row * columns + column;
  // 1. load four rows of the tile
  Eight in[ROWS];
  bool inside[ROWS];
  UNROLLED for (int j = 0; j < ROWS; j++) {
    inside[j] = row + 16 * j < rows && column < columns;
    in[j].clear();
#if GROUPED
    u64 group = (row + 16 * j) * across + left / WIDTH;
    if (inside[j]) load_grouped(in[j], x + place + 16 * j * columns, ((const float*)given)[group]);
#else
    if (inside[j]) in[j].load(x + place + 16 * j * columns);
#endif
  }
#if RUN
  // 2. amaxes of columns, in shared memory
  for (u32 k = threadIdx.x; k < BLOCKS * WIDTH; k += blockDim.x) tops[0][k] = 0;
  __syncthreads();
  UNROLLED for (int b = 0; b < BLOCKS; b++) {
    Eight top = column_tops<ROWS / BLOCKS>(in + b * (ROWS / BLOCKS));
    UNROLLED for (int i = 0; i < 8; i++) atomicMax(&tops[b][16 * i + lane], as_bits(top.get(i)));
  }
#endif
  __syncthreads();
  // 3. scales of columns, a thread each
  for (u32 k = threadIdx.x; k < BLOCKS * WIDTH; k += blockDim.x) {
    u64 mine = left + column_at(k % WIDTH), block = (u64)tile_row * BLOCKS + k / WIDTH;
    if (mine >= columns) continue;
    Scale s = scale_of(as_float(RUN ? tops[0][k] : ((const u32*)given)[mine]), rule, scale_grid);
    factors[0][k] = s.factor;
    if (FOLDS) folds[0][k] = s.fold;
    if (RUN ? block * RUN < rows : tile_row == 0) scales[(RUN ? block * columns : 0) + mine] = s.stored;
  }
#if BOTH
  u64 block = row * across + left / WIDTH;
  cast_rows((u16*)more, (float*)given, in, inside, place, columns, block, across, rule, grid, scale_grid);
#endif
  __syncthreads();
  // 4. elements
  Results out[ROWS];
  UNROLLED for (int j = 0; j < ROWS; j++) out[j].clear();
  UNROLLED for (int i = 0; i < 8; i++) {
    u32 rests[ROWS];
    draw(rests, row * row_step + (column + i) * column_step, row_step, d);
    UNROLLED for (int j = 0; j < ROWS; j++) {
      u32 passes, at = 16 * i + lane;
      Scale s = {0.0f, FOLDS ? folds[BLOCK_OF(j)][at] : 1.0f, factors[BLOCK_OF(j)][at], 0};
      u32 value = cast_element<false>(in[j].get(i), s, rests[j], rule, grid, passes);
      out[j].put(i, value, passes);
    }
  }
  UNROLLED for (int j = 0; j < ROWS; j++)
    if (inside[j]) out[j].store(y, masks, place + 16 * j * columns);
}

#endif
