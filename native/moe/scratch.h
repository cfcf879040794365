// Memory that calls use and leave, shared by all layers that run on one pool.
#pragma once

#include <vector>

#include "core/memory.h"

namespace ktk {

// Grows, never shrinks, and is bounded by what one chunk of tokens needs (see pipeline.cc).
class Scratch {
 public:
  explicit Scratch(int workers) : own_(static_cast<size_t>(workers)) {}

  // Shared by the workers of a region.
  char* shared(size_t bytes) { return grow(shared_, bytes, -1); }
  // Private to a worker, on its node. Called by that worker only.
  char* own(int worker, size_t bytes, int node) {
    return grow(own_[static_cast<size_t>(worker)], bytes, node);
  }

 private:
  static char* grow(Memory& memory, size_t bytes, int node) {
    if (memory.size() < bytes) memory = Memory(bytes, node);
    return memory.data();
  }

  Memory shared_;
  std::vector<Memory> own_;
};

}  // namespace ktk
