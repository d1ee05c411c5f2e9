// Largest finite magnitudes that scales follow from, and the memory of delayed scaling.
//
// Macros: INPUT.
#include "scaled_scale.cuh"

#define VECTORS_EACH 4

// Of parts of a tensor, one a block of threads: whoever needs the largest of all takes it from these.
KERNEL __launch_bounds__(512) amaxes_of_parts(const Input* x, u32* tops, u64 vectors) {
  u64 together = VECTORS_EACH * blockDim.x;  // of a block of threads at a time, which follow each other
  u32 top = 0;
  for (u64 first = blockIdx.x * together; first < vectors; first += gridDim.x * together) {
    u64 at = first + threadIdx.x;
    Eight in[VECTORS_EACH];
#pragma unroll
    for (int v = 0; v < VECTORS_EACH; v++) {
      in[v].clear();
      if (at + v * blockDim.x < vectors) in[v].load(x + (at + v * blockDim.x) * 8);
    }
    bool clean;
    top = raw_larger(top, raw_amax_of<VECTORS_EACH>(in, clean));
  }
  top = largest_of_block(amax_of_raw(top));
  if (threadIdx.x == 0) tops[blockIdx.x] = top;
}

// Of columns: found [columns] starts at zero. A block of threads takes 256 columns of 128 rows, a warp eight rows of
// them.
#define ROWS 8
KERNEL __launch_bounds__(512) amaxes_of_columns(const Input* x, u32* found, u64 rows, u64 columns) {
  __shared__ u32 tops[256];
  u32 lane = threadIdx.x % 32, across = (u32)((columns + 255) / 256), down = blockIdx.x / across;
  u64 left = (u64)(blockIdx.x - down * across) * 256, column = left + lane * 8;
  u64 row = (u64)down * (16 * ROWS) + threadIdx.x / 32;
  Eight in[ROWS];
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    in[j].clear();
    if (row + 16 * j < rows && column < columns) in[j].load(x + (row + 16 * j) * columns + column);
  }
  if (threadIdx.x < 256) tops[threadIdx.x] = 0;  // column 8 lane + i at place 32 i + lane
  __syncthreads();
  Eight top = column_tops<ROWS>(in);
#pragma unroll
  for (int i = 0; i < 8; i++) atomicMax(&tops[32 * i + lane], __float_as_uint(top.get(i)));
  __syncthreads();
  u64 mine = left + threadIdx.x;
  if (threadIdx.x < 256 && mine < columns) atomicMax(found + mine, tops[threadIdx.x % 8 * 32 + threadIdx.x / 8]);
}
