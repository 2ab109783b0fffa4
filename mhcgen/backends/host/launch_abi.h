// What the Python side and the runtime exchange for one launch; abi.py mirrors these structs field by field.
#pragma once

#include <stdint.h>

#include "device_api.h"

enum MhcRegionFlags : uint32_t {
  MHC_READONLY = 1,        // writing is a finding
  MHC_NEEDS_INIT = 2,      // reading before a write is a finding
  MHC_SHARED_STATIC = 4,   // `base` is an offset into the module's thread-local segment
  MHC_SHARED_DYNAMIC = 8,  // the launch's dynamic shared memory; `base` is unused
};

// One buffer of global memory (with its guard bands) or one variable of shared memory.
struct MhcRegion {
  uint64_t base;
  uint64_t size;
  uint64_t guard;   // bytes of guard band on either side
  uint32_t* loads;  // accesses per element, or null where they are not counted
  uint32_t* stores;
  uint64_t unwritten;  // out: bytes of a MHC_NEEDS_INIT region that nobody wrote
  uint32_t flags;
  uint32_t element;  // bytes per counted element
};

enum MhcOrder : uint32_t { MHC_ASCENDING, MHC_DESCENDING, MHC_RANDOM, MHC_WARP_GREEDY };

enum MhcKind : uint32_t {
  MHC_RACE = 1,
  MHC_UNINIT,
  MHC_OOB,
  MHC_WRITE_TO_CONST,
  MHC_BARRIER,
  MHC_MASK,
  MHC_SHUFFLE,
  MHC_DEADLOCK,
  MHC_STACK,
  MHC_TRAP,
  MHC_MISALIGNED,
  MHC_COPY,
  MHC_ARRIVALS,
};

// Which of several rules of one kind was broken; findings.py has the sentence for each.
enum MhcDetail : uint32_t {
  MHC_NO_DETAIL = 0,
  MHC_REMOTE_BEFORE_START,  // another block's shared memory was touched, and that block may not have started
  MHC_REMOTE_AFTER_EXIT,    // ... or may have ended
  MHC_BARRIER_LINES,       // threads met at a block barrier from different lines
  MHC_BARRIER_KINDS,       // ... or with different functions
  MHC_BARRIER_EXITED,      // ... or after some had returned
  MHC_BARRIER_DIVERGED,    // part of a warp waits there, part of it elsewhere
  MHC_BARRIER_NAMED_ARGUMENTS,  // a number or count that bar.sync does not take
  MHC_BARRIER_NAMED_COUNTS,     // threads disagree on how many must come
  MHC_BARRIER_NAMED_PARTIAL,    // released by a part of a warp
  MHC_CLUSTER_ARRIVED_TWICE,    // at a cluster barrier, without a wait in between
  MHC_CLUSTER_NOT_ARRIVED,      // waited there without having arrived
  MHC_CLUSTER_LINES,            // lanes of a warp came there from different lines
  MHC_MASK_WITHOUT_SELF,   // a lane passed a mask that lacks it
  MHC_MASK_LINES,          // lanes met from different lines
  MHC_MASK_LANES_ABSENT,   // a lane of the mask waits elsewhere
  MHC_MASK_WIDTH,          // a width that is no power of two up to 32
  MHC_SHUFFLE_INACTIVE,    // the source lane does not take part
  MHC_OOB_GUARD,           // in the guard band of a buffer
  MHC_OOB_WILD,            // in no memory of the launch at all; it was stopped
  MHC_OOB_SHARED,          // in the shared segment, outside every variable
  MHC_OOB_SHARED_GUARD,    // bytes behind all static shared variables changed
  MHC_OOB_INDEX,           // an index outside a declared array; the launch was stopped
  MHC_OOB_DYNAMIC_GUARD,   // bytes behind the dynamic shared memory changed
  MHC_OOB_RANK,            // no block of the cluster has this rank; the launch was stopped
  MHC_OOB_MAP,             // an address to be mapped to another block is no shared memory of this one; likewise
  MHC_DEADLOCK_WAITING,    // every live thread waits
  MHC_DEADLOCK_SPINNING,   // threads only yield (__nanosleep), nothing else happens
  MHC_COPY_IN_FLIGHT,      // memory was touched that an asynchronous copy may be writing
  MHC_COPY_MEMORY,         // a copy that does not go from global to own shared memory; the launch was stopped
  MHC_COPY_NOT_AWAITED,    // a thread returned before its copies had landed
  MHC_ARRIVALS_IN_FLIGHT,  // memory was touched that a value is being sent to
  MHC_ARRIVALS_BYTES,      // a counter was told to expect a number of bytes that it cannot count; stopped
  MHC_ARRIVALS_TWICE,      // a counter was initialised again
  MHC_ARRIVALS_TOO_MANY,   // more counters than the executor keeps; the launch was stopped
  MHC_ARRIVALS_NO_START,   // a send to, or a wait for, a counter that nobody initialised; the launch was stopped
  MHC_ARRIVALS_UNORDERED,  // ... that is initialised, but nothing orders that before
  MHC_ARRIVALS_EXCESS,     // more bytes than the counter expects
  MHC_ARRIVALS_AFTER_EXIT,   // sent to a block that has ended
  MHC_ARRIVALS_NOT_AWAITED,  // a block ended, and none of its threads waited for what was to arrive
};

