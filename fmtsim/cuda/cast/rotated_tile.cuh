// Tiles of rotated operands in shared memory, [TILE_ROWS, TILE_COLUMNS], and what a lane takes of them.
#pragma once
#include "rotated.cuh"

#define THREADS 128
#define TILE_ROWS (DOWN ? HELD * LANES : 64)
#define TILE_COLUMNS (THREADS * 64 / TILE_ROWS)
#define PITCH (TILE_COLUMNS + 8)  // elements from row to row: spreads rows over the banks
#define GAP (64 / LANES)          // every 32 rows, so that lanes meet other banks
#define PLACE(row) ((row) * PITCH + (row) / HELD * GAP)
#define TILE_ELEMENTS (PLACE(TILE_ROWS - 1) + PITCH)

struct Corner { i64 row, column; };

DEVICE Corner corner_of(i64 across, i64 down) { return {down * TILE_ROWS, across * TILE_COLUMNS}; }

// Copy between memory and tile; what lies outside of the matrix counts as zeros.
template <bool STORES>
DEVICE void copy_tile(u16* memory, u16* tile, Corner corner, const RotatedJob& job) {
#pragma unroll
  for (int k = 0; k < TILE_ROWS * TILE_COLUMNS / 8 / THREADS; ++k) {
    u32 vector = k * THREADS + threadIdx.x, row = vector / (TILE_COLUMNS / 8), column = vector % (TILE_COLUMNS / 8) * 8;
    bool there = corner.row + row < job.rows && corner.column + column < job.columns;
    u16* far = memory + (corner.row + row) * job.columns + corner.column + column;
    Words4* near = (Words4*)(tile + PLACE(row) + column);
    if (STORES) {
      if (there) *(Words4*)far = *near;
    } else {
      *near = there ? *(const Words4*)far : Words4{0, 0, 0, 0};
    }
  }
}

DEVICE float loaded(u32 bits, const RotatedJob& job) {
  return SCALED ? __fmul_rn(as_float(bits), *job.factor) : as_float(bits);
}

DEVICE void load_across(float (&y)[HELD], const u16* from, const RotatedJob& job) {
#pragma unroll
  for (int v = 0; v < HELD; v += 8) {
    Packed<8, 16> in = load_vector<8, 16>(from, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[v + i] = loaded(i % 2 ? in.words[i / 2] & 0xFFFF0000u : in.words[i / 2] << 16, job);
  }
}

// Column `odd` of two columns that begin at a word.
DEVICE void load_down(float (&y)[HELD], const u16* from, int odd, const RotatedJob& job) {
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    u32 word = *(const u32*)(from + i * PITCH);
    y[i] = loaded(odd ? word & 0xFFFF0000u : word << 16, job);
  }
}

struct AcrossPlace { u32 row, column; };
DEVICE AcrossPlace across_place(int task) {
  u32 at = task * THREADS + threadIdx.x;
  return {at / (TILE_COLUMNS / HELD), at % (TILE_COLUMNS / HELD) * HELD};
}
struct DownPlace { u32 row, column; };
DEVICE DownPlace down_place() { return {threadIdx.x % LANES * HELD, threadIdx.x / LANES * 2}; }
