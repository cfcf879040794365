// One call of a dense layer: encode, multiply, add the bias, write in the caller's type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dense/plan.h"
#include "dense/weights.h"
#include "moe/engine.h"
#include "moe/rows.h"

namespace ktk {

// Computes rows [0, tokens) with the workers of `engine`, one chunk after the other. The caller
// holds engine.turn(), and x and out do not overlap. The same bits come out for any number of
// workers, and for a row whatever rows stand beside it.
void forward(Engine& engine, const Variant& variant, const DenseWeights& weights, DensePlan& plan,
             const Rows& x, const Rows& out, size_t tokens);

// One of several layers that are computed together.
struct DenseCall {
  const Variant& variant;
  const DenseWeights& weights;
  DensePlan& plan;
  const Rows& out;
};

// As forward() of each call, for so few tokens that no call needs a barrier: a worker goes from one
// layer to the next without waiting for others. The caller holds engine.turn().
void forward_few(Engine& engine, std::span<const DenseCall> calls, const Rows& x, size_t tokens);

// Writes rows of the weight, as it is stored, to rows of `out`. All ids are rows of the weight. The
// caller holds engine.turn().
void look_up(Engine& engine, const Variant& variant, const DenseWeights& weights,
             std::span<const int64_t> ids, const Rows& out);

}  // namespace ktk
