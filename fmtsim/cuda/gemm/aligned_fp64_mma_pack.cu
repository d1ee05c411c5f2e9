// SPDX-License-Identifier: Apache-2.0
// Packs an operand of aligned_fp64_mma.cu (aligned_fp64_mma_layout.cuh), in the accumulation order.
// Macros: TYPE (operands.cuh); SPAN; ROWS of a panel; FIRST 1 for the operand that is enlarged; TWO_WORDS; WIDE;
// SCALED: numbers are multiplied by scales of the unit.
#include "aligned_fp64_mma_layout.cuh"
#include "operands.cuh"

#define THREADS 256
#define PLACES (SPAN > 64 ? SPAN : 64 / SPAN * SPAN)  // places that a thread block packs, of 32 rows
#define PITCH (PLACES + 1)
#define EACH 32  // numbers that a thread of row_exponents looks at
#define BY_CODE (TYPE <= TYPE_E8M0 && !WIDE && !SCALED)  // 256 codes: a thread turns one into what is packed
#define SPECIAL 0x10000u                                      // beside a power in 16 bits

struct alignas(8) Operand {
  const void* data;
  const float* scales;  // [rows, groups along k], SCALED
  i64 row_stride, k_stride, scale_row_stride, scale_group_stride;
  double enlarged;      // 1 + 2^-eps
  i32 rows, block;      // block: places of a block in the accumulation order
  i32 emin, top;        // smallest exponent of a number; largest, scales included (if not WIDE)
  i32 scale_every, scale_emin;
  i32 power_count, eps;
  u32 zero;             // high word of a zero, without sign
  u32 addend;           // whether sums begin with a number, which exponents of zeros would truncate
};

// sign: bit 31. A NaN or Inf, of number or scale, is `special` and a zero.
struct Element { double value; i32 exponent; u32 sign; bool special; };

DEVICE i32 exponent_of(double value) { return ((__double2hiint(value) >> 20) & 0x7FF) - 1023; }

// A number without its scale.
DEVICE Element plain_element(const Operand& x, float given) {
  const u32 bits = as_bits(given);
  Element e = {(double)given, 0, bits & 0x80000000u, (bits & 0x7F800000u) == 0x7F800000u};
  e.exponent = max(exponent_of(e.value), x.emin);
  if (e.special) e.value = 0.0;
  return e;
}

DEVICE Element element(const Operand& x, i64 row, i64 k) {
  Element e = plain_element(x, read_value(x.data, row * x.row_stride + k * x.k_stride));
#if SCALED
  const float factor = fabsf(x.scales[row * x.scale_row_stride + k / x.scale_every * x.scale_group_stride]);
  e.special |= (as_bits(factor) & 0x7F800000u) == 0x7F800000u;
  e.exponent += max(exponent_of((double)factor), x.scale_emin);
  e.value = e.special ? 0.0 : e.value * (double)factor;
#endif
  return e;
}

struct Packed { u32 high; u32 power; };

// Return the high word of a number's double (times 1 + eps where the low word stays zero) and its power.
DEVICE Packed packed(const Operand& x, const Element e, i32 base, const u16* powers) {
  const bool empty = WIDE && base == ROW_OF_ZEROS && x.addend == 0;  // nothing is truncated: its exponents should be found
  if (e.value == 0.0) return {x.zero == 0 ? 0u : e.sign | x.zero, empty ? powers[0] : 0u};
  const i32 below = (WIDE ? base : x.top) - e.exponent;
  const double value = FIRST && !TWO_WORDS ? e.value * x.enlarged : e.value;
  const u32 high = (u32)__double2hiint(value) - (WIDE ? (u32)base << 20 : 0u);
  return {high, below < x.power_count ? powers[below] : 0u};
}

// The low word of v (1 + 2^-eps): v's significand, at most 21 bits, moved down.
DEVICE u32 low_word(u32 high, i32 eps) {
  const u32 significand = (high & 0xFFFFFu) | 0x100000u;
  return !FIRST ? 0u : eps <= 32 ? significand << (32 - eps) : significand >> (eps - 32);
}

