// Which tokens each expert computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moe/config.h"

namespace ktk {

// The choice of experts for tokens [0, tokens), as the router gives it. Rows may be strided.
struct Choice {
  const void* ids = nullptr;  // int32 or int64
  bool ids_64 = false;
  size_t ids_stride = 0;  // elements
  const float* weights = nullptr;
  size_t weights_stride = 0;
  size_t tokens = 0, top_k = 0;

  int64_t id(size_t token, size_t slot) const {
    const size_t at = token * ids_stride + slot;
    return ids_64 ? static_cast<const int64_t*>(ids)[at] : static_cast<const int32_t*>(ids)[at];
  }
};

// Rows sorted by expert. A row is one (token, expert) pair; within an expert, rows are in the order
// of tokens, and a token that names an expert twice has two rows.
struct Route {
  struct Active {
    uint32_t expert;
    uint32_t first, count;  // rows [first, first + count)
  };
  std::vector<Active> active;    // by expert; only those with rows
  std::vector<uint32_t> tokens;  // of each row
  std::vector<uint32_t> slots;   // of each row: which of its token's choices it is
  // Factors of each row: of what its expert returns, and of what goes in. The routing weight is one
  // of them and the other is 1, which `input_weights` does not store.
  std::vector<float> weights, input_weights;

  // A zero expert that a token names. It has no row: what it adds is the routing weight times x,
  // wherever the routing weight multiplies.
  struct Passed {
    uint32_t token, slot;
    float weight;
  };
  std::vector<Passed> passed;  // in the order of tokens, then of their slots

  // The zero experts of a token.
  std::span<const Passed> passed_of(size_t token) const;

  // Of a row.
  uint32_t expert_of(size_t row) const;

  bool weighs_input() const { return !input_weights.empty(); }
  float input_weight(size_t row) const { return weighs_input() ? input_weights[row] : 1; }

  // Sorts tokens [begin, end) of `choice`. Ids outside the layer's experts and experts whose `skip`
  // is set have no rows; `skip` holds one byte per expert, and none for zero experts.
  void build(const Choice& choice, size_t begin, size_t end, const Config& config,
             std::span<const uint8_t> skip);

 private:
  std::vector<uint32_t> next_;    // per expert: count, then the next free row
  std::vector<uint32_t> chosen_;  // per token and slot: the expert that computes it
};

}  // namespace ktk
