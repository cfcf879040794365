// The build passes -DKTK_BACKEND and -DKTK_VARIANTS as to a backend's module, and -DKTK_GIVEN, the
// formats of weights to load.
#include "backend.h"

#include <array>
#include <iterator>

#include "ktk/variants.h"

namespace {

constexpr const ktk_variant* kVariants[] = {KTK_VARIANT_ADDRESSES};
constexpr ktk_format kFormats[] = {KTK_GIVEN};
constexpr auto kAccepts = [] {
  std::array<ktk_accept, std::size(kFormats)> accepts{};
  for (uint32_t i = 0; i < accepts.size(); ++i) accepts[i] = {kFormats[i], i};
  return accepts;
}();

}  // namespace

constinit const ktk_backend kBackend = {
    .struct_size = sizeof(ktk_backend),
    .abi_major = KTK_ABI_MAJOR,
    .abi_minor = KTK_ABI_MINOR,
    .name = KTK_STRING(KTK_BACKEND),
    .formats = kFormats,
    .num_formats = std::size(kFormats),
    .accepts = kAccepts.data(),
    .num_accepts = kAccepts.size(),
    .variants = kVariants,
    .num_variants = std::size(kVariants),
};
constinit const std::span<const ktk_format> kGiven = kFormats;
