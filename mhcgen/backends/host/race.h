// The race checker: compares every memory access of an instrumented emission with the earlier ones to the same
// bytes, and checks that the bytes belong to something and have been written.
#pragma once

#include "cluster_clocks.h"
#include "counters.h"
#include "module_map.h"
#include "report.h"
#include "scheduler.h"
#include "shadow.h"

// The latest access of a thread to the shared memory of another block of its cluster.
struct RemoteAccess {
  Access access;
  uint32_t region, offset;
};

struct Race {
  NodePool pool;
  Shadow* shadows;  // sorted by address
  unsigned shadow_count, shadow_capacity;
  Shadow* recent[256];  // by address, what was found there last; accesses tend to return to the same pages
  uint64_t stacks_low, stacks_high;
  Clocks* clocks;  // by rank
  // Only for clusters:
  ClusterClocks cluster;
  RemoteAccess* remote;  // by rank of the owner, and by rank and number of the thread
};

// Blocks of one cluster may be ordered with each other, other blocks never are.
static inline bool in_cluster(const Cluster& cluster, uint32_t serial) {
  return serial - cluster.first_serial < cluster.size;
}

// Whether cluster barriers order an access before what the running thread does now.
static bool ordered_by_phases(const Access& earlier, const Fiber* now) {
  const Cta* cta = now->cta;
  const uint32_t phase = cta->clocks->warps[now->warp()].phase[now->lane()];
  const uint32_t rank = earlier.block - cta->launch->cluster.first_serial;
  if (phase == 0 || rank >= cta->launch->cluster.size) return false;
  const PhaseClock& known = cta->launch->race->cluster.of(phase);
  return earlier.epoch < known.epoch[rank] || earlier.step <= known.step[rank][earlier.thread];
}

static bool ordered_before(const Access& earlier, const Fiber* now);

// A value that was sent is ordered before what comes after some wait for its counter, and nothing else.
static bool awaited_before(const Access& sent, const Fiber* now) {
  const Cta* cta = now->cta;
  const unsigned number = sent.flags >> COUNTER_SHIFT;
  const unsigned rank = number / Counters::PER_BLOCK;
  const Counter& counter = cta->launch->counters->of[rank][number % Counters::PER_BLOCK];
  if (rank == cta->rank && (counter.waiters[now->warp()] >> now->lane() & 1) != 0) return true;
  NodePool& pool = cta->launch->race->pool;
  for (uint32_t node = counter.waits; node != 0; node = pool.at(node).next) {
    if (ordered_before(pool.at(node).access, now)) return true;
  }
  return false;
}

// A copy belongs to nobody, not even to its thread, until that has waited for it.
static inline bool in_flight(const Access& access) {
  return (access.flags & (MHC_ACCESS_COPY | MHC_ACCESS_LANDED)) == MHC_ACCESS_COPY;
}

static bool ordered_before(const Access& earlier, const Fiber* now) {
  if ((earlier.flags & MHC_ACCESS_SEND) != 0) return awaited_before(earlier, now);
  if (in_flight(earlier)) return false;
  const Cta* cta = now->cta;
  const Clocks& clocks = *cta->clocks;
  if (earlier.block == cta->serial) {
    if (earlier.epoch < cta->epoch || earlier.thread == now->linear) return true;
    if (earlier.warp() == now->warp()) {
      if (clocks.warps[now->warp()].seen[now->lane()][earlier.lane()] >= earlier.step) return true;
    } else if (clocks.named_barriers &&
               clocks.knowledge[now->warp()].of[earlier.warp()][earlier.lane()] >= earlier.step) {
      return true;
    }
  }
  return clocks.phases && ordered_by_phases(earlier, now);
}

// ---- reports -------------------------------------------------------------------------------------------------

constexpr unsigned ACCESS_SHOWN = MHC_ACCESS_WRITE | MHC_ACCESS_ATOMIC | MHC_ACCESS_COPY | MHC_ACCESS_SEND;

static MhcFinding access_finding(MhcKind kind, MhcDetail detail, const Access& access, uint64_t size) {
  MhcFinding finding = blank_finding(kind, detail);
  put_thread(finding, 0, running);
  finding.pc[0] = access.pc;
  finding.access[0] = access.flags & ACCESS_SHOWN;
  finding.size = static_cast<uint32_t>(size);
  return finding;
}

