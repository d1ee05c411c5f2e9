// What the kernels of rotated operands share: their macros, jobs, and the transforms of the numbers that a lane holds.
//
// A thread takes 32 neighbours of a line, and LANES lanes side by side hold 32 LANES neighbours: 64, which share random
// words, or the 128 of a long transform. ACROSS or DOWN says along what a matrix is cast, its rows or its columns;
// ACROSS_SIZE and DOWN_SIZE are the elements of a transform (1: none), NARROWS says that its result becomes bfloat16,
// SCALED that x is multiplied by a number first, COUNTED that keys move on by a number on the device, RUN is the elements
// of a scale's block, 16 or 32. CAST follows:
#pragma once
#define BLOCK_FORMAT 0  // the cast of a block format (block.cuh); scales of the tensor stay outside
#define DEVIATION 1     // scale = power of two below RN32(RN32(deviation * FACTOR) + OFFSET); ties go to zero
#define LARGEST 2       // scale = MULTIPLIER * power of two below RN32(amax / TOP), or 1; MULTIPLIER stays outside
#define CORRECTED 3     // two levels as in Quartet II, scales corrected over GROUP elements and rounded stochastically
#include "block.cuh"
#include "block_exact.cuh"

#define HELD 32
#define PIECES (HELD / RUN)
#define SLICES(size) ((size) > HELD ? (size) / HELD : 1)  // lanes of a transform

struct alignas(16) RotatedJob {
  const u16* x;         // [rows, columns]
  u16 *across, *down;   // the results, like x
  u8* mask;             // of the result along the rows, or null
  u32* parts;           // [2, part_count]: amaxes of parts of the tensor as it is cast along the rows, the columns
  float *across_scale, *down_scale;  // the scales of the tensor that follow from them
  i64 rows, columns;
  const float* factor;  // what x is multiplied with, or null
  i64 part_count;
  u32 across_signs[4], down_signs[4];  // bit j: element j of each group changes its sign
  const u64* count;                    // COUNTED: what the offsets of all keys are larger by
  Draw down_draw;
  Draw sign_draw;        // COUNTED: the key of random signs
  u32 random, unused[3];  // COUNTED: whose signs are random: 1 those along the rows, 2 those along the columns
};

#if COUNTED
DEVICE Draw counted(const Draw& d, const RotatedJob& job) {
  Draw out = d;
  u64 offset = ((u64)d.offset1 << 32 | d.offset0) + *job.count;
  out.offset0 = (u32)offset, out.offset1 = (u32)(offset >> 32);
  return out;
}

// The signs along the rows and along the columns, made by each block of threads; what follows has to wait for all.
DEVICE const u32* signs_of(const RotatedJob& job) {
  __shared__ u32 signs[8];
  if (threadIdx.x < 8) {
    u32 side = threadIdx.x / 4, word = threadIdx.x % 4, size = side ? DOWN_SIZE : ACROSS_SIZE;
    u32 mask = side ? job.down_signs[word] : job.across_signs[word];
    if (job.random >> side & 1) {
      mask = word * 32 < size ? random_word(word, counted(job.sign_draw, job)) : 0;
      if (size == 16) mask = (mask & 0xFFFFu) * 0x10001u;
    }
    signs[threadIdx.x] = mask;
  }
  return signs;
}
#define SIGNS_OF(job) signs_of(job)
#define DRAW_OF(draw) counted(draw, job)
#else
#define SIGNS_OF(job) job.across_signs  // those along the columns follow
#define DRAW_OF(draw) draw
#endif

// How a piece of RUN elements is cast.
struct Piece {
  FastBlock block;
  float shrink, grow;  // DEVIATION, LARGEST: 2^-k and 2^k; CORRECTED: the inverse of the divisor, and that itself
};

// Where a line's numbers lie in a tile: `stride` apart, with a gap behind every 32.
struct Source {
  const u16* from;
  u32 stride, gap;
};

// What a line is to a lane.
struct Line {
  Source source;  // the lane's first element in the tile
  const u32* signs;
  const float* factor;
  u64 first;  // its place in the operand
};

DEVICE float canonical(float x) { return x == x ? x : as_float(0x7FC00000); }

DEVICE float to_bfloat16(float x) {
  u32 bits = as_bits(x);
  return as_float((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
}

// RN32(1 / sqrt(size)).
DEVICE constexpr u32 root_bits(int size) {
  return size == 16 ? 0x3E800000u : size == 32 ? 0x3E3504F3u : size == 64 ? 0x3E000000u : 0x3DB504F3u;
}

// signs: those of a lane's numbers.
template <int SIZE>
DEVICE void rotate(float (&y)[HELD], u32 signs) {
  if (SIZE == 1) return;
#pragma unroll
  for (int i = 0; i < HELD; ++i) y[i] = as_float(as_bits(y[i]) ^ (signs << (31 - i) & 0x80000000u));
#pragma unroll
  for (int distance = 1; distance < (SIZE < HELD ? SIZE : HELD); distance *= 2) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (i & distance) continue;
      float a = y[i], b = y[i + distance];
      y[i] = __fadd_rn(a, b);
      y[i + distance] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int flip = 1; flip < SLICES(SIZE); flip *= 2) {
    float sign = threadIdx.x & flip ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) y[i] = __fmaf_rn(y[i], sign, __shfl_xor_sync(~0u, y[i], flip));
  }
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    y[i] = canonical(__fmul_rn(y[i], as_float(root_bits(SIZE))));
    if (NARROWS) y[i] = to_bfloat16(y[i]);
  }
}

// The same in as few instructions as can be, for the rare ways: the transforms of COUNT numbers in a tile.
template <int SIZE, int COUNT>
DEVICE void rotate_slowly(float* y, const Source& source, const u32* signs, const float* factor) {
#pragma unroll 1
  for (u32 i = 0; i < COUNT; ++i) {
    float x = as_float((u32)source.from[i * source.stride + i / HELD * source.gap] << 16);
    if (SCALED) x = __fmul_rn(x, *factor);
    y[i] = as_float(as_bits(x) ^ (SIZE > 1 ? signs[i / 32 % SLICES(SIZE)] << (31 - i % 32) & 0x80000000u : 0u));
  }
  if (SIZE == 1) return;
#pragma unroll 1
  for (int distance = 1; distance < SIZE; distance *= 2) {
#pragma unroll 1
    for (int i = 0; i < COUNT; ++i) {
      if (i & distance) continue;
      float a = y[i], b = y[i + distance];
      y[i] = __fadd_rn(a, b);
      y[i + distance] = __fsub_rn(a, b);
    }
  }
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i) {
    y[i] = canonical(__fmul_rn(y[i], as_float(root_bits(SIZE))));
    if (NARROWS) y[i] = to_bfloat16(y[i]);
  }
}

template <int COUNT>
DEVICE u32 finite_amax_of(const float* y) {
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    u32 magnitude = as_bits(y[i]) & MAGNITUDE;
    amax = max(amax, magnitude < FLOAT_EXPONENT ? magnitude : 0u);
  }
  return amax;
}
