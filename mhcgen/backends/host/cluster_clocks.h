// The order that cluster barriers impose on the memory accesses of a cluster.
//
// The clock of a phase is the join of what the threads knew that released it (arrived, and not relaxed). A thread
// that arrives at a phase has waited for the one before, so the clocks of phases form a chain, and what a thread
// knows through cluster barriers is one number: its newest phase (WarpClocks::phase). Warp, named and block barriers
// pass that number on. A live thread lags at most one phase behind, so three clocks are enough: the last two phases
// and the one that is being made.
//
// What a thread did after it arrived is not in the clock, because its step grows when it releases.
#pragma once

#include "race_clocks.h"

struct PhaseClock {
  uint32_t epoch[MAX_CLUSTER];              // block barriers: everything before these
  uint32_t step[MAX_CLUSTER][MAX_THREADS];  // the newest step of each thread
};

struct ClusterClocks {
  PhaseClock phases[3];
  bool used;  // else they hold zeros only

  PhaseClock& of(uint32_t phase) { return phases[phase % 3]; }
};

static inline void raise(uint32_t& known, uint32_t other) { known = other > known ? other : known; }

static inline void reset_cluster_clocks(ClusterClocks* clocks) {
  if (clocks->used) memset(clocks, 0, sizeof *clocks);
}

// A thread arrives at `phase` and publishes all it is ordered after.
static inline void release_to_phase(ClusterClocks* cluster, const Fiber* self, uint32_t phase) {
  const Cta* cta = self->cta;
  Clocks* clocks = cta->clocks;
  PhaseClock& clock = cluster->of(phase);
  cluster->used = true;
  raise(clock.epoch[cta->rank], cta->epoch);
  uint32_t* steps = clock.step[cta->rank];
  const unsigned warp = self->warp();
  uint32_t* seen = clocks->warps[warp].seen[self->lane()];
  for (unsigned lane = 0; lane < WARP; ++lane) raise(steps[warp * WARP + lane], seen[lane]);
  if (clocks->named_barriers && clocks->published[warp] != phase) {  // once a warp: its lanes know the same
    clocks->published[warp] = phase;
    for (unsigned w = 0; w < cta->warp_count; ++w) {
      for (unsigned lane = 0; lane < WARP; ++lane) {
        raise(steps[w * WARP + lane], clocks->knowledge[warp].of[w][lane]);
      }
    }
  }
  ++seen[self->lane()];
}

// A thread has waited for `phase`.
static inline void acquire_phase(const Fiber* self, uint32_t phase) {
  Clocks* clocks = self->cta->clocks;
  clocks->warps[self->warp()].phase[self->lane()] = phase;
  clocks->phases = true;
}

// `phase` is complete: the next one starts with all that it knows.
static inline void seal_phase(ClusterClocks* clocks, const Cluster& cluster, uint32_t phase) {
  const PhaseClock& sealed = clocks->of(phase);
  PhaseClock& next = clocks->of(phase + 1);
  memcpy(next.epoch, sealed.epoch, sizeof next.epoch);
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    memcpy(next.step[rank], sealed.step[rank], cluster.ctas[rank].threads * sizeof(uint32_t));
  }
}

// A block barrier: what any of its threads knows of the cluster, all know.
static inline void join_block(const Cta* cta) {
  Clocks* clocks = cta->clocks;
  if (!clocks->phases) return;
  uint32_t newest = 0;
  for (unsigned w = 0; w < cta->warp_count; ++w) raise(newest, newest_phase(clocks->warps[w], cta->warps[w].live));
  for (unsigned w = 0; w < cta->warp_count; ++w) set_phase(clocks->warps[w], cta->warps[w].live, newest);
}
