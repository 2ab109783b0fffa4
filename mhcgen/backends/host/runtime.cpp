// The runtime of the host backend: runs the CTAs of a launch one after another, one fiber per CUDA thread.
// Plain C++ without the standard library, so that a build needs a compiler and libc only.

#include <math.h>
#include <time.h>

#include "deadlock.h"
#include "module_map.h"
#include "sanitizer_calls.h"

// ---- what the emission calls ---------------------------------------------------------------------------------

extern "C" MhcDim3 mhc_rt_thread_index(void) { return running->index; }
extern "C" MhcDim3 mhc_rt_block_index(void) { return running->cta->index; }
extern "C" MhcDim3 mhc_rt_block_shape(void) { return running->cta->launch->request->block; }
extern "C" MhcDim3 mhc_rt_grid_shape(void) { return running->cta->launch->request->grid; }

#define MHC_NOTE_CALL_SITE() \
  (running->call_site = module_offset(running->cta->launch, __builtin_return_address(0)))

extern "C" int mhc_rt_sync_block(unsigned op, int predicate, int line) {
  MHC_NOTE_CALL_SITE();
  return sync_block(op, predicate, line);
}

extern "C" unsigned long long mhc_rt_sync_warp(unsigned op, unsigned mask, unsigned long long value,
                                               unsigned argument, int width, int line) {
  MHC_NOTE_CALL_SITE();
  return sync_warp({op, mask, argument, width, line, value});
}

extern "C" void mhc_rt_sync_named(int number, int threads, int line) {
  MHC_NOTE_CALL_SITE();
  sync_named(static_cast<unsigned>(number), static_cast<unsigned>(threads), line);
}

extern "C" void mhc_rt_copy(void* to, const void* from, unsigned long bytes) {
  note_access(const_cast<void*>(from), bytes, 0, __builtin_return_address(0));
  note_access(to, bytes, MHC_ACCESS_WRITE, __builtin_return_address(0));
  memmove(to, from, bytes);
}

extern "C" void mhc_rt_fill(void* to, int value, unsigned long bytes) {
  note_access(to, bytes, MHC_ACCESS_WRITE, __builtin_return_address(0));
  memset(to, value, bytes);
}

extern "C" void mhc_rt_yield(int line) {
  MHC_NOTE_CALL_SITE();
  yield_turn(line);
}

extern "C" void mhc_rt_trap(int line) {
  MhcFinding finding = blank_finding(MHC_TRAP, MHC_NO_DETAIL);
  MHC_NOTE_CALL_SITE();
  put_call(finding, 0, running, line);
  record(running->cta->launch, finding);
  stop_launch();
}

extern "C" float mhc_rt_exp2(float x) { return exp2f(x); }

extern "C" unsigned long long mhc_rt_nanoseconds(void) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull + static_cast<unsigned long long>(now.tv_nsec);
}

template <class T>
static T atomic_result(unsigned op, T old, T value, T compare) {
  switch (op) {
    case MHC_ATOMIC_ADD: return old + value;
    case MHC_ATOMIC_MIN: return value < old ? value : old;
    case MHC_ATOMIC_MAX: return value > old ? value : old;
    case MHC_ATOMIC_EXCHANGE: return value;
    default: return old == compare ? value : old;
  }
}

// Only one fiber runs at a time: reading and writing are enough. `Bits` is the unsigned type of the same size.
template <class T, class Bits>
static unsigned long long atomic_step(void* address, unsigned op, unsigned long long value,
                                      unsigned long long compare) {
  Bits old;
  memcpy(&old, address, sizeof old);
  Bits updated;
  if (op == MHC_ATOMIC_AND) {
    updated = old & static_cast<Bits>(value);
  } else if (op == MHC_ATOMIC_OR) {
    updated = old | static_cast<Bits>(value);
  } else {
    updated = __builtin_bit_cast(
        Bits, atomic_result(op, __builtin_bit_cast(T, old), __builtin_bit_cast(T, static_cast<Bits>(value)),
                            __builtin_bit_cast(T, static_cast<Bits>(compare))));
  }
  memcpy(address, &updated, sizeof updated);
  return old;
}

extern "C" unsigned long long mhc_rt_atomic(void* address, unsigned op, unsigned type, unsigned long long value,
                                            unsigned long long compare) {
  const unsigned size = type == MHC_ULL || type == MHC_DOUBLE ? 8 : 4;
  note_access(address, size, MHC_ACCESS_WRITE | MHC_ACCESS_ATOMIC, __builtin_return_address(0));
  switch (type) {
    case MHC_INT: return atomic_step<int, uint32_t>(address, op, value, compare);
    case MHC_UINT: return atomic_step<uint32_t, uint32_t>(address, op, value, compare);
    case MHC_FLOAT: return atomic_step<float, uint32_t>(address, op, value, compare);
    case MHC_DOUBLE: return atomic_step<double, uint64_t>(address, op, value, compare);
    default: return atomic_step<uint64_t, uint64_t>(address, op, value, compare);
  }
}

