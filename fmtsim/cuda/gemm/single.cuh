// How the float32 kernels of fused units lay out their operands.
//
// Both operands are cut into panels of 128 rows and blocks of the unit. A panel of one block is contiguous: float32
// values, place by place, 128 of them in the order in which lanes take them; powers of two that stand for exponents,
// as fragments of the bf16 tensor core; and the signs of a row as bits.
//
// Macros: BLOCK (places of a block).
#pragma once
#include "common.cuh"

#define PANEL 128
#define TILES (PANEL / 16)
#define STEPS ((BLOCK + 15) / 16)
#define MASKS ((BLOCK + 31) / 32)
#define FLOATS (BLOCK * PANEL)
#define POWERS (TILES * STEPS * 32)  // of 16 bytes

// Where row `row` of a panel lies among 128: a lane takes rows 8 i + lane / 4 of 64 as two times four numbers, a
// quarter of a warp reads 128 bytes that lie side by side.
DEVICE i32 place_of_row(i32 row) {
  i32 inside = row % 64, lane = inside % 8, i = inside / 8;
  return row / 64 * 64 + i / 4 * 32 + lane * 4 + i % 4;
}

// Where a column lies: a lane takes columns 8 j + 2 (lane % 4) and the next of 32, as two times four numbers.
DEVICE i32 place_of_column(i32 column) {
  i32 inside = column % 32, lane = inside % 8 / 2, j = inside / 8 * 2 + inside % 2;
  return column / 32 * 32 + j / 4 * 16 + lane * 4 + j % 4;
}
