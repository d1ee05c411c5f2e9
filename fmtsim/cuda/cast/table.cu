// Formats that are no grid (codebooks, logarithms) of at most eight bits, in a deterministic rounding, by table.
//
// Macros of tables of patterns: ENTRY: bits of the table's entries, 8 or 16; RESULT: bits of a result, ENTRY (the
// entries themselves), 4 (two entries of codes in a byte) or 32 (entries are codes of the values); THREADS.
// Of tables of ranges: INPUT, OUTPUT (dtypes; OUTPUT also for codes); SLOT: bits from one code to the next, 4 or 8;
// NARROW: bits of a code where a bucket is one word, else 0; RESIDENT: blocks of a multiprocessor at most.
// Of both: VECTORS: addresses of whole vectors.
#include "vectors.cuh"

#ifdef ENTRY

// float16 or bfloat16 through a table of what each of the 65536 patterns becomes, in shared memory.

template <int Bits> struct Whole;
template <> struct Whole<8> { typedef u8 type; };
template <> struct Whole<16> { typedef u16 type; };
typedef Whole<ENTRY>::type Entry;

#define COUNT 65536
#define RUN 16  // elements of a thread at a time
#define VECTOR (RESULT == 32 ? 4 : RESULT == 16 ? 8 : 16)  // neighbours among them, whose results are 16 bytes or less
#define TIMES (RUN / VECTOR)
#define WORDS (VECTOR * RESULT / 32)  // of their results

typedef Vectors<BFLOAT16, VECTOR> Source;  // patterns of either dtype

// The results of a vector, packed into words.
DEVICE void look_up(u32 (&out)[WORDS], const Source& from, const Entry* table, const u32* values) {
#pragma unroll
  for (int k = 0; k < VECTOR; k++) {
    u32 entry = table[k % 2 ? from.words[k / 2] >> 16 : from.words[k / 2] & 0xFFFFu];
    u32 result = RESULT == 32 ? values[entry] : entry, place = k * RESULT % 32, &word = out[k * RESULT / 32];
    word = place ? word | result << place : result;
  }
}

// Vectors of a thread, one of every other thread's after each; those that lie within the tensor.
DEVICE void load_run(Source (&from)[TIMES], const u16* x, i64 place, i64 count) {
#pragma unroll
  for (int v = 0; v < TIMES; v++) {
    i64 first = place + v * THREADS * VECTOR;
    if (VECTORS && first + VECTOR <= count) from[v].load(x + first);
  }
}

DEVICE void store_results(u8* to, const u32 (&out)[WORDS]) {
  if constexpr (WORDS == 2) {
    uint2 pair = {out[0], out[1]};
    *(uint2*)to = pair;
  } else {
    store_words<true>(to, out[0], out[1], out[2], out[3]);
  }
}

// Results one by one where a whole vector does not fit.
DEVICE void convert_rest(const u16* x, u8* to, i64 first, i64 last, const Entry* table, const u32* values) {
  u32 bits = 0;
#pragma unroll 1
  for (i64 i = first; i < last; i++) {
    u32 entry = table[x[i]], result = RESULT == 32 ? values[entry] : entry;
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

// values: float32 by code; known: how many there are; count: elements. As many blocks as shared memory has room for.
KERNEL __launch_bounds__(THREADS, ENTRY == 16 ? 1 : 3) convert(
    const u16* x, u8* y, i64 count, const Words4* entries, const u32* values, i32 known) {
  DYNAMIC_SHARED(memory);
  Entry* table = (Entry*)memory;
  u32* held = (u32*)(table + COUNT);
  for (i32 k = threadIdx.x; k < COUNT * ENTRY / 128; k += THREADS) ((Words4*)memory)[k] = entries[k];
  if (RESULT == 32 && threadIdx.x < 256) held[threadIdx.x] = (i32)threadIdx.x < known ? values[threadIdx.x] : 0;
  __syncthreads();
  i64 tile = (i64)blockIdx.x * (THREADS * RUN), stride = (i64)gridDim.x * (THREADS * RUN);
  i64 place = tile + (i32)threadIdx.x * VECTOR;
  Source next[TIMES] = {};
  load_run(next, x, place, count);
  for (; tile < count; tile += stride, place += stride) {
    Source from[TIMES];
#pragma unroll
    for (int v = 0; v < TIMES; v++) from[v] = next[v];
    load_run(next, x, place + stride, count);
#pragma unroll
    for (int v = 0; v < TIMES; v++) {
      i64 first = place + v * THREADS * VECTOR, last = first + VECTOR < count ? first + VECTOR : count;
      u8* to = y + first / VECTOR * (WORDS * 4);
      if (VECTORS && first + VECTOR <= count) {
        u32 out[WORDS];
        look_up(out, from[v], table, held);
        store_results(to, out);
      } else {
        convert_rest(x, to, first, last, table, held);
      }
    }
  }
}

#else

// float16, bfloat16 or float32 to values or codes through a table of buckets: ranges of magnitudes of one sign, a few bits
// of the mantissa wide, in which the result changes at most once.

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;
#define WIDTH (BYTES_OF(INPUT) == 2 || BYTES_OF(OUTPUT) == 2 ? 8 : 4)  // elements of a vector of values

// A bucket: the bits of the magnitude at which the result changes; codes before and after. Narrow: in the top bits how
// far the last magnitude before the change lies above the bucket's start (all ones: there is none), in the low bits the
// codes, that before in the lowest.
#if NARROW
typedef u32 Bucket;
#else
typedef Words2 Bucket;
#endif

// The host side is fmtsim.cuda.cast.tables.
struct alignas(16) Buckets {
  const Bucket* buckets;  // of both signs
  const float* values;    // by code, 256
  i32 shift;              // from the bits of a magnitude to its bucket
  i32 low;                // number of the first bucket, which takes everything below it
  i32 count;              // buckets of one sign
  u32 nan_code;
};

// The code of a number in the low bits, others above them.
DEVICE u32 low_code(float x, const Bucket* buckets, const Buckets& b) {
  u32 bits = __float_as_uint(x), negative = bits >> 31;
#if NARROW
  float least = __uint_as_float((u32)b.low << b.shift), most = __uint_as_float(((u32)(b.low + b.count) << b.shift) - 1);
  u32 magnitude = __float_as_uint(fminf(fmaxf(fabsf(x), least), most));  // most may be NaN: none is above it
  u32 bucket = buckets[(i32)(magnitude >> b.shift) - b.low + (i32)(negative * (u32)b.count)];
  return magnitude * (1u << (32 - b.shift)) > bucket ? bucket >> NARROW : bucket;
#else
  u32 magnitude = bits & 0x7FFFFFFFu;
  i32 place = (i32)(magnitude >> b.shift) - b.low;
  place = place < 0 ? 0 : place >= b.count ? b.count - 1 : place;
  Bucket bucket = buckets[place + (i32)negative * b.count];
  return magnitude >= bucket.x ? bucket.y >> 16 : bucket.y;
#endif
}

#define CODE_MASK (NARROW == 4 ? 0xFu : 0xFFu)

DEVICE u32 code_of(float x, const Bucket* buckets, const Buckets& b) {
  return x != x ? b.nan_code : low_code(x, buckets, b) & CODE_MASK;
}

template <int Count>
DEVICE bool holds_nan(const Vectors<INPUT, Count>& from) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < Count; k++) sums[k % 2] += fabsf(from.get(k));
  float sum = sums[0] + sums[1];
  return sum != sum;
}

