// Which experts of a token may finish one layer later.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/route.h"

namespace ktk {

struct Deferral {
  // Of each token's top_k entries, those with the `most` lowest weights are deferred: among equal
  // weights those that stand later, and a NaN counts as the highest weight.
  size_t most = 0;
  // kt-kernel's rule: an entry is only deferred where no token of the call has its expert among
  // those that are not.
  bool batch_union = false;
};

// Ids [tokens, top_k] with -1 in place of the entries that belong to the other half. Zero experts
// stay, whatever their weights are: there is nothing to wait for.
struct Halves {
  std::vector<int64_t> now, later;
};

Halves split_deferred(const Choice& choice, const Deferral& deferral, const Config& config);

}  // namespace ktk
