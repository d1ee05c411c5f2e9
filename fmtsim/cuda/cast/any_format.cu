// SPDX-License-Identifier: Apache-2.0
// Casts to every format, rounding, overflow and scale rule from every dtype, one element a thread, exactly: what faster
// kernels do not take. Element formats in contiguous tensors; block formats, blocks of any shape, in tensors of any
// strides.
#include "scale.cuh"

// A tensor as [leading, inner, trailing]: `inner` runs along the blocks' inner axis; the other two, leading first, are
// the outer axis. Strides are in elements. Counts are of blocks along the inner axis.
struct alignas(16) BlockLayout {
  i64 leading, inner, trailing;
  i64 x_strides[3], out_strides[3];
  i64 block_outer, block_inner, across;
  i32 input, output;   // Dtype; of codes: 4 + log2 of their bytes
  i32 trailing_first;  // whether neighbouring threads take neighbours along the trailing axis, else along the inner one
  i32 writes_codes;
};

// Of each block: bits of -low, of high (doubles that are not negative order like integers), and whether it holds NaN.
struct BlockWords {
  u64 negative, positive, nan;
};

struct Place {
  i64 x, out;    // offsets
  u64 index;     // row-major place in the tensor
  u64 block;     // place in the grid of blocks
  bool opens;    // the first element of its block
};

DEVICE Place place_of(u64 thread, const BlockLayout& t) {
  i64 lead, inner, trail;
  if (t.trailing_first) {
    trail = thread % t.trailing, inner = thread / t.trailing % t.inner, lead = thread / t.trailing / t.inner;
  } else {
    inner = thread % t.inner, trail = thread / t.inner % t.trailing, lead = thread / t.inner / t.trailing;
  }
  i64 row = lead * t.trailing + trail;
  i64 down = row / t.block_outer, across = inner / t.block_inner;
  Place p;
  p.x = lead * t.x_strides[0] + inner * t.x_strides[1] + trail * t.x_strides[2];
  p.out = lead * t.out_strides[0] + inner * t.out_strides[1] + trail * t.out_strides[2];
  p.index = (lead * t.inner + inner) * t.trailing + trail;
  p.block = down * t.across + across;
  p.opens = row == down * t.block_outer && inner == across * t.block_inner;
  return p;
}

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

KERNEL block_extremes(const void* x, BlockWords* blocks, u64 total, const __grid_constant__ BlockLayout t) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  Place p = place_of(thread < total ? thread : total - 1, t);
  double value = thread < total ? load_element(x, p.x, t.input) : 0.0;
  bool finite = value - value == 0.0;
  u64 negative = finite && value < 0.0 ? (u64)__double_as_longlong(-value) : 0;
  u64 positive = finite && value > 0.0 ? (u64)__double_as_longlong(value) : 0;
  bool nan = value != value;
  bool leads = true;
  if (__all_sync(~0u, p.block == __shfl_sync(~0u, p.block, 0))) {
    UNROLLED for (int flip = 1; flip < 32; flip *= 2) {
      negative = larger(negative, __shfl_xor_sync(~0u, negative, flip));
      positive = larger(positive, __shfl_xor_sync(~0u, positive, flip));
    }
    nan = __any_sync(~0u, nan);
    leads = threadIdx.x % 32 == 0;
  }
  if (!leads) return;
  BlockWords* block_words = blocks + p.block;
  if (negative) atomicMax(&block_words->negative, negative);
  if (positive) atomicMax(&block_words->positive, positive);
  if (nan) block_words->nan = 1;
}

