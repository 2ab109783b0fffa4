// What to say when live threads remain and none can run.
#pragma once

#include "arrivals.h"

static bool same_wait(const Fiber* a, const Fiber* b) {
  if (a->state != b->state || line_of_wait(a) != line_of_wait(b)) return false;
  if (a->state != State::InWarpOperation) return a->block_call.op == b->block_call.op;
  return a->warp_call.op == b->warp_call.op && a->warp_call.mask == b->warp_call.mask;
}

// One row per warp and place where lanes of it wait.
static void list_waits(Cta* cta) {
  MhcLaunch* request = cta->launch->request;
  for (unsigned warp = 0; warp < cta->warp_count; ++warp) {
    const Fiber* lanes = &cta->fibers[warp * WARP];
    unsigned rest = cta->warps[warp].live;
    while (rest != 0 && request->wait_count < request->wait_capacity) {
      const Fiber* first = &lanes[lowest(rest)];
      unsigned together = 0;
      for (unsigned others = rest; others != 0; others &= others - 1) {
        const Fiber* other = &lanes[lowest(others)];
        if (same_wait(first, other)) together |= 1u << other->lane();
      }
      MhcWait& row = request->waits[request->wait_count++];
      const bool alone = cta->launch->cluster.size == 1;
      row = {alone ? MHC_NONE : static_cast<uint32_t>(cta->linear), warp, together, MHC_WAIT_WARP,
             first->warp_call.op, first->warp_call.mask, static_cast<uint32_t>(line_of_wait(first)),
             first->call_site};
      if (first->state == State::AtClusterBarrier) {
        row.kind = MHC_WAIT_CLUSTER;
        row.op = row.mask = 0;
      } else if (first->state == State::AtCounter) {
        const Counter& counter = cta->launch->counters->of[cta->rank][first->block_call.op];
        row.kind = MHC_WAIT_ARRIVALS;
        row.op = counter.expected - counter.arrived;
        row.mask = counter.expected;
      } else if (first->state != State::InWarpOperation) {
        const bool named = first->state == State::AtNamedBarrier;
        row.kind = named ? MHC_WAIT_NAMED : MHC_WAIT_BLOCK;
        row.op = first->block_call.op;
        row.mask = named ? cta->named[row.op].expected : 0;
      }
      rest &= ~together;
    }
  }
}

// A lane that others name in their mask, but which waits somewhere else.
static void report_absent_lanes(Cta* cta, unsigned warp) {
  const Fiber* lanes = &cta->fibers[warp * WARP];
  for (unsigned rest = cta->warps[warp].waiting; rest != 0; rest &= rest - 1) {
    const Fiber* waiting = &lanes[lowest(rest)];
    for (unsigned named = waiting->warp_call.mask & cta->warps[warp].live; named != 0; named &= named - 1) {
      const Fiber* other = &lanes[lowest(named)];
      if (other->state == State::InWarpOperation && other->warp_call.op == waiting->warp_call.op &&
          other->warp_call.mask == waiting->warp_call.mask) {
        continue;
      }
      if (other->state == State::AtCounter) continue;  // it may come yet; what it waits for is the fault
      MhcFinding finding = blank_finding(MHC_MASK, MHC_MASK_LANES_ABSENT);
      finding.mask = waiting->warp_call.mask;
      put_call(finding, 0, waiting, waiting->warp_call.line);
      put_call(finding, 1, other, line_of_wait(other));
      record(cta->launch, finding);
      if (other->state == State::InWarpOperation) continue;
      finding.kind = MHC_BARRIER;
      finding.detail = MHC_BARRIER_DIVERGED;
      put_call(finding, 0, other, other->block_call.line);
      put_call(finding, 1, waiting, waiting->warp_call.line);
      record(cta->launch, finding);
    }
  }
}

static void report_deadlock(Launch* launch) {
  const Cluster& cluster = launch->cluster;
  MhcFinding finding = blank_finding(MHC_DEADLOCK, MHC_DEADLOCK_WAITING);
  finding.value = cluster.live;
  for (unsigned rank = cluster.size; rank-- > 0;) {
    Cta* cta = &cluster.ctas[rank];
    for (unsigned warp = 0; warp < cta->warp_count; ++warp) report_absent_lanes(cta, warp);
    for (unsigned i = cta->threads; i-- > 0;) {
      if (cta->fibers[i].state == State::Done) continue;
      put_call(finding, 0, &cta->fibers[i], line_of_wait(&cta->fibers[i]));
    }
  }
  record(launch, finding);
  for (unsigned rank = 0; rank < cluster.size; ++rank) list_waits(&cluster.ctas[rank]);
}
