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
  bool gated = true;  // without a gate, experts have no such matrix, and the function is that of up
  bool weight_on_input = false;  // routing weights multiply what goes into experts, not the result

  // Products of the hidden states: of gate, where there is one, and of up.
  size_t first_products() const { return gated ? 2 : 1; }
};

// Calls visit(name, value) for each field of ktk.MoEConfig.
template <class Visit>
void visit_fields(Config& config, Visit visit) {
  visit("num_experts", config.num_experts);
  visit("num_experts_per_tok", config.top_k);
  visit("hidden_size", config.hidden);
  visit("intermediate_size", config.intermediate);
  visit("gated", config.gated);
  visit("apply_router_weight_on_input", config.weight_on_input);
  visit_fields(config.glu, visit);
}

}  // namespace ktk
