// What all variants share: the weight codec, and how activations are kept.
#pragma once

#include "codec/act_rows.h"
#include "codec/scaled/variant.h"
#include "ktk/backend.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

using WeightCodec = ScaledWeights<Formats>;
using ActBf16 = ActRowsBf16<kStepDepth>;
using ActF32 = ActRowsF32<kStepDepth>;

}  // namespace
}  // namespace ktk::mxfp4
