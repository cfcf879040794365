// ktk/module.h - turns the variants of a backend into a nanobind module.
//
// The build passes -DKTK_BACKEND=<module> and -DKTK_VARIANTS(X)=X(isa) X(isa)... in the order of
// the backend's meson.build, best first.
#pragma once

#include <nanobind/nanobind.h>

#include "ktk/target.h"

#define KTK_VARIANT_OF(isa) KTK_CONCAT(KTK_CONCAT(ktk_, KTK_BACKEND), KTK_CONCAT(_, isa))
#define KTK_DECLARE_(isa) extern "C" const ktk_variant KTK_VARIANT_OF(isa);
#define KTK_ADDRESS_(isa) &KTK_VARIANT_OF(isa),

KTK_VARIANTS(KTK_DECLARE_)

// Defines the module that offers the backend `public_name`, which stores `formats_` and takes
// `accepts_` (two constexpr arrays), to ktk.
#define KTK_BACKEND_MODULE(public_name, formats_, accepts_)                               \
  static constexpr const ktk_variant* kVariants[] = {KTK_VARIANTS(KTK_ADDRESS_)};         \
  static constexpr ktk_backend kBackend = {                                               \
      .struct_size = sizeof(ktk_backend),                                                 \
      .abi_major = KTK_ABI_MAJOR,                                                         \
      .abi_minor = KTK_ABI_MINOR,                                                         \
      .name = public_name,                                                                \
      .formats = formats_,                                                                \
      .num_formats = sizeof formats_ / sizeof *formats_,                                  \
      .accepts = accepts_,                                                                \
      .num_accepts = sizeof accepts_ / sizeof *accepts_,                                  \
      .variants = kVariants,                                                              \
      .num_variants = sizeof kVariants / sizeof *kVariants,                               \
  };                                                                                      \
  NB_MODULE(KTK_BACKEND, m) {                                                             \
    m.def(                                                                                \
        "__ktk_backend__", [] { return nanobind::capsule(&kBackend, KTK_CAPSULE_NAME); }, \
        "Return the backend table as a PyCapsule.");                                      \
  }
