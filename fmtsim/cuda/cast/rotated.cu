// SPDX-License-Identifier: Apache-2.0
// Hadamard transforms of bfloat16 matrices fused with their cast, along the rows or the columns (DOWN): operands of
// NVFP4 training, Quartet, Quartet II and QuEST. A block of threads holds a tile:
//
//   DOWN 0   line = row      lanes 0, 1, 2, 3 hold columns 0-31, 32-63, 64-95, 96-127 of a row, lane 4 begins the next
//   DOWN 1   line = column   lanes 2 c and 2 c + 1 hold rows 0-31 and 32-63 of columns 2 c and 2 c + 1 (LANES = 2)
//
// rotated.cuh says what the macros are.
#include "rotated.cuh"

// Scales that follow from more than an amax, by CAST: the standard deviation of 32 numbers (QuEST), and two levels of
// scales that EDEN corrects over a group (Quartet II).

#if CAST == DEVIATION

// The standard deviation of 32 numbers: float64 sums in the order of fmtsim.scaling.blocks, and a quick path to the
// power of two that follows from it.

// The standard deviation of those of 32 numbers that are finite.
DEVICE float deviation_of(const float (&y)[PER_LANE]) {
  double sums[PER_LANE / 2], mean = 0.0;
  u32 finite = 0;
  UNROLLED for (int i = 0; i < PER_LANE; ++i) finite += (as_bits(y[i]) & MAGNITUDE) < FLOAT_EXPONENT;
  double count = (double)max(finite, 1u);
#pragma unroll 1
  for (int squares = 0; squares < 2; ++squares) {
    UNROLLED for (int i = 0; i < PER_LANE / 2; ++i) {
      double off[2];
      UNROLLED for (int k = 0; k < 2; ++k) {
        float x = y[i + k * (PER_LANE / 2)];
        off[k] = (as_bits(x) & MAGNITUDE) < FLOAT_EXPONENT ? __dsub_rn((double)x, mean) : 0.0;
        if (squares) off[k] = __dmul_rn(off[k], off[k]);
      }
      sums[i] = __dadd_rn(off[0], off[1]);
    }
    if (!squares) mean = __ddiv_rn(folded<PER_LANE / 2>(sums), count);
  }
  return at_most_float_max(__double2float_rn(__dsqrt_rn(__ddiv_rn(folded<PER_LANE / 2>(sums), count))));
}

DEVICE float scale_of_deviation(float deviation) {
  return __fadd_rn(__fmul_rn(deviation, as_float(FACTOR)), as_float(OFFSET));
}

// The scale before it becomes a power of two, in float32 arithmetic; returns whether the power is sure to be the same.
// With std >= 2^-10 amax the mean is known to 2^-11 std, the variance to 2^-20; the scale must lie 2^-15 off a power.
DEVICE bool quick_scale(const float (&y)[PER_LANE], u32 amax, float& scale) {
  float sums[PER_LANE / 2], squares[4] = {};
  UNROLLED for (int i = 0; i < PER_LANE / 2; ++i) sums[i] = __fadd_rn(y[i], y[i + PER_LANE / 2]);
  float mean = __fmul_rn(folded<PER_LANE / 2>(sums), 1.0f / PER_LANE);
  UNROLLED for (int i = 0; i < PER_LANE; ++i) {
    float off = __fsub_rn(y[i], mean);
    squares[i % 4] = __fmaf_rn(off, off, squares[i % 4]);
  }
  float sum = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
  float variance = __fmul_rn(sum, 1.0f / PER_LANE);
  scale = scale_of_deviation(__fsqrt_rn(variance));
  float least = __fmul_rn(as_float(amax), as_float(0x3A800000u));  // 2^-10
  bool inside = amax - 0x2B800000u < 0x5D800000u - 0x2B800000u;     // 2^-40 ... 2^60: squares are normal
  bool apart = (as_bits(scale) & 0x7FFFFFu) - 256u < 0x7FFFFFu - 512u;
  return amax == 0 || (inside && apart && variance >= __fmul_rn(least, least));
}

#elif CAST == CORRECTED || CAST == TWO_SCALES

// Two levels of scales as in Quartet II (fmtsim.scaling.scales). A piece under the scale that its amax asks for,
// rounded to nearest.
DEVICE Piece two_scales_piece(u32 amax, float tensor) {
  Scale s = quartet_level(as_float(amax), as_float(TOP), tensor, [](float x) { return fast_scale_rounded(x); });
  return {{ELEMENT_LIMIT, ELEMENT_LIMIT_NEGATIVE, ELEMENT_LOWEST, 1.0f, 1.0f, s.stored, false},
          __fdiv_rn(1.0f, s.factor), s.factor};
}
#endif

