// What all variants share but for what they pack.
#pragma once

#include "codec/int4/act.h"
#include "codec/int4/layout.h"
#include "codec/int4/weight.h"
#include "ktk/backend.h"

namespace ktk::int4 {
namespace {

struct WeightCodec {
  static constexpr auto kLayout = int4::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_ready;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = block_offset;
  static constexpr auto write = export_weight;
};

}  // namespace
}  // namespace ktk::int4
