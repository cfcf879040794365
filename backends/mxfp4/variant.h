// What all variants share: the weight codec, and how activations are kept.
#pragma once

#include "codec/act_rows.h"
#include "ktk/backend.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

struct WeightCodec {
  static constexpr auto kLayout = mxfp4::kLayout;
  static constexpr uint32_t kNStep = kBlockCols;
  static constexpr auto size = Layout::size;
  static constexpr auto pack = Codec::pack;
  static constexpr auto unpack = Codec::unpack;
  static constexpr auto offset = Layout::offset;
  static constexpr auto write = Codec::write;
};

using ActBf16 = ActRowsBf16<kStepDepth>;
using ActF32 = ActRowsF32<kStepDepth>;

}  // namespace
}  // namespace ktk::mxfp4
