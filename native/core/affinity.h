// Affinity masks of any size: cpu_set_t ends at 1024 CPUs, Linux does not.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <array>
#include <cstddef>
#include <vector>

namespace ktk {

class CpuMask {
 public:
  static constexpr int kMax = 8192;  // the largest NR_CPUS of a distribution kernel

  CpuMask() { CPU_ZERO_S(sizeof bits_, bits_.data()); }
  explicit CpuMask(int cpu) : CpuMask() { add(cpu); }
  explicit CpuMask(const std::vector<int>& cpus) : CpuMask() {
    for (int cpu : cpus) add(cpu);
  }

  void add(int cpu) { CPU_SET_S(static_cast<size_t>(cpu), sizeof bits_, bits_.data()); }
  bool has(int cpu) const {
    return CPU_ISSET_S(static_cast<size_t>(cpu), sizeof bits_, bits_.data());
  }

  // Of a thread, by default the calling one. False when the system refuses.
  bool read(pid_t thread = 0) { return sched_getaffinity(thread, sizeof bits_, bits_.data()) == 0; }
  bool apply() const { return sched_setaffinity(0, sizeof bits_, bits_.data()) == 0; }
  bool apply_to(pthread_t thread) const {
    return pthread_setaffinity_np(thread, sizeof bits_, bits_.data()) == 0;
  }

  std::vector<int> cpus() const {
    std::vector<int> list;
    for (int cpu = 0; cpu < kMax; ++cpu) {
      if (has(cpu)) list.push_back(cpu);
    }
    return list;
  }

 private:
  std::array<cpu_set_t, kMax / CPU_SETSIZE> bits_;
};

}  // namespace ktk
