// SPDX-License-Identifier: Apache-2.0
// Threads of a block as fibers of one host thread: each runs until it waits at a barrier or ends.
#pragma once

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace host {

constexpr unsigned MAX_THREADS = 1024, MAX_SHARED = 256 * 1024, CANARY = 256, BARRIERS = 16;
constexpr size_t STACK = 256 * 1024;

struct Copy { unsigned char* to; const unsigned char* from; unsigned bytes; unsigned group; };

struct GroupProduct { float* d; int count; unsigned long long a, b; bool turned_a, turned_b, add; unsigned group; };

struct Fiber {
  dim3 thread;
  unsigned number;  // row-major place in the block
  const char* waits_at;
  unsigned open_group;
  std::vector<Copy> copies;
  unsigned open_products;
  std::vector<GroupProduct> products;
#if defined(__x86_64__) || defined(__aarch64__)
  void* stack_pointer;
#else
  ucontext_t context;
#endif
};

typedef void (*Finish)(unsigned arrived, void** slots);

// Lanes of a warp that meet at one mask. The last to come does the work of all of them.
struct Meeting { unsigned mask, arrived; const char* what; Finish finish; void* slots[32]; };

struct Warp { unsigned live; Meeting meetings[32]; };

struct Barrier { unsigned arrived, votes, result; std::vector<Fiber*> waiting; };

struct Block {
  dim3 index, size, grid;
  unsigned threads, live;
  bool reversed;
  Fiber fibers[MAX_THREADS];
  Warp warps[MAX_THREADS / 32];
  Barrier barriers[BARRIERS];
  Fiber* queue[MAX_THREADS];
  unsigned head, tail;  // of the ring of fibers that can run
  unsigned char* stacks;
  char error[512];
};

static Block block;
static Fiber* current;
static Fiber outside;  // the caller of the kernel
static void (*body)(void**);
static void** arguments;
alignas(128) static unsigned char dynamic_shared[MAX_SHARED + CANARY];

#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void fmtsim_switch(void** from, void* to);
asm(".text\n.hidden fmtsim_switch\n.globl fmtsim_switch\n.type fmtsim_switch,@function\nfmtsim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr unsigned FRAME = 8, RETURN = 6;  // words; the return address leaves the stack as a call would
#elif defined(__aarch64__)
extern "C" __attribute__((visibility("hidden"))) void fmtsim_switch(void** from, void* to);
asm(".text\n.hidden fmtsim_switch\n.globl fmtsim_switch\n.type fmtsim_switch,%function\nfmtsim_switch:\n"
    "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\n"
    "stp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\n"
    "ldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n");
constexpr unsigned FRAME = 20, RETURN = 11;
#endif

static void run_fiber();

inline void switch_to(Fiber* next) {
  Fiber* last = current;
  current = next;
  asm volatile("" ::: "memory");
#if defined(__x86_64__) || defined(__aarch64__)
  fmtsim_switch(&last->stack_pointer, next->stack_pointer);
#else
  swapcontext(&last->context, &next->context);
#endif
  asm volatile("" ::: "memory");
}

inline void prepare(Fiber& fiber) {
  // Stacks start at different places of their pages, or all of them would share the same few lines of the cache.
  unsigned char* top = block.stacks + (fiber.number + 1) * STACK - (fiber.number % 61) * 64;
#if defined(__x86_64__) || defined(__aarch64__)
  void** frame = (void**)top - FRAME;
  frame[RETURN] = (void*)&run_fiber;
  fiber.stack_pointer = frame;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = block.stacks + fiber.number * STACK;
  fiber.context.uc_stack.ss_size = top - (block.stacks + fiber.number * STACK);
  makecontext(&fiber.context, run_fiber, 0);
#endif
}

[[noreturn]] inline void fail(const char* text) {
  if (!block.error[0])
    snprintf(block.error, sizeof block.error, "block (%u, %u, %u), thread (%u, %u, %u): %s", block.index.x,
             block.index.y, block.index.z, current->thread.x, current->thread.y, current->thread.z, text);
  switch_to(&outside);
  __builtin_unreachable();
}

inline void push(Fiber* fiber) {
  block.queue[block.tail++ % MAX_THREADS] = fiber;
}

inline Fiber* pop() {
  return block.head == block.tail ? nullptr : block.queue[block.head++ % MAX_THREADS];
}

inline void wait(const char* what) {
  current->waits_at = what;
  Fiber* next = pop();
  if (!next) {
    char text[256];
    int length = snprintf(text, sizeof text, "deadlock, no thread can run; first of those that wait:");
    for (unsigned i = 0, shown = 0; i < block.threads && shown < 4; ++i)
      if (block.fibers[i].waits_at && length < 200) {
        length += snprintf(text + length, sizeof text - length, " thread %u at %s;", i, block.fibers[i].waits_at);
        ++shown;
      }
    fail(text);
  }
  switch_to(next);
  current->waits_at = nullptr;
}

// Let the others run first.
inline void give_way() {
  push(current);
  Fiber* next = pop();
  if (next == current) return;
  current->waits_at = "a barrier in shared memory";
  switch_to(next);
  current->waits_at = nullptr;
}

inline void release(Barrier& barrier) {
  barrier.result = barrier.votes;
  barrier.arrived = barrier.votes = 0;
  size_t count = barrier.waiting.size();
  for (size_t i = 0; i < count; ++i) {
    Fiber* fiber = barrier.waiting[block.reversed ? count - 1 - i : i];
    if (fiber != current) push(fiber);
  }
  barrier.waiting.clear();
}

// Wait until `count` threads (0: every thread that has not ended) have come; returns how many of them voted.
inline unsigned meet_block(unsigned number, unsigned count, bool vote) {
  if (number >= BARRIERS) fail("there are 16 barriers");
  Barrier& barrier = block.barriers[number];
  barrier.votes += vote;
  barrier.waiting.push_back(current);
  if (++barrier.arrived == (count ? count : block.live)) release(barrier);
  else wait("__syncthreads or a named barrier");
  return barrier.result;
}

inline void complete(Meeting& meeting) {
  unsigned arrived = meeting.arrived, first = current->number & ~31u;
  if (meeting.finish) meeting.finish(arrived, meeting.slots);
  meeting.arrived = 0;
  for (unsigned i = 0; i < 32; ++i) {
    unsigned lane = block.reversed ? 31 - i : i;
    Fiber* fiber = &block.fibers[first + lane];
    if ((arrived >> lane & 1) && fiber != current) push(fiber);
  }
}

// Meet the lanes of a mask; what each of them brought is at hand when `finish` runs, once.
inline void meet(const char* what, unsigned mask, Finish finish, void* slot) {
  Warp& warp = block.warps[current->number >> 5];
  unsigned lane = current->number & 31;
  if (!(mask >> lane & 1)) fail("a lane is not in the mask that it passes");
  Meeting *meeting = nullptr, *empty = nullptr;
  for (Meeting& candidate : warp.meetings) {
    if (candidate.arrived && candidate.mask == mask) { meeting = &candidate; break; }
    if (!candidate.arrived) { empty = &candidate; break; }
  }
  if (!meeting) for (Meeting& candidate : warp.meetings)
    if (candidate.arrived && candidate.mask == mask) { meeting = &candidate; break; }
  if (!meeting) {
    meeting = empty;
    meeting->mask = mask;
    meeting->what = what;
    meeting->finish = finish;
  } else if (meeting->finish != finish) {
    fail("lanes of one warp meet at different instructions with the same mask");
  }
  meeting->arrived |= 1u << lane;
  meeting->slots[lane] = slot;
  if (meeting->arrived == (mask & warp.live)) complete(*meeting);
  else wait(what);
}

static void run_fiber() {
  body(arguments);
  Warp& warp = block.warps[current->number >> 5];
  warp.live &= ~(1u << (current->number & 31));
  --block.live;
  for (Meeting& meeting : warp.meetings)
    if (meeting.arrived && meeting.arrived == (meeting.mask & warp.live)) complete(meeting);
  Barrier& all = block.barriers[0];  // a thread that ends is no longer waited for
  if (block.live && all.arrived == block.live) release(all);
  Fiber* next = pop();
  if (!next && block.live) wait("its end");  // reports the deadlock
  switch_to(next ? next : &outside);
}

inline void start_block() {
  block.live = block.threads;
  block.head = block.tail = 0;
  for (Barrier& barrier : block.barriers) barrier = Barrier();
  for (unsigned i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.thread = dim3(i % block.size.x, i / block.size.x % block.size.y, i / block.size.x / block.size.y);
    fiber.number = i;
    fiber.waits_at = nullptr;
    fiber.open_group = 0;
    fiber.copies.clear();
    fiber.open_products = 0;
    fiber.products.clear();
    prepare(fiber);
  }
  for (unsigned i = 0; i < block.threads; ++i) push(&block.fibers[block.reversed ? block.threads - 1 - i : i]);
  for (unsigned first = 0; first < block.threads; first += 32) {
    Warp& warp = block.warps[first / 32];
    warp.live = block.threads - first >= 32 ? ~0u : (1u << (block.threads - first)) - 1;
    for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
  }
}

inline void run_block(unsigned shared) {
  memset(dynamic_shared, 0xA5, shared + CANARY);  // what no thread wrote is not zero by chance
  start_block();
  current = &outside;
  switch_to(pop());
  for (unsigned i = 0; i < CANARY && !block.error[0]; ++i)
    if (dynamic_shared[shared + i] != 0xA5)
      snprintf(block.error, sizeof block.error, "block (%u, %u, %u) wrote behind its %u bytes of shared memory",
               block.index.x, block.index.y, block.index.z, shared);
}

inline const char* launch(void (*kernel)(void**), const unsigned* grid, const unsigned* size, void** values,
                          unsigned shared, bool reversed) {
  if (!block.stacks) {
    void* memory = mmap(nullptr, (MAX_THREADS + 1) * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return "no memory for stacks";
    block.stacks = (unsigned char*)memory;
  }
  block.size = dim3(size[0], size[1], size[2]);
  block.grid = dim3(grid[0], grid[1], grid[2]);
  block.threads = size[0] * size[1] * size[2];
  block.reversed = reversed;
  block.error[0] = 0;
  body = kernel;
  arguments = values;
  unsigned long long blocks = (unsigned long long)grid[0] * grid[1] * grid[2];
  for (unsigned long long i = 0; i < blocks && !block.error[0]; ++i) {
    unsigned long long place = reversed ? blocks - 1 - i : i;
    block.index = dim3(place % grid[0], place / grid[0] % grid[1], place / grid[0] / grid[1]);
    run_block(shared);
  }
  return block.error[0] ? block.error : nullptr;
}

// Calls a kernel with arguments that lie in memory one by one, and says what their types are.
template <class T>
inline T load(const void* place) {
  std::remove_const_t<T> value;
  memcpy(&value, place, sizeof value);  // a structure may be aligned better than its bytes
  return value;
}
template <class... Types, size_t... Places>
inline void call(void (*kernel)(Types...), void** values, std::index_sequence<Places...>) {
  kernel(load<Types>(values[Places])...);
}
template <class... Types>
inline void call(void (*kernel)(Types...), void** values) {
  call(kernel, values, std::index_sequence_for<Types...>());
}
struct Parameter { int bytes, kind; };  // kinds: 0 integer, 1 floating point, 2 pointer, 3 structure
template <class... Types>
inline int describe(void (*)(Types...), Parameter* out) {
  Parameter all[] = {{(int)sizeof(Types), std::is_pointer_v<Types>          ? 2
                                          : std::is_floating_point_v<Types> ? 1
                                          : std::is_class_v<Types>          ? 3
                                                                            : 0}..., {0, 0}};
  for (size_t i = 0; i < sizeof...(Types); ++i) out[i] = all[i];
  return sizeof...(Types);
}

}  // namespace host

#define threadIdx (host::current->thread)
#define blockIdx (host::block.index)
#define blockDim (host::block.size)
#define gridDim (host::block.grid)
constexpr int warpSize = 32;

#define DYNAMIC_SHARED(name) unsigned char (&name)[host::MAX_SHARED + host::CANARY] = host::dynamic_shared

inline void __syncthreads() { host::meet_block(0, 0, false); }
inline int __syncthreads_count(int vote) { return host::meet_block(0, 0, vote != 0); }
inline int __syncthreads_or(int vote) { return host::meet_block(0, 0, vote != 0) != 0; }
inline int __syncthreads_and(int vote) { return host::meet_block(0, 0, vote == 0) == 0; }
