// The arrays of a call as they come from Python.
#pragma once

#include <optional>
#include <vector>

#include "moe/layer.h"
#include "python/array.h"

namespace ktk {

using OptArray = std::optional<AnyArray>;

// A call's arrays, checked; the request points into them, `converted` and `copied`.
struct Call {
  // Throws TypeError or ValueError with what was expected and what came.
  Call(const Layer& layer, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle mask,
       nb::handle out, const char* out_name = "out");
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Copies `hidden` where `out` may share some of its memory, unless it is `hidden` itself: workers
  // write rows while others still read theirs.
  void separate();

  AnyArray hidden, ids, weights;
  OptArray mask;
  AnyOutput out;
  Request request;
  std::vector<float> converted;  // weights that did not come as f32
  std::vector<char> copied;      // rows of `hidden`
};

}  // namespace ktk
