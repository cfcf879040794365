// Runs the probe's loops on pinned threads of its own and divides by the clock.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "probe/read.h"
#include "probe/unit.h"

namespace ktk::probe {

// Units this build contains, in the order of native/isa/meson.build.
const std::vector<ktk_probe_unit>& units();

// Operations per second of all threads together while each repeats the unit's loop for `seconds`.
// Counted per CPU time, so that sharing the CPUs does not lower it. The threads are pinned to
// `cpus` (one each; empty: the CPUs of the affinity mask in order).
double peak(const ktk_probe_unit& unit, int threads, double seconds, std::vector<int> cpus);

// Memory that every thread has a part of, made once so that measuring again is cheap.
class Reader {
 public:
  // Throws std::bad_alloc. Each thread touches its own part first: on NUMA machines it is local.
  Reader(size_t bytes, int threads, std::vector<int> cpus);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Bytes per second of all threads together. The first call tries all patterns and keeps the
  // best. Every call goes on where the last one stopped.
  double measure(double seconds);

  // Name of the pattern that measure() uses, empty before the first call.
  std::string pattern() const { return pattern_ ? pattern_->name : ""; }
  size_t bytes() const { return part_bytes_ * parts_.size(); }

 private:
  struct Part {
    char* mapping = nullptr;
    char* begin = nullptr;
    size_t position = 0;
  };
  double run(const ReadPattern& pattern, double seconds);
  void unmap();

  std::vector<int> cpus_;
  std::vector<Part> parts_;
  size_t part_bytes_ = 0;
  const ReadPattern* pattern_ = nullptr;
};

}  // namespace ktk::probe
