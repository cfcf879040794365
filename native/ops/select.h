// The element-wise operations for this CPU.
#pragma once

#include "ops/ops.h"

namespace ktk {

// Those of the best instruction set that allowed_isa() covers. Throws std::runtime_error where
// there are none: on x86-64, below AVX2.
const ktk_ops& ops();

}  // namespace ktk
