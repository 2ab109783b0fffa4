// Which fiber runs next, and the life of a fiber. The fiber that gives up its turn picks its successor itself, so
// a turn costs one switch.
#pragma once

#include "machine.h"
#include "report.h"

// Yields without any barrier, exit or warp operation in between, per live thread, that count as a livelock.
constexpr unsigned MAX_IDLE_YIELDS = 4096;

static inline void make_ready(Fiber* fiber) {
  fiber->state = State::Ready;
  fiber->cta->warps[fiber->warp()].ready |= 1u << fiber->lane();
  ++fiber->cta->ready;
}

static inline void make_waiting(Fiber* fiber, State state) {
  fiber->state = state;
  fiber->cta->warps[fiber->warp()].ready &= ~(1u << fiber->lane());
  --fiber->cta->ready;
}

static inline void shuffle(unsigned char* items, unsigned count, Random& random) {
  for (unsigned i = count; i > 1; --i) {
    const unsigned j = random.below(i);
    const unsigned char held = items[i - 1];
    items[i - 1] = items[j];
    items[j] = held;
  }
}

static inline void shuffle_priorities(Cta* cta) {
  shuffle(cta->warp_priority, cta->warp_count, cta->random);
  Cluster& cluster = cta->launch->cluster;
  shuffle(cluster.priority, cluster.size, cluster.random);
}

static inline unsigned lowest(unsigned bits) { return static_cast<unsigned>(__builtin_ctz(bits)); }
static inline unsigned highest(unsigned bits) { return 31u - static_cast<unsigned>(__builtin_clz(bits)); }

// The pickers may assume that some fiber is ready.
static Fiber* pick_ascending(Cta* cta) {  // the cursor is the lowest candidate
  if (cta->cursor == cta->threads) cta->cursor = 0;
  unsigned warp = cta->cursor / WARP;
  unsigned bits = cta->warps[warp].ready & ~0u << cta->cursor % WARP;
  while (bits == 0) {
    warp = warp + 1 == cta->warp_count ? 0 : warp + 1;
    bits = cta->warps[warp].ready;
  }
  const unsigned linear = warp * WARP + lowest(bits);
  cta->cursor = linear + 1;
  return &cta->fibers[linear];
}

static Fiber* pick_descending(Cta* cta) {  // the cursor is one above the highest candidate
  if (cta->cursor == 0) cta->cursor = cta->threads;
  unsigned warp = (cta->cursor - 1) / WARP;
  unsigned bits = cta->warps[warp].ready & ~0u >> (WARP - 1 - (cta->cursor - 1) % WARP);
  while (bits == 0) {
    warp = (warp == 0 ? cta->warp_count : warp) - 1;
    bits = cta->warps[warp].ready;
  }
  const unsigned linear = warp * WARP + highest(bits);
  cta->cursor = linear;
  return &cta->fibers[linear];
}

static Fiber* pick_random(Cta* cta) {
  unsigned skip = cta->random.below(cta->ready);
  unsigned warp = 0;
  for (;; ++warp) {
    const unsigned here = static_cast<unsigned>(__builtin_popcount(cta->warps[warp].ready));
    if (skip < here) break;
    skip -= here;
  }
  unsigned bits = cta->warps[warp].ready;
  while (skip-- > 0) bits &= bits - 1;
  return &cta->fibers[warp * WARP + lowest(bits)];
}

static Fiber* pick_warp_greedy(Cta* cta) {
  unsigned rank = 0;
  while (cta->warps[cta->warp_priority[rank]].ready == 0) ++rank;
  const unsigned warp = cta->warp_priority[rank];
  return &cta->fibers[warp * WARP + lowest(cta->warps[warp].ready)];
}

static Fiber* pick_in_block(Cta* cta) {
  switch (cta->launch->request->order) {
    case MHC_DESCENDING: return pick_descending(cta);
    case MHC_RANDOM: return pick_random(cta);
    case MHC_WARP_GREEDY: return pick_warp_greedy(cta);
    default: return pick_ascending(cta);
  }
}

static void start_block(Cta* cta);  // runtime.cpp

// The first block with a ready thread, from `rank` on in steps of 1 or -1.
static Cta* sweep_blocks(const Cluster& cluster, unsigned rank, unsigned step) {
  for (unsigned i = 0; i < cluster.size; ++i, rank = (rank + step) % cluster.size) {
    if (cluster.ctas[rank].ready != 0) return &cluster.ctas[rank];
  }
  return nullptr;
}

// Threads of one block have this many turns on average before another block is drawn. Runs of turns let the progress
// of the blocks differ more than single turns would, and they keep the caches warm.
constexpr unsigned MEAN_TURNS = 32;

static Cta* random_block(Cluster& cluster, unsigned rank) {
  if (cluster.ctas[rank].ready != 0 && cluster.random.below(MEAN_TURNS) != 0) return &cluster.ctas[rank];
  unsigned ready = 0;
  for (unsigned r = 0; r < cluster.size; ++r) ready += cluster.ctas[r].ready;
  if (ready == 0) return nullptr;
  unsigned skip = cluster.random.below(ready);  // each block as likely as its share of the ready threads
  unsigned drawn = 0;
  for (; skip >= cluster.ctas[drawn].ready; ++drawn) skip -= cluster.ctas[drawn].ready;
  return &cluster.ctas[drawn];
}

