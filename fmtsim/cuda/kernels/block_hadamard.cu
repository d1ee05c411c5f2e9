// A Hadamard transform of groups of SIZE neighbours, and the cast of what it gives into blocks of RUN: one pass.
//
// y = (s x) H / sqrt(SIZE) in float32 (fmtsim/scaling/hadamard.py has the order of operations): butterflies at distance
// 1, 2, 4, 8 within the sixteen numbers that a thread holds, at 16, 32, 64 with other lanes, then one product.
// AMAX_ONLY finds the largest magnitude of y in the whole tensor, for formats with a scale of the tensor. RUN 0 writes
// y itself.
#include "block.cuh"
#include "block_exact.cuh"

#define HELD 16
#define CHUNK (128 / INPUT_BITS)  // elements of 16 bytes
#define SPAN (RUN > HELD ? RUN / HELD : 1)

struct alignas(16) Signs {
  u32 mask[4];         // bit j: element j of each group changes its sign
  const float* given;  // the same as the signs of SIZE floats, or null
};

// The sixteen numbers of a block's lane cast one by one; all lanes of a warp call it together (see block_rows.cu).
__device__ __noinline__ float cast_exactly(
    const float (&y)[HELD], void* out, u64 first, bool mine, u32 amax, bool has_nan, TensorScale tensor, const Cast& c) {
  BlockScale s = scale_of({0.0, (double)as_float(amax), has_nan}, c.scale, tensor);
  bool spoiled = has_nan && !c.scale.element_has_nan;
  Packed<HELD, OUTPUT_BITS> z;
  z.clear();
#pragma unroll 1
  for (int i = 0; i < (mine ? HELD : 0); ++i) {
    float decode = WITHOUT_TENSOR_SCALE ? 1.0f : tensor.decode;
    ExactElement e = exact_element(y[i], false, first + i, s, spoiled, decode, c, c.draw);
    z.put(i, OUTPUT <= 1 ? narrowed(e.value, OUTPUT) : (u32)e.code);
  }
  if (mine) store_vector<HELD, OUTPUT_BITS>(out, first, z);
  return spoiled ? as_float(0x7FC00000) : s.scale;
}

DEVICE void transform(float (&y)[HELD], const Signs& signs, u32 lane) {
  u32 group = lane * HELD % SIZE;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    u32 flip = signs.given != nullptr ? as_bits(signs.given[group + i]) & ~MAGNITUDE
                                      : (signs.mask[(group + i) / 32] >> ((group + i) % 32) & 1) << 31;
    y[i] = as_float(as_bits(y[i]) ^ flip);
  }
#pragma unroll
  for (int distance = 1; distance < HELD; distance *= 2) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (i & distance) continue;
      float a = y[i], b = y[i + distance];
      y[i] = __fadd_rn(a, b);
      y[i + distance] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int flip = 1; flip < SIZE / HELD; flip *= 2) {
    float sign = lane & flip ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) y[i] = __fmaf_rn(y[i], sign, __shfl_xor_sync(~0u, y[i], flip));
  }
#pragma unroll
  for (int i = 0; i < HELD; ++i) y[i] = __fmul_rn(y[i], as_float(ROOT));
}

KERNEL __launch_bounds__(256) hadamard(
    const void* x, void* out, void* scales, u32* tensor, float* tensor_scale, u64 total,
    const __grid_constant__ Signs signs, const __grid_constant__ Cast c) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u64 first = thread * HELD;
  bool there = first < total;
  float y[HELD];
#pragma unroll
  for (int v = 0; v < HELD; v += CHUNK) {
    Packed<CHUNK, INPUT_BITS> in;
    in.clear();
    if (there) in = load_vector<CHUNK, INPUT_BITS>(x, first + v);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      u32 bits = in.get(i);
#if INPUT == 2
      y[v + i] = (bits & 0x7C00) == 0x7C00 ? as_float((bits & 0x8000) << 16 | FLOAT_EXPONENT | (bits & 0x3FF) << 13)
                                           : input_value(bits);
#else
      y[v + i] = input_value(bits);
#endif
    }
  }
  transform(y, signs, (u32)thread % 32);

  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) amax = max(amax, as_bits(y[i]) & MAGNITUDE);
#if AMAX_ONLY
  if (amax >= FLOAT_EXPONENT) {
    amax = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      u32 magnitude = as_bits(y[i]) & MAGNITUDE;
      if (magnitude < FLOAT_EXPONENT) amax = max(amax, magnitude);
    }
  }
  amax = __reduce_max_sync(~0u, amax);
  __shared__ u32 warps[8];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 w = 1; w < blockDim.x / 32; ++w) amax = max(amax, warps[w]);
    if (amax > tensor[0]) atomicMax(tensor, amax);
  }
#elif RUN == 0
  Packed<HELD, OUTPUT_BITS> z;
  z.clear();
#pragma unroll
  for (int i = 0; i < HELD; ++i) z.put(i, y[i] == y[i] ? as_bits(y[i]) : 0x7FC00000u);
  if (there) store_vector<HELD, OUTPUT_BITS>(out, first, z);
#else
  TensorScale scale = {1.0f, 1.0f}, step = {1.0f, 1.0f};
#if TWO_LEVEL
  scale = tensor_scale_of(as_float(tensor[0]), c.scale);
  step = {at_most_float_max(__fmul_rn(scale.encode, c.scale.reciprocal_max)), scale.decode};
  if (tensor_scale != nullptr && thread == 0) *tensor_scale = scale.decode;
#endif
#pragma unroll
  for (int flip = 1; flip < SPAN; flip *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, flip));
  bool strange = amax >= FLOAT_EXPONENT, has_nan = false;
  if (__any_sync(~0u, strange)) {
    u32 finite = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      u32 magnitude = as_bits(y[i]) & MAGNITUDE;
      if (magnitude < FLOAT_EXPONENT) finite = max(finite, magnitude);
      has_nan |= magnitude > FLOAT_EXPONENT;
    }
    for (int flip = 1; flip < SPAN; flip *= 2) {
      finite = max(finite, __shfl_xor_sync(~0u, finite, flip));
      has_nan |= (bool)__shfl_xor_sync(~0u, (i32)has_nan, flip);
    }
    if (strange) amax = finite;
  }
  FastBlock block = fast_block(amax, step);
  bool exactly = there && (strange || block.refused);
  if (there && !exactly) {
    Packed<HELD, OUTPUT_BITS> z;
    z.clear();
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      u32 rest = STOCHASTIC ? ~random_integer(first + i, c.draw, nullptr) : 0;
      if (OUTPUT >= 2) z.put(i, fast_code(y[i], rest, block));
      else z.put(i, as_bits(fast_value(y[i], rest, block, scale.decode)) >> (32 - OUTPUT_BITS));
    }
    store_vector<HELD, OUTPUT_BITS>(out, first, z);
  }
  if (__any_sync(~0u, exactly)) {
    float copy[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) copy[i] = y[i];
    float stored = cast_exactly(copy, out, first, exactly, amax, has_nan, scale, c);
    if (exactly) block.stored = stored;
  }
#if OUTPUT >= 2
  if (there && thread % SPAN == 0) store_scale(scales, first / RUN, block.stored);
#endif
#endif
}
