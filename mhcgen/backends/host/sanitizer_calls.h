// The functions that -fsanitize=thread, bounds and alignment make an emission call. Ours; libtsan and libubsan are
// never linked: they know nothing of fibers or of CUDA's barriers, and cannot live in a Python process.
#pragma once

#include "race.h"

#define MHC_CALLBACK(name, size, flags) \
  extern "C" void __tsan_##name(void* address) { note_access(address, size, flags, __builtin_return_address(0)); }
#define MHC_CALLBACKS(size)                                   \
  MHC_CALLBACK(read##size, size, 0)                            \
  MHC_CALLBACK(write##size, size, MHC_ACCESS_WRITE)            \
  MHC_CALLBACK(unaligned_read##size, size, 0)                  \
  MHC_CALLBACK(unaligned_write##size, size, MHC_ACCESS_WRITE)
MHC_CALLBACKS(1)
MHC_CALLBACKS(2)
MHC_CALLBACKS(4)
MHC_CALLBACKS(8)
MHC_CALLBACKS(16)
#undef MHC_CALLBACKS
#undef MHC_CALLBACK

extern "C" void __tsan_read_range(void* address, unsigned long size) {
  note_access(address, size, 0, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, unsigned long size) {
  note_access(address, size, MHC_ACCESS_WRITE, __builtin_return_address(0));
}
extern "C" void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  note_access(const_cast<void*>(from), size, 0, __builtin_return_address(0));
  note_access(to, size, MHC_ACCESS_WRITE, __builtin_return_address(0));
  return memcpy(to, from, size);
}
extern "C" void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  note_access(const_cast<void*>(from), size, 0, __builtin_return_address(0));
  note_access(to, size, MHC_ACCESS_WRITE, __builtin_return_address(0));
  return memmove(to, from, size);
}
extern "C" void* __tsan_memset(void* to, int value, unsigned long size) {
  note_access(to, size, MHC_ACCESS_WRITE, __builtin_return_address(0));
  return memset(to, value, size);
}
extern "C" void __tsan_init(void) {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit(void) {}

// What the compiler passes to its checks (the layouts are part of its ABI).
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
struct IndexType {
  uint16_t kind, info;  // kind 0: an integer; the lowest bit of info: signed; the others: log2 of its bits
};
struct IndexCheck {
  SourcePlace place;
  const void* array_type;
  const IndexType* index_type;
};
struct PointerCheck {
  SourcePlace place;
  const void* type;
  unsigned char log2_alignment, kind;
};

static MhcFinding check_finding(MhcKind kind, MhcDetail detail, const SourcePlace& place, const void* pc) {
  MhcFinding finding = blank_finding(kind, detail);
  put_thread(finding, 0, running);
  finding.line[0] = place.line;
  finding.pc[0] = module_offset(running->cta->launch, pc);
  return finding;
}

static void note_bad_index(const void* data, unsigned long index, const void* pc) {
  if (running == nullptr) return;
  const IndexCheck* check = static_cast<const IndexCheck*>(data);
  const IndexType* type = check->index_type;
  const unsigned bits = 1u << (type->info >> 1);
  int64_t value = static_cast<int64_t>(index);
  if (type->kind == 0 && (type->info & 1) != 0 && bits < 64) {
    value = static_cast<int64_t>(static_cast<uint64_t>(value) << (64 - bits)) >> (64 - bits);
  }
  MhcFinding finding = check_finding(MHC_OOB, MHC_OOB_INDEX, check->place, pc);
  finding.value = static_cast<uint64_t>(value);
  record(running->cta->launch, finding);
  stop_launch();
}
extern "C" void __ubsan_handle_out_of_bounds(void* check, unsigned long index) {
  note_bad_index(check, index, __builtin_return_address(0));
}
extern "C" void __ubsan_handle_out_of_bounds_abort(void* check, unsigned long index) {
  note_bad_index(check, index, __builtin_return_address(0));
}

static void name_global(const MhcLaunch* request, uint64_t address, MhcFinding& finding) {
  for (uint32_t i = 0; i < request->region_count; ++i) {
    const MhcRegion& region = request->regions[i];
    if ((region.flags & (MHC_SHARED_STATIC | MHC_SHARED_DYNAMIC)) != 0) continue;
    if (address < region.base || address >= region.base + region.size) continue;
    finding.region = i;
    finding.offset = static_cast<int64_t>(address - region.base);
  }
}

// A GPU faults on every misaligned access, x86 only on some: report and stop, in plain builds too.
static void note_misaligned(const void* data, unsigned long address, const void* pc) {
  if (running == nullptr) return;
  const PointerCheck* check = static_cast<const PointerCheck*>(data);
  MhcFinding finding = check_finding(MHC_MISALIGNED, MHC_NO_DETAIL, check->place, pc);
  finding.value = uint64_t{1} << check->log2_alignment;
  name_global(running->cta->launch->request, address, finding);
  record(running->cta->launch, finding);
  stop_launch();
}
extern "C" void __ubsan_handle_type_mismatch_v1(void* check, unsigned long address) {
  note_misaligned(check, address, __builtin_return_address(0));
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(void* check, unsigned long address) {
  note_misaligned(check, address, __builtin_return_address(0));
}
