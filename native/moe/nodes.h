// Which NUMA node each shard of a layer lives on.
#pragma once

#include <cstddef>
#include <vector>

#include "core/worker_pool.h"

namespace ktk {

// Throws std::invalid_argument for a number of shards that no machine has nodes for. 0 is one for
// each node that has workers.
void check_shards(int shards);

// The node of each shard: as many shards as asked, spread over the nodes that have workers; -1
// where memory needs no binding. 0 shards: one for each of these nodes.
std::vector<int> shard_nodes(const WorkerPool& pool, size_t shards);

// The shard that a worker begins with, and helps others when it is done: one on the worker's node,
// where its workers have the node's shards in turn. Where fewer shards than nodes were asked for,
// workers are dealt out evenly.
size_t home_shard(const WorkerPool& pool, int worker, size_t shards);

// Where workers keep memory of their own: the id of a node by its position in topology().nodes, -1
// for one that this machine does not have.
int node_id(int position);

}  // namespace ktk
