// SPDX-License-Identifier: Apache-2.0
// Products of a group of four warps (wgmma), of compute capability 9.0 alone, whose operands lie in shared memory. The
// name of the instruction in this file has program.py compile for sm_90a.
//
// An operand in shared memory is a panel of rows by 64 places of the sum, bfloat16, in lines of 128 bytes; in groups of
// eight lines, at multiples of 1024 bytes, 16-byte word w of line l lies at word w ^ l (the swizzle of 128 bytes in the
// PTX manual, "asynchronous warpgroup level matrix instructions"). Straight: a line is a row. Transposed: a line is a
// place of the sum and 64 rows; the next 64 rows lie behind all 64 lines of the first.
#pragma once

#define BAND_BYTES 8192  // 64 rows of a panel

#ifndef FMTSIM_HOST

// Where something lies in the window of shared memory, in bytes.
DEVICE u32 shared_place(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// Copies 16 or 4 bytes to shared memory without waiting, or zeros where `there` is false; nothing is read then.
DEVICE void copy16_or_zeros(void* shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_place(shared)), "l"(global),
               "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy4_or_zeros(void* shared, const void* global, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_place(shared)), "l"(global),
               "r"(there ? 4 : 0) : "memory");
}

// What was written to shared memory, as far as this thread may read it, is for its products to see.
DEVICE void see_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier in shared memory: its phase, 0 at first, changes whenever `count` threads have arrived.
DEVICE void start_barrier(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_place(barrier)), "r"(count) : "memory");
}
DEVICE void arrive(u64* barrier) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(shared_place(barrier)) : "memory");
}
// Arrives when all copies that this thread has begun have landed.
DEVICE void arrive_behind_copies(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_place(barrier)) : "memory");
}
// Waits for the end of a phase; that before the first counts as ended.
DEVICE void wait_phase(u64* barrier, u32 phase) {
  asm volatile(
      "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra WAIT;}" ::"r"(
          shared_place(barrier)), "r"(phase) : "memory");
}

// Take registers from the pool of a block, or give some back: what the threads of a group of warps have then.
template <int N>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
DEVICE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Before products that read registers which other instructions wrote; after those of one commit; wait for all but N.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Keeps the compiler from moving what reads or writes sums across this place.
template <int N>
DEVICE void pin(float (&d)[N]) {
  UNROLLED for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = a b^T, plus d where `add`: 64 rows of a panel a, 128 of a panel b, 16 places of the sum. Lane l of warp w of the
// four has, in d[4 j + 2 h + c], row 16 w + 8 h + l / 4 and column 8 j + 2 (l % 4) + c. The operands are `matrix`es.
template <bool TransposedA, bool TransposedB>
DEVICE void add_product(float (&d)[64], u64 a, u64 b, bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, %64, %65, p, 1, 1, %67, %68;}"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"((i32)add), "n"(TransposedA), "n"(TransposedB));
}

#endif

// What products take for places 16 step and on of a panel in shared memory, from row 64 band.
template <bool Transposed>
DEVICE u64 matrix(u32 panel, i32 band, i32 step) {
  u32 start = panel + band * BAND_BYTES + step * (Transposed ? 2048 : 32);
  u64 apart = 1024 >> 4, bands = Transposed ? BAND_BYTES >> 4 : 1, swizzle_128 = 1;
  return (start & 0x3FFFF) >> 4 | bands << 16 | apart << 32 | swizzle_128 << 62;
}
