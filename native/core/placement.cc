#include "core/placement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ktk {
namespace {

// `threads` workers, grouped by node. Nodes get workers in proportion to their cores, because
// every node's memory channels are wanted; a node's cores come before its second hardware threads.
std::vector<Place> spread(const Topology& topology, int threads) {
  const size_t nodes = topology.nodes.size();
  std::vector<size_t> share(nodes, 0);
  for (int i = 0; i < threads; ++i) {
    size_t best = 0;
    for (size_t n = 1; n < nodes; ++n) {
      // The next seat goes to the largest cores / (share + 1); compared without division.
      if (topology.nodes[n].cores.size() * (share[best] + 1) >
          topology.nodes[best].cores.size() * (share[n] + 1)) {
        best = n;
      }
    }
    ++share[best];
  }
  std::vector<Place> places;
  for (size_t n = 0; n < nodes; ++n) {
    const Node& node = topology.nodes[n];
    std::vector<int> order = node.cores;
    for (int cpu : node.cpus) {
      if (std::find(node.cores.begin(), node.cores.end(), cpu) == node.cores.end()) {
        order.push_back(cpu);
      }
    }
    for (size_t i = 0; i < share[n]; ++i) {
      places.push_back({order[i % order.size()], static_cast<int>(n)});
    }
  }
  return places;
}

int node_with(const Topology& topology, int cpu) {
  for (size_t n = 0; n < topology.nodes.size(); ++n) {
    const std::vector<int>& cpus = topology.nodes[n].cpus;
    if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) return static_cast<int>(n);
  }
  throw std::invalid_argument("CPU " + std::to_string(cpu) +
                              " does not exist, is offline or is outside the affinity mask");
}

int core_with(const Topology& topology, int cpu) {
  for (const Node& node : topology.nodes) {
    const auto found = std::find(node.cpus.begin(), node.cpus.end(), cpu);
    const size_t i = static_cast<size_t>(found - node.cpus.begin());
    if (i < node.core_of.size()) return node.core_of[i];
  }
  return cpu;
}

}  // namespace

std::vector<Place> place_workers(const WorkerPool::Options& options, const Topology& topology) {
  if (options.threads < 0) {
    throw std::invalid_argument("expected a number of threads >= 0, got " +
                                std::to_string(options.threads));
  }
  // Tests and simulations of larger machines may overload a small one, but not without end.
  constexpr size_t kMostPerCpu = 16, kLeastMost = 256;
  size_t here = 0;
  for (const Node& node : topology.nodes) here += node.cpus.size();
  const size_t most = std::max(kMostPerCpu * here, kLeastMost);
  if (static_cast<size_t>(options.threads) > most || options.cpus.size() > most) {
    throw std::invalid_argument(
        std::to_string(std::max(static_cast<size_t>(options.threads), options.cpus.size())) +
        " threads are more than a machine with " + std::to_string(here) +
        " CPUs has use for; expected at most " + std::to_string(most));
  }
  if (options.cpus.empty()) {
    return spread(topology, options.threads > 0 ? options.threads : topology.default_threads());
  }
  if (options.threads != 0 && static_cast<size_t>(options.threads) != options.cpus.size()) {
    throw std::invalid_argument("got " + std::to_string(options.cpus.size()) + " CPUs for " +
                                std::to_string(options.threads) + " threads");
  }
  std::vector<Place> places;
  for (int cpu : options.cpus) places.push_back({cpu, node_with(topology, cpu)});
  std::stable_sort(places.begin(), places.end(),
                   [](const Place& a, const Place& b) { return a.node < b.node; });
  return places;
}

bool may_spin(const std::vector<Place>& places, const Topology& topology) {
  std::vector<int> distinct;
  for (const Place& place : places) distinct.push_back(place.cpu);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  const size_t quota = topology.quota > 0 ? static_cast<size_t>(topology.quota) : SIZE_MAX;
  return places.size() <= std::min(distinct.size(), quota);
}

std::vector<int> caller_cpus(const std::vector<Place>& places, const Topology& topology) {
  const int home = places[0].cpu, home_core = core_with(topology, home);
  const auto taken = [&](int cpu) {
    const int core = core_with(topology, cpu);
    return std::any_of(places.begin() + 1, places.end(), [&](const Place& place) {
      // On its own core worker 0 only leaves the very CPU of another worker.
      return core == home_core ? cpu == place.cpu : core == core_with(topology, place.cpu);
    });
  };
  std::vector<int> free;
  for (int cpu : topology.nodes[static_cast<size_t>(places[0].node)].cpus) {
    if (cpu == home || !taken(cpu)) free.push_back(cpu);
  }
  return free;
}

}  // namespace ktk