#if CAST == CORRECTED

// They are corrected over a group so that <y, q> = <y, y> (EDEN): fmtsim.scaling.scaled_cast.

// RN32(x / piece.grow): the product with the reciprocal, corrected twice. Where quotients are so small that a remainder
// has no number, no sum over their group sees the difference.
DEVICE float quotient(float x, const Piece& piece) {
  float near = __fmul_rn(x, piece.shrink);
  near = __fmaf_rn(-__fmaf_rn(piece.grow, near, -x), piece.shrink, near);  // what is over: +0 keeps the sign of zero
  return __fmaf_rn(-__fmaf_rn(piece.grow, near, -x), piece.shrink, near);
}

// A scale rounded stochastically to its format, saturating; rest: what its random word lacks of 2^32 - 1.
DEVICE float scale_drawn(float value, u32 rest) {
  value = fminf(value, as_float(SCALE_LIMIT));
  float binade = as_float(max(as_bits(value) & FLOAT_EXPONENT, SCALE_LOWEST));
  const float fine = as_float((95u - SCALE_MANTISSA) << 23), base = as_float(0x4B400000u - (SCALE_MANTISSA << 23));
  return __fmaf_rn(-binade, base, stochastic_sum(value, binade, fine, base, rest));
}

// Sums of the products of a group, in the order of fmtsim.scaling.blocks.folded_sum: places whose bits are read
// backwards are added like digits that carry.
__device__ __noinline__ float correction_slowly(
    const Source& source, const u32* signs, const float* factor, float tensor) {
  float y[GROUP];
  rotate_slowly<GROUP>(y, source, signs, factor);
  double over[8], square[8];
#pragma unroll 1
  for (u32 k = 0; k < GROUP; ++k) {
    u32 i = __brev(k) >> 25;
    Piece piece = two_scales_piece(finite_amax_of<RUN>(y + i / RUN * RUN), tensor);
    float z = __fdiv_rn(y[i], piece.grow);
    double a = __dmul_rn((double)z, (double)nearest<true>(z, piece.block)), b = __dmul_rn((double)z, (double)z);
    u32 level = 0;
    for (; k >> level & 1; ++level) a = __dadd_rn(over[level], a), b = __dadd_rn(square[level], b);
    over[level] = a, square[level] = b;
  }
  return over[7] == 0.0 ? 1.0f : __double2float_rn(__ddiv_rn(square[7], over[7]));
}

// A finite magnitude as a double, 0 as 2^-127: conversions have an eighth of the rate of integer instructions.
DEVICE double widened_magnitude(u32 magnitude) {
  return __longlong_as_double((i64)((u64)((magnitude >> 3) + 0x38000000u) << 32 | magnitude << 29));
}

// Cast a lane's rotated numbers in place.
DEVICE void cast_corrected(float (&y)[PER_LANE], const Line& line, float tensor, const Draw& draw) {
  Piece piece[PIECES];
  double over = 0.0, square = 0.0;
  // 1. elements under the scale of their piece, and the lane's sums of z q and z z
  u32 any = 0;
  bool nonfinite = false;
  UNROLLED for (int b = 0; b < PIECES; ++b) {
    u32 amax = 0;
    UNROLLED for (int i = b * RUN; i < (b + 1) * RUN; ++i) amax = max(amax, as_bits(y[i]) & MAGNITUDE);
    nonfinite |= amax >= FLOAT_EXPONENT;  // then nothing of this block is looked at
    piece[b] = two_scales_piece(amax, tensor);
    UNROLLED for (int i = b * RUN; i < (b + 1) * RUN; ++i) {
      float z = quotient(y[i], piece[b]);
      y[i] = nearest<true>(z, piece[b].block);
      u32 q = as_bits(y[i]) & MAGNITUDE;
      double whole = widened_magnitude(as_bits(z) & MAGNITUDE);
      over = __fma_rn(whole, widened_magnitude(q), over);
      square = __fma_rn(whole, whole, square);
      any |= q;
    }
  }
  if (any == 0) over = 0.0;
  // 2. those of the group
  UNROLLED for (int flip = 1; flip < GROUP / PER_LANE; flip *= 2) {
    over = __dadd_rn(over, __shfl_xor_sync(~0u, over, flip));
    square = __dadd_rn(square, __shfl_xor_sync(~0u, square, flip));
    nonfinite |= (bool)__shfl_xor_sync(~0u, (i32)nonfinite, flip);
  }
  // 3. the correction <z, z> / <z, q>, in the defined order of sums where another one might round otherwise: it moves a
  // quotient by less than 2^-47 of it, and few are as near to a tie as that
  double c = __ddiv_rn(square, over);
  float correction = over == 0.0 ? 1.0f : __double2float_rn(c);
  bool near = __double2float_rn(c * (1.0 - TOLERANCE)) != __double2float_rn(c * (1.0 + TOLERANCE));
  near = near && over != 0.0 && !nonfinite;
  if (__any_sync(~0u, near)) {
    u32 back = threadIdx.x % (GROUP / PER_LANE);
    Source source = line.source;
    source.from -= back * (PER_LANE * source.stride + source.gap);
    float again = correction_slowly(source, line.signs, line.factor, tensor);
    if (near) correction = again;
    __syncwarp();  // the others have read what this lane is about to write
  }
  // 4. scales times the correction, rounded stochastically, and values under them
  UNROLLED for (int b = 0; b < PIECES; ++b) {
    u32 rest = ~random_integer(line.first / RUN + b, draw, nullptr);
    float scale = scale_drawn(__fmul_rn(piece[b].block.stored, correction), rest);
    UNROLLED for (int i = b * RUN; i < (b + 1) * RUN; ++i)
      y[i] = nonfinite ? as_float(0x7FC00000) : __fmul_rn(y[i], scale);
  }
}

