// Products of units that cut their terms toward zero or down, or round them to nearest even, and whose sums of a block
// are rounded in another way than toward zero, or to few exponents: one float64 multiply-add a product.
//
// As in floor.cu, a running sum that carries M = 1.5 * 2^52 u has the grid u = 2^(E - FRACTION) itself, so that a
// multiply-add toward zero adds floor(p / u), and trunc(p / u) = floor(p (1 + eps) / u) + [p < 0]. The first operand
// carries 1 + eps. The exponents of products are added and compared two columns at a time; with the addend's they make
// M.
//
// To nearest even a tie must not see the parity of other terms, so that the running sum stays out of it: with c' the
// addend to nearest even, B = M + 2 floor(c' / 2u) u is an even number of u, and so is what is nearest to B + p,
// ties to even, B plus the nearest to p. |p| < 4 * 2^E, so that B + p keeps the exponent of M, and the low words of
// B and of that sum differ by the term in units of u, modulo 2^32. The unit's terms, with what c' has above B, stay
// below 2^31 u (gemm_cut.py asks for that): an integer of 32 bits a result adds low words, which is all that is left
// to do. What is nearest to B - p lies as far below B, so that every other place takes it away, and the low words of
// B cancel.
//
// Behind a block M, whose exponent field the sum still has, is taken away: the rest is exact, and is rounded as in
// chain.cu, where the macros KEPT, CLAMPED and PROMOTES are explained. A tile with NaN, Inf, a sum beyond the
// accumulator's largest number (clamped: half of it), or (not clamped) a sum below its normal numbers is marked.
//
// Stochastic rounding adds an integer of DRAWN bits, in units of the last place times 2^-DRAWN, and cuts: a rest of at
// least 2^DRAWN less the integer moves a magnitude up. Four outputs of a row, 16 columns apart, share a counter, so
// that the operands change places there: a thread then has all four.
//
// Macros: BLOCK, FRACTION, KEPT, CLAMPED, PROMOTES, TERMS (how they are rounded: MODE_ZERO, MODE_DOWN, MODE_EVEN),
// ROUND (sums: MODE_EVEN, MODE_ZERO, MODE_STOCHASTIC), BITS (of a random integer), ODD (its variant b: twice the
// integer plus one), ALIGNED (the columns are a multiple of 64), STAGES, AHEAD (exponents of a block are compared
// during the products of the one before: 1 needs three stages and registers, of which terms to nearest leave none).
#include "cut.cuh"
#include "philox.cuh"

#define THREADS 256
#define CUT (52 - KEPT)
#define ABOVE ((CUT << 20) + (1 << 19))  // from the high word of 2^e to that of 1.5 * 2^52 last places
#define SWAPPED (ROUND == MODE_STOCHASTIC)
#define DRAWN (BITS + ODD)
#define SHIFT (((52 - FRACTION) << 20) + (1 << 19))  // from the high word of 2^E to that of M

struct alignas(16) Limits {
  double enlarged;  // 1 + eps
  i32 emin, emax;   // of the accumulator
  i32 least;        // high word of the smallest M
  i32 lowest;       // high word of 2^emin
};

struct Stage { u8 a[ROW_BYTES], b[COLUMN_BYTES]; };

struct Lane { i32 warp_row, row, warp_column, column; };  // of a warp in a panel, and of a lane's words in it

// Of a block, of each output in units of u: terms that were rounded to nearest even.
#if TERMS == MODE_EVEN
struct Terms { u32 sum[8][8]; };
#else
struct Terms {};
#endif

// Of a thread's sums, as high words: the largest (clamped: of 1.5 * 2^52 last places), and twice the smallest but zero,
// less one.
struct Extremes {
  i32 largest;
  u32 smallest;
};

template <typename T, int Count, int Apart>
DEVICE void load(T (&to)[Count], const T* from) {
  constexpr int CHUNK_OF = 16 / sizeof(T);
  struct alignas(16) Chunk { T value[CHUNK_OF]; };
#pragma unroll
  for (int i = 0; i < Count; i += CHUNK_OF) {
    const Chunk chunk = *(const Chunk*)(from + i * Apart);
#pragma unroll
    for (int j = 0; j < CHUNK_OF; ++j) to[i + j] = chunk.value[j];
  }
}

