// Element formats, codes: float16, bfloat16 or float32 to codes, in slots of whole bytes or packed (docs/semantics.md,
// section 11).
//
// Macros: INPUT (dtype of vectors.cuh); those of grid_cast.cuh; CODE: bits of a code, at most 32; SLOT: bits from one code
// to the next, CODE where they are packed; INTEGER: two's complement codes; VECTORS: addresses of whole vectors.
#include "common.cuh"
#include "grid_cast.cuh"
#include "philox.cuh"
#include "vectors.cuh"

typedef Stored<INPUT>::type Input;

// Codes that fill whole words together, and those that fit one word.
#define EVEN (SLOT % 32 == 0 ? 1 : SLOT % 16 == 0 ? 2 : SLOT % 8 == 0 ? 4 : SLOT % 4 == 0 ? 8 : SLOT % 2 == 0 ? 16 : 32)
#define PART (SLOT > 16 ? 1 : SLOT > 8 ? 2 : SLOT > 4 ? 4 : SLOT > 2 ? 8 : SLOT > 1 ? 16 : 32)
#define LEAST (BYTES_OF(INPUT) == 2 ? (SLOT <= 8 ? 16 : 8) : 4)
#define RUN (EVEN > LEAST ? EVEN : LEAST)  // elements of a thread
#define WORDS (RUN * SLOT / 32)

// A code in the top bits of a word, unless x is NaN.
DEVICE u32 top_of(float x, u32 word, const Grid& g) {
  if (SIGNS_LAST && !INTEGER) {
    u32 bits = __float_as_uint(rounded_magnitude(x, word, g) * g.code_scale) * g.code_factor;
    return bits | (__float_as_uint(x) & g.sign);
  }
  float y = rounded_number(x, word, g);
  u32 code = top_code<INTEGER, SPECIAL>(y, g);
  return SPECIAL && is_spoiled<SPECIAL>(y, x) ? g.nan_code : code;
}

DEVICE u32 code_at(const Input* x, i64 i, const Grid& g, const Draw& d) {
  float value = loaded<INPUT>(x[i]);
  u32 code = top_of(value, RANDOM ? random_word((u64)i, d) : 0, g);
  return (value != value ? g.nan_code : code) >> (32 - CODE);
}

// Codes from one on into bytes, the last filled with zeros.
DEVICE void encode_slowly(const Input* x, u8* to, i64 first, i64 last, const Grid& g, const Draw& d) {
  u64 held = 0;
  int bits = 0;
#pragma unroll 1
  for (i64 i = first; i < last; i++) {
    held |= (u64)code_at(x, i, g, d) << bits;
    for (bits += SLOT; bits >= 8; bits -= 8, held >>= 8) *to++ = (u8)held;
  }
  if (bits) *to = (u8)held;
}

// Codes side by side: first those that fit a word, from the last to the first, then these parts.
DEVICE void pack(u32 (&out)[WORDS], const u32 (&tops)[RUN]) {
#pragma unroll
  for (int i = 0; i < RUN; i += PART) {
    u32 part = 0;
#pragma unroll
    for (int k = i + PART - 1; k >= i; k--) {
      u32 top = SLOT < 32 && SLOT > CODE ? tops[k] >> (SLOT - CODE) : tops[k];
      part = SLOT == 32 ? top >> (32 - CODE) : __funnelshift_l(top, part, SLOT);
    }
    int bit = i * SLOT, end = bit % 32 + PART * SLOT;
    out[bit / 32] = bit % 32 ? out[bit / 32] | part << (bit % 32) : part;
    if (end > 32) out[bit / 32 + 1] = part >> (32 - bit % 32);
  }
}

DEVICE void store_run(u8* to, const u32 (&out)[WORDS]) {
#pragma unroll
  for (int k = 0; k < WORDS; k += WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1) {
    if constexpr (WORDS % 4 == 0) {
      store_words<WORDS == 4>((u32*)to + k, out[k], out[k + 1], out[k + 2], out[k + 3]);
    } else if constexpr (WORDS % 2 == 0) {
      uint2 pair = {out[k], out[k + 1]};
      *(uint2*)((u32*)to + k) = pair;
    } else {
      ((u32*)to)[k] = out[k];
    }
  }
}

// A run of elements that were loaded from place base on.
DEVICE void encode_run(
    const Vectors<INPUT, RUN>& from, const u32 (&words)[RUN], const Input* x, u8* to, i64 base, const Grid& g,
    const Draw& d) {
  float values[RUN];
  u32 tops[RUN], out[WORDS];
#pragma unroll
  for (int k = 0; k < RUN; k++) {
    values[k] = from.get(k);
    tops[k] = top_of(values[k], words[k], g);
  }
  pack(out, tops);
  if (holds_nan(values)) encode_slowly(x, to, base, base + RUN, g, d);
  else store_run(to, out);
}

// A warp takes SPAN elements: with random words a tile of them, else a run a lane. What does not fill one is encoded
// slowly.
#define SPAN (RANDOM ? TILE : 32 * RUN)

KERNEL encode(const Input* x, u8* codes, i64 count, const Grid g, const Draw d) {
#if RANDOM
  __shared__ Words4 memory[4][TILE_WORDS / 4];
  u32* held = (u32*)memory[threadIdx.x / 32];
#endif
  i64 start = ((i64)blockIdx.x * 4 + threadIdx.x / 32) * SPAN;
  bool whole = VECTORS && start + SPAN <= count;
#if RANDOM
  if (whole) make_words(held, (u64)start, upper_counter(), d);
#endif
#pragma unroll 1
  for (i32 place = 0; place < SPAN; place += 32 * RUN) {
    i64 base = start + place + threadIdx.x % 32 * RUN;
    u8* to = codes + base / RUN * WORDS * 4;
    if (whole) {
      Vectors<INPUT, RUN> from;
      from.load(x + base);
      __syncwarp();  // or the compiler would load late, one vector after the other
      u32 words[RUN] = {};
#if RANDOM
      take_words(words, held, (i32)(base - start));
#endif
      encode_run(from, words, x, to, base, g, d);
    } else if (base < count) {
      encode_slowly(x, to, base, base + RUN < count ? base + RUN : count, g, d);
    }
  }
}

// Rows that end within a byte: a thread packs eight codes of a row, CODE bytes.
KERNEL encode_rows(const Input* x, u8* codes, i64 rows, i64 columns, const Grid g, const Draw d) {
  i64 groups = (columns + 7) / 8, thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= rows * groups) return;
  i64 row = thread / groups, column = thread % groups * 8, end = column + 8 < columns ? column + 8 : columns;
  u8* to = codes + row * ((columns * CODE + 7) / 8) + column / 8 * CODE;
  encode_slowly(x, to, row * columns + column, row * columns + end, g, d);
}
