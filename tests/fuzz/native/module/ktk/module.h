// In the place of native/include/ktk/module.h: the table of a backend's module without Python.
#pragma once

#include "ktk/variants.h"

#define KTK_BACKEND_MODULE(public_name, formats_, accepts_)                  \
  static constexpr const ktk_variant* kVariants[] = {KTK_VARIANT_ADDRESSES}; \
  extern const ktk_backend kFuzzedBackend;                                   \
  constexpr ktk_backend kFuzzedBackend = {                                   \
      .struct_size = sizeof(ktk_backend),                                    \
      .abi_major = KTK_ABI_MAJOR,                                            \
      .abi_minor = KTK_ABI_MINOR,                                            \
      .name = public_name,                                                   \
      .formats = formats_,                                                   \
      .num_formats = sizeof formats_ / sizeof *formats_,                     \
      .accepts = accepts_,                                                   \
      .num_accepts = sizeof accepts_ / sizeof *accepts_,                     \
      .variants = kVariants,                                                 \
      .num_variants = sizeof kVariants / sizeof *kVariants,                  \
  };
