// Numbers and layout of the kernels that add products in order (chain.cu, and cut.cu, whose numbers are DOUBLES).
//
// Both operands are cut into panels of 128 words a place, places in the order of sums, words of a place as lanes take
// them. A word is a number, or two float16 or bfloat16: of the second operand two columns, of the first a row twice.
//
// Macros: NUMBERS, and in the product BLOCK, KEPT, CLAMPED (below).
#pragma once
#include "general_sums.cuh"

#define HALVES 0   // pairs of float16
#define BFLOATS 1  // pairs of bfloat16
#define FLOATS 2
#define DOUBLES 3

#define PANEL 128
#if NUMBERS == DOUBLES
typedef double Word;
#elif NUMBERS == FLOATS
typedef float Word;
#else
typedef u32 Word;
#endif
#define DEPTH (128 / (int)(2 * sizeof(Word)))  // places of a stage
#define PAIRS (NUMBERS <= BFLOATS)
#define COLUMNS (PAIRS ? 2 * PANEL : PANEL)    // of the second operand in a panel
#define CHUNK (16 / (int)sizeof(Word))         // words of a load

// Where the word of a row lies, Chunk words being loaded at once: a lane takes rows 8 i + lane / 4 of 64.
template <int Chunk = CHUNK>
DEVICE i32 place_of_row(i32 row) {
  i32 inside = row % 64, lane = inside % 8, i = inside / 8;
  return row / 64 * 64 + i / Chunk * 8 * Chunk + lane * Chunk + i % Chunk;
}

// Where that of a column lies: a lane takes columns 8 j + 2 (lane % 4) and the next of 32.
template <int Chunk = CHUNK>
DEVICE i32 place_of_column(i32 column) {
  i32 inside = column % 32, lane = inside % 8 / 2, i = inside / 8 * 2 + inside % 2;
  return column / 32 * 32 + i / Chunk * 4 * Chunk + lane * Chunk + i % Chunk;
}

// Exponents of an operand's place: of the lowest bit of any number of the panel, and of the largest number.
struct alignas(4) Span { i16 low, high; };
#define NO_LOW 8192    // of zeros
#define NO_HIGH -8192

// The bits of a float32 that float16 or bfloat16 holds.
DEVICE u32 code_of(float x) {
  u32 bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
  if (NUMBERS == BFLOATS) return magnitude > 0x7F800000u ? 0x7FFFu : bits >> 16;
  i32 field = (i32)(magnitude >> 23);
  if (field == 255) return sign | (magnitude > 0x7F800000u ? 0x7FFFu : 0x7C00u);
  if (field >= 113) return sign | (magnitude - (112u << 23)) >> 13;
  return field < 102 ? sign : sign | ((magnitude & 0x7FFFFFu) | 0x800000u) >> (126 - field);
}
