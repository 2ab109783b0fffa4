// Asynchronous copies to shared memory.
//
// The source is read at once, the target changes when the thread waits. The race checker sees two writes: from the
// first one on, which is no earlier than the copy may land on a GPU, nobody may touch the target; the second one
// makes it an ordinary write of the thread.
#pragma once

#include "held.h"
#include "race.h"

constexpr uint64_t COPY_BYTES = 16;

static void copy_async(void* to, const void* from, int line, const void* pc) {
  Fiber* self = running;
  Cta* cta = self->cta;
  Launch* launch = cta->launch;
  const uint64_t target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
  const bool misaligned = (target | source) % COPY_BYTES != 0;
  const bool to_shared = target - reinterpret_cast<uint64_t>(cta->shared) < launch->module.guard_offset;
  if (misaligned || !to_shared || in_segments(launch, source)) {
    const MhcDetail detail = misaligned ? MHC_NO_DETAIL : MHC_COPY_MEMORY;
    MhcFinding finding = blank_finding(misaligned ? MHC_MISALIGNED : MHC_COPY, detail);
    finding.value = COPY_BYTES;
    put_call(finding, 0, self, line);
    record(launch, finding);
    stop_launch();
  }
  note_access(const_cast<void*>(from), COPY_BYTES, 0, pc);
  note_access(to, COPY_BYTES, MHC_ACCESS_WRITE | MHC_ACCESS_COPY, pc);
  HeldWrite* held = hold_write(launch, self->copies, to, from, COPY_BYTES);
  if (held == nullptr) {
    launch->out_of_memory = true;
    stop_launch();
  }
  held->line = line;
  held->call_site = self->call_site;
}

static void wait_for_copies(Fiber* self) {
  Launch* launch = self->cta->launch;
  for (const HeldWrite* held = self->copies; held != nullptr; held = held->next) {
    const void* pc = reinterpret_cast<const void*>(launch->module.base + held->call_site);
    note_access(held->to, held->bytes, MHC_ACCESS_WRITE | MHC_ACCESS_COPY | MHC_ACCESS_LANDED, pc);
  }
  land_writes(launch, self->copies);
}

// The thread returns: what has not landed is lost.
static void report_copies(Fiber* fiber) {
  Launch* launch = fiber->cta->launch;
  MhcFinding finding = blank_finding(MHC_COPY, MHC_COPY_NOT_AWAITED);
  for (const HeldWrite* held = fiber->copies; held != nullptr; held = held->next) ++finding.value;
  put_thread(finding, 0, fiber);
  finding.line[0] = static_cast<uint32_t>(fiber->copies->line);
  finding.pc[0] = fiber->copies->call_site;
  record(launch, finding);
  drop_writes(launch, fiber->copies);
}
