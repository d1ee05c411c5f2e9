// SPDX-License-Identifier: Apache-2.0
// Random words: Philox4x32-10 and the integers that stochastic rounding draws from it (docs/semantics.md, section 9).
#pragma once
#include "common.cuh"

// Where random integers come from; the host side is fmtsim.cuda.cast.parameters.draw_of.
struct alignas(16) Draw {
  u32 keys[20];          // of the ten rounds: two a round
  u32 offset0, offset1;  // the offset's halves
  i32 bits;              // of an integer, 1 to 32
  i32 source;            // of the list below
};
#define DRAW_NOTHING 0
#define DRAW_WORDS 1   // the top bits of a word of its own for each element
#define DRAW_SHARED 2  // words shared in the layout cvt_rs
#define DRAW_GIVEN 3   // the integers themselves, int64

#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
// Multiples of 0x9E3779B9 and 0xBB67AE85 are added to the keys on the host.

// The four words at a 64-bit counter, or what they lack of 2^32 - 1: the last products are those of complements, and
// -1 - m x = m (2^32 - 1 - x) + P0 for m = M0, + Q0 for M1.
#define PHILOX_P0 (~0ull - PHILOX_M0 * 0xFFFFFFFFull)
#define PHILOX_Q0 (~0ull - PHILOX_M1 * 0xFFFFFFFFull)
template <bool Complements = false>
DEVICE Words4 philox(u64 counter, const Draw& d) {
  u32 a = (u32)counter, b = (u32)(counter >> 32), c = d.offset0, e = d.offset1;
  UNROLLED for (u32 i = 0; i < 10; i++) {
    u64 p = (u64)PHILOX_M0 * a, q = (u64)PHILOX_M1 * c;
    if (Complements && i == 9) p += PHILOX_P0, q += PHILOX_Q0;
    u32 high = (u32)(q >> 32), other = (u32)(p >> 32), key = d.keys[2 * i], next = d.keys[2 * i + 1];
    a = Complements && i == 8 ? exclusive_nor(high, b, key) : high ^ b ^ key;
    c = Complements && i == 8 ? exclusive_nor(other, e, next) : other ^ e ^ next;
    b = (u32)q;
    e = (u32)p;
  }
  Words4 words = {a, b, c, e};
  return words;
}

// The counter of an element's word, and which of its four words that is: elements i, i + 16, i + 32, i + 48 of a group
// of 64 share a counter.
DEVICE u64 counter_of(u64 index) { return (index >> 6) * 16 + (index & 15); }
DEVICE u32 lane_of(u64 index) { return (u32)(index >> 4) & 3; }

DEVICE u32 random_word(u64 index, const Draw& d) {
  Words4 words = philox(counter_of(index), d);
  u32 lane = lane_of(index), low = lane & 1 ? words.y : words.x, high = lane & 1 ? words.w : words.z;
  return lane & 2 ? high : low;
}

// Words shared by neighbours, as on Blackwell: 8 bits by four elements, 13 and 16 bits by two.
DEVICE u32 shared_integer(u64 index, const Draw& d) {
  u32 word = random_word(index >> (d.bits == 8 ? 2 : 1), d), odd = (u32)index & 1;
  if (d.bits != 8) return (word >> (16 * odd)) & ((1u << d.bits) - 1);
  // elements 0, 1, 2, 3 take byte 1, byte 0 reversed, byte 3, byte 2 reversed
  u32 byte = (word >> (16 * ((u32)(index >> 1) & 1) + (odd ? 0 : 8))) & 0xFF;
  return odd ? __brev(byte) >> 24 : byte;
}

// The random integer of the element at a row-major place, below 2^bits; 0 where none is drawn.
DEVICE u32 random_integer(u64 index, const Draw& d, const i64* given) {
  if (d.source == DRAW_NOTHING) return 0;
  if (d.source == DRAW_GIVEN) return (u32)given[index];
  if (d.source == DRAW_SHARED) return shared_integer(index, d);
  return random_word(index, d) >> (32 - d.bits);
}

// Complements of the words of 1024 neighbours, which a warp makes together in shared memory: lane 2 g + q makes those
// of counters 8 q ... 8 q + 7 of group g, and so uses all four words of each. The first element's index is a multiple
// of 1024; high is the upper half of the counters, the same for a block, so that products of it are the same for all
// its threads.
#define TILE 1024
#define TILE_WORDS (32 * 36)  // a lane's 32 words and a gap, which spreads lanes over the banks

// Where an element's word lies; those of eight neighbours lie side by side.
DEVICE i32 word_place(i32 i) { return (i >> 6) * 72 + ((i >> 3) & 1) * 36 + ((i >> 4) & 3) * 8 + (i & 7); }

// The upper half for blocks of four warps.
DEVICE u32 upper_counter() { return (u32)((u64)blockIdx.x * (4 * TILE) >> 34); }

DEVICE void make_words(u32* words, u64 first, u32 high, const Draw& d) {
  u32 lane = threadIdx.x & 31;
  u64 upper = (u64)high << 32;
  u32 low = (u32)(first >> 2) + (lane >> 1) * 16 + (lane & 1) * 8;  // no carry: the first is a multiple of 256
  Words4* to = (Words4*)(words + lane * 36);
  UNROLLED for (int k = 0; k < 8; k += 4) {
    Words4 a = philox<true>(upper | (low + k), d), b = philox<true>(upper | (low + k + 1), d);
    Words4 c = philox<true>(upper | (low + k + 2), d), e = philox<true>(upper | (low + k + 3), d);
    to[k / 4] = Words4{a.x, b.x, c.x, e.x};
    to[k / 4 + 2] = Words4{a.y, b.y, c.y, e.y};
    to[k / 4 + 4] = Words4{a.z, b.z, c.z, e.z};
    to[k / 4 + 6] = Words4{a.w, b.w, c.w, e.w};
  }
  __syncwarp();
}

// The words of Count neighbours, a power of two from 4 to 64; words: where that of the first lies, a multiple of Count.
template <int Count>
DEVICE void take_words(u32 (&to)[Count], const u32* words) {
  UNROLLED for (int k = 0; k < Count; k += 4) {
    Words4 w = *(const Words4*)(words + word_place(k));
    to[k] = w.x, to[k + 1] = w.y, to[k + 2] = w.z, to[k + 3] = w.w;
  }
}
