// Hadamard transforms of bfloat16 matrices fused with their cast, along the rows (ACROSS), the columns (DOWN) or both from
// one read. A thread takes 32 neighbours of a line, and LANES lanes side by side hold 32 LANES neighbours: 64, which share
// random words (16 calls of Philox serve them), or the 128 of a long transform. A block of threads holds a tile:
//
//   ACROSS   line = row      lanes 0, 1, 2, 3 hold columns 0-31, 32-63, 64-95, 96-127 of a row, lane 4 begins the next
//   DOWN     line = column   lanes 2 c and 2 c + 1 hold rows 0-31 and 32-63 of columns 2 c and 2 c + 1 (LANES = 2)
//
// ACROSS_SIZE and DOWN_SIZE are elements of a transform (1: none), NARROWS says that its result becomes bfloat16, SCALED
// that x is multiplied by a number first, RUN is the elements of a scale's block, 16 or 32. CAST says what follows:
#define BLOCK_FORMAT 0  // the cast of a block format (block.cuh); scales of the tensor stay outside
#define DEVIATION 1     // scale = power of two below RN32(RN32(deviation * FACTOR) + OFFSET); ties go to zero
#define LARGEST 2       // scale = MULTIPLIER * power of two below RN32(amax / TOP), or 1; MULTIPLIER stays outside
#define CORRECTED 3     // two levels as in Quartet II, scales corrected over GROUP elements and rounded stochastically
#include "block.cuh"
#include "block_exact.cuh"

#define HELD 32
#define THREADS 128
#define TILE_ROWS (DOWN ? HELD * LANES : 64)
#define TILE_COLUMNS (THREADS * 64 / TILE_ROWS)
#define PITCH (TILE_COLUMNS + 8)                      // elements from row to row: spreads rows over the banks
#define GAP (64 / LANES)                              // every 32 rows, so that lanes meet other banks
#define PLACE(row) ((row) * PITCH + (row) / HELD * GAP)
#define TILE_ELEMENTS (PLACE(TILE_ROWS - 1) + PITCH)
#define PIECES (HELD / RUN)
#define SLICES(size) ((size) > HELD ? (size) / HELD : 1)  // lanes of a transform

struct alignas(16) RotatedJob {
  const u16* x;         // [rows, columns]
  u16 *across, *down;   // the results, like x
  u8* mask;             // of the result along the rows, or null
  u32* tensor;          // amaxes of the whole tensor as it is cast along the rows and along the columns
  float *across_scale, *down_scale;  // the scales of the tensor that follow from them
  i64 rows, columns;
  const float* factor;                 // what x is multiplied with, or null
  u32 across_signs[4], down_signs[4];  // bit j: element j of each group changes its sign
  Draw down_draw;
};

// How a piece of RUN elements is cast.
struct Piece {
  FastBlock block;
  float shrink, grow;  // DEVIATION, LARGEST: 2^-k and 2^k; CORRECTED: the inverse of the divisor, and that itself
};

// ---- Transforms

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

// The same in as few instructions as can be, for the rare ways: the transforms of COUNT numbers in memory, whose lines
// are those of a tile.
struct Source {
  const u16* from;
  u32 stride, gap;
};

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

// ---- Scales

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

#if CAST == DEVIATION
// Sums in float64: element i and i + n / 2 are added until one number is left.
DEVICE double folded(double (&x)[HELD / 2]) {
#pragma unroll
  for (int n = HELD / 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = __dadd_rn(x[i], x[i + n]);
  }
  return x[0];
}

DEVICE float root_of_mean(double sum, double count) { return at_most_float_max(__double2float_rn(__dsqrt_rn(__ddiv_rn(sum, count)))); }

// The standard deviation of 32 numbers that are finite.
DEVICE float deviation_of(const float (&y)[HELD]) {
  double sums[HELD / 2];
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) sums[i] = __dadd_rn((double)y[i], (double)y[i + HELD / 2]);
  double mean = __dmul_rn(folded(sums), 1.0 / HELD);
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) {
    double a = __dsub_rn((double)y[i], mean), b = __dsub_rn((double)y[i + HELD / 2], mean);
    sums[i] = __dadd_rn(__dmul_rn(a, a), __dmul_rn(b, b));
  }
  return at_most_float_max(__double2float_rn(__dsqrt_rn(__dmul_rn(folded(sums), 1.0 / HELD))));
}

