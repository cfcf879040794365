// What all variants share: the weight codec.
#pragma once

#include "kml/act.h"
#include "kml/kernel.h"
#include "kml/layout.h"
#include "kml/weight.h"
#include "ktk/backend.h"

namespace ktk::kml {
namespace {

struct WeightCodec {
  static constexpr auto kLayout = kml::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_weight;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = block_offset;
};

}  // namespace
}  // namespace ktk::kml
