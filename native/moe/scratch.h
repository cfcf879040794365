// Memory that calls use and leave, shared by all layers that run on one pool.
#pragma once

#include <vector>

#include "core/memory.h"
#include "moe/carver.h"

namespace ktk {

// Grows, never shrinks, and is bounded by what one chunk of tokens needs (see pipeline.cc).
class Scratch {
 public:
  explicit Scratch(int workers) : own_(static_cast<size_t>(workers)) {}

  // Shared by the workers of a region.
  char* shared(const Carver& pieces) { return place(shared_, pieces, -1); }
  // Private to a worker, on its node. Called by that worker only.
  char* own(int worker, const Carver& pieces, int node) {
    return place(own_[static_cast<size_t>(worker)], pieces, node);
  }

 private:
  // Panels are read row by row, each row a page or more behind the other: the last of them shall be
  // in a huge page, too.
  static size_t whole_pages(size_t bytes) {
    constexpr size_t kHugePage = size_t{2} << 20;
    return guard_mode || bytes < kHugePage / 2 ? bytes : round_up(bytes, kHugePage);
  }
  static char* place(Memory& memory, const Carver& pieces, int node) {
    if (memory.size() < pieces.size()) memory = Memory(whole_pages(pieces.size()), node);
    pieces.guard(memory.data());
    return memory.data();
  }

  Memory shared_;
  std::vector<Memory> own_;
};

}  // namespace ktk
