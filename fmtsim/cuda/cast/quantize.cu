// SPDX-License-Identifier: Apache-2.0
// Casts to element formats (E4M3, INT8, ...), values: float16, bfloat16 or float32 onto a grid, at the speed of memory.
//
// Macros: INPUT, OUTPUT (dtypes), those of grid.cuh, WIDTH: elements of a vector, and UNROLL: vectors of a thread.
#include "grid.cuh"
#include "philox.cuh"

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;

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

typedef Vectors<INPUT, WIDTH> Source;
typedef Vectors<OUTPUT, WIDTH> Target;

// Values of clamped magnitudes, all numbers.
DEVICE void round_vector(
    Target& to, const Source& from, const float (&a)[WIDTH], const u32 (&rests)[WIDTH], const Grid& g) {
  float results[WIDTH];
  UNROLLED for (int k = 0; k < WIDTH; k++) {
    results[k] = rounded_magnitude(a[k], rests[k], g);
    if (SPECIAL) results[k] = results[k] > g.over_above ? g.over_value : results[k];
    if (PAIRS && ASYMMETRIC) continue;
    if (!SIGNS_LAST || INPUT != OUTPUT) results[k] = finished<false, KEEPS>(results[k], from.get(k), g);
  }
  to.set<true>(results);
  if (SIGNS_LAST && INPUT == OUTPUT) {
    u32 signs = INPUT == FLOAT32 ? g.sign : g.sign | g.sign >> 16;
    UNROLLED for (int k = 0; k < Target::LENGTH; k++) to.words[k] |= from.words[k] & signs;
  }
}

// Values of formats that are not split, and whether there was no NaN.
DEVICE bool cast_vector(Target& to, const Source& from, const u32 (&rests)[WIDTH], const Grid& g) {
  float values[WIDTH], results[WIDTH];
  UNROLLED for (int k = 0; k < WIDTH; k++) {
    values[k] = from.get(k);
    results[k] = SPECIAL ? cast_with_rest(values[k], rests[k], g) : rounded_number(values[k], rests[k], g);
  }
  to.set<!SPECIAL>(results);
  return !holds_nan(values);
}

// Casts vectors; what it wrote is of use only if none of them warp_words NaN (succeeded).
struct Caster {
  Magnitudes<INPUT> magnitudes;
  bool clean = true;

  DEVICE void cast(Target& to, const Source& from, const u32 (&rests)[WIDTH], const Grid& g) {
    if (SPLIT) {
      float a[WIDTH];
      magnitudes.take(a, from, g);
      round_vector(to, from, a, rests, g);
    } else {
      clean &= cast_vector(to, from, rests, g);
    }
  }

  DEVICE bool succeeded() const { return SPLIT ? !magnitudes.hold_nan() : clean; }
};

#if !RANDOM

// Elements first ... last - 1 are whole vectors; there are none where no address of a vector is one on both sides.
KERNEL quantize(const Input* x, Output* y, i64 first, i64 last, i64 count, const Grid g, const Draw d) {
  i64 base = first + ((i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x) * WIDTH, stride = (i64)blockDim.x * WIDTH;
  const u32 none[WIDTH] = {};
  // 1. load
  Source from[UNROLL];
  UNROLLED for (int u = 0; u < UNROLL; u++) {
    if (base + u * stride < last) from[u].load(x + base + u * stride);
  }
  UNROLLED for (int u = 0; u < UNROLL; u++) {
    // 2. round; a vector that holds NaN again, one by one
    Target to;
    Caster caster;
    i64 place = base + u * stride;
    if (place >= last) continue;
    caster.cast(to, from[u], none, g);
    if (caster.succeeded()) to.store(y + place);
    else cast_slowly(x, y, place, g, d);
  }
  // 3. what no vector covers
  cast_ends(x, y, first, last, count, g, d);
}

#else

// How many elements lie between the vectors of a thread, and where a tile's first is. DIRECT: a thread takes the
// elements whose words its own counters give, 16 from one vector to the next; else words go through shared memory,
// which costs more instructions and reads whole lines at a time: faster for all but bfloat16 (docs/performance.md).
#define DIRECT (INPUT == BFLOAT16 && OUTPUT == BFLOAT16)
#define STEP (DIRECT ? 16 : 32 * WIDTH)
#define FIRST (DIRECT ? lane / 2 * 64 + lane % 2 * WIDTH : lane * WIDTH)
#define VECTORS_OF_TILE (TILE / 32 / WIDTH)
// Blocks of a multiprocessor: the registers of a thread are enough without spilling.
#define RESIDENT (BYTES_OF(INPUT) != BYTES_OF(OUTPUT) ? 4 : DIRECT ? 7 : BYTES_OF(INPUT) == 2 ? 8 : 6)

// What random words lack of 2^32 - 1, for the elements of a thread.
DEVICE void draw(u32 (&rests)[VECTORS_OF_TILE][WIDTH], i64 tile, const Draw& d) {
  i32 lane = threadIdx.x % 32;
#if DIRECT
  u64 upper = (u64)upper_counter() << 32;
  UNROLLED for (int k = 0; k < WIDTH; k++) {
    Words4 w = philox<true>(upper | ((u32)(tile >> 2) + lane * WIDTH + k), d);
    rests[0][k] = w.x, rests[1][k] = w.y, rests[2][k] = w.z, rests[3][k] = w.w;
  }
#else
  __shared__ Words4 memory[4][TILE_WORDS / 4];
  u32* warp_words = (u32*)memory[threadIdx.x / 32];
  make_words(warp_words, (u64)tile, upper_counter(), d);
  UNROLLED for (int v = 0; v < VECTORS_OF_TILE; v++) {
    take_words(rests[v], warp_words + word_place(lane * WIDTH) + word_place(v * STEP));
  }
#endif
}

// Elements below last are whole tiles, each of one warp.
KERNEL __launch_bounds__(128, RESIDENT) quantize(
    const Input* x, Output* y, i64 first, i64 last, i64 count, const Grid g, const Draw d) {
  i32 lane = threadIdx.x % 32;
  i64 tile = ((i64)blockIdx.x * 4 + threadIdx.x / 32) * TILE;
  if (tile < last) {
    i64 place = tile + FIRST;
    Source from[VECTORS_OF_TILE];
    Target to[VECTORS_OF_TILE];
    Caster caster;
    u32 rests[VECTORS_OF_TILE][WIDTH];
    UNROLLED for (int v = 0; v < VECTORS_OF_TILE; v++) from[v].load(x + place + v * STEP);
    __syncwarp();  // or the compiler would load after the words are made
    draw(rests, tile, d);
    UNROLLED for (int v = 0; v < VECTORS_OF_TILE; v++) caster.cast(to[v], from[v], rests[v], g);
    if (caster.succeeded()) {
      UNROLLED for (int v = 0; v < VECTORS_OF_TILE; v++) to[v].store(y + place + v * STEP);
    } else {
#pragma unroll 1
      for (int v = 0; v < VECTORS_OF_TILE; v++) cast_slowly(x, y, place + v * STEP, g, d);
    }
  }
  for (i64 i = last + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
    cast_one(x, y, i, g, d);
  }
}

#endif
