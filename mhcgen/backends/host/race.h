// The race checker: compares every memory access of an instrumented emission with the earlier ones to the same
// bytes, and checks that the bytes belong to something and have been written.
#pragma once

#include "module_map.h"
#include "race_clocks.h"
#include "report.h"
#include "scheduler.h"
#include "shadow.h"

struct Race {
  Clocks clocks;
  NodePool pool;
  Shadow* shadows;  // sorted by address
  unsigned shadow_count;
  Shadow* recent[64];  // by address, what was found there last; accesses tend to return to the same pages
  uint64_t stacks_low, stacks_high;
};

static bool ordered_before(const Access& earlier, const Fiber* now) {
  const Cta* cta = now->cta;
  if (earlier.block != cta->serial) return false;
  if (earlier.epoch < cta->epoch || earlier.thread == now->linear) return true;
  const Clocks& clocks = cta->launch->race->clocks;
  if (earlier.warp() == now->warp()) {
    return clocks.warps[now->warp()].seen[now->lane()][earlier.lane()] >= earlier.step;
  }
  return clocks.named_barriers &&
         clocks.knowledge[now->warp()].of[earlier.warp()][earlier.lane()] >= earlier.step;
}

// ---- reports -------------------------------------------------------------------------------------------------

static MhcFinding access_finding(MhcKind kind, MhcDetail detail, const Access& access, uint64_t size) {
  MhcFinding finding = blank_finding(kind, detail);
  put_thread(finding, 0, running);
  finding.pc[0] = access.pc;
  finding.access[0] = access.flags;
  finding.size = static_cast<uint32_t>(size);
  return finding;
}