DEVICE float scale_of_deviation(float deviation) { return __fadd_rn(__fmul_rn(deviation, as_float(FACTOR)), as_float(OFFSET)); }

// The scale before it becomes a power of two, in float32 arithmetic; returns whether that is certain to find the same one.
// With std >= 2^-10 amax the mean is known to 2^-11 std and the variance to 2^-20; the scale must lie 2^-15 off a power.
DEVICE bool quick_scale(const float (&y)[HELD], u32 amax, float& scale) {
  float sums[HELD / 2], squares[4] = {};
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) sums[i] = __fadd_rn(y[i], y[i + HELD / 2]);
#pragma unroll
  for (int n = HELD / 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) sums[i] = __fadd_rn(sums[i], sums[i + n]);
  }
  float mean = __fmul_rn(sums[0], 1.0f / HELD);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    float off = __fsub_rn(y[i], mean);
    squares[i % 4] = __fmaf_rn(off, off, squares[i % 4]);
  }
  float variance = __fmul_rn(__fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3])), 1.0f / HELD);
  scale = scale_of_deviation(__fsqrt_rn(variance));
  float least = __fmul_rn(as_float(amax), as_float(0x3A800000u));  // 2^-10
  bool inside = amax - 0x2B800000u < 0x5D800000u - 0x2B800000u;     // 2^-40 ... 2^60: squares are normal
  bool apart = (as_bits(scale) & 0x7FFFFFu) - 256u < 0x7FFFFFu - 512u;
  return amax == 0 || (inside && apart && variance >= __fmul_rn(least, least));
}

// That of the finite ones among them; all lanes of a warp call it together (see block_rows.cu).
template <int SIZE>
__device__ __noinline__ float deviation_slowly(const Source& source, const u32* signs, const float* factor) {
  float y[HELD];
  double sums[HELD / 2];
  rotate_slowly<SIZE, HELD>(y, source, signs, factor);
  u32 count = 0;
#pragma unroll 1
  for (int i = 0; i < HELD; ++i) {
    bool finite = (as_bits(y[i]) & MAGNITUDE) < FLOAT_EXPONENT;
    count += finite;
    if (!finite) y[i] = as_float(0x7FC00000);
  }
  double counted = count ? (double)count : 1.0, mean = 0.0;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
#pragma unroll 1
    for (int i = 0; i < HELD / 2; ++i) {
      double parts[2];
#pragma unroll 1
      for (int k = 0; k < 2; ++k) {
        float x = y[i + k * (HELD / 2)];
        double off = x == x ? __dsub_rn((double)x, mean) : 0.0;
        parts[k] = turn ? __dmul_rn(off, off) : off;
      }
      sums[i] = __dadd_rn(parts[0], parts[1]);
    }
#pragma unroll 1
    for (int n = HELD / 4; n > 0; n /= 2) {
#pragma unroll 1
      for (int i = 0; i < n; ++i) sums[i] = __dadd_rn(sums[i], sums[i + n]);
    }
    if (turn == 0) mean = __ddiv_rn(sums[0], counted);
  }
  return root_of_mean(sums[0], counted);
}
#endif

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

#if CAST == CORRECTED
// A piece under the scale that its amax asks for, rounded to nearest.
DEVICE Piece corrected_piece(u32 amax, float tensor) {
  Piece piece = {};
  float stored = fast_scale_rounded(__fdiv_rn(__fdiv_rn(as_float(amax), as_float(TOP)), tensor));
  piece.block = {ELEMENT_LIMIT, ELEMENT_LIMIT_NEGATIVE, ELEMENT_LOWEST, 1.0f, 1.0f, stored == 0.0f ? 1.0f : stored, false};
  piece.grow = __fmul_rn(piece.block.stored, tensor);
  piece.shrink = __fdiv_rn(1.0f, piece.grow);
  return piece;
}

// RN32(x / piece.grow): the product with the reciprocal, corrected twice. Where quotients are so small that a remainder
// has no number, no sum over their group sees the difference.
DEVICE float quotient(float x, const Piece& piece) {
  float near = __fmul_rn(x, piece.shrink);
  near = __fmaf_rn(-__fmaf_rn(piece.grow, near, -x), piece.shrink, near);  // what is over: +0 keeps the sign of zero
  return __fmaf_rn(-__fmaf_rn(piece.grow, near, -x), piece.shrink, near);
}

