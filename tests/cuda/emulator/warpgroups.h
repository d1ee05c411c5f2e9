// SPDX-License-Identifier: Apache-2.0
// The wrappers that warpgroup.cuh has in assembly. A product of a group of warps is done when it is waited for, each
// thread its own sums, which are NaN until then: shared memory that is written too early, or sums that are read too
// early, show.
#pragma once

namespace host {

// An element of an operand in shared memory, as a descriptor says: fields of 14 bits from bits 0, 16 and 32, in words
// of 16 bytes; swizzles of 128 bytes alone.
inline double matrix_element(unsigned long long matrix, bool turned, unsigned row, unsigned k) {
  unsigned start = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4;
  unsigned stride = (matrix >> 32 & 0x3fff) << 4;
  unsigned place = turned ? start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128
                          : start + row / 8 * stride + row % 8 * 128 + k * 2;
  place ^= place >> 3 & 0x70;
  unsigned short code;
  memcpy(&code, dynamic_shared + place, 2);
  return bits<float>((unsigned)code << 16);
}

inline void do_product(const GroupProduct& p) {
  unsigned warp = current->number / 32 % 4, lane = current->number % 32;
  for (int i = 0; i < p.count; ++i) {
    unsigned row = warp * 16 + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = p.add ? p.d[i] : 0.0;
    for (unsigned k = 0; k < 16; ++k)
      sum += matrix_element(p.a, p.turned_a, row, k) * matrix_element(p.b, p.turned_b, column, k);
    p.d[i] = narrow<RZ>(sum);
  }
}

}  // namespace host

inline unsigned shared_place(const void* shared) { return (unsigned)((unsigned char*)shared - host::dynamic_shared); }

inline void copy_or_zeros(void* shared, const void* global, bool there, unsigned bytes) {
  static const unsigned char zeros[16] = {};
  const void* from = there ? global : zeros;
  if (((uintptr_t)shared | (uintptr_t)(there ? global : nullptr)) % bytes) host::fail("a copy is not aligned");
  memset(shared, 0xCD, bytes);
  unsigned group = host::current->open_group;
  host::current->copies.push_back({(unsigned char*)shared, (const unsigned char*)from, bytes, group});
}
inline void copy16_or_zeros(void* shared, const void* global, bool there) { copy_or_zeros(shared, global, there, 16); }
inline void copy4_or_zeros(void* shared, const void* global, bool there) { copy_or_zeros(shared, global, there, 4); }
inline void see_shared() {}
inline void begin_products() {}
inline void commit_products() { ++host::current->open_products; }
template <int N>
inline void wait_products() {
  std::vector<host::GroupProduct>& products = host::current->products;
  size_t done = 0;
  while (done < products.size() && products[done].group + N < host::current->open_products)
    host::do_product(products[done++]);
  products.erase(products.begin(), products.begin() + done);
}
template <int N>
inline void pin(float (&)[N]) {}
template <int N>
inline void take_registers() {}
template <int N>
inline void leave_registers() {}

template <bool TurnedA, bool TurnedB, int N>
inline void add_product(float (&d)[N], unsigned long long a, unsigned long long b, bool add) {
  if (!add) for (float& sum : d) sum = __builtin_nanf("");
  host::current->products.push_back({d, N, a, b, TurnedA, TurnedB, add, host::current->open_products});
}

// A barrier in shared memory: from bit 0 how many are awaited, from bit 16 how many of each phase, bit 32 the phase.
inline void start_barrier(unsigned long long* barrier, unsigned count) { *barrier = count | count << 16; }
inline void arrive(unsigned long long* barrier) {
  unsigned long long count = *barrier >> 16 & 0xffff;
  if ((--*barrier & 0xffff) == 0) *barrier = (*barrier ^ 1ull << 32) | count;
}
inline void arrive_behind_copies(unsigned long long* barrier) {
  commit_copies();
  wait_copies<0>();
  arrive(barrier);
}
inline void wait_phase(unsigned long long* barrier, unsigned phase) {
  for (unsigned turn = 0; (*(volatile unsigned long long*)barrier >> 32 & 1) == phase; ++turn) {
    if (turn > 1u << 20) host::fail("a barrier in shared memory is waited for in vain");
    host::give_way();
  }
}