DEVICE void write_values(const u32* highs, u8* record, i32 first_group, i32 eps) {
  for (i32 unit = threadIdx.x; unit < 2 * (PLACES / 8) * 32; unit += THREADS) {
    const i32 lane = unit & 31, eight = unit / 32 % (PLACES / 8), group = unit / 32 / (PLACES / 8);
    const u32* source = highs + (group * 16 + lane / 4) * PITCH + eight * 8 + lane % 4;
    u8* block = record + (i64)(eight / GROUPS8) * record_bytes(ROWS, TWO_WORDS, WIDE);
    const Words4 w = {source[0], source[8 * PITCH], source[4], source[8 * PITCH + 4]};
    const i32 place = (first_group + group) * GROUPS8 + eight % GROUPS8;
    if (TWO_WORDS) {
      Words4* to = (Words4*)block + place * 64 + lane;
      to[0] = {low_word(w.x, eps), w.x, low_word(w.y, eps), w.y};
      to[32] = {low_word(w.z, eps), w.z, low_word(w.w, eps), w.w};
    } else {
      ((Words4*)block)[place * 32 + lane] = FIRST ? w : Words4{w.x, w.z, w.y, w.w};
    }
  }
}

DEVICE void write_powers(const u16* powers, u8* record, i32 first_group) {
  for (i32 unit = threadIdx.x; unit < 2 * (PLACES / 8) * 32; unit += THREADS) {
    const i32 lane = unit & 31, eight = unit / 32 % (PLACES / 8), group = unit / 32 / (PLACES / 8);
    const u16* source = powers + (group * 16 + lane / 4) * PITCH + eight * 8 + lane % 4 * 2;
    u8* block = record + (i64)(eight / GROUPS8) * record_bytes(ROWS, TWO_WORDS, WIDE) + value_bytes(ROWS, TWO_WORDS);
    const u16* below = source + 8 * PITCH;
    const u32 upper = source[0] | (u32)source[1] << 16, lower = below[0] | (u32)below[1] << 16;
    u32* to = (u32*)(block + power_place(ROWS, first_group + group, eight % GROUPS8, lane));
    if (FIRST || eight % GROUPS8 >= 2 * PAIRS8) {
      *(Words2*)to = Words2{upper, lower};
    } else {  // the second operand's two columns of 8 places each stand side by side
      to -= eight % GROUPS8 & 1;
      to[0] = upper, to[2] = lower;
    }
  }
}

// Four threads make a word, of 8 places each.
DEVICE void write_bits(const u32* highs, u8* record, i32 first_row, u32 zero) {
  for (i32 unit = threadIdx.x; unit < 4 * 32 * (PLACES / SPAN) * WORDS; unit += THREADS) {
    const i32 part = unit & 3, row = unit / 4 % 32, word = unit / 128 % WORDS, block = unit / 128 / WORDS;
    const i32 first = word * 32 + part * 8;
    u32 signs = 0, numbers = 0;
    for (i32 i = 0; i < (first < SPAN ? 8 : 0); ++i) {
      const u32 high = highs[row * PITCH + block * SPAN + first + i];
      signs |= (high >> 31) << (part * 8 + i);
      numbers |= (u32)((high & 0x7FFFFFFFu) != zero) << (part * 8 + i);
    }
    for (i32 other = 1; other < 4; other *= 2) {
      signs |= __shfl_xor_sync(0xFFFFFFFFu, signs, other);
      if (WIDE) numbers |= __shfl_xor_sync(0xFFFFFFFFu, numbers, other);
    }
    if (part != 0) continue;
    u32* to = (u32*)(record + (i64)block * record_bytes(ROWS, TWO_WORDS, WIDE) + value_bytes(ROWS, TWO_WORDS) +
                     power_bytes(ROWS));
    const i32 place = word * ROWS + first_row + sign_place(row, FIRST);
    to[place] = signs;
    if (WIDE) to[WORDS * ROWS + place] = numbers;
  }
}

#if BY_CODE
// Say for every code what is packed for it, in `of_code`.
DEVICE void turn_codes(Words2* of_code, const Operand& x, const u16* powers) {
  const u8 code = (u8)threadIdx.x;
  const Element e = plain_element(x, read_value(&code, 0));
  const Packed p = packed(x, e, 0, powers);
  of_code[threadIdx.x] = Words2{p.high, p.power | (e.special ? SPECIAL : 0u)};
}
#endif

