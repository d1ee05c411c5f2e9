// SPDX-License-Identifier: Apache-2.0
// What rotated.cu's kernels of rotated operands share: macros, jobs, and the transforms of the numbers that a lane
// holds.
//
// A thread takes 32 neighbours of a line, and LANES lanes side by side hold 32 LANES neighbours: 64, which share random
// words, or the 128 of a long transform. DOWN says along what a matrix is cast, its rows (0) or its columns (1); SIZE
// is the elements of a transform (1: none), NARROWS says that its result becomes bfloat16, SCALED that x is multiplied
// by a number first, FROM_FLOAT that x is float32 and becomes bfloat16 as it is loaded, COUNTED that keys move on by a
// number on the device, RUN is the elements of a scale's block, 16 or 32. CAST follows:
#pragma once
#define BLOCK_FORMAT 0  // the cast of a block format (block.cuh); scales of the tensor stay outside
#define DEVIATION 1     // scale = power of two below RN32(RN32(deviation * FACTOR) + OFFSET); ties go to zero
#define LARGEST 2       // scale = MULTIPLIER * power of two below RN32(amax / TOP), or 1; MULTIPLIER stays outside
#define CORRECTED 3     // two levels as in Quartet II, scales corrected over GROUP elements and rounded stochastically
#define TWO_SCALES 4    // two levels as in Quartet II, scales rounded to nearest
#include "block.cuh"
#include "hadamard.cuh"

#define PER_LANE 32
#define PIECES (PER_LANE / RUN)
#define SLICES (SIZE > PER_LANE ? SIZE / PER_LANE : 1)  // lanes of a transform

struct alignas(16) RotatedJob {
  const void* x;        // [rows, columns], bfloat16 or float32
  u16* out;             // like x
  u8* mask;             // or null
  u32* parts;           // [part_count]: amaxes of parts of the tensor
  float* scale;         // the scale of the tensor that follows from them
  const float* factor;  // what x is multiplied with, or null
  const u64* count;     // COUNTED: what the offsets of all keys are larger by
  i64 rows, columns, part_count;
  u32 signs[4];           // bit j: element j of each group changes its sign
  Draw sign_draw;         // COUNTED: the key of random signs
  u32 random, unused[3];  // COUNTED: whether signs are random
};

#if COUNTED
DEVICE Draw counted(const Draw& d, const RotatedJob& job) {
  Draw out = d;
  u64 offset = ((u64)d.offset1 << 32 | d.offset0) + *job.count;
  out.offset0 = (u32)offset, out.offset1 = (u32)(offset >> 32);
  return out;
}

// The signs, made by each block of threads; what follows has to wait for all.
DEVICE const u32* signs_of(const RotatedJob& job) {
  __shared__ u32 signs[4];
  u32 word = threadIdx.x;
  if (word < 4) {
    u32 mask = job.signs[word];
    if (job.random) {
      mask = word * 32 < SIZE ? random_word(word, counted(job.sign_draw, job)) : 0;
      if (SIZE == 16) mask = (mask & 0xFFFFu) * 0x10001u;
    }
    signs[word] = mask;
  }
  return signs;
}
#define SIGNS_OF(job) signs_of(job)
#define DRAW_OF(draw) counted(draw, job)
#else
#define SIGNS_OF(job) job.signs
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

// The sums of a transform, not yet what it makes of them; signs: those of a lane's numbers.
DEVICE void add_up(float (&y)[PER_LANE], u32 signs) {
  if (SIZE == 1) return;
  UNROLLED for (int i = 0; i < PER_LANE; ++i) y[i] = as_float(as_bits(y[i]) ^ (signs << (31 - i) & 0x80000000u));
  butterflies<SIZE>(y, threadIdx.x);
}

// What becomes of a sum; of larger magnitudes no smaller ones.
DEVICE float transformed(float sum) {
  if (SIZE == 1) return sum;
  float y = __fmul_rn(sum, as_float(root_bits(SIZE)));
  if (CAST != CORRECTED) y = canonical(y);  // there a NaN makes all of its group one
  return NARROWS ? as_float(bfloat16_bits<true>(y) << 16) : y;
}

DEVICE void rotate(float (&y)[PER_LANE], u32 signs) {
  add_up(y, signs);
  UNROLLED for (int i = 0; i < PER_LANE; ++i) y[i] = transformed(y[i]);
}

