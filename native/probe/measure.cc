#include "probe/measure.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <new>
#include <numeric>

#include "probe/threads.h"

// The build lists the instruction sets it has compiled units for: KTK_PROBE_TARGETS(X).
extern "C" {
#define X(isa) extern const ktk_probe_target ktk_probe_##isa;
KTK_PROBE_TARGETS(X)
#undef X
}

namespace ktk::probe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{8} << 20;  // read between two looks at the clock
constexpr double kChunkSeconds = 5e-4;      // the same for arithmetic

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// CPU time of the calling thread.
double thread_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

enum class Per { kSecond, kCpuSecond };

// Work done by all threads, per second of the clock on the wall or of their own CPU time, for
// `seconds` on the wall. step(thread) does some work and says how much.
template <class Step>
double rate(const std::vector<int>& cpus, double seconds, Per per, Step step) {
  std::vector<double> rates(cpus.size());
  on_cpus(cpus, [&](int thread) {
    const Clock::time_point begin = Clock::now();
    const double cpu_begin = thread_seconds();
    double work = 0;
    double elapsed = 0;
    do {
      work += step(thread);
      elapsed = seconds_since(begin);
    } while (elapsed < seconds);
    if (per == Per::kCpuSecond) elapsed = thread_seconds() - cpu_begin;
    rates[static_cast<size_t>(thread)] = work / elapsed;
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace

const std::vector<ktk_probe_unit>& units() {
  static const std::vector<ktk_probe_unit> all = [] {
    std::vector<ktk_probe_unit> found;
#define X(isa) \
  found.insert(found.end(), ktk_probe_##isa.units, ktk_probe_##isa.units + ktk_probe_##isa.size);
    KTK_PROBE_TARGETS(X)
#undef X
    return found;
  }();
  return all;
}

double peak(const ktk_probe_unit& unit, int threads, double seconds, std::vector<int> cpus) {
  cpus = choose_cpus(threads, std::move(cpus));
  // Doubling until the loop is long against the clock also brings the core to its working
  // frequency.
  size_t iterations = 256;
  on_cpus({cpus[0]}, [&](int) {
    for (;;) {
      const Clock::time_point begin = Clock::now();
      unit.run(iterations);
      if (seconds_since(begin) >= kChunkSeconds) return;
      iterations *= 2;
    }
  });
  // A loop in registers only needs its core: other processes that use the CPU for a while change
  // nothing about what the unit can do.
  return rate(cpus, seconds, Per::kCpuSecond, [&](int) {
    unit.run(iterations);
    return unit.ops * static_cast<double>(iterations);
  });
}

Reader::Reader(size_t bytes, int threads, std::vector<int> cpus)
    : cpus_(choose_cpus(threads, std::move(cpus))), parts_(cpus_.size()) {
  const size_t share = (bytes + parts_.size() - 1) / parts_.size();
  part_bytes_ = std::max(share + kHugePage - 1, kHugePage) / kHugePage * kHugePage;
  for (Part& part : parts_) {
    void* mapping = mmap(nullptr, part_bytes_ + kHugePage, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) {
      unmap();
      throw std::bad_alloc();
    }
    part.mapping = static_cast<char*>(mapping);
    const uintptr_t address = reinterpret_cast<uintptr_t>(mapping);
    part.begin = part.mapping + (kHugePage - address % kHugePage) % kHugePage;
    madvise(part.begin, part_bytes_, MADV_HUGEPAGE);
  }
  try {
    on_cpus(cpus_, [&](int thread) {
      const Part& part = parts_[static_cast<size_t>(thread)];
      // Written, not only read: untouched memory is one shared page of zeros.
      for (size_t offset = 0; offset < part_bytes_; offset += 64) part.begin[offset] = 1;
    });
  } catch (...) {
    unmap();
    throw;
  }
}

Reader::~Reader() { unmap(); }

void Reader::unmap() {
  for (const Part& part : parts_) {
    if (part.mapping) munmap(part.mapping, part_bytes_ + kHugePage);
  }
}

double Reader::run(const ReadPattern& pattern, double seconds) {
  const size_t chunk = std::min(kChunk, part_bytes_);
  return rate(cpus_, seconds, Per::kSecond, [&](int thread) {
    Part& part = parts_[static_cast<size_t>(thread)];
    if (part.position + chunk > part_bytes_) part.position = 0;
    pattern.read(part.begin + part.position, chunk);
    part.position += chunk;
    return static_cast<double>(chunk);
  });
}

double Reader::measure(double seconds) {
  if (!pattern_) {
    const double trial = std::max(seconds / static_cast<double>(read_patterns().size()), 0.01);
    double best = 0;
    for (const ReadPattern& pattern : read_patterns()) {
      const double found = run(pattern, trial);
      if (found > best) {
        best = found;
        pattern_ = &pattern;
      }
    }
  }
  return run(*pattern_, seconds);
}

}  // namespace ktk::probe
