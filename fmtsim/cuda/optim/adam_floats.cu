// A step of Adam on many parameters at once, whose moments, and weights where they are kept, are floating-point codes of
// 8 or 16 bits without scales, with one a block, or with one a tensor (or float32). The update is that of
// fmtsim/optim/rules.py, codes and scales are those of fmtsim/optim/codec.py.
//
// A scale of a tensor is known when all of it is updated: `tops` finds the largest magnitudes and keeps nothing else,
// `adam` updates again and encodes. Between the two lie, for each parameter, six words of `found`: bits of the largest
// new numbers of m, v and w, zeros at first, and their scales until now.
//
// Macros: BLOCK: elements of a block, 128, 256, 512, 1024 or 2048; 0 where scales are of tensors, or there are none.
// FIRST, SECOND, WEIGHTS: the parameters of their Slots, by commas. Those of adam.cuh.
#include "adam_floats.cuh"

typedef Slot<FIRST> M;
typedef Slot<SECOND> V;
typedef Slot<WEIGHTS> W;

#define SPAN (BLOCK ? BLOCK : CHUNK)  // of threads that work on neighbours; each has eight elements of it
#define LANES (SPAN < 256 ? SPAN / 8 : 32)
#define WARPS (SPAN / 256)

struct Scales {
  Scale m, v, w;
  DEVICE bool narrow() const { return m.narrow && v.narrow && w.narrow; }
};

// Eight elements of a thread: two runs of four neighbours, half a span apart.
struct Eight {
  Four m[2], v[2], w[2];
};

struct Tops {
  u32 m, v, w;
};

DEVICE u32 larger(u32 top, float x) {
  u32 bits = __float_as_uint(x) & MAGNITUDE;
  return bits > top ? bits : top;
}

// Reads, decodes and updates a thread's elements; those behind the end are zero. Returns how many gradients are not
// finite.
template <class Count>
DEVICE u32 updated(const Entry& e, i64 at, Count count, const Scales& s, const Numbers& n, Eight& x, Tops& tops) {
  const void* weights = e.w ? e.w : e.p;
  u32 bad = 0;
#pragma unroll
  for (int run = 0; run < 2; run++) {
    i64 here = at + run * (SPAN / 2);
    Four g = read(e.g, here, count);
    x.w[run] = W::bits ? W::load(weights, here, count, s.w) : read(e.p, here, count);
    x.m[run] = M::load(e.m, here, count, s.m);
    x.v[run] = V::load(e.v, here, count, s.v);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float &m = x.m[run].x[k], &v = x.v[run].x[k], &w = x.w[run].x[k];
      bad += update(w, g.x[k], m, v, n);
      if (here + k >= count) m = v = w = 0.0f;
      if (M::scaled) tops.m = larger(tops.m, m);
      if (V::scaled) tops.v = larger(tops.v, v);
      if (W::scaled) tops.w = larger(tops.w, w);
    }
  }
  return bad;
}

// Encodes a thread's elements and writes them.
template <class Count>
DEVICE void written(const Entry& e, i64 at, Count count, const Scales& s, Eight& x, const Draw& draw) {
  void* weights = e.w ? e.w : e.p;
#pragma unroll
  for (int run = 0; run < 2; run++) {
    i64 here = at + run * (SPAN / 2);
    Four words = {};
    if (W::random) {
#pragma unroll
      for (int k = 0; k < 4; k++) words.x[k] = __uint_as_float(random_word(here + k, draw));
    }
    M::store(e.m, here, count, x.m[run], s.m, words);
    V::store(e.v, here, count, x.v[run], s.v, words);
    W::store(weights, here, count, x.w[run], s.w, words);
    if (e.w || !W::bits) write(e.p, here, count, x.w[run]);
  }
}

// The random words of a parameter's weights: fmtsim.spec.optimizer.key_of.
DEVICE Draw draw_of(const Entry& e, Draw draw) {
  if (!W::random) return draw;
  u64 offset = ((u64)draw.offset1 << 32 | draw.offset0) | (u64)e.place;
  draw.offset0 = (u32)offset;
  draw.offset1 = (u32)(offset >> 32) & 0x7FFFFFFFu;
  return draw;
}

#if BLOCK

// The new scale of a block, which one of its threads writes.
template <class S>
DEVICE Scale renewed(float* scales, i64 block, bool present, float old, u32 top, u32* shared) {
  if (!S::scaled) return S::used(1.0f);
  float scale = S::next(largest_of_block<LANES, WARPS>(top, shared), old);
  if (present && threadIdx.x % (SPAN / 8) == 0) scales[block] = scale;
  return S::used(scale);
}

