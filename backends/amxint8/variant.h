// What all variants share: the weight codec.
#pragma once

#include "amxint8/act.h"
#include "amxint8/layout.h"
#include "amxint8/weight.h"
#include "ktk/backend.h"

namespace ktk::amxint8 {
namespace {

struct WeightCodec {
  static constexpr auto kLayout = amxint8::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_weight;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = weight_offset;
  static constexpr auto write = export_weight;
};

}  // namespace
}  // namespace ktk::amxint8
