// The runtime of the host backend: runs the clusters of a launch one after another, one fiber per CUDA thread.
// Plain C++ without the standard library, so that a build needs a compiler and libc only.

#include <math.h>
#include <time.h>

#include "copies.h"
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

extern "C" void mhc_rt_cluster_arrive(int release, int line) {
  MHC_NOTE_CALL_SITE();
  arrive_at_cluster(release != 0, line);
}

extern "C" void mhc_rt_cluster_wait(int line) {
  MHC_NOTE_CALL_SITE();
  wait_at_cluster(line);
}

extern "C" void* mhc_rt_map_shared(void* mine, int rank, int line) {
  MHC_NOTE_CALL_SITE();
  return map_shared(mine, rank, line);
}

extern "C" void mhc_rt_copy_async(void* to, const void* from, int line) {
  MHC_NOTE_CALL_SITE();
  copy_async(to, from, line, __builtin_return_address(0));
}

extern "C" void mhc_rt_copies_wait(void) { wait_for_copies(running); }

extern "C" void mhc_rt_arrivals_expect(unsigned long long* counter, int bytes, int line) {
  MHC_NOTE_CALL_SITE();
  expect_arrivals(counter, bytes, line, __builtin_return_address(0));
}

extern "C" void mhc_rt_send(void* to, unsigned long long value, unsigned bytes, unsigned long long* counter, int rank,
                            int line) {
  MHC_NOTE_CALL_SITE();
  send(to, value, bytes, counter, rank, line, __builtin_return_address(0));
}

extern "C" void mhc_rt_arrivals_wait(unsigned long long* counter, int line) {
  MHC_NOTE_CALL_SITE();
  wait_for_arrivals(counter, line);
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
  cta->index = {static_cast<unsigned>(linear % request->grid.x),
                static_cast<unsigned>(linear / request->grid.x % request->grid.y),
                static_cast<unsigned>(linear / request->grid.x / request->grid.y)};
  cta->random.seed(request->seed * 0x100000001b3ull + linear);
  cta->live = cta->threads;
  cta->ready = 0;
  cta->at_barrier = 0;
  cta->cursor = 0;
  cta->epoch = 0;
  cta->last_phase = 0;
  cta->started = cta->ended = false;
  memset(cta->named, 0, sizeof cta->named);
  memset(cta->arrivals, 0, sizeof cta->arrivals);
  memset(cta->waits, 0, sizeof cta->waits);
  for (unsigned warp = 0; warp < cta->warp_count; ++warp) {
    cta->warps[warp] = {0, lanes_of_warp(cta, warp), 0};
    cta->warp_priority[warp] = static_cast<unsigned char>(warp);
  }
  shuffle_priorities(cta);
  for (unsigned i = 0; i < cta->threads; ++i) prepare_fiber(cta, i);
  if (cta->clocks != nullptr) reset_clocks(cta->clocks, cta->warp_count);
}

// Only now, so that what other blocks of the cluster wrote too early is lost, as it may be on a GPU.
static void start_block(Cta* cta) {
  const Launch* launch = cta->launch;
  cta->started = true;
  poison_shared(launch->module, cta->shared, launch->request->dynamic_shared);
  fill_shared_guards(launch->module, cta->shared, launch->request->dynamic_shared);
}

static void check_shared_guards(Cta* cta) {
  const Launch* launch = cta->launch;
  const int64_t dynamic = broken_dynamic_guard(launch->module, cta->shared, launch->request->dynamic_shared);
  const int64_t fixed = broken_static_guard(launch->module, cta->shared);
  if (dynamic < 0 && fixed < 0) return;
  MhcFinding finding = blank_finding(MHC_OOB, dynamic >= 0 ? MHC_OOB_DYNAMIC_GUARD : MHC_OOB_SHARED_GUARD);
  finding.offset = dynamic >= 0 ? dynamic : fixed;
  finding.block[0] = cta->linear;
  record(cta->launch, finding);
}

static void end_block(Cta* cta) {
  const Launch* launch = cta->launch;
  cta->ended = true;
  check_shared_guards(cta);
  check_awaited(cta);
  if (launch->cluster.size == 1) return;
  if (launch->race != nullptr) check_remote_accesses(launch->race, cta);
  poison_shared(launch->module, cta->shared, launch->request->dynamic_shared);  // what others read too late is lost
}

