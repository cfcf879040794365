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
