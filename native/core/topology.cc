#include "core/topology.h"

#include <dirent.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/affinity.h"

namespace ktk {
namespace {

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

template <typename T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || text.empty()) return std::nullopt;
  return value;
}

// "0-3,8,10-11", sysfs' lists of CPUs and nodes. What is not a number is left out.
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> list;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t dash = part.find('-');
    const auto first = number<int>(std::string_view(part).substr(0, dash));
    const auto last =
        dash == std::string::npos ? first : number<int>(std::string_view(part).substr(dash + 1));
    if (!first || !last) continue;
    for (int i = *first; i <= std::min(*last, CpuMask::kMax - 1); ++i) list.push_back(i);
  }
  return list;
}

std::optional<std::vector<int>> read_list(const std::string& path) {
  const auto line = first_line(path);
  if (!line) return std::nullopt;
  return parse_list(*line);
}

std::vector<int> intersect(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

void sort_unique(std::vector<int>& list) {
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
}

// `cpus` must be sorted.
Node make_node(const std::string& cpu_dir, int id, std::vector<int> cpus, bool has_memory) {
  Node node{
      .id = id, .cores = {}, .cpus = std::move(cpus), .has_memory = has_memory, .core_of = {}};
  for (int cpu : node.cpus) {
    auto siblings =
        read_list(cpu_dir + "/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::vector<int> usable;
    if (siblings) {
      sort_unique(*siblings);
      usable = intersect(*siblings, node.cpus);
    }
    // The first usable hardware thread stands for the core.
    const int core = usable.empty() ? cpu : std::min(cpu, usable.front());
    if (core == cpu) node.cores.push_back(cpu);
    node.core_of.push_back(core);
  }
  return node;
}

// CPUs of a quota in cgroup v2's cpu.max: "<quota or max> <period>", microseconds.
std::optional<double> quota_v2(const std::string& dir) {
  const auto line = first_line(dir + "/cpu.max");
  if (!line) return std::nullopt;
  const size_t space = line->find(' ');
  if (space == std::string::npos) return std::nullopt;
  const auto quota = number<int64_t>(std::string_view(*line).substr(0, space));
  const auto period = number<int64_t>(std::string_view(*line).substr(space + 1));
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;  // "max": no quota
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::optional<double> quota_v1(const std::string& dir) {
  const auto quota_line = first_line(dir + "/cpu.cfs_quota_us");
  const auto period_line = first_line(dir + "/cpu.cfs_period_us");
  if (!quota_line || !period_line) return std::nullopt;
  const auto quota = number<int64_t>(*quota_line), period = number<int64_t>(*period_line);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;  // -1: no quota
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

// The smallest quota of the group and those around it. Groups that cannot be seen are skipped: a
// container may see its own group mounted as the root, under the name it has on the host.
template <typename Read>
double smallest_quota(const std::string& mount, const std::string& group, Read read) {
  // Directories from the mount down to the group. "..": it is outside of what can be seen.
  std::vector<std::string> directories{mount};
  std::istringstream names(group);
  for (std::string name; std::getline(names, name, '/');) {
    if (name.empty() || name == ".") continue;
    if (name != "..") {
      directories.push_back(directories.back() + "/" + name);
    } else if (directories.size() > 1) {
      directories.pop_back();
    }
  }
  double smallest = 0;
  for (const std::string& directory : directories) {
    const auto quota = read(directory);
    if (quota && (smallest == 0 || *quota < smallest)) smallest = *quota;
  }
  return smallest;
}

int read_quota(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  const std::string mount = root + "/sys/fs/cgroup";
  double smallest = 0;
  // "<hierarchy>:<controllers>:<group>"; version 2 is hierarchy 0 without controllers.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    double quota = 0;
    if (controllers.empty()) {
      quota = smallest_quota(mount, group, quota_v2);
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      quota = smallest_quota(mount + "/" + controllers, group, quota_v1);
      // Distributions link the single name to the common mount; containers may have only the link.
      if (quota == 0) quota = smallest_quota(mount + "/cpu", group, quota_v1);
    }
    if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
  }
  return smallest == 0 ? 0 : static_cast<int>(std::ceil(std::min(smallest, 1.0 * CpuMask::kMax)));
}

bool openmp_binds() {
  constexpr const char* kVariables[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY",
                                        "KMP_AFFINITY"};
  return std::any_of(std::begin(kVariables), std::end(kVariables), [](const char* name) {
    const char* const value = std::getenv(name);
    return value && *value;
  });
}

void add_masks_of_threads(CpuMask& mask) {
  // Not std::filesystem, which the libstdc++ of gcc 8 does not have.
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(opendir("/proc/self/task"), closedir);
  while (const dirent* entry = threads ? readdir(threads.get()) : nullptr) {
    const std::optional<pid_t> thread = number<pid_t>(entry->d_name);
    CpuMask one;
    // One that has ended meanwhile has no mask.
    if (!thread || !one.read(*thread)) continue;
    for (const int cpu : one.cpus()) mask.add(cpu);
  }
}

}  // namespace

int Topology::default_threads() const {
  int cores = 0;
  for (const Node& node : nodes) cores += static_cast<int>(node.cores.size());
  return std::max(1, quota > 0 ? std::min(cores, quota) : cores);
}

Topology read_topology(const std::string& root, const std::vector<int>& allowed) {
  const std::string prefix = root == "/" ? "" : root;
  const std::string node_dir = prefix + "/sys/devices/system/node";
  const std::string cpu_dir = prefix + "/sys/devices/system/cpu";

  std::vector<int> usable = allowed;
  sort_unique(usable);
  if (auto online = read_list(cpu_dir + "/online")) {
    sort_unique(*online);
    if (auto both = intersect(usable, *online); !both.empty()) usable = std::move(both);
  }

  Topology topology;
  topology.quota = read_quota(prefix);
  std::vector<int> ids = read_list(node_dir + "/online").value_or(std::vector<int>());
  sort_unique(ids);
  std::optional<std::vector<int>> with_memory = read_list(node_dir + "/has_memory");
  for (int id : ids) {
    auto cpus = read_list(node_dir + "/node" + std::to_string(id) + "/cpulist");
    if (!cpus) continue;
    sort_unique(*cpus);
    std::vector<int> here = intersect(*cpus, usable);
    if (here.empty()) continue;  // only memory, or outside the affinity mask
    const bool has_memory = !with_memory || std::find(with_memory->begin(), with_memory->end(),
                                                      id) != with_memory->end();
    topology.nodes.push_back(make_node(cpu_dir, id, std::move(here), has_memory));
  }
  if (topology.nodes.empty()) topology.nodes.push_back(make_node(cpu_dir, 0, usable, true));
  return topology;
}

std::vector<int> affinity_mask() {
  CpuMask mask;
  if (!mask.read()) return {0};
  if (openmp_binds()) add_masks_of_threads(mask);
  return mask.cpus();
}

const Topology& topology() {
  // Never freed: threads may still compute while the process ends.
  static const Topology& here = *new Topology(read_topology("/", affinity_mask()));
  return here;
}

}  // namespace ktk
