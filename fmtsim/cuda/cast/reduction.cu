// SPDX-License-Identifier: Apache-2.0
// A reduction over ranks whose sums travel as byte codes (docs/distributed.md): the largest magnitudes, the cast before
// the first hop, the sums of a chunk over all ranks, the result. Codes of chunk c are row c of a matrix whose rows
// begin `stride` bytes apart.
//
// Macros: INPUT: dtype of the elements; OUTPUT: of the result, float32 or bfloat16; those of grid.cuh; INTEGER: two's
// complement codes; PROPAGATES: Inf becomes NaN; VECTORS: chunks begin at addresses of whole vectors; RANKS; TREE: the
// order of sums, else that of a ring; SUM_RUNS: runs of a thread that forms sums.
#include "grid.cuh"
#include "philox.cuh"

#define THREADS 256
#define RUN 4   // neighbours of a thread, whose codes are a word
#define RUNS 4  // of a thread, a block apart

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;

// Tensors whose columns lie one behind the other in a matrix, and where each ends.
struct alignas(16) Parts {
  const i64* ends;
  i64 columns, count;
};

// Rows of codes: those of a matrix, or at the same place in the memory of every rank of a table.
struct alignas(16) Rows {
  const u64* ranks;
  u64 first;
  i64 stride;

  DEVICE const u8* at(i64 row) const { return (const u8*)(ranks ? ranks[row] + first : first + row * stride); }
};

// Which tensor an element is of, from one element to the next.
struct Walk {
  i64 column, left;  // left: elements from this one to the tensor's end
  i32 part;

  DEVICE Walk(i64 i, const Parts& p) {
    if (p.count == 1) column = part = 0, left = 1ll << 62;
    else find(i < p.columns ? i : i % p.columns, p);
  }
  DEVICE void find(i64 place, const Parts& p) {
    i32 low = 0, high = (i32)p.count - 1;
    while (low < high) {
      i32 middle = (low + high) / 2;
      if (p.ends[middle] <= place) low = middle + 1;
      else high = middle;
    }
    column = place, part = low, left = p.ends[low] - place;
  }
  DEVICE void next(const Parts& p) {
    if (--left == 0) find(p.ends[part] == p.columns ? 0 : p.ends[part], p);
  }
};

// Neighbours, of which `count` are there.
DEVICE void load_run(float (&x)[RUN], const Input* from, i64 count) {
  if (VECTORS && count >= RUN) {
    Vectors<INPUT, RUN> v;
    v.load(from);
    UNROLLED for (int k = 0; k < RUN; k++) x[k] = v.get(k);
  } else {
    UNROLLED for (int k = 0; k < RUN; k++) x[k] = k < count ? loaded<INPUT>(from[k]) : 0.0f;
  }
}

// The largest magnitude of neighbours, NaN where one is.
DEVICE float top_of(const float (&y)[RUN]) {
  float top = fabsf(y[0]);
  UNROLLED for (int k = 1; k < RUN; k++) top = max_or_nan(top, fabsf(y[k]));
  return top;
}

DEVICE bool is_finite(float x) { return (as_bits(x) & MAGNITUDE) < FLOAT_EXPONENT; }

// Adds what all threads of a block counted.
template <int Count>
DEVICE void add_counts(u64* to, const u32 (&counted)[Count]) {
  u32 any = 0;
  UNROLLED for (int c = 0; c < Count; c++) any |= counted[c];
  if (!__syncthreads_or(any)) return;
  __shared__ u32 sums[Count];
  if (threadIdx.x < Count) sums[threadIdx.x] = 0;
  __syncthreads();
  UNROLLED for (int c = 0; c < Count; c++) {
    u32 all = __reduce_add_sync(~0u, counted[c]);
    if (threadIdx.x % 32 == 0 && all) atomicAdd(&sums[c], all);
  }
  __syncthreads();
  if (threadIdx.x < Count && sums[threadIdx.x]) atomicAdd(to + threadIdx.x, (u64)sums[threadIdx.x]);
}

// The value to which y is rounded, and its code.
DEVICE float rounded_to(u32& code, float y, u32 rest, const Grid& g) {
  float q = rounded_number(y, rest, g);
  bool nan = becomes_nan<SPECIAL>(q, y);
  code = (nan ? g.nan_code : top_code<INTEGER, SPECIAL>(q, g)) >> 24;
  return nan ? g.nan_value : q;
}

DEVICE void raise_top(u32* place, u32 top) {
  if (top > *(volatile u32*)place) atomicMax(place, top);
}

