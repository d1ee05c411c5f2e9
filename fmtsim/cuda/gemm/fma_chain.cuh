// SPDX-License-Identifier: Apache-2.0
// Numbers and layout of fma_chain.cu: panels of 128 words at each k position, in the accumulation order, as panels.cuh
// has them. A word is a number, or two float16 or bfloat16: of the second operand two columns, of the first a row
// twice.
//
// Macro: NUMBERS.
#pragma once
#include "panels.cuh"
#include "problem.cuh"

#define HALVES 0   // pairs of float16
#define BFLOATS 1  // pairs of bfloat16
#define FLOATS 2
#define DOUBLES 3

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

// Exponents of an operand's place: of the lowest bit of any number of the panel, and of the largest number.
struct alignas(4) Span { i16 low, high; };
#define NO_LOW 8192    // of zeros
#define NO_HIGH -8192

// The bits of a float32 that float16 or bfloat16 holds.
DEVICE u32 code_of(float x) {
  u32 bits = as_bits(x), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
  if (NUMBERS == BFLOATS) return magnitude > 0x7F800000u ? 0x7FFFu : bits >> 16;
  i32 field = (i32)(magnitude >> 23);
  if (field == 255) return sign | (magnitude > 0x7F800000u ? 0x7FFFu : 0x7C00u);
  if (field >= 113) return sign | (magnitude - (112u << 23)) >> 13;
  return field < 102 ? sign : sign | ((magnitude & 0x7FFFFFu) | 0x800000u) >> (126 - field);
}
