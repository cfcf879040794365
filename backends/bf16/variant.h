// What all variants share: the weight codec, and how activations are kept.
#pragma once

#include "bf16/weight_codec.h"
#include "codec/act_rows.h"
#include "ktk/backend.h"

namespace ktk::bf16 {
namespace {

struct WeightCodec {
  static constexpr auto kLayout = bf16::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_weight;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = weight_offset;
  static constexpr auto write = export_weight;
};

using ActBf16 = ActRowsBf16<kStepDepth>;
using ActF32 = ActRowsF32<kStepDepth>;

}  // namespace
}  // namespace ktk::bf16
