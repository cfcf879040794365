// What a layer of experts is, independent of backend and machine.
#pragma once

#include <cstddef>
#include <cstdint>

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
  // Ids from num_experts on that name a zero expert: one that returns what goes in.
  size_t zero_experts = 0;

  bool is_expert(int64_t id) const { return id >= 0 && id < static_cast<int64_t>(num_experts); }
  bool is_zero_expert(int64_t id) const {
    const auto first = static_cast<int64_t>(num_experts);
    return id >= first && id - first < static_cast<int64_t>(zero_experts);
  }
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
  visit("zero_expert_num", config.zero_experts);
  visit_fields(config.glu, visit);
}

}  // namespace ktk
