// SPDX-License-Identifier: Apache-2.0
// Packs an operand of fma_chain.cu (fma_chain.cuh); a block of threads writes 32 k positions of a panel.
//
// A place without a product is -0 times +0, which no sum notices: x + (-0) is x for every x, -0 included.
//
// Macros: NUMBERS, TYPE (operands.cuh), SECOND (1: the second operand), SPANS (1: spans of exponents are wanted).
#include "fma_chain.cuh"

#define PLACES 32
#define ROWS (SECOND ? COLUMNS : PANEL)

DEVICE Span span_of(float x) {
  u32 magnitude = as_bits(x) & 0x7FFFFFFFu;
  if (magnitude == 0 || magnitude >= 0x7F800000u) return Span{NO_LOW, NO_HIGH};
  i32 field = (i32)(magnitude >> 23), last = max(field, 1) - 150;
  u32 significand = (magnitude & 0x7FFFFFu) | (field ? 0x800000u : 0);
  return Span{(i16)(last + __ffs((i32)significand) - 1), (i16)(last + 31 - __clz((i32)significand))};
}

struct Given {
  const void* x;
  i64 row_stride, stride;
  i32 rows;
};

DEVICE Value number_at(const Given& g, i32 row, i32 k) {
  if (k < 0) return SECOND ? 0.0f : -0.0f;
  return row < g.rows ? read_value(g.x, row * g.row_stride + k * g.stride) : 0.0f;
}

KERNEL __launch_bounds__(THREADS)
pack_operand(const void* x, i64 row_stride, i64 stride, i32 rows, const i32* source, i32 block, i32 padded, i32 blocks,
             i64 places, Word* words, Span* spans, u32* flags) {
  __shared__ Word tile[PLACES][PANEL + CHUNK];
  __shared__ i32 ks[PLACES];
  __shared__ i32 low[PLACES], high[PLACES];
  Given operand = {x, row_stride, stride, rows};
  i32 panel = blockIdx.x, thread = threadIdx.x;
  i64 first = (i64)blockIdx.y * PLACES;
  // 1. the k of each place
  if (thread < PLACES) {
    i64 place = first + thread, of_block = place / padded;
    i32 inside = (i32)(place - of_block * padded);
    ks[thread] = of_block < blocks && inside < block ? source[of_block * block + inside] : -1;
    low[thread] = NO_LOW, high[thread] = NO_HIGH;
  }
  __syncthreads();
  bool special = false;
  // 2. numbers as words into shared memory, read along memory, and spans of their exponents
  for (i32 i = thread; i < PANEL * PLACES; i += THREADS) {
    i32 place = stride == 1 ? i % PLACES : i / PANEL, word = stride == 1 ? i / PLACES : i % PANEL;
    i32 row = panel * ROWS + (PAIRS && SECOND ? 2 * word : word), k = ks[place];
    Value value = number_at(operand, row, k);
    i32 lies = SECOND ? place_of_column<CHUNK>(word) : place_of_row<CHUNK>(word);
#if PAIRS
    u32 code = code_of((float)value);
    tile[place][lies] = code | (SECOND ? code_of((float)number_at(operand, row + 1, k)) : code) << 16;
#elif NUMBERS == FLOATS
    tile[place][lies] = (float)value;
    special |= (as_bits((float)value) & 0x7F800000u) == 0x7F800000u;
#else
    tile[place][lies] = (double)value;
    if (!SPANS) continue;
    special |= (as_bits((float)value) & 0x7F800000u) == 0x7F800000u;
    Span span = span_of((float)value);
    if (span.high != NO_HIGH) {
      atomicMin(low + place, (i32)span.low);
      atomicMax(high + place, (i32)span.high);
    }
#endif
  }
  if (!PAIRS && special) atomicOr(flags + panel, 1u);
  __syncthreads();
  // 3. words and spans out
  Word* to = words + ((i64)panel * places + first) * PANEL;
  i32 count = (i32)min((i64)PLACES, places - first) * PANEL;
  for (i32 i = thread; i < count; i += THREADS) to[i] = tile[i / PANEL][i % PANEL];
#if SPANS
  if (thread < PLACES && first + thread < places)
    spans[(i64)panel * places + first + thread] = Span{(i16)low[thread], (i16)high[thread]};
#endif
}
