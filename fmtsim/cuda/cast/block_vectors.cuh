// Vectors of elements in registers: loads, largest magnitudes, results of any width, stores.
//
// INPUT is 0 float32, 1 bfloat16, 2 float16; OUTPUT is 0 float32, 1 bfloat16, 2 codes of CODE_BITS bits, one a byte,
// 3 the same packed (section 11). VECTOR elements make a vector, so that neither side passes 16 bytes.
#pragma once
#include "common.cuh"

#define FLOAT_EXPONENT 0x7F800000u
#define MAGNITUDE 0x7FFFFFFFu

DEVICE float as_float(u32 bits) { return __int_as_float((i32)bits); }
DEVICE u32 as_bits(float value) { return (u32)__float_as_int(value); }

#if INPUT == 0
#define INPUT_BITS 32
#else
#define INPUT_BITS 16
#endif
#ifndef OUTPUT
#elif OUTPUT == 0
#define OUTPUT_BITS 32
#elif OUTPUT == 1
#define OUTPUT_BITS 16
#elif OUTPUT == 2
#define OUTPUT_BITS 8
#else
#define OUTPUT_BITS CODE_BITS
#endif

// The bits of BITS-wide numbers side by side.
template <int COUNT, int BITS>
struct Packed {
  static constexpr int WORDS = (COUNT * BITS + 31) / 32;
  u32 words[WORDS];

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
  }
  DEVICE void put(int place, u32 bits) {
    int at = place * BITS;
    words[at / 32] |= bits << (at % 32);
    if (BITS < 32 && at % 32 + BITS > 32) words[at / 32 + 1] |= bits >> (32 - at % 32);
  }
  DEVICE u32 get(int place) const {
    int at = place * BITS;
    return BITS == 32 ? words[at / 32] : words[at / 32] >> (at % 32) & ((1u << (BITS % 32)) - 1u);
  }
};

template <int COUNT, int BITS>
DEVICE Packed<COUNT, BITS> load_vector(const void* base, u64 element) {
  const u8* place = (const u8*)base + element * BITS / 8;
  Packed<COUNT, BITS> v;
  if constexpr (COUNT * BITS % 128 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT * BITS / 32; i += 4) {
      Words4 w = *(const Words4*)(place + 4 * i);
      v.words[i] = w.x, v.words[i + 1] = w.y, v.words[i + 2] = w.z, v.words[i + 3] = w.w;
    }
  } else if constexpr (COUNT * BITS == 64) {
    Words2 w = *(const Words2*)place;
    v.words[0] = w.x, v.words[1] = w.y;
  } else if constexpr (COUNT * BITS == 32) {
    v.words[0] = *(const u32*)place;
  } else {
    v.words[0] = *(const u16*)place;
  }
  return v;
}

template <int COUNT, int BITS>
DEVICE void store_vector(void* base, u64 element, const Packed<COUNT, BITS>& v) {
  u8* place = (u8*)base + element * BITS / 8;
  constexpr int BYTES = COUNT * BITS / 8;
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i)
      ((Words4*)place)[i] = {v.words[4 * i], v.words[4 * i + 1], v.words[4 * i + 2], v.words[4 * i + 3]};
  } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) ((Words2*)place)[i] = {v.words[2 * i], v.words[2 * i + 1]};
  } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) ((u32*)place)[i] = v.words[i];
  } else if constexpr (BYTES % 2 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 2; ++i) ((u16*)place)[i] = (u16)(v.words[i / 2] >> (16 * (i % 2)));
  } else {
#pragma unroll
    for (int i = 0; i < BYTES; ++i) place[i] = (u8)(v.words[i / 4] >> (8 * (i % 4)));
  }
}

// An element of the input's dtype as float32. NaN and Inf of float16 come out finite: blocks with those are refused.
DEVICE float input_value(u32 bits) {
#if INPUT == 0
  return as_float(bits);
#elif INPUT == 1
  return as_float(bits << 16);
#else
  return as_float(as_bits(__fmul_rn(as_float((bits & 0x7FFF) << 13), 5192296858534827628530496329220096.0f)) |
                  (bits & 0x8000) << 16);  // 2^112
#endif
}

// Largest magnitude of a vector as float32 bits, NaN above Inf; and the same over finite elements alone.
DEVICE u32 widened(u32 magnitude) {
#if INPUT == 0
  return magnitude;
#elif INPUT == 1
  return magnitude << 16;
#else
  return magnitude < 0x7C00 ? as_bits(input_value(magnitude)) : FLOAT_EXPONENT + (magnitude - 0x7C00);
#endif
}

template <int COUNT>
DEVICE u32 raw_amax(const Packed<COUNT, INPUT_BITS>& v) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < Packed<COUNT, INPUT_BITS>::WORDS; ++i) {
#if INPUT == 0
    top = max(top, v.words[i] & MAGNITUDE);
#else
    top = __vmaxu2(top, v.words[i] & 0x7FFF7FFFu);
#endif
  }
  return top;
}
DEVICE u32 raw_larger(u32 a, u32 b) {
#if INPUT == 0
  return max(a, b);
#else
  return __vmaxu2(a, b);
#endif
}
DEVICE u32 amax_of_raw(u32 top) {
#if INPUT == 0
  return top;
#else
  return widened(max(top & 0xFFFF, top >> 16));
#endif
}

template <int COUNT>
DEVICE u32 finite_amax(const Packed<COUNT, INPUT_BITS>& v, bool& has_nan) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    u32 magnitude = widened(v.get(i) & (INPUT == 0 ? MAGNITUDE : 0x7FFFu));
    if (magnitude < FLOAT_EXPONENT) top = max(top, magnitude);
    has_nan |= magnitude > FLOAT_EXPONENT;
  }
  return top;
}
