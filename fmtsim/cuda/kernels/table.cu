// Formats that are no grid (codebooks, logarithms) of at most eight bits, in a deterministic rounding: float16, bfloat16
// or float32 to values or codes through a table. A bucket is a range of magnitudes of one sign, a few bits of the mantissa
// wide, in which the result changes at most once.
//
// Macros: INPUT, OUTPUT (dtypes of vectors.cuh; OUTPUT also for codes); VECTORS: addresses of whole vectors; SLOT: bits
// from one code to the next, 4 or 8.
#include "common.cuh"
#include "vectors.cuh"

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;
#define WIDTH (BYTES_OF(INPUT) == 2 || BYTES_OF(OUTPUT) == 2 ? 8 : 4)  // elements of a vector of values

// The host side is fmtsim.cuda.buckets.
struct alignas(16) Buckets {
  const Words2* buckets;  // of both signs: the bits of the magnitude at which the result changes; codes before and after
  const float* values;    // by code, 256
  i32 shift;              // from the bits of a magnitude to its bucket
  i32 low;                // number of the first bucket, which takes everything below it
  i32 count;              // buckets of one sign
  u32 nan_code;
};

DEVICE u32 code_of(float x, const Words2* buckets, const Buckets& b) {
  u32 bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
  i32 place = (i32)(magnitude >> b.shift) - b.low;
  place = place < 0 ? 0 : place >= b.count ? b.count - 1 : place;
  Words2 bucket = buckets[place + (bits >> 31 ? b.count : 0)];
  u32 code = magnitude >= bucket.x ? bucket.y >> 16 : bucket.y & 0xFFFF;
  return magnitude > 0x7F800000u ? b.nan_code : code;
}

// Tables into shared memory: buckets, then values.
DEVICE Words2* fetch(const Buckets& b) {
  DYNAMIC_SHARED(memory);
  Words2* buckets = (Words2*)memory;
  float* values = (float*)(buckets + 2 * b.count);
  for (i32 k = threadIdx.x; k < 2 * b.count; k += blockDim.x) buckets[k] = b.buckets[k];
  for (i32 k = threadIdx.x; k < 256; k += blockDim.x) values[k] = b.values[k];
  __syncthreads();
  return buckets;
}

KERNEL quantize(const Input* x, Output* y, i64 count, const Buckets b) {
  const Words2* buckets = fetch(b);
  const float* values = (const float*)(buckets + 2 * b.count);
  i64 stride = (i64)gridDim.x * blockDim.x * WIDTH;
  for (i64 base = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; base < count; base += stride) {
    if (VECTORS && base + WIDTH <= count) {
      Vectors<INPUT, WIDTH> from;
      Vectors<OUTPUT, WIDTH> to;
      float results[WIDTH];
      from.load(x + base);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) results[k] = values[code_of(from.get(k), buckets, b)];
      to.template set<false>(results);
      to.store(y + base);
    } else {
      for (i64 i = base; i < count && i < base + WIDTH; i++) {
        y[i] = stored<OUTPUT>(values[code_of(loaded<INPUT>(x[i]), buckets, b)]);
      }
    }
  }
}

#define CODES 8  // of a thread at a time; they fill SLOT bytes

KERNEL encode(const Input* x, u8* codes, i64 count, const Buckets b) {
  const Words2* buckets = fetch(b);
  i64 stride = (i64)gridDim.x * blockDim.x * CODES;
  for (i64 base = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * CODES; base < count; base += stride) {
    u8* to = codes + base / CODES * SLOT;
    if (VECTORS && base + CODES <= count) {
      Vectors<INPUT, CODES> from;
      from.load(x + base);
      u32 out[SLOT / 4];
#pragma unroll
      for (int k = CODES - 1; k >= 0; k--) {
        u32 code = code_of(from.get(k), buckets, b);
        u32& word = out[k * SLOT / 32];
        word = k * SLOT % 32 + SLOT == 32 ? code : word << SLOT | code;
      }
#pragma unroll
      for (int k = 0; k < SLOT / 4; k++) __stcs((u32*)to + k, out[k]);
    } else {
      u32 held = 0;
      for (i64 i = base; i < count && i < base + CODES; i++) {
        u32 code = code_of(loaded<INPUT>(x[i]), buckets, b);
        held |= SLOT == 8 ? code : code << (4 * (i & 1));
        if (SLOT == 8 || (i & 1) || i + 1 == count) *to++ = (u8)held, held = 0;
      }
    }
  }
}
