// SPDX-License-Identifier: Apache-2.0
// A step of Adam, Lion, SGD or Madam on many parameters at once, whose moments, and weights where these are kept, are
// codes (optimizer_codecs.cuh; 8-bit Adam, FP8-LM, LNS-Madam, ...) with a scale for each block, row or tensor, or none,
// or float32: decode, update, encode from one read. The update is that of fmtsim/optim/rules.py,
// codes and scales are those of fmtsim/optim/codec.py.
//
// A scale of a row or a tensor is known when all of it is updated. Of a row of weights, a block of threads finds the
// largest first and updates again. Of a tensor, `tops` finds the largest magnitudes and keeps nothing else, `optimize`
// updates again and encodes. Between the two lie, for each parameter, six words of `found`: bits of the largest new
// numbers of m, v and w, zeros at first, and their scales until now.
//
// Macros: BLOCK: elements of a block, 128, 256, 512, 1024 or 2048; 0 where scales are of tensors or rows, or there are
// none. FIRST, SECOND, WEIGHTS: the Slot, Integer, Logs or Book of each state. Those of optimizer.cuh.
#include "optimizer_codecs.cuh"

typedef FIRST M;
typedef SECOND V;
typedef WEIGHTS W;

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
  u32 bits = as_bits(x) & MAGNITUDE;
  return bits > top ? bits : top;
}

template <int Whole>
DEVICE Four weights_of(const Entry& e, i64 at, const Scales& s, const Tables& t) {
  if (W::bits) return W::template load<Whole>(e.w ? e.w : (const void*)e.p, at, e.count, s.w, t);
  return read<Whole>(e.p, at, e.count);
}

// Reads, decodes and updates a thread's elements; those behind the end are zero. Returns how many gradients are not
// finite.
template <int Whole>
DEVICE u32 updated(const Entry& e, i64 at, const Scales& s, const Numbers& n, bool zeroing,
                    const Tables& t, Eight& x, Tops& tops) {
  u32 bad = 0;
  UNROLLED for (int run = 0; run < 2; run++) {
    i64 here = at + run * (SPAN / 2);
    // 1. read and decode; 2. update; 3. the largest magnitudes of what gets a new scale
    Four g = read<Whole>(e.g, here, e.count);
    x.w[run] = weights_of<Whole>(e, here, s, t);
    x.m[run] = M::template load<Whole>(e.m, here, e.count, s.m, t);
    x.v[run] = V::template load<Whole>(e.v, here, e.count, s.v, t);
    UNROLLED for (int k = 0; k < 4; k++) {
      float &m = x.m[run].x[k], &v = x.v[run].x[k], &w = x.w[run].x[k];
      bad += update(w, g.x[k], m, v, n, zeroing);
      if (Whole < 1 && here + k >= e.count) m = v = w = 0.0f;
      if (M::scaled) tops.m = larger(tops.m, m);
      if (V::scaled) tops.v = larger(tops.v, v);
      if (W::scaled) tops.w = larger(tops.w, w);
    }
    if (!W::bits) write<Whole>(e.p, here, e.count, x.w[run]);
  }
  return bad;
}

// Encodes a thread's elements and writes them. before: elements of the parameter before those of e.
template <int Whole>
DEVICE void written(const Entry& e, i64 at, const Scales& s, const Tables& t, Eight& x, const Draw& draw, i64 before = 0) {
  void* weights = e.w ? e.w : e.p;
  UNROLLED for (int run = 0; run < 2; run++) {
    i64 here = at + run * (SPAN / 2);
    Four words = {};
    if (W::random) {
      UNROLLED for (int k = 0; k < 4; k++) words.x[k] = as_float(random_word(before + here + k, draw));
    }
    M::template store<Whole>(e.m, here, e.count, x.m[run], s.m, words, t);
    V::template store<Whole>(e.v, here, e.count, x.v[run], s.v, words, t);
    W::template store<Whole>(weights, here, e.count, x.w[run], s.w, words, t);
    if (W::bits && e.w) write<Whole>(e.p, here, e.count, x.w[run]);
  }
}

