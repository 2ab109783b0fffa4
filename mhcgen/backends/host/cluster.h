// Cluster barriers in halves, and the shared memory of other blocks.
//
// A phase is complete when every thread of the cluster that has not returned has arrived. Each thread takes turns
// between arriving and waiting; it may return in between.
#pragma once

#include "sync.h"

// Lanes of a warp come to a half of a phase together (.aligned), hence from one line.
static void check_meeting(Fiber* self, Meeting& meeting, uint32_t phase, int line) {
  if (meeting.phase != phase) {
    meeting = {phase, self->call_site, line, self->linear};
    return;
  }
  if (meeting.line == line) return;
  MhcFinding finding = blank_finding(MHC_BARRIER, MHC_CLUSTER_LINES);
  put_thread(finding, 0, &self->cta->fibers[meeting.thread]);
  finding.line[0] = static_cast<uint32_t>(meeting.line);
  finding.pc[0] = meeting.call_site;
  put_call(finding, 1, self, line);
  record(self->cta->launch, finding);
}

static void complete_phase(Launch* launch) {
  Cluster& cluster = launch->cluster;
  const uint32_t phase = ++cluster.phase;
  if (launch->race != nullptr) seal_phase(&launch->race->cluster, cluster, phase);
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    Cta* cta = &cluster.ctas[rank];
    for (unsigned i = 0; i < cta->threads; ++i) {
      Fiber* fiber = &cta->fibers[i];
      if (fiber->state != State::AtClusterBarrier) continue;
      if (launch->race != nullptr) acquire_phase(fiber, phase);
      make_ready(fiber);
    }
    if (launch->request->order == MHC_WARP_GREEDY) shuffle_priorities(cta);
  }
  cluster.pending = cluster.live;
  cluster.arrived = 0;
}

static void arrive_at_cluster(bool release, int line) {
  Fiber* self = running;
  Cta* cta = self->cta;
  Launch* launch = cta->launch;
  launch->idle_yields = 0;
  if (self->arrival.phase != 0 && !self->arrival.waited) {
    MhcFinding finding = blank_finding(MHC_BARRIER, MHC_CLUSTER_ARRIVED_TWICE);
    put_thread(finding, 0, self);
    finding.line[0] = static_cast<uint32_t>(self->arrival.line);
    finding.pc[0] = self->arrival.call_site;
    put_call(finding, 1, self, line);
    record(launch, finding);
    return;
  }
  const uint32_t phase = launch->cluster.phase + 1;
  self->arrival = {phase, false, line, self->call_site};
  check_meeting(self, cta->arrivals[self->warp()], phase, line);
  if (release && launch->race != nullptr) release_to_phase(&launch->race->cluster, self, phase);
  ++launch->cluster.arrived;
  if (--launch->cluster.pending == 0) complete_phase(launch);
}

static void wait_at_cluster(int line) {
  Fiber* self = running;
  Cta* cta = self->cta;
  Launch* launch = cta->launch;
  launch->idle_yields = 0;
  Arrival& arrival = self->arrival;
  if (arrival.phase == 0 || arrival.waited) {
    MhcFinding finding = blank_finding(MHC_BARRIER, MHC_CLUSTER_NOT_ARRIVED);
    put_call(finding, 0, self, line);
    record(launch, finding);
    return;
  }
  check_meeting(self, cta->waits[self->warp()], arrival.phase, line);
  arrival.waited = true;
  if (arrival.phase <= launch->cluster.phase) {
    if (launch->race != nullptr) acquire_phase(self, arrival.phase);
    return;
  }
  self->block_call = {0, 0, line};
  make_waiting(self, State::AtClusterBarrier);
  give_up_turn(self);
}

static void end_block(Cta* cta);  // runtime.cpp

// A thread has returned: it may have been the last one that others wait for, or the last one of its block.
static void leave_cluster(Fiber* fiber) {
  Cta* cta = fiber->cta;
  Launch* launch = cta->launch;
  Cluster& cluster = launch->cluster;
  --cluster.live;
  if (cta->clocks != nullptr) {
    const uint32_t known = cta->clocks->warps[fiber->warp()].phase[fiber->lane()];
    raise(cta->last_phase, known);
  }
  if (cta->live == 0) end_block(cta);
  if (fiber->arrival.phase == cluster.phase + 1) return;
  if (--cluster.pending == 0 && cluster.arrived != 0) complete_phase(launch);
}

static void* map_shared(void* mine, int rank, int line) {
  Fiber* self = running;
  Cta* cta = self->cta;
  const Cluster& cluster = cta->launch->cluster;
  const uint64_t offset = reinterpret_cast<uint64_t>(mine) - reinterpret_cast<uint64_t>(cta->shared);
  const bool is_shared = offset < cta->launch->module.guard_offset;
  if (is_shared && static_cast<unsigned>(rank) < cluster.size) return cluster.ctas[rank].shared + offset;
  MhcFinding finding = blank_finding(MHC_OOB, is_shared ? MHC_OOB_RANK : MHC_OOB_MAP);
  finding.value = static_cast<uint64_t>(static_cast<int64_t>(rank));
  put_call(finding, 0, self, line);
  record(cta->launch, finding);
  stop_launch();
}