// The largest field of M that a product of the block asks for, two columns a word.
struct Fields { u32 word[8][4]; };

DEVICE void clear(Fields& fields) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) fields.word[i][j] = 0;
}

DEVICE void survey(Fields& fields, const Stage& stage, const Lane& at, int place) {
  const u32* a = (const u32*)(stage.a + VALUE_BYTES) + at.warp_row + at.row * 4;
  const u32* b = (const u32*)(stage.b + VALUE_BYTES) + at.warp_column / 2 + at.column * 4;
  u32 x[8], y[4];
  load<u32, 8, 8>(x, a + place * PANEL);
  load<u32, 4, 1>(y, b + place * (PANEL / 2));
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) fields.word[i][j] = __viaddmax_s16x2(x[i], y[j], fields.word[i][j]);
}

DEVICE void survey(Fields& fields, const Stage& stage, const Lane& at) {
  clear(fields);
#pragma unroll 4
  for (int place = 0; place < BLOCK; ++place) survey(fields, stage, at, place);
}

// Turn running sums into M plus the cut addend plus the number of negative terms; or, where terms are rounded, into B,
// and `terms` into what they begin with: what c' has above B, less the low word of B that has no other to cancel it.
DEVICE void start(double (&s)[8][8], Terms& terms, const Fields& fields, const Stage& stage, const Lane& at,
                  const Limits& l) {
  u32 rows[8], columns[8];
  load<u32, 8, 8>(rows, (const u32*)(stage.a + ROW_BYTES - PANEL * 4) + at.warp_row + at.row * 4);
  load<u32, 8, 4>(columns, (const u32*)(stage.b + COLUMN_BYTES - PANEL * 4) + at.warp_column + at.column * 4);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const double c = s[i][j];
      const i32 high = __double2hiint(c);
      i32 own = high & 0x7FF00000;
      if (CLAMPED) own = high == 0 ? 0 : max(own, l.lowest);  // only a zero has that high word, and is +0
      const u32 pair = fields.word[i][j / 2];
      const i32 products = (i32)((j % 2 ? pair >> 16 << 20 : pair << 20) | 1u << 19);
      const i32 field = max(__viaddmax_s32(own, SHIFT, products), l.least);
      const double m = __hiloint2double(field, 0);
#if TERMS == MODE_EVEN
      const double sum = __dadd_rn(c, m);
      const u32 low = (u32)__double2loint(sum), even = low & ~1u;
      s[i][j] = __hiloint2double(__double2hiint(sum), (i32)even);
      terms.sum[i][j] = (low & 1u) - even * (BLOCK % 2);
#else
      const double sum = __fma_rz(c, l.enlarged, m);
      const u32 negative = TERMS == MODE_DOWN ? 0 : __popc(rows[i] ^ columns[j]) + ((u32)high >> 31);
      s[i][j] = __longlong_as_double(__double_as_longlong(sum) + negative);
#endif
    }
}

// AHEAD: `fields` become those of the next block, in integers beside these doubles.
DEVICE void add_products(double (&s)[8][8], Terms& terms, Fields& fields, const Stage& stage, const Stage& next,
                         const Lane& at) {
  if (AHEAD) clear(fields);
  const double* a = (const double*)stage.a + at.warp_row + at.row * CHUNK;
  const double* b = (const double*)stage.b + at.warp_column + at.column * CHUNK;
#pragma unroll 16  // of shorter loops the compiler copies every sum in each turn
  for (int place = 0; place < BLOCK; ++place) {
    double x[8], y[8];
    load<double, 8, 8>(x, a + place * PANEL);
    load<double, 8, 4>(y, b + place * PANEL);
    if (AHEAD) {
      __syncwarp();  // a barrier for the compiler, which would compare all exponents behind all products
      survey(fields, next, at, place);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#if TERMS == MODE_EVEN
        const u32 low = (u32)__double2loint(__fma_rn(place % 2 ? -x[i] : x[i], y[j], s[i][j]));
        terms.sum[i][j] += place % 2 ? 0 - low : low;
#else
        s[i][j] = __fma_rz(x[i], y[j], s[i][j]);
#endif
      }
  }
}