static void put_buffer(MhcFinding& finding, const Shadow& shadow, uint64_t offset) {
  finding.region = shadow.index;
  finding.offset = static_cast<int64_t>(offset);
  const bool one_of_many = shadow.owner != nullptr && shadow.owner->launch->cluster.size > 1;
  if (one_of_many) finding.owner = static_cast<uint32_t>(shadow.owner->linear);
}

// Of the block with this serial number.
static uint64_t linear_block(const MhcLaunch* request, uint32_t serial) {
  return request->blocks != nullptr ? request->blocks[serial - 1] : serial - 1;
}

static void report_race(const Shadow& shadow, uint64_t cell, const Access& earlier, const Access& now) {
  Launch* launch = running->cta->launch;
  const MhcDetail detail = (earlier.flags & MHC_ACCESS_SEND) != 0 ? MHC_ARRIVALS_IN_FLIGHT
                           : in_flight(earlier)                  ? MHC_COPY_IN_FLIGHT
                                                                 : MHC_NO_DETAIL;
  MhcFinding finding = access_finding(MHC_RACE, detail, earlier, 1u << shadow.cell_bits);
  put_buffer(finding, shadow, cell << shadow.cell_bits);
  finding.block[0] = linear_block(launch->request, earlier.block);
  finding.thread[0] = earlier.thread;
  put_thread(finding, 1, running);
  finding.pc[1] = now.pc;
  finding.access[1] = now.flags & ACCESS_SHOWN;
  finding.scope = earlier.block != now.block     ? MHC_ACROSS_BLOCKS
                  : earlier.warp() != now.warp() ? MHC_ACROSS_WARPS
                                                 : MHC_SAME_WARP;
  record(launch, finding);
}

// ---- one cell ------------------------------------------------------------------------------------------------

static inline bool is_write(const Access& access) { return (access.flags & MHC_ACCESS_WRITE) != 0; }
static inline bool both_atomic(const Access& a, const Access& b) {
  return (a.flags & b.flags & MHC_ACCESS_ATOMIC) != 0;
}

// Puts an access in front of the reads of a cell, where the next read looks first. Atomic writes that another
// atomic replaced are kept there as well.
static void put_read(Race* race, Cell& cell, const Access& access) {
  if (cell.read.block != 0) {
    const uint32_t node = race->pool.take();
    if (node == 0) {
      running->cta->launch->out_of_memory = true;
      return;
    }
    race->pool.at(node) = {cell.read, cell.more};
    cell.more = node;
  }
  cell.read = access;
}

static void forget_reads(Race* race, Cell& cell) {
  race->pool.give_back(cell.more);
  cell.more = 0;
  cell.read.block = 0;
}

// Calls keep(access) for each read of the cell and drops those for which it is false.
template <class Keep>
static void filter_reads(Race* race, Cell& cell, Keep keep) {
  uint32_t* link = &cell.more;
  while (*link != 0) {
    Node& node = race->pool.at(*link);
    if (keep(node.access)) {
      link = &node.next;
      continue;
    }
    const uint32_t dropped = *link;
    *link = node.next;
    node.next = 0;
    race->pool.give_back(dropped);
  }
  if (cell.read.block == 0 || keep(cell.read)) return;
  cell.read.block = 0;
  if (cell.more == 0) return;
  const uint32_t first = cell.more;  // the inline record must not be empty while the list is not
  cell.read = race->pool.at(first).access;
  cell.more = race->pool.at(first).next;
  race->pool.at(first).next = 0;
  race->pool.give_back(first);
}

