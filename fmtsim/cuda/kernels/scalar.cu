// Element formats, values: float16, bfloat16 or float32 onto a grid, at the speed of memory.
//
// Macros: INPUT, OUTPUT (dtypes of vectors.cuh), those of grid_cast.cuh, VECTORS: addresses of whole vectors, and UNROLL:
// vectors of a thread.
#include "common.cuh"
#include "grid_cast.cuh"
#include "philox.cuh"
#include "vectors.cuh"

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;

#define WIDTH (BYTES_OF(INPUT) == 2 || BYTES_OF(OUTPUT) == 2 ? 8 : 4)  // elements of a vector

DEVICE void cast_one(const Input* x, Output* y, i64 i, const Grid& g, const Draw& d) {
  u32 word = RANDOM ? random_word((u64)i, d) : 0;
  y[i] = stored<OUTPUT>(cast_value(loaded<INPUT>(x[i]), word, g));
}

// A vector that holds NaN.
DEVICE void cast_slowly(const Input* x, Output* y, i64 first, const Grid& g, const Draw& d) {
#pragma unroll 1
  for (int k = 0; k < WIDTH; k++) cast_one(x, y, first + k, g, d);
}

// Elements before first and from last on, one a thread; blocks hold more threads than there are.
DEVICE void cast_ends(const Input* x, Output* y, i64 first, i64 last, i64 count, const Grid& g, const Draw& d) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < first) cast_one(x, y, i, g, d);
  if (last + i < count) cast_one(x, y, last + i, g, d);
}

#if !VECTORS

// Any addresses: neighbouring threads take neighbouring elements.
KERNEL quantize(const Input* x, Output* y, i64 first, i64 last, i64 count, const Grid g, const Draw d) {
  i64 base = (i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    i64 i = base + u * blockDim.x;
    if (i < count) cast_one(x, y, i, g, d);
  }
}

#else

typedef Vectors<INPUT, WIDTH> Source;
typedef Vectors<OUTPUT, WIDTH> Target;

// Values without NaN, and whether that was so.
DEVICE bool cast_vector(Target& to, const Source& from, const u32 (&words)[WIDTH], const Grid& g) {
  float values[WIDTH], results[WIDTH];
#pragma unroll
  for (int k = 0; k < WIDTH; k++) values[k] = from.get(k);
#pragma unroll
  for (int k = 0; k < WIDTH; k++) {
    results[k] = SPECIAL ? cast_value(values[k], words[k], g)
                 : SIGNS_LAST ? rounded_magnitude(values[k], words[k], g) : rounded_number(values[k], words[k], g);
  }
  to.set<!SPECIAL>(results);
  if (SIGNS_LAST && INPUT == OUTPUT) {
    u32 signs = INPUT == FLOAT32 ? g.sign : g.sign | g.sign >> 16;
#pragma unroll
    for (int k = 0; k < Target::words; k++) to.word[k] |= from.word[k] & signs;
  } else if (SIGNS_LAST) {
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
      results[k] = __uint_as_float(__float_as_uint(results[k]) | (__float_as_uint(values[k]) & g.sign));
    }
    to.set<!SPECIAL>(results);
  }
  return !holds_nan(values);
}

#if !RANDOM

// Elements first ... last - 1 are whole vectors.
KERNEL quantize(const Input* x, Output* y, i64 first, i64 last, i64 count, const Grid g, const Draw d) {
  i64 base = first + ((i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x) * WIDTH, stride = (i64)blockDim.x * WIDTH;
  const u32 none[WIDTH] = {};
  Source from[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (base + u * stride < last) from[u].load(x + base + u * stride);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    Target to;
    i64 place = base + u * stride;
    if (place >= last) continue;
    if (cast_vector(to, from[u], none, g)) to.store(y + place);
    else cast_slowly(x, y, place, g, d);
  }
  cast_ends(x, y, first, last, count, g, d);
}

#else

// Elements below last are whole tiles, each of one warp.
KERNEL quantize(const Input* x, Output* y, i64 first, i64 last, i64 count, const Grid g, const Draw d) {
  __shared__ Words4 memory[4][TILE_WORDS / 4];
  const int vectors = TILE / 32 / WIDTH;
  u32* held = (u32*)memory[threadIdx.x / 32];
  i32 lane = threadIdx.x % 32;
  i64 tile = ((i64)blockIdx.x * 4 + threadIdx.x / 32) * TILE;
  if (tile < last) {
    Source from[vectors];
#pragma unroll
    for (int v = 0; v < vectors; v++) from[v].load(x + tile + (v * 32 + lane) * WIDTH);
    __syncwarp();  // or the compiler would load after the words are made
    make_words(held, (u64)tile, upper_counter(), d);
    Target to[vectors];
    bool clean = true;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
      u32 words[WIDTH];
      take_words(words, held, (v * 32 + lane) * WIDTH);
      clean &= cast_vector(to[v], from[v], words, g);
    }
    i64 place = tile + lane * WIDTH;
    if (clean) {
#pragma unroll
      for (int v = 0; v < vectors; v++) to[v].store(y + place + v * 32 * WIDTH);
    } else {
#pragma unroll 1
      for (int v = 0; v < vectors; v++) cast_slowly(x, y, place + v * 32 * WIDTH, g, d);
    }
  }
  for (i64 i = last + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
    cast_one(x, y, i, g, d);
  }
}

#endif
#endif
