// PackedMatrix for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/arguments.h"
#include "python/bind.h"
#include "python/packed_matrix.h"

namespace ktk {

namespace {

PackedMatrix* make_packed(const nb::args& args, const nb::kwargs& kwargs, bool size_only) {
  const Arguments given(
      "PackedMatrix",
      {"backend", "variant", "data", "scale", "zero", "given", "stored", "force", "guard"}, args,
      kwargs);
  using Format = std::optional<ktk_format>;
  const auto format = [&](const char* name) {
    return given.get(name, "a ktk.Format or None", Format());
  };
  const auto array = [&](const char* name, const char* argument) {
    const nb::handle value = given.find(argument);
    return value.is_valid() ? optional_input_from(name, value) : std::nullopt;
  };
  auto table = given.get<std::shared_ptr<BackendTable>>("backend", "a backend's core");
  if (!table) throw nb::type_error("PackedMatrix(): backend must be a backend's core, got None");
  const std::string variant = given.get<std::string>("variant", "the name of a variant");
  const nb::handle data = given.find("data");
  return new PackedMatrix(std::move(table), variant,
                          input_from("weight", data.is_valid() ? data : nb::handle(nb::none())),
                          array("weight_scale", "scale"), array("weight_zero", "zero"),
                          format("given"), format("stored"), given.get("force", "a bool", false),
                          given.get<std::string>("guard", "the name of an operand", ""), size_only);
}

}  // namespace

#define KTK_PACKED                                                                              \
  "backend: Backend, variant: str, data: object, scale: object | None = None, zero: object | "  \
  "None "                                                                                       \
  "= None, *, given: Format | None = None, stored: Format | None = None, force: bool = False, " \
  "guard: str = \"\") -> "

void bind_packed(nb::module_& m) {
  using nb::literals::operator""_a;
  nb::class_<PackedMatrix> packed(
      m, "PackedMatrix",
      "A weight [n, k] packed by one variant of a backend, for tests and tools.\n\n"
      "`guard` names an operand, one of GUARDS: its memory ends at a page without access, and is\n"
      "0xff before it is written. A function that goes further than the size that the backend "
      "says\n"
      "ends in a RuntimeError or a signal. Inputs and outputs are those of pack and unpack.");
  packed.attr("GUARDS") = nb::make_tuple("weight", "act", "dst", "scratch", "input", "output");
  packed
      // As nb::new_, whose two functions cannot have a signature each.
      .def_static(
          "__new__",
          [](nb::handle, const nb::args& args, const nb::kwargs& kwargs) {
            return make_packed(args, kwargs, false);
          },
          nb::rv_policy::take_ownership, nb::sig("def __new__(cls, " KTK_PACKED "PackedMatrix"))
      .def_static(
          "size_of",
          [](const nb::args& args, const nb::kwargs& kwargs) {
            return std::unique_ptr<PackedMatrix>(make_packed(args, kwargs, true))->nbytes();
          },
          nb::sig("def size_of(" KTK_PACKED "int"),
          "The `nbytes` that a weight would have, found without packing it.")
      .def_static(
          "of_bytes",
          [](std::shared_ptr<BackendTable> table, const std::string& variant, nb::handle packed,
             const ktk_format& stored, size_t n, size_t k, bool force, const std::string& guard) {
            const ByteInput bytes{"packed", input_from("packed", packed), true};
            return new PackedMatrix(std::move(table), variant, bytes, stored, n, k, force, guard);
          },
          "backend"_a, "variant"_a, "packed"_a.none(), "stored"_a, "n"_a, "k"_a, nb::kw_only(),
          "force"_a = false, "guard"_a = "", nb::rv_policy::take_ownership,
          "A matrix of what `buffer` held, uint8 [1, nbytes]. ValueError where the bytes are "
          "none,\n"
          "or where the backend cannot tell.")
      .def(
          "__init__", [](nb::handle, const nb::args&, const nb::kwargs&) {},
          nb::sig("def __init__(self, " KTK_PACKED "None"))
      .def_prop_ro("n", &PackedMatrix::n)
      .def_prop_ro("k", &PackedMatrix::k)
      .def_prop_ro("nbytes", &PackedMatrix::nbytes)
      .def_prop_ro("format", &PackedMatrix::format)
      .def_prop_ro("variant", &PackedMatrix::variant)
      .def_prop_ro("act", &PackedMatrix::act, "What activations are encoded as.")
      .def_prop_ro("act_size", &PackedMatrix::act_size, "Bytes of one packed row of activations.")
      .def_prop_ro(
          "buffer", [](nb::handle self) { return nb::cast<PackedMatrix&>(self).buffer(self); },
          "The packed bytes, writable.")
      .def("repack", &PackedMatrix::repack, "data"_a.none(), "scale"_a = nb::none(),
           "zero"_a = nb::none(), nb::kw_only(), "given"_a = nb::none(), "n_begin"_a, "n_end"_a,
           "Packs rows [n_begin, n_end) of another weight of the same shape.")
      .def("unpack", &PackedMatrix::unpack, "n_begin"_a = 0, "n_end"_a = nb::none(),
           "Rows [n_begin, n_end) as stored, f32.")
      .def(
          "exported", &PackedMatrix::exported, "cuts"_a = std::vector<size_t>(), "apart"_a = 0,
          "Data, scale and zero point in the stored format, as the bytes of their rows; packing\n"
          "them again gives the same matrix. With `cuts`, [0, ..., n] at n_step and whole groups,\n"
          "range by range; to rows with `apart` bytes between them. ValueError if the backend\n"
          "cannot.")
      .def("padded", &PackedMatrix::padded, "m"_a, "m rounded up to the variant's m_step.")
      .def("pack_act", &PackedMatrix::pack_act, "x"_a.none(),
           "Encoded rows, uint8 [padded m, act_size].")
      .def("pack_act_range", &PackedMatrix::pack_act_range, "x"_a.none(), "k_begin"_a, "k_end"_a,
           "act"_a.none(), "Encodes columns [k_begin, k_end) of x into `act`.")
      .def("unpack_act", &PackedMatrix::unpack_act, "act"_a.none(), "m"_a)
      .def("act_round_trip", &PackedMatrix::act_round_trip, "x"_a.none())
      .def("matmul", &PackedMatrix::matmul, "x"_a.none(), "n_begin"_a = 0, "n_end"_a = nb::none(),
           "ukernel"_a = nb::none(), "Encodes x and multiplies: f32 [m, n_end - n_begin].")
      .def("check_registers", &PackedMatrix::check_registers, "x"_a.none(), "n_begin"_a = 0,
           "n_end"_a = nb::none(), "ukernel"_a = nb::none(),
           "Multiplies as `matmul` does, and raises a RuntimeError with the names of registers "
           "that\n"
           "`run`, or `enter` and `leave` around it, left changed though they are the caller's by\n"
           "the calling convention (System V for x86-64, AAPCS64 for aarch64), of upper halves of\n"
           "vectors that were not zeroed, and of AMX tiles that were not released.")
      .def("run_raw", &PackedMatrix::run_raw, "act"_a.none(), "m"_a, "n_begin"_a, "n_end"_a,
           "dst"_a.none(), "ukernel"_a = nb::none(),
           "Multiplies encoded rows into the caller's memory.");
}

}  // namespace ktk
