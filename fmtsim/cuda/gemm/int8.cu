// Products of int8 modulo 2^32 on the integer tensor core: tiles of 128 x 128, 64 of K at a time, eight warps of 64 x
// 32 outputs. The order of sums does not matter.
#include "problem.cuh"

#define WIDTH 128
#define DEPTH 64
#define PITCH 80  // bytes; the words of eight rows and four columns of a fragment lie in 32 banks

// Bring DEPTH bytes of each of WIDTH rows into shared memory, zeros outside.
DEVICE void load(u8 (&to)[WIDTH][PITCH], const u8* x, i64 row_stride, i64 stride, i64 rows, i64 first_row, i64 first,
                 i64 stop) {
  bool whole = stride == 1 && row_stride % 16 == 0 && ((u64)x & 15) == 0 && first + DEPTH <= stop;
  if (whole) {
    for (int i = threadIdx.x; i < WIDTH * DEPTH / 16; i += 256) {
      int row = i / (DEPTH / 16), at = i % (DEPTH / 16) * 16;
      Words4 words = Words4{0, 0, 0, 0};
      if (first_row + row < rows) words = *(const Words4*)(x + (first_row + row) * row_stride + first + at);
      *(Words4*)&to[row][at] = words;
    }
    return;
  }
  for (int i = threadIdx.x; i < WIDTH * DEPTH; i += 256) {
    int row = stride == 1 ? i / DEPTH : i % WIDTH, k = stride == 1 ? i % DEPTH : i / WIDTH;
    bool inside = first_row + row < rows && first + k < stop;
    to[row][k] = inside ? x[(first_row + row) * row_stride + (first + k) * stride] : 0;
  }
}

KERNEL __launch_bounds__(256)
int8_product(const u8* a, const u8* b, const i32* c, i32* out, i64 k, const Problem p) {
  __shared__ __align__(16) u8 of_a[WIDTH][PITCH];
  __shared__ __align__(16) u8 of_b[WIDTH][PITCH];
  int across = (p.columns + WIDTH - 1) / WIDTH;
  i64 first_row = blockIdx.x / across * WIDTH, first_column = blockIdx.x % across * WIDTH;
  int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
  i32 d[4][4][4] = {};
  for (i64 first = 0; first < k; first += DEPTH) {
    __syncthreads();
    load(of_a, a, p.a_row, p.a_stride, p.rows, first_row, first, k);
    load(of_b, b, p.b_row, p.b_stride, p.columns, first_column, first, k);
    __syncthreads();
#pragma unroll
    for (int at = 0; at < DEPTH; at += 32) {
      u32 x[4][4], y[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[i][j] = *(const u32*)&of_a[warp_row + 16 * i + group + 8 * (j & 1)][at + 4 * lane + 16 * (j >> 1)];
        }
        y[i][0] = *(const u32*)&of_b[warp_column + 8 * i + group][at + 4 * lane];
        y[i][1] = *(const u32*)&of_b[warp_column + 8 * i + group][at + 4 * lane + 16];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) imma_s8_16x8x32(d[i][j], x[i], y[j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        i64 row = first_row + warp_row + 16 * i + group + 8 * (e >> 1);
        i64 column = first_column + warp_column + 8 * j + 2 * lane + (e & 1);
        if (row >= p.rows || column >= p.columns) continue;
        u32 start = c == nullptr ? 0 : (u32)c[row * p.c_row + column * p.c_stride];
        out[row * p.columns + column] = (i32)(start + (u32)d[i][j][e]);
      }
    }
  }
}
