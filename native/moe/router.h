// Which experts a token goes to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/engine.h"
#include "moe/rows.h"

namespace ktk {

// A router whose scores are a softmax over all experts, or over the chosen ones.
struct Router {
  const Rows& weight;  // [experts][k]
  const char* bias;    // [experts], of the type of weight; may be NULL
  size_t experts, k;
  bool chosen_only;  // whether the scores of a token add up to 1
};

// For rows [0, tokens) of x, in the caller's thread, or with the products of all workers of an
// engine on which the caller has the turn, to the same bits: logits[experts], rounded to their
// type, and of the `top_k` largest of them, the largest first, scores[top_k] and ids[top_k]. The
// lower number goes first among equals; NaN counts as largest, and makes all scores of its token
// NaN.
void choose_experts(const Router& router, const Rows& x, size_t tokens, size_t top_k,
                    const Rows& logits, const Rows& scores, int64_t* ids, Engine* engine = nullptr);

}  // namespace ktk
