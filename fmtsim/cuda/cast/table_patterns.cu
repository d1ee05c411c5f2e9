// Any deterministic cast of float16 or bfloat16: a table of what each of the 65536 patterns becomes, in shared memory.
//
// Macros: ENTRY: bits of the table's entries, 8 or 16; RESULT: bits of a result, ENTRY (the entries themselves), 4 (two
// entries of codes in a byte) or 32 (entries are codes of the values); VECTORS: addresses of whole vectors.
#include "common.cuh"
#include "vectors.cuh"

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
    u32 entry = table[k % 2 ? from.word[k / 2] >> 16 : from.word[k / 2] & 0xFFFFu];
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
