// What the race checker remembers of memory: per cell the last write and the reads since.
//
// A cell covers 16 bytes at first. The first access that does not cover whole cells refines the whole buffer to
// smaller ones, copying each cell to its parts; that loses nothing, since earlier accesses covered all of them.
#pragma once

#include "machine.h"

struct Access {
  uint32_t block;  // serial number of the block, from 1; 0 in an empty record
  uint32_t epoch, step, pc;
  uint16_t thread;
  uint16_t flags;  // MhcAccessFlags
  uint32_t warp() const { return thread / WARP; }
  uint32_t lane() const { return thread % WARP; }
};

struct Cell {
  Access write;
  Access read;    // the first of the list of reads
  uint32_t more;  // the rest of it: an index into the pool, 0 for none
};

struct Node {
  Access access;
  uint32_t next;
};

// Nodes for the cells that several threads have read. Index 0 means none.
struct NodePool {
  static constexpr unsigned CHUNK_BITS = 14;
  static constexpr unsigned CHUNK = 1u << CHUNK_BITS;
  static constexpr unsigned MAX_CHUNKS = 4096;
  Node* chunks[MAX_CHUNKS];
  unsigned used;  // indexes handed out so far, including the unused 0
  uint32_t free;  // list of returned nodes

  Node& at(uint32_t index) { return chunks[index >> CHUNK_BITS][index % CHUNK]; }

  // 0 if there is no memory; the checker then forgets a read, and the launch ends with an error.
  uint32_t take() {
    if (free != 0) {
      const uint32_t index = free;
      free = at(index).next;
      return index;
    }
    if (used == 0) used = 1;
    const unsigned chunk = used >> CHUNK_BITS;
    if (chunk >= MAX_CHUNKS) return 0;
    if (chunks[chunk] == nullptr) {
      chunks[chunk] = static_cast<Node*>(map_pages(CHUNK * sizeof(Node)));
      if (chunks[chunk] == nullptr) return 0;
    }
    return used++;
  }

  void give_back(uint32_t list) {
    while (list != 0) {
      const uint32_t next = at(list).next;
      at(list).next = free;
      free = list;
      list = next;
    }
  }

  void release() {
    for (Node* chunk : chunks) unmap_pages(chunk, CHUNK * sizeof(Node));
  }
};

constexpr unsigned COARSEST = 4;  // log2 of the bytes of a cell at first

// The shadow of one region.
struct Shadow {
  uint64_t low, high;    // of the data
  uint64_t guard;        // bytes of guard band on either side
  MhcRegion* region;
  uint32_t index;        // of the region in the launch
  unsigned cell_bits;    // log2 of the bytes of a cell
  Cell* cells;
  Cta* owner;  // of shared memory; null for global memory

  uint64_t cell_count() const { return ((high - low) >> cell_bits) + 1; }
};

static inline uint64_t shadow_bytes(const Shadow& shadow) { return shadow.cell_count() * sizeof(Cell); }

static inline bool create_shadow(Shadow& shadow) {
  shadow.cell_bits = COARSEST;
  shadow.cells = static_cast<Cell*>(map_pages(shadow_bytes(shadow)));
  return shadow.cells != nullptr;
}

// Cells of 2^bits bytes from now on, fewer than before.
static inline bool refine_shadow(Shadow& shadow, NodePool& pool, unsigned bits) {
  Shadow finer = shadow;
  finer.cell_bits = bits;
  finer.cells = static_cast<Cell*>(map_pages(shadow_bytes(finer)));
  if (finer.cells == nullptr) return false;
  const unsigned parts = 1u << (shadow.cell_bits - bits);
  const uint64_t count = finer.cell_count();
  for (uint64_t i = 0; i < shadow.cell_count(); ++i) {
    const Cell& whole = shadow.cells[i];
    if (whole.write.block == 0 && whole.read.block == 0) continue;
    for (uint64_t part = i * parts; part < (i + 1) * parts && part < count; ++part) {
      Cell& cell = finer.cells[part];
      cell = whole;
      cell.more = 0;
      for (uint32_t node = whole.more; node != 0; node = pool.at(node).next) {
        const uint32_t copy = pool.take();
        if (copy == 0) return false;
        pool.at(copy) = {pool.at(node).access, cell.more};
        cell.more = copy;
      }
    }
    pool.give_back(whole.more);
  }
  unmap_pages(shadow.cells, shadow_bytes(shadow));
  shadow = finer;
  return true;
}
