// SPDX-License-Identifier: Apache-2.0
// Hadamard transforms of bfloat16 matrices fused with their cast, along the rows or the columns (DOWN). A block of threads
// holds a tile:
//
//   DOWN 0   line = row      lanes 0, 1, 2, 3 hold columns 0-31, 32-63, 64-95, 96-127 of a row, lane 4 begins the next
//   DOWN 1   line = column   lanes 2 c and 2 c + 1 hold rows 0-31 and 32-63 of columns 2 c and 2 c + 1 (LANES = 2)
//
// rotated.cuh says what the macros are.
#include "rotated_scales.cuh"

#define RESIDENT (CAST == DEVIATION || (CAST == BLOCK_FORMAT && STOCHASTIC) ? 3 : 4)  // more would spill registers

// Rotate and cast a lane's numbers in place; bit i of the result says that element i passes the mask.
DEVICE u32 cast_line(
    float (&y)[PER_LANE], const Line& line, TensorScale scale, const Draw& draw, const Cast& c) {
  rotate(y, line.signs[threadIdx.x % SLICES]);
#if CAST == CORRECTED
  cast_corrected(y, line, scale.decode, draw);
  return 0;
#else
  Piece piece[PIECES];
  bool exactly = false;
#if CAST == BLOCK_FORMAT
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < RUN; ++i) amax = max(amax, as_bits(y[b * RUN + i]) & MAGNITUDE);
    piece[b].block = fast_block(amax, scale);
    exactly |= piece[b].block.refused || amax >= FLOAT_EXPONENT;
  }
#elif CAST == LARGEST
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 amax = finite_amax_of<RUN>(y + b * RUN);
    piece[b] = piece_of(amax ? __fdiv_rn(as_float(amax), as_float(TOP)) : 1.0f);
  }
#elif CAST == TWO_SCALES
#pragma unroll
  for (int b = 0; b < PIECES; ++b) piece[b] = two_scales_piece(finite_amax_of<RUN>(y + b * RUN), scale.decode);
#else
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) amax = max(amax, as_bits(y[i]) & MAGNITUDE);
  float wanted;
  bool sure = quick_scale(y, amax, wanted);
  if (__any_sync(~0u, !sure)) {
    float exact = scale_of_deviation(deviation_of(y));
    if (!sure) wanted = exact;
  }
  piece[0] = piece_of(wanted);
#endif
  u32 passing = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE / 4; ++i) {
    u32 rests[4] = {};
#if STOCHASTIC
    take_rests(rests, counter_of(line.first & ~(u64)63), i, draw);
#endif
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int at = i + 8 * k;
      bool passes;
      y[at] = cast_one(y[at], rests[k], piece[at / RUN], passes);
      passing |= (u32)passes << at;
    }
  }
#if CAST == BLOCK_FORMAT
  if (__any_sync(~0u, exactly)) {
    u16 again[PER_LANE];
    cast_line_exactly(again, line.source, line.signs, line.factor, line.first, scale, draw, c);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (exactly) y[i] = as_float((u32)again[i] << 16);
  }
#endif
  return passing;
#endif
}

// Find the largest finite magnitudes of what is cast: of the tiles of each block of threads.
KERNEL __launch_bounds__(THREADS) rotated_amax(const __grid_constant__ RotatedJob job) {
  __shared__ __align__(16) u16 tile[TILE_ELEMENTS];
  i64 wide = (job.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, high = (job.rows + TILE_ROWS - 1) / TILE_ROWS;
  const u32* signs = SIGNS_OF(job);
  u32 amax = 0;
  float y[PER_LANE];
#pragma unroll 1
  for (i64 at = blockIdx.x; at < wide * high; at += gridDim.x) {
    __syncthreads();
    copy_tile<false>((u16*)job.x, tile, corner_of(at % wide, at / wide), job);
    __syncthreads();
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      TilePlace place = tile_place(part);
      load_line(y, tile + PLACE(place.row) + place.column, part, job);
      add_up(y, signs[threadIdx.x % SLICES]);
      float top = fabsf(y[0]);
#pragma unroll
      for (int i = 1; i < PER_LANE; ++i) top = fmaxf(top, fabsf(y[i]));
      if (top < as_float(FLOAT_EXPONENT)) amax = max(amax, as_bits(top));  // a NaN is none of several
      else amax = max(amax, finite_amax_of<PER_LANE>(y));
    }
  }
  amax = block_max(as_bits(transformed(as_float(amax))), THREADS / 32);
  if (threadIdx.x == 0) job.parts[blockIdx.x] = amax;
}

// The scale of a tensor from the amaxes of its parts.
DEVICE TensorScale find_tensor_scale(const RotatedJob& job, const Cast& c) {
  TensorScale scale = {1.0f, 1.0f};
#if TWO_LEVEL
  u32 amax = 0;
  for (i64 i = threadIdx.x; i < job.part_count; i += THREADS) amax = max(amax, job.parts[i]);
  amax = block_max<true>(amax, THREADS / 32);
#if CAST == CORRECTED || CAST == TWO_SCALES
  scale.decode = quartet_tensor(as_float(amax), as_float(TENSOR_TOP), as_float(TOP));
#else
  scale = te_tensor(as_float(amax), c.scale);
#endif
  if (threadIdx.x + blockIdx.x + blockIdx.y == 0) *job.scale = scale.decode;
#endif
  return scale;
}

DEVICE void store_mask(u8* to, u32 passing) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 four = passing >> (16 * half + 4 * w) & 0xFu;
      words[w] = (four & 1u) | (four & 2u) << 7 | (four & 4u) << 14 | (four & 8u) << 21;
    }
    ((Words4*)to)[half] = {words[0], words[1], words[2], words[3]};
  }
}

// Cast in place within the tile.
DEVICE void cast_tile(u16* tile, Corner corner, const u32* signs, const RotatedJob& job, const Cast& c) {
  TensorScale scale = find_tensor_scale(job, c);
  float y[PER_LANE];
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    TilePlace place = tile_place(part);
    u16* at = tile + PLACE(place.row) + place.column;
    i64 row = corner.row + place.row, column = corner.column + place.column;
    load_line(y, at, part, job);
#if DOWN
    Line line = {{at + part, PITCH, GAP}, signs, job.factor, (u64)((column + part) * job.rows + row)};
#else
    Line line = {{at, 1, 0}, signs, job.factor, (u64)(row * job.columns + column)};
#endif
    u32 passing = cast_line(y, line, scale, DRAW_OF(c.draw), c);
#if MASKS
    if (row < job.rows && column < job.columns) store_mask(job.mask + line.first, passing);
#endif
    store_line(at, part, y);
  }
}

KERNEL __launch_bounds__(THREADS, RESIDENT) cast_rotated(
    const __grid_constant__ RotatedJob job, const __grid_constant__ Cast c) {
  __shared__ __align__(16) u16 tile[TILE_ELEMENTS];
  Corner corner = corner_of(blockIdx.x, blockIdx.y);
  const u32* signs = SIGNS_OF(job);
  copy_tile<false>((u16*)job.x, tile, corner, job);
  __syncthreads();
  cast_tile(tile, corner, signs, job, c);
  __syncthreads();
  copy_tile<true>(job.out, tile, corner, job);
}
