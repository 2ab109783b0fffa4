// The race checker: compares every memory access of an instrumented emission with the earlier ones to the same
// bytes, and checks that the bytes belong to something and have been written.
#pragma once

#include "race_cells.h"

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
