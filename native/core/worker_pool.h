// The threads that do the work, and the loop they share.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/topology.h"

namespace ktk {

// Threads that run parallel regions, one region at a time.
//
// A pool of n workers owns n - 1 threads; worker 0 is whoever calls run(). Every owned thread is
// pinned to one CPU of the topology the pool was made with. A caller that happens to sit on the CPU
// of an owned thread, or on another node than worker 0, is moved to a free CPU of worker 0's node
// for the region (its affinity mask is left as it was).
// Idle threads spin for a short while (tens of microseconds to a few hundred), then sleep on a
// futex: an idle process uses no CPU.
//
// Thread-safe: concurrent callers of run() take turns.
class WorkerPool {
 public:
  struct Options {
    int threads = 0;        // 0: topology.default_threads()
    std::vector<int> cpus;  // CPUs of workers 0..n-1; empty: spread over the nodes' cores in order
    bool pin = true;
  };
  // Throws std::invalid_argument for thread counts < 0 or CPUs outside the topology,
  // std::runtime_error when threads cannot be made.
  explicit WorkerPool(const Options& options, const Topology& topology = ktk::topology());
  // Waits for the region that is running.
  ~WorkerPool();

  int size() const;
  // Worker w's position in topology().nodes, for placing its memory. Workers are grouped by node.
  int node_of(int worker) const;
  // CPU that worker w is (or, worker 0, would be) pinned to; -1 when not pinned.
  int cpu_of(int worker) const;

  // Calls body(worker) once on each worker and returns when all have returned. The first exception
  // thrown by a body is rethrown here, after all bodies have ended. Throws std::logic_error when
  // called from inside a body of any pool, or in a process that was forked after the pool was made
  // ("... make a new WorkerPool after fork()").
  void run(const std::function<void(int)>& body);

  // Inside a body: waits until all workers of the region have arrived. Every worker must call it
  // equally often, or leave its body by exception, which releases the others with an exception of
  // their own (internal type; run() rethrows the original).
  void barrier();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ktk
