// Finding the module in memory and preparing its thread-local segment, which is the CTA's shared memory.
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

// The runtime is linked behind the emission: this is the end of the thread-local segment. A write past the last
// shared variable would otherwise hit the loader's heap.
static constexpr uint64_t STATIC_GUARD_BYTES = 4096;
static constinit thread_local char static_guard[STATIC_GUARD_BYTES];

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
      found.shared_low = static_cast<char*>(info->dlpi_tls_data);
      found.shared_high = found.shared_low + header.p_memsz;
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
  static_guard[0] = 0;  // the loader allocates the segment when it is first touched
  dl_iterate_phdr(read_module, &map);
  map.dynamic_low = low;
  map.dynamic_high = high;
  return map;
}

// Bytes behind the dynamic shared memory of this launch that nobody may touch.
static uint64_t dynamic_guard_bytes(const ModuleMap& map, uint64_t used) {
  const uint64_t room = static_cast<uint64_t>(map.dynamic_high - map.dynamic_low) - used;
  return room < DYNAMIC_GUARD_BYTES ? room : DYNAMIC_GUARD_BYTES;
}

// 0xff in every byte is NaN in every floating-point format that emissions use.
static void poison(char* low, char* high) { memset(low, 0xff, static_cast<size_t>(high - low)); }

static void poison_shared(const ModuleMap& map, uint64_t dynamic_bytes) {
  if (map.dynamic_low == nullptr) {
    poison(map.shared_low, map.shared_high);
  } else {  // the array is large, but only the bytes of this launch are used
    poison(map.shared_low, map.dynamic_low);
    poison(map.dynamic_low, map.dynamic_low + dynamic_bytes);
    poison(map.dynamic_high, map.shared_high);
    memset(map.dynamic_low + dynamic_bytes, SHARED_GUARD, dynamic_guard_bytes(map, dynamic_bytes));
  }
  memset(static_guard, SHARED_GUARD, sizeof static_guard);
}

// The first changed byte behind the static variables, as an offset from their end; -1 if none is.
static int64_t broken_static_guard() {
  for (uint64_t i = 0; i < STATIC_GUARD_BYTES; ++i) {
    if (static_cast<unsigned char>(static_guard[i]) != SHARED_GUARD) return static_cast<int64_t>(i);
  }
  return -1;
}

// The first changed guard byte behind the dynamic shared memory, as an offset from its start; -1 if none is.
static int64_t broken_dynamic_guard(const ModuleMap& map, uint64_t dynamic_bytes) {
  if (map.dynamic_low == nullptr) return -1;
  const uint64_t end = dynamic_bytes + dynamic_guard_bytes(map, dynamic_bytes);
  for (uint64_t i = dynamic_bytes; i < end; ++i) {
    if (static_cast<unsigned char>(map.dynamic_low[i]) != SHARED_GUARD) return static_cast<int64_t>(i);
  }
  return -1;
}
