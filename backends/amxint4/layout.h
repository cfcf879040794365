// The packed layout is "u4-n32k8", drawn in codec/int4/layout.h. AMXINT4 fills it with codes that
// it makes from floats, or with those of a checkpoint, zero points included. Activations have a
// scale per 128 values.
#pragma once

#include "codec/int4/act.h"
#include "codec/int4/layout.h"

namespace ktk::amxint4 {
namespace {

using Act = int4::Act<128, int4::ZeroPoints::kPossibly>;

}  // namespace
}  // namespace ktk::amxint4
