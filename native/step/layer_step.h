// A layer of a model with one token, from the hidden state to the hidden state.
#pragma once

#include <cstddef>

#include "moe/layer.h"
#include "moe/router.h"
#include "step/attention_step.h"
#include "step/norm.h"

namespace ktk {

// A router with the experts that it chooses from.
struct RoutedExperts {
  Layer& experts;
  Router router;
  size_t top_k;
  ktk_element scores;  // what these are rounded to

  // Rows [0, tokens) of x.
  void forward(const Rows& x, size_t tokens, const Rows& out) const;
};

//   x --+-- norm -- attention --+-- norm -- block --+-- out
//       +----------------------sum------------------+
//
// All are rounded to the type of x. `call.x` is what is given; attention has its norm.
void layer_step(AttentionStep& attention, AttentionStep::Call call, Norm& before, Norm& between,
                const RoutedExperts& block, const Rows& out);

}  // namespace ktk