template <class Count>
DEVICE u32 step_part(const Entry& e, i64 start, Count count, const Numbers& n, const Draw& draw, u32* shared) {
  i64 place = start + threadIdx.x / (SPAN / 8) * SPAN, block = place / SPAN;
  bool present = place < count;
  i64 at = place + threadIdx.x % (SPAN / 8) * 4;
  float m = M::scaled && present ? e.m_scales[block] : 1.0f, v = V::scaled && present ? e.v_scales[block] : 1.0f;
  float w = W::scaled && present ? e.w_scale[block] : 1.0f;
  Scales s = {M::prepared(m), V::prepared(v), W::prepared(w)};
  Eight x;
  Tops tops = {};
  u32 bad = updated(e, at, count, s, n, x, tops);
  s.m = renewed<M>(e.m_scales, block, present, m, tops.m, shared);
  s.v = renewed<V>(e.v_scales, block, present, v, tops.v, shared);
  s.w = renewed<W>(e.w_scale, block, present, w, tops.w, shared);
  written(e, at, count, s, x, draw);
  return bad;
}

// A chunk of a parameter; all threads of a block come here together.
DEVICE u32 step(const Entry& e, i64 start, const Numbers& n, const Draw& draw, u32* shared) {
  if (start + CHUNK <= e.count) return step_part(e, start, Endless(), n, draw, shared);
  return step_part(e, start, e.count, n, draw, shared);
}

#else

#define FOUND 6

template <class S>
DEVICE void raise(u32* place, u32 top) {
  if (!S::scaled) return;
  top = largest_of_warp(top);
  if (threadIdx.x % 32 == 0 && top > *(volatile u32*)place) atomicMax(place, top);
}

DEVICE void flush(u32* found, Tops& tops) {
  raise<M>(found, tops.m);
  raise<V>(found + 1, tops.v);
  raise<W>(found + 2, tops.w);
  tops = Tops{};
}

DEVICE Scales prepared(float m, float v, float w) { return Scales{M::prepared(m), V::prepared(v), W::prepared(w)}; }

// The scales of a parameter until now, which one thread writes down.
DEVICE Scales old_scales(const Entry& e, u32* to) {
  float m = M::scaled ? *e.m_scales : 1.0f, v = V::scaled ? *e.v_scales : 1.0f, w = W::scaled ? *e.w_scale : 1.0f;
  if (to) to[0] = __float_as_uint(m), to[1] = __float_as_uint(v), to[2] = __float_as_uint(w);
  return prepared(m, v, w);
}

// The root, as short_inverse() has the inverse.
#ifdef FMTSIM_HOST
DEVICE float short_root(float x) { return sqrtf(x < 1.1754944e-38f ? 0.0f : x) * (1.0f + 0x1p-21f); }
#else
DEVICE float short_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

#define TINY 0x0DA24260u  // 1e-30: below, roundings are not small beside numbers

// At least the magnitude of moved(), unless that is tiny; NaN or Inf where this cannot say.
DEVICE float bound_of(float p, float m, float v, const Numbers& n) {
  float size = fabsf(m) * 1.001f * short_inverse(short_root(v) * n.inverse + n.eps);
  return (fabsf(p * n.before) + size * fabsf(n.size)) * fabsf(n.after) * 1.001f;
}

// Finds the largest new numbers among a thread's elements. Few weights can be the largest of a tensor: most are ruled out
// by a bound, without the update's root and divisions.
template <class Count>
DEVICE void measure(const Entry& e, i64 at, Count count, const Scales& s, const Numbers& n, Tops& tops) {
  const void* weights = e.w ? e.w : e.p;
#pragma unroll
  for (int run = 0; run < 2; run++) {
    i64 here = at + run * (SPAN / 2);
    Four g = read(e.g, here, count), w;
    if (W::scaled || n.penalty != 0.0f) w = W::bits ? W::load(weights, here, count, s.w) : read(e.p, here, count);
    Four m = M::load(e.m, here, count, s.m), v = V::load(e.v, here, count, s.v);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (here + k >= count) continue;
      bool dropped = n.zeroing && is_bad(g.x[k]);
      grow(w.x[k], g.x[k], m.x[k], v.x[k], n);
      if (M::scaled) tops.m = larger(tops.m, dropped ? 0.0f : m.x[k]);
      if (V::scaled) tops.v = larger(tops.v, dropped ? 0.0f : v.x[k]);
      if (!W::scaled) continue;
      float bound = bound_of(w.x[k], m.x[k], v.x[k], n);
      if (dropped) tops.w = larger(tops.w, w.x[k]);
      else if (tops.w < TINY || !(bound < __uint_as_float(tops.w))) {
        tops.w = larger(tops.w, moved(w.x[k], m.x[k], v.x[k], n));
      }
    }
  }
  if (W::scaled) tops.w = __reduce_max_sync(0xFFFFFFFFu, tops.w);
}

