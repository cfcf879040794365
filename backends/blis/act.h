// Rows of int8 with a scale per 512 values (codec/int8/act.h), for both variants; k is padded
// to 64.
#pragma once

#include "blis/layout.h"
#include "codec/int8/act.h"

namespace ktk::blis {
namespace {

using Act = ActInt8<kDepth, kCodes>;

}  // namespace
}  // namespace ktk::blis
