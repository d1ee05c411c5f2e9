// Delayed scaling: the largest magnitude of a call is recorded, and the scale of later ones follows
// (fmtsim/scaling/history.py). One block of threads.
#define INPUT 0
#include "scaled_scale.cuh"

// The host side is fmtsim.cuda.scaled_history.
struct alignas(16) History {
  float top;
  i32 power;                           // of a scale, as in Rule
  i32 recent, previous;                // the last magnitude alone counts; zeros leave the scale as it was
  u32 length, refresh, immediate, remembers;
};

DEVICE float factor_of(float amax, const History& h) {
  float factor = at_most_max(__fdiv_rn(h.top, amax));
  return h.power ? power_of_two(factor, h.power == FLOOR) : factor;
}

// in_force: the factor of this call, where that is asked for.
KERNEL __launch_bounds__(1024) advance(
    const u32* tops, float* amaxes, float* factor, i64* calls, float* in_force, u32 parts, const History h) {
  __shared__ u32 known;
  u32 top = 0;
  for (u32 i = threadIdx.x; i < parts; i += blockDim.x) top = max(top, tops[i]);
  top = largest_of_block(top);
  if (threadIdx.x == 0) known = top;
  __syncthreads();
  float own = __uint_as_float(known), before = *factor;
  i64 count = *calls;
  __syncthreads();
  if (in_force != nullptr && threadIdx.x == 0) {
    *in_force = count < (i64)h.immediate && own > 0.0f ? factor_of(own, h) : before;
  }
  if (!h.remembers) return;
  u32 most = known;
  for (u32 chunk = (h.length - 1) / blockDim.x + 1; chunk-- > 0;) {  // the last first: each number moves one place on
    u32 place = chunk * blockDim.x + threadIdx.x;
    float moved = place == 0 ? own : place < h.length ? amaxes[place - 1] : 0.0f;
    __syncthreads();
    if (place < h.length) amaxes[place] = moved;
    most = max(most, __float_as_uint(moved));
  }
  __syncthreads();
  most = largest_of_block(most);
  if (threadIdx.x == 0) {
    float found = h.recent ? own : __uint_as_float(most);
    *calls = count + 1;
    if ((count + 1) % (i64)h.refresh == 0) *factor = found > 0.0f ? factor_of(found, h) : h.previous ? before : 1.0f;
  }
}
