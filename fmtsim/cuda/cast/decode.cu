// Codes of at most eight bits, one a byte, to values: a table in shared memory.
//
// Macros: OUTPUT (dtype of vectors.cuh but float64); VECTORS: addresses of whole vectors.
#include "common.cuh"
#include "vectors.cuh"

typedef Stored<OUTPUT>::type Output;
#define WIDTH (16 / BYTES_OF(OUTPUT))  // codes of a vector, four or eight
#define UNROLL 4                       // vectors of a thread

// values: float32 [entries]; codes beyond are not looked for.
KERNEL decode(const u8* codes, Output* y, i64 count, const float* values, i32 entries) {
  __shared__ float table[256];
  i64 base = ((i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x) * WIDTH, stride = (i64)blockDim.x * WIDTH;
  u32 words[UNROLL][WIDTH / 4];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (!VECTORS || base + u * stride + WIDTH > count) continue;
    if constexpr (WIDTH == 4) {
      words[u][0] = __ldcs((const u32*)(codes + base + u * stride));
    } else {
      uint2 w = __ldcs((const uint2*)(codes + base + u * stride));
      words[u][0] = w.x, words[u][1] = w.y;
    }
  }
  for (i32 k = threadIdx.x; k < entries; k += blockDim.x) table[k] = values[k];
  __syncthreads();
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    i64 place = base + u * stride;
    if (VECTORS && place + WIDTH <= count) {
      float part[WIDTH];
#pragma unroll
      for (int k = 0; k < WIDTH; k++) part[k] = table[(words[u][k / 4] >> (8 * (k % 4))) & 0xFF];
      Vectors<OUTPUT, WIDTH> to;
      to.template set<false>(part);
      to.store(y + place);
    } else {
      for (i64 i = place; i < count && i < place + WIDTH; i++) y[i] = stored<OUTPUT>(table[codes[i]]);
    }
  }
}
