// Block barriers, warp operations and their rules.
//
// Threads that meet must come from the same source line. The hardware is laxer; CUDA C++ is not, and a mismatch
// is nearly always a mistake. A lane that returned counts as arrived at warp operations, as on the hardware.
#pragma once

#include "race.h"
#include "scheduler.h"

static int line_of_wait(const Fiber* fiber) {
  switch (fiber->state) {
    case State::AtBlockBarrier:
    case State::AtNamedBarrier:
    case State::AtClusterBarrier:
    case State::AtCounter: return fiber->block_call.line;
    case State::InWarpOperation: return fiber->warp_call.line;
    default: return 0;
  }
}

// ---- block barrier -------------------------------------------------------------------------------------------

static void check_block_barrier(Cta* cta, const Fiber* first) {
  for (unsigned i = 0; i < cta->threads; ++i) {
    const Fiber* fiber = &cta->fibers[i];
    MhcDetail detail = MHC_NO_DETAIL;
    if (fiber->state == State::Done) {
      detail = MHC_BARRIER_EXITED;
    } else if (fiber->block_call.op != first->block_call.op) {
      detail = MHC_BARRIER_KINDS;
    } else if (fiber->block_call.line != first->block_call.line) {
      detail = MHC_BARRIER_LINES;
    }
    if (detail == MHC_NO_DETAIL) continue;
    MhcFinding finding = blank_finding(MHC_BARRIER, detail);
    put_call(finding, 0, first, first->block_call.line);
    put_call(finding, 1, fiber, detail == MHC_BARRIER_EXITED ? 0 : fiber->block_call.line);
    record(cta->launch, finding);
  }
}

static void release_block_barrier(Cta* cta) {
  const Fiber* first = nullptr;
  int count = 0;
  for (unsigned i = 0; i < cta->threads; ++i) {
    const Fiber* fiber = &cta->fibers[i];
    if (fiber->state != State::AtBlockBarrier) continue;
    if (first == nullptr) first = fiber;
    count += fiber->block_call.predicate;
  }
  check_block_barrier(cta, first);
  const int arrived = static_cast<int>(cta->at_barrier);
  for (unsigned i = 0; i < cta->threads; ++i) {
    Fiber* fiber = &cta->fibers[i];
    if (fiber->state != State::AtBlockBarrier) continue;
    switch (fiber->block_call.op) {
      case MHC_SYNC_COUNT: fiber->result = static_cast<uint64_t>(count); break;
      case MHC_SYNC_AND: fiber->result = count == arrived; break;
      case MHC_SYNC_OR: fiber->result = count != 0; break;
      default: fiber->result = 0;
    }
    make_ready(fiber);
  }
  if (cta->clocks != nullptr) join_block(cta);
  cta->at_barrier = 0;
  ++cta->epoch;
  if (cta->launch->request->order == MHC_WARP_GREEDY) shuffle_priorities(cta);
}

static int sync_block(unsigned op, int predicate, int line) {
  Fiber* self = running;
  Cta* cta = self->cta;
  cta->launch->idle_yields = 0;
  self->block_call = {op, predicate, line};
  make_waiting(self, State::AtBlockBarrier);
  ++cta->at_barrier;
  if (cta->at_barrier == cta->live) release_block_barrier(cta);
  give_up_turn(self);
  return static_cast<int>(self->result);
}

// ---- named barrier -------------------------------------------------------------------------------------------

static void report_named(Cta* cta, MhcDetail detail, const Fiber* first, const Fiber* second, unsigned number) {
  MhcFinding finding = blank_finding(MHC_BARRIER, detail);
  finding.value = number;
  put_call(finding, 0, first, first->block_call.line);
  if (second != nullptr) put_call(finding, 1, second, second == first ? 0 : line_of_wait(second));
  record(cta->launch, finding);
}

static unsigned lanes_of_warp(const Cta* cta, unsigned warp) {
  const unsigned lanes = cta->threads - warp * WARP;
  return lanes >= WARP ? ~0u : (1u << lanes) - 1;
}

