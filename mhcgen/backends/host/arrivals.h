// Values sent to other blocks, and the counters of bytes by which those know that all have arrived.
//
// A block's memory changes when the last byte comes that its counter expects. A send is ordered before what follows
// a wait for its counter; nothing else is, neither other sends nor what the sender did before (race.h).
#pragma once

#include "cluster.h"
#include "counters.h"

constexpr int MAX_EXPECTED = (1 << 20) - 1;  // what an mbarrier can count

// ---- reports -------------------------------------------------------------------------------------------------

static void put_start(MhcFinding& finding, const Cta* cta, const Counter& counter) {
  put_thread(finding, 0, &cta->fibers[counter.thread]);
  finding.line[0] = static_cast<uint32_t>(counter.line);
  finding.pc[0] = counter.call_site;
}

// `counter` is one of `cta`, null where there is none.
static void report_arrivals(MhcDetail detail, uint64_t value, const Cta* cta, const Counter* counter, int line) {
  MhcFinding finding = blank_finding(MHC_ARRIVALS, detail);
  finding.value = value;
  if (counter != nullptr) put_start(finding, cta, *counter);
  put_call(finding, counter != nullptr ? 1 : 0, running, line);
  record(cta->launch, finding);
}

static void check_aligned(const void* address, uint64_t bytes, int line) {
  if (reinterpret_cast<uint64_t>(address) % bytes == 0) return;
  MhcFinding finding = blank_finding(MHC_MISALIGNED, MHC_NO_DETAIL);
  finding.value = bytes;
  put_call(finding, 0, running, line);
  record(running->cta->launch, finding);
  stop_launch();
}

// ---- counters ------------------------------------------------------------------------------------------------

static uint64_t offset_of(void* counter, int line) {
  const Cta* cta = running->cta;
  check_aligned(counter, sizeof(unsigned long long), line);
  return static_cast<char*>(map_shared(counter, static_cast<int>(cta->rank), line)) - cta->shared;
}

// The counter that `cta` keeps at this offset; the launch ends here if there is none.
static Counter& started_counter(const Cta* cta, uint64_t offset, int line) {
  Counter* counter = find_counter(cta, offset);
  if (counter == nullptr) {
    report_arrivals(MHC_ARRIVALS_NO_START, cta->linear, cta, nullptr, line);
    stop_launch();
  }
  if (cta->launch->race != nullptr && !ordered_before(counter->start, running)) {
    report_arrivals(MHC_ARRIVALS_UNORDERED, 0, cta, counter, line);
  }
  return *counter;
}

static void expect_arrivals(void* address, int bytes, int line, const void* pc) {
  Fiber* self = running;
  Cta* cta = self->cta;
  Launch* launch = cta->launch;
  launch->idle_yields = 0;
  const uint64_t offset = offset_of(address, line);
  if (bytes < 0 || bytes > MAX_EXPECTED) {
    report_arrivals(MHC_ARRIVALS_BYTES, static_cast<uint64_t>(int64_t{bytes}), cta, nullptr, line);
    stop_launch();
  }
  const Counter* earlier = find_counter(cta, offset);
  if (earlier != nullptr) {
    report_arrivals(MHC_ARRIVALS_TWICE, 0, cta, earlier, line);
    return;
  }
  if (launch->counters == nullptr) launch->counters = static_cast<Counters*>(map_pages(sizeof(Counters)));
  if (launch->counters == nullptr) {
    launch->out_of_memory = true;
    stop_launch();
  }
  unsigned& used = launch->counters->used[cta->rank];
  if (used == Counters::PER_BLOCK) {
    report_arrivals(MHC_ARRIVALS_TOO_MANY, Counters::PER_BLOCK, cta, nullptr, line);
    stop_launch();
  }
  Counter& counter = launch->counters->of[cta->rank][used++];
  counter = {};
  counter.offset = offset;
  counter.expected = static_cast<uint32_t>(bytes);
  counter.thread = self->linear;
  counter.line = line;
  counter.call_site = self->call_site;
  if (launch->race == nullptr) return;
  note_access(address, sizeof(unsigned long long), MHC_ACCESS_WRITE, pc);
  counter.start = access_of(self, MHC_ACCESS_WRITE, self->call_site);
}

