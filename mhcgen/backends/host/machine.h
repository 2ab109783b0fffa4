// The state of a launch: fibers, warps, CTAs. Everything a CTA owns is in `Cta`, since those of a cluster are alive at
// once; only `running` is global, since one fiber runs at any time. A block without a cluster is a cluster of one.
#pragma once

#include <stdint.h>
#include <sys/mman.h>

#include "fibers.h"
#include "launch_abi.h"

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_WARPS = MAX_THREADS / WARP;
constexpr unsigned MAX_CLUSTER = 16;  // blocks; above 8 a GPU wants to be asked
// The words at the bottom of every stack. Frames are written densely enough that an overflow changes some of them.
constexpr uint64_t STACK_CANARY = 0x9e3779b97f4a7c15ull;
constexpr unsigned CANARY_WORDS = 32;

struct Cta;
struct Launch;
struct Race;
struct Clocks;
struct HeldWrite;
struct HeldChunk;
struct Counters;

enum class State : uint8_t {
  Ready,
  AtBlockBarrier,
  AtNamedBarrier,
  AtClusterBarrier,
  AtCounter,
  InWarpOperation,
  Done,
};

struct WarpCall {
  unsigned op, mask, argument;
  int width, line;
  uint64_t value;
};

struct BlockCall {
  unsigned op;  // of a block barrier; the number of a named one, or of the counter of arrivals
  int predicate, line;
};

// The first half of a cluster barrier. Its phases count from 1.
struct Arrival {
  uint32_t phase;
  bool waited;  // the second half is done too
  int line;
  uint32_t call_site;
};

// Where the first lane of a warp came to one half of a phase.
struct Meeting {
  uint32_t phase, call_site;
  int line;
  unsigned thread;
};

struct Fiber {
  Context context;
  Cta* cta;
  MhcDim3 index;
  unsigned linear;
  State state;
  uint32_t call_site;  // of the latest barrier or warp operation, an offset into the module
  BlockCall block_call;
  WarpCall warp_call;
  Arrival arrival;  // at the cluster barrier, the latest
  HeldWrite* copies;  // asynchronous ones that it has not waited for, the newest first
  uint64_t result;  // of the barrier or warp operation that let it go on

  unsigned lane() const { return linear % WARP; }
  unsigned warp() const { return linear / WARP; }
};

struct Warp {
  unsigned ready;    // lanes that may run
  unsigned live;     // lanes that have not returned
  unsigned waiting;  // lanes in a warp operation
};

// bar.sync with a number and a count of threads.
struct NamedBarrier {
  static constexpr unsigned COUNT = 16;
  unsigned expected;  // threads that must come, as the first one said
  unsigned arrived;
  unsigned lanes[MAX_WARPS];  // those that have arrived
};

// xorshift64*, seeded so that neighbouring seeds give unlike sequences.
struct Random {
  uint64_t state;
  void seed(uint64_t value) {
    value += STACK_CANARY;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    state = (value ^ value >> 31) | 1;
  }
  unsigned below(unsigned bound) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<unsigned>((state * 0x2545f4914f6cdd1dull >> 33) % bound);
  }
};

// Where the module lies in memory, and what its thread-local segment holds: the shared memory of a CTA.
struct ModuleMap {
  static constexpr unsigned MAX_SEGMENTS = 8;
  uint64_t base;
  uint64_t segment_low[MAX_SEGMENTS], segment_high[MAX_SEGMENTS];
  unsigned segments;
  uint64_t shared_bytes;
  uint64_t shared_align, shared_skew;  // a segment starts `skew` bytes behind a multiple of `align`
  uint64_t guard_offset;               // of the guard behind the static variables
  uint64_t dynamic_offset;
  uint64_t dynamic_room;  // 0 if the emission declares no dynamic shared memory
  char* thread_segment;   // of this OS thread; null where every CTA can have a segment of its own
};

struct Cta {
  Launch* launch;
  Fiber* fibers;
  char* shared;    // its segment
  Clocks* clocks;  // null unless the module is instrumented
  Warp warps[MAX_WARPS];
  NamedBarrier named[NamedBarrier::COUNT];
  Meeting arrivals[MAX_WARPS], waits[MAX_WARPS];  // at the cluster barrier
  unsigned char warp_priority[MAX_WARPS];         // for MHC_WARP_GREEDY, first is first
  Random random;
  MhcDim3 index;
  uint64_t linear;      // of this block in the grid
  uint32_t serial;      // counts the blocks of the launch from 1
  unsigned rank;        // of this block in its cluster
  unsigned threads, warp_count;
  unsigned live;        // threads that have not returned
  unsigned ready;       // threads that may run
  unsigned at_barrier;  // threads that wait at the block barrier
  unsigned cursor;      // where the next sweep of the ascending or descending order starts
  uint32_t epoch;       // block barriers passed
  uint32_t last_phase;  // the latest cluster barrier that the end of any of its threads is ordered after
  bool started;         // some thread has run
  bool ended;           // all threads have returned, and the guards have been checked
};

// The blocks that run together. Those of a launch run one cluster after another.
struct Cluster {
  Cta* ctas;  // by rank
  unsigned size;
  uint32_t first_serial;  // of the block of rank 0
  uint32_t phase;         // cluster barriers completed
  unsigned live;          // threads that have not returned
  unsigned pending;       // those of them that have not arrived at the next cluster barrier
  unsigned arrived;       // arrivals there, also of threads that have returned since
  Random random;
  unsigned char priority[MAX_CLUSTER];  // of ranks, for MHC_WARP_GREEDY
};

// Memory for writes that have not landed yet, reused within a launch.
struct HeldPool {
  HeldWrite* free;
  HeldChunk* chunks;
};

struct Launch {
  MhcLaunch* request;
  ModuleMap module;
  Context home;  // of the OS thread
  Cluster cluster;
  char* segments;  // memory of the segments of the cluster
  uint64_t segments_bytes;
  Race* race;            // null unless the module is instrumented
  Counters* counters;    // null until the first one is initialised
  HeldPool held;
  unsigned idle_yields;  // yields since anything else happened
  bool stopped;
  bool out_of_memory;
};

static Fiber* running;

// Zeroed memory that costs nothing until it is touched; null if there is none.
static inline void* map_pages(uint64_t bytes) {
  if (bytes == 0) bytes = 1;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

static inline void unmap_pages(void* memory, uint64_t bytes) {
  if (memory != nullptr) munmap(memory, bytes != 0 ? bytes : 1);
}
