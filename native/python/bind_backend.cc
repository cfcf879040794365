#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "core/cpu.h"
#include "format/elements.h"
#include "format/format.h"
#include "moe/table.h"
#include "python/arguments.h"
#include "python/bind.h"

namespace ktk {

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

auto key(const ktk_format& f) {
  return std::make_tuple(f.element, f.scale, f.zero, f.group_n, f.group_k);
}

ktk_format make_format(const std::string& element, const std::string& scale,
                       const std::string& zero, uint32_t group_n, uint32_t group_k) {
  const ktk_element type = element_from_name(element);
  const ktk_element scale_type = element_from_name(scale), zero_type = element_from_name(zero);
  if (!is_ggml(type)) return {type, scale_type, zero_type, group_n, group_k};
  if (scale_type != KTK_NONE || zero_type != KTK_NONE) {
    throw nb::value_error((element_name(type) + " has its scales in its blocks").c_str());
  }
  return {type, KTK_NONE, KTK_NONE, 1, static_cast<uint32_t>(block_of(type).columns)};
}

// The table keeps the variant alive: Python may hold a variant longer than its backend.
struct VariantInfo {
  std::shared_ptr<const BackendTable> table;
  const Variant* variant;
};

std::shared_ptr<BackendTable> load_table(nb::object capsule) {
  auto* table =
      static_cast<const ktk_backend*>(PyCapsule_GetPointer(capsule.ptr(), KTK_CAPSULE_NAME));
  if (!table) throw nb::python_error();
  return BackendTable::copy(table);
}

void bind_format(nb::module_& m) {
  nb::class_<ktk_format>(
      m, "Format",
      "How weights are stored: (element - zero) * scale per group.\n\n"
      "A group spans group_n rows and group_k columns; 0 is the whole extent. ggml's\n"
      "types (\"q4_k\", or \"ggml:12\") have their scales in their blocks.")
      .def(
          "__init__",
          [](ktk_format* self, const nb::args& args, const nb::kwargs& kwargs) {
            const Arguments given("Format", {"element", "scale", "zero", "group_n", "group_k"},
                                  args, kwargs);
            const auto name = [&](const char* which) {
              return given.get(which, "the name of an element, as \"f32\"", std::string("none"));
            };
            const auto group = [&](const char* which, uint32_t otherwise) {
              return given.get(which, "an int from 0 to 2^32 - 1", otherwise);
            };
            given.get<std::string>("element", "the name of an element, as \"f32\"");
            new (self) ktk_format(make_format(name("element"), name("scale"), name("zero"),
                                              group("group_n", 1), group("group_k", 0)));
          },
          nb::sig("def __init__(self, element: str, scale: str = 'none', zero: str = 'none', "
                  "group_n: int = 1, group_k: int = 0) -> None"))
      .def_prop_ro("element", [](const ktk_format& f) { return element_name(f.element); })
      .def_prop_ro("scale", [](const ktk_format& f) { return element_name(f.scale); })
      .def_prop_ro("zero", [](const ktk_format& f) { return element_name(f.zero); })
      .def_ro("group_n", &ktk_format::group_n)
      .def_ro("group_k", &ktk_format::group_k)
      .def_prop_ro(
          "block",
          [](const ktk_format& f) {
            const Block block = block_of(f.element);
            return std::make_pair(block.columns, block.bytes);
          },
          "Elements that fill whole bytes together, and these bytes; (0, 0) if ktk knows none.")
      .def(
          "groups",
          [](const ktk_format& f, size_t n, size_t k) {
            const SourceShape shape = source_shape(f, n, k);
            return std::make_pair(shape.groups_n, shape.groups_k);
          },
          "n"_a, "k"_a, "Groups of an n x k matrix: the shape of its scales and zero points.")
      .def("same_as", &same_format, "other"_a, "n"_a, "k"_a,
           "Whether two formats mean the same bytes for an n x k matrix: a group that is at least\n"
           "as long as the extent is the whole of it.")
      .def(
          "__eq__",
          [](const ktk_format& a, nb::object b) {
            return nb::isinstance<ktk_format>(b) && key(a) == key(nb::cast<const ktk_format&>(b));
          },
          nb::is_operator())
      .def("__hash__",
           [](const ktk_format& f) {
             return nb::hash(nb::make_tuple(f.element, f.scale, f.zero, f.group_n, f.group_k));
           })
      .def("__str__", [](const ktk_format& f) { return describe(f); })
      .def("__repr__", [](const ktk_format& f) { return "<Format " + describe(f) + ">"; });
}

void bind_variant(nb::module_& m) {
  nb::class_<VariantInfo>(m, "VariantInfo", "A variant of a backend: one instruction set.")
      .def_prop_ro("name", [](const VariantInfo& v) { return v.variant->name; })
      .def_prop_ro(
          "layout", [](const VariantInfo& v) { return v.variant->layout; },
          "Variants with the same layout read each other's packed weights.")
      .def_prop_ro("required_isa",
                   [](const VariantInfo& v) { return isa_names(v.variant->required_isa); })
      .def_prop_ro(
          "missing_isa",
          [](const VariantInfo& v) { return isa_names(v.variant->required_isa & ~allowed_isa()); },
          "Instruction sets that this CPU lacks, or KTK_ISA forbids.")
      .def_prop_ro(
          "runnable",
          [](const VariantInfo& v) { return (v.variant->required_isa & ~allowed_isa()) == 0; })
      .def_prop_ro("m_step", [](const VariantInfo& v) { return v.variant->tile.m_step; })
      .def_prop_ro("n_step", [](const VariantInfo& v) { return v.variant->tile.n_step; })
      .def_prop_ro("k_step", [](const VariantInfo& v) { return v.variant->tile.k_step; })
      .def_prop_ro(
          "exports", [](const VariantInfo& v) { return v.variant->export_weight != nullptr; },
          "Whether packed weights can be had in the form that a checkpoint has.")
      .def_prop_ro(
          "checks_packed", [](const VariantInfo& v) { return v.variant->is_packed != nullptr; },
          "Whether it can tell packed bytes from others, so that files may keep them.")
      .def_prop_ro(
          "act", [](const VariantInfo& v) { return v.variant->act; },
          "What an activation is encoded as, where that depends on no weight.")
      .def_prop_ro(
          "has_act_format", [](const VariantInfo& v) { return v.variant->act_format != nullptr; },
          "Whether act_of() may depend on the weight.")
      .def(
          "act_of",
          [](const VariantInfo& v, const ktk_format& stored, size_t n, size_t k) {
            return v.variant->act_of(v.table->matrix(stored, n, k));
          },
          "stored"_a, "n"_a, "k"_a,
          "What an activation is encoded as that meets an n x k weight of this format.")
      .def_prop_ro(
          "ukernels",
          [](const VariantInfo& v) {
            std::vector<std::pair<std::string, size_t>> all;
            for (const ktk_ukernel& k : v.variant->kernels) all.emplace_back(k.name, k.m_max);
            return all;
          },
          "Name and largest row count of each micro-kernel.");
}

}  // namespace