// ---- launching -----------------------------------------------------------------------------------------------

// Default rounding and no flushing of subnormals while kernels run: another library of the process may have set
// either. Restored afterwards.
struct FloatMode {
#if defined(__x86_64__)
  unsigned saved;
  FloatMode() : saved(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~FloatMode() { __builtin_ia32_ldmxcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  FloatMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~FloatMode() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

static void begin_block(Cta* cta, uint64_t linear) {
  Launch* launch = cta->launch;
  const MhcLaunch* request = launch->request;
  cta->linear = linear;
  ++cta->serial;
  cta->index = {static_cast<unsigned>(linear % request->grid.x),
                static_cast<unsigned>(linear / request->grid.x % request->grid.y),
                static_cast<unsigned>(linear / request->grid.x / request->grid.y)};
  cta->random.seed(request->seed * 0x100000001b3ull + linear);
  cta->live = cta->threads;
  cta->ready = 0;
  cta->at_barrier = 0;
  cta->cursor = 0;
  cta->idle_yields = 0;
  cta->epoch = 0;
  memset(cta->named, 0, sizeof cta->named);
  poison_shared(launch->module, request->dynamic_shared);
  for (unsigned warp = 0; warp < cta->warp_count; ++warp) {
    cta->warps[warp] = {0, lanes_of_warp(cta, warp), 0};
    cta->warp_priority[warp] = static_cast<unsigned char>(warp);
  }
  shuffle_priorities(cta);
  for (unsigned i = 0; i < cta->threads; ++i) prepare_fiber(cta, i);
  if (launch->race != nullptr) reset_clocks(&launch->race->clocks, cta->warp_count);
}

static void check_shared_guards(Cta* cta) {
  const ModuleMap& module = cta->launch->module;
  const int64_t dynamic = broken_dynamic_guard(module, cta->launch->request->dynamic_shared);
  const int64_t fixed = broken_static_guard();
  if (dynamic < 0 && fixed < 0) return;
  MhcFinding finding = blank_finding(MHC_OOB, dynamic >= 0 ? MHC_OOB_DYNAMIC_GUARD : MHC_OOB_SHARED_GUARD);
  finding.offset = dynamic >= 0 ? dynamic : fixed;
  finding.block[0] = cta->linear;
  record(cta->launch, finding);
}

static void run_block(Cta* cta, uint64_t linear) {
  Launch* launch = cta->launch;
  begin_block(cta, linear);
  running = pick_next(cta);
  context_switch(cta->home, running->context);
  running = nullptr;
  if (!launch->stopped && cta->live != 0) {
    report_deadlock(cta);
    launch->stopped = true;
  }
  check_shared_guards(cta);
  check_stacks(cta);
  if (!launch->stopped) ++launch->request->blocks_run;
}

// A launch is opened, run in slices and closed, so that Python can handle a Ctrl-C between the slices.

struct OpenLaunch {
  Launch launch;
  Cta cta;
  uint64_t next;  // index of the next block to run
};

extern "C" void mhc_rt_close(OpenLaunch* open) {
  end_race(&open->launch);
  unmap_pages(open->cta.fibers, open->cta.threads * sizeof(Fiber));
  unmap_pages(open, sizeof(OpenLaunch));
}

// Null if there is not enough memory.
extern "C" OpenLaunch* mhc_rt_open(MhcLaunch* request) {
  OpenLaunch* open = static_cast<OpenLaunch*>(map_pages(sizeof(OpenLaunch)));
  if (open == nullptr) return nullptr;
  Cta* cta = &open->cta;
  open->launch.request = request;
  open->launch.module = map_module();
  cta->launch = &open->launch;
  cta->threads = request->block.x * request->block.y * request->block.z;
  cta->warp_count = (cta->threads + WARP - 1) / WARP;
  cta->fibers = static_cast<Fiber*>(map_pages(cta->threads * sizeof(Fiber)));
  open->launch.out_of_memory = cta->fibers == nullptr;
  if (request->race != 0 && !open->launch.out_of_memory) begin_race(&open->launch);
  if (!open->launch.out_of_memory) return open;
  mhc_rt_close(open);
  return nullptr;
}

// Runs blocks for about `nanoseconds`. 1: blocks remain. 0: the launch is over. -1: out of memory.
extern "C" int mhc_rt_run(OpenLaunch* open, unsigned long long nanoseconds) {
  FloatMode mode;
  Launch* launch = &open->launch;
  MhcLaunch* request = launch->request;
  const unsigned long long deadline = mhc_rt_nanoseconds() + nanoseconds;
  while (open->next < request->block_count && !launch->stopped && !launch->out_of_memory) {
    run_block(&open->cta, request->blocks != nullptr ? request->blocks[open->next] : open->next);
    ++open->next;
    if (mhc_rt_nanoseconds() > deadline) break;
  }
  request->completed = !launch->stopped;
  if (launch->out_of_memory) return -1;
  return open->next < request->block_count && !launch->stopped;
}