// What a block has added to M.
DEVICE double block_sum(double s, const Terms& terms, int i, int j) {
  const double m = __hiloint2double((__double2hiint(s) & 0x7FF00000) | 1 << 19, 0);
#if TERMS == MODE_EVEN
  s = __longlong_as_double(__double_as_longlong(s) + (i64)(i32)terms.sum[i][j]);
#endif
  return __dadd_rn(s, -m);
}

// `w`: the random integer.
DEVICE double rounded(double x, u32 w, Extremes& e, const Limits& l) {
  const i32 exponent = __double2hiint(x) & 0x7FF00000;
  const i32 high = CLAMPED ? __viaddmax_s32(exponent, ABOVE, l.lowest + ABOVE) : exponent + ABOVE;
  const double places = __hiloint2double(high, 0);
  double y;
  if (ROUND == MODE_EVEN && !CLAMPED) {
    constexpr double power = (double)(1ull << CUT);
    y = __fma_rn(x, power, -__dmul_rn(x, power - 1.0));
  } else if (ROUND == MODE_EVEN) {
    y = __dadd_rn(__dadd_rn(x, places), -places);
  } else {
    double magnitude = fabs(x);
    if (ROUND == MODE_STOCHASTIC) {
      const i32 unit = high - (DRAWN << 20) - (1 << 19);  // of 2^52 of the integer's units
      magnitude = __dadd_rn(magnitude, __dadd_rn(__hiloint2double(unit, (i32)w), -__hiloint2double(unit, 0)));
    }
    y = __dadd_rn(__dadd_rz(magnitude, places), -places);
    const i32 top = __double2hiint(y), sign = __double2hiint(x) & (i32)0x80000000;
    y = __hiloint2double(top == 0 ? 0 : top | sign, __double2loint(y));
  }
  if (CLAMPED) {
    e.largest = max(e.largest, high);
  } else {
    e.largest = max(e.largest, __double2hiint(y) & 0x7FFFFFFF);
    e.smallest = min(e.smallest, 2 * (u32)__double2hiint(y) - 1);
  }
  return y;
}

DEVICE bool is_right(const Extremes& e, const Limits& l) {
  if (CLAMPED) return (e.largest >> 20) - 1023 - CUT < l.emax;
  return (e.largest >> 20) - 1023 <= l.emax && (i32)((e.smallest / 2 + 1) >> 20) - 1023 >= l.emin;
}

// Outputs of a thread, by the numbers of its words of the first and the second operand.
struct Outputs {
  void* sums;
  const void* c;
  i32 first, second;

  DEVICE i64 row_of(int i, int j) const { return SWAPPED ? second + j / 2 * 8 + j % 2 : first + 8 * i; }
  DEVICE i64 column_of(int i, int j) const { return SWAPPED ? first + 8 * i : second + j / 2 * 8 + j % 2; }
};

DEVICE u32 integer_of(u32 word) { return ODD ? 2 * (word >> (32 - BITS)) + 1 : word >> (32 - BITS); }

// Take M away and round; t counts blocks.
DEVICE void finish(double (&s)[8][8], const Terms& terms, Extremes& e, const Outputs& to, i32 t, const Limits& l,
                   const Draw& d, const Problem& p) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 words[4] = {};
      u64 index = ((u64)t * p.rows + to.row_of(half, j)) * p.columns + to.column_of(half, j);
      if (ROUND == MODE_STOCHASTIC && ALIGNED) {
        Words4 drawn = philox(counter_of(index), d);
        words[0] = drawn.x, words[1] = drawn.y, words[2] = drawn.z, words[3] = drawn.w;
      } else if (ROUND == MODE_STOCHASTIC) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = random_word(index + 16 * i, d);
      }
#pragma unroll
      for (int i = half; i < 8; i += 2) {
        s[i][j] = rounded(block_sum(s[i][j], terms, i, j), integer_of(words[i / 2]), e, l);
      }
    }
}

DEVICE bool begin(double (&s)[8][8], Extremes& e, const Outputs& to, const Limits& l, const Problem& p) {
  bool good = true;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      s[i][j] = 0.0;
      i64 row = to.row_of(i, j), column = to.column_of(i, j);
      if (to.c == nullptr || blockIdx.z != 0 || row >= p.rows || column >= p.columns) continue;
      double c = addend_at(to.c, p, row, column);
#if PROMOTES
      write_sum(to.sums, p, blockIdx.z, row, column, c);
#else
      good &= fabs(c) < as_double(INFINITY_BITS);
      s[i][j] = rounded(c + 0.0, 0, e, l);
#endif
    }
  return good;
}

