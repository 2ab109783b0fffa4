// Writes that have been issued and have not landed yet: of asynchronous copies and of sends.
#pragma once

#include "machine.h"

struct HeldWrite {
  HeldWrite* next;
  void* to;
  uint64_t data[2];
  uint32_t bytes, call_site;
  int line;
};

struct HeldChunk {
  static constexpr unsigned COUNT = 1024;
  HeldChunk* next;
  HeldWrite items[COUNT];
};

// Puts a write in front of `list`. Null if there is no memory.
static HeldWrite* hold_write(Launch* launch, HeldWrite*& list, void* to, const void* data, uint32_t bytes) {
  HeldPool& pool = launch->held;
  if (pool.free == nullptr) {
    HeldChunk* chunk = static_cast<HeldChunk*>(map_pages(sizeof(HeldChunk)));
    if (chunk == nullptr) return nullptr;
    chunk->next = pool.chunks;
    pool.chunks = chunk;
    for (HeldWrite& item : chunk->items) {
      item.next = pool.free;
      pool.free = &item;
    }
  }
  HeldWrite* held = pool.free;
  pool.free = held->next;
  held->next = list;
  held->to = to;
  held->bytes = bytes;
  memcpy(held->data, data, bytes);
  list = held;
  return held;
}

static void drop_writes(Launch* launch, HeldWrite*& list) {
  while (list != nullptr) {
    HeldWrite* held = list;
    list = held->next;
    held->next = launch->held.free;
    launch->held.free = held;
  }
}

static void land_writes(Launch* launch, HeldWrite*& list) {
  for (const HeldWrite* held = list; held != nullptr; held = held->next) memcpy(held->to, held->data, held->bytes);
  drop_writes(launch, list);
}

static void release_held(Launch* launch) {
  while (launch->held.chunks != nullptr) {
    HeldChunk* chunk = launch->held.chunks;
    launch->held.chunks = chunk->next;
    unmap_pages(chunk, sizeof(HeldChunk));
  }
}