// The random words of a parameter's weights: fmtsim.spec.optimizer.key_of.
DEVICE Draw draw_of(const Entry& e, i32 which, Draw draw, const Step& s) {
  if (!W::random) return draw;
  u64 offset = (CAPTURABLE ? s.of[which].offset : (u64)draw.offset1 << 32 | draw.offset0) | (u64)e.place;
  draw.offset0 = (u32)offset;
  draw.offset1 = (u32)(offset >> 32) & 0x7FFFFFFFu;
  return draw;
}

#if BLOCK

// The new scale of a block, which one of its threads writes.
template <class S>
DEVICE Scale renewed(float* scales, i64 block, bool present, float old, u32 top, u32* shared, const Tables& t) {
  if (!S::scaled) return S::used(old);
  float scale = S::next(largest_of_block<LANES, WARPS>(top, shared), old, t);
  if (present && threadIdx.x % (SPAN / 8) == 0) scales[block] = scale;
  return S::used(scale);
}

// A chunk of a parameter; all threads of a block come here together.
template <int Whole>
DEVICE u32 step(const Entry& e, i64 start, const Numbers& n, bool zeroing, const Tables& t, const Draw& draw,
                u32* shared) {
  i64 place = start + threadIdx.x / (SPAN / 8) * SPAN, block = place / SPAN;
  bool present = Whole > 0 || place < e.count;
  i64 at = place + threadIdx.x % (SPAN / 8) * 4;
  float m = M::scaled && present ? e.m_scales[block] : 1.0f, v = V::scaled && present ? e.v_scales[block] : 1.0f;
  float w = W::scaled && present ? e.w_scale[block] : W::fixed ? *e.w_scale : 1.0f;
  Scales s = {M::prepared(m), V::prepared(v), W::prepared(w)};
  Eight x;
  Tops tops = {};
  u32 bad = updated<Whole>(e, at, s, n, zeroing, t, x, tops);
  s.m = renewed<M>(e.m_scales, block, present, m, tops.m, shared, t);
  s.v = renewed<V>(e.v_scales, block, present, v, tops.v, shared, t);
  s.w = renewed<W>(e.w_scale, block, present, w, tops.w, shared, t);
  written<Whole>(e, at, s, t, x, draw);
  return bad;
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
  float m = M::scaled ? *e.m_scales : 1.0f, v = V::scaled ? *e.v_scales : 1.0f, w = W::scaled || W::fixed ? *e.w_scale : 1.0f;
  if (to) to[0] = as_bits(m), to[1] = as_bits(v), to[2] = as_bits(w);
  return prepared(m, v, w);
}

#define TINY 0x0DA24260u  // 1e-30: below, roundings are not small beside numbers

// At least the magnitude of Adam's moved(), unless that is tiny; NaN or Inf where this cannot say.
DEVICE float bound_of(float p, float m, float v, const Numbers& n) {
  float size = fabsf(m) * 1.001f * short_inverse(short_root(v) * n.inverse + n.eps);
  return (fabsf(p * n.before) + size * fabsf(n.size)) * fabsf(n.after) * 1.001f;
}

