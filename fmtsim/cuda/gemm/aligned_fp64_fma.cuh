// SPDX-License-Identifier: Apache-2.0
// Layout of the operands of aligned_fp64_fma.cu: a record for each panel of 128 rows and BLOCK k positions
// (panels.cuh).
//
// A record holds the numbers as doubles, k position by k position, in the order in which lanes take them; their
// exponents, of rows twice in a word, of columns two in a word; and a word of signs for each row. The sum of two
// exponents is the exponent field of M (aligned_fp64_fma.cu). Where terms are rounded toward zero a zero is 2^-500 with
// its sign: its products are floored to 0 or -1 as any other tiny product's are. Its exponent is below that of all
// products of numbers.
//
// Macros: BLOCK (1 to 32), FRACTION (at most 40), TERMS (aligned_fp64_fma.cu).
#pragma once
#include "panels.cuh"
#include "problem.cuh"

#define CHUNK 2            // numbers of a load
#define TINY 0x20B00000  // high word of 2^-500
#define EXPONENT_OF_ROW 600
#define EXPONENT_OF_COLUMN (1023 + 52 - FRACTION - EXPONENT_OF_ROW)
#define EXPONENT_OF_ZERO -430  // below twice -149 with any number

#define VALUE_BYTES (BLOCK * PANEL * 8)
#define ROW_BYTES (VALUE_BYTES + BLOCK * PANEL * 4 + PANEL * 4)
#define COLUMN_BYTES (VALUE_BYTES + BLOCK * PANEL * 2 + PANEL * 4)

// Where the exponent of a column lies: a lane's eight side by side.
DEVICE i32 exponent_place(i32 column) {
  i32 inside = column % 32;
  return column / 32 * 32 + inside % 8 / 2 * 8 + inside / 8 * 2 + inside % 2;
}
