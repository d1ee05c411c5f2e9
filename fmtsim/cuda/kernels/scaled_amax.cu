// Largest finite magnitudes that scales follow from, and the memory of delayed scaling.
//
// Macros: INPUT.
#include "scaled_scale.cuh"

#define VECTORS_EACH 4

// Of parts of a tensor, one a block of threads: whoever needs the largest of all takes it from these.
KERNEL __launch_bounds__(512) amaxes_of_parts(const Input* x, u32* tops, u64 vectors) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  u32 top = 0;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < vectors; at += VECTORS_EACH * stride) {
    Eight in[VECTORS_EACH];
#pragma unroll
    for (int v = 0; v < VECTORS_EACH; v++) {
      in[v].clear();
      if (at + v * stride < vectors) in[v].load(x + (at + v * stride) * 8);
    }
    bool clean;
    top = raw_larger(top, raw_amax_of<VECTORS_EACH>(in, clean));
  }
  top = largest_of_block(amax_of_raw(top));
  if (threadIdx.x == 0) tops[blockIdx.x] = top;
}

// Of columns: found [columns] starts at zero. A block of threads takes 256 columns of 64 rows, a warp four rows of them.
KERNEL __launch_bounds__(512) amaxes_of_columns(const Input* x, u32* found, u64 rows, u64 columns) {
  __shared__ u32 tops[256];
  u32 lane = threadIdx.x % 32, across = (u32)((columns + 255) / 256), down = blockIdx.x / across;
  u64 left = (u64)(blockIdx.x - down * across) * 256, column = left + lane * 8;
  u64 row = (u64)down * 64 + threadIdx.x / 32;
  Eight in[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    in[j].clear();
    if (row + 16 * j < rows && column < columns) in[j].load(x + (row + 16 * j) * columns + column);
  }
  if (threadIdx.x < 256) tops[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) top = max(top, finite_magnitude(in[j].get(i)));
    atomicMax(&tops[32 * i + lane], top);
  }
  __syncthreads();
  u64 mine = left + threadIdx.x % 32 * 8 + threadIdx.x / 32;
  if (threadIdx.x < 256 && mine < columns) atomicMax(found + mine, tops[threadIdx.x]);
}