// blocks: null for element formats, which have no scales.
KERNEL cast(
    const void* x, void* out, float* scales, i32* offsets, float* tensor_scale, const BlockWords* blocks,
    const BlockWords* tensor, u64 total, const __grid_constant__ BlockLayout t, const __grid_constant__ Cast c) {
  const FormatRule& s = c.scale;
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= total) return;
  Place p = {(i64)thread, (i64)thread, thread, 0, false};
  TensorScale whole = {1.0f, 1.0f};
  Scale scale = {1.0f, 1.0f, 1.0f, 0};
  bool invalid = false;
  if (s.two_level) {
    u64 top = larger(tensor->negative, tensor->positive);
    whole = te_tensor(__longlong_as_double((i64)top), s);
    if (thread == 0 && tensor_scale != nullptr) *tensor_scale = whole.decode;
  }
  if (blocks != nullptr) {
    p = place_of(thread, t);
    BlockWords words = blocks[p.block];
    BlockExtremes extremes = {
        -__longlong_as_double((i64)words.negative), __longlong_as_double((i64)words.positive), words.nan != 0};
    scale = scale_of(extremes, s, whole);
    invalid = extremes.has_nan && (s.zero_point || !s.element_has_nan);
  }
  double value = load_element(x, p.x, t.input);
  ExactElement y = exact_element(value, t.input == FLOAT64, p.index, scale, invalid, whole.decode, c, c.draw);
  if (!t.writes_codes) {
    store_value(out, p.out, y.value, t.output);
    return;
  }
  if (t.output == 4) ((u8*)out)[p.out] = (u8)y.code;
  if (t.output == 5) ((u16*)out)[p.out] = (u16)y.code;
  if (t.output == 6) ((u32*)out)[p.out] = (u32)y.code;
  if (t.output == 7) ((u64*)out)[p.out] = y.code;
  if (p.opens && scales != nullptr) {
    scales[p.block] = invalid ? __int_as_float(0x7FC00000) : scale.stored;
    if (offsets != nullptr) offsets[p.block] = scale.number;
  }
}

// Packed codes of an element format, at most 32 bits each: a thread packs eight codes of a row, as many bytes as a code
// has bits.
KERNEL encode_rows(
    const void* x, u8* codes, i64 rows, i64 columns, i32 width, i32 dtype, const __grid_constant__ Cast c) {
  i64 groups = (columns + 7) / 8, thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= rows * groups) return;
  i64 row = thread / groups, column = thread % groups * 8, bytes = (columns * width + 7) / 8;
  u8* to = codes + row * bytes + column / 8 * width;
  u64 pending = 0;
  i32 bits = 0;
  for (i64 k = row * columns + column; k < (row + 1) * columns && k < row * columns + column + 8; k++) {
    u32 word = random_integer((u64)k, c.draw, c.given);
    pending |= element_code(real_of(load_element(x, k, dtype)), word, c.element, c.tables) << bits;
    for (bits += width; bits >= 8; bits -= 8, pending >>= 8) *to++ = (u8)pending;
  }
  if (bits) *to = (u8)pending;
}

// scales: null for element formats.
KERNEL decode(
    const void* codes, const float* scales, const i32* offsets, const float* tensor_scale, void* out, u64 total,
    const __grid_constant__ BlockLayout t, const __grid_constant__ Element e, const __grid_constant__ Tables tables) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= total) return;
  Place p = {(i64)thread, (i64)thread, thread, 0, false};
  if (scales != nullptr) p = place_of(thread, t);
  u64 code = 0;
  if (t.input == 4) code = ((const u8*)codes)[p.x];
  if (t.input == 5) code = ((const u16*)codes)[p.x];
  if (t.input == 6) code = ((const u32*)codes)[p.x];
  if (t.input == 7) code = ((const u64*)codes)[p.x];
  code &= e.code_mask;
  double value = offsets != nullptr ? (double)((i64)code - offsets[p.block]) : element_value(code, e, tables);
  if (scales != nullptr) value = __dmul_rn(value, (double)scales[p.block]);
  if (tensor_scale != nullptr) value = __dmul_rn(value, (double)*tensor_scale);
  store_value(out, p.out, value == value ? value : __longlong_as_double((i64)NAN64), t.output);
}
