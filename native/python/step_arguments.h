// Arguments of calls that compute a part of a model for one token.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "python/array.h"
#include "python/flat.h"
#include "step/attention_step.h"
#include "step/layer_step.h"

namespace ktk {

// Of an RMS norm: epsilon, offset, early.
using NormKind = std::tuple<float, float, bool>;
using OptNormKind = std::optional<NormKind>;

struct BoundAttention {
  AttentionStep step;
  OptNormKind q_norm, k_norm;
};

// n floats side by side; n -1: any number.
AnyArray vector_from(const char* name, nb::handle given, int64_t n);

Norm norm_from(const char* name, nb::handle weight, const NormKind& kind, size_t n);

// What attention is handed beside its input, for as long as it computes.
struct AttentionArguments {
  // Throws TypeError or ValueError; `type` is that of the input.
  AttentionArguments(BoundAttention& bound, ktk_element type, nb::handle cosine, nb::handle sine,
                     nb::handle q_norm, nb::handle k_norm, nb::handle keys, nb::handle values,
                     size_t position);
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;

  // Memory of a layer's keys or values, [1, shared heads, room, depth].
  struct Room {
    Room(const char* name, nb::handle given, const Heads& heads, ktk_element type, size_t position);

    AnyOutput array;
    Past past;
  };

  Room keys, values;
  std::optional<Norm> q_norm, k_norm;
  std::optional<Rotary> rotary;
  AttentionStep::Call call;  // without its input
};

// Of a router, [experts, hidden], and how it chooses.
struct RouterArguments {
  // Throws TypeError or ValueError; `type` is that of the input.
  RouterArguments(Layer& layer, ktk_element type, nb::handle weight, nb::handle bias, size_t top_k,
                  bool chosen_only, bool scores_in_f32);
  RouterArguments(const RouterArguments&) = delete;
  RouterArguments& operator=(const RouterArguments&) = delete;

  InputRows weight;
  std::optional<AnyArray> bias;
  RoutedExperts block;

 private:
  static InputRows weight_of(const Layer& layer, nb::handle given);
};

}  // namespace ktk
