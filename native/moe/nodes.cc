#include "moe/nodes.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/topology.h"

namespace ktk {

void check_shards(int shards) {
  constexpr int kMostShards = 1024;  // the largest number of NUMA nodes that Linux knows
  if (shards < 0 || shards > kMostShards) {
    throw std::invalid_argument("shards must be between 1 and " + std::to_string(kMostShards) +
                                ", or 0 for one per node, got " + std::to_string(shards));
  }
}

std::vector<int> shard_nodes(const WorkerPool& pool, size_t shards) {
  std::vector<int> used;
  for (int w = 0; w < pool.size(); ++w) {
    const int at = pool.node_of(w);
    if (std::find(used.begin(), used.end(), at) == used.end()) used.push_back(at);
  }
  const size_t count = shards > 0 ? shards : used.size();
  std::vector<int> nodes;
  for (size_t s = 0; s < count; ++s) {
    const size_t at = static_cast<size_t>(used[s * used.size() / count]);
    // One node needs no binding, and then its memory needs no system call. Nodes of a pool that was
    // made for another machine do not exist.
    const std::vector<Node>& here = topology().nodes;
    nodes.push_back(here.size() > 1 && at < here.size() ? here[at].id : -1);
  }
  return nodes;
}

size_t home_shard(const WorkerPool& pool, int worker, size_t shards) {
  if (shards == 1) return 0;
  // Workers are grouped by node: those of the worker's are [first, last), the at-th of all nodes.
  const int node = pool.node_of(worker);
  size_t nodes = 0, at = 0;
  int first = 0, last = 0;
  for (int w = 0; w < pool.size(); ++w) {
    if (w == 0 || pool.node_of(w) != pool.node_of(w - 1)) {
      if (pool.node_of(w) == node) at = nodes, first = w;
      ++nodes;
    }
    if (pool.node_of(w) == node) last = w + 1;
  }
  const size_t worker_at = static_cast<size_t>(worker);
  if (shards < nodes) return worker_at * shards / static_cast<size_t>(pool.size());
  // As shard_nodes() places them: shard s on node s * nodes / shards.
  const size_t begin = (at * shards + nodes - 1) / nodes;
  const size_t end = ((at + 1) * shards + nodes - 1) / nodes;
  const size_t rank = worker_at - static_cast<size_t>(first);
  return begin + rank * (end - begin) / static_cast<size_t>(last - first);
}

int node_id(int position) {
  const std::vector<Node>& nodes = topology().nodes;
  const bool here = position >= 0 && static_cast<size_t>(position) < nodes.size();
  return here ? nodes[static_cast<size_t>(position)].id : -1;
}

}  // namespace ktk
