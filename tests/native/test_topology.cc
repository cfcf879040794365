// Machines that nobody has at hand, as trees of files.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>

#include "check.h"
#include "core/topology.h"

using ktk::Node;
using ktk::read_topology;
using ktk::Topology;
using List = std::vector<int>;

namespace {

// A directory that holds the given files while it lives.
class Tree {
 public:
  Tree() {
    std::string name = (std::filesystem::temp_directory_path() / "ktk-topology-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
    root = name;
  }
  ~Tree() { std::filesystem::remove_all(root); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  Tree& file(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = root + "/" + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << "\n";
    return *this;
  }
  Tree& online_nodes(const std::string& ids) { return file("sys/devices/system/node/online", ids); }
  Tree& node(int id, const std::string& cpus) {
    return file("sys/devices/system/node/node" + std::to_string(id) + "/cpulist", cpus);
  }
  // Every CPU of `cpus` says that `siblings` share its core.
  Tree& core(const List& cpus, const std::string& siblings) {
    for (int cpu : cpus) {
      file("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
           siblings);
    }
    return *this;
  }

  std::string root;
};

List range(int first, int last) {
  List list;
  for (int i = first; i <= last; ++i) list.push_back(i);
  return list;
}

// Two nodes of four cores with two hardware threads each, numbered as Linux does on Intel and AMD.
Tree& two_sockets(Tree& tree) {
  tree.online_nodes("0-1").node(0, "0-3,8-11").node(1, "4-7,12-15");
  for (int core = 0; core < 8; ++core) {
    tree.core({core, core + 8}, std::to_string(core) + "," + std::to_string(core + 8));
  }
  return tree;
}

}  // namespace

TEST(two_nodes_with_hardware_threads) {
  Tree tree;
  const Topology t = read_topology(two_sockets(tree).root, range(0, 15));
  CHECK_EQ(t.nodes.size(), 2u);
  CHECK_EQ(t.nodes[0].id, 0);
  CHECK_EQ(t.nodes[1].id, 1);
  CHECK_EQ(t.nodes[0].cores, (List{0, 1, 2, 3}));
  CHECK_EQ(t.nodes[0].cpus, (List{0, 1, 2, 3, 8, 9, 10, 11}));
  CHECK_EQ(t.nodes[0].core_of, (List{0, 1, 2, 3, 0, 1, 2, 3}));
  CHECK_EQ(t.nodes[1].cores, (List{4, 5, 6, 7}));
  CHECK_EQ(t.quota, 0);
  CHECK_EQ(t.default_threads(), 8);
}

TEST(neighbouring_hardware_threads) {
  Tree tree;
  tree.online_nodes("0").node(0, "0-5").core({0, 1}, "0-1").core({2, 3}, "2-3").core({4, 5}, "4-5");
  const Topology t = read_topology(tree.root, range(0, 5));
  CHECK_EQ(t.nodes[0].cores, (List{0, 2, 4}));
  CHECK_EQ(t.default_threads(), 3);
}

TEST(the_affinity_mask_comes_first) {
  Tree tree;
  two_sockets(tree);
  // A second hardware thread stands for its core where the first may not be used.
  const Topology t = read_topology(tree.root, {9, 2, 10, 3});
  CHECK_EQ(t.nodes.size(), 1u);
  CHECK_EQ(t.nodes[0].cpus, (List{2, 3, 9, 10}));
  CHECK_EQ(t.nodes[0].cores, (List{2, 3, 9}));
  CHECK_EQ(t.nodes[0].core_of, (List{2, 3, 9, 2}));

  const Topology second = read_topology(tree.root, {4, 12});
  CHECK_EQ(second.nodes.size(), 1u);
  CHECK_EQ(second.nodes[0].id, 1);
  CHECK_EQ(second.default_threads(), 1);
}

TEST(node_ids_with_gaps_and_out_of_order) {
  Tree tree;
  tree.online_nodes("8,0-1,17").node(0, "0-1").node(1, "2-3").node(8, "4-5").node(17, "6-7");
  const Topology t = read_topology(tree.root, range(0, 7));
  List ids;
  for (const Node& node : t.nodes) ids.push_back(node.id);
  CHECK_EQ(ids, (List{0, 1, 8, 17}));
  CHECK_EQ(t.nodes[3].cpus, (List{6, 7}));
}

TEST(nodes_without_processors_are_left_out) {
  Tree tree;  // CXL or high-bandwidth memory
  tree.online_nodes("0-2").node(0, "0-1").node(1, "2-3").node(2, "");
  CHECK_EQ(read_topology(tree.root, range(0, 3)).nodes.size(), 2u);
}

TEST(nodes_without_memory_say_so) {
  Tree tree;
  tree.online_nodes("0-1").node(0, "0-1").node(1, "2-3");
  CHECK(read_topology(tree.root, range(0, 3)).nodes[1].has_memory);
  tree.file("sys/devices/system/node/has_memory", "0");
  const Topology t = read_topology(tree.root, range(0, 3));
  CHECK(t.nodes[0].has_memory);
  CHECK(!t.nodes[1].has_memory);
}

TEST(offline_processors_are_not_used) {
  Tree tree;
  tree.online_nodes("0").node(0, "0,2-3").file("sys/devices/system/cpu/online", "0,2-3");
  CHECK_EQ(read_topology(tree.root, range(0, 3)).nodes[0].cpus, (List{0, 2, 3}));
  Tree flat;
  flat.file("sys/devices/system/cpu/online", "0,2-3");
  CHECK_EQ(read_topology(flat.root, range(0, 3)).nodes[0].cpus, (List{0, 2, 3}));
}

TEST(without_sysfs_there_is_one_node) {
  Tree tree;
  const Topology t = read_topology(tree.root, {5, 3, 3});
  CHECK_EQ(t.nodes.size(), 1u);
  CHECK_EQ(t.nodes[0].id, 0);
  CHECK_EQ(t.nodes[0].cores, (List{3, 5}));
  CHECK_EQ(t.quota, 0);
  CHECK_EQ(t.default_threads(), 2);
}

TEST(nonsense_in_sysfs_is_one_node) {
  Tree tree;
  tree.online_nodes("zero").node(0, "0-").core({0, 1}, "-,x");
  CHECK_EQ(read_topology(tree.root, {0, 1}).nodes[0].cores, (List{0, 1}));
  Tree huge;
  huge.online_nodes("0").node(0, "0-2000000000");
  CHECK_EQ(read_topology(huge.root, {0, 1}).nodes[0].cores, (List{0, 1}));
}

TEST(cgroup_v2_quota_rounds_up) {
  const std::map<std::string, int> quotas{
      {"max 100000", 0}, {"150000 100000", 2}, {"200000 100000", 2}, {"10000 100000", 1},
      {"", 0},           {"x y", 0},           {"300000", 0}};
  for (const auto& [text, expected] : quotas) {
    Tree tree;
    two_sockets(tree).file("proc/self/cgroup", "0::/").file("sys/fs/cgroup/cpu.max", text);
    const Topology t = read_topology(tree.root, range(0, 15));
    CHECK_EQ(t.quota, expected);
    CHECK_EQ(t.default_threads(), expected == 0 ? 8 : expected);
  }
}

TEST(the_tightest_cgroup_around_the_process_counts) {
  Tree tree;
  tree.file("proc/self/cgroup", "0::/user.slice/job/step")
      .file("sys/fs/cgroup/user.slice/cpu.max", "600000 100000")
      .file("sys/fs/cgroup/user.slice/job/cpu.max", "300000 100000")
      .file("sys/fs/cgroup/user.slice/job/step/cpu.max", "max 100000");
  CHECK_EQ(read_topology(tree.root, range(0, 7)).quota, 3);
}

TEST(a_container_sees_its_group_as_the_root) {
  Tree tree;
  tree.file("proc/self/cgroup", "0::/docker/0123/../..")
      .file("sys/fs/cgroup/cpu.max", "100000 50000");
  CHECK_EQ(read_topology(tree.root, range(0, 7)).quota, 2);
  Tree v1;
  v1.file("proc/self/cgroup", "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123")
      .file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000")
      .file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  CHECK_EQ(read_topology(v1.root, range(0, 7)).quota, 3);
}

TEST(cgroup_v1_quota) {
  Tree tree;
  tree.file("proc/self/cgroup", "3:cpuset:/\n2:cpu,cpuacct:/job\n1:name=systemd:/\n0::/")
      .file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "400000")
      .file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  CHECK_EQ(read_topology(tree.root, range(0, 7)).quota, 4);
  tree.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1");
  CHECK_EQ(read_topology(tree.root, range(0, 7)).quota, 0);
}

TEST(quota_above_the_cores_changes_nothing) {
  Tree tree;
  two_sockets(tree)
      .file("proc/self/cgroup", "0::/")
      .file("sys/fs/cgroup/cpu.max", "6400000 100000");
  const Topology t = read_topology(tree.root, range(0, 15));
  CHECK_EQ(t.quota, 64);
  CHECK_EQ(t.default_threads(), 8);
}

TEST(this_machine_has_the_cpus_of_the_mask) {
  const List mask = ktk::affinity_mask();
  CHECK(!mask.empty());
  CHECK(std::is_sorted(mask.begin(), mask.end()));
  const Topology& t = ktk::topology();
  List cpus;
  for (const Node& node : t.nodes) {
    CHECK_EQ(node.core_of.size(), node.cpus.size());
    CHECK(!node.cores.empty() && node.cores.size() <= node.cpus.size());
    cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
  }
  std::sort(cpus.begin(), cpus.end());
  CHECK_EQ(cpus, mask);
  CHECK(t.default_threads() >= 1);
}
