// Values, exponents and signs of one operand for single_pairs.cu, place by place, 128 rows each. One block of threads
// does one panel of one block of K.
//
// Exponents count from LOWEST and are shifted to the place of exponent fields. Zeros, and places without a product, are
// zeros with an exponent below all others.
//
// A block of threads has 2 * PANEL.
//
// Macros: BLOCK, TYPE (general_operands.cuh), EMIN (lowest exponent of the operand), LOWEST and HIGHEST (exponents
// beyond these leave a panel to the general path), COLUMNS (1: the second operand).
#include "groups_values.cuh"
#include "single.cuh"

#define NOWHERE (-128)  // with any other exponent still below 0, twice that no less than an integer holds

KERNEL single_pairs_prepare(const void* x, i64 row_stride, i64 stride, i32 rows, const i32* source, i32 blocks,
                            float* values, i32* exponents, u32* signs, u32* flags) {
  __shared__ u32 masks[2 * PANEL];  // signs, and what is not zero
  i32 panel = blockIdx.x, block = blockIdx.y, thread = threadIdx.x;
  i64 to = (i64)panel * blocks + block;
  masks[thread] = 0;
  __syncthreads();

  bool outside = false;
  i32 own = thread % PANEL, row = panel * PANEL + own, lies = COLUMNS ? own : place_of_row(own);
  for (i32 place = thread / PANEL; place < BLOCK; place += blockDim.x / PANEL) {
    i32 k = source[(i64)block * BLOCK + place];
    u32 bits = k >= 0 && row < rows ? __float_as_uint(read_value(x, row * row_stride + k * stride)) : 0;
    i32 exponent = max((i32)(bits >> 23 & 255) - 127, (i32)EMIN) - LOWEST;
    if (bits >> 31) atomicOr(&masks[lies], 1u << place);
    if (bits << 1) {
      atomicOr(&masks[PANEL + lies], 1u << place);
      if (exponent < 0 || exponent > HIGHEST - LOWEST) outside = true;
    } else {
      exponent = NOWHERE;
    }
    values[to * FLOATS + place * PANEL + lies] = __uint_as_float(bits);
    exponents[to * FLOATS + place * PANEL + lies] = exponent * (1 << 23);
  }
  if (outside) atomicOr(flags + panel, 1u);
  __syncthreads();
  signs[to * 2 * PANEL + thread] = masks[thread];
}