// Finds the largest new numbers among a thread's elements. Few weights can be the largest of a tensor: most are ruled
// out by a bound, without the update's root and divisions.
template <int Whole>
DEVICE void measure(const Entry& e, i64 at, const Scales& s, const Numbers& n, bool zeroing, const Tables& t,
                    Tops& tops) {
  UNROLLED for (int run = 0; run < 2; run++) {
    i64 here = at + run * (SPAN / 2);
    Four g = read<Whole>(e.g, here, e.count), w;
    if (W::scaled || n.penalty != 0.0f) w = weights_of<Whole>(e, here, s, t);
    Four m = M::template load<Whole>(e.m, here, e.count, s.m, t);
    Four v = V::template load<Whole>(e.v, here, e.count, s.v, t);
    UNROLLED for (int k = 0; k < 4; k++) {
      if (Whole < 1 && here + k >= e.count) continue;
      bool dropped = zeroing && is_bad(g.x[k]);
      float direction = grow(w.x[k], g.x[k], m.x[k], v.x[k], n);
      if (M::scaled) tops.m = larger(tops.m, dropped ? 0.0f : m.x[k]);
      if (V::scaled) tops.v = larger(tops.v, dropped ? 0.0f : v.x[k]);
      if (!W::scaled) continue;
      float bound = UPDATE == ADAM ? bound_of(w.x[k], m.x[k], v.x[k], n) : as_float(INFINITE);
      if (dropped) tops.w = larger(tops.w, w.x[k]);
      else if (tops.w < TINY || !(bound < as_float(tops.w))) {
        tops.w = larger(tops.w, moved(w.x[k], direction, m.x[k], v.x[k], n));
      }
    }
  }
  if (W::scaled) tops.w = __reduce_max_sync(0xFFFFFFFFu, tops.w);
}

// The scales of a parameter as `tops` found them; one thread keeps them.
DEVICE Scales renewed(const Entry& e, const u32* found, bool keeps, const Tables& t) {
  float m = M::next(found[0], as_float(found[3]), t), v = V::next(found[1], as_float(found[4]), t);
  float w = W::next(found[2], as_float(found[5]), t);
  if (keeps && M::scaled) *e.m_scales = m;
  if (keeps && V::scaled) *e.v_scales = v;
  if (keeps && W::scaled) *e.w_scale = w;
  return Scales{M::used(m), V::used(v), W::used(w)};
}

#if ROWS

// The elements of a row, e, of which `before` are before it.
template <int Whole>
DEVICE u32 step_row(const Entry& e, i64 before, const Numbers& n, bool zeroing, const Tables& t, const Draw& draw,
                    u32* shared) {
  Scales s = prepared(1.0f, 1.0f, *e.w_scale);
  Tops tops = {};
  for (i64 at = threadIdx.x * 4; at - threadIdx.x * 4 < e.count; at += CHUNK) {
    measure<Whole>(e, at, s, n, zeroing, t, tops);
  }
  Scales now = s;
  float w = W::next(largest_of_block<LANES, WARPS>(tops.w, shared), s.w.scale, t);
  now.w = W::used(w);
  u32 bad = 0;
  for (i64 at = threadIdx.x * 4; at - threadIdx.x * 4 < e.count; at += CHUNK) {
    Eight x;
    Tops none = {};
    bad += updated<Whole>(e, at, s, n, zeroing, t, x, none);
    written<Whole>(e, at, now, t, x, draw, before);
  }
  if (threadIdx.x == 0) *e.w_scale = w;
  return bad;
}

template <class S>
DEVICE void* behind(void* from, i64 count) { return (u8*)from + count * S::bits / 8; }

// A row of a parameter; all threads of a block come here together.
DEVICE u32 step(const Entry& e, i64 row, const Numbers& n, bool zeroing, const Tables& t, const Draw& draw, u32* shared) {
  const i64 before = row * e.row;
  Entry part = e;
  part.p += before, part.g += before, part.count = e.row, part.w_scale += row;
  part.m = behind<M>(e.m, before), part.v = behind<V>(e.v, before), part.w = behind<W>(e.w, before);
  if (e.row % 4) return step_row<-1>(part, before, n, zeroing, t, draw, shared);
  return step_row<0>(part, before, n, zeroing, t, draw, shared);
}

#else

template <int Whole>
DEVICE u32 step(const Entry& e, i64 at, const Scales& old, const Scales& now, const Numbers& n, bool zeroing,
                const Tables& t, const Draw& draw) {
  Eight x;
  Tops none = {};
  u32 bad = updated<Whole>(e, at, old, n, zeroing, t, x, none);
  written<Whole>(e, at, now, t, x, draw);
  return bad;
}

