// The counters of arriving bytes that the blocks of a cluster have initialised.
#pragma once

#include "held.h"
#include "shadow.h"

struct Counter {
  uint64_t offset;             // of the counter in the shared memory of its block
  uint32_t expected, arrived;  // bytes
  HeldWrite* held;             // what has been sent; it lands with the last byte
  bool awaited;                // some thread has waited to the end
  unsigned thread;             // that initialised it
  int line;
  uint32_t call_site;
  // In race mode:
  Access start;                  // the initialisation
  uint32_t waits;                // those that have ended, the first of each thread: a list in the node pool
  unsigned waiters[MAX_WARPS];  // lanes of the block that are in this list
};

struct Counters {
  static constexpr unsigned PER_BLOCK = 64;
  unsigned used[MAX_CLUSTER];  // by rank
  Counter of[MAX_CLUSTER][PER_BLOCK];
};

// A send carries the number of its counter in the flags of its access.
constexpr unsigned COUNTER_SHIFT = 6;
static_assert(MHC_ACCESS_LANDED < 1u << COUNTER_SHIFT);
static_assert(MAX_CLUSTER * Counters::PER_BLOCK <= 1u << (16 - COUNTER_SHIFT));

static inline unsigned counter_flags(unsigned rank, unsigned slot) {
  return MHC_ACCESS_WRITE | MHC_ACCESS_SEND | (rank * Counters::PER_BLOCK + slot) << COUNTER_SHIFT;
}

// Where a block keeps this counter; null if nobody has initialised it.
static Counter* find_counter(const Cta* cta, uint64_t offset) {
  Counters* counters = cta->launch->counters;
  if (counters == nullptr) return nullptr;
  for (unsigned i = 0; i < counters->used[cta->rank]; ++i) {
    if (counters->of[cta->rank][i].offset == offset) return &counters->of[cta->rank][i];
  }
  return nullptr;
}
