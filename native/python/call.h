// Calls of a layer as they come from Python: their arrays, and handles on what was queued.
#pragma once

#include <optional>
#include <vector>

#include "moe/layer.h"
#include "python/array.h"
#include "python/gil.h"

namespace ktk {

using OptArray = std::optional<AnyArray>;

// A call's arrays, checked; the request points into them and into `weights`.
struct Call {
  Request request;
  std::vector<float> weights;  // when they did not come as f32
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

// Fills `call` from arrays; throws TypeError or ValueError with what was expected and what came.
void check_call(const Layer& layer, const AnyArray& hidden, const AnyArray& ids,
                const AnyArray& weights, const OptArray& mask, const AnyOutput& out, Call& call);

}  // namespace ktk