static void release_named_barrier(Cta* cta, unsigned number) {
  NamedBarrier& barrier = cta->named[number];
  unsigned warps = 0;
  const Fiber* first = nullptr;
  for (unsigned w = 0; w < cta->warp_count; ++w) {
    if (barrier.lanes[w] == 0) continue;
    warps |= 1u << w;
    Fiber* lanes = &cta->fibers[w * WARP];
    if (first == nullptr) first = &lanes[lowest(barrier.lanes[w])];
    const unsigned absent = lanes_of_warp(cta, w) & ~barrier.lanes[w];  // also lanes that have returned
    if (absent != 0) {
      report_named(cta, MHC_BARRIER_NAMED_PARTIAL, &lanes[lowest(barrier.lanes[w])], &lanes[lowest(absent)], number);
    }
    for (unsigned rest = barrier.lanes[w]; rest != 0; rest &= rest - 1) {
      Fiber* fiber = &lanes[lowest(rest)];
      if (fiber->block_call.line != first->block_call.line) {
        report_named(cta, MHC_BARRIER_LINES, first, fiber, number);
      }
      make_ready(fiber);
    }
  }
  if (cta->clocks != nullptr) join_warps(cta->clocks, warps, barrier.lanes, cta->warp_count);
  barrier = {};
}

static void sync_named(unsigned number, unsigned threads, int line) {
  Fiber* self = running;
  Cta* cta = self->cta;
  cta->launch->idle_yields = 0;
  self->block_call = {number, 0, line};
  // Number 0 belongs to __syncthreads; a count that is no whole number of warps is undefined in PTX.
  if (number == 0 || number >= NamedBarrier::COUNT || threads == 0 || threads % WARP != 0 || threads > MAX_THREADS) {
    report_named(cta, MHC_BARRIER_NAMED_ARGUMENTS, self, nullptr, number);
    return;
  }
  NamedBarrier& barrier = cta->named[number];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) report_named(cta, MHC_BARRIER_NAMED_COUNTS, self, nullptr, number);
  make_waiting(self, State::AtNamedBarrier);
  barrier.lanes[self->warp()] |= 1u << self->lane();
  if (++barrier.arrived == barrier.expected) release_named_barrier(cta, number);
  give_up_turn(self);
}

// ---- warp operations -----------------------------------------------------------------------------------------

// The lane whose value a shuffle hands to `lane`; itself where CUDA says "unchanged".
static unsigned shuffle_source(const WarpCall& call, unsigned lane) {
  const unsigned width = static_cast<unsigned>(call.width);
  const unsigned first = lane & ~(width - 1);
  const unsigned argument = call.argument % WARP;
  switch (call.op) {
    case MHC_SHFL_INDEX: return first + argument % width;
    case MHC_SHFL_XOR: return (lane ^ argument) < first + width ? lane ^ argument : lane;
    case MHC_SHFL_UP: return lane >= first + argument ? lane - argument : lane;
    default: return lane + argument < first + width ? lane + argument : lane;
  }
}

static inline bool is_shuffle(unsigned op) { return op >= MHC_SHFL_INDEX && op <= MHC_SHFL_DOWN; }

static void check_warp_lines(Cta* cta, const Fiber* lanes, unsigned together) {
  const Fiber* first = &lanes[lowest(together)];
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const Fiber* fiber = &lanes[lowest(rest)];
    if (fiber->warp_call.line == first->warp_call.line) continue;
    MhcFinding finding = blank_finding(MHC_MASK, MHC_MASK_LINES);
    finding.mask = fiber->warp_call.mask;
    put_call(finding, 0, first, first->warp_call.line);
    put_call(finding, 1, fiber, fiber->warp_call.line);
    record(cta->launch, finding);
  }
}

static uint64_t shuffled_value(Cta* cta, const Fiber* lanes, const Fiber* self, unsigned together) {
  const unsigned source = shuffle_source(self->warp_call, self->lane());
  if (together >> source & 1) return lanes[source].warp_call.value;
  MhcFinding finding = blank_finding(MHC_SHUFFLE, MHC_SHUFFLE_INACTIVE);
  finding.mask = self->warp_call.mask;
  put_call(finding, 0, self, self->warp_call.line);
  finding.block[1] = cta->linear;
  finding.thread[1] = self->warp() * WARP + source;
  record(cta->launch, finding);
  return ~uint64_t{0};  // undefined in CUDA; a NaN here, so that using it shows
}

