// ktk._probe: what the machine can do at best, for ktk.bench.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "core/cpu.h"
#include "probe/measure.h"
#include "python/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktk::probe {
namespace {

bool runs_here(const ktk_probe_unit& unit) {
  return (unit.required_isa & ~detected_isa()) == KTK_ISA_NONE;
}

std::vector<std::string> unit_names() {
  std::vector<std::string> names;
  for (const ktk_probe_unit& unit : units()) {
    if (runs_here(unit)) names.emplace_back(unit.name);
  }
  return names;
}

nb::list unit_table() {
  nb::list table;
  for (const ktk_probe_unit& unit : units()) {
    table.append(
        nb::make_tuple(unit.name, unit.act_bits, unit.weight_bits, isa_names(unit.required_isa)));
  }
  return table;
}

void check_seconds(double seconds) {
  if (!(seconds > 0 && seconds <= 3600)) {
    throw std::invalid_argument("seconds must be above 0 and at most 3600, got " +
                                std::to_string(seconds));
  }
}

size_t check_bytes(long long bytes) {
  if (bytes < 1) {
    throw std::invalid_argument("buffer_bytes must be above 0, got " + std::to_string(bytes));
  }
  return static_cast<size_t>(bytes);
}

double peak_of(const std::string& name, int threads, double seconds, std::vector<int> cpus) {
  check_seconds(seconds);
  for (const ktk_probe_unit& unit : units()) {
    if (unit.name != name) continue;
    if (!runs_here(unit)) {
      throw std::runtime_error("this CPU, or the operating system, does not offer " + name);
    }
    const Unlocked unlocked;
    return peak(unit, threads, seconds, std::move(cpus));
  }
  std::string known;
  for (const ktk_probe_unit& unit : units()) known += std::string(" ") + unit.name;
  throw std::invalid_argument("no unit '" + name + "'; this build has:" + known);
}

double read_bandwidth(long long bytes, int threads, double seconds, std::vector<int> cpus) {
  check_seconds(seconds);
  const size_t checked = check_bytes(bytes);
  const Unlocked unlocked;
  return Reader(checked, threads, std::move(cpus)).measure(seconds);
}

}  // namespace
}  // namespace ktk::probe

NB_MODULE(_probe, m) {
  using namespace ktk::probe;
  m.doc() = "Measures what the machine can do at best: reading memory and arithmetic.";
  m.def("units", unit_names, "Names of the arithmetic units that can run here.");
  m.def(
      "all_units", unit_table,
      "(name, the most bits of integers that activations may be or 0 for floats, the most bits of\n"
      "weights, instruction sets that it needs) of the units that this build has, best last.");
  m.def("peak", peak_of, "unit"_a, "threads"_a, "seconds"_a, "cpus"_a = std::vector<int>{},
        "Operations per second (a multiply and an add are two) of all threads together.");
  m.def("read_bandwidth", read_bandwidth, "buffer_bytes"_a, "threads"_a, "seconds"_a,
        "cpus"_a = std::vector<int>{},
        "Bytes per second that the threads together read from a buffer of this size.");
  nb::class_<Reader>(m, "Reader", "A buffer to measure read bandwidth with, again and again.")
      .def(
          "__init__",
          [](Reader* self, long long bytes, int threads, std::vector<int> cpus) {
            const size_t checked = check_bytes(bytes);
            const ktk::Unlocked unlocked;
            new (self) Reader(checked, threads, std::move(cpus));
          },
          "buffer_bytes"_a, "threads"_a, "cpus"_a = std::vector<int>{})
      .def(
          "measure",
          [](Reader& self, double seconds) {
            check_seconds(seconds);
            const ktk::Unlocked unlocked;
            return self.measure(seconds);
          },
          "seconds"_a, "Bytes per second of all threads together.")
      .def_prop_ro("pattern", &Reader::pattern, "The way of reading that was fastest here.")
      .def_prop_ro("nbytes", &Reader::bytes);
}