// Down to the largest multiple of the last place that is not above the magnitude and half a place.
DEVICE float nearest_away(float x, const FastBlock& block) {
  FastElement e = fast_element(x, block);
  const float half = as_float((126u - ELEMENT_MANTISSA) << 23), base = as_float(0x4B400000u - (ELEMENT_MANTISSA << 23));
  float binade = as_float(e.binade), sum = __fmaf_rd(binade, base, __fmaf_rd(binade, half, e.magnitude));
  return as_float(as_bits(__fmaf_rn(-binade, base, sum)) | e.sign);
}

// A scale rounded stochastically to its format, saturating; rest: what its random word lacks of 2^32 - 1.
DEVICE float scale_drawn(float value, u32 rest) {
  value = fminf(value, as_float(SCALE_LIMIT));
  float binade = as_float(max(as_bits(value) & FLOAT_EXPONENT, SCALE_LOWEST));
  const float fine = as_float((95u - SCALE_MANTISSA) << 23), base = as_float(0x4B400000u - (SCALE_MANTISSA << 23));
  float low = __fmaf_ru(-__uint2float_rz(rest), __fmul_rn(binade, fine), value);
  return __fmaf_rn(-binade, base, __fmaf_ru(binade, base, low));
}

// Sums of the products of a group, in the order of fmtsim.scaling.statistics.folded_sum: places whose bits are read
// backwards are added like digits that carry.
template <int SIZE>
__device__ __noinline__ float correction_slowly(
    const Source& source, const u32* signs, const float* factor, float tensor) {
  float y[GROUP];
  rotate_slowly<SIZE, GROUP>(y, source, signs, factor);
  double over[8], square[8];
#pragma unroll 1
  for (u32 k = 0; k < GROUP; ++k) {
    u32 i = __brev(k) >> 25;
    Piece piece = corrected_piece(finite_amax_of<RUN>(y + i / RUN * RUN), tensor);
    float z = __fdiv_rn(y[i], piece.grow);
    double a = __dmul_rn((double)z, (double)nearest_away(z, piece.block)), b = __dmul_rn((double)z, (double)z);
    u32 level = 0;
    for (; k >> level & 1; ++level) a = __dadd_rn(over[level], a), b = __dadd_rn(square[level], b);
    over[level] = a, square[level] = b;
  }
  return over[7] == 0.0 ? 1.0f : __double2float_rn(__ddiv_rn(square[7], over[7]));
}
#endif

// ---- Elements

// The value of x times 2^k, scales that stay outside aside; `passes`: whether x lies within the format's range.
DEVICE float cast_one(float x, u32 rest, const Piece& piece, bool& passes) {
#if CAST == BLOCK_FORMAT || CAST == CORRECTED
  passes = true;
  return fast_value(x, rest, piece.block, 1.0f);
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
  // Up to the least multiple of the last place that is not below the magnitude less half a place.
  float z = __fmul_rn(x, piece.shrink);
  passes = fabsf(z) < as_float(ELEMENT_LIMIT);
  FastElement e = fast_element(z, piece.block);
  const float half = as_float((126u - ELEMENT_MANTISSA) << 23), base = as_float(0x4B400000u - (ELEMENT_MANTISSA << 23));
  float binade = as_float(e.binade), sum = __fmaf_ru(binade, base, __fmaf_ru(-binade, half, e.magnitude));
  return __fmul_rn(as_float(as_bits(__fmaf_rn(-binade, base, sum)) | e.sign), piece.grow);
#endif
}

// The random words of elements i, i + 8, i + 16, i + 24 of a lane (less 2^32 - 1), i below 8. `counter`: of the first of
// the 64 elements that lanes 2 n and 2 n + 1 hold together.
DEVICE void take_rests(u32 (&rests)[4], u64 counter, int i, const Draw& draw) {
  bool second = threadIdx.x & 1;
  Words4 own = philox<true>(counter + (second ? 8 : 0) + i, draw);
  u32 unused = (u32)(0xFFFFFFFFull >> draw.bits);
  u32 keep[2] = {second ? own.z : own.x, second ? own.w : own.y};
  u32 got[2] = {__shfl_xor_sync(~0u, second ? own.x : own.z, 1), __shfl_xor_sync(~0u, second ? own.y : own.w, 1)};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    rests[2 * k] = (second ? got[k] : keep[k]) | unused;
    rests[2 * k + 1] = (second ? keep[k] : got[k]) | unused;
  }
}

