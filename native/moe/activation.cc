#include "moe/activation.h"

#include <stdexcept>

namespace ktk {

ktk_activation activation_from_name(const std::string& name) {
  std::string known;
  for (const Activation& one : kActivations) {
    if (name == one.name) return one.kind;
    known += (known.empty() ? "" : ", ") + std::string(one.name);
  }
  throw std::invalid_argument("activation must be one of " + known + ", got '" + name + "'");
}

}  // namespace ktk
