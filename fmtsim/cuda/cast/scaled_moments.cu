// Means over a whole matrix: float64 sums of neighbours at a distance that is halved until one number is left, zeros
// filling up to a power of two (fmtsim/scaling/statistics.py). A thread folds the 32 numbers at the largest distances,
// so that each launch leaves one number of 32.
//
// Macros: INPUT.
#include "scaled_scale.cuh"

#define FOLDED 32

template <int Count>
DEVICE double folded(double (&held)[FOLDED]) {
  if constexpr (Count > 1) {
#pragma unroll
    for (int k = 0; k < Count / 2; k++) held[k] = __dadd_rn(held[k], held[k + Count / 2]);
    return folded<Count / 2>(held);
  }
  return held[0];
}

// sums [left] of magnitudes, or of squares; counts: of finite elements, one number a block of threads.
KERNEL __launch_bounds__(256) fold_elements(
    const Input* x, double* sums, u32* counts, u64 total, u64 left, u32 squares) {
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  double held[FOLDED];
  u32 count = 0;
#pragma unroll
  for (int k = 0; k < FOLDED; k++) {
    u64 place = first + k * left;
    float a = place < total ? fabsf(loaded<INPUT>(x[place])) : 0.0f;
    bool finite = __float_as_uint(a) < INFINITE;
    double number = finite ? (double)a : 0.0;
    held[k] = squares ? __dmul_rn(number, number) : number;
    count += place < total && finite;
  }
  sums[first] = folded<FOLDED>(held);
  __shared__ u32 all[8];
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; w++) count += all[w];
    counts[blockIdx.x] = count;
  }
}

KERNEL __launch_bounds__(256) fold_sums(const double* from, double* sums, u64 left) {
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  double held[FOLDED];
#pragma unroll
  for (int k = 0; k < FOLDED; k++) held[k] = from[first + k * left];
  sums[first] = folded<FOLDED>(held);
}

// The mean of magnitudes, or the root of the mean square, from at most 32 * 1024 sums: float32.
KERNEL __launch_bounds__(1024) fold_last(
    const double* from, float* found, const u32* counts, u32 blocks, u32 numbers, u32 squares) {
  __shared__ double sums[1024];
  __shared__ u64 finite[1024];
  double held[FOLDED];
  u64 own = 0;
#pragma unroll
  for (int k = 0; k < FOLDED; k++) held[k] = k * 1024 < numbers ? from[threadIdx.x + k * 1024] : 0.0;
  sums[threadIdx.x] = folded<FOLDED>(held);
  for (u32 i = threadIdx.x; i < blocks; i += 1024) own += counts[i];
  finite[threadIdx.x] = own;
  __syncthreads();
  for (u32 half = 512; half; half /= 2) {
    if (threadIdx.x < half) {
      sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
      finite[threadIdx.x] += finite[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    double mean = __ddiv_rn(sums[0], (double)(finite[0] ? finite[0] : 1));
    *found = at_most_max(__double2float_rn(squares ? __dsqrt_rn(mean) : mean));
  }
}
