// SPDX-License-Identifier: Apache-2.0
// Casts to formats of at most eight bits that are no grid (NF4 and other codebooks, logarithms), or in a deterministic
// rounding that no fast kernel has: a table in shared memory, of what each of the 65536 patterns of a 16-bit dtype
// becomes (ENTRY), or of ranges of magnitudes of one sign, a few bits of the mantissa wide, in which the result changes
// once at most.
//
// Macros: ENTRY: bits of an entry, 8 or 16, or 0 for ranges, of which NARROW: bits of a code where a bucket is one
// word, else 0; INPUT, OUTPUT (dtypes of vectors.cuh; INPUT of ranges, OUTPUT of values); RESULT: bits of a result, 4
// or 8 for codes, 16 or 32 for values; RUN: elements of a thread at a time; VECTOR: neighbours among them; VECTORS:
// addresses of whole vectors; THREADS; RESIDENT: blocks of a multiprocessor.
#include "vectors.cuh"

#define TIMES (RUN / VECTOR)
#define WORDS (VECTOR * RESULT / 32)  // of a vector's results

// A bucket: the bits of the magnitude at which the result changes; codes before and after. Narrow: in the top bits how
// far the last magnitude before the change lies above the bucket's start (all ones: there is none), in the low bits the
// codes, that before in the lowest.
#if ENTRY == 16
typedef u16 Entry;
#elif ENTRY == 8
typedef u8 Entry;
#elif NARROW
typedef u32 Entry;
#else
typedef Words2 Entry;
#endif
#if ENTRY
typedef Words4 Part;  // of a table, as it is copied
#else
typedef Words2 Part;
#endif

// The host side is fmtsim.cuda.cast.tables.
struct alignas(16) Table {
  const Entry* entries;  // of all patterns, or the buckets of both signs
  const float* values;   // by code, 256
  i32 shift;             // from the bits of a magnitude to its bucket
  i32 low;               // number of the first bucket, which takes everything below it
  i32 count;             // entries, or buckets of one sign
  u32 nan_code;
};

// Tables in shared memory: entries, and the bits of values by code.
struct Shared {
  const Entry* entries;
  const u32* values;
};

#define VALUES (RESULT >= 16 && ENTRY != 16)  // results are values of entries, which are codes

DEVICE Shared fetch(const Table& t) {
  DYNAMIC_SHARED(memory);
  i32 count = ENTRY ? t.count : 2 * t.count;
  u32* values = (u32*)((Entry*)memory + count);
  for (i32 k = threadIdx.x; k < count * (i32)sizeof(Entry) / (i32)sizeof(Part); k += THREADS)
    ((Part*)memory)[k] = ((const Part*)t.entries)[k];
  for (i32 k = threadIdx.x; VALUES && k < 256; k += THREADS)
    values[k] = RESULT == 32 ? as_bits(t.values[k]) : stored_pair<OUTPUT, false>(t.values[k], 0.0f);
  __syncthreads();
  return {(const Entry*)memory, values};
}

#if ENTRY
#define PATTERN BFLOAT16  // of either dtype
typedef Vectors<PATTERN, VECTOR> Source;

// The entry of an element, with loose bits above it where they do no harm.
DEVICE u32 loose_entry(const Source& from, int k, const Shared& s, const Table&) {
  return s.entries[k % 2 ? from.words[k / 2] >> 16 : from.words[k / 2] & 0xFFFFu];
}
DEVICE u32 entry_of(u16 x, const Shared& s, const Table&) { return s.entries[x]; }
DEVICE bool holds_nan(const Source&) { return false; }
#define ENTRY_MASK 0xFFFFu

#else
#define PATTERN INPUT
typedef Vectors<PATTERN, VECTOR> Source;
#define ENTRY_MASK (NARROW == 4 ? 0xFu : 0xFFu)

DEVICE u32 loose_code(float x, const Entry* buckets, const Table& t) {
  u32 bits = as_bits(x), negative = bits >> 31;
#if NARROW
  float least = as_float((u32)t.low << t.shift), most = as_float(((u32)(t.low + t.count) << t.shift) - 1);
  u32 magnitude = as_bits(fminf(fmaxf(fabsf(x), least), most));  // most may be NaN: none is above it
  u32 bucket = buckets[(i32)(magnitude >> t.shift) - t.low + (i32)(negative * (u32)t.count)];
  return magnitude * (1u << (32 - t.shift)) > bucket ? bucket >> NARROW : bucket;
#else
  u32 magnitude = bits & 0x7FFFFFFFu;
  i32 place = (i32)(magnitude >> t.shift) - t.low;
  place = place < 0 ? 0 : place >= t.count ? t.count - 1 : place;
  Entry bucket = buckets[place + (i32)negative * t.count];
  return magnitude >= bucket.x ? bucket.y >> 16 : bucket.y;
#endif
}

