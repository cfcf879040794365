// The packed layout is "u4-n32k8", drawn in codec/int4/layout.h. RAWINT4 fills it with the codes
// and scales of a checkpoint as they are: a dword of a row is a dword of the layout, without zero
// points. Activations have a scale per 32 values, the groups of the checkpoints this backend is
// for.
#pragma once

#include "codec/int4/act.h"
#include "codec/int4/layout.h"

namespace ktk::rawint4 {
namespace {

using Act = int4::Act<32, int4::ZeroPoints::kNever>;

}  // namespace
}  // namespace ktk::rawint4
