// Which worker of a pool belongs on which CPU.
#pragma once

#include <vector>

#include "core/topology.h"
#include "core/worker_pool.h"

namespace ktk {

struct Place {
  int cpu;
  int node;  // position in Topology::nodes
};

// The workers that `options` ask for, grouped by node. Throws std::invalid_argument as WorkerPool,
// also for far more threads than the machine has use for.
std::vector<Place> place_workers(const WorkerPool::Options& options, const Topology& topology);

// Whether every worker may spin while it waits. Not with more threads than CPUs: who spins keeps
// the one it waits for from running. Nor with more than a quota pays for: spinning uses it up.
bool may_spin(const std::vector<Place>& places, const Topology& topology);

// CPUs on which worker 0, the caller, may compute, ascending: those of its node whose core no owned
// thread uses, its own place among them. From another node it would read weights that are far away,
// and a second hardware thread of a busy core is as bad a place as the first.
std::vector<int> caller_cpus(const std::vector<Place>& places, const Topology& topology);

}  // namespace ktk