// Tables into shared memory: buckets, then values.
DEVICE Bucket* fetch(const Buckets& b) {
  DYNAMIC_SHARED(memory);
  Bucket* buckets = (Bucket*)memory;
  float* values = (float*)(buckets + 2 * b.count);
  for (i32 k = threadIdx.x; k < 2 * b.count; k += blockDim.x) buckets[k] = b.buckets[k];
  for (i32 k = threadIdx.x; k < 256; k += blockDim.x) values[k] = b.values[k];
  __syncthreads();
  return buckets;
}

template <int Count>
DEVICE void load_within(Vectors<INPUT, Count>& from, const Input* x, i64 first, i64 count) {
  if (VECTORS && first + Count <= count) from.load(x + first);
}

// What a block does: Work is called with each of a thread's vectors, the next of which is under way. Tables lie at the
// start of dynamic shared memory.
template <int Count, typename Work>
DEVICE void for_vectors(const Input* x, i64 count, const Work& work) {
  i64 stride = (i64)gridDim.x * blockDim.x * Count;
  i64 tile = (i64)blockIdx.x * blockDim.x * Count, place = tile + (i32)threadIdx.x * Count;
  Vectors<INPUT, Count> next = {};
  load_within(next, x, place, count);
  for (; tile < count; tile += stride, place += stride) {
    Vectors<INPUT, Count> from = next;
    load_within(next, x, place + stride, count);
    work(from, place);
  }
}

KERNEL __launch_bounds__(256, RESIDENT) quantize(const Input* x, Output* y, i64 count, const Buckets b) {
  const Bucket* buckets = fetch(b);
  const float* values = (const float*)(buckets + 2 * b.count);
  for_vectors<WIDTH>(x, count, [&](const Vectors<INPUT, WIDTH>& from, i64 place) {
    if (VECTORS && place + WIDTH <= count && !holds_nan(from)) {
      Vectors<OUTPUT, WIDTH> to;
      float results[WIDTH];
#pragma unroll
      for (int k = 0; k < WIDTH; k++) results[k] = values[low_code(from.get(k), buckets, b) & CODE_MASK];
      to.template set<false>(results);
      to.store(y + place);
    } else {
#pragma unroll 1
      for (i64 i = place; i < count && i < place + WIDTH; i++) {
        y[i] = stored<OUTPUT>(values[code_of(loaded<INPUT>(x[i]), buckets, b)]);
      }
    }
  });
}

#define CODES 8  // of a thread at a time; they fill SLOT bytes

KERNEL __launch_bounds__(256, RESIDENT) encode(const Input* x, u8* codes, i64 count, const Buckets b) {
  const Bucket* buckets = fetch(b);
  for_vectors<CODES>(x, count, [&](const Vectors<INPUT, CODES>& from, i64 place) {
    u8* to = codes + place / CODES * SLOT;
    if (VECTORS && place + CODES <= count && !holds_nan(from)) {
      u32 out[SLOT / 4] = {};
#pragma unroll
      for (int k = 0; k < CODES; k++) {
        u32 code = low_code(from.get(k), buckets, b), &word = out[k * SLOT / 32];
        if (SLOT > NARROW) code &= CODE_MASK;
        word = __funnelshift_r(word, code, SLOT);
      }
#pragma unroll
      for (int k = 0; k < SLOT / 4; k++) __stcs((u32*)to + k, out[k]);
      return;
    }
    u32 held = 0;
#pragma unroll 1
    for (i64 i = place; i < count && i < place + CODES; i++) {
      u32 code = code_of(loaded<INPUT>(x[i]), buckets, b);
      held |= SLOT == 8 ? code : code << (4 * (i & 1));
      if (SLOT == 8 || (i & 1) || i + 1 == count) *to++ = (u8)held, held = 0;
    }
  });
}

#endif
