// Launches without Python: what shim/cuda_runtime.h calls. Linked with runtime.cpp into the launcher of an emission.
// Findings are not described here, they only fail the launch: the differential test of an emission tells them.

#include <pthread.h>
#include <sys/mman.h>

#include "launch_abi.h"

struct OpenLaunch;
extern "C" OpenLaunch* mhc_rt_open(MhcLaunch* request);
extern "C" int mhc_rt_run(OpenLaunch* open, unsigned long long nanoseconds);
extern "C" void mhc_rt_close(OpenLaunch* open);
extern "C" int mhc_rt_has_clusters(void);

// No emission has dynamic shared memory.
extern "C" void mhc_unit_shared(char** low, char** high) { *low = *high = nullptr; }

static constexpr uint64_t STACK_BYTES = 128 * 1024;
static constexpr uint32_t MAX_CLUSTER = 16;
static constexpr uint32_t MAX_FINDINGS = 16;
static constexpr uint32_t MAX_WAITS = 64 * MAX_CLUSTER;

enum : int { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_CLUSTER = 912, LAUNCH_FAILURE = 719 };  // as in cudaError_t

// The runtime has one running fiber, so launches take turns.
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void* map(uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// Stacks are kept for the next launch; one more lies below the lowest, for it to overflow into.
static char* stacks_for(uint64_t threads) {
  static char* arena = nullptr;
  static uint64_t size = 0;
  const uint64_t wanted = (threads + 1) * STACK_BYTES;
  if (wanted > size) {
    if (arena != nullptr) munmap(arena, size);
    arena = static_cast<char*>(map(wanted));
    size = arena != nullptr ? wanted : 0;
    if (arena == nullptr) return nullptr;
    madvise(arena, size, MADV_NOHUGEPAGE);  // each stack uses its first pages only
  }
  return arena + STACK_BYTES;
}

// Blocks in the order to run: cluster by cluster, by rank.
static void list_blocks(uint64_t* blocks, MhcDim3 grid, MhcDim3 cluster) {
  uint64_t at = 0;
  for (unsigned z = 0; z < grid.z; z += cluster.z)
    for (unsigned y = 0; y < grid.y; y += cluster.y)
      for (unsigned x = 0; x < grid.x; x += cluster.x)
        for (unsigned k = 0; k < cluster.z; ++k)
          for (unsigned j = 0; j < cluster.y; ++j)
            for (unsigned i = 0; i < cluster.x; ++i)
              blocks[at++] = (uint64_t{z + k} * grid.y + y + j) * grid.x + x + i;
}

static int run(MhcLaunch* request) {
  OpenLaunch* open = mhc_rt_open(request);
  if (open == nullptr) return OUT_OF_MEMORY;
  int status;
  do status = mhc_rt_run(open, 1ull << 62);
  while (status == 1);
  mhc_rt_close(open);
  if (status != 0) return OUT_OF_MEMORY;
  return request->completed != 0 && request->finding_count == 0 ? SUCCESS : LAUNCH_FAILURE;
}

extern "C" int mhc_rt_launch(void (*entry)(void**), void** arguments, MhcDim3 grid, MhcDim3 block, MhcDim3 cluster) {
  static MhcFinding findings[MAX_FINDINGS];
  static MhcWait waits[MAX_WAITS];
  const uint32_t size = cluster.x * cluster.y * cluster.z;
  if (size == 0 || size > MAX_CLUSTER || (size > 1 && mhc_rt_has_clusters() == 0)) return INVALID_CLUSTER;
  if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0) return INVALID_CLUSTER;
  pthread_mutex_lock(&turn);
  MhcLaunch request = {};
  request.entry = entry;
  request.arguments = arguments;
  request.findings = findings;
  request.waits = waits;
  request.stack_bytes = STACK_BYTES;
  request.block_count = uint64_t{grid.x} * grid.y * grid.z;
  request.grid = grid;
  request.block = block;
  request.order = MHC_ASCENDING;
  request.finding_capacity = MAX_FINDINGS;
  request.wait_capacity = MAX_WAITS;
  request.cluster = size > 1 ? size : 0;
  request.stacks = stacks_for(uint64_t{block.x} * block.y * block.z * size);
  const uint64_t bytes = request.block_count * sizeof(uint64_t);
  uint64_t* blocks = size > 1 ? static_cast<uint64_t*>(map(bytes)) : nullptr;
  int status = OUT_OF_MEMORY;
  if (request.stacks != nullptr && (size == 1 || blocks != nullptr)) {
    if (blocks != nullptr) list_blocks(blocks, grid, cluster);
    request.blocks = blocks;
    status = run(&request);
  }
  if (blocks != nullptr) munmap(blocks, bytes);
  pthread_mutex_unlock(&turn);
  return status;
}