static void report_race(const Shadow& shadow, uint64_t cell, const Access& earlier, const Access& now) {
  const Cta* cta = running->cta;
  const MhcLaunch* request = cta->launch->request;
  MhcFinding finding = access_finding(MHC_RACE, MHC_NO_DETAIL, earlier, 1u << shadow.cell_bits);
  finding.region = shadow.index;
  finding.offset = static_cast<int64_t>(cell << shadow.cell_bits);
  finding.block[0] = request->blocks != nullptr ? request->blocks[earlier.block - 1] : earlier.block - 1;
  finding.thread[0] = earlier.thread;
  put_thread(finding, 1, running);
  finding.pc[1] = now.pc;
  finding.access[1] = now.flags;
  finding.scope = earlier.block != now.block     ? MHC_ACROSS_BLOCKS
                  : earlier.warp() != now.warp() ? MHC_ACROSS_WARPS
                                                 : MHC_SAME_WARP;
  record(cta->launch, finding);
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
// - Once two blocks have read, any write races with one of them: two records are enough.
// - Once two warps have read, one record per warp is enough: barriers that order other warps cover whole warps.
static void note_read(Race* race, Cell& cell, const Access& now) {
  uint32_t other_block = 0;
  bool other_warp = false;
  filter_reads(race, cell, [&](const Access& earlier) {
    if (is_write(earlier)) return true;
    if (ordered_before(earlier, running)) return false;
    if (earlier.block != now.block) {
      other_block = earlier.block;
    } else if (earlier.warp() != now.warp()) {
      other_warp = true;
    }
    return true;
  });
  if (other_block != 0) {
    filter_reads(race, cell, [&](const Access& earlier) {
      const bool keep = earlier.block == other_block;
      if (keep && !is_write(earlier)) other_block = 0;  // one is enough
      return keep || is_write(earlier);
    });
  } else if (other_warp) {
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
// record per warp of its block and one of any other block are kept, so that counters of large grids stay cheap.
static void keep_replaced_atomic(Race* race, Cell& cell, const Access& replaced) {
  bool other_block = false;
  filter_reads(race, cell, [&](const Access& earlier) {
    if (!is_write(earlier)) return true;
    if (earlier.block == replaced.block) return earlier.warp() != replaced.warp();
    const bool first = !other_block;
    other_block = true;
    return first;
  });
  put_read(race, cell, replaced);
}

static inline bool same_moment(const Access& a, const Access& b) {
  return a.block == b.block && a.thread == b.thread && a.epoch == b.epoch && a.step == b.step;
}

static void touch_cell(Race* race, Shadow& shadow, uint64_t index, const Access& now) {
  Cell& cell = shadow.cells[index];
  // Read again before anything else happened to the cell: a write would have removed the first read.
  if (now.flags == 0 && cell.read.flags == 0 && same_moment(cell.read, now)) return;
  if (shadow.shared) {  // what an earlier block left is gone
    if (cell.read.block != 0 && cell.read.block != now.block) forget_reads(race, cell);
    if (cell.write.block != now.block) cell.write.block = 0;
  }
  const bool writes = is_write(now);
  const bool reads = !writes || (now.flags & MHC_ACCESS_ATOMIC) != 0;
  if (cell.write.block != 0) {
    const bool harmless = both_atomic(cell.write, now) || ordered_before(cell.write, running);
    if (!harmless) report_race(shadow, index, cell.write, now);
  } else if (reads && (shadow.shared || (shadow.region->flags & MHC_NEEDS_INIT) != 0)) {
    MhcFinding finding = access_finding(MHC_UNINIT, MHC_NO_DETAIL, now, 1u << shadow.cell_bits);
    finding.region = shadow.index;
    finding.offset = static_cast<int64_t>(index << shadow.cell_bits);
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

// ---- one access ----------------------------------------------------------------------------------------------

static Shadow* find_shadow(Race* race, uint64_t address) {
  Shadow*& recent = race->recent[address >> 12 & 63];
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
    shared = shadow.shared;
    finding.region = shadow.index;
    finding.offset = static_cast<int64_t>(address - shadow.low);
  }
  return shared;
}

// The access hits no region: constants of the module are fine, the rest is not.
static void note_stray_access(Launch* launch, uint64_t address, uint64_t size, const Access& now) {
  const ModuleMap& module = launch->module;
  const uint64_t shared_low = reinterpret_cast<uint64_t>(module.shared_low);
  const uint64_t shared_high = reinterpret_cast<uint64_t>(module.shared_high);
  const bool in_shared = address >= shared_low && address < shared_high;
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

static void note_access(void* pointer, uint64_t size, unsigned flags, const void* pc) {
  if (running == nullptr || size == 0) return;
  Launch* launch = running->cta->launch;
  Race* race = launch->race;
  if (race == nullptr) return;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (address >= race->stacks_low && address < race->stacks_high) return;
  const Fiber* self = running;
  const Access now = {self->cta->serial,
                      self->cta->epoch,
                      race->clocks.step(self->warp(), self->lane()),
                      module_offset(launch, pc),
                      static_cast<uint16_t>(self->linear),
                      static_cast<uint16_t>(flags)};
  Shadow* shadow = find_shadow(race, address);
  if (shadow == nullptr) {
    note_stray_access(launch, address, size, now);
    return;
  }
  const uint64_t offset = address - shadow->low;
  if (address < shadow->low || address + size > shadow->high) {
    MhcFinding finding = access_finding(MHC_OOB, shadow->shared ? MHC_OOB_SHARED : MHC_OOB_GUARD, now, size);
    finding.region = shadow->index;
    finding.offset = static_cast<int64_t>(offset);
    record(launch, finding);
    return;
  }
  const bool writes = (flags & MHC_ACCESS_WRITE) != 0;
  if (shadow->region->loads != nullptr) count_access(shadow->region, offset, size, writes);
  if ((shadow->region->flags & MHC_READONLY) != 0) {
    if (!writes) return;  // without writes there is no race
    MhcFinding finding = access_finding(MHC_WRITE_TO_CONST, MHC_NO_DETAIL, now, size);
    finding.region = shadow->index;
    finding.offset = static_cast<int64_t>(offset);
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

static void place_region(const ModuleMap& module, MhcRegion* region, Shadow& shadow) {
  shadow.region = region;
  shadow.guard = region->guard;
  shadow.shared = (region->flags & (MHC_SHARED_STATIC | MHC_SHARED_DYNAMIC)) != 0;
  shadow.low = region->base;
  if ((region->flags & MHC_SHARED_STATIC) != 0) shadow.low += reinterpret_cast<uint64_t>(module.shared_low);
  if ((region->flags & MHC_SHARED_DYNAMIC) != 0) shadow.low = reinterpret_cast<uint64_t>(module.dynamic_low);
  shadow.high = shadow.low + region->size;
}

static void begin_race(Launch* launch) {
  const MhcLaunch* request = launch->request;
  Race* race = launch->race = static_cast<Race*>(map_pages(sizeof(Race)));
  if (race == nullptr) {
    launch->out_of_memory = true;
    return;
  }
  race->stacks_low = reinterpret_cast<uint64_t>(request->stacks);
  const uint64_t threads = uint64_t{request->block.x} * request->block.y * request->block.z;
  race->stacks_high = race->stacks_low + request->stack_bytes * threads;
  race->shadows = static_cast<Shadow*>(map_pages(request->region_count * sizeof(Shadow)));
  if (race->shadows == nullptr) {
    launch->out_of_memory = true;
    return;
  }
  for (uint32_t i = 0; i < request->region_count && !launch->out_of_memory; ++i) {
    MhcRegion* region = &request->regions[i];
    if ((region->flags & MHC_SHARED_DYNAMIC) != 0 && (launch->module.dynamic_low == nullptr || region->size == 0)) {
      continue;
    }
    Shadow shadow = {};
    place_region(launch->module, region, shadow);
    shadow.index = i;
    if ((region->flags & MHC_READONLY) == 0) launch->out_of_memory = !create_shadow(shadow);
    unsigned at = race->shadow_count++;
    for (; at > 0 && race->shadows[at - 1].low > shadow.low; --at) race->shadows[at] = race->shadows[at - 1];
    race->shadows[at] = shadow;
  }
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
  unmap_pages(race->shadows, launch->request->region_count * sizeof(Shadow));
  race->pool.release();
  unmap_pages(race, sizeof(Race));
  launch->race = nullptr;
}