// A line's numbers cast one by one, from memory; all lanes of a warp call it together (see block_rows.cu).
template <int SIZE>
__device__ __noinline__ void cast_exactly(
    u16* to, const Source& source, const u32* signs, const float* factor, u64 first, TensorScale tensor,
    const Draw& draw, const Cast& c) {
  float y[HELD];
  rotate_slowly<SIZE, HELD>(y, source, signs, factor);
#pragma unroll 1
  for (int start = 0; start < HELD; start += RUN) {
    u32 amax = 0;
    bool has_nan = false;
#pragma unroll 1
    for (int i = start; i < start + RUN; ++i) {
      u32 magnitude = as_bits(y[i]) & MAGNITUDE;
      if (magnitude < FLOAT_EXPONENT) amax = max(amax, magnitude);
      has_nan |= magnitude > FLOAT_EXPONENT;
    }
    BlockScale s = scale_of({0.0, (double)as_float(amax), has_nan}, c.scale, tensor);
    bool spoiled = has_nan && !c.scale.element_has_nan;
#pragma unroll 1
    for (int i = start; i < start + RUN; ++i) {
      ExactElement e = exact_element(y[i], false, first + i, s, spoiled, 1.0f, c, draw);
      to[i] = (u16)narrowed(e.value, DTYPE_BFLOAT16);
    }
  }
}

// What a line is to a lane.
struct Line {
  Source source;  // the lane's first element in the tile
  const u32* signs;
  const float* factor;
  u64 first;  // its place in the operand
};

#if CAST == CORRECTED
// Cast a lane's rotated numbers in place.
template <int SIZE>
DEVICE void cast_corrected(float (&y)[HELD], const Line& line, float tensor, const Draw& draw) {
  Piece piece[PIECES];
  double over = 0.0, square = 0.0;
  bool strange = false;
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 amax = finite_amax_of<RUN>(y + b * RUN);
    piece[b] = corrected_piece(amax, tensor);
#pragma unroll
    for (int i = b * RUN; i < (b + 1) * RUN; ++i) {
      strange |= (as_bits(y[i]) & MAGNITUDE) >= FLOAT_EXPONENT;
      float z = quotient(y[i], piece[b]);
      y[i] = nearest_away(z, piece[b].block);
      over = __fma_rn((double)z, (double)y[i], over);
      square = __fma_rn((double)z, (double)z, square);
    }
  }
#pragma unroll
  for (int flip = 1; flip < GROUP / HELD; flip *= 2) {
    over = __dadd_rn(over, __shfl_xor_sync(~0u, over, flip));
    square = __dadd_rn(square, __shfl_xor_sync(~0u, square, flip));
    strange |= (bool)__shfl_xor_sync(~0u, (i32)strange, flip);
  }
  // The order of sums of positive numbers moves a quotient by less than 2^-47 of it; few are as near to a tie as that.
  double c = __ddiv_rn(square, over);
  float correction = over == 0.0 ? 1.0f : __double2float_rn(c);
  bool near = over != 0.0 && !strange && __double2float_rn(c * (1.0 - TOLERANCE)) != __double2float_rn(c * (1.0 + TOLERANCE));
  if (__any_sync(~0u, near)) {
    u32 back = threadIdx.x % (GROUP / HELD);
    Source source = line.source;
    source.from -= back * (HELD * source.stride + source.gap);
    float again = correction_slowly<SIZE>(source, line.signs, line.factor, tensor);
    if (near) correction = again;
    __syncwarp();  // the others have read what this lane is about to write
  }
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 rest = ~random_integer(line.first / RUN + b, draw, nullptr);
    float scale = scale_drawn(__fmul_rn(piece[b].block.stored, correction), rest);
#pragma unroll
    for (int i = b * RUN; i < (b + 1) * RUN; ++i) y[i] = strange ? as_float(0x7FC00000) : __fmul_rn(y[i], scale);
  }
}
#endif

