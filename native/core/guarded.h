// Memory whose bounds are watched, to hold a backend's functions to the sizes of their table.
#pragma once

#include <cstddef>
#include <string>

#include "core/memory.h"

namespace ktk {

// Data that start on a multiple of `align` and end at a page that nobody may touch. What is left
// before them, and fewer than `align` bytes behind them, hold a pattern that check() looks for.
//
//   | no access | pattern ... | data | (pattern) | no access |
//
// The data are 0xff at first, which is a NaN in every float, so that reading what nobody wrote
// shows.
class Guarded {
 public:
  // Throws std::bad_alloc, std::length_error. `align` is a power of two, at most a page.
  Guarded(size_t bytes, size_t align);

  char* data() const { return data_; }
  // Throws std::runtime_error, which begins with `who`, where something beside the data was
  // written.
  void check(const std::string& who) const;

 private:
  Memory memory_;
  char* data_;
  size_t size_;
};

}  // namespace ktk
