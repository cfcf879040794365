#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "core/cpu.h"
#include "core/prefetch.h"
#include "core/slow_isa.h"
#include "core/topology.h"
#include "moe/engine.h"
#include "python/arguments.h"
#include "python/bind.h"

namespace ktk {

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

nb::dict describe_topology(const Topology& topology) {
  nb::list nodes;
  for (const Node& node : topology.nodes) {
    nb::dict entry;
    entry["id"] = node.id;
    entry["cores"] = node.cores;
    entry["cpus"] = node.cpus;
    entry["has_memory"] = node.has_memory;
    nodes.append(entry);
  }
  nb::dict result;
  result["nodes"] = nodes;
  result["quota"] = topology.quota;
  result["default_threads"] = topology.default_threads();
  return result;
}

std::shared_ptr<Engine> make_pool(const nb::args& args, const nb::kwargs& kwargs) {
  const Arguments given("WorkerPool", {"threads", "cpus", "pin"}, args, kwargs);
  WorkerPool::Options options;
  options.threads = given.get("threads", "a number of threads (an int)", 0);
  using Cpus = std::optional<std::vector<int>>;
  if (const Cpus cpus = given.get("cpus", "a list of ints or None", Cpus())) options.cpus = *cpus;
  options.pin = given.get("pin", "a bool", true);
  return Engine::make(options);
}

template <typename F>
std::vector<int> per_worker(const Engine& engine, F value) {
  std::vector<int> all;
  for (int w = 0; w < engine.pool.size(); ++w) all.push_back(value(engine.pool, w));
  return all;
}

}  // namespace

void bind_system(nb::module_& m) {
  nb::exception<SettingError>(m, "SettingError", PyExc_ValueError);
  m.def(
      "detected_isa", [] { return isa_names(detected_isa()); },
      "Names of the instruction sets that this CPU and operating system offer.");
  m.def(
      "allowed_isa", [] { return isa_names(allowed_isa()); },
      "Names of the instruction sets that variants may use: detected_isa() and KTK_ISA_FORCE,\n"
      "under KTK_ISA.");
  m.def(
      "slow_isa", [] { return isa_names(slow_isa()); },
      "Names of those of allowed_isa() that this CPU is faster without: a variant that needs one\n"
      "runs where it is named, or where there is no other. What KTK_ISA or KTK_ISA_FORCE name is\n"
      "not among them.");
  m.def("cpu_model", &cpu_model_name, "What the CPU calls itself.");
  m.def(
      "cpu_id",
      [] {
        const CpuId id = cpu_id();
        return nb::make_tuple(id.vendor, id.family, id.model);
      },
      nb::sig("def cpu_id() -> tuple[str, int, int]"), "Vendor, family and model of the CPU.");
  m.def(
      "prefetch", [] { return describe(prefetch()); },
      "How weights are fetched ahead of their use on this CPU, as KTK_PREFETCH has it.");
  m.def(
      "prefetch_row", [] { return prefetch_row(cpu_id(), allowed_isa()); },
      "This CPU's row of the table that `prefetch` comes from, where KTK_PREFETCH is not set.");
  m.def(
      "set_prefetch", [](const std::string& setting) { set_prefetch(setting); }, "setting"_a,
      "Change `prefetch` of this process, for trials; an empty text restores it.\n\n"
      "Raises\n------\nSettingError\n    The text is not like a value of KTK_PREFETCH.");
  m.def(
      "topology", [] { return describe_topology(topology()); },
      "NUMA nodes and CPUs of this process: nodes, quota, default_threads.");
  m.def(
      "read_topology",
      [](const std::string& root, const std::vector<int>& allowed) {
        return describe_topology(read_topology(root, allowed));
      },
      "root"_a, "allowed"_a, "The same, from a copy of /sys below `root`.");

  nb::class_<Engine>(
      m, "WorkerPool",
      "Threads that compute layers, one call at a time.\n\n"
      "Parameters\n----------\n"
      "threads : int\n    Number of workers; 0 takes one per physical core inside the\n"
      "    affinity mask and the cgroup's quota.\n"
      "cpus : list of int, optional\n    CPU of each worker; their number is `threads`.\n"
      "pin : bool\n    Whether workers stay on their CPU.")
      // As nb::new_, whose two functions cannot have a signature each.
      .def_static(
          "__new__",
          [](nb::handle, const nb::args& args, const nb::kwargs& kwargs) {
            return make_pool(args, kwargs);
          },
          nb::sig("def __new__(cls, threads: int = 0, cpus: Sequence[int] | None = None, pin: bool "
                  "= True) -> WorkerPool"))
      .def(
          "__init__", [](nb::handle, const nb::args&, const nb::kwargs&) {},
          nb::sig("def __init__(self, threads: int = 0, cpus: Sequence[int] | None = None, pin: "
                  "bool = True) -> None"))
      .def("__repr__",
           [](const Engine& e) {
             std::string cpus;
             for (int w = 0; w < e.pool.size(); ++w) {
               cpus += (w ? ", " : "") + std::to_string(e.pool.cpu_of(w));
             }
             const std::string workers =
                 e.pool.size() == 1 ? "1 worker" : std::to_string(e.pool.size()) + " workers";
             return "<ktk.WorkerPool: " + workers +
                    (e.pool.cpu_of(0) < 0 ? ", not pinned>" : " on CPUs " + cpus + ">");
           })
      .def(
          "__reduce__",
          [](const Engine&) -> nb::object {
            throw nb::type_error(
                "a ktk.WorkerPool cannot be pickled or copied: its threads belong to this process; "
                "make another one where it is needed");
          },
          nb::sig("def __reduce__(self) -> tuple[object, ...]"), "Refuses to be pickled.")
      .def_prop_ro(
          "size", [](const Engine& e) { return e.pool.size(); }, "Number of workers.")
      .def_prop_ro(
          "cpus",
          [](const Engine& e) {
            return per_worker(e, [](const WorkerPool& pool, int w) { return pool.cpu_of(w); });
          },
          "CPU of each worker, -1 where it is not pinned.")
      .def_prop_ro(
          "nodes",
          [](const Engine& e) {
            return per_worker(e, [](const WorkerPool& pool, int w) { return pool.node_of(w); });
          },
          "Position in topology()['nodes'] of each worker.");
}

}  // namespace ktk