// A chunk of a parameter. Which scales there are is the same for all its threads.
DEVICE u32 step(const Entry& e, i64 start, const Numbers& n, bool zeroing, const Tables& t, const Draw& draw,
                const u32* found) {
  Scales old = prepared(1.0f, 1.0f, W::fixed ? *e.w_scale : 1.0f), now = old;
  if (M::scaled || V::scaled || W::scaled) {
    old = prepared(as_float(found[3]), as_float(found[4]), as_float(found[5]));
    now = renewed(e, found, start == 0 && threadIdx.x == 0, t);
  }
  i64 at = start + threadIdx.x * 4;
  if (start + CHUNK <= e.count && old.narrow() && now.narrow()) return step<1>(e, at, old, now, n, zeroing, t, draw);
  return step<0>(e, at, old, now, n, zeroing, t, draw);
}

#endif
#endif

// The arguments of both kernels. found: u32 [count][FOUND], zeros before `tops`; nothing where no scales are of
// tensors. nonfinite: counts the elements of gradients that are NaN or infinite.
#define ARGUMENTS                                                                                                   \
  const Entries entries, i32 count, i64 chunks, const Step scalars, const Draw draw, const Books books, u32* found, \
      u64* nonfinite

#if !BLOCK && !ROWS

KERNEL __launch_bounds__(256, 4) tops(ARGUMENTS) {
  const Tables t = {nullptr, nullptr, books};
  i32 which = -1;
  Tops tops = {};
  Scales s = {};
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    i32 before = which;
    which = which < 0 ? 0 : which;
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    NUMBERS_OF(scalars, which);
    if (which != before) {
      if (before >= 0) flush(found + before * FOUND, tops);
      if (!e.plain) s = old_scales(e, chunk == e.first && threadIdx.x == 0 ? found + which * FOUND + 3 : nullptr);
    }
    if (e.plain) continue;
    i64 start = (chunk - e.first) * CHUNK, at = start + threadIdx.x * 4;
    if (start + CHUNK <= e.count && s.narrow()) measure<1>(e, at, s, n, scalars.zeroing, t, tops);
    else measure<0>(e, at, s, n, scalars.zeroing, t, tops);
  }
  if (which >= 0) flush(found + which * FOUND, tops);
}

#endif

KERNEL __launch_bounds__(256, ROWS ? 2 : W::random ? 3 : 4) optimize(ARGUMENTS) {
  Tables t = {books.values, nullptr, books};
#if BLOCK || ROWS
  __shared__ u32 shared[8];
#endif
  if constexpr (M::tabled || V::tabled) {
    constexpr i32 VALUES = 2 << (M::tabled ? M::bits : V::tabled ? V::bits : 0);
    DYNAMIC_SHARED(memory);
    for (i32 i = threadIdx.x * 4; i < VALUES + 3 * books.buckets; i += 256 * 4) {
      copy16_async((float*)memory + i, books.values + i);  // both end at a multiple of four
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    t.values = (float*)memory, t.words = (u32*)memory + VALUES;
  }
  each_chunk(entries, count, chunks, scalars, nonfinite, [&](const Entry& e, i32 which, i64 chunk, const Numbers& n) {
    const Draw drawn = draw_of(e, which, draw, scalars);
    const bool zeroing = scalars.zeroing;
    const i64 start = chunk * CHUNK;
#if BLOCK
    if (start + CHUNK <= e.count) return step<1>(e, start, n, zeroing, t, drawn, shared);
    return step<0>(e, start, n, zeroing, t, drawn, shared);
#elif ROWS
    return step(e, chunk, n, zeroing, t, drawn, shared);
#else
    return step(e, start, n, zeroing, t, drawn, found + which * FOUND);
#endif
  });
}
