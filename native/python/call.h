// Calls of a layer as they come from Python: their arrays, and handles on what was queued.
#pragma once

#include <optional>
#include <vector>

#include "moe/layer.h"
#include "python/array.h"
#include "python/gil.h"

namespace ktk {

using OptArray = std::optional<AnyArray>;

// A call's arrays, checked; the request points into them and into `converted`.
struct Call {
  // Throws TypeError or ValueError with what was expected and what came.
  Call(const Layer& layer, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle mask,
       nb::handle out);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  AnyArray hidden, ids, weights;
  OptArray mask;
  AnyOutput out;
  Request request;
  std::vector<float> converted;  // weights that did not come as f32
};

// Python's hold on what is waited for when it goes, with the GIL released: that may take as long as
// all that is queued before it.
template <typename Queued>
struct Awaited : Queued {
  using Queued::Queued;
  ~Awaited() {
    const Unlocked unlocked;
    try {
      this->wait();
    } catch (...) {  // nobody asked how it ended
    }
  }
};

}  // namespace ktk
