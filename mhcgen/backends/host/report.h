// Recording of findings. Python gives the array and writes the sentences; here are only numbers.
#pragma once

#include "machine.h"

static inline MhcFinding blank_finding(MhcKind kind, MhcDetail detail) {
  MhcFinding finding = {};
  finding.kind = kind;
  finding.detail = detail;
  finding.thread[0] = finding.thread[1] = MHC_NONE;
  finding.region = MHC_NONE;
  finding.owner = MHC_NONE;
  finding.count = 1;
  return finding;
}

static inline void put_thread(MhcFinding& finding, int side, const Fiber* fiber) {
  finding.block[side] = fiber->cta->linear;
  finding.thread[side] = fiber->linear;
}

// A thread together with the barrier or warp operation it is in.
static inline void put_call(MhcFinding& finding, int side, const Fiber* fiber, int line) {
  put_thread(finding, side, fiber);
  finding.line[side] = static_cast<uint32_t>(line);
  finding.pc[side] = line != 0 ? fiber->call_site : 0;
}

// Same rule at the same two places of the program; which threads and bytes does not matter.
static inline bool same_place(const MhcFinding& a, const MhcFinding& b) {
  return a.kind == b.kind && a.detail == b.detail && a.scope == b.scope && a.region == b.region &&
         a.pc[0] == b.pc[0] && a.pc[1] == b.pc[1] && a.line[0] == b.line[0] && a.line[1] == b.line[1] &&
         a.access[0] == b.access[0] && a.access[1] == b.access[1];
}

static inline uint32_t module_offset(const Launch* launch, const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address) - launch->module.base);
}

static inline void record(Launch* launch, const MhcFinding& finding) {
  MhcLaunch* request = launch->request;
  // The newest first: a broken loop repeats its latest finding.
  for (uint32_t i = request->finding_count; i-- > 0;) {
    if (same_place(request->findings[i], finding)) {
      ++request->findings[i].count;
      return;
    }
  }
  if (request->finding_count == request->finding_capacity) {
    ++request->suppressed;
    return;
  }
  request->findings[request->finding_count++] = finding;
}
