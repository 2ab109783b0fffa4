// The order that barriers impose on the memory accesses of a block.
//
// - A block barrier orders everything before it with everything after it: one counter per CTA (Cta::epoch).
// - A barrier within a warp orders its lanes: a vector clock per lane.
// - A named barrier orders whole warps: per warp, what it knows of the lanes of every other warp.
// - A cluster barrier orders what came before an arrival with what comes after a wait: cluster_clocks.h.
// - A wait for a counter orders what was sent to it, and nothing else: counters.h.
// Together they are exact for programs that synchronise by these only. Other blocks are never ordered.
#pragma once

#include "machine.h"

struct WarpClocks {
  uint32_t seen[WARP][WARP];  // seen[a][b]: the newest step of lane b that lane a is ordered after
  uint32_t phase[WARP];       // the newest phase of the cluster barrier that the lane is ordered after
};

struct Knowledge {
  uint32_t of[MAX_WARPS][WARP];  // the newest step of each lane of each other warp that this warp is ordered after
};

struct Clocks {
  WarpClocks warps[MAX_WARPS];
  Knowledge knowledge[MAX_WARPS];
  uint32_t published[MAX_WARPS];  // the latest phase whose clock has the warp's knowledge
  bool named_barriers;  // the block used one; else `knowledge` holds zeros only
  bool phases;          // some thread is ordered after a cluster barrier; else all `phase`s are zero

  uint32_t step(unsigned warp, unsigned lane) const { return warps[warp].seen[lane][lane]; }
};

static inline void reset_clocks(Clocks* clocks, unsigned warps) {
  for (unsigned w = 0; w < warps; ++w) {
    memset(&clocks->warps[w], 0, sizeof(WarpClocks));
    for (unsigned lane = 0; lane < WARP; ++lane) clocks->warps[w].seen[lane][lane] = 1;
    if (clocks->named_barriers) memset(&clocks->knowledge[w], 0, sizeof(Knowledge));
  }
  memset(clocks->published, 0, sizeof clocks->published);
  clocks->named_barriers = false;
  clocks->phases = false;
}

static inline uint32_t newest_phase(const WarpClocks& warp, unsigned lanes) {
  uint32_t newest = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t phase = warp.phase[__builtin_ctz(rest)];
    newest = phase > newest ? phase : newest;
  }
  return newest;
}

static inline void set_phase(WarpClocks& warp, unsigned lanes, uint32_t phase) {
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) warp.phase[__builtin_ctz(rest)] = phase;
}

// A barrier among `lanes` of a warp: each is ordered after whatever any of them did or was ordered after.
static inline void join_lanes(Clocks* clocks, unsigned warp, unsigned lanes) {
  WarpClocks& own = clocks->warps[warp];
  uint32_t joined[WARP] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t* mine = own.seen[__builtin_ctz(rest)];
    for (unsigned k = 0; k < WARP; ++k) joined[k] = mine[k] > joined[k] ? mine[k] : joined[k];
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    memcpy(own.seen[lane], joined, sizeof joined);
    ++own.seen[lane][lane];
  }
  if (clocks->phases) set_phase(own, lanes, newest_phase(own, lanes));
}

// A barrier among the warps of `together`, whose live lanes `lanes[w]` all take part.
static inline void join_warps(Clocks* clocks, unsigned together, const unsigned* lanes, unsigned warps) {
  static Knowledge joined;  // 4 KB: too much for a fiber's stack; only one fiber runs
  memset(&joined, 0, sizeof joined);
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const unsigned w = static_cast<unsigned>(__builtin_ctz(rest));
    for (unsigned v = 0; v < warps; ++v) {
      for (unsigned lane = 0; lane < WARP; ++lane) {
        const uint32_t known = v == w ? clocks->step(w, lane) : clocks->knowledge[w].of[v][lane];
        if (known > joined.of[v][lane]) joined.of[v][lane] = known;
      }
    }
  }
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const unsigned w = static_cast<unsigned>(__builtin_ctz(rest));
    memcpy(&clocks->knowledge[w], &joined, sizeof joined);
    clocks->published[w] = 0;
    join_lanes(clocks, w, lanes[w]);
  }
  clocks->named_barriers = true;
  if (!clocks->phases) return;
  uint32_t newest = 0;
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const unsigned w = static_cast<unsigned>(__builtin_ctz(rest));
    const uint32_t here = newest_phase(clocks->warps[w], lanes[w]);
    newest = here > newest ? here : newest;
  }
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const unsigned w = static_cast<unsigned>(__builtin_ctz(rest));
    set_phase(clocks->warps[w], lanes[w], newest);
  }
}