#endif

#define RESIDENT (CAST == DEVIATION || (CAST == BLOCK_FORMAT && STOCHASTIC) ? 3 : 4)  // more would spill registers

// Rotate and cast a lane's numbers in place; bit i of the result says that element i passes the mask.
DEVICE u32 cast_line(
    float (&y)[PER_LANE], const Line& line, TensorScale scale, const Draw& draw, const Cast& c) {
  // 1. the transform
  rotate(y, line.signs[threadIdx.x % SLICES]);
#if CAST == CORRECTED
  cast_corrected(y, line, scale.decode, draw);
  return 0;
#else
  // 2. the scale of each piece, by the rule
  Piece piece[PIECES];
  bool exactly = false;
#if CAST == BLOCK_FORMAT
  UNROLLED for (int b = 0; b < PIECES; ++b) {
    u32 amax = 0;
    UNROLLED for (int i = 0; i < RUN; ++i) amax = max(amax, as_bits(y[b * RUN + i]) & MAGNITUDE);
    piece[b].block = fast_block(amax, scale);
    exactly |= piece[b].block.refused || amax >= FLOAT_EXPONENT;
  }
#elif CAST == LARGEST
  UNROLLED for (int b = 0; b < PIECES; ++b) {
    u32 amax = finite_amax_of<RUN>(y + b * RUN);
    piece[b] = piece_of(amax ? __fdiv_rn(as_float(amax), as_float(TOP)) : 1.0f);
  }
#elif CAST == TWO_SCALES
  UNROLLED for (int b = 0; b < PIECES; ++b) piece[b] = two_scales_piece(finite_amax_of<RUN>(y + b * RUN), scale.decode);
#else
  u32 amax = 0;
  UNROLLED for (int i = 0; i < PER_LANE; ++i) amax = max(amax, as_bits(y[i]) & MAGNITUDE);
  float wanted;
  bool sure = quick_scale(y, amax, wanted);
  if (__any_sync(~0u, !sure)) {
    float exact = scale_of_deviation(deviation_of(y));
    if (!sure) wanted = exact;
  }
  piece[0] = piece_of(wanted);
#endif
  // 3. elements, four of which share random words
  u32 passing = 0;
  UNROLLED for (int i = 0; i < PER_LANE / 4; ++i) {
    u32 rests[4] = {};
#if STOCHASTIC
    take_rests(rests, counter_of(line.first & ~(u64)63), i, draw);
#endif
    UNROLLED for (int k = 0; k < 4; ++k) {
      int at = i + 8 * k;
      bool passes;
      y[at] = cast_one(y[at], rests[k], piece[at / RUN], passes);
      passing |= (u32)passes << at;
    }
  }
// 4. pieces with NaN, Inf or scales at float32's limits again, the exact path
#if CAST == BLOCK_FORMAT
  if (__any_sync(~0u, exactly)) {
    u16 again[PER_LANE];
    cast_line_exactly(again, line.source, line.signs, line.factor, line.first, scale, draw, c);
    UNROLLED for (int i = 0; i < PER_LANE; ++i)
      if (exactly) y[i] = as_float((u32)again[i] << 16);
  }
#endif
  return passing;
#endif
}

