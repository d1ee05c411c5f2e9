// What steps of Adam on many parameters share: the table of a launch, reads and writes of four neighbours, the update.
// Macros: ENTRIES, parameters of a launch.
#pragma once
#include "common.cuh"

#define CHUNK 2048  // elements of a block of threads at a time: whole blocks
#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u

struct Entry {  // a parameter; without scales the moments are float32
  float* p;
  const float* g;
  void* m;
  void* v;
  float* m_scales;
  float* v_scales;
  float* m_powers;  // these four of expanded groups alone
  float* v_powers;
  float* m_centres;
  float* v_centres;
  i64 count;
  i64 first;  // of its chunks, among those of the launch
};
struct alignas(16) Entries {
  Entry of[ENTRIES];
};
struct alignas(16) Numbers {
  float before, after, penalty, beta1, rest1, beta2, rest2, correction, eps, size;
  i32 zeroing;  // elements whose gradient is not finite lose their moments and stay
  i32 unused;
};
// Four neighbours; what lies behind the end is zero.
struct Four {
  float x[4];
};

DEVICE Four read(const float* from, i64 at, i64 count) {
  Four four;
  if (at + 4 <= count) {
    Words4 w = *(const Words4*)(from + at);
    four = Four{__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
  } else {
#pragma unroll
    for (int k = 0; k < 4; k++) four.x[k] = at + k < count ? from[at + k] : 0.0f;
  }
  return four;
}

DEVICE void write(float* to, i64 at, i64 count, const Four& four) {
  if (at + 4 <= count) {
    *(Words4*)(to + at) = Words4{__float_as_uint(four.x[0]), __float_as_uint(four.x[1]), __float_as_uint(four.x[2]),
                                 __float_as_uint(four.x[3])};
  } else {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (at + k < count) to[at + k] = four.x[k];
    }
  }
}

DEVICE u32 read_codes(const u8* from, i64 at, i64 count) {
  if (at + 4 <= count) return *(const u32*)(from + at);
  u32 codes = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) codes |= at + k < count ? (u32)from[at + k] << (8 * k) : 0;
  return codes;
}

DEVICE void write_codes(u8* to, i64 at, i64 count, u32 codes) {
  if (at + 4 <= count) {
    *(u32*)(to + at) = codes;
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if (at + k < count) to[at + k] = (u8)(codes >> (8 * k));
  }
}

// One element: parameter, gradient and both moments become the new ones; returns whether the gradient is not finite.
DEVICE bool update(float& p, float g, float& m, float& v, const Numbers& n) {
  bool bad = (__float_as_uint(g) & MAGNITUDE) >= INFINITE;
  if (n.penalty != 0.0f) g = __fadd_rn(g, __fmul_rn(p, n.penalty));
  m = __fadd_rn(__fmul_rn(m, n.beta1), __fmul_rn(g, n.rest1));
  v = __fadd_rn(__fmul_rn(v, n.beta2), __fmul_rn(__fmul_rn(g, n.rest2), g));
  float root = __fsqrt_rn(v);
  if (n.correction != 1.0f) root = __fdiv_rn(root, n.correction);
  float direction = __fdiv_rn(m, __fadd_rn(root, n.eps));
  float moved = __fmul_rn(__fsub_rn(__fmul_rn(p, n.before), __fmul_rn(direction, n.size)), n.after);
  bool dropped = bad && n.zeroing;
  p = dropped ? p : moved;
  m = dropped ? 0.0f : m;
  v = dropped ? 0.0f : v;
  return bad;
}

// A chunk of a parameter whose moments are float32.
DEVICE u32 step_plainly(const Entry& e, i64 start, const Numbers& n) {
  u32 bad = 0;
#pragma unroll
  for (int group = 0; group < 2; group++) {
    i64 at = start + threadIdx.x * 4 + group * (CHUNK / 2);
    if (at >= e.count) continue;
    Four p = read(e.p, at, e.count), g = read(e.g, at, e.count);
    Four m = read((const float*)e.m, at, e.count), v = read((const float*)e.v, at, e.count);
#pragma unroll
    for (int k = 0; k < 4; k++) bad += update(p.x[k], g.x[k], m.x[k], v.x[k], n);
    write(e.p, at, e.count, p);
    write((float*)e.m, at, e.count, m);
    write((float*)e.v, at, e.count, v);
  }
  return bad;
}

// The larger of all lanes.
DEVICE u32 largest_of_warp(u32 top) {
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) {
    u32 other = __shfl_xor_sync(0xFFFFFFFFu, top, lane);
    top = other > top ? other : top;
  }
  return top;
}
