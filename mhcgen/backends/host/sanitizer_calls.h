// The functions that -fsanitize=thread and -fsanitize=bounds make an emission call. Ours; libtsan and libubsan are
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

// What the compiler passes to an out-of-bounds handler (the layout is part of its ABI).
struct IndexType {
  uint16_t kind, info;  // kind 0: an integer; the lowest bit of info: signed; the others: log2 of its bits
};
struct IndexCheck {
  const char* file;
  uint32_t line, column;
  const void* array_type;
  const IndexType* index_type;
};

static void note_bad_index(const IndexCheck* check, unsigned long index, const void* pc) {
  if (running == nullptr) return;
  const IndexType* type = check->index_type;
  const unsigned bits = 1u << (type->info >> 1);
  int64_t value = static_cast<int64_t>(index);
  if (type->kind == 0 && (type->info & 1) != 0 && bits < 64) {
    value = static_cast<int64_t>(static_cast<uint64_t>(value) << (64 - bits)) >> (64 - bits);
  }
  MhcFinding finding = blank_finding(MHC_OOB, MHC_OOB_INDEX);
  put_thread(finding, 0, running);
  finding.line[0] = check->line;
  finding.pc[0] = module_offset(running->cta->launch, pc);
  finding.value = static_cast<uint64_t>(value);
  record(running->cta->launch, finding);
  stop_launch();
}
extern "C" void __ubsan_handle_out_of_bounds(void* check, unsigned long index) {
  note_bad_index(static_cast<const IndexCheck*>(check), index, __builtin_return_address(0));
}
extern "C" void __ubsan_handle_out_of_bounds_abort(void* check, unsigned long index) {
  note_bad_index(static_cast<const IndexCheck*>(check), index, __builtin_return_address(0));
}