// Find the largest finite magnitudes of what is cast: of the tiles of each block of threads.
KERNEL __launch_bounds__(THREADS) rotated_amax(const __grid_constant__ RotatedJob job) {
  __shared__ __align__(16) u16 tile[TILE_ELEMENTS];
  i64 wide = (job.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, high = (job.rows + TILE_ROWS - 1) / TILE_ROWS;
  const u32* signs = SIGNS_OF(job);
  u32 amax = 0;
  float y[PER_LANE];
#pragma unroll 1
  for (i64 at = blockIdx.x; at < wide * high; at += gridDim.x) {
    __syncthreads();
    copy_tile<false>((u16*)job.x, tile, corner_of(at % wide, at / wide), job);
    __syncthreads();
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      TilePlace place = tile_place(part);
      load_line(y, tile + PLACE(place.row) + place.column, part, job);
      add_up(y, signs[threadIdx.x % SLICES]);
      float top = fabsf(y[0]);
      UNROLLED for (int i = 1; i < PER_LANE; ++i) top = fmaxf(top, fabsf(y[i]));
      if (top < as_float(FLOAT_EXPONENT)) amax = max(amax, as_bits(top));  // a NaN is none of several
      else amax = max(amax, finite_amax_of<PER_LANE>(y));
    }
  }
  amax = block_max(as_bits(transformed(as_float(amax))), THREADS / 32);
  if (threadIdx.x == 0) job.parts[blockIdx.x] = amax;
}

// The scale of a tensor from the amaxes of its parts.
DEVICE TensorScale find_tensor_scale(const RotatedJob& job, const Cast& c) {
  TensorScale scale = {1.0f, 1.0f};
#if TWO_LEVEL
  u32 amax = 0;
  for (i64 i = threadIdx.x; i < job.part_count; i += THREADS) amax = max(amax, job.parts[i]);
  amax = block_max<true>(amax, THREADS / 32);
#if CAST == CORRECTED || CAST == TWO_SCALES
  scale.decode = quartet_tensor(as_float(amax), as_float(TENSOR_TOP), as_float(TOP));
#else
  scale = te_tensor(as_float(amax), c.scale);
#endif
  if (threadIdx.x + blockIdx.x + blockIdx.y == 0) *job.scale = scale.decode;
#endif
  return scale;
}

DEVICE void store_mask(u8* to, u32 passing) {
  UNROLLED for (int half = 0; half < 2; ++half) {
    u32 words[4];
    UNROLLED for (int w = 0; w < 4; ++w) {
      u32 four = passing >> (16 * half + 4 * w) & 0xFu;
      words[w] = (four & 1u) | (four & 2u) << 7 | (four & 4u) << 14 | (four & 8u) << 21;
    }
    ((Words4*)to)[half] = {words[0], words[1], words[2], words[3]};
  }
}

// Cast in place within the tile.
DEVICE void cast_tile(u16* tile, Corner corner, const u32* signs, const RotatedJob& job, const Cast& c) {
  TensorScale scale = find_tensor_scale(job, c);
  float y[PER_LANE];
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    TilePlace place = tile_place(part);
    u16* at = tile + PLACE(place.row) + place.column;
    i64 row = corner.row + place.row, column = corner.column + place.column;
    load_line(y, at, part, job);
#if DOWN
    Line line = {{at + part, PITCH, GAP}, signs, job.factor, (u64)((column + part) * job.rows + row)};
#else
    Line line = {{at, 1, 0}, signs, job.factor, (u64)(row * job.columns + column)};
#endif
    u32 passing = cast_line(y, line, scale, DRAW_OF(c.draw), c);
#if MASKS
    if (row < job.rows && column < job.columns) store_mask(job.mask + line.first, passing);
#endif
    store_line(at, part, y);
  }
}

KERNEL __launch_bounds__(THREADS, RESIDENT) cast_rotated(
    const __grid_constant__ RotatedJob job, const __grid_constant__ Cast c) {
  __shared__ __align__(16) u16 tile[TILE_ELEMENTS];
  Corner corner = corner_of(blockIdx.x, blockIdx.y);
  const u32* signs = SIGNS_OF(job);
  copy_tile<false>((u16*)job.x, tile, corner, job);
  __syncthreads();
  cast_tile(tile, corner, signs, job, c);
  __syncthreads();
  copy_tile<true>(job.out, tile, corner, job);
}