// Remembers a read, in as few records as decide every later question:
// - A read that is ordered before this one is dropped: a write after both is checked against this one.
// - Once blocks of two clusters have read, any write races with one of them: two records are enough.
// - Once two warps have read, one record per warp is enough: barriers that order other warps cover whole warps.
//   Not so cluster barriers, at which each thread arrives and waits for itself: a cluster keeps all its threads.
static void note_read(Race* race, Cell& cell, const Access& now) {
  const Cluster& cluster = running->cta->launch->cluster;
  uint32_t elsewhere = 0;  // a block of another cluster
  bool other_warp = false;
  filter_reads(race, cell, [&](const Access& earlier) {
    if (is_write(earlier)) return true;
    if (ordered_before(earlier, running)) return false;
    if (!in_cluster(cluster, earlier.block)) {
      elsewhere = earlier.block;
    } else if (earlier.warp() != now.warp()) {
      other_warp = true;
    }
    return true;
  });
  if (elsewhere != 0) {
    filter_reads(race, cell, [&](const Access& earlier) {
      const bool keep = earlier.block == elsewhere;
      if (keep && !is_write(earlier)) elsewhere = 0;  // one is enough
      return keep || is_write(earlier);
    });
  } else if (other_warp && race->remote == nullptr) {
    unsigned seen = 1u << now.warp();  // this read stands for its warp from now on
    filter_reads(race, cell, [&](const Access& earlier) {
      if (is_write(earlier)) return true;
      const bool first = (seen >> earlier.warp() & 1) == 0;
      seen |= 1u << earlier.warp();
      return first;
    });
  }
  put_read(race, cell, now);
}

// An atomic write that another atomic replaced, unordered: a later plain access may still race with it. At most one
// record per warp of its cluster and one of any other block are kept, so that counters of large grids stay cheap.
static void keep_replaced_atomic(Race* race, Cell& cell, const Access& replaced) {
  const Cluster& cluster = running->cta->launch->cluster;
  const bool here = in_cluster(cluster, replaced.block);
  bool elsewhere = false;
  filter_reads(race, cell, [&](const Access& earlier) {
    if (!is_write(earlier)) return true;
    if (here ? in_cluster(cluster, earlier.block) : earlier.block == replaced.block) {
      return earlier.block != replaced.block || earlier.warp() != replaced.warp();
    }
    const bool first = !elsewhere;
    elsewhere = true;
    return first;
  });
  put_read(race, cell, replaced);
}

static inline bool same_moment(const Access& a, const Access& b) {
  return a.block == b.block && a.thread == b.thread && a.epoch == b.epoch && a.step == b.step;
}

// `now` is the end of the copy that has been in flight since `earlier`.
static inline bool lands(const Access& earlier, const Access& now) {
  return (now.flags & MHC_ACCESS_LANDED) != 0 && in_flight(earlier) && earlier.block == now.block &&
         earlier.thread == now.thread;
}

static void touch_cell(Race* race, Shadow& shadow, uint64_t index, const Access& now) {
  Cell& cell = shadow.cells[index];
  // Read again before anything else happened to the cell: a write would have removed the first read.
  if (now.flags == 0 && cell.read.flags == 0 && same_moment(cell.read, now)) return;
  if (shadow.owner != nullptr) {  // what an earlier block left is gone
    const Cluster& cluster = shadow.owner->launch->cluster;
    if (cell.read.block != 0 && !in_cluster(cluster, cell.read.block)) forget_reads(race, cell);
    if (!in_cluster(cluster, cell.write.block)) cell.write.block = 0;
  }
  const bool writes = is_write(now);
  const bool reads = !writes || (now.flags & MHC_ACCESS_ATOMIC) != 0;
  if (cell.write.block != 0) {
    const bool harmless =
        both_atomic(cell.write, now) || lands(cell.write, now) || ordered_before(cell.write, running);
    if (!harmless) report_race(shadow, index, cell.write, now);
  } else if (reads && (shadow.owner != nullptr || (shadow.region->flags & MHC_NEEDS_INIT) != 0)) {
    MhcFinding finding = access_finding(MHC_UNINIT, MHC_NO_DETAIL, now, 1u << shadow.cell_bits);
    put_buffer(finding, shadow, index << shadow.cell_bits);
    record(running->cta->launch, finding);
  }
  if (!writes) {
    filter_reads(race, cell, [&](const Access& earlier) {
      if (is_write(earlier) && !ordered_before(earlier, running)) report_race(shadow, index, earlier, now);
      return true;
    });
    note_read(race, cell, now);
    return;
  }
  const Access replaced = cell.write;
  filter_reads(race, cell, [&](const Access& earlier) {
    if (both_atomic(earlier, now)) return !ordered_before(earlier, running);
    if (!ordered_before(earlier, running)) report_race(shadow, index, earlier, now);
    return false;
  });
  if (replaced.block != 0 && both_atomic(replaced, now) && !ordered_before(replaced, running)) {
    keep_replaced_atomic(race, cell, replaced);
  }
  cell.write = now;
}

