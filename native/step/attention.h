// Attention of one new token over all that came before it and itself.
#pragma once

#include <cstddef>

#include "format/elements.h"
#include "moe/engine.h"

namespace ktk {

// Query heads that share heads of keys and values: an equal number of them each, side by side.
struct Heads {
  size_t queries, shared;
  size_t depth;   // of a row of any of them
  float scaling;  // of scores

  size_t together() const { return queries / shared; }
};

// Keys or values: of each shared head, a row for each token. Distances are in elements.
struct Past {
  const void* data;
  ktk_element type;
  size_t head, row;
};

// out[queries][depth] is the mean of values, each weighted with e^(scaling * query . key), all in
// f32. Any number of workers gives the same bits. The caller has the turn on the engine.
void attend(Engine& engine, const Heads& heads, const float* query, const Past& keys,
            const Past& values, size_t tokens, float* out);

}  // namespace ktk
