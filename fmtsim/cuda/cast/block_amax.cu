// Largest finite magnitudes of blocks, before the kernels that cast under them: rows, groups, tiles, whole tensors.
//
// found[2 b] rises to the amax of block b as float32 bits, found[2 b + 1] gets bit 0 for NaN and bit 1 for Inf. A tensor
// under one scale is read by a grid that stays: few atomics meet at one address.
#include "block_vectors.cuh"

#define WORDS_EACH 4  // vectors a thread has on their way

typedef Packed<VECTOR, INPUT_BITS> Input;

struct Found { u32 amax, flags; };

DEVICE Found look(u32 top, const Input& v) {
  u32 amax = amax_of_raw(top), flags = 0;
  if (amax >= FLOAT_EXPONENT) {
    bool has_nan = false;
    amax = finite_amax<VECTOR>(v, has_nan);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      if (widened(v.get(i) & (INPUT == 0 ? MAGNITUDE : 0x7FFFu)) == FLOAT_EXPONENT) flags = 2;
    flags |= has_nan;
  }
  return {amax, flags};
}

DEVICE void raise(u32* found, u64 block, Found f) {
  if (f.amax > 0) atomicMax(found + 2 * block, f.amax);
  if (f.flags) atomicOr(found + 2 * block + 1, f.flags);
}

KERNEL __launch_bounds__(256) amax_of_tensor(const void* x, u32* found, u64 vectors) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  Found all = {0, 0};
  for (u64 at = first; at < vectors; at += WORDS_EACH * stride) {
    Input v[WORDS_EACH];
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) {
      v[i].clear();
      if (at + i * stride < vectors) v[i] = load_vector<VECTOR, INPUT_BITS>(x, (at + i * stride) * VECTOR);
    }
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) top = raw_larger(top, raw_amax<VECTOR>(v[i]));
    u32 amax = amax_of_raw(top);
    if (amax < FLOAT_EXPONENT) {
      all.amax = max(all.amax, amax);
    } else {
#pragma unroll
      for (int i = 0; i < WORDS_EACH; ++i) {
        Found f = look(raw_amax<VECTOR>(v[i]), v[i]);
        all = {max(all.amax, f.amax), all.flags | f.flags};
      }
    }
  }
  all = {__reduce_max_sync(~0u, all.amax), __reduce_or_sync(~0u, all.flags)};
  __shared__ Found warps[8];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 w = 1; w < blockDim.x / 32; ++w) all = {max(all.amax, warps[w].amax), all.flags | warps[w].flags};
    raise(found, 0, all);
  }
}

// Pieces of rows, each the columns of one block, go to blocks of `outer` rows (see Pieces in block_rows.cu).
KERNEL __launch_bounds__(256) amax_of_runs(
    const void* x, u32* found, u64 vectors, u32 vectors_per_piece, u32 across, u32 outer) {
  u64 first = (u64)blockIdx.x * blockDim.x * WORDS_EACH + threadIdx.x;
  Input v[WORDS_EACH];
#pragma unroll
  for (int i = 0; i < WORDS_EACH; ++i) {
    u64 at = first + i * blockDim.x;
    v[i].clear();
    if (at < vectors) v[i] = load_vector<VECTOR, INPUT_BITS>(x, at * VECTOR);
  }
#pragma unroll
  for (int i = 0; i < WORDS_EACH; ++i) {
    u64 at = first + i * blockDim.x;
    Found f = look(raw_amax<VECTOR>(v[i]), v[i]);
    u32 piece = (u32)(min(at, vectors - 1) / vectors_per_piece), row = piece / across;
    u32 block = outer == 1 ? piece : row / outer * across + (piece - row * across);
    if (vectors_per_piece % 32 == 0) {  // a warp's vectors share a block
      f = {__reduce_max_sync(~0u, f.amax), __reduce_or_sync(~0u, f.flags)};
      if (at < vectors && threadIdx.x % 32 == 0) raise(found, block, f);
    } else if (at < vectors) {
      raise(found, block, f);
    }
  }
}
