// Byte codes to values: those of element formats by a table in shared memory (decode), those of block formats whose
// blocks are runs of memory (decode_runs, where the macro TABLE is there).
#include "amax.cuh"

#ifdef TABLE
// OUTPUT is 0 for float32, 1 for bfloat16 (of formats whose values float32 holds exactly: one rounding is left).
// TABLE 0 makes a value from the bits of its code, for formats of a sign, an exponent and a mantissa:
//
//   code        s eeee mmm                          moved to    s 0000 eeee mmm 00...    a float32 too small by 2^p
//
// and takes words with other codes (NaN, Inf, codes that do not exist), and scales that are not finite, to the table of
// all values; TABLE 1 takes every code there. Neighbouring threads hold neighbouring words, so that results leave in
// whole lines.

#define CODES (OUTPUT == 0 ? 4 : 8)  // of a vector of 16 bytes of results; they share a block
#define VECTORS 4

typedef Packed<CODES, 8> Input;
typedef Packed<CODES, OUTPUT_BITS> Output;

// How codes become values, for four bytes at once; fmtsim.cuda.cast.block writes the same layout.
struct alignas(16) Decoder {
  u32 magnitudes, to_sign, signs, beyond;  // a byte's bits without the sign; added, only strange codes reach the sign
  u32 up, down, kept;                      // shifts of a byte, and the bits of the float that come from it
  float factor;                            // 2^p
};

DEVICE bool all_plain(const Input& in, const Decoder& d) {
  u32 nonfinite = 0;
#pragma unroll
  for (int i = 0; i < Input::LENGTH; ++i)
    nonfinite |= (((in.words[i] & d.magnitudes) + d.to_sign) & d.signs) | (in.words[i] & d.beyond);
  return nonfinite == 0;
}

DEVICE void put_value(Output& y, int place, float value) {
  u32 bits = value == value ? as_bits(value) : 0x7FC00000u;
  if (OUTPUT == 1) bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  y.put(place, bits);
}

KERNEL __launch_bounds__(256) decode_runs(
    const u8* codes, const float* values, const float* scales, const i32* offsets, const float* tensor_scale, void* out,
    u64 total, u32 sixteens_per_run, i32 shift, const __grid_constant__ Decoder decoder) {
#if TABLE
  __shared__ float table[256];
  table[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
#else
  const float* table = values;
#endif
  u64 base = ((u64)blockIdx.x * VECTORS * blockDim.x + threadIdx.x) * CODES;
  Input in[VECTORS];
  float scale[VECTORS];
  i32 zero[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u64 first = base + (u64)(v * CODES) * blockDim.x;
    in[v].clear();
    if (first >= total) continue;
    in[v] = load_vector<CODES, 8>(codes, first);
    u32 sixteen = (u32)(first / 16), block = shift >= 0 ? sixteen >> shift : sixteen / sixteens_per_run;
    scale[v] = scales[block];
    zero[v] = TABLE && offsets != nullptr ? offsets[block] : 0;
  }
  float whole = tensor_scale == nullptr ? 1.0f : *tensor_scale;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u64 first = base + (u64)(v * CODES) * blockDim.x;
    if (first >= total) continue;
    Output y;
    y.clear();
    bool finite = as_bits(fabsf(scale[v])) < FLOAT_EXPONENT && as_bits(fabsf(whole)) < FLOAT_EXPONENT;
    if (!TABLE && finite && all_plain(in[v], decoder)) {
#pragma unroll
      for (int i = 0; i < CODES; ++i) {
        i32 top = (i32)(in[v].words[i / 4] << decoder.up << (24 - i % 4 * 8)) >> decoder.down;
        float value = __fmul_rn(__fmul_rn(as_float((u32)top & decoder.kept), decoder.factor), scale[v]);
        put_value(y, i, __fmul_rn(value, whole));
      }
    } else {
#pragma unroll
      for (int i = 0; i < CODES; ++i) {
        u32 code = in[v].get(i);
        float value = !TABLE || offsets == nullptr ? table[code] : (float)((i32)code - zero[v]);
        value = __fmul_rn(value, scale[v]);
        if (tensor_scale != nullptr) value = __fmul_rn(value, whole);
        put_value(y, i, value);
      }
    }
    store_vector<CODES, OUTPUT_BITS>(out, first, y);
  }
}

#else
// Macros: OUTPUT (dtype of vectors.cuh but float64); VECTORS: addresses of whole vectors.

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

#endif
