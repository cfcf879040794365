// ktk/variants.h - the variants that a build has of a backend.
//
// The build passes -DKTK_BACKEND=<module> and -DKTK_VARIANTS(X)=X(isa) X(isa)... in the order of
// the backend's meson.build, best first.
#pragma once

#include "ktk/target.h"

#define KTK_VARIANT_OF_(isa) KTK_CONCAT(KTK_CONCAT(ktk_, KTK_BACKEND), KTK_CONCAT(_, isa))
#define KTK_DECLARE_VARIANT_(isa) extern "C" const ktk_variant KTK_VARIANT_OF_(isa);
#define KTK_VARIANT_ADDRESS_(isa) &KTK_VARIANT_OF_(isa),

KTK_VARIANTS(KTK_DECLARE_VARIANT_)

// Their addresses, with a comma behind each: what an array of them is initialised with.
#define KTK_VARIANT_ADDRESSES KTK_VARIANTS(KTK_VARIANT_ADDRESS_)

namespace ktk {
namespace {

// The table of a backend. The arrays must outlive it.
template <size_t kFormats, size_t kAccepts, size_t kVariants>
constexpr ktk_backend make_backend(const char* name, const ktk_format (&formats)[kFormats],
                                   const ktk_accept (&accepts)[kAccepts],
                                   const ktk_variant* const (&variants)[kVariants]) {
  return {
      .struct_size = sizeof(ktk_backend),
      .abi_major = KTK_ABI_MAJOR,
      .abi_minor = KTK_ABI_MINOR,
      .name = name,
      .formats = formats,
      .num_formats = kFormats,
      .accepts = accepts,
      .num_accepts = kAccepts,
      .variants = variants,
      .num_variants = kVariants,
  };
}

}  // namespace
}  // namespace ktk
