// What a layer of experts is, independent of backend and machine.
#pragma once

#include <cstddef>

#include "ops/ops.h"

namespace ktk {

struct Config {
  size_t num_experts = 0;
  size_t top_k = 0;
  size_t hidden = 0;
  size_t intermediate = 0;
  ktk_glu glu{};
};

}  // namespace ktk
