// The order that barriers impose: one counter of block barriers per CTA (Cta::epoch) and a vector clock per lane
// for the barriers within a warp. Together they are exact for programs that synchronise by these two only.
#pragma once

#include "machine.h"

struct WarpClocks {
  uint32_t seen[WARP][WARP];  // seen[a][b]: the newest step of lane b that lane a is ordered after
};

struct RaceShadow;

struct Race {
  WarpClocks* clocks;  // MAX_WARPS of them
  RaceShadow* shadow;
};

static inline void reset_clocks(Race* race, unsigned warps) {
  for (unsigned w = 0; w < warps; ++w) {
    WarpClocks& clocks = race->clocks[w];
    memset(&clocks, 0, sizeof clocks);
    for (unsigned lane = 0; lane < WARP; ++lane) clocks.seen[lane][lane] = 1;
  }
}

// A barrier among `lanes`: each is ordered after whatever any of them did or was ordered after.
static inline void join_clocks(Race* race, unsigned warp, unsigned lanes) {
  WarpClocks& clocks = race->clocks[warp];
  uint32_t joined[WARP] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t* mine = clocks.seen[__builtin_ctz(rest)];
    for (unsigned k = 0; k < WARP; ++k) joined[k] = mine[k] > joined[k] ? mine[k] : joined[k];
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    memcpy(clocks.seen[lane], joined, sizeof joined);
    ++clocks.seen[lane][lane];
  }
}
