// KML: int8 weights with a scale per row on aarch64, quantised from floats when loaded, or ready.
// Products are our own, or those of the Kunpeng Math Library where that is found.
#include "library/module.h"

#include "codec/int8/formats.h"
#include "kml/find.h"
#include "ktk/variants.h"

namespace ktk::kml {
namespace {

// The table, and all that it points at. Never destroyed: workers may be in the library when the
// process ends.
struct Table {
  Found found = find();
  std::vector<const ktk_variant*> variants;
  ktk_backend backend{};

  Table() {
    if (found.library) variants.push_back(library_variant(&found.calls));
    variants.insert(variants.end(), {KTK_VARIANT_ADDRESSES});
    backend = {
        .struct_size = sizeof(ktk_backend),
        .abi_major = KTK_ABI_MAJOR,
        .abi_minor = KTK_ABI_MINOR,
        .name = "KML",
        .formats = kInt8Formats,
        .num_formats = std::size(kInt8Formats),
        .accepts = kInt8Accepts,
        .num_accepts = std::size(kInt8Accepts),
        .variants = variants.data(),
        .num_variants = variants.size(),
    };
  }
};

const Table& table() {
  static const Table* const made = new Table;
  return *made;
}

nanobind::capsule backend() {
  if (!table().found.warning.empty()) warn(table().found.warning);
  return nanobind::capsule(&table().backend, KTK_CAPSULE_NAME);
}

nanobind::object library() {
  return table().found.library ? nanobind::object(to_dict(table().found.facts)) : nanobind::none();
}

}  // namespace
}  // namespace ktk::kml

NB_MODULE(KTK_BACKEND, m) {
  m.def("__ktk_backend__", ktk::kml::backend,
        "Look for the library and return the backend table as a PyCapsule.");
  m.def("__ktk_library__", ktk::kml::library,
        "Return what there is to say about the library; None where there is none.");
}