// Before the first block of a cluster runs.
static void reset_counters(Launch* launch) {
  if (launch->counters == nullptr) return;
  for (unsigned rank = 0; rank < launch->cluster.size; ++rank) {
    for (unsigned slot = 0; slot < launch->counters->used[rank]; ++slot) {
      Counter& counter = launch->counters->of[rank][slot];
      drop_writes(launch, counter.held);
      if (launch->race != nullptr) launch->race->pool.give_back(counter.waits);
    }
    launch->counters->used[rank] = 0;
  }
}

// All threads of the block have returned. What it expects must have arrived by then in every order of threads; only
// a wait says so.
static void check_awaited(const Cta* cta) {
  const Counters* counters = cta->launch->counters;
  if (counters == nullptr) return;
  for (unsigned slot = 0; slot < counters->used[cta->rank]; ++slot) {
    const Counter& counter = counters->of[cta->rank][slot];
    if (counter.awaited || counter.expected == 0) continue;
    MhcFinding finding = blank_finding(MHC_ARRIVALS, MHC_ARRIVALS_NOT_AWAITED);
    finding.value = counter.expected;
    put_start(finding, cta, counter);
    record(cta->launch, finding);
  }
}

// ---- sends and waits -----------------------------------------------------------------------------------------

static unsigned slot_of(const Cta* cta, const Counter& counter) {
  return static_cast<unsigned>(&counter - cta->launch->counters->of[cta->rank]);
}

static void land_arrivals(Cta* cta, Counter& counter) {
  land_writes(cta->launch, counter.held);
  for (unsigned i = 0; i < cta->threads; ++i) {
    Fiber* fiber = &cta->fibers[i];
    if (fiber->state == State::AtCounter && fiber->block_call.op == slot_of(cta, counter)) make_ready(fiber);
  }
  if (cta->launch->request->order == MHC_WARP_GREEDY) shuffle_priorities(cta);
}

static void send(void* to, uint64_t value, uint32_t bytes, void* address, int rank, int line, const void* pc) {
  Launch* launch = running->cta->launch;
  launch->idle_yields = 0;
  check_aligned(to, bytes, line);
  const uint64_t offset = offset_of(address, line);
  void* theirs = map_shared(to, rank, line);
  Cta* cta = &launch->cluster.ctas[rank];
  if (cta->live == 0) {
    report_arrivals(MHC_ARRIVALS_AFTER_EXIT, cta->linear, cta, nullptr, line);
    return;
  }
  Counter& counter = started_counter(cta, offset, line);
  if (bytes > counter.expected - counter.arrived) {
    report_arrivals(MHC_ARRIVALS_EXCESS, counter.expected, cta, &counter, line);
    return;
  }
  note_access(theirs, bytes, counter_flags(cta->rank, slot_of(cta, counter)), pc);
  if (hold_write(launch, counter.held, theirs, &value, bytes) == nullptr) {
    launch->out_of_memory = true;
    stop_launch();
  }
  counter.arrived += bytes;
  if (counter.arrived == counter.expected) land_arrivals(cta, counter);
}

// A wait has ended: in race mode, what is ordered after it is ordered after all sends.
static void note_awaited(Counter& counter) {
  const Fiber* self = running;
  Launch* launch = self->cta->launch;
  counter.awaited = true;
  const unsigned lane = 1u << self->lane();
  if (launch->race == nullptr || (counter.waiters[self->warp()] & lane) != 0) return;
  NodePool& pool = launch->race->pool;
  const uint32_t node = pool.take();
  if (node == 0) {
    launch->out_of_memory = true;
    return;
  }
  counter.waiters[self->warp()] |= lane;
  pool.at(node) = {access_of(self, 0, self->call_site), counter.waits};
  counter.waits = node;
}

static void wait_for_arrivals(void* address, int line) {
  Fiber* self = running;
  const Cta* cta = self->cta;
  cta->launch->idle_yields = 0;
  Counter& counter = started_counter(cta, offset_of(address, line), line);
  if (counter.arrived != counter.expected) {
    self->block_call = {slot_of(cta, counter), 0, line};
    make_waiting(self, State::AtCounter);
    give_up_turn(self);
  }
  note_awaited(counter);
}