// ---- shared memory of other blocks ---------------------------------------------------------------------------

// It may be touched between the start and the end of its block. Cluster barriers are what says so: the first one
// that a thread has waited for comes after all starts; the end comes after an access if some thread of the block
// has waited for a phase that the accessing thread arrived at later.

static RemoteAccess& remote_access(Race* race, const Cta* owner, unsigned rank, unsigned thread) {
  return race->remote[(uint64_t{owner->rank} * MAX_CLUSTER + rank) * MAX_THREADS + thread];
}

static void report_after_exit(const Cta* owner, const RemoteAccess& remote) {
  MhcFinding finding = access_finding(MHC_RACE, MHC_REMOTE_AFTER_EXIT, remote.access, 0);
  finding.region = remote.region;
  finding.offset = remote.offset;
  finding.owner = static_cast<uint32_t>(owner->linear);
  finding.block[0] = linear_block(owner->launch->request, remote.access.block);
  finding.thread[0] = remote.access.thread;
  finding.scope = MHC_ACROSS_BLOCKS;
  record(owner->launch, finding);
}

static void note_remote(Race* race, const Shadow& shadow, uint64_t offset, const Access& now) {
  const Cta* owner = shadow.owner;
  const Fiber* self = running;
  const RemoteAccess remote = {now, shadow.index, static_cast<uint32_t>(offset)};
  if (self->cta->clocks->warps[self->warp()].phase[self->lane()] == 0) {
    MhcFinding finding = access_finding(MHC_RACE, MHC_REMOTE_BEFORE_START, now, 0);
    put_buffer(finding, shadow, offset);
    finding.scope = MHC_ACROSS_BLOCKS;
    record(owner->launch, finding);
  }
  if (owner->live == 0) {
    report_after_exit(owner, remote);
  } else {
    remote_access(race, owner, self->cta->rank, self->linear) = remote;
  }
}

// All threads of the block have returned: the accesses of others must be ordered before that.
static void check_remote_accesses(Race* race, const Cta* owner) {
  const Cluster& cluster = owner->launch->cluster;
  const PhaseClock& known = race->cluster.of(owner->last_phase);
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    for (unsigned thread = 0; thread < owner->threads; ++thread) {
      const RemoteAccess& remote = remote_access(race, owner, rank, thread);
      const Access& access = remote.access;
      if (access.block != cluster.first_serial + rank) continue;  // none, or that of an earlier cluster
      const bool ordered = access.epoch < known.epoch[rank] || access.step <= known.step[rank][thread];
      if (owner->last_phase == 0 || !ordered) report_after_exit(owner, remote);
    }
  }
}

// ---- one access ----------------------------------------------------------------------------------------------

static Shadow* find_shadow(Race* race, uint64_t address) {
  Shadow*& recent = race->recent[address >> 12 & 255];
  if (recent != nullptr && address - recent->low < recent->high - recent->low) return recent;
  unsigned low = 0, high = race->shadow_count;
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    const Shadow& shadow = race->shadows[middle];
    if (address < shadow.low - shadow.guard) {
      high = middle;
    } else if (address >= shadow.high + shadow.guard) {
      low = middle + 1;
    } else {
      return recent = &race->shadows[middle];
    }
  }
  return nullptr;
}

// The memory of the launch that lies nearest, to say where a stray access was probably meant to go.
// Returns whether that is shared memory.
static bool name_nearest(const Race* race, uint64_t address, MhcFinding& finding) {
  uint64_t best = ~uint64_t{0};
  bool shared = false;
  for (unsigned i = 0; i < race->shadow_count; ++i) {
    const Shadow& shadow = race->shadows[i];
    const uint64_t distance = address < shadow.low ? shadow.low - address : address - shadow.low;
    if (distance >= best) continue;
    best = distance;
    shared = shadow.owner != nullptr;
    put_buffer(finding, shadow, address - shadow.low);
  }
  return shared;
}

