// An operand in the layout of cut.cuh; a block of 256 threads makes a record.
//
// Macros: BLOCK, FRACTION, TYPE (general_operands.cuh), SECOND (1: the second operand), EMIN (lowest exponent of the
// operand), ENLARGED (numbers are multiplied by 1 + 2^-ENLARGED; 0: not), TERMS (cut.cu).
#include "groups_values.cuh"
#include "cut.cuh"

KERNEL __launch_bounds__(256)
cut_prepare(const void* x, i64 row_stride, i64 stride, i32 rows, const i32* source, i32 blocks, u8* records, u32* flags) {
  __shared__ u32 signs[PANEL];
  i32 panel = blockIdx.x, block = blockIdx.y, thread = threadIdx.x;
  u8* record = records + ((i64)panel * blocks + block) * (SECOND ? COLUMN_BYTES : ROW_BYTES);
  double* values = (double*)record;
  u32* of_rows = (u32*)(record + VALUE_BYTES);
  u16* of_columns = (u16*)(record + VALUE_BYTES);
  if (thread < PANEL) signs[thread] = 0;
  __syncthreads();
  bool special = false;
  for (i32 i = thread; i < PANEL * BLOCK; i += 256) {
    i32 place = stride == 1 ? i % BLOCK : i / PANEL, row = stride == 1 ? i / BLOCK : i % PANEL;
    i32 k = source[(i64)block * BLOCK + place], from = panel * PANEL + row;
    u32 bits = k >= 0 && from < rows ? __float_as_uint(read_value(x, from * row_stride + k * stride)) : 0;
    special |= (bits & 0x7F800000u) == 0x7F800000u;
    double value = (double)__uint_as_float(bits);
    i32 exponent = EXPONENT_OF_ZERO;
    if (bits << 1) {
      exponent = max((__double2hiint(value) >> 20 & 0x7FF) - 1023, EMIN);
      if (ENLARGED) value = __fma_rn(value, 1.0 / (double)(1ull << ENLARGED), value);
    } else if (TERMS == MODE_ZERO) {
      value = __hiloint2double(TINY | (i32)bits, 0);
    }
    if (bits >> 31) atomicOr(signs + row, 1u << place);
    i32 at = place * PANEL;
    values[at + (SECOND ? place_of_column(row) : place_of_row(row))] = value;
    exponent += SECOND ? EXPONENT_OF_COLUMN : EXPONENT_OF_ROW;
    if (SECOND) of_columns[at + exponent_place(row)] = (u16)exponent;
    else of_rows[at + place_of_row<4>(row)] = (u32)exponent << 16 | (u32)exponent;
  }
  if (special) atomicOr(flags + panel, 1u);
  __syncthreads();
  u32* to = (u32*)(record + (SECOND ? COLUMN_BYTES : ROW_BYTES) - PANEL * 4);
  if (thread < PANEL) to[SECOND ? place_of_column<4>(thread) : place_of_row<4>(thread)] = signs[thread];
}
