// SPDX-License-Identifier: Apache-2.0
// Instructions of whole warps, atomics, fences and loads with cache hints.
#pragma once

namespace host {

template <class T> struct Identity { using type = T; };
template <class T> using Same = typename Identity<T>::type;  // takes no part in deduction

constexpr unsigned POISON = 0xDEADBEEF;  // what a lane reads from a lane that takes no part

template <class T>
struct Shuffle { T value, result; int source; };

template <class T>
inline void finish_shuffle(unsigned arrived, void** slots) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    Shuffle<T>* mine = (Shuffle<T>*)slots[lane];
    if (arrived >> mine->source & 1) {
      mine->result = ((Shuffle<T>*)slots[mine->source])->value;
    } else {
      for (size_t i = 0; i < sizeof(T); ++i) ((unsigned char*)&mine->result)[i] = POISON >> (i % 4 * 8) & 255;
    }
  }
}

template <class T>
inline T shuffle(unsigned mask, T value, int source) {
  Shuffle<T> mine = {value, value, source};
  meet("__shfl_sync", mask, finish_shuffle<T>, &mine);
  return mine.result;
}

struct Vote { unsigned value, result; };

inline void finish_ballot(unsigned arrived, void** slots) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((arrived >> lane & 1) && ((Vote*)slots[lane])->value) all |= 1u << lane;
  for (int lane = 0; lane < 32; ++lane)
    if (arrived >> lane & 1) ((Vote*)slots[lane])->result = all;
}

template <class Operation>
inline void finish_reduce(unsigned arrived, void** slots) {
  bool first = true;
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    unsigned value = ((Vote*)slots[lane])->value;
    all = first ? value : Operation::of(all, value);
    first = false;
  }
  for (int lane = 0; lane < 32; ++lane)
    if (arrived >> lane & 1) ((Vote*)slots[lane])->result = all;
}

inline void finish_match(unsigned arrived, void** slots) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    Vote* mine = (Vote*)slots[lane];
    mine->result = 0;
    for (int other = 0; other < 32; ++other)
      if ((arrived >> other & 1) && ((Vote*)slots[other])->value == mine->value) mine->result |= 1u << other;
  }
}

inline unsigned vote(unsigned mask, unsigned value, Finish finish, const char* what) {
  Vote mine = {value, 0};
  meet(what, mask, finish, &mine);
  return mine.result;
}

struct Add { static unsigned of(unsigned a, unsigned b) { return a + b; } };
struct And { static unsigned of(unsigned a, unsigned b) { return a & b; } };
struct Or { static unsigned of(unsigned a, unsigned b) { return a | b; } };
struct Xor { static unsigned of(unsigned a, unsigned b) { return a ^ b; } };
struct MaxU { static unsigned of(unsigned a, unsigned b) { return a > b ? a : b; } };
struct MinU { static unsigned of(unsigned a, unsigned b) { return a < b ? a : b; } };
struct MaxS { static unsigned of(unsigned a, unsigned b) { return (int)a > (int)b ? a : b; } };
struct MinS { static unsigned of(unsigned a, unsigned b) { return (int)a < (int)b ? a : b; } };

inline int lane() { return current->number & 31; }

}  // namespace host

inline void __syncwarp(unsigned mask = ~0u) { host::meet("__syncwarp", mask, nullptr, nullptr); }
inline unsigned __activemask() { return host::block.warps[host::current->number >> 5].live; }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return host::shuffle(mask, value, (host::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  int source = host::lane() ^ flip;  // beyond the own segment a lane keeps its value, in an earlier one it may read
  return host::shuffle(mask, value, source > (host::lane() | (width - 1)) ? host::lane() : source);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  int source = host::lane() - (int)distance;
  return host::shuffle(mask, value, source < (host::lane() & ~(width - 1)) ? host::lane() : source);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  int source = host::lane() + (int)distance;
  return host::shuffle(mask, value, source > (host::lane() | (width - 1)) ? host::lane() : source);
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
  return host::vote(mask, vote != 0, host::finish_ballot, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
inline unsigned __match_any_sync(unsigned mask, unsigned value) {
  return host::vote(mask, value, host::finish_match, "__match_any_sync");
}

#define REDUCE(name, type, operation)                                                            \
  inline type name(unsigned mask, type value) {                                                  \
    return (type)host::vote(mask, (unsigned)value, host::finish_reduce<host::operation>, #name); \
  }
REDUCE(__reduce_add_sync, unsigned, Add)
REDUCE(__reduce_add_sync, int, Add)
REDUCE(__reduce_max_sync, unsigned, MaxU)
REDUCE(__reduce_max_sync, int, MaxS)
REDUCE(__reduce_min_sync, unsigned, MinU)
REDUCE(__reduce_min_sync, int, MinS)
REDUCE(__reduce_and_sync, unsigned, And)
REDUCE(__reduce_or_sync, unsigned, Or)
REDUCE(__reduce_xor_sync, unsigned, Xor)
#undef REDUCE

// Fibers run one at a time and give way nowhere but at barriers: a plain read and write is atomic.
#define ATOMIC(name, expression)                 \
  template <class T>                             \
  inline T name(T* place, host::Same<T> value) { \
    T old = *place;                              \
    *place = expression;                         \
    return old;                                  \
  }
ATOMIC(atomicAdd, (T)(old + value))
ATOMIC(atomicSub, (T)(old - value))
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicAnd, (T)(old & value))
ATOMIC(atomicOr, (T)(old | value))
ATOMIC(atomicXor, (T)(old ^ value))
ATOMIC(atomicExch, value)
ATOMIC(atomicInc, (T)(old >= value ? 0 : old + 1))
ATOMIC(atomicDec, (T)(old == 0 || old > value ? value : old - 1))
#undef ATOMIC
template <class T>
inline T atomicCAS(T* place, host::Same<T> expected, host::Same<T> value) {
  T old = *place;
  if (old == expected) *place = value;
  return old;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline long long clock64() { return 0; }
inline unsigned clock() { return 0; }
[[noreturn]] inline void __trap() { host::fail("__trap()"); }
inline void __prof_trigger(int) {}

#define LOAD(name) template <class T> inline T name(const T* place) { return *place; }
LOAD(__ldg) LOAD(__ldcs) LOAD(__ldcg) LOAD(__ldca) LOAD(__ldlu) LOAD(__ldcv)
#undef LOAD
#define STORE(name) template <class T> inline void name(T* place, host::Same<T> value) { *place = value; }
STORE(__stcs) STORE(__stcg) STORE(__stwb) STORE(__stwt)
#undef STORE