DEVICE void end_chains(double (&s)[8][8], const Outputs& to, const Problem& p, bool first) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      i64 row = to.row_of(i, j), column = to.column_of(i, j);
      if (row < p.rows && column < p.columns) {
        float* place = (float*)to.sums + ((i64)blockIdx.z * p.rows + row) * p.columns + column;
        float sum = __fadd_rn(first ? 0.0f : *place, (float)s[i][j]);
        *place = sum == sum ? sum : __uint_as_float(0x7FFFFFFFu);
      }
      s[i][j] = 0.0;
    }
}

KERNEL __launch_bounds__(THREADS, 1)
cut_product(const u8* records_a, const u8* records_b, const u32* flags, const void* c, const u8* ends,
            const i32* part_blocks, i32 blocks, u8* marks, void* sums, const Limits l, const Draw d,
            const Problem p) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  i32 panels_a = ((SWAPPED ? p.columns : p.rows) + PANEL - 1) / PANEL;
  i32 panels_b = ((SWAPPED ? p.rows : p.columns) + PANEL - 1) / PANEL;
  // panels of a in groups of 8, so that blocks that run together share operands in the second-level cache
  i32 group = blockIdx.x / (8 * panels_b), height = min(8, panels_a - 8 * group), rest = blockIdx.x % (8 * panels_b);
  i32 panel_a = 8 * group + rest % height, panel_b = rest / height;
  u8* mark = marks + (SWAPPED ? (i64)panel_b * panels_a + panel_a : (i64)panel_a * panels_b + panel_b);
  if (flags[panel_a] | flags[panels_a + panel_b]) {
    if (threadIdx.x == 0) *mark = 1;
    return;
  }
  i32 first = part_blocks[2 * blockIdx.z], count = part_blocks[2 * blockIdx.z + 1] - first;
  const u8* a = records_a + ((i64)panel_a * blocks + first) * ROW_BYTES;
  const u8* b = records_b + ((i64)panel_b * blocks + first) * COLUMN_BYTES;
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2 * 64, warp_column = warp / 2 * 32;
  Lane at = {warp_row, lane / 4, warp_column, lane % 4};
  Outputs to = {sums, c, panel_a * PANEL + warp_row + lane / 4, panel_b * PANEL + warp_column + lane % 4 * 2};
  double s[8][8];
  Extremes e = {0, ~0u};
  bool good = begin(s, e, to, l, p);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < count) {
      copy_words<ROW_BYTES / 16, THREADS>(stages[i].a, a + (i64)i * ROW_BYTES);
      copy_words<COLUMN_BYTES / 16, THREADS>(stages[i].b, b + (i64)i * COLUMN_BYTES);
    }
    commit_copies();
  }
  i32 slot = 0;
  Fields fields;
  if (AHEAD) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    survey(fields, stages[0], at);
  }
  bool joined = PROMOTES && c != nullptr && blockIdx.z == 0;
  for (i32 i = 0; i < count; ++i) {
    wait_copies<STAGES - 2 - AHEAD>();
    __syncthreads();
    i32 next = i + STAGES - 1, free = slot == 0 ? STAGES - 1 : slot - 1;
    if (next < count) {
      copy_words<ROW_BYTES / 16, THREADS>(stages[free].a, a + (i64)next * ROW_BYTES);
      copy_words<COLUMN_BYTES / 16, THREADS>(stages[free].b, b + (i64)next * COLUMN_BYTES);
    }
    commit_copies();
    const Stage& stage = stages[slot];
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    Terms terms;
    if (!AHEAD) survey(fields, stage, at);
    start(s, terms, fields, stage, at, l);
    add_products(s, terms, fields, stage, stages[slot], at);
    finish(s, terms, e, to, first + i, l, d, p);
    if (PROMOTES && ends[first + i]) {
      end_chains(s, to, p, !joined);
      joined = true;
    }
  }
#if !PROMOTES
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      i64 row = to.row_of(i, j), column = to.column_of(i, j);
      if (row < p.rows && column < p.columns) write_sum(sums, p, blockIdx.z, row, column, s[i][j] + 0.0);
    }
#endif
  if (!good || !is_right(e, l)) *mark = 1;
}
