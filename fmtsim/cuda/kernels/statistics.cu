// A cast onto a grid that also counts what it did: finite elements that are not zero, those that became zero, those whose
// nearest value lies beyond the range, elements that are not finite, and the largest finite magnitude.
//
// Macros: as of scalar.cu, without UNROLL.
#include "common.cuh"
#include "grid_cast.cuh"
#include "philox.cuh"
#include "vectors.cuh"

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;

struct Counts {
  u32 nonzero, underflowed, saturated, nonfinite, amax;  // of a thread; amax as bits

  // x became y; low, high: between them lies what rounds to nearest into the range.
  DEVICE void add(float x, float y, float low, float high) {
    u32 magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
    bool finite = magnitude < 0x7F800000u;
    nonfinite += !finite;
    nonzero += finite && magnitude;
    underflowed += finite && magnitude && y == 0.0f;
    saturated += finite && (x > high || x < low);
    amax = finite && magnitude > amax ? magnitude : amax;
  }
};

// Sums over the block into totals; amax as the maximum of bits, which order like magnitudes.
DEVICE void add_up(Counts c, u64* totals) {
  __shared__ u64 sums[4];
  __shared__ u32 amax;
  if (threadIdx.x < 4) sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) amax = 0;
  __syncthreads();
  u64 parts[4] = {c.nonzero, c.underflowed, c.saturated, c.nonfinite};
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) parts[k] += __shfl_xor_sync(0xFFFFFFFFu, parts[k], lane);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[k], parts[k]);
  }
  atomicMax(&amax, c.amax);
  __syncthreads();
  if (threadIdx.x < 4) atomicAdd(&totals[threadIdx.x], sums[threadIdx.x]);
  if (threadIdx.x == 0) atomicMax((u32*)&totals[4], amax);
}

// totals: five numbers that start at zero: nonzero, underflowed, saturated, nonfinite, the bits of amax.
KERNEL quantize(
    const Input* x, Output* y, i64 count, const Grid g, const Draw d, float low, float high, u64* totals) {
  Counts counts = {0, 0, 0, 0, 0};
  i64 stride = (i64)gridDim.x * blockDim.x * WIDTH;
  for (i64 base = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; base < count; base += stride) {
    if (VECTORS && base + WIDTH <= count) {
      Vectors<INPUT, WIDTH> from;
      Vectors<OUTPUT, WIDTH> to;
      float results[WIDTH];
      from.load(x + base);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) {
        float value = from.get(k);
        results[k] = cast_value(value, RANDOM ? random_word((u64)base + k, d) : 0, g);
        counts.add(value, results[k], low, high);
      }
      to.template set<false>(results);
      to.store(y + base);
    } else {
      for (i64 i = base; i < count && i < base + WIDTH; i++) {
        float value = loaded<INPUT>(x[i]), result = cast_value(value, RANDOM ? random_word((u64)i, d) : 0, g);
        y[i] = stored<OUTPUT>(result);
        counts.add(value, result, low, high);
      }
    }
  }
  add_up(counts, totals);
}
