// The build passes -DKTK_BACKEND and -DKTK_VARIANTS as to a backend's module, and -DKTK_GIVEN, the
// formats of weights to load.
#include "backend.h"

#include <iterator>

#include "ktk/variants.h"

namespace {

constexpr const ktk_variant* kVariants[] = {KTK_VARIANT_ADDRESSES};
// What the backend is given, and stores in one of its formats: a backend with a single one does not
// look at it, and takes bf16 for all that it stores.
constexpr ktk_format kFormats[] = {KTK_GIVEN};

struct Accepts {
  ktk_accept each[std::size(kFormats)];

  constexpr Accepts() : each{} {
    for (uint32_t i = 0; i < std::size(kFormats); ++i) each[i] = {kFormats[i], i};
  }
};
constexpr Accepts kAccepts;

}  // namespace

constinit const ktk_backend kBackend =
    ktk::make_backend(KTK_STRING(KTK_BACKEND), kFormats, kAccepts.each, kVariants);
