// Experts that return what goes in: ids behind those of the experts, if a layer has such.
#pragma once

#include <cstddef>

#include "moe/config.h"
#include "moe/engine.h"
#include "moe/route.h"
#include "moe/rows.h"

namespace ktk {

// Adds to sums[columns] what the zero experts of a token of `route` make of columns [column,
// column + columns) of its row of `from`: routing weights times these. `scratch` has room for as
// many floats.
void add_passed(const Route& route, size_t token, const Rows& from, size_t row, size_t column,
                size_t columns, float* scratch, float* sums);

// Writes to rows [begin, end) of `out` what the zero experts of these tokens alone add up to:
// routing weights times rows of `from`. `route` is of these tokens. The same bits as where
// experts that have nothing to do add theirs.
void pass_through(Engine& engine, const Config& config, const Route& route, const Rows& from,
                  const Rows& out, size_t begin, size_t end);

// Writes the gradients of the routing weights of zero experts to `gradients` [tokens, top_k], of
// which `begin` is the first token of `route`: products of rows of `hidden` and of the output's
// gradient. Other entries stay.
void pass_gradients(Engine& engine, const Config& config, const Route& route, const Rows& hidden,
                    const Rows& gradient_of_out, size_t begin, size_t top_k, float* gradients);

}  // namespace ktk