void bind_backend(nb::module_& m) {
  nb::exception<AbiError>(m, "AbiError", PyExc_RuntimeError);
  bind_format(m);
  bind_variant(m);
  nb::class_<BackendTable>(m, "Backend", "The checked table of a backend.")
      .def(nb::new_(&load_table), "capsule"_a)
      .def_ro("name", &BackendTable::name)
      .def_prop_ro("abi",
                   [](const BackendTable& b) { return std::make_pair(b.abi_major, b.abi_minor); })
      .def_ro("formats", &BackendTable::formats, "Formats that weights are stored in.")
      .def_prop_ro(
          "accepts",
          [](const BackendTable& b) {
            std::vector<std::pair<ktk_format, size_t>> all;
            for (const ktk_accept& a : b.accepts) all.emplace_back(a.given, a.stored);
            return all;
          },
          "Formats that weights may come in, with the index of what they are stored as.")
      .def_prop_ro(
          "variants",
          [](nb::handle self) {
            auto table = nb::cast<std::shared_ptr<BackendTable>>(self);
            std::vector<VariantInfo> all;
            for (const auto& v : table->variants) all.push_back({table, v.get()});
            return all;
          },
          "Variants, in order of preference.")
      .def(
          "stored_as",
          [](const BackendTable& b, const ktk_format& given, size_t n, size_t k,
             const std::optional<ktk_format>& wanted) {
            return b.stored(given, wanted ? &*wanted : nullptr, n, k);
          },
          "given"_a, "n"_a, "k"_a, "wanted"_a = nb::none(),
          "What an n x k weight is stored as: `wanted`, or the backend's choice. ValueError if it\n"
          "is not taken.")
      .def(
          "packed_size",
          [](const BackendTable& b, const ktk_format& stored, size_t n, size_t k,
             const std::string& variant) {
            const ktk_matrix matrix = b.matrix(stored, n, k);
            return b.select(variant).weight_bytes(matrix);
          },
          "stored"_a, "n"_a, "k"_a, "variant"_a = "",
          "Bytes of an n x k weight in one of `formats`, packed by a variant; default: the default "
          "one.")
      .def(
          "default_variant", [](const BackendTable& b) { return b.select("").name; },
          "Name of the variant that runs by default; RuntimeError with the reasons if none does.");
}

}  // namespace ktk
