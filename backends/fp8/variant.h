// What all variants share: the weight codec, and how activations are kept.
#pragma once

#include "codec/act_rows.h"
#include "codec/scaled/variant.h"
#include "fp8/layout.h"
#include "ktk/backend.h"

namespace ktk::fp8 {
namespace {

using WeightCodec = ScaledWeights<Formats>;

// Depth is cut where blocks of scales end.
struct ActBf16 : ActRowsBf16<kStepDepth> {
  static constexpr uint32_t kKStep = BlockScales::kGroupDepth;
};
struct ActF32 : ActRowsF32<kStepDepth> {
  static constexpr uint32_t kKStep = BlockScales::kGroupDepth;
};

}  // namespace
}  // namespace ktk::fp8
