// BLIS: int8 weights with a scale per row, multiplied by a BLAS library that is found at run time.
#include "library/module.h"

#include "blis/find.h"
#include "codec/int8/formats.h"
#include "ktk/target.h"

#define KTK_KERNELS_OF(isa) KTK_CONCAT(KTK_CONCAT(ktk_, KTK_BACKEND), KTK_CONCAT(_, isa))
#define KTK_DECLARE_KERNELS(isa) extern "C" const ktk::blis::Kernels KTK_KERNELS_OF(isa);
#define KTK_KERNELS_ADDRESS(isa) &KTK_KERNELS_OF(isa),

KTK_VARIANTS(KTK_DECLARE_KERNELS)

namespace ktk::blis {
namespace {

// One instruction set: what counts runs in the library.
constexpr const Kernels* kKernels[] = {KTK_VARIANTS(KTK_KERNELS_ADDRESS)};
static_assert(sizeof kKernels == sizeof *kKernels);

// The table, and all that it points at.
class Table {
 public:
  Table() : found_(find()) {
    if (!found_.failure.empty()) return;
    const Kernels& kernels = *kKernels[0];
    kernels.use(&found_.calls);
    lpgemm_ = kernels.lpgemm_int8;
    lpgemm_.layout = found_.layout.c_str();
    if (found_.lpgemm) variants_[num_variants_++] = &lpgemm_;
    if (found_.sgemm) variants_[num_variants_++] = &kernels.sgemm;
  }

  ktk_backend backend() const {
    return {
        .struct_size = sizeof(ktk_backend),
        .abi_major = KTK_ABI_MAJOR,
        .abi_minor = KTK_ABI_MINOR,
        .name = "BLIS",
        .formats = kInt8Formats,
        .num_formats = std::size(kInt8Formats),
        .accepts = kInt8Accepts,
        .num_accepts = std::size(kInt8Accepts),
        .variants = variants_,
        .num_variants = num_variants_,
    };
  }

  const Found& found() const { return found_; }

 private:
  Found found_;
  ktk_variant lpgemm_{};
  const ktk_variant* variants_[2] = {};
  size_t num_variants_ = 0;
};

// Never destroyed: a table outlives the process, and workers may be in the library when it ends.
const Table& table() {
  static const Table* const made = new Table;
  return *made;
}

nanobind::capsule backend() {
  static const ktk_backend made = table().backend();
  const Found& found = table().found();
  if (!found.failure.empty()) raise_unsupported(found.failure, found.brief, found.advice);
  if (!found.warning.empty()) warn(found.warning);
  return nanobind::capsule(&made, KTK_CAPSULE_NAME);
}

}  // namespace
}  // namespace ktk::blis

NB_MODULE(KTK_BACKEND, m) {
  m.def("__ktk_backend__", ktk::blis::backend,
        "Find a library and return the backend table as a PyCapsule.");
  m.def(
      "__ktk_library__", [] { return ktk::to_dict(ktk::blis::table().found().facts); },
      "Return what there is to say about the library.");
}