// Rotate and cast a lane's numbers in place; bit i of the result says that element i passes the mask.
template <int SIZE>
DEVICE u32 cast_line(
    float (&y)[HELD], const Line& line, TensorScale scale, TensorScale step, const Draw& draw, const Cast& c) {
  rotate<SIZE>(y, line.signs[threadIdx.x % SLICES(SIZE)]);
#if CAST == CORRECTED
  cast_corrected<SIZE>(y, line, scale.decode, draw);
  return 0;
#else
  Piece piece[PIECES];
  bool exactly = false;
#if CAST == BLOCK_FORMAT
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < RUN; ++i) amax = max(amax, as_bits(y[b * RUN + i]) & MAGNITUDE);
    piece[b].block = fast_block(amax, step);
    exactly |= piece[b].block.refused || amax >= FLOAT_EXPONENT;
  }
#elif CAST == LARGEST
#pragma unroll
  for (int b = 0; b < PIECES; ++b) {
    u32 amax = finite_amax_of<RUN>(y + b * RUN);
    piece[b] = piece_of(amax ? __fdiv_rn(as_float(amax), as_float(TOP)) : 1.0f);
  }
#else
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) amax = max(amax, as_bits(y[i]) & MAGNITUDE);
  float wanted;
  bool sure = quick_scale(y, amax, wanted);
  if (__any_sync(~0u, !sure)) {
    float deviation = deviation_of(y);
    if (__any_sync(~0u, amax >= FLOAT_EXPONENT)) {
      float again = deviation_slowly<SIZE>(line.source, line.signs, line.factor);
      if (amax >= FLOAT_EXPONENT) deviation = again;
    }
    if (!sure) wanted = scale_of_deviation(deviation);
  }
  piece[0] = piece_of(wanted);
#endif
  u32 passing = 0;
#pragma unroll
  for (int i = 0; i < HELD / 4; ++i) {
    u32 rests[4] = {};
#if STOCHASTIC
    take_rests(rests, counter_of(line.first & ~(u64)63), i, draw);
#endif
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int at = i + 8 * k;
      bool passes;
      y[at] = cast_one(y[at], rests[k], piece[at / RUN], passes);
      passing |= (u32)passes << at;
    }
  }
#if CAST == BLOCK_FORMAT
  if (__any_sync(~0u, exactly)) {
    u16 again[HELD];
    cast_exactly<SIZE>(again, line.source, line.signs, line.factor, line.first, scale, draw, c);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (exactly) y[i] = as_float((u32)again[i] << 16);
  }
#endif
  return passing;
#endif
}

// ---- Tiles

struct Corner { i64 row, column; };

DEVICE Corner corner_of() { return {(i64)blockIdx.y * TILE_ROWS, (i64)blockIdx.x * TILE_COLUMNS}; }

// Copy between memory and tile; what lies outside of the matrix counts as zeros.
template <bool STORES>
DEVICE void copy_tile(u16* memory, u16* tile, const RotatedJob& job) {
  Corner corner = corner_of();
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

DEVICE float loaded(u32 bits, const RotatedJob& job) { return SCALED ? __fmul_rn(as_float(bits), *job.factor) : as_float(bits); }

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

// ---- Kernels

DEVICE void raise(u32* to, u32 amax) {
  amax = __reduce_max_sync(~0u, amax);
  __shared__ u32 warps[THREADS / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) amax = max(amax, warps[w]);
    if (amax > 0) atomicMax(to, amax);
  }
}

// Find the largest finite magnitudes of what is cast.
KERNEL __launch_bounds__(THREADS) rotated_amax(const __grid_constant__ RotatedJob job) {
  __shared__ __align__(16) u16 tile[TILE_ELEMENTS];
  copy_tile<false>((u16*)job.x, tile, job);
  __syncthreads();
  float y[HELD];
#if ACROSS
  u32 across = 0;
#pragma unroll 1
  for (int task = 0; task < 2; ++task) {
    AcrossPlace place = across_place(task);
    load_across(y, tile + PLACE(place.row) + place.column, job);
    rotate<ACROSS_SIZE>(y, job.across_signs[threadIdx.x % SLICES(ACROSS_SIZE)]);
    across = max(across, finite_amax_of<HELD>(y));
  }
  raise(job.tensor, across);
#endif
#if DOWN
  u32 down = 0;
  DownPlace place = down_place();
#pragma unroll 1
  for (int odd = 0; odd < 2; ++odd) {
    load_down(y, tile + PLACE(place.row) + place.column, odd, job);
    rotate<DOWN_SIZE>(y, job.down_signs[threadIdx.x % SLICES(DOWN_SIZE)]);
    down = max(down, finite_amax_of<HELD>(y));
  }
  raise(job.tensor + 1, down);
#endif
}