// The cluster of the blocks from position `first` on in the order to run.
static void begin_cluster(Launch* launch, uint64_t first) {
  const MhcLaunch* request = launch->request;
  Cluster& cluster = launch->cluster;
  cluster.first_serial = static_cast<uint32_t>(first) + 1;
  cluster.phase = 0;
  cluster.arrived = 0;
  cluster.live = cluster.pending = cluster.size * cluster.ctas[0].threads;
  cluster.random.seed(request->seed * 0x1000193ull + first);
  for (unsigned rank = 0; rank < cluster.size; ++rank) cluster.priority[rank] = static_cast<unsigned char>(rank);
  launch->idle_yields = 0;
  if (launch->race != nullptr) reset_cluster_clocks(&launch->race->cluster);
  reset_counters(launch);
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    cluster.ctas[rank].serial = cluster.first_serial + rank;
    begin_block(&cluster.ctas[rank], request->blocks != nullptr ? request->blocks[first + rank] : first + rank);
  }
  if (cluster.size == 1) start_block(&cluster.ctas[0]);
}

static void run_cluster(Launch* launch, uint64_t first) {
  Cluster& cluster = launch->cluster;
  begin_cluster(launch, first);
  running = pick_next(&cluster.ctas[launch->request->order == MHC_DESCENDING ? cluster.size - 1 : 0]);
  context_switch(launch->home, running->context);
  running = nullptr;
  if (!launch->stopped && cluster.live != 0) {
    report_deadlock(launch);
    launch->stopped = true;
  }
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    Cta* cta = &cluster.ctas[rank];
    if (cta->started && !cta->ended) check_shared_guards(cta);
    check_stacks(cta);
  }
  if (!launch->stopped) launch->request->blocks_run += cluster.size;
}

// A launch is opened, run in slices and closed, so that Python can handle a Ctrl-C between the slices.

struct OpenLaunch {
  Launch launch;
  Cta* ctas;
  Fiber* fibers;
  uint64_t next;  // index of the next block to run
};

static uint64_t threads_of(const MhcLaunch* request) {
  return uint64_t{request->block.x} * request->block.y * request->block.z;
}

static unsigned cluster_size(const MhcLaunch* request) { return request->cluster != 0 ? request->cluster : 1; }

// Whether several CTAs can be alive at once (see module_map.h).
extern "C" int mhc_rt_has_clusters(void) { return map_module().thread_segment == nullptr; }

extern "C" void mhc_rt_close(OpenLaunch* open) {
  Launch* launch = &open->launch;
  const uint64_t size = cluster_size(launch->request);
  end_race(launch);
  release_held(launch);
  unmap_pages(launch->counters, sizeof(Counters));
  unmap_pages(launch->segments, launch->segments_bytes);
  unmap_pages(open->fibers, size * threads_of(launch->request) * sizeof(Fiber));
  unmap_pages(open->ctas, size * sizeof(Cta));
  unmap_pages(open, sizeof(OpenLaunch));
}

static bool prepare_launch(OpenLaunch* open) {
  Launch* launch = &open->launch;
  Cluster& cluster = launch->cluster;
  const unsigned threads = static_cast<unsigned>(threads_of(launch->request));
  open->ctas = static_cast<Cta*>(map_pages(cluster.size * sizeof(Cta)));
  open->fibers = static_cast<Fiber*>(map_pages(uint64_t{cluster.size} * threads * sizeof(Fiber)));
  if (open->ctas == nullptr || open->fibers == nullptr) return false;
  cluster.ctas = open->ctas;
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    Cta* cta = &cluster.ctas[rank];
    cta->launch = launch;
    cta->rank = rank;
    cta->threads = threads;
    cta->warp_count = (threads + WARP - 1) / WARP;
    cta->fibers = open->fibers + rank * threads;
  }
  return allocate_segments(launch) && (launch->request->race == 0 || begin_race(launch));
}

// Null if there is not enough memory.
extern "C" OpenLaunch* mhc_rt_open(MhcLaunch* request) {
  OpenLaunch* open = static_cast<OpenLaunch*>(map_pages(sizeof(OpenLaunch)));
  if (open == nullptr) return nullptr;
  open->launch.request = request;
  open->launch.module = map_module();
  open->launch.cluster.size = cluster_size(request);
  if (prepare_launch(open)) return open;
  mhc_rt_close(open);
  return nullptr;
}

// Runs clusters for about `nanoseconds`. 1: blocks remain. 0: the launch is over. -1: out of memory.
extern "C" int mhc_rt_run(OpenLaunch* open, unsigned long long nanoseconds) {
  FloatMode mode;
  Launch* launch = &open->launch;
  MhcLaunch* request = launch->request;
  const unsigned long long deadline = mhc_rt_nanoseconds() + nanoseconds;
  while (open->next < request->block_count && !launch->stopped && !launch->out_of_memory) {
    run_cluster(launch, open->next);
    open->next += launch->cluster.size;
    if (mhc_rt_nanoseconds() > deadline) break;
  }
  request->completed = !launch->stopped;
  if (launch->out_of_memory) return -1;
  return open->next < request->block_count && !launch->stopped;
}
