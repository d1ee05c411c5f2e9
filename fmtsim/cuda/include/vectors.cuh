// SPDX-License-Identifier: Apache-2.0
// Elements of the four floating-point dtypes, as float32 or float64; vectors of them and of codes in registers: loads,
// stores, and what one instruction does for two.
#pragma once
#include "common.cuh"

template <int Type> struct Stored;
template <> struct Stored<FLOAT32> { typedef float type; };
template <> struct Stored<BFLOAT16> { typedef u16 type; };
template <> struct Stored<FLOAT16> { typedef u16 type; };
template <> struct Stored<FLOAT64> { typedef double type; };

// One element as float32 (16 and 32 bits wide) or as it is.
template <int Type>
DEVICE auto loaded(typename Stored<Type>::type x) {
  if constexpr (Type == BFLOAT16) return as_float((u32)x << 16);
  else if constexpr (Type == FLOAT16) return float_of_half(x);
  else return x;
}

// A float32 that the dtype holds exactly; NaN is canonical already.
template <int Type>
DEVICE typename Stored<Type>::type stored(float x) {
  if constexpr (Type == BFLOAT16) return (u16)(as_bits(x) >> 16);
  else if constexpr (Type == FLOAT16) return x == x ? half_of_float(x) : (u16)0x7E00;
  else if constexpr (Type == FLOAT64) return x == x ? (double)x : __longlong_as_double(0x7FF8000000000000ll);
  else return x;
}

// A float32 that becomes the dtype's nearest value, to even, where it is stored: bfloat16 cuts off.
template <int Type>
DEVICE float to_nearest(float x) {
  u32 bits = as_bits(x);
  return Type == BFLOAT16 ? as_float(bits + 0x7FFFu + (bits >> 16 & 1u)) : x;
}

// Two neighbours as one word; Numbers: neither is NaN.
template <int Type, bool Numbers>
DEVICE u32 stored_pair(float low, float high) {
  if constexpr (Type == BFLOAT16) return __byte_perm(as_bits(low), as_bits(high), 0x7632);
  else if constexpr (Numbers) return rounded_pair<FLOAT16>(low, high);
  else return (u32)stored<Type>(low) | (u32)stored<Type>(high) << 16;
}

// 16 bytes of memory; the compiler moves its own vector types whole, structures of ours sometimes in parts. Streams:
// the line is used up at once; a line of which more is asked for later must not be the first to leave the cache.
template <bool Streams>
DEVICE Words4 load_words(const void* from) {
  uint4 w = Streams ? __ldcs((const uint4*)from) : *(const uint4*)from;
  Words4 words = {w.x, w.y, w.z, w.w};
  return words;
}
// Eight float32 of memory as bfloat16, to nearest even.
DEVICE Words4 load_narrowed(const float* from) {
  u32 pairs[4];
  UNROLLED for (int i = 0; i < 4; i += 2) {
    Words4 w = load_words<false>(from + 2 * i);
    pairs[i] = rounded_pair<BFLOAT16>(as_float(w.x), as_float(w.y));
    pairs[i + 1] = rounded_pair<BFLOAT16>(as_float(w.z), as_float(w.w));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}
template <bool Streams>
DEVICE void store_words(void* to, u32 x, u32 y, u32 z, u32 w) {
  uint4 words = {x, y, z, w};
  if (Streams) __stcs((uint4*)to, words);
  else *(uint4*)to = words;
}

// The bits of BITS-wide numbers side by side.
template <int COUNT, int BITS>
struct Packed {
  static constexpr int LENGTH = (COUNT * BITS + 31) / 32;  // in words
  u32 words[LENGTH];

  DEVICE void clear() {
    UNROLLED for (int i = 0; i < LENGTH; ++i) words[i] = 0;
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
    UNROLLED for (int i = 0; i < COUNT * BITS / 32; i += 4) {
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
    UNROLLED for (int i = 0; i < BYTES / 16; ++i)
      ((Words4*)place)[i] = {v.words[4 * i], v.words[4 * i + 1], v.words[4 * i + 2], v.words[4 * i + 3]};
  } else if constexpr (BYTES % 8 == 0) {
    UNROLLED for (int i = 0; i < BYTES / 8; ++i) ((Words2*)place)[i] = {v.words[2 * i], v.words[2 * i + 1]};
  } else if constexpr (BYTES % 4 == 0) {
    UNROLLED for (int i = 0; i < BYTES / 4; ++i) ((u32*)place)[i] = v.words[i];
  } else if constexpr (BYTES % 2 == 0) {
    UNROLLED for (int i = 0; i < BYTES / 2; ++i) ((u16*)place)[i] = (u16)(v.words[i / 2] >> (16 * (i % 2)));
  } else {
    UNROLLED for (int i = 0; i < BYTES; ++i) place[i] = (u8)(v.words[i / 4] >> (8 * (i % 4)));
  }
}

// Neighbouring elements of 16 or 32 bits: Count of them in Count * bytes / 16 vectors, or in one of eight bytes.
template <int Type, int Count>
struct Vectors : Packed<Count, 8 * BYTES_OF(Type)> {
  using Packed<Count, 8 * BYTES_OF(Type)>::words;
  using Packed<Count, 8 * BYTES_OF(Type)>::LENGTH;

  template <bool Streams = LENGTH == 4>
  DEVICE void load(const typename Stored<Type>::type* from) {
    if constexpr (LENGTH == 2) {
      uint2 pair = __ldcs((const uint2*)from);
      words[0] = pair.x, words[1] = pair.y;
    } else {
      UNROLLED for (int i = 0; i < LENGTH; i += 4) {
        Words4 w = load_words<Streams>((const u32*)from + i);
        words[i] = w.x, words[i + 1] = w.y, words[i + 2] = w.z, words[i + 3] = w.w;
      }
    }
  }

  DEVICE void store(typename Stored<Type>::type* to) const {
    UNROLLED for (int i = 0; i < LENGTH; i += 4) {
      store_words<LENGTH == 4>((u32*)to + i, words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }

  DEVICE float get(int i) const {
    if constexpr (Type == FLOAT32) return as_float(words[i]);
    else if constexpr (Type == FLOAT16) return float_of_half((u16)(words[i / 2] >> (16 * (i % 2))));
    else return as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
  }

  template <bool Numbers>
  DEVICE void set(const float (&x)[Count]) {
    UNROLLED for (int i = 0; i < LENGTH; i++) {
      if constexpr (Type == FLOAT32) words[i] = as_bits(x[i]);
      else words[i] = stored_pair<Type, Numbers>(x[2 * i], x[2 * i + 1]);
    }
  }
};