// The scales of a tensor whose amax is known, and the step to those of blocks.
DEVICE void find_scales(TensorScale& scale, TensorScale& step, const u32* amax, float* to, const Cast& c) {
  scale = {1.0f, 1.0f}, step = {1.0f, 1.0f};
#if CAST == CORRECTED
  float whole = __fdiv_rn(__fdiv_rn(as_float(*amax), as_float(TENSOR_TOP)), as_float(TOP));
  scale.decode = whole == 0.0f ? 1.0f : whole;
  if (threadIdx.x + blockIdx.x + blockIdx.y == 0) *to = scale.decode;
#elif TWO_LEVEL
  scale = tensor_scale_of(as_float(*amax), c.scale);
  step = {at_most_float_max(__fmul_rn(scale.encode, c.scale.reciprocal_max)), scale.decode};
  if (threadIdx.x + blockIdx.x + blockIdx.y == 0) *to = scale.decode;
#endif
}

#if DOWN
// Cast along the columns, in place within the tile.
DEVICE void cast_down(u16* tile, const RotatedJob& job, const Cast& c) {
  TensorScale scale, step;
  find_scales(scale, step, job.tensor + 1, job.down_scale, c);
  Corner corner = corner_of();
  DownPlace place = down_place();
  i64 row = corner.row + place.row, column = corner.column + place.column;
  u16* at = tile + PLACE(place.row) + place.column;
  float y[HELD];
#pragma unroll 1
  for (int odd = 0; odd < 2; ++odd) {
    load_down(y, at, odd, job);
    Line line = {{at + odd, PITCH, GAP}, job.down_signs, job.factor, (u64)((column + odd) * job.rows + row)};
    cast_line<DOWN_SIZE>(y, line, scale, step, job.down_draw, c);
#pragma unroll
    for (int i = 0; i < HELD; ++i) at[i * PITCH + odd] = (u16)(as_bits(y[i]) >> 16);
  }
}
#endif

#if ACROSS
DEVICE void store_mask(u8* to, u32 passing) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 four = passing >> (16 * half + 4 * w) & 0xFu;
      words[w] = (four & 1u) | (four & 2u) << 7 | (four & 4u) << 14 | (four & 8u) << 21;
    }
    ((Words4*)to)[half] = {words[0], words[1], words[2], words[3]};
  }
}

// Cast along the rows, from a tile to another one or in place.
DEVICE void cast_across(u16* to, u16* tile, const RotatedJob& job, const Cast& c) {
  TensorScale scale, step;
  find_scales(scale, step, job.tensor, job.across_scale, c);
  Corner corner = corner_of();
  float y[HELD];
#pragma unroll 1
  for (int task = 0; task < 2; ++task) {
    AcrossPlace place = across_place(task);
    u16* at = tile + PLACE(place.row) + place.column;
    i64 row = corner.row + place.row, column = corner.column + place.column;
    load_across(y, at, job);
    Line line = {{at, 1, 0}, job.across_signs, job.factor, (u64)(row * job.columns + column)};
    u32 passing = cast_line<ACROSS_SIZE>(y, line, scale, step, c.draw, c);
#if MASKS
    if (row < job.rows && column < job.columns) store_mask(job.mask + line.first, passing);
#endif
#pragma unroll
    for (int v = 0; v < HELD; v += 8) {
      Packed<8, 16> out;
#pragma unroll
      for (int i = 0; i < 8; i += 2) out.words[i / 2] = __byte_perm(as_bits(y[v + i]), as_bits(y[v + i + 1]), 0x7632);
      store_vector<8, 16>(to, PLACE(place.row) + place.column + v, out);
    }
  }
}
#endif

KERNEL __launch_bounds__(THREADS, 4) cast_rotated(const __grid_constant__ RotatedJob job, const __grid_constant__ Cast c) {
  __shared__ __align__(16) u16 tile[TILE_ELEMENTS];
  copy_tile<false>((u16*)job.x, tile, job);
  __syncthreads();
#if ACROSS
#if DOWN
  __shared__ __align__(16) u16 across[TILE_ELEMENTS];
#else
  u16* across = tile;
#endif
  cast_across(across, tile, job, c);
  __syncthreads();
  copy_tile<true>(job.across, across, job);
#endif
#if DOWN
  cast_down(tile, job, c);
  __syncthreads();
  copy_tile<true>(job.down, tile, job);
#endif
}