enum MhcScope : uint32_t { MHC_NO_SCOPE, MHC_SAME_WARP, MHC_ACROSS_WARPS, MHC_ACROSS_BLOCKS };

enum MhcAccessFlags : uint32_t {
  MHC_ACCESS_WRITE = 1,
  MHC_ACCESS_ATOMIC = 2,
  MHC_ACCESS_COPY = 4,     // a write of an asynchronous copy
  MHC_ACCESS_SEND = 8,     // ... of a value sent to a counter
  MHC_ACCESS_LANDED = 16,  // the copy is done
};

constexpr uint32_t MHC_NONE = 0xffffffffu;

// Index 0 describes the earlier or waiting side, index 1 the later or missing one.
struct MhcFinding {
  uint64_t block[2];  // linear block ids
  int64_t offset;     // bytes from the start of the region; negative in the front guard band
  uint64_t value;     // address, array index or lanes, by detail
  uint32_t thread[2];  // linear thread ids, MHC_NONE where there is none
  uint32_t line[2];    // source lines of barriers and warp operations, else 0
  uint32_t pc[2];      // return addresses as offsets into the module, else 0
  uint32_t access[2];  // MhcAccessFlags
  uint32_t kind, detail, scope;
  uint32_t region;  // index into MhcLaunch::regions, MHC_NONE where there is none
  uint32_t size;    // bytes of the access
  uint32_t mask;
  uint32_t count;  // how often it happened
  uint32_t owner;  // in a cluster, the block whose shared memory it is; else MHC_NONE
};

enum MhcWaitKind : uint32_t { MHC_WAIT_BLOCK, MHC_WAIT_WARP, MHC_WAIT_NAMED, MHC_WAIT_CLUSTER, MHC_WAIT_ARRIVALS };

// After a deadlock: which lanes of which warp wait where. For a named barrier, `op` is its number and `mask` the
// count of threads it waits for; for a counter of arrivals, the bytes that are missing and those it expects. `block`
// is MHC_NONE where only one is alive.
struct MhcWait {
  uint32_t block, warp, lanes, kind, op, mask, line, pc;
};

struct MhcLaunch {
  void (*entry)(void**);
  void** arguments;
  const uint64_t* blocks;  // linear ids in the order to run (cluster by cluster, by rank); null for all, ascending
  MhcRegion* regions;
  MhcFinding* findings;
  MhcWait* waits;
  char* stacks;  // one stack per thread of a cluster
  uint64_t stack_bytes;
  uint64_t block_count;
  uint64_t dynamic_shared;
  uint64_t seed;
  uint64_t switches;    // out: changes of fiber
  uint64_t blocks_run;  // out: blocks that ended
  MhcDim3 grid;
  MhcDim3 block;
  uint32_t order;
  uint32_t race;  // 1: the module is instrumented
  uint32_t region_count;
  uint32_t finding_capacity;
  uint32_t finding_count;  // out
  uint32_t suppressed;     // out: findings that did not fit
  uint32_t wait_capacity;
  uint32_t wait_count;  // out
  uint32_t completed;   // out: 1 unless the launch was stopped
  uint32_t cluster;     // blocks per cluster, 0 for a launch without
};