// tops: bits of the largest finite magnitude of each tensor so far.
KERNEL __launch_bounds__(THREADS) largest_magnitudes(const Input* x, u32* tops, i64 count, const Parts p) {
  i64 first = ((i64)blockIdx.x * THREADS * RUNS + threadIdx.x) * RUN;
  float from[RUNS][RUN];
  UNROLLED for (int u = 0; u < RUNS; u++) {
    i64 i = first + u * THREADS * RUN;
    load_run(from[u], x + i, count - i);
  }
  u32 top = 0;
  i32 part = 0;
  UNROLLED for (int u = 0; u < RUNS; u++) {
    i64 i = first + u * THREADS * RUN;
    if (i >= count) break;
    Walk w(i, p);
    u32 most = as_bits(top_of(from[u]));
    if (w.part == part && w.left >= RUN && most < FLOAT_EXPONENT) {  // missing neighbours are zeros
      top = max(top, most);
      continue;
    }
    UNROLLED for (int k = 0; k < RUN; k++, w.next(p)) {
      u32 magnitude = as_bits(from[u][k]) & MAGNITUDE;
      if (w.part != part) raise_top(tops + part, top), top = 0, part = w.part;
      if (magnitude < FLOAT_EXPONENT && i + k < count) top = max(top, magnitude);
    }
  }
  if (__all_sync(~0u, part == __shfl_sync(~0u, part, 0))) {
    top = __reduce_max_sync(~0u, top);
    if (threadIdx.x % 32) return;
  }
  raise_top(tops + part, top);
}

// Codes of neighbours of one tensor whose products y are numbers within the format's range; flushed: how many became
// zero.
DEVICE u32 codes_within(u32& flushed, const float (&x)[RUN], const float (&y)[RUN], const u32 (&rests)[RUN], const Grid& g) {
  float q[RUN];
  u32 word = 0;
  UNROLLED for (int k = RUN - 1; k >= 0; k--) {
    u32 top;
    if (SIGNS_LAST && !INTEGER) {
      q[k] = rounded_magnitude(fabsf(y[k]), rests[k], g);
      top = signed_code(q[k], y[k], g);
    } else {
      q[k] = rounded_number(y[k], rests[k], g);
      top = top_code<INTEGER, SPECIAL>(q[k], g);
    }
    word = __funnelshift_l(top, word, 8);
  }
  u32 magnitudes = INTEGER ? word : word & 0x7F7F7F7Fu;
  if ((magnitudes - 0x01010101u) & ~magnitudes & 0x80808080u) {  // a byte is zero
    UNROLLED for (int k = 0; k < RUN; k++) flushed += x[k] != 0.0f && q[k] == 0.0f;
  }
  return word;
}

// Block rows are chunks. counts: clipped, flushed and non-finite elements.
KERNEL __launch_bounds__(THREADS) cast_chunks(
    const Input* x, u8* codes, const float* factors, u64* counts, i64 count, i64 length, i64 stride, float largest,
    const Parts p, const Grid g, const Draw d) {
  i64 base = blockIdx.y * length, end = min(length, count - base);
  i64 first = ((i64)blockIdx.x * THREADS * RUNS + threadIdx.x) * RUN;
  float from[RUNS][RUN];
  UNROLLED for (int u = 0; u < RUNS; u++) {
    i64 place = first + u * THREADS * RUN;
    load_run(from[u], x + base + place, end - place);
  }
  u32 counted[3] = {};
  UNROLLED for (int u = 0; u < RUNS; u++) {
    i64 place = first + u * THREADS * RUN;
    if (place >= stride) break;
    u32 word = 0;
    if (place < end) {
      Walk w(base + place, p);
      float y[RUN], factor = factors[w.part];
      u32 rests[RUN];
      UNROLLED for (int k = 0; k < RUN; k++) {
        y[k] = __fmul_rn(from[u][k], factor);
        rests[k] = RANDOM ? ~random_word((u64)(base + place + k), d) : 0;
      }
      if (w.left >= RUN && place + RUN <= end && top_of(y) <= largest) {
        *(u32*)(codes + blockIdx.y * stride + place) = codes_within(counted[1], from[u], y, rests, g);
        continue;
      }
      UNROLLED for (int k = 0; k < RUN; k++, w.next(p)) {
        if (place + k >= end) break;
        float v = from[u][k];
        bool finite = is_finite(v);
        y[k] = PROPAGATES && !finite ? as_float(0x7FC00000u) : __fmul_rn(v, factors[w.part]);
        u32 code;
        float q = rounded_to(code, y[k], rests[k], g);
        word |= code << (8 * k);
        counted[0] += finite && fabsf(y[k]) > largest;
        counted[1] += v != 0.0f && q == 0.0f;
        counted[2] += !finite;
      }
    }
    *(u32*)(codes + blockIdx.y * stride + place) = word;
  }
  add_counts(counts, counted);
}

// The random word of a rank's sum at a hop; the key's offset has the rank and the hop in its lower half.
DEVICE u32 rest_of(i64 place, u32 rank, u32 hop, const Draw& d) {
  if (!RANDOM) return 0;
  Draw hop_draw = d;
  hop_draw.offset0 = rank << 16 | hop;
  return ~random_word((u64)place, hop_draw);
}

