// The arrays of a call as they come from Python.
#pragma once

#include <optional>
#include <vector>

#include "moe/layer.h"
#include "python/array.h"

namespace ktk {

using OptArray = std::optional<AnyArray>;

// What a call reads, checked; the request points into these arrays and `converted`.
struct CallInputs {
  // Throws TypeError or ValueError with what was expected and what came.
  CallInputs(const Layer& layer, nb::handle hidden, nb::handle ids, nb::handle weights,
             nb::handle mask);
  CallInputs(const CallInputs&) = delete;
  CallInputs& operator=(const CallInputs&) = delete;

  AnyArray hidden, ids, weights;
  OptArray mask;
  Request request;
  std::vector<float> converted;  // weights that did not come as f32
};

// And what it writes.
struct Call : CallInputs {
  Call(const Layer& layer, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle mask,
       nb::handle out);

  // Copies `hidden` where `out` may share some of its memory, unless it is `hidden` itself: workers
  // write rows while others still read theirs.
  void separate();

  AnyOutput out;
  std::vector<char> copied;  // rows of `hidden`
};

}  // namespace ktk
