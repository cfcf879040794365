// Processors and NUMA nodes, as sysfs and the affinity mask of the process describe them.
#pragma once

#include <string>
#include <vector>

namespace ktk {

struct Node {
  int id = 0;              // as in /sys/devices/system/node/node<id>; ids may have gaps
  std::vector<int> cores;  // one usable CPU of every physical core, ascending
  std::vector<int> cpus;   // all usable CPUs, hardware threads included, ascending
  bool has_memory = true;
  // core_of[i] is the member of `cores` that shares its physical core with cpus[i].
  std::vector<int> core_of;
};

struct Topology {
  std::vector<Node> nodes;  // only those with at least one usable CPU, by id
  // CPUs that the cgroup's quota pays for (cpu.max), rounded up; 0 when there is no quota.
  int quota = 0;

  // Physical cores inside the affinity mask, at most `quota` of them: the default thread count.
  int default_threads() const;
};

// Reads the tree under `root` ("/" on a real machine; tests pass a fake one, whose layout below
// root is that of /sys and /proc/self and /sys/fs/cgroup). `allowed` are the CPUs of the affinity
// mask. Falls back to one node with all of `allowed` when sysfs says nothing.
Topology read_topology(const std::string& root, const std::vector<int>& allowed);

// CPUs in the affinity mask of the calling thread. Where variables let OpenMP bind threads, those
// of all threads of the process: its first parallel region, in torch say, leaves each thread one
// place.
std::vector<int> affinity_mask();

// Of this process, computed once from "/" and the mask at first use.
const Topology& topology();

}  // namespace ktk
