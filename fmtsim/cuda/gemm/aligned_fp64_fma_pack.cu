// SPDX-License-Identifier: Apache-2.0
// Packs an operand of aligned_fp64_fma.cu (aligned_fp64_fma.cuh); a block of threads writes a record.
//
// Macros: BLOCK, FRACTION, TYPE (operands.cuh), SECOND (1: the second operand), EMIN (lowest exponent of the operand),
// ENLARGED (numbers are multiplied by 1 + 2^-ENLARGED; 0: not), TERMS (aligned_fp64_fma.cu), SCALED (1: by scales of
// the unit).
#include "aligned_fp64_fma.cuh"

struct alignas(8) Source {
  const void* x;
  const float* scales;  // [rows, groups along K]
  i64 row_stride, stride, scale_row_stride, scale_stride;
  const i32* order;     // of a k position: its k, -1 for none
  i32 rows, length, blocks, records;  // k positions of a block of the unit; blocks; records of a block
  i32 scale_every, scale_emin;
};

// A number, its exponent, and whether the kernel does not take it: NaN, Inf, or too far from 1.
struct Number { double value; i32 exponent; bool special; };

DEVICE i32 exponent_of(double x) { return (__double2hiint(x) >> 20 & 0x7FF) - 1023; }

DEVICE Number number_at(const Source& from, i32 row, i32 k) {
  if (k < 0 || row >= from.rows) return {0.0, 0, false};
  const float x = (float)read_value(from.x, row * from.row_stride + k * from.stride);
  Number n = {(double)x, 0, (as_bits(x) & 0x7F800000u) == 0x7F800000u};
  n.exponent = max(exponent_of(n.value), EMIN);
#if SCALED
  const float scale = fabsf(from.scales[row * from.scale_row_stride + k / from.scale_every * from.scale_stride]);
  const i32 of_scale = max(exponent_of((double)scale), from.scale_emin);
  n.special |= (as_bits(scale) & 0x7F800000u) == 0x7F800000u;
  n.value *= (double)scale;
  n.exponent += of_scale;
  n.special |= n.value != 0.0 && (n.exponent > 127 || exponent_of(n.value) < -149);
#endif
  return n;
}

KERNEL __launch_bounds__(THREADS) pack_operand(const Source from, u8* records, u32* flags) {
  __shared__ u32 signs[PANEL];
  i32 panel = blockIdx.y, thread = threadIdx.x, inside = (i32)(blockIdx.x % from.records) * BLOCK;
  i64 first = (i64)(blockIdx.x / from.records) * from.length + inside;
  u8* record = records + ((i64)panel * from.blocks * from.records + blockIdx.x) * (SECOND ? COLUMN_BYTES : ROW_BYTES);
  double* values = (double*)record;
  u32* of_rows = (u32*)(record + VALUE_BYTES);
  u16* of_columns = (u16*)(record + VALUE_BYTES);
  if (thread < PANEL) signs[thread] = 0;
  __syncthreads();
  bool special = false;
  // 1. numbers, exponents and signs of the record
  for (i32 i = thread; i < PANEL * BLOCK; i += THREADS) {
    i32 place = from.stride == 1 ? i % BLOCK : i / PANEL, row = from.stride == 1 ? i / BLOCK : i % PANEL;
    i32 k = inside + place < from.length ? from.order[first + place] : -1;
    Number n = number_at(from, panel * PANEL + row, k);
    bool negative = __double2hiint(n.value) < 0;
    special |= n.special;
    if (n.value == 0.0) {
      n.exponent = EXPONENT_OF_ZERO;
      if (TERMS == MODE_TOWARD_ZERO) n.value = __hiloint2double(TINY | (negative ? 1 << 31 : 0), 0);
    } else if (ENLARGED) {
      n.value = __fma_rn(n.value, 1.0 / (double)(1ull << ENLARGED), n.value);
    }
    if (negative) atomicOr(signs + row, 1u << place);
    i32 at = place * PANEL;
    values[at + (SECOND ? place_of_column<CHUNK>(row) : place_of_row<CHUNK>(row))] = n.value;
    n.exponent += SECOND ? EXPONENT_OF_COLUMN : EXPONENT_OF_ROW;
    if (SECOND) of_columns[at + exponent_place(row)] = (u16)n.exponent;
    else of_rows[at + place_of_row<4>(row)] = (u32)n.exponent << 16 | (u32)n.exponent;
  }
  if (special) atomicOr(flags + panel, 1u);
  __syncthreads();
  // 2. a word of signs a row
  u32* to = (u32*)(record + (SECOND ? COLUMN_BYTES : ROW_BYTES) - PANEL * 4);
  if (thread < PANEL) to[SECOND ? place_of_column<4>(thread) : place_of_row<4>(thread)] = signs[thread];
}
