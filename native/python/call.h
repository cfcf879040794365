// The arrays of a call of a layer, as they come from Python.
#pragma once

#include <optional>
#include <vector>

#include "moe/layer.h"
#include "python/array.h"

namespace ktk {

using OptArray = std::optional<AnyArray>;

// A call's arrays, checked; the request points into them and into `weights`.
struct Call {
  Request request;
  std::vector<float> weights;  // when they did not come as f32
};

// Fills `call` from arrays; throws TypeError or ValueError with what was expected and what came.
void check_call(const Layer& layer, const AnyArray& hidden, const AnyArray& ids,
                const AnyArray& weights, const OptArray& mask, const AnyOutput& out, Call& call);

}  // namespace ktk