// The same in as few instructions as can be, for the rare paths: the transforms of COUNT numbers in a tile.
template <int COUNT>
DEVICE void rotate_slowly(float* y, const Source& source, const u32* signs, const float* factor) {
#pragma unroll 1
  for (u32 i = 0; i < COUNT; ++i) {
    float x = as_float((u32)source.from[i * source.stride + i / PER_LANE * source.gap] << 16);
    if (SCALED) x = __fmul_rn(x, *factor);
    y[i] = as_float(as_bits(x) ^ (SIZE > 1 ? signs[i / 32 % SLICES] << (31 - i % 32) & 0x80000000u : 0u));
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
  for (int i = 0; i < COUNT; ++i) y[i] = transformed(y[i]);
}

template <int COUNT>
DEVICE u32 finite_amax_of(const float* y) {
  u32 amax = 0;
  UNROLLED for (int i = 0; i < COUNT; ++i) {
    u32 magnitude = as_bits(y[i]) & MAGNITUDE;
    amax = max(amax, magnitude < FLOAT_EXPONENT ? magnitude : 0u);
  }
  return amax;
}

// The elements of a line: their random words, their values, and the exact path of block formats.

#if CAST == DEVIATION || CAST == LARGEST
// A piece under the power of two that is not above s.
DEVICE Piece piece_of(float s) {
  u32 exponent = as_bits(fminf(fmaxf(s, FLOAT_MIN), FLOAT_MAX)) & FLOAT_EXPONENT;
  Piece piece = {{ELEMENT_LIMIT, ELEMENT_LIMIT_NEGATIVE, ELEMENT_LOWEST, 1.0f, 1.0f, 1.0f, false}};
  piece.shrink = as_float(0x7F000000u - exponent);  // 2^-126 ... 2^126
  piece.grow = as_float(exponent);
  return piece;
}
#endif

// To nearest, ties away from zero or toward it: down to the largest multiple of the last place that is not above the
// magnitude and half a place, or up to the least one that is not below the magnitude less half a place.
template <bool Away>
DEVICE float nearest(float x, const FastBlock& block) {
  FastElement e = fast_element(x, block);
  const float half = as_float((126u - ELEMENT_MANTISSA) << 23), base = as_float(0x4B400000u - (ELEMENT_MANTISSA << 23));
  float binade = as_float(e.binade), sum;
  if (Away) sum = __fmaf_rd(binade, base, __fmaf_rd(binade, half, e.magnitude));
  else sum = __fmaf_ru(binade, base, __fmaf_ru(-binade, half, e.magnitude));
  return as_float(as_bits(__fmaf_rn(-binade, base, sum)) | e.sign);
}

// The value of x times 2^k, scales that stay outside aside; `passes`: whether x lies within the format's range.
DEVICE float cast_one(float x, u32 rest, const Piece& piece, bool& passes) {
#if CAST == BLOCK_FORMAT || CAST == CORRECTED
  passes = true;
  return fast_value(x, rest, piece.block, 1.0f);
#elif CAST == TWO_SCALES
  passes = true;
  return __fmul_rn(fast_value(__fdiv_rn(x, piece.grow), rest, piece.block, 1.0f), piece.block.stored);
#elif CAST == LARGEST
  // RN32(x / MULTIPLIER): the product with the reciprocal, and what is over
  float z = __fmul_rn(x, piece.shrink);
#if DIVIDES
  float near = __fmul_rn(z, as_float(MULTIPLIER_RECIPROCAL));
  float over = __fmaf_rn(near, as_float(MULTIPLIER), -z);  // +0 where nothing is over, which keeps the sign of zero
  z = fabsf(near) < as_float(FLOAT_EXPONENT) ? __fmaf_rn(-over, as_float(MULTIPLIER_RECIPROCAL), near) : near;
#endif
  passes = fabsf(z) < as_float(ELEMENT_LIMIT);
  return __fmul_rn(fast_value(z, rest, piece.block, 1.0f), piece.grow);
#else
  float z = __fmul_rn(x, piece.shrink);
  passes = fabsf(z) < as_float(ELEMENT_LIMIT);
  return __fmul_rn(nearest<false>(z, piece.block), piece.grow);
#endif
}

// What the random words of elements i, i + 8, i + 16, i + 24 of a lane lack of 2^32 - 1, i below 8. `counter`: of the
// first of the 64 elements that lanes 2 n and 2 n + 1 hold together.
DEVICE void take_rests(u32 (&rests)[4], u64 counter, int i, const Draw& draw) {
  bool second = threadIdx.x & 1;
  Words4 own = philox<true>(counter + (second ? 8 : 0) + i, draw);
  u32 unused = (u32)(0xFFFFFFFFull >> draw.bits);
  u32 keep[2] = {second ? own.z : own.x, second ? own.w : own.y};
  u32 got[2] = {__shfl_xor_sync(~0u, second ? own.x : own.z, 1), __shfl_xor_sync(~0u, second ? own.y : own.w, 1)};
  UNROLLED for (int k = 0; k < 2; ++k) {
    rests[2 * k] = (second ? got[k] : keep[k]) | unused;
    rests[2 * k + 1] = (second ? keep[k] : got[k]) | unused;
  }
}

// A line's numbers cast one by one, from memory; all lanes of a warp call it together (see block_rows.cu).
__device__ __noinline__ void cast_line_exactly(
    u16* to, const Source& source, const u32* signs, const float* factor, u64 first, TensorScale tensor,
    const Draw& draw, const Cast& c) {
  float y[PER_LANE];
  rotate_slowly<PER_LANE>(y, source, signs, factor);
#pragma unroll 1
  for (int start = 0; start < PER_LANE; start += RUN) {
    u32 amax = 0;
    bool has_nan = false;
#pragma unroll 1
    for (int i = start; i < start + RUN; ++i) {
      u32 magnitude = as_bits(y[i]) & MAGNITUDE;
      if (magnitude < FLOAT_EXPONENT) amax = max(amax, magnitude);
      has_nan |= magnitude > FLOAT_EXPONENT;
    }
    Path path = {(u64)start, (u64)start, 1, 1, first + start, RUN};
    cast_exactly(y, to, path, amax, has_nan, tensor, draw, c);
  }
}

// Tiles in shared memory, [TILE_ROWS, TILE_COLUMNS], and what a lane takes of them.

#define THREADS 128
#define TILE_ROWS (DOWN ? PER_LANE * LANES : 64)
#define TILE_COLUMNS (THREADS * 64 / TILE_ROWS)
#define PITCH (TILE_COLUMNS + 8)  // elements from row to row: spreads rows over the banks
#define GAP (64 / LANES)          // every 32 rows, so that lanes meet other banks
#define PLACE(row) ((row) * PITCH + (row) / PER_LANE * GAP)
#define TILE_ELEMENTS (PLACE(TILE_ROWS - 1) + PITCH)

struct Corner { i64 row, column; };

DEVICE Corner corner_of(i64 across, i64 down) { return {down * TILE_ROWS, across * TILE_COLUMNS}; }

// Copy between memory and tile; what lies outside of the matrix counts as zeros.
template <bool STORES>
DEVICE void copy_tile(u16* memory, u16* tile, Corner corner, const RotatedJob& job) {
  UNROLLED for (int k = 0; k < TILE_ROWS * TILE_COLUMNS / 8 / THREADS; ++k) {
    u32 vector = k * THREADS + threadIdx.x, row = vector / (TILE_COLUMNS / 8), column = vector % (TILE_COLUMNS / 8) * 8;
    bool there = corner.row + row < job.rows && corner.column + column < job.columns;
    u16* far = memory + (corner.row + row) * job.columns + corner.column + column;
    Words4* near = (Words4*)(tile + PLACE(row) + column);
    if (STORES) {
      if (there) *(Words4*)far = *near;
    } else {
#if FROM_FLOAT
      *near = there ? load_narrowed((const float*)memory + (far - memory)) : Words4{0, 0, 0, 0};
#else
      *near = there ? *(const Words4*)far : Words4{0, 0, 0, 0};
#endif
    }
  }
}

DEVICE float loaded(u32 bits, const RotatedJob& job) {
  return SCALED ? __fmul_rn(as_float(bits), *job.factor) : as_float(bits);
}

// Where the numbers of a lane begin that it takes in one of two passes: a row, or two columns that begin at a word.
struct TilePlace { u32 row, column; };
DEVICE TilePlace tile_place(int part) {
#if DOWN
  return {threadIdx.x % LANES * PER_LANE, threadIdx.x / LANES * 2};
#else
  u32 at = part * THREADS + threadIdx.x;
  return {at / (TILE_COLUMNS / PER_LANE), at % (TILE_COLUMNS / PER_LANE) * PER_LANE};
#endif
}

DEVICE void load_line(float (&y)[PER_LANE], const u16* from, int part, const RotatedJob& job) {
#if DOWN
  UNROLLED for (int i = 0; i < PER_LANE; ++i) {
    u32 word = *(const u32*)(from + i * PITCH);
    y[i] = loaded(part ? word & 0xFFFF0000u : word << 16, job);
  }
#else
  UNROLLED for (int v = 0; v < PER_LANE; v += 8) {
    Packed<8, 16> in = load_vector<8, 16>(from, v);
    UNROLLED for (int i = 0; i < 8; ++i)
      y[v + i] = loaded(i % 2 ? in.words[i / 2] & 0xFFFF0000u : in.words[i / 2] << 16, job);
  }
#endif
}

DEVICE void store_line(u16* to, int part, const float (&y)[PER_LANE]) {
#if DOWN
  UNROLLED for (int i = 0; i < PER_LANE; ++i) to[i * PITCH + part] = (u16)(as_bits(y[i]) >> 16);
#else
  UNROLLED for (int v = 0; v < PER_LANE; v += 8) {
    Packed<8, 16> out;
    UNROLLED for (int i = 0; i < 8; i += 2)
      out.words[i / 2] = __byte_perm(as_bits(y[v + i]), as_bits(y[v + i + 1]), 0x7632);
    store_vector<8, 16>(to, v, out);
  }
#endif
}