// The access hits no region: constants of the module are fine, the rest is not.
static void note_stray_access(Launch* launch, uint64_t address, uint64_t size, const Access& now) {
  const ModuleMap& module = launch->module;
  const bool in_shared = in_segments(launch, address);
  if (!in_shared) {
    for (unsigned i = 0; i < module.segments; ++i) {
      if (address >= module.segment_low[i] && address < module.segment_high[i]) return;
    }
  }
  MhcFinding finding = access_finding(MHC_OOB, MHC_OOB_WILD, now, size);
  const bool null_pointer = address < 65536;
  if (!null_pointer && (name_nearest(launch->race, address, finding) || in_shared)) finding.detail = MHC_OOB_SHARED;
  record(launch, finding);
  if (!in_shared) stop_launch();
}

static void count_access(MhcRegion* region, uint64_t offset, uint64_t size, bool write) {
  uint32_t* counts = write ? region->stores : region->loads;
  for (uint64_t i = offset / region->element; i <= (offset + size - 1) / region->element; ++i) ++counts[i];
}

static Access access_of(const Fiber* fiber, unsigned flags, uint32_t pc) {
  const Cta* cta = fiber->cta;
  return {cta->serial,
          cta->epoch,
          cta->clocks->step(fiber->warp(), fiber->lane()),
          pc,
          static_cast<uint16_t>(fiber->linear),
          static_cast<uint16_t>(flags)};
}

static void note_access(void* pointer, uint64_t size, unsigned flags, const void* pc) {
  if (running == nullptr || size == 0) return;
  Launch* launch = running->cta->launch;
  Race* race = launch->race;
  if (race == nullptr) return;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (address >= race->stacks_low && address < race->stacks_high) return;
  const Fiber* self = running;
  const Access now = access_of(self, flags, module_offset(launch, pc));
  Shadow* shadow = find_shadow(race, address);
  if (shadow == nullptr) {
    note_stray_access(launch, address, size, now);
    return;
  }
  const uint64_t offset = address - shadow->low;
  if (address < shadow->low || address + size > shadow->high) {
    MhcFinding finding = access_finding(MHC_OOB, shadow->owner != nullptr ? MHC_OOB_SHARED : MHC_OOB_GUARD, now, size);
    put_buffer(finding, *shadow, offset);
    record(launch, finding);
    return;
  }
  // A counter, not cluster barriers, says when a block may be sent values: arrivals.h.
  const bool remote = shadow->owner != nullptr && shadow->owner != self->cta;
  if (remote && (flags & MHC_ACCESS_SEND) == 0) note_remote(race, *shadow, offset, now);
  const bool writes = (flags & MHC_ACCESS_WRITE) != 0;
  if (shadow->region->loads != nullptr) count_access(shadow->region, offset, size, writes);
  if ((shadow->region->flags & MHC_READONLY) != 0) {
    if (!writes) return;  // without writes there is no race
    MhcFinding finding = access_finding(MHC_WRITE_TO_CONST, MHC_NO_DETAIL, now, size);
    put_buffer(finding, *shadow, offset);
    record(launch, finding);
    return;
  }
  const unsigned fits = static_cast<unsigned>(__builtin_ctzll(offset | size | 1u << COARSEST));
  if (fits < shadow->cell_bits && !refine_shadow(*shadow, race->pool, fits)) {
    launch->out_of_memory = true;
    stop_launch();
  }
  const uint64_t end = (offset + size - 1) >> shadow->cell_bits;
  for (uint64_t i = offset >> shadow->cell_bits; i <= end; ++i) touch_cell(race, *shadow, i, now);
}

// ---- a launch ------------------------------------------------------------------------------------------------

