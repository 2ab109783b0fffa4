// What the race checker remembers of the accesses to a few bytes, and when one of them is ordered before another.
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