DEVICE float rounded_sum(float a, float b, u32 rest, const Grid& g) { return cast_with_rest(__fadd_rn(a, b), rest, g); }

// Rows of codes are those of all ranks. values: those of codes, float32 [256]; first: the rank where the ring begins, 0
// for a tree; base: place of the chunk's first element where words are counted, 0 for a ring.
KERNEL __launch_bounds__(THREADS) sum_chunks(
    const Rows codes, u8* sums, const float* values, i64 stride, i64 base, i32 first, const Grid g, const Draw d) {
  __shared__ float table[256];
  table[threadIdx.x] = values[threadIdx.x];
  i64 start = ((i64)blockIdx.x * THREADS * SUM_RUNS + threadIdx.x) * RUN;
  u32 words[SUM_RUNS][RANKS];
  UNROLLED for (int u = 0; u < SUM_RUNS; u++) {
    i64 place = start + u * THREADS * RUN;
    if (place >= stride) break;
    UNROLLED for (int r = 0; r < RANKS; r++) words[u][r] = *(const u32*)(codes.at((first + r) % RANKS) + place);
  }
  __syncthreads();
  UNROLLED for (int u = 0; u < SUM_RUNS; u++) {
    i64 place = start + u * THREADS * RUN;
    if (place >= stride) return;
    u32 sum = 0;
    UNROLLED for (int k = RUN - 1; k >= 0; k--) {
      float v[RANKS];
      UNROLLED for (int r = 0; r < RANKS; r++) v[r] = table[words[u][r] >> (8 * k) & 0xFF];
#if TREE
      UNROLLED for (int hop = 1; 1 << (hop - 1) < RANKS; hop++) {
        UNROLLED for (int r = 0; r + (1 << (hop - 1)) < RANKS; r += 1 << hop) {
          v[r] = rounded_sum(v[r], v[r + (1 << (hop - 1))], rest_of(base + place + k, r, hop, d), g);
        }
      }
#else
      UNROLLED for (int r = 1; r < RANKS; r++) {
        v[0] = rounded_sum(v[0], v[r], rest_of(place + k, (u32)(first + r) % RANKS, r, d), g);
      }
#endif
      sum = __funnelshift_l(v[0] != v[0] ? g.nan_code : top_code<INTEGER, SPECIAL>(v[0], g), sum, 8);
    }
    *(u32*)(sums + place) = sum;
  }
}

// Block rows are chunks. counts: elements, those at the largest magnitude, those that are not finite.
KERNEL __launch_bounds__(THREADS) finish_sums(
    const Rows codes, Output* out, const float* values, const float* factors, u64* counts, i64 count, i64 length,
    float largest, const Parts p) {
  __shared__ float table[256];
  table[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  i64 base = blockIdx.y * length, end = min(length, count - base);
  i64 first = ((i64)blockIdx.x * THREADS * RUNS + threadIdx.x) * RUN;
  u32 words[RUNS], counted[2] = {};
  UNROLLED for (int u = 0; u < RUNS; u++) {
    i64 place = first + u * THREADS * RUN;
    words[u] = place < end ? *(const u32*)(codes.at(blockIdx.y) + place) : 0;
  }
  UNROLLED for (int u = 0; u < RUNS; u++) {
    i64 place = first + u * THREADS * RUN;
    if (place >= end) break;
    float v[RUN], y[RUN];
    Walk w(base + place, p);
    UNROLLED for (int k = 0; k < RUN; k++) v[k] = table[words[u] >> (8 * k) & 0xFF];
    if (w.left >= RUN && top_of(v) < largest) {  // codes behind the chunk's end are zeros
      float factor = factors[w.part];
      UNROLLED for (int k = 0; k < RUN; k++) y[k] = to_nearest<OUTPUT>(__fmul_rn(v[k], factor));
    } else {
      UNROLLED for (int k = 0; k < RUN; k++, w.next(p)) {
        bool inside = place + k < end;
        counted[0] += inside && fabsf(v[k]) == largest;
        counted[1] += inside && !is_finite(v[k]);
        y[k] = __fmul_rn(v[k], factors[w.part]);
        y[k] = to_nearest<OUTPUT>(canonical(y[k]));
      }
    }
    if (VECTORS && place + RUN <= end) {
      Vectors<OUTPUT, RUN> to;
      to.template set<false>(y);
      store_vector<RUN, 8 * BYTES_OF(OUTPUT)>(out, base + place, to);
    } else {
      UNROLLED for (int k = 0; k < RUN; k++) {
        if (place + k < end) out[base + place + k] = stored<OUTPUT>(y[k]);
      }
    }
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) counts[0] = count;
  add_counts(counts + 1, counted);
}
