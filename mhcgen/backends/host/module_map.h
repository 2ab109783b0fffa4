// Finding the module in memory and preparing its thread-local segment, which is a CTA's shared memory.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <link.h>

#include "machine.h"

// Emitted into every unit: says where the dynamic array lies.
extern "C" void mhc_unit_shared(char** dynamic_low, char** dynamic_high);
extern "C" int mhc_rt_run(struct OpenLaunch* open, unsigned long long nanoseconds);

static constexpr unsigned char SHARED_GUARD = 0xfd;
static constexpr uint64_t DYNAMIC_GUARD_BYTES = 1024;
static constexpr uint64_t PAGE = 4096;

// The runtime is linked behind the emission: this is the end of the thread-local segment. A write past the last
// shared variable would otherwise hit memory that is not ours.
static constexpr uint64_t STATIC_GUARD_BYTES = 4096;
static constinit thread_local char static_guard[STATIC_GUARD_BYTES];

// Position-independent code asks this function of the loader where a thread-local segment lies. The module brings
// its own, so that the answer depends on the running fiber: every CTA of a cluster has a segment of its own, and a
// turn changes the CTA at no cost. While no fiber runs, the answers are offsets into the segment.
//
// Where code does not ask (other dialects of thread-local storage, e.g. on aarch64), the segment is that of the OS
// thread, and only one CTA can be alive; `map_module` finds out.
struct TlsIndex {
  unsigned long module, offset;
};
extern "C" __attribute__((visibility("hidden"))) void* __tls_get_addr(const TlsIndex* index) {
  const uint64_t base = running != nullptr ? reinterpret_cast<uint64_t>(running->cta->shared) : 0;
  return reinterpret_cast<void*>(base + index->offset);
}

static int read_module(struct dl_phdr_info* info, size_t, void* out) {
  ModuleMap* map = static_cast<ModuleMap*>(out);
  const uint64_t here = reinterpret_cast<uint64_t>(&mhc_rt_run);
  ModuleMap found = {};
  found.base = info->dlpi_addr;
  bool ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD && found.segments < ModuleMap::MAX_SEGMENTS) {
      const uint64_t low = info->dlpi_addr + header.p_vaddr;
      found.segment_low[found.segments] = low;
      found.segment_high[found.segments++] = low + header.p_memsz;
      ours = ours || (here >= low && here < low + header.p_memsz);
    } else if (header.p_type == PT_TLS) {
      found.thread_segment = static_cast<char*>(info->dlpi_tls_data);
      found.shared_bytes = header.p_memsz;
      found.shared_align = header.p_align != 0 ? header.p_align : 1;
      found.shared_skew = header.p_vaddr % found.shared_align;
    }
  }
  if (!ours) return 0;
  *map = found;
  return 1;
}

static ModuleMap map_module() {
  ModuleMap map = {};
  char* low = nullptr;
  char* high = nullptr;
  mhc_unit_shared(&low, &high);
  // The volatile keeps the compiler from knowing that an address is never small. Without our __tls_get_addr, the
  // loader allocates the segment now, and knows its address below.
  char* volatile guard = static_guard;
  dl_iterate_phdr(read_module, &map);
  if (reinterpret_cast<uint64_t>(guard) < map.shared_bytes) map.thread_segment = nullptr;
  const uint64_t segment = reinterpret_cast<uint64_t>(map.thread_segment);
  map.guard_offset = reinterpret_cast<uint64_t>(guard) - segment;
  map.dynamic_room = static_cast<uint64_t>(high - low);
  if (map.dynamic_room != 0) map.dynamic_offset = reinterpret_cast<uint64_t>(low) - segment;
  return map;
}

// ---- segments ------------------------------------------------------------------------------------------------

// From one segment of a cluster to the next.
static uint64_t segment_stride(const ModuleMap& map) {
  const uint64_t unit = map.shared_align > PAGE ? map.shared_align : PAGE;
  return (map.shared_skew + map.shared_bytes + unit - 1) / unit * unit;
}

// Gives every CTA its shared memory; false if there is no memory.
static bool allocate_segments(Launch* launch) {
  const ModuleMap& map = launch->module;
  Cluster& cluster = launch->cluster;
  if (map.thread_segment != nullptr) {
    cluster.ctas[0].shared = map.thread_segment;
    return true;
  }
  const uint64_t stride = segment_stride(map);
  launch->segments_bytes = stride * cluster.size + map.shared_align;
  launch->segments = static_cast<char*>(map_pages(launch->segments_bytes));
  if (launch->segments == nullptr) return false;
  const uint64_t align = map.shared_align;
  const uint64_t first = (reinterpret_cast<uint64_t>(launch->segments) + align - 1) / align * align + map.shared_skew;
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    cluster.ctas[rank].shared = reinterpret_cast<char*>(first + rank * stride);
  }
  return true;
}

// Whether an address lies in the shared memory of the cluster, or between its segments.
static bool in_segments(const Launch* launch, uint64_t address) {
  const Cluster& cluster = launch->cluster;
  const uint64_t low = reinterpret_cast<uint64_t>(cluster.ctas[0].shared);
  const uint64_t last = reinterpret_cast<uint64_t>(cluster.ctas[cluster.size - 1].shared);
  return address >= low && address < last + launch->module.shared_bytes;
}

// Bytes behind the dynamic shared memory of this launch that nobody may touch.
static uint64_t dynamic_guard_bytes(const ModuleMap& map, uint64_t used) {
  const uint64_t room = map.dynamic_room - used;
  return room < DYNAMIC_GUARD_BYTES ? room : DYNAMIC_GUARD_BYTES;
}

// 0xff in every byte is NaN in every floating-point format that emissions use.
static void poison(char* low, char* high) { memset(low, 0xff, static_cast<size_t>(high - low)); }

static void poison_shared(const ModuleMap& map, char* shared, uint64_t dynamic_bytes) {
  char* const end = shared + map.guard_offset;
  if (map.dynamic_room == 0) {
    poison(shared, end);
  } else {  // the array is large, but only the bytes of this launch are used
    char* const dynamic = shared + map.dynamic_offset;
    poison(shared, dynamic);
    poison(dynamic, dynamic + dynamic_bytes);
    poison(dynamic + map.dynamic_room, end);
  }
}

static void fill_shared_guards(const ModuleMap& map, char* shared, uint64_t dynamic_bytes) {
  if (map.dynamic_room != 0) {
    memset(shared + map.dynamic_offset + dynamic_bytes, SHARED_GUARD, dynamic_guard_bytes(map, dynamic_bytes));
  }
  memset(shared + map.guard_offset, SHARED_GUARD, STATIC_GUARD_BYTES);
}

static int64_t first_changed(const char* guard, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (static_cast<unsigned char>(guard[i]) != SHARED_GUARD) return static_cast<int64_t>(i);
  }
  return -1;
}

// The first changed byte behind the static variables, as an offset from their end; -1 if none is.
static int64_t broken_static_guard(const ModuleMap& map, const char* shared) {
  return first_changed(shared + map.guard_offset, STATIC_GUARD_BYTES);
}

// The first changed guard byte behind the dynamic shared memory, as an offset from its start; -1 if none is.
static int64_t broken_dynamic_guard(const ModuleMap& map, const char* shared, uint64_t dynamic_bytes) {
  if (map.dynamic_room == 0) return -1;
  const char* guard = shared + map.dynamic_offset + dynamic_bytes;
  const int64_t changed = first_changed(guard, dynamic_guard_bytes(map, dynamic_bytes));
  return changed < 0 ? -1 : changed + static_cast<int64_t>(dynamic_bytes);
}
