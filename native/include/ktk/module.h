// ktk/module.h - turns the variants of a backend into a nanobind module.
//
// The build passes -DKTK_BACKEND and -DKTK_VARIANTS(X), see variants.h.
#pragma once

#include <nanobind/nanobind.h>

#include "ktk/variants.h"

// Defines the module that offers the backend `public_name`, which stores `formats_` and takes
// `accepts_` (two constexpr arrays), to ktk.
#define KTK_BACKEND_MODULE(public_name, formats_, accepts_)                               \
  static constexpr const ktk_variant* kVariants[] = {KTK_VARIANT_ADDRESSES};              \
  static constexpr ktk_backend kBackend =                                                 \
      ktk::make_backend(public_name, formats_, accepts_, kVariants);                      \
  NB_MODULE(KTK_BACKEND, m) {                                                             \
    m.def(                                                                                \
        "__ktk_backend__", [] { return nanobind::capsule(&kBackend, KTK_CAPSULE_NAME); }, \
        "Return the backend table as a PyCapsule.");                                      \
  }
