// In the place of native/include/ktk/module.h: the table of a backend's module without Python.
#pragma once

#include "ktk/variants.h"

#define KTK_BACKEND_MODULE(public_name, formats_, accepts_)                  \
  static constexpr const ktk_variant* kVariants[] = {KTK_VARIANT_ADDRESSES}; \
  extern const ktk_backend kFuzzedBackend;                                   \
  constexpr ktk_backend kFuzzedBackend =                                     \
      ktk::make_backend(public_name, formats_, accepts_, kVariants);
