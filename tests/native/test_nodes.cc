// Which shard each worker of a machine with several NUMA nodes begins with.
#include "check.h"
#include "moe/nodes.h"

using ktk::Topology;
using ktk::WorkerPool;
using List = std::vector<size_t>;

namespace {

// Three nodes of four CPUs, which need not exist: the pools made with it do not pin.
Topology three_nodes() {
  Topology machine;
  for (int n = 0; n < 3; ++n) {
    const std::vector<int> cpus = {4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3};
    machine.nodes.push_back(
        {.id = n, .cores = cpus, .cpus = cpus, .has_memory = true, .core_of = cpus});
  }
  return machine;
}

List homes(const std::vector<int>& cpus, size_t shards) {
  const WorkerPool pool({.threads = 0, .cpus = cpus, .pin = false}, three_nodes());
  List list;
  for (int w = 0; w < pool.size(); ++w) list.push_back(ktk::home_shard(pool, w, shards));
  return list;
}

}  // namespace

TEST(workers_begin_with_a_shard_of_their_node) {
  CHECK_EQ(homes({0, 1, 4, 5}, 2), (List{0, 0, 1, 1}));
  CHECK_EQ(homes({0, 1, 2, 4}, 2), (List{0, 0, 0, 1}));
  CHECK_EQ(homes({0, 4, 5, 6}, 2), (List{0, 1, 1, 1}));
  CHECK_EQ(homes({4, 8, 9, 10, 11}, 2), (List{0, 1, 1, 1, 1}));
  CHECK_EQ(homes({0, 1, 2, 4, 8, 9}, 3), (List{0, 0, 0, 1, 2, 2}));
}

TEST(workers_of_a_node_have_its_shards_in_turn) {
  CHECK_EQ(homes({0, 1, 2, 4}, 4), (List{0, 0, 1, 2}));
  CHECK_EQ(homes({0, 1, 4}, 3), (List{0, 1, 2}));
  CHECK_EQ(homes({0, 1, 2, 3}, 2), (List{0, 0, 1, 1}));
  CHECK_EQ(homes({0, 1}, 4), (List{0, 2}));
}

TEST(with_fewer_shards_than_nodes_workers_are_dealt_out) {
  CHECK_EQ(homes({0, 1, 4, 8}, 1), (List{0, 0, 0, 0}));
  CHECK_EQ(homes({0, 1, 4, 8}, 2), (List{0, 0, 1, 1}));
}
