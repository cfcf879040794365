// The activation functions by the names that users give them.
#pragma once

#include <array>
#include <string>

#include "ops/ops.h"

namespace ktk {

struct Activation {
  const char* name;
  ktk_activation kind;
};

inline constexpr std::array kActivations = {
    Activation{"silu", KTK_SILU},
    Activation{"swigluoai", KTK_SWIGLUOAI},
    Activation{"gelu_tanh", KTK_GELU_TANH},
};

// Throws std::invalid_argument with the names that there are.
ktk_activation activation_from_name(const std::string& name);

}  // namespace ktk
