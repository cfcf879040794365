// The backward pass of a dense layer with a frozen weight.
#pragma once

#include <cstddef>

#include "dense/linear.h"
#include "moe/rows.h"
#include "train/transposed.h"

namespace ktk {

// dx[tokens][k] = dy[tokens][n] x weight. The same bits come out for any number of workers. `dx`
// may not overlap `dy`. Throws std::runtime_error where nothing is loaded.
void backward(Linear& linear, const FloatBackend& floats, const Rows& dy, const Rows& dx,
              size_t tokens);

}  // namespace ktk