static Cta* first_block_by_priority(const Cluster& cluster) {
  for (unsigned i = 0; i < cluster.size; ++i) {
    if (cluster.ctas[cluster.priority[i]].ready != 0) return &cluster.ctas[cluster.priority[i]];
  }
  return nullptr;
}

// In the ascending and descending orders a block goes as far as it can before the next one has a turn.
static Fiber* pick_in_cluster(Cluster& cluster, unsigned rank, MhcOrder order) {
  Cta* cta = nullptr;
  switch (order) {
    case MHC_DESCENDING: cta = sweep_blocks(cluster, rank, cluster.size - 1); break;
    case MHC_RANDOM: cta = random_block(cluster, rank); break;
    case MHC_WARP_GREEDY: cta = first_block_by_priority(cluster); break;
    default: cta = sweep_blocks(cluster, rank, 1);
  }
  if (cta == nullptr) return nullptr;
  if (!cta->started) start_block(cta);
  return pick_in_block(cta);
}

// Null if no fiber is ready.
static Fiber* pick_next(Cta* cta) {
  Launch* launch = cta->launch;
  if (launch->cluster.size > 1) {
    return pick_in_cluster(launch->cluster, cta->rank, static_cast<MhcOrder>(launch->request->order));
  }
  return cta->ready != 0 ? pick_in_block(cta) : nullptr;
}

// After a thread has done nothing but wait a little: another block has its turn first.
static Fiber* pick_after_yield(Cta* cta) {
  Launch* launch = cta->launch;
  Cluster& cluster = launch->cluster;
  if (cluster.size == 1) return pick_in_block(cta);
  const MhcOrder order = static_cast<MhcOrder>(launch->request->order);
  const unsigned step = order == MHC_DESCENDING ? cluster.size - 1 : 1;
  return pick_in_cluster(cluster, (cta->rank + step) % cluster.size, order);
}

// Give the turn to `next`, or to the OS thread if that is null. Returns when it is `self`'s turn again.
static void hand_over(Fiber* self, Fiber* next) {
  if (next == self) return;
  Launch* launch = self->cta->launch;
  ++launch->request->switches;
  running = next;
  context_switch(self->context, next != nullptr ? next->context : launch->home);
}

static void give_up_turn(Fiber* self) { hand_over(self, pick_next(self->cta)); }

// Leave the launch for good, from the running fiber: what follows would crash or has no meaning.
[[noreturn]] static void stop_launch() {
  Fiber* self = running;
  self->cta->launch->stopped = true;
  running = nullptr;
  context_switch(self->context, self->cta->launch->home);
  __builtin_unreachable();
}

static void thread_ended(Fiber* fiber);  // sync.h: an exit may complete what others wait for

static void fiber_main() {
  Fiber* self = running;
  const MhcLaunch* request = self->cta->launch->request;
  request->entry(request->arguments);
  thread_ended(self);
  give_up_turn(self);
  __builtin_unreachable();
}

static inline char* stack_of(const Cta* cta, unsigned linear) {
  const MhcLaunch* request = cta->launch->request;
  return request->stacks + (uint64_t{cta->rank} * cta->threads + linear) * request->stack_bytes;
}

static void prepare_fiber(Cta* cta, unsigned linear) {
  Fiber* fiber = &cta->fibers[linear];
  const MhcDim3 shape = cta->launch->request->block;
  fiber->cta = cta;
  fiber->linear = linear;
  fiber->arrival = {};
  fiber->copies = nullptr;
  fiber->index = {linear % shape.x, linear / shape.x % shape.y, linear / shape.x / shape.y};
  char* stack = stack_of(cta, linear);
  uint64_t* canary = reinterpret_cast<uint64_t*>(stack);
  for (unsigned i = 0; i < CANARY_WORDS; ++i) canary[i] = STACK_CANARY;
  // Stacks that start at equal offsets in their pages fight for the same sets of the L1 cache: shift each.
  const uint64_t colour = linear % 61 * 64;
  context_prepare(fiber->context, stack, cta->launch->request->stack_bytes - colour, fiber_main);
  make_ready(fiber);
}

static void check_stacks(Cta* cta) {
  for (unsigned i = 0; i < cta->threads; ++i) {
    const uint64_t* canary = reinterpret_cast<const uint64_t*>(stack_of(cta, i));
    unsigned intact = 0;
    while (intact < CANARY_WORDS && canary[intact] == STACK_CANARY) ++intact;
    if (intact == CANARY_WORDS) continue;
    MhcFinding finding = blank_finding(MHC_STACK, MHC_NO_DETAIL);
    put_thread(finding, 0, &cta->fibers[i]);
    record(cta->launch, finding);
    cta->launch->stopped = true;
  }
}
