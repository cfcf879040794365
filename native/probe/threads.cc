#include "probe/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

namespace ktk::probe {
namespace {

constexpr int kMaxCpus = 8192;

// cpu_set_t of any size, freed at the end.
struct CpuSet {
  size_t size = CPU_ALLOC_SIZE(kMaxCpus);
  cpu_set_t* set = CPU_ALLOC(kMaxCpus);
  CpuSet() { CPU_ZERO_S(size, set); }
  ~CpuSet() { CPU_FREE(set); }
  CpuSet(const CpuSet&) = delete;
  CpuSet& operator=(const CpuSet&) = delete;
};

std::vector<int> allowed_cpus() {
  CpuSet mask;
  std::vector<int> cpus;
  if (sched_getaffinity(0, mask.size, mask.set) != 0) return cpus;
  for (int cpu = 0; cpu < kMaxCpus; cpu++) {
    if (CPU_ISSET_S(cpu, mask.size, mask.set)) cpus.push_back(cpu);
  }
  return cpus;
}

void pin(int cpu) {
  CpuSet mask;
  CPU_SET_S(cpu, mask.size, mask.set);
  // Refused only where the mask changed in between; then the thread runs unpinned.
  pthread_setaffinity_np(pthread_self(), mask.size, mask.set);
}

}  // namespace

std::vector<int> choose_cpus(int threads, std::vector<int> cpus) {
  if (threads < 1) {
    throw std::invalid_argument("threads must be at least 1, got " + std::to_string(threads));
  }
  const std::vector<int> allowed = allowed_cpus();
  if (cpus.empty()) cpus = allowed;
  if (static_cast<size_t>(threads) > cpus.size()) {
    throw std::invalid_argument(std::to_string(threads) + " threads need as many CPUs, but only " +
                                std::to_string(cpus.size()) + " may be used");
  }
  cpus.resize(static_cast<size_t>(threads));
  for (int cpu : cpus) {
    if (std::find(allowed.begin(), allowed.end(), cpu) == allowed.end()) {
      throw std::invalid_argument("CPU " + std::to_string(cpu) +
                                  " is not in the affinity mask of this process");
    }
  }
  return cpus;
}

void on_cpus(const std::vector<int>& cpus, const std::function<void(int)>& body) {
  std::barrier start(static_cast<std::ptrdiff_t>(cpus.size()));
  std::atomic<bool> all = true;
  std::vector<std::thread> threads;
  threads.reserve(cpus.size());
  std::string refused;
  while (threads.size() < cpus.size() && refused.empty()) {
    try {
      threads.emplace_back([&, i = threads.size()] {
        pin(cpus[i]);
        start.arrive_and_wait();
        if (all) body(static_cast<int>(i));
      });
    } catch (const std::exception& error) {  // the system, or memory
      refused = "the system started " + std::to_string(threads.size()) + " of " +
                std::to_string(cpus.size()) + " threads, and no more (" + error.what() +
                "): use fewer, or raise the limits (ulimit -u, pids.max)";
      all = false;
      // Those that are there wait for the others.
      for (size_t i = threads.size(); i < cpus.size(); ++i) start.arrive_and_drop();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!refused.empty()) throw std::runtime_error(refused);
}

}  // namespace ktk::probe