// `together` are the lanes that meet; they agree on operation and mask.
static void complete_warp_operation(Cta* cta, unsigned warp, unsigned together) {
  Fiber* lanes = &cta->fibers[warp * WARP];
  check_warp_lines(cta, lanes, together);
  unsigned votes = 0;
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const unsigned lane = lowest(rest);
    votes |= static_cast<unsigned>(lanes[lane].warp_call.value & 1) << lane;
  }
  const unsigned op = lanes[lowest(together)].warp_call.op;
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    Fiber* self = &lanes[lowest(rest)];
    if (is_shuffle(op)) {
      self->result = shuffled_value(cta, lanes, self, together);
    } else if (op == MHC_BALLOT) {
      self->result = votes;
    } else if (op == MHC_ANY) {
      self->result = votes != 0;
    } else {
      self->result = votes == together;
    }
  }
  // Only __syncwarp orders memory. CUDA gives shuffles and votes no such effect.
  if (op == MHC_SYNCWARP && cta->clocks != nullptr) join_lanes(cta->clocks, warp, together);
  cta->warps[warp].waiting &= ~together;
  for (unsigned rest = together; rest != 0; rest &= rest - 1) make_ready(&lanes[lowest(rest)]);
}

// Completes the operation that `lane` waits in, if every live lane of its mask waits in the same one.
static bool try_warp_operation(Cta* cta, unsigned warp, unsigned lane) {
  const Warp& state = cta->warps[warp];
  const Fiber* lanes = &cta->fibers[warp * WARP];
  const WarpCall& call = lanes[lane].warp_call;
  const unsigned together = call.mask & state.live;
  if ((together & ~state.waiting) != 0) return false;
  for (unsigned rest = together; rest != 0; rest &= rest - 1) {
    const WarpCall& other = lanes[lowest(rest)].warp_call;
    if (other.op != call.op || other.mask != call.mask) return false;
  }
  complete_warp_operation(cta, warp, together);
  return true;
}

static void report_call(Fiber* self, MhcDetail detail, unsigned mask, uint64_t value, int line) {
  MhcFinding finding = blank_finding(MHC_MASK, detail);
  finding.mask = mask;
  finding.value = value;
  put_call(finding, 0, self, line);
  record(self->cta->launch, finding);
}

static uint64_t sync_warp(const WarpCall& call) {
  Fiber* self = running;
  Cta* cta = self->cta;
  cta->launch->idle_yields = 0;
  self->warp_call = call;
  if ((call.mask >> self->lane() & 1) == 0) {
    report_call(self, MHC_MASK_WITHOUT_SELF, call.mask, 0, call.line);
    return ~uint64_t{0};  // undefined; waiting for others would only hide the report behind a deadlock
  }
  const unsigned width = static_cast<unsigned>(call.width);
  if (width == 0 || width > WARP || (width & (width - 1)) != 0) {
    report_call(self, MHC_MASK_WIDTH, call.mask, width, call.line);
    self->warp_call.width = WARP;
  }
  make_waiting(self, State::InWarpOperation);
  cta->warps[self->warp()].waiting |= 1u << self->lane();
  try_warp_operation(cta, self->warp(), self->lane());
  give_up_turn(self);
  return self->result;
}

// ---- the end of a thread, and of hope ------------------------------------------------------------------------

static void leave_cluster(Fiber* fiber);   // cluster.h
static void report_copies(Fiber* fiber);  // copies.h

static void thread_ended(Fiber* fiber) {
  Cta* cta = fiber->cta;
  const unsigned warp = fiber->warp();
  cta->launch->idle_yields = 0;
  if (fiber->copies != nullptr) report_copies(fiber);
  make_waiting(fiber, State::Done);
  cta->warps[warp].live &= ~(1u << fiber->lane());
  --cta->live;
  unsigned waiting = cta->warps[warp].waiting;
  while (waiting != 0) {
    const unsigned lane = lowest(waiting);
    waiting &= waiting - 1;
    if (try_warp_operation(cta, warp, lane)) waiting &= cta->warps[warp].waiting;
  }
  if (cta->at_barrier != 0 && cta->at_barrier == cta->live) release_block_barrier(cta);
  leave_cluster(fiber);
}

static void yield_turn(int line) {
  Fiber* self = running;
  Cta* cta = self->cta;
  if (++cta->launch->idle_yields > MAX_IDLE_YIELDS * cta->launch->cluster.live) {
    MhcFinding finding = blank_finding(MHC_DEADLOCK, MHC_DEADLOCK_SPINNING);
    put_call(finding, 0, self, line);
    record(cta->launch, finding);
    stop_launch();
  }
  if (cta->launch->request->order == MHC_WARP_GREEDY) shuffle_priorities(cta);  // let others overtake
  hand_over(self, pick_after_yield(cta));
}
