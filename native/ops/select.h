// The element-wise operations for this CPU.
#pragma once

#include "ops/ops.h"
#include "ops/products.h"

namespace ktk {

// Those of the best instruction set that allowed_isa() covers. Throws std::runtime_error where
// there are none: on x86-64, below AVX2.
const ktk_ops& ops();
// The products of the same instruction set.
const ktk_products& products();

}  // namespace ktk