DEVICE u32 loose_entry(const Source& from, int k, const Shared& s, const Table& t) {
  return loose_code(from.get(k), s.entries, t);
}

DEVICE u32 entry_of(Stored<INPUT>::type x, const Shared& s, const Table& t) {
  float value = loaded<INPUT>(x);
  return value != value ? t.nan_code : loose_code(value, s.entries, t) & ENTRY_MASK;
}

DEVICE bool holds_nan(const Source& from) {
  float sums[2] = {0.0f, 0.0f};
  UNROLLED for (int k = 0; k < VECTOR; k++) sums[k % 2] += fabsf(from.get(k));
  float sum = sums[0] + sums[1];
  return sum != sum;
}
#endif

// The results of a vector that holds no NaN, packed into words.
DEVICE void look_up(u32 (&out)[WORDS], const Source& from, const Shared& s, const Table& t) {
  UNROLLED for (int k = 0; k < VECTOR; k++) {
    u32 result = loose_entry(from, k, s, t), &word = out[k * RESULT / 32];
    if (!ENTRY && (VALUES || RESULT > NARROW)) result &= ENTRY_MASK;
    if (VALUES) result = s.values[result];
    word = RESULT == 32 ? result : __funnelshift_r(k * RESULT % 32 ? word : 0, result, RESULT % 32);
  }
}

DEVICE void store_results(u8* to, const u32 (&out)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
    UNROLLED for (int k = 0; k < WORDS; k += 4)
      store_words<true>(to + 4 * k, out[k], out[k + 1], out[k + 2], out[k + 3]);
  } else if constexpr (WORDS == 2) {
    uint2 pair = {out[0], out[1]};
    *(uint2*)to = pair;
  } else {
    __stcs((u32*)to, out[0]);
  }
}

// Results one by one where a whole vector does not fit or holds NaN.
DEVICE void convert_rest(const Stored<PATTERN>::type* x, u8* to, i64 first, i64 last, const Shared& s, const Table& t) {
  u32 bits = 0;
#pragma unroll 1
  for (i64 i = first; i < last; i++) {
    u32 result = entry_of(x[i], s, t);
    if (VALUES) result = s.values[result];
    if (RESULT == 4) {
      bits |= result << (4 * (i & 1));
      if ((i & 1) || i + 1 == last) *to++ = (u8)bits, bits = 0;
    } else if (RESULT == 8) {
      *to++ = (u8)result;
    } else if (RESULT == 16) {
      *(u16*)to = (u16)result, to += 2;
    } else {
      *(u32*)to = result, to += 4;
    }
  }
}

// Vectors of a thread, one of every other thread's after each; those that lie within the tensor.
DEVICE void load_run(Source (&from)[TIMES], const Stored<PATTERN>::type* x, i64 place, i64 count) {
  UNROLLED for (int v = 0; v < TIMES; v++) {
    i64 first = place + v * THREADS * VECTOR;
    if (VECTORS && first + VECTOR <= count) from[v].load(x + first);
  }
}

// As many blocks as shared memory has room for; the next run of each is under way while one is converted.
KERNEL __launch_bounds__(THREADS, RESIDENT) convert(
    const Stored<PATTERN>::type* x, u8* y, i64 count, const __grid_constant__ Table t) {
  Shared s = fetch(t);
  i64 tile = (i64)blockIdx.x * (THREADS * RUN), stride = (i64)gridDim.x * (THREADS * RUN);
  i64 place = tile + (i32)threadIdx.x * VECTOR;
  Source next[TIMES] = {};
  load_run(next, x, place, count);
  for (; tile < count; tile += stride, place += stride) {
    Source from[TIMES];
    UNROLLED for (int v = 0; v < TIMES; v++) from[v] = next[v];
    load_run(next, x, place + stride, count);
    UNROLLED for (int v = 0; v < TIMES; v++) {
      i64 first = place + v * THREADS * VECTOR, last = first + VECTOR < count ? first + VECTOR : count;
      u8* to = y + first / VECTOR * (WORDS * 4);
      if (VECTORS && first + VECTOR <= count && !holds_nan(from[v])) {
        u32 out[WORDS];
        look_up(out, from[v], s, t);
        store_results(to, out);
      } else {
        convert_rest(x, to, first, last, s, t);
      }
    }
  }
}