// Blocks of 256 threads take the chunks in turn. found: u32 [count][FOUND], zeros.
KERNEL __launch_bounds__(256, 4) tops(
    const Entries entries, i32 count, i64 chunks, const Numbers n, u32* found) {
  i32 which = -1;
  Tops tops = {};
  Scales s = {};
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    i32 before = which;
    which = which < 0 ? 0 : which;
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    if (which != before) {
      if (before >= 0) flush(found + before * FOUND, tops);
      if (!e.plain) s = old_scales(e, chunk == e.first && threadIdx.x == 0 ? found + which * FOUND + 3 : nullptr);
    }
    if (e.plain) continue;
    i64 start = (chunk - e.first) * CHUNK, at = start + threadIdx.x * 4;
    if (start + CHUNK <= e.count && s.narrow()) measure(e, at, Endless(), s, n, tops);
    else measure(e, at, e.count, s, n, tops);
  }
  if (which >= 0) flush(found + which * FOUND, tops);
}

DEVICE Scales renewed(const u32* found) {
  float m = M::next(found[0], __uint_as_float(found[3])), v = V::next(found[1], __uint_as_float(found[4]));
  float w = W::next(found[2], __uint_as_float(found[5]));
  return Scales{M::used(m), V::used(v), W::used(w)};
}

DEVICE void keep(const Entry& e, const u32* found) {
  if (M::scaled) *e.m_scales = M::next(found[0], __uint_as_float(found[3]));
  if (V::scaled) *e.v_scales = V::next(found[1], __uint_as_float(found[4]));
  if (W::scaled) *e.w_scale = W::next(found[2], __uint_as_float(found[5]));
}

template <class Count>
DEVICE u32 step_part(
    const Entry& e, i64 at, Count count, const Scales& old, const Scales& now, const Numbers& n, const Draw& draw) {
  Eight x;
  Tops none = {};
  u32 bad = updated(e, at, count, old, n, x, none);
  written(e, at, count, now, x, draw);
  return bad;
}

// A chunk of a parameter. Which scales there are is the same for all its threads.
DEVICE u32 step(const Entry& e, i64 start, const Numbers& n, const Draw& draw, const u32* found) {
  Scales old = prepared(1.0f, 1.0f, 1.0f), now = old;
  if (M::scaled || V::scaled || W::scaled) {
    old = prepared(__uint_as_float(found[3]), __uint_as_float(found[4]), __uint_as_float(found[5]));
    now = renewed(found);
    if (start == 0 && threadIdx.x == 0) keep(e, found);
  }
  i64 at = start + threadIdx.x * 4;
  if (start + CHUNK <= e.count && old.narrow() && now.narrow()) return step_part(e, at, Endless(), old, now, n, draw);
  return step_part(e, at, e.count, old, now, n, draw);
}

#endif

// Blocks of 256 threads take the chunks in turn. found: of blocks nothing; u32 [count][FOUND], from `tops`, where scales
// are of tensors. nonfinite: counts the elements of gradients that are NaN or infinite.
KERNEL __launch_bounds__(256, W::random ? 3 : 4) adam(
    const Entries entries, i32 count, i64 chunks, const Numbers n, const Draw draw, u32* found, u64* nonfinite) {
#if WARPS > 1
  __shared__ u32 shared[8];
#else
  u32* shared = nullptr;
#endif
  u32 bad = 0;
  i32 which = 0;
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    i64 start = (chunk - e.first) * CHUNK;
    Draw words = draw_of(e, draw);
#if BLOCK
    u32* more = shared;
#else
    const u32* more = found + which * FOUND;
#endif
    bad += e.plain ? step_plainly(e, start, e.count, n) : step(e, start, n, words, more);
  }
  if (bad) atomicAdd(nonfinite, (u64)bad);
}