static bool add_shadow(Race* race, const ModuleMap& module, MhcRegion* region, uint32_t index, Cta* owner) {
  Shadow shadow = {};
  shadow.region = region;
  shadow.index = index;
  shadow.guard = region->guard;
  shadow.owner = owner;
  shadow.low = region->base;
  if (owner != nullptr) shadow.low += reinterpret_cast<uint64_t>(owner->shared);
  if ((region->flags & MHC_SHARED_DYNAMIC) != 0) shadow.low += module.dynamic_offset;
  shadow.high = shadow.low + region->size;
  if ((region->flags & MHC_READONLY) == 0 && !create_shadow(shadow)) return false;
  unsigned at = race->shadow_count++;
  for (; at > 0 && race->shadows[at - 1].low > shadow.low; --at) race->shadows[at] = race->shadows[at - 1];
  race->shadows[at] = shadow;
  return true;
}

static bool add_shadows(Launch* launch) {
  const MhcLaunch* request = launch->request;
  for (uint32_t i = 0; i < request->region_count; ++i) {
    MhcRegion* region = &request->regions[i];
    const bool dynamic = (region->flags & MHC_SHARED_DYNAMIC) != 0;
    if (dynamic && (launch->module.dynamic_room == 0 || region->size == 0)) continue;
    const bool shared = dynamic || (region->flags & MHC_SHARED_STATIC) != 0;
    for (unsigned rank = 0; rank < (shared ? launch->cluster.size : 1); ++rank) {
      Cta* owner = shared ? &launch->cluster.ctas[rank] : nullptr;
      if (!add_shadow(launch->race, launch->module, region, i, owner)) return false;
    }
  }
  return true;
}

static constexpr uint64_t REMOTE_BYTES = uint64_t{MAX_CLUSTER} * MAX_CLUSTER * MAX_THREADS * sizeof(RemoteAccess);

// False if there is not enough memory.
static bool begin_race(Launch* launch) {
  const MhcLaunch* request = launch->request;
  const Cluster& cluster = launch->cluster;
  Race* race = launch->race = static_cast<Race*>(map_pages(sizeof(Race)));
  if (race == nullptr) return false;
  race->stacks_low = reinterpret_cast<uint64_t>(request->stacks);
  race->stacks_high = race->stacks_low + request->stack_bytes * cluster.ctas[0].threads * cluster.size;
  race->clocks = static_cast<Clocks*>(map_pages(cluster.size * sizeof(Clocks)));
  race->shadow_capacity = request->region_count * cluster.size;
  race->shadows = static_cast<Shadow*>(map_pages(race->shadow_capacity * sizeof(Shadow)));
  if (race->clocks == nullptr || race->shadows == nullptr) return false;
  if (request->cluster != 0) {
    race->remote = static_cast<RemoteAccess*>(map_pages(REMOTE_BYTES));
    if (race->remote == nullptr) return false;
  }
  for (unsigned rank = 0; rank < cluster.size; ++rank) cluster.ctas[rank].clocks = &race->clocks[rank];
  return add_shadows(launch);
}

static uint64_t unwritten_bytes(const Shadow& shadow) {
  uint64_t bytes = 0;
  const uint64_t cell = uint64_t{1} << shadow.cell_bits;
  for (uint64_t at = 0; at < shadow.high - shadow.low; at += cell) {
    const uint64_t rest = shadow.high - shadow.low - at;
    if (shadow.cells[at >> shadow.cell_bits].write.block == 0) bytes += rest < cell ? rest : cell;
  }
  return bytes;
}

static void end_race(Launch* launch) {
  Race* race = launch->race;
  if (race == nullptr) return;
  for (unsigned i = 0; i < race->shadow_count; ++i) {
    Shadow& shadow = race->shadows[i];
    if (shadow.cells == nullptr) continue;
    if ((shadow.region->flags & MHC_NEEDS_INIT) != 0) shadow.region->unwritten = unwritten_bytes(shadow);
    unmap_pages(shadow.cells, shadow_bytes(shadow));
  }
  unmap_pages(race->shadows, race->shadow_capacity * sizeof(Shadow));
  unmap_pages(race->clocks, launch->cluster.size * sizeof(Clocks));
  unmap_pages(race->remote, REMOTE_BYTES);
  race->pool.release();
  unmap_pages(race, sizeof(Race));
  launch->race = nullptr;
}