// Return what is packed of the number at place k of a row, or of none (k < 0); mark rows with NaN and Inf.
DEVICE Packed packed_at(const Operand& x, i32 row, i32 k, i32* bases, const u16* powers, const Words2* of_code) {
  const bool given = k >= 0 && row < x.rows;
#if BY_CODE
  const Words2 p = of_code[given ? ((const u8*)x.data)[row * x.row_stride + k * x.k_stride] : 0];
  if (p.y & SPECIAL) bases[row] = ROW_OF_SPECIALS;
  return {p.x, p.y & 0xFFFFu};
#else
  Element e = {0.0, 0, 0, false};
  if (given) e = element(x, row, k);
  if (!WIDE && e.special) bases[row] = ROW_OF_SPECIALS;
  return packed(x, e, WIDE ? bases[row] : 0, powers);
#endif
}

// Grid: x counts runs of PLACES / SPAN blocks, y groups of 32 rows. `order` maps places to k or -1; a panel has `pitch`
// records, whole runs. `bases`: without WIDE they are zero before and mark rows with NaN or Inf after.
KERNEL __launch_bounds__(THREADS)
pack_operand(const Operand x, const u16* powers, const i32* order, i32 blocks, i32 pitch, i32* bases, u8* records) {
  __shared__ u32 highs[32 * PITCH];
  __shared__ u16 exponents[32 * PITCH];
  __shared__ i32 source[PLACES];
  __shared__ Words2 of_code[BY_CODE ? 256 : 1];
  // 1. the k of each place
  const i32 first_block = blockIdx.x * (PLACES / SPAN), first_row = blockIdx.y * 32;
  for (i32 place = threadIdx.x; place < PLACES; place += THREADS) {
    const i32 block = first_block + place / SPAN, inside = place % SPAN;
    source[place] = block < blocks && inside < x.block ? order[block * x.block + inside] : -1;
  }
#if BY_CODE
  turn_codes(of_code, x, powers);
#endif
  __syncthreads();
  // 2. numbers and powers into shared memory, read along memory
  for (i32 unit = threadIdx.x; unit < 32 * PLACES; unit += THREADS) {
    const bool along = x.k_stride == 1;  // neighbouring threads read neighbouring addresses
    const i32 row = along ? unit / PLACES : unit % 32, place = along ? unit % PLACES : unit / 32;
    const Packed p = packed_at(x, first_row + row, source[place], bases, powers, of_code);
    highs[row * PITCH + place] = p.high;
    exponents[row * PITCH + place] = (u16)p.power;
  }
  __syncthreads();
  // 3. fragments of values, powers and signs
  u8* record = records + ((i64)(first_row / ROWS) * pitch + first_block) * record_bytes(ROWS, TWO_WORDS, WIDE);
  write_values(highs, record, first_row % ROWS / 16, x.eps);
  write_powers(exponents, record, first_row % ROWS / 16);
  write_bits(highs, record, first_row % ROWS, x.zero);
}

// Find the largest exponent of every row (WIDE); `bases` are ROW_OF_ZEROS before. Grid: x counts groups of rows, y
// parts of k. 8 warps share 8 rows or, where these lie side by side, 32: neighbouring threads read neighbouring
// addresses.
KERNEL __launch_bounds__(THREADS) row_exponents(const Operand x, i32 k_count, i32* bases) {
  __shared__ i32 by_thread[THREADS];
  const bool along = x.k_stride == 1;
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const i32 rows = along ? 8 : 32, row = blockIdx.x * rows + (along ? warp : lane), step = THREADS / rows;
  const i32 first = (blockIdx.y * EACH) * step + (along ? lane : warp);
  i32 largest = ROW_OF_ZEROS;
  if (row < x.rows) {
#pragma unroll 8
    for (i32 i = 0; i < EACH; ++i) {
      const i32 k = first + i * step;
      if (k >= k_count) break;
      const Element e = element(x, row, k);
      if (e.special) largest = ROW_OF_SPECIALS;
      if (e.value != 0.0) largest = max(largest, e.exponent);
    }
  }
  by_thread[along ? warp * 32 + lane : lane * 8 + warp] = largest;
  __syncthreads();
  if (threadIdx.x >= rows) return;
  for (i32 i = 0; i < step; ++i) largest = max(i == 0 ? ROW_OF_ZEROS : largest, by_thread[threadIdx.x * step + i]);
  if (largest != ROW_OF_ZEROS) atomicMax(bases + blockIdx.x * rows + threadIdx.x, largest);
}
