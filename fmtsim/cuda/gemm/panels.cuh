// SPDX-License-Identifier: Apache-2.0
// The tile loop of kernels whose operands are packed before: panels of 128 rows or columns, in the accumulation order.
//
// A block of 256 threads, eight warps of 64 x 32 outputs, computes a tile of two panels. Where its lanes find their
// words: a lane takes rows 8 i + lane / 4 of 64, and columns 8 j + 2 (lane % 4) and the next of 32, Chunk words being
// loaded at once, so that a quarter of a warp reads 128 bytes that lie side by side.
#pragma once
#include "common.cuh"

#define PANEL 128
#define THREADS 256

template <int Chunk>
DEVICE i32 place_of_row(i32 row) {
  i32 inside = row % 64, lane = inside % 8, i = inside / 8;
  return row / 64 * 64 + i / Chunk * 8 * Chunk + lane * Chunk + i % Chunk;
}

template <int Chunk>
DEVICE i32 place_of_column(i32 column) {
  i32 inside = column % 32, lane = inside % 8 / 2, i = inside / 8 * 2 + inside % 2;
  return column / 32 * 32 + i / Chunk * 4 * Chunk + lane * Chunk + i % Chunk;
}

// Load Count words of a k position from a lane's first one, where places are those of above: 8 words for Apart 8, of
// columns 4.
template <typename T, int Count, int Apart>
DEVICE void load(T (&to)[Count], const T* from) {
  constexpr int CHUNK_OF = 16 / sizeof(T);
  struct alignas(16) Chunk { T value[CHUNK_OF]; };
  UNROLLED for (int i = 0; i < Count; i += CHUNK_OF) {
    const Chunk chunk = *(const Chunk*)(from + i * Apart);
    UNROLLED for (int j = 0; j < CHUNK_OF; ++j) to[i + j] = chunk.value[j];
  }
}

// The panels of a tile. Those of the first operand come in groups of 8, so that blocks that run together share operands
// in the second-level cache.
struct Panels {
  i32 count_a, count_b, a, b;

  DEVICE i64 tile() const { return (i64)a * count_b + b; }
  // Whether either panel is flagged: it has numbers that the kernel does not take.
  DEVICE bool is_flagged(const u32* flags) const { return (flags[a] | flags[count_a + b]) != 0; }
};

DEVICE Panels panels_of(i32 rows, i32 columns, i32 width = PANEL) {
  i32 count_a = (rows + PANEL - 1) / PANEL, count_b = (columns + width - 1) / width;
  i32 group = blockIdx.x / (8 * count_b), height = min(8, count_a - 8 * group), rest = blockIdx.x % (8 * count_b);
  return {count_a, count_b, 8 * group + rest % height, rest / height};
}

// A ring of Stages slots in shared memory, into which fetch(slot, i) starts to copy stage i, of first ... stop - 1. A
// kernel brings the first ones, and then calls bring_next before it works on stage i in `slot`; slot_after has the
// next.
template <int Stages, typename Fetch>
DEVICE void bring_first(i32 first, i32 stop, Fetch fetch) {
  UNROLLED for (int i = 0; i < Stages - 1; ++i) {
    if (first + i < stop) fetch(i, first + i);
    commit_copies();
  }
}

template <int Stages, typename Fetch>
DEVICE void bring_next(i32 slot, i32 i, i32 stop, Fetch fetch) {
  wait_copies<Stages - 2>();
  __syncthreads();
  i32 next = i + Stages - 1;
  if (next < stop) fetch(slot == 0 ? Stages - 1 : slot - 1, next);
  commit_copies();
}

template <int Stages>
DEVICE i32 slot_after(i32 slot) { return slot + 1 == Stages ? 0 : slot + 1; }

// Add the blocks begin ... end - 1 of a part, one a stage: add(slot). end_chain() follows each chain where chains are
// promoted, else the last block.
template <int Stages, bool Promotes, typename Fetch, typename EndChain, typename Add>
DEVICE void add_blocks(i32 begin, i32 end, const u8* ends, Fetch fetch, EndChain end_chain, Add add) {
  bring_first<Stages>(begin, end, fetch);
  for (i32 block = begin, slot = 0; block < end; ++block, slot = slot_after<Stages>(slot)) {
    bring_next<Stages>(slot, block, end, fetch);
    add(slot);
    if (Promotes && ends[block]) end_chain();
  }
  if (!Promotes) end_chain();
}

// Write the 64 results of a lane, float32 [part, rows, columns], or add them to those of earlier chains: value(i, j) is
// of its row i and column j.
template <typename Value>
DEVICE void write_floats(float* sums, i32 rows, i32 columns, const Panels& panels, bool first, Value value) {
  const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i32 top = panels.a * PANEL + warp % 2 * 64 + lane / 4, left = panels.b * PANEL + warp / 2 * 32 + lane % 4 * 2;
  sums += (i64)blockIdx.z * rows * columns;
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      const i32 row = top + i * 8, column = left + j / 2 * 8 + j % 2;
      if (row >= rows || column >= columns) continue;
      float* place = sums + (i64)row * columns + column;
      *place = first ? value(i, j) : *place + value(i, j);
    }
}
