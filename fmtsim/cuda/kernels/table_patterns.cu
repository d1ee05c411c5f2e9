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
#define RUN 16                     // elements of a thread at a time: two vectors
#define WORDS (RUN * RESULT / 32)  // of their results

// The results of a run, packed into words.
DEVICE void look_up(u32 (&out)[WORDS], const u32 (&patterns)[RUN / 2], const Entry* table, const u32* values) {
#pragma unroll
  for (int k = 0; k < RUN; k++) {
    u32 entry = table[k % 2 ? patterns[k / 2] >> 16 : patterns[k / 2] & 0xFFFFu];
    u32 result = RESULT == 32 ? values[entry] : entry, place = k * RESULT % 32, &word = out[k * RESULT / 32];
    word = place ? word | result << place : result;
  }
}

DEVICE void load_run(u32 (&patterns)[RUN / 2], const u16* from) {
#pragma unroll
  for (int k = 0; k < RUN / 2; k += 4) {
    Words4 w = load_words<false>(from + 2 * k);
    patterns[k] = w.x, patterns[k + 1] = w.y, patterns[k + 2] = w.z, patterns[k + 3] = w.w;
  }
}

// values: float32 by code; known: how many there are; count: elements.
KERNEL __launch_bounds__(THREADS) convert(
    const u16* x, u8* y, i64 count, const Words4* entries, const u32* values, i32 known) {
  DYNAMIC_SHARED(memory);
  Entry* table = (Entry*)memory;
  u32* held = (u32*)(table + COUNT);
  for (i32 k = threadIdx.x; k < COUNT * ENTRY / 128; k += THREADS) ((Words4*)memory)[k] = entries[k];
  if (RESULT == 32 && threadIdx.x < 256) held[threadIdx.x] = (i32)threadIdx.x < known ? values[threadIdx.x] : 0;
  __syncthreads();
  i64 stride = (i64)gridDim.x * THREADS * RUN, base = ((i64)blockIdx.x * THREADS + threadIdx.x) * RUN;
  u32 next[RUN / 2] = {};
  if (VECTORS && base + RUN <= count) load_run(next, x + base);
  for (; base < count; base += stride) {
    u8* to = y + base / RUN * (WORDS * 4);
    if (VECTORS && base + RUN <= count) {
      u32 patterns[RUN / 2], out[WORDS];
#pragma unroll
      for (int k = 0; k < RUN / 2; k++) patterns[k] = next[k];
      if (base + stride + RUN <= count) load_run(next, x + base + stride);
      look_up(out, patterns, table, held);
      if constexpr (WORDS == 2) {
        uint2 pair = {out[0], out[1]};
        *(uint2*)to = pair;
      } else {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
          store_words<WORDS == 4>(to + 4 * k, out[k], out[k + 1], out[k + 2], out[k + 3]);
        }
      }
      continue;
    }
    u32 bits = 0;
    for (i64 i = base; i < count && i < base + RUN; i++) {
      u32 entry = table[x[i]], result = RESULT == 32 ? held[entry] : entry;
      if (RESULT == 4) {
        bits |= result << (4 * (i & 1));
        if ((i & 1) || i + 1 == count) *to++ = (u8)bits, bits = 0;
      } else if (RESULT == 8) {
        *to++ = (u8)result;
      } else if (RESULT == 16) {
        *(u16*)to = (u16)result, to += 2;
      } else {
        *(u32*)to = result, to += 4;
      }
    }
  }
}
